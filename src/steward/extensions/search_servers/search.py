"""Script search on a search server: builds queries, and verifies every hit with the matcher.

:class:`SinkSearcher` offers the catalog's search interface for a sink. The query may match too
much, but never too little: the server returns candidates, and Steward tests each script itself.

Text is found anywhere, also inside a word, as in the catalog. The server knows only words, so the
query requires every run of letters of the text as a word (``script.letters``), or as the end or
beginning of one where the text begins or ends within it.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from steward.archive.catalog.matches import Matcher
from steward.archive.catalog.month import Use
from steward.archive.catalog.search import Looked, Owner, Page, Place, Wanted, counted, first_page
from steward.archive.errors import ArchiveUnavailable
from steward.core.errors import UsageError
from steward.core.timestamps import micros
from steward.extensions.search_servers.client import SearchClient, read
from steward.extensions.search_servers.index_template import check_product
from steward.extensions.search_servers.settings import SearchSinkSettings

_LETTERS: Final = re.compile(r"[a-z]+")
_DIGITS: Final = re.compile(r"[0-9]+")
_SET: Final = re.compile(r"\[!?+\]?+[^\]]*\]")
_WILD: Final = re.compile(r"[*?]")
_WILDS: Final = re.compile(r"[*?]+")
_SHORT: Final = 3
"""Fewest letters of an open-ended word to search for."""
_MOST_CLAUSES: Final = 64
"""Most conditions of a query."""
_MOST_VALUES: Final = 1000
"""Most values of one condition."""
_LONGEST_VALUE: Final = 1024
"""Longest value of a condition, in characters."""
_LATEST_NS: Final = 2**63 - 1

Query = dict[str, Any]


def candidates(matcher: Matcher) -> list[Query]:
    """Build conditions that every script with all terms meets; empty where there are none."""
    clauses: dict[str, Query] = {}
    for term in matcher.terms:
        clauses.update(_of_term(term, words=matcher.words))
    return list(clauses.values())[:_MOST_CLAUSES]


def wanted_uses(wanted: Wanted) -> list[Query]:
    """Build conditions for the jobs to search: owner, cluster, names, times and so on.

    Raises:
        UsageError: The search names too many values for a server.
    """
    found: list[Query] = []
    if wanted.owner is not None:
        found.append(_owned(wanted.owner))
    for field, chosen in (
        ("cluster", wanted.clusters),
        ("account", wanted.accounts),
        ("partition", wanted.partitions),
    ):
        if chosen:
            found.append({"terms": {field: _few(chosen, f"{field}s")}})
    if wanted.users or wanted.uids:
        users = {"terms": {"user": _few(wanted.users, "users")}}
        uids = {"terms": {"uid": _few(wanted.uids, "uids")}}
        found.append(_any_of([users, uids]))
    if wanted.names:
        found.append(_any_of([_like("name", name) for name in wanted.names]))
    if wanted.keys is not None:
        found.append({"terms": {"key": sorted({key for _, key in wanted.keys})}})
    times = {}
    if wanted.since is not None:
        times["gte"] = micros(wanted.since) * 1000
    if wanted.until is not None:
        times["lt"] = micros(wanted.until) * 1000
    if times:
        found.append({"range": {"spool_mtime_ns": times}})
    return found


NEWEST_FIRST: Final = [
    {"spool_mtime_ns": {"order": "desc", "unmapped_type": "long"}},
    {"key": {"order": "desc", "unmapped_type": "keyword"}},
    {"cluster": {"order": "desc", "unmapped_type": "keyword"}},
]
"""Sort order of hits, as the catalog's."""


def after_of(place: Place) -> list[Any]:
    """Build ``search_after`` for the hits behind a place in that order."""
    at, key, cluster = place
    digits = key.rpartition(":")[2]
    # A place has microseconds; the key has the full time in ns.
    ns = int(digits) if digits.isdecimal() and len(digits) < 20 else at * 1000
    return [min(ns, _LATEST_NS), key, cluster]


