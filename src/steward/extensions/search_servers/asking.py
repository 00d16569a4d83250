"""Search in a sink: candidates from the server, newest first, each proved as the catalogue does it.

Who asks is looked at before a script's text is: what may not be read is not
even fetched.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from steward.archive.catalog.matching import Matcher
from steward.archive.catalog.month import Use
from steward.archive.catalog.search import Looked, Page, counted, first_page
from steward.archive.catalog.walking import Place, Wanted
from steward.archive.errors import ArchiveUnavailable
from steward.core.errors import UsageError
from steward.extensions.search_servers.client import SearchClient
from steward.extensions.search_servers.preparing import check_product
from steward.extensions.search_servers.query import (
    NEWEST_FIRST,
    after_of,
    candidates,
    wanted_uses,
)
from steward.extensions.search_servers.replies import read
from steward.extensions.search_servers.settings import SearchSinkSettings

_AT_ONCE: Final = 200
_MOST_BYTES: Final = 4 << 20
_MOST_KEYS: Final = 10_000
_KEY: Final = re.compile(r"script:\d{1,19}:\d{1,19}")
_FIELDS: Final = (
    *("cluster", "key", "spool_job_id", "spool_mtime_ns", "script_bytes"),
    *("uid", "user", "account", "partition", "name"),
)


class _Source(msgspec.Struct, frozen=True):
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
    """A sink on a search server, for searching, as the catalogue's Searcher is for its own.

    Args:
        settings: The sink's.
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
        """The next hits, newest first; see :meth:`steward.archive.catalog.search.Searcher.page`.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: Too many jobs are named.
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
        """The number of all hits; None where counting took too long.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: Too many jobs are named.
        """
        return counted(self._uses(matcher, wanted, allowed, None), longest_s=longest_s)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _uses(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        after: Place | None,
    ) -> Looked:
        is_called = [re.compile(fnmatch.translate(name)).match for name in wanted.names]

        def is_readable(use: Use) -> bool:
            # The query said only roughly what is wanted.
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
        # Without any index yet there is no alias either, and nothing to be found. A part of the
        # hits would look like all of them.
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
        """The scripts of hits, in order, a few megabytes of them at once."""
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
        asked = {"docs": [{"_index": hit.index, "_id": hit.id} for hit in hits]}
        target = "/_mget?_source_includes=script&filter_path=docs._id,docs._source"
        reply = self._client.request("POST", target, msgspec.json.encode(asked))
        found = {doc.id: doc.source.script for doc in read(self._client, reply, _Docs).docs}
        # What was purged in between has no text any more, and is no hit.
        return [found.get(hit.id, "") for hit in hits]


def _is_older(last: Sequence[Any], before: Sequence[Any] | None) -> bool:
    """Whether a page that ends so is a step on from the one before."""
    try:
        return before is None or tuple(last) < tuple(before)
    except TypeError:
        return False  # no page of ours is sorted by such values
