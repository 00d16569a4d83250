"""Sink kinds of extensions, for sinks on other machines, and the lookup of searchable sinks."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from steward.archive.remote.document import Destination
from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.errors import StewardError, UsageError
from steward.core.extensions import load_offer

if TYPE_CHECKING:
    from steward.archive.catalog.matching import Matcher
    from steward.archive.catalog.month import Use
    from steward.archive.catalog.search import Page
    from steward.archive.catalog.walking import Place, Wanted

log = logging.getLogger(__name__)

GROUP: Final = "steward.sink"
"""Group of entry points. The name of each is a ``kind`` in [archive.sink.NAME]."""


class SinkSearcher(Protocol):
    """Searcher of one sink, with the interface of the catalog's searcher."""

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
            ArchiveUnavailable: The server does not answer.
            UsageError: The query names too many jobs.
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
            ArchiveUnavailable: The server does not answer.
            UsageError: The query names too many jobs.
        """

    def close(self) -> None:
        """Close all connections."""


class SinkKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of sink on other machines.

    Attributes:
        destination: Creates the destination of a sink from its settings and name; raises
            Unavailable if that fails for now.
        searcher: Creates the searcher of a sink from its settings; None if sinks of this kind
            cannot be searched.
    """

    destination: Callable[[Any, str], Destination]
    searcher: Callable[[Any], SinkSearcher] | None = None


def sink_kind(kind: str) -> SinkKind:
    """Load a sink kind from the extension that offers it.

    Raises:
        StewardError: No installed package offers the kind, or its import fails.
    """
    offer: SinkKind = load_offer(GROUP, kind)
    return offer


def sink_called(settings: Settings, name: str) -> str:
    """Resolve ``--in NAME`` to the name of a sink: its own name, or a kind that only one sink has.

    Raises:
        UsageError: No sink has this name or kind, several have the kind, or it is not searchable.
    """
    sinks = settings.archive.sink
    searchable = [
        sink_name
        for sink_name, sink in sinks.items()
        if not isinstance(sink, FilesSinkSettings) and _is_searchable(sink.kind)
    ]
    if name in searchable:
        return name
    if name in sinks:
        raise UsageError(
            f"sink {name!r} is of kind {sinks[name].kind!r}, which cannot be searched: "
            "without --in the catalogue is",
            name,
        )
    of_kind = [sink_name for sink_name in searchable if sinks[sink_name].kind == name]
    if len(of_kind) == 1:
        return of_kind[0]
    if of_kind:
        raise UsageError(f"several sinks are of kind {name!r}: name one of {_join(of_kind)}", name)
    hint = f"sinks that can be searched: {_join(searchable)}" if searchable else "none can be"
    raise UsageError(f"there is no sink {name!r} that could be searched ({hint})", name)


def _is_searchable(kind: str) -> bool:
    try:
        return sink_kind(kind).searcher is not None
    except StewardError as error:
        # The sink itself reports it; the other sinks can be searched.
        log.debug("%s", error)
        return False


def searcher_of(settings: Settings, name: str) -> SinkSearcher:
    """Create the searcher of a sink that :func:`sink_called` returned."""
    sink = settings.archive.sink[name]
    make_searcher = sink_kind(sink.kind).searcher
    assert make_searcher is not None, "sink_called returns only searchable sinks"
    return make_searcher(sink)


def _join(names: list[str]) -> str:
    return ", ".join(sorted(names))