def _few(values: Sequence[Any], what: str) -> list[Any]:
    """Return values for a condition; raise UsageError for too many."""
    if len(values) > _MOST_VALUES:
        raise UsageError(
            f"{len(values)} {what} are too many to ask a sink for: give at most {_MOST_VALUES}",
            what,
        )
    # Drop values longer than any name: they would only burden the server.
    return [value for value in values if not isinstance(value, str) or len(value) <= _LONGEST_VALUE]


def _owned(owner: Owner) -> Query:
    """Build the condition for jobs that belong to a user or to their accounts."""
    either: list[Query] = [{"terms": {"account": list(owner.accounts)}}]
    if owner.uid is not None:
        own: list[Query] = [{"term": {"uid": owner.uid}}, {"term": {"user": owner.user}}]
        either.append({"bool": {"filter": own}})
    return _any_of(either)


def _any_of(either: list[Query]) -> Query:
    return {"bool": {"should": either, "minimum_should_match": 1}}


def _like(field: str, pattern: str) -> Query:
    """Build a condition for a shell pattern; it may match more, since hits are tested again.

    A server knows no ``[…]``, takes a backslash as an escape, and builds an automaton: without a
    ``?`` behind a ``*`` it has no more states than the pattern has letters.
    """
    simple = _SET.sub("?", pattern)
    if not _WILD.search(simple):
        return {"term": {field: {"value": simple}}}
    begin, star, rest = simple.replace("\\", "\\\\").partition("*")
    value = begin + _WILDS.sub("*", star + rest)
    return {"wildcard": {field: {"value": value}}}


def _of_term(term: str, *, words: bool) -> dict[str, Query]:
    """Build the conditions for one search term, by key to drop duplicates."""
    text = term.lower()
    found: dict[str, Query] = {}
    for match in _LETTERS.finditer(text):
        begin, end = match.span()
        open_left = not words if begin == 0 else text[begin - 1].isalpha()
        open_right = not words if end == len(text) else text[end].isalpha()
        if len(match[0]) >= _SHORT or not (open_left or open_right):
            found[repr((match[0], open_left, open_right))] = _word(
                "script.letters", match[0], open_left, open_right
            )
    if not found:
        # Numbers only, or letters so few that nearly every script has a word with them.
        for match in _DIGITS.finditer(text):
            found[repr(match[0])] = _word("script", match[0], True, True)
    return found


def _word(field: str, text: str, open_left: bool, open_right: bool) -> Query:
    """Build the condition for a word, open on the left or right."""
    if open_left:
        return {"wildcard": {field: {"value": f"*{text}*" if open_right else f"*{text}"}}}
    return {"prefix" if open_right else "term": {field: {"value": text}}}


