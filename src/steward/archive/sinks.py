"""Sink factory: create the consumer ``archive.NAME`` for a configured sink.

A sink of kind ``files`` becomes a :class:`FilesSink`; every other kind a :class:`RemoteSink` with
the destination that an extension offers.
"""

from functools import partial

from steward.archive.files.sink import FilesSink
from steward.archive.remote.destination import load_sink_kind
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.script_stores import make_stores

ArchiveSink = FilesSink | RemoteSink
"""Consumer that archives scripts."""


def make_sink(settings: Settings, name: str) -> ArchiveSink:
    """Create the consumer ``archive.<name>``.

    Args:
        settings: The whole configuration.
        name: Name of the sink in the configuration.

    Raises:
        ArchiveError: The configuration of the sink is invalid.
        StewardError: No installed package offers its kind.
        SqliteUnavailable: The state directory cannot be used now.
    """
    sink_settings = settings.archive.sink[name]
    stores = make_stores(settings)
    if isinstance(sink_settings, FilesSinkSettings):
        return FilesSink(settings, name, stores)
    return RemoteSink(
        settings,
        name,
        stores,
        partial(load_sink_kind(sink_settings.kind).destination, sink_settings, name),
        environments=sink_settings.environments and settings.archive.environments,
    )
