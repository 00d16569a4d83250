"""Workers of the daemon that run sources: jobcomp lines, the sensor, and Kafka topics.

`make_jobcomp_parts` and `make_sensor_parts` return a `WorkerSpec` for each cluster: in a process of
its own, no slow work delays a sensor's poll, and a slurmctld that hangs delays only its own sensor.
`make_kafka_source` makes the source of one Kafka topic, for the daemon or for one pass (`once.py`).
`recover_foreign_orphans` recovers captured files whose events were lost, of clusters that only
Kafka messages name. Queue polls and spool capture are in `workers.py`.
"""

import logging
from collections.abc import Callable
from typing import Final

from steward.capture.captured_scripts import CapturedScripts
from steward.capture.crash_recovery import recover_lost_scripts
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import Event, make_script_key
from steward.core.incoming import make_stores
from steward.core.journal import JournalLink, JournalReader
from steward.core.redaction import make_redactor
from steward.core.waits import Stop
from steward.daemon.supervisor import SendHeartbeat, WorkerSpec
from steward.extensions.kafka import KafkaSource, MessageConverter, RecentPurges

_JOURNAL: Final = ("journal",)
_JOBCOMP_HANG_S: Final = 300.0
"""Time without a heartbeat after which a jobcomp worker counts as hung, in seconds: appending waits
for the journal, which may be down for long."""


def make_jobcomp_parts(settings: Settings) -> list[WorkerSpec]:
    """Return the workers that follow the clusters' ``jobcomp_lines`` files."""
    return [
        _make_jobcomp_part(settings, cluster)
        for cluster, cluster_settings in settings.cluster.items()
        if cluster_settings.jobcomp_lines
        and cluster_settings.asks_slurm
        and not cluster_settings.remote
    ]


def _make_jobcomp_part(settings: Settings, cluster: str) -> WorkerSpec:
    """Return the worker that follows a cluster's jobcomp lines."""

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        from steward.capture.jobcomp import JobcompSource, ReadPositions

        link = JournalLink(settings.state_dir, stop)
        positions = ReadPositions(settings.state_dir, cluster)
        path = settings.cluster[cluster].jobcomp_lines
        redact = make_redactor(settings).redact_record
        source = JobcompSource(cluster, path, positions, link.append, redact)
        try:
            source.run(stop, send_heartbeat)
        finally:
            source.close()
            positions.close()

    return WorkerSpec(name=f"jobcomp.{cluster}", run=run, after=_JOURNAL, hang_s=_JOBCOMP_HANG_S)


_SENSOR_HANG_S: Final = 600.0
"""Time without a heartbeat after which a sensor counts as hung, in seconds: several slow commands
in a row are no hang."""


def make_sensor_parts(settings: Settings) -> list[WorkerSpec]:
    """Return the workers of the sensor; none unless [sensor] is enabled."""
    if not settings.sensor.enabled:
        return []
    return [
        _make_sensor_part(settings, cluster)
        for cluster, cluster_settings in settings.cluster.items()
        if cluster_settings.asks_slurm and not cluster_settings.remote
    ]


def _make_sensor_part(settings: Settings, cluster: str) -> WorkerSpec:
    """Return the worker that runs a cluster's sensor."""

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        from steward.capture.sensor import sensor

        link = JournalLink(settings.state_dir, stop)
        try:
            sensor.run_sensor(settings, cluster, link.append, stop, send_heartbeat)
        finally:
            link.close()

    return WorkerSpec(name=f"sensor.{cluster}", run=run, after=_JOURNAL, hang_s=_SENSOR_HANG_S)


log = logging.getLogger(__name__)


def make_kafka_source(
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
    converter = MessageConverter(
        make_redactor(settings),
        CapturedScripts(settings.state_dir, reader).was_captured,
        RecentPurges(settings.state_dir, reader).look,
        environments=settings.archive.environments,
    )
    return KafkaSource(
        name,
        settings.consume[name],
        settings.cluster,
        make_stores(settings),
        converter,
        append,
        once=once,
    )


def recover_foreign_orphans(settings: Settings, reader: JournalReader) -> list[Event]:
    """Recover events of stored scripts without one, of clusters not in the configuration.

    Their Kafka messages may come again, or may have left the topic.
    """
    events: list[Event] = []
    captured = CapturedScripts(settings.state_dir, reader)
    for store in make_stores(settings):
        try:
            clusters = {script.cluster for script in store.iterate_names()} - set(settings.cluster)
            for cluster in clusters:
                events += recover_lost_scripts(
                    store,
                    cluster,
                    _bind_cluster(captured.can_delete_bytes, cluster),
                    _bind_cluster(reader.has_event, cluster),
                    lambda _job_id: True,
                )
        except Unavailable as error:
            # The next start retries; meanwhile nothing in the store can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
    captured.close()
    return events


def _bind_cluster(query: Callable[[str, str], bool], cluster: str) -> Callable[[int, int], bool]:
    """Bind a journal query to a cluster; the result takes job id and mtime."""
    return lambda job_id, mtime_ns: query(cluster, make_script_key(job_id, mtime_ns))
