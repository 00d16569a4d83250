"""Makes the consumer behind each configured sink."""

from functools import partial

from steward.archive.files.sink import FilesSink
from steward.archive.remote.destination import sink_kind
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.incoming import stores_of

Sink = FilesSink | RemoteSink
"""What archives scripts somewhere."""


def make_sink(settings: Settings, name: str) -> Sink:
    """The consumer ``archive.<name>``.

    Args:
        settings: The whole configuration.
        name: The sink's name in it.

    Raises:
        ArchiveError: The sink cannot be as it is configured.
        StewardError: No installed package offers its kind.
        SqliteUnavailable: The state directory cannot be used now.
    """
    of = settings.archive.sink[name]
    stores = stores_of(settings)
    if isinstance(of, FilesSinkSettings):
        return FilesSink(settings, name, stores)
    return RemoteSink(
        settings,
        name,
        stores,
        partial(sink_kind(of.kind).destination, of, name),
        batch_bytes=of.batch_bytes,
        environments=of.environments and settings.archive.environments,
    )
