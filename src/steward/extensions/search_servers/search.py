"""Script search on a search server: builds queries, and verifies every hit with the matcher.

:class:`SearchServerSearcher` offers the catalog's search interface for a sink. The query may match
too much, but never too little: the server returns candidates, newest first, and Steward tests each
script itself. Rights are checked first: a script that the caller may not read is not even fetched.
``_check_uses`` does this: ``_fetch_hit_pages`` queries the server, ``_fetch_texts`` fetches the
scripts.

Text is found anywhere, also inside a word, as in the catalog. The server knows only words, so the
query requires every run of letters of the text as a word (``script.letters``), or as the end or
beginning of one where the text begins or ends within it.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from steward.archive.catalog.matches import TermMatcher
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import (
    CheckedUses,
    HitPage,
    OwnerFilter,
    UseFilter,
    UsePosition,
    collect_page,
    count_hits,
)
from steward.archive.errors import ArchiveUnavailable
from steward.core.errors import UsageError
from steward.core.timestamps import to_micros
from steward.extensions.search_servers.client import SearchClient, decode_reply
from steward.extensions.search_servers.index_template import check_product
from steward.extensions.search_servers.settings import SearchSinkSettings

_LETTERS: Final = re.compile(r"[a-z]+")
_DIGITS: Final = re.compile(r"[0-9]+")
_BRACKET_SET: Final = re.compile(r"\[!?+\]?+[^\]]*\]")
_WILDCARD: Final = re.compile(r"[*?]")
_WILDCARD_RUN: Final = re.compile(r"[*?]+")
_MIN_PARTIAL_LETTERS: Final = 3
"""Fewest letters of an open-ended word to search for."""
_MAX_CLAUSES: Final = 64
"""Most conditions of a query."""
_MAX_VALUES: Final = 1000
"""Most values of one condition."""
_MAX_VALUE_LENGTH: Final = 1024
"""Longest value of a condition, in characters."""
_MAX_NS: Final = 2**63 - 1

SearchQuery = dict[str, Any]


def script_conditions(matcher: TermMatcher) -> list[SearchQuery]:
    """Build conditions that every script with all terms meets; empty where there are none."""
    clauses: dict[str, SearchQuery] = {}
    for term in matcher.terms:
        clauses.update(_term_conditions(term, words=matcher.words))
    return list(clauses.values())[:_MAX_CLAUSES]


def use_conditions(use_filter: UseFilter) -> list[SearchQuery]:
    """Build conditions for the jobs to search: owner, cluster, names, times and so on.

    Raises:
        UsageError: The search names too many values for a server.
    """
    conditions: list[SearchQuery] = []
    if use_filter.owner is not None:
        conditions.append(_owner_condition(use_filter.owner))
    for field, values in (
        ("cluster", use_filter.clusters),
        ("account", use_filter.accounts),
        ("partition", use_filter.partitions),
    ):
        if values:
            conditions.append({"terms": {field: _limit_values(values, f"{field}s")}})
    if use_filter.users or use_filter.uids:
        users = {"terms": {"user": _limit_values(use_filter.users, "users")}}
        uids = {"terms": {"uid": _limit_values(use_filter.uids, "uids")}}
        conditions.append(_match_any([users, uids]))
    if use_filter.names:
        conditions.append(
            _match_any([_pattern_condition("name", name) for name in use_filter.names])
        )
    if use_filter.keys is not None:
        conditions.append({"terms": {"key": sorted({key for _, key in use_filter.keys})}})
    times = {}
    if use_filter.since is not None:
        times["gte"] = to_micros(use_filter.since) * 1000
    if use_filter.until is not None:
        times["lt"] = to_micros(use_filter.until) * 1000
    if times:
        conditions.append({"range": {"spool_mtime_ns": times}})
    return conditions


NEWEST_FIRST: Final = [
    {"spool_mtime_ns": {"order": "desc", "unmapped_type": "long"}},
    {"key": {"order": "desc", "unmapped_type": "keyword"}},
    {"cluster": {"order": "desc", "unmapped_type": "keyword"}},
]
"""Sort order of hits, as the catalog's."""


def search_after_values(position: UsePosition) -> list[Any]:
    """Build ``search_after`` for the hits behind a place in that order."""
    at, key, cluster = position
    digits = key.rpartition(":")[2]
    # A place has microseconds; the key has the full time in ns.
    ns = int(digits) if digits.isdecimal() and len(digits) < 20 else at * 1000
    return [min(ns, _MAX_NS), key, cluster]


def _limit_values(values: Sequence[Any], plural_name: str) -> list[Any]:
    """Return values for a condition; raise UsageError for too many."""
    if len(values) > _MAX_VALUES:
        raise UsageError(
            f"{len(values)} {plural_name} are too many for one search of a sink: give at most "
            f"{_MAX_VALUES}",
            plural_name,
        )
    # Drop values longer than any name: they would only burden the server.
    return [
        value for value in values if not isinstance(value, str) or len(value) <= _MAX_VALUE_LENGTH
    ]


