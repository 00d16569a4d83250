"""The parts ``consume.NAME``: topics of Kafka that are taken in, by the daemon or once."""

import logging
from collections.abc import Callable

from steward.capture.known import Known
from steward.capture.orphans import recover
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import Event, script_key
from steward.core.incoming import stores_of
from steward.core.journal import JournalReader
from steward.core.redaction import redactor_of
from steward.extensions.kafka import KafkaSource, LatelyPurged, Taking

log = logging.getLogger(__name__)


def source_of(
    settings: Settings, name: str, reader: JournalReader, append: Append, *, once: bool = False
) -> KafkaSource:
    """What takes in the topic ``name``.

    Args:
        settings: The whole configuration.
        name: The topic's name in it.
        reader: The journal, for reading.
        append: Appends events durably.
        once: Whether it is only for what is in the topic now.
    """
    taking = Taking(
        redactor_of(settings),
        Known(settings.state_dir, reader).known,
        LatelyPurged(settings.state_dir, reader).look,
        environments=settings.archive.environments,
    )
    return KafkaSource(
        name,
        settings.consume[name],
        settings.cluster,
        stores_of(settings),
        taking,
        append,
        once=once,
    )


def orphans_of_others(settings: Settings, reader: JournalReader) -> list[Event]:
    """The events of kept bytes that lost theirs, of clusters that are not in the configuration.

    Their messages may come again, or may have left the topic meanwhile.
    """
    found: list[Event] = []
    known = Known(settings.state_dir, reader)
    for store in stores_of(settings):
        try:
            clusters = {name.cluster for name in store.names()} - set(settings.cluster)
            for cluster in clusters:
                found += recover(
                    store,
                    cluster,
                    _asked(known.over, cluster),
                    _asked(reader.present, cluster),
                    lambda _job_id: True,
                )
        except Unavailable as error:
            # The next start looks again; meanwhile nothing in there can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
    known.close()
    return found


def _asked(ask: Callable[[str, str], bool], cluster: str) -> Callable[[int, int], bool]:
    return lambda job_id, mtime_ns: ask(cluster, script_key(job_id, mtime_ns))
