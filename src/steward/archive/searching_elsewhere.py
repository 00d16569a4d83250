"""Which sink ``--in NAME`` means, and how it is searched."""

from typing import TYPE_CHECKING

from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.extensions.search_servers.settings import SearchSinkSettings

if TYPE_CHECKING:
    from steward.extensions.search_servers.asking import SinkSearcher


def sink_called(settings: Settings, name: str) -> str:
    """The name of the sink that is meant: by its name, or by its kind where it is the only one.

    Raises:
        UsageError: There is none, or it cannot be searched.
    """
    sinks = settings.archive.sink
    searchable = [of for of, sink in sinks.items() if isinstance(sink, SearchSinkSettings)]
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


def searcher_of(settings: Settings, name: str) -> "SinkSearcher":
    """What searches in the sink of this name, which :func:`sink_called` gave."""
    from steward.extensions.search_servers.asking import SinkSearcher

    of = settings.archive.sink[name]
    assert isinstance(of, SearchSinkSettings), "sink_called gives no other"
    return SinkSearcher(of)


def _told(names: list[str]) -> str:
    return ", ".join(sorted(names))