def _owner_condition(owner: OwnerFilter) -> SearchQuery:
    """Build the condition for jobs that belong to a user or to their accounts."""
    conditions: list[SearchQuery] = [{"terms": {"account": list(owner.accounts)}}]
    if owner.uid is not None:
        user_conditions: list[SearchQuery] = [
            {"term": {"uid": owner.uid}},
            {"term": {"user": owner.user}},
        ]
        conditions.append({"bool": {"filter": user_conditions}})
    return _match_any(conditions)


def _match_any(conditions: list[SearchQuery]) -> SearchQuery:
    return {"bool": {"should": conditions, "minimum_should_match": 1}}


def _pattern_condition(field: str, pattern: str) -> SearchQuery:
    """Build a condition for a shell pattern; it may match more, since hits are tested again.

    A server knows no ``[…]``, takes a backslash as an escape, and builds an automaton: without a
    ``?`` behind a ``*`` it has no more states than the pattern has letters.
    """
    simplified = _BRACKET_SET.sub("?", pattern)
    if not _WILDCARD.search(simplified):
        return {"term": {field: {"value": simplified}}}
    prefix, star, rest = simplified.replace("\\", "\\\\").partition("*")
    value = prefix + _WILDCARD_RUN.sub("*", star + rest)
    return {"wildcard": {field: {"value": value}}}


def _term_conditions(term: str, *, words: bool) -> dict[str, SearchQuery]:
    """Build the conditions for one search term, by key to drop duplicates."""
    text = term.lower()
    conditions: dict[str, SearchQuery] = {}
    for match in _LETTERS.finditer(text):
        begin, end = match.span()
        open_left = not words if begin == 0 else text[begin - 1].isalpha()
        open_right = not words if end == len(text) else text[end].isalpha()
        if len(match[0]) >= _MIN_PARTIAL_LETTERS or not (open_left or open_right):
            conditions[repr((match[0], open_left, open_right))] = _word_condition(
                "script.letters", match[0], open_left, open_right
            )
    if not conditions:
        # Numbers only, or letters so few that nearly every script has a word with them.
        for match in _DIGITS.finditer(text):
            conditions[repr(match[0])] = _word_condition("script", match[0], True, True)
    return conditions


def _word_condition(field: str, text: str, open_left: bool, open_right: bool) -> SearchQuery:
    """Build the condition for a word, open on the left or right."""
    if open_left:
        return {"wildcard": {field: {"value": f"*{text}*" if open_right else f"*{text}"}}}
    return {"prefix" if open_right else "term": {field: {"value": text}}}


_PAGE_HITS: Final = 200
"""Hits fetched in one request."""
_MAX_FETCH_BYTES: Final = 4 << 20
"""Bytes of scripts fetched in one request."""
_MAX_KEYS: Final = 10_000
"""Most jobs that a search may name."""
_SCRIPT_KEY_PATTERN: Final = re.compile(r"script:\d{1,19}:\d{1,19}")
_HIT_FIELDS: Final = (
    *("cluster", "key", "spool_job_id", "spool_mtime_ns", "script_bytes"),
    *("uid", "user", "account", "partition", "name"),
)


class _Source(msgspec.Struct, frozen=True):
    """Fields of a hit."""

    cluster: str = ""
    key: str = ""
    spool_job_id: int = 0
    spool_mtime_ns: int = 0
    script_bytes: int = 0
    uid: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    name: str = ""

    @property
    def script_use(self) -> ScriptUse:
        return ScriptUse(
            cluster=self.cluster,
            key=self.key,
            job_id=self.spool_job_id,
            at=self.spool_mtime_ns // 1000,
            uid=self.uid,
            user=self.user,
            account=self.account,
            partition=self.partition,
            name=self.name,
        )


class _Hit(msgspec.Struct, frozen=True):
    index: str = msgspec.field(name="_index")
    id: str = msgspec.field(name="_id")
    source: _Source = msgspec.field(name="_source")
    sort: tuple[Any, ...] = ()


class _Hits(msgspec.Struct, frozen=True):
    hits: tuple[_Hit, ...] = ()


class _SearchReply(msgspec.Struct, frozen=True):
    hits: _Hits = _Hits()


class _Script(msgspec.Struct, frozen=True):
    script: str = ""


class _ScriptDocument(msgspec.Struct, frozen=True):
    id: str = msgspec.field(name="_id", default="")
    source: _Script = msgspec.field(name="_source", default=_Script())


class _ScriptDocuments(msgspec.Struct, frozen=True):
    docs: tuple[_ScriptDocument, ...] = ()