_AT_ONCE: Final = 200
"""Hits fetched in one request."""
_MOST_BYTES: Final = 4 << 20
"""Bytes of scripts fetched in one request."""
_MOST_KEYS: Final = 10_000
"""Most jobs that a search may name."""
_KEY: Final = re.compile(r"script:\d{1,19}:\d{1,19}")
_FIELDS: Final = (
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
    def use(self) -> Use:
        return Use(
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


class _Found(msgspec.Struct, frozen=True):
    hits: _Hits = _Hits()


class _Script(msgspec.Struct, frozen=True):
    script: str = ""


class _Doc(msgspec.Struct, frozen=True):
    id: str = msgspec.field(name="_id", default="")
    source: _Script = msgspec.field(name="_source", default=_Script())


class _Docs(msgspec.Struct, frozen=True):
    docs: tuple[_Doc, ...] = ()


class SinkSearcher:
    """Searcher on a search server, with the interface of the catalog's Searcher.

    Args:
        settings: The sink's settings.
    """

    def __init__(self, settings: SearchSinkSettings) -> None:
        self._settings = settings
        self._client = SearchClient(settings)
        self._is_checked = False

    def page(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        *,
        limit: int,
        lines: int = 3,
        after: Place | None = None,
        longest_s: float = 10.0,
    ) -> Page:
        """Return the next hits, newest first; see ``steward.archive.catalog.search.Searcher.page``.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: The search names too many jobs.
        """
        uses = self._uses(matcher, wanted, allowed, after)
        return first_page(uses, matcher, limit=limit, lines=lines, after=after, longest_s=longest_s)

    def count(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        *,
        longest_s: float = 60.0,
    ) -> int | None:
        """Count all hits; return None where it took too long.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: The search names too many jobs.
        """
        return counted(self._uses(matcher, wanted, allowed, None), longest_s=longest_s)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _uses(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        after: Place | None,
    ) -> Looked:
        """Yield each job with its script's text; "" for one that is no hit."""
        is_called = [re.compile(fnmatch.translate(name)).match for name in wanted.names]

        def is_readable(use: Use) -> bool:
            # The query selects jobs only roughly.
            if wanted.keys is not None and (use.cluster, use.key) not in wanted.keys:
                return False
            if is_called and not any(matches(use.name) for matches in is_called):
                return False
            return allowed(use)

        for hits in self._candidates(matcher, wanted, after):
            readable = [is_readable(hit.source.use) for hit in hits]
            texts = self._texts([hit for hit, may in zip(hits, readable, strict=True) if may])
            for hit, may in zip(hits, readable, strict=True):
                text = next(texts) if may else ""
                yield hit.source.use, text if text and matcher.matches(text) else ""

    def _candidates(
        self, matcher: Matcher, wanted: Wanted, after: Place | None
    ) -> Iterator[Sequence[_Hit]]:
        """Yield pages of hits that the server finds."""
        if wanted.keys is not None and len(wanted.keys) > _MOST_KEYS:
            raise UsageError(f"a sink is asked about {_MOST_KEYS} jobs at the most: name fewer")
        if not self._is_checked:
            check_product(self._client)
            self._is_checked = True
        asked: dict[str, Any] = {
            "size": _AT_ONCE,
            "query": {"bool": {"filter": [*wanted_uses(wanted), *candidates(matcher)]}},
            "sort": NEWEST_FIRST,
            "_source": list(_FIELDS),
            "track_total_hits": False,
        }
        if after is not None:
            asked["search_after"] = after_of(after)
        # Before the first index there is no alias, and so no hits. Partial results are refused
        # because they would look complete.
        target = (
            f"/{self._settings.index}/_search?ignore_unavailable=true&"
            "allow_partial_search_results=false&"
            "filter_path=hits.hits._index,hits.hits._id,hits.hits._source,hits.hits.sort"
        )
        while True:
            reply = self._client.request("POST", target, msgspec.json.encode(asked))
            hits = read(self._client, reply, _Found).hits.hits
            yield [hit for hit in hits if _KEY.fullmatch(hit.source.key)]
            if len(hits) < _AT_ONCE:
                return
            if not _is_older(hits[-1].sort, asked.get("search_after")):
                raise ArchiveUnavailable(
                    f"{self._client.where} gives the same page of a search again and again: "
                    "check what stands in between",
                    self._client.where,
                )
            asked["search_after"] = hits[-1].sort

    def _texts(self, hits: Sequence[_Hit]) -> Iterator[str]:
        """Yield the scripts of hits, in order, fetched a few megabytes at a time."""
        some: list[_Hit] = []
        size = 0
        for hit in hits:
            if some and size + hit.source.script_bytes > _MOST_BYTES:
                yield from self._fetched(some)
                some, size = [], 0
            some.append(hit)
            size += hit.source.script_bytes
        if some:
            yield from self._fetched(some)

    def _fetched(self, hits: Sequence[_Hit]) -> list[str]:
        """Fetch the scripts of hits, in order."""
        asked = {"docs": [{"_index": hit.index, "_id": hit.id} for hit in hits]}
        target = "/_mget?_source_includes=script&filter_path=docs._id,docs._source"
        reply = self._client.request("POST", target, msgspec.json.encode(asked))
        found = {doc.id: doc.source.script for doc in read(self._client, reply, _Docs).docs}
        # A script purged meanwhile has no text, and so is no hit.
        return [found.get(hit.id, "") for hit in hits]


def _is_older(last: Sequence[Any], before: Sequence[Any] | None) -> bool:
    """Return True if a page with this last sort value continues the one before."""
    try:
        return before is None or tuple(last) < tuple(before)
    except TypeError:
        return False  # not a sort value of Steward's query
