"""Source workers: processes of the daemon that read Slurm, spools, nodes, controllers and Kafka.

:func:`make_source_workers` decides which sources a configuration needs. A cluster with ``remote``
gets none: its controller's host runs them. Every other cluster gets one worker for queries of its
Slurm, two workers that share its spool, one that follows its jobcomp lines and
one for its sensor: in a process of its own, no slow work delays a poll, and a slurmctld that hangs
delays only its own sensor.

``recover_orphans`` and ``recover_foreign_orphans`` recover stored scripts whose events were lost.
"""

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from steward.capture.crash_recovery import recover_lost_scripts
from steward.capture.run_store import catch_up_runs, read_unfinished_runs
from steward.capture.script_lookup import CapturedScripts
from steward.capture.spool import AppendRows, SpoolCapture
from steward.capture.spool_entries import SpoolPlan, load_scheduler
from steward.core.config import Settings
from steward.core.consumers import Append, Consumer
from steward.core.errors import StewardError, Unavailable
from steward.core.events import Event, make_script_key
from steward.core.journal import JournalLink, JournalReader
from steward.core.poll_status import PollStatusFiles
from steward.core.records import JobRecord
from steward.core.redaction import Redactor, make_redactor
from steward.core.script_stores import make_stores
from steward.core.sqlite import SqliteMissing
from steward.core.waits import Stop
from steward.daemon.consumer_workers import (
    CONSUMER_HANG_S,
    ConsumerFactory,
    make_consumer_worker,
    wait_for_resource,
)
from steward.daemon.supervisor import JOURNAL, SendHeartbeat, WorkerSpec
from steward.jobs import Jobs, database_path
from steward.slurm import Slurm
from steward.slurm.state_files import StateFiles

if TYPE_CHECKING:
    from steward.extensions.kafka import KafkaSource


def make_source_workers(settings: Settings, after: tuple[str, ...]) -> list[WorkerSpec]:
    """Return the workers of all sources, in the order in which they start.

    Args:
        settings: The configuration.
        after: Names of the workers that must run before a source may append events.
    """
    workers = []
    for cluster, cluster_settings in settings.cluster.items():
        if cluster_settings.remote:
            continue
        if cluster_settings.asks_slurm:
            factories = get_slurm_factories(settings, cluster)
            workers.append(
                make_consumer_worker(settings, f"slurm.{cluster}", factories, registered=False)
            )
        # Before the fork: the search for installed packages and the patterns, which Python caches,
        # would take 5 MB in each process.
        with suppress(StewardError):
            load_scheduler(cluster_settings.scheduler)
            Redactor(settings.redact)
        workers += [
            _make_capture_worker(settings, cluster, share, after)
            for share in range(CAPTURE_PROCESSES)
        ]
    if settings.receive.listen:
        workers.append(_make_receiver_worker(settings, after))
    if settings.nodes.listen:
        workers.append(make_nodes_worker(settings))
    workers += [_make_kafka_worker(settings, name, after) for name in settings.consume]
    return workers + make_jobcomp_workers(settings) + make_sensor_workers(settings)


CAPTURE_PROCESSES: Final = 2
"""Processes that share a spool: enough for 1,000 jobs a second."""
_JOBCOMP_HANG_S: Final = 300.0
"""Time without a heartbeat after which a jobcomp worker counts as hung, in seconds: appending waits
for the journal, which may be down for long."""


def make_jobcomp_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the workers that follow the clusters' ``jobcomp_lines`` files."""
    return [
        _make_jobcomp_worker(settings, cluster)
        for cluster, cluster_settings in settings.cluster.items()
        if cluster_settings.jobcomp_lines
        and cluster_settings.asks_slurm
        and not cluster_settings.remote
    ]


def _make_jobcomp_worker(settings: Settings, cluster: str) -> WorkerSpec:
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

    return WorkerSpec(name=f"jobcomp.{cluster}", run=run, after=(JOURNAL,), hang_s=_JOBCOMP_HANG_S)


_SENSOR_HANG_S: Final = 600.0
"""Time without a heartbeat after which a sensor counts as hung, in seconds: several slow commands
in a row are no hang."""


def make_sensor_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the workers of the sensor; none unless [sensor] is enabled."""
    if not settings.sensor.enabled:
        return []
    return [
        _make_sensor_worker(settings, cluster)
        for cluster, cluster_settings in settings.cluster.items()
        if cluster_settings.asks_slurm and not cluster_settings.remote
    ]


def _make_sensor_worker(settings: Settings, cluster: str) -> WorkerSpec:
    """Return the worker that runs a cluster's sensor."""

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        from steward.capture.sensor import sensor

        link = JournalLink(settings.state_dir, stop)
        try:
            sensor.run_sensor(settings, cluster, link.append, stop, send_heartbeat)
        finally:
            link.close()

    return WorkerSpec(name=f"sensor.{cluster}", run=run, after=(JOURNAL,), hang_s=_SENSOR_HANG_S)


log = logging.getLogger(__name__)


