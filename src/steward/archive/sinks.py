"""Makes the consumer behind each configured sink; the clients of other servers are loaded here."""

from functools import partial

from steward.archive.errors import ArchiveError
from steward.archive.files.sink import FilesSink
from steward.archive.remote.document import Destination
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.incoming import stores_of
from steward.extensions.kafka.settings import KafkaSinkSettings
from steward.extensions.search_servers.settings import SearchSinkSettings

Sink = FilesSink | RemoteSink
"""What archives scripts somewhere."""


def make_sink(settings: Settings, name: str) -> Sink:
    """The consumer ``archive.<name>``.

    Args:
        settings: The whole configuration.
        name: The sink's name in it.

    Raises:
        ArchiveError: The sink cannot be as it is configured.
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
        partial(_destination, settings, name),
        batch_bytes=_batch_bytes(of),
        environments=of.environments and settings.archive.environments,
    )


def _destination(settings: Settings, name: str) -> Destination:
    """The other end of a sink; raises Unavailable while it cannot be made."""
    of = settings.archive.sink[name]
    if isinstance(of, KafkaSinkSettings):
        from steward.extensions.kafka.destination import KafkaDestination

        return KafkaDestination(of, name)
    if isinstance(of, SearchSinkSettings):
        from steward.extensions.search_servers.destination import SearchDestination

        return SearchDestination(of)
    raise ArchiveError(f"sink {name!r} is on no other machine", name)


_KAFKA_BATCH_BYTES = 8 << 20


def _batch_bytes(of: SearchSinkSettings | KafkaSinkSettings) -> int:
    return of.batch_bytes if isinstance(of, SearchSinkSettings) else _KAFKA_BATCH_BYTES
