"""Kinds of sinks on other machines, as extensions offer them, and which of them can be searched."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from steward.archive.remote.document import Destination
from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.extensions import load_offer

if TYPE_CHECKING:
    from steward.archive.catalog.matching import Matcher
    from steward.archive.catalog.month import Use
    from steward.archive.catalog.search import Page
    from steward.archive.catalog.walking import Place, Wanted

GROUP: Final = "steward.sink"
"""The group of entry points; the name of one is a ``kind`` in [archive.sink.NAME]."""


class SinkSearcher(Protocol):
    """Searches in one sink, as the catalog does in its own files."""

    def page(
        self,
        matcher: "Matcher",
        wanted: "Wanted",
        allowed: Callable[["Use"], bool],
        *,
        limit: int,
        lines: int = 3,
        after: "Place | None" = None,
        longest_s: float = 10.0,
    ) -> "Page":
        """Return the next hits; see :meth:`steward.archive.catalog.search.Searcher.page`.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: Too many jobs are named.
        """

    def count(
        self,
        matcher: "Matcher",
        wanted: "Wanted",
        allowed: Callable[["Use"], bool],
        *,
        longest_s: float = 60.0,
    ) -> int | None:
        """Return the number of all hits; None if counting took too long.

        Raises:
            ArchiveUnavailable: The server is away.
            UsageError: Too many jobs are named.
        """

    def close(self) -> None:
        """Let go of connections."""


class SinkKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of sinks.

    Attributes:
        destination: Makes the other end of a sink of its settings and its name; raises Unavailable
            while it cannot.
        searcher: Makes what searches in a sink, of its settings; None where none can be searched.
    """

    destination: Callable[[Any, str], Destination]
    searcher: Callable[[Any], SinkSearcher] | None = None


def sink_kind(kind: str) -> SinkKind:
    """Return a kind of sinks on other machines.

    Raises:
        StewardError: No installed package offers it, or it cannot be imported.
    """
    found: SinkKind = load_offer(GROUP, kind)
    return found


def sink_called(settings: Settings, name: str) -> str:
    """Return the sink that ``--in NAME`` means: by its name, or by its kind if that is unique.

    Raises:
        UsageError: There is none, or it cannot be searched.
    """
    sinks = settings.archive.sink
    searchable = [
        of
        for of, sink in sinks.items()
        if not isinstance(sink, FilesSinkSettings) and sink_kind(sink.kind).searcher
    ]
    if name in searchable:
        return name
    if name in sinks:
        raise UsageError(
            f"sink {name!r} is of kind {sinks[name].kind!r}, which cannot be searched: "
            "without --in the catalogue is",
            name,
        )
    of_kind = [of for of in searchable if sinks[of].kind == name]
    if len(of_kind) == 1:
        return of_kind[0]
    if of_kind:
        raise UsageError(f"several sinks are of kind {name!r}: name one of {_told(of_kind)}", name)
    known = f"sinks that can be searched: {_told(searchable)}" if searchable else "none can be"
    raise UsageError(f"there is no sink {name!r} that could be searched ({known})", name)


def searcher_of(settings: Settings, name: str) -> SinkSearcher:
    """Make what searches in the sink of this name, which :func:`sink_called` gave."""
    of = settings.archive.sink[name]
    make = sink_kind(of.kind).searcher
    assert make is not None, "sink_called gives no other"
    return make(of)


def _told(names: list[str]) -> str:
    return ", ".join(sorted(names))