def make_kafka_source(
    settings: Settings, name: str, reader: JournalReader, append: Append, *, once: bool = False
) -> "KafkaSource":
    """Make the source that consumes the Kafka topic ``name``.

    Args:
        settings: The configuration.
        name: The topic's name in the configuration.
        reader: Reader of the journal.
        append: Appends events durably.
        once: Whether to consume only the messages that are in the topic now.
    """
    from steward.extensions.kafka import KafkaSource, MessageConverter, RecentPurges

    converter = MessageConverter(
        make_redactor(settings),
        CapturedScripts(settings.state_dir, reader).was_captured,
        RecentPurges(settings.state_dir, reader).read_purges,
        with_environments=settings.archive.environments,
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
            log.debug("cannot search %s for scripts without an event: %s", store.directory, error)
    captured.close()
    return events


def _bind_cluster(query: Callable[[str, str], bool], cluster: str) -> Callable[[int, int], bool]:
    """Bind a journal query to a cluster; the result takes job id and mtime."""
    return lambda job_id, mtime_ns: query(cluster, make_script_key(job_id, mtime_ns))


def get_slurm_factories(settings: Settings, cluster: str) -> list[ConsumerFactory]:
    """Return factories of the sources that query a cluster's Slurm, for a process of their own.

    Not the journal's process: reading twenty thousand jobs would delay its commits.
    """
    return [
        partial(make_queue_poller, settings, cluster),
        partial(_make_roles_poller, settings, cluster),
    ]


def make_queue_poller(settings: Settings, cluster: str) -> Consumer:
    """Make the source that polls a cluster's queue."""
    from steward.capture.queue_polls import QueuePoller

    cluster_settings = settings.cluster[cluster]
    slurm = Slurm(cluster, cluster_settings)
    list_jobs = partial(list_unfinished, settings, cluster)
    redact = make_redactor(settings).redact_record
    return QueuePoller(
        *(cluster, cluster_settings, slurm),
        unfinished=list_jobs,
        redact=redact,
        # On a controller, the gate implies that there is a bank elsewhere.
        report_polls=settings.bank.enabled or bool(settings.gate.ask),
        on_poll=partial(PollStatusFiles(settings.state_dir).put, cluster),
        read_stamp=StateFiles(cluster_settings, slurm.find_state_directory).read_stamp,
    )


def list_unfinished(settings: Settings, cluster: str) -> list[JobRecord]:
    """List the latest records of a cluster's unfinished jobs.

    Raises:
        SqliteUnavailable: The records cannot be read now.
    """
    try:
        reader = JournalReader(settings.state_dir)
    except SqliteMissing:
        # The first start: no jobs are known, so none can have ended meanwhile.
        return []
    with closing(reader):
        if settings.forward.to:
            jobs, position = read_unfinished_runs(settings.state_dir, cluster)
        else:
            jobs, position = _list_unfinished_in_database(settings, cluster)
        return catch_up_runs(jobs, reader, cluster, position)


def _list_unfinished_in_database(settings: Settings, cluster: str) -> tuple[list[JobRecord], int]:
    """List unfinished jobs in the jobs database, with its journal position."""
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteMissing:
        return [], 0
    with closing(jobs):
        # Events applied twice are harmless; events left out would be missing.
        position = jobs.cursor()
        return jobs.list_unfinished_records(cluster), position


def _make_roles_poller(settings: Settings, cluster: str) -> Consumer:
    """Make the source that reads a cluster's administrators and coordinators."""
    from steward.capture.associations import AssociationsPoller
    from steward.core.access import ClusterRolesFiles

    query_roles = Slurm(cluster, settings.cluster[cluster]).read_roles
    return AssociationsPoller(cluster, query_roles, ClusterRolesFiles(settings.state_dir))


def _make_capture_worker(
    settings: Settings, cluster: str, share: int, after: tuple[str, ...]
) -> WorkerSpec:
    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        run_capture(settings, cluster, share, stop, send_heartbeat)

    return WorkerSpec(name=f"capture.{cluster}.{share}", run=run, after=after)


def _make_receiver_worker(settings: Settings, after: tuple[str, ...]) -> WorkerSpec:
    run = partial(run_receiver, settings)
    return WorkerSpec(name="receive", run=run, after=after, hang_s=CONSUMER_HANG_S)


def make_nodes_worker(settings: Settings) -> WorkerSpec:
    """Return the worker that receives data from compute nodes."""
    run = partial(run_nodes, settings)
    return WorkerSpec(name="nodes", run=run, after=(JOURNAL,), hang_s=CONSUMER_HANG_S)


def _make_kafka_worker(settings: Settings, name: str, after: tuple[str, ...]) -> WorkerSpec:
    run = partial(run_kafka_source, settings, name)
    return WorkerSpec(name=f"consume.{name}", run=run, after=after, hang_s=CONSUMER_HANG_S)


def run_receiver(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the receiver of events from controllers on other hosts."""
    from steward.extensions.controllers import ControllerReceiver

    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    for cluster, cluster_settings in settings.cluster.items():
        if cluster_settings.remote:
            link.append(recover_orphans(settings, cluster, 0, 1, reader))
    stores = make_stores(settings)
    is_captured = CapturedScripts(settings.state_dir, reader).was_captured
    receiver = wait_for_resource(
        lambda: ControllerReceiver(settings, stores, is_captured, link), stop, send_heartbeat
    )
    receiver.run(stop, send_heartbeat)


def run_nodes(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the receiver of data from agents on compute nodes."""
    from steward.capture.nodes.receiver import NodeReceiver

    link = JournalLink(settings.state_dir, stop)
    receiver = wait_for_resource(
        lambda: NodeReceiver(settings, link.append_once),
        stop,
        send_heartbeat,
    )
    receiver.run(stop, send_heartbeat)


def run_kafka_source(
    settings: Settings, name: str, stop: Stop, send_heartbeat: SendHeartbeat
) -> None:
    """Run the consumer of a Kafka topic."""
    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    if name == min(settings.consume):
        link.append(recover_foreign_orphans(settings, reader))
    make_kafka_source(settings, name, reader, link.append).run(stop, send_heartbeat)


def run_capture(
    settings: Settings, cluster: str, share: int, stop: Stop, send_heartbeat: SendHeartbeat
) -> None:
    """Run the capture of one share of a cluster's spool."""
    share_of = (share, CAPTURE_PROCESSES)
    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    with open_capture(
        settings, cluster, *share_of, reader, link.append_rows, stop, send_heartbeat
    ) as capture:
        link.append(recover_orphans(settings, cluster, *share_of, reader))
        capture.run(stop, send_heartbeat)


@contextmanager
def open_capture(
    settings: Settings,
    cluster: str,
    share: int,
    of: int,
    reader: JournalReader,
    append: AppendRows,
    stop: Stop,
    send_heartbeat: SendHeartbeat,
) -> Iterator[SpoolCapture]:
    """Open the capture of one of ``of`` shares of a cluster's spool, with everything it needs."""
    cluster_settings = settings.cluster[cluster]
    plan = SpoolPlan(
        cluster=cluster,
        root=wait_for_resource(lambda: find_cluster_spool(settings, cluster), stop, send_heartbeat),
        share=share,
        of=of,
        known=partial(_is_known, CapturedScripts(settings.state_dir, reader), cluster),
        unfinished=partial(list_unfinished, settings, cluster),
        max_held=raise_descriptor_limit(),
    )
    spool = load_scheduler(cluster_settings.scheduler).open(plan)
    # Each process has its own stores, so that none closes another's descriptors.
    stores = make_stores(settings)
    yield SpoolCapture(
        cluster,
        spool,
        list(stores),
        make_redactor(settings),
        append,
        keep_environments=settings.archive.environments,
    )


def _is_known(captured: CapturedScripts, cluster: str, job_id: int, mtime_ns: int) -> bool:
    """Return True if a script was captured before."""
    try:
        return captured.was_captured(cluster, make_script_key(job_id, mtime_ns))
    except Unavailable as error:
        # Capturing a script twice is harmless; ending would drop those held open.
        log.warning("cannot look up earlier captures: %s", error)
        return False


def raise_descriptor_limit() -> int:
    """Raise the descriptor limit; return how many scripts a capture may hold open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Services and shells start with a soft limit of 1024, for the sake of select(2).
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Two for each script, and as many again may come by inotify between two reads.
    return min(4000, hard // 8)


def recover_orphans(
    settings: Settings, cluster: str, share: int, of: int, reader: JournalReader
) -> list[Event]:
    """Recover the events that a cluster's stored scripts lost, from all readable stores."""
    events: list[Event] = []
    captured = CapturedScripts(settings.state_dir, reader)
    scheduler = load_scheduler(settings.cluster[cluster].scheduler)
    for store in make_stores(settings):
        try:
            events += recover_lost_scripts(
                store,
                cluster,
                lambda job_id, mtime_ns: captured.can_delete_bytes(
                    cluster, make_script_key(job_id, mtime_ns)
                ),
                lambda job_id, mtime_ns: reader.has_event(
                    cluster, make_script_key(job_id, mtime_ns)
                ),
                lambda job_id: scheduler.share_of(job_id, of) == share,
            )
        except Unavailable as error:
            # The next start retries; meanwhile nothing in the store can be lost.
            log.debug("cannot search %s for scripts without an event: %s", store.directory, error)
    captured.close()
    return events


def find_cluster_spool(settings: Settings, cluster: str) -> str:
    """Return a cluster's spool: as configured, the scheduler's usual one, or as Slurm says.

    Raises:
        Unavailable: Slurm does not answer.
    """
    cluster_settings = settings.cluster[cluster]
    return (
        cluster_settings.spool
        or load_scheduler(cluster_settings.scheduler).default_root
        or Slurm(cluster, cluster_settings).config()["StateSaveLocation"]
    )