class SearchServerSearcher:
    """Searcher on a search server, with the interface of the catalog's ``CatalogSearcher``.

    Args:
        settings: The sink's settings.
    """

    def __init__(self, settings: SearchSinkSettings) -> None:
        self._settings = settings
        self._client = SearchClient(settings)
        self._is_checked = False

    def find_page(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        *,
        limit: int,
        lines: int = 3,
        after: UsePosition | None = None,
        timeout_s: float = 10.0,
    ) -> HitPage:
        """Return the next hits, newest first; as the catalog's ``CatalogSearcher.find_page`` does.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: The search names too many jobs.
        """
        uses = self._check_uses(matcher, use_filter, is_allowed, after)
        return collect_page(
            uses, matcher, limit=limit, lines=lines, after=after, timeout_s=timeout_s
        )

    def count(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        *,
        timeout_s: float = 60.0,
    ) -> int | None:
        """Count all hits; return None where it took too long.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: The search names too many jobs.
        """
        return count_hits(
            self._check_uses(matcher, use_filter, is_allowed, None), timeout_s=timeout_s
        )

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _check_uses(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        after: UsePosition | None,
    ) -> CheckedUses:
        """Yield each job with its script's text; "" for one that is no hit."""
        name_matchers = [re.compile(fnmatch.translate(name)).match for name in use_filter.names]

        def is_readable(use: ScriptUse) -> bool:
            # The query selects jobs only roughly.
            if use_filter.keys is not None and (use.cluster, use.key) not in use_filter.keys:
                return False
            if name_matchers and not any(matches(use.name) for matches in name_matchers):
                return False
            return is_allowed(use)

        for hits in self._fetch_hit_pages(matcher, use_filter, after):
            readable = [is_readable(hit.source.script_use) for hit in hits]
            texts = self._fetch_texts(
                [hit for hit, can_read in zip(hits, readable, strict=True) if can_read]
            )
            for hit, can_read in zip(hits, readable, strict=True):
                text = next(texts) if can_read else ""
                yield hit.source.script_use, text if text and matcher.matches(text) else ""

    def _fetch_hit_pages(
        self, matcher: TermMatcher, use_filter: UseFilter, after: UsePosition | None
    ) -> Iterator[Sequence[_Hit]]:
        """Yield pages of hits that the server finds."""
        if use_filter.keys is not None and len(use_filter.keys) > _MAX_KEYS:
            raise UsageError(
                f"{len(use_filter.keys)} jobs are too many for one search of a sink: give at "
                f"most {_MAX_KEYS}"
            )
        if not self._is_checked:
            check_product(self._client)
            self._is_checked = True
        query: dict[str, Any] = {
            "size": _PAGE_HITS,
            "query": {
                "bool": {"filter": [*use_conditions(use_filter), *script_conditions(matcher)]}
            },
            "sort": NEWEST_FIRST,
            "_source": list(_HIT_FIELDS),
            "track_total_hits": False,
        }
        if after is not None:
            query["search_after"] = search_after_values(after)
        # Before the first index there is no alias, and so no hits. Partial results are refused
        # because they would look complete.
        target = (
            f"/{self._settings.index}/_search?ignore_unavailable=true&"
            "allow_partial_search_results=false&"
            "filter_path=hits.hits._index,hits.hits._id,hits.hits._source,hits.hits.sort"
        )
        while True:
            reply = self._client.request("POST", target, msgspec.json.encode(query))
            hits = decode_reply(self._client, reply, _SearchReply).hits.hits
            yield [hit for hit in hits if _SCRIPT_KEY_PATTERN.fullmatch(hit.source.key)]
            if len(hits) < _PAGE_HITS:
                return
            if not _has_advanced(hits[-1].sort, query.get("search_after")):
                raise ArchiveUnavailable(
                    f"{self._client.where} repeats the same page of a search: check 'urls' and "
                    "any proxy",
                    self._client.where,
                )
            query["search_after"] = hits[-1].sort

    def _fetch_texts(self, hits: Sequence[_Hit]) -> Iterator[str]:
        """Yield the scripts of hits, in order, fetched a few megabytes at a time."""
        batch: list[_Hit] = []
        size = 0
        for hit in hits:
            if batch and size + hit.source.script_bytes > _MAX_FETCH_BYTES:
                yield from self._fetch_scripts(batch)
                batch, size = [], 0
            batch.append(hit)
            size += hit.source.script_bytes
        if batch:
            yield from self._fetch_scripts(batch)

    def _fetch_scripts(self, hits: Sequence[_Hit]) -> list[str]:
        """Fetch the scripts of hits, in order."""
        query = {"docs": [{"_index": hit.index, "_id": hit.id} for hit in hits]}
        target = "/_mget?_source_includes=script&filter_path=docs._id,docs._source"
        reply = self._client.request("POST", target, msgspec.json.encode(query))
        scripts_by_id = {
            doc.id: doc.source.script
            for doc in decode_reply(self._client, reply, _ScriptDocuments).docs
        }
        # A script purged meanwhile has no text, and so is no hit.
        return [scripts_by_id.get(hit.id, "") for hit in hits]


def _has_advanced(last_sort: Sequence[Any], previous_sort: Sequence[Any] | None) -> bool:
    """Return True if a page with this last sort value continues the one before."""
    try:
        return previous_sort is None or tuple(last_sort) < tuple(previous_sort)
    except TypeError:
        return False  # not a sort value of Steward's query
