"""Workers of the daemon that run sources: jobcomp lines, the sensor, and Kafka topics.

`lines_parts` and `sensor_parts` return a `Part` for each cluster. `source_of` makes the source of
one Kafka topic; `orphans_of_others` recovers captured files whose events were lost, of clusters
that only Kafka messages name. Queue polls and spool capture are in `workers.py`.
"""

import logging
from collections.abc import Callable
from typing import Final

from steward.capture.captured_jobs import Known
from steward.capture.crash_recovery import recover
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import Event, script_key
from steward.core.incoming import stores_of
from steward.core.journal import JournalLink, JournalReader
from steward.core.redaction import redactor_of
from steward.core.waits import Stop
from steward.daemon.supervisor import Beat, Part
from steward.extensions.kafka import KafkaSource, LatelyPurged, Taking

_JOURNAL: Final = ("journal",)
_JOBCOMP_HANG_S: Final = 300.0
"""Time without a heartbeat after which a jobcomp worker counts as hung, in seconds: appending waits
for the journal, which may be down for long."""


def lines_parts(settings: Settings) -> list[Part]:
    """Return the workers that follow the clusters' ``jobcomp_lines`` files."""
    return [
        _following(settings, cluster)
        for cluster, of in settings.cluster.items()
        if of.jobcomp_lines and of.asks_slurm and not of.remote
    ]


def _following(settings: Settings, cluster: str) -> Part:
    """Return the worker that follows a cluster's jobcomp lines."""

    def run(stop: Stop, beat: Beat) -> None:
        from steward.capture.jobcomp import JobcompLines, Places
        from steward.core.redaction import redactor_of

        link = JournalLink(settings.state_dir, stop)
        places = Places(settings.state_dir, cluster)
        path = settings.cluster[cluster].jobcomp_lines
        redact = redactor_of(settings).record
        lines = JobcompLines(cluster, path, places, link.append, redact)
        try:
            lines.run(stop, beat)
        finally:
            lines.close()
            places.close()

    return Part(name=f"jobcomp.{cluster}", run=run, after=_JOURNAL, hang_s=_JOBCOMP_HANG_S)


_SENSOR_HANG_S: Final = 600.0
"""Time without a heartbeat after which a sensor counts as hung, in seconds: several slow commands
in a row are no hang."""


def sensor_parts(settings: Settings) -> list[Part]:
    """Return the workers of the sensor; none unless [sensor] is enabled."""
    if not settings.sensor.enabled:
        return []
    return [
        _watching(settings, cluster)
        for cluster, of in settings.cluster.items()
        if of.asks_slurm and not of.remote
    ]


def _watching(settings: Settings, cluster: str) -> Part:
    """Return the worker that runs a cluster's sensor."""

    def run(stop: Stop, beat: Beat) -> None:
        from steward.capture.sensor import sensor

        link = JournalLink(settings.state_dir, stop)
        try:
            sensor.run(settings, cluster, link.append, stop, beat)
        finally:
            link.close()

    return Part(name=f"sensor.{cluster}", run=run, after=_JOURNAL, hang_s=_SENSOR_HANG_S)


log = logging.getLogger(__name__)


def source_of(
    settings: Settings, name: str, reader: JournalReader, append: Append, *, once: bool = False
) -> KafkaSource:
    """Make the source that consumes the Kafka topic ``name``.

    Args:
        settings: The configuration.
        name: The topic's name in the configuration.
        reader: Reader of the journal.
        append: Appends events durably.
        once: Whether to consume only the messages that are in the topic now.
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
    """Recover events of stored scripts without one, of clusters not in the configuration.

    Their Kafka messages may come again, or may have left the topic.
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
            # The next start retries; meanwhile nothing in the store can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
    known.close()
    return found


def _asked(ask: Callable[[str, str], bool], cluster: str) -> Callable[[int, int], bool]:
    """Bind a journal query to a cluster; the result takes job id and mtime."""
    return lambda job_id, mtime_ns: ask(cluster, script_key(job_id, mtime_ns))
