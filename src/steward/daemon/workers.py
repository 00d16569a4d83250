"""Workers that a configuration needs, and how each connects sources, journal and consumers.

Sources append to the journal and consumers read from it; neither knows the other.

`preload_page_modules` imports the modules of web pages before the socket's process forks, so that
all its children share them. Only with a web server is that worth the memory; command lines can wait
a little. `make_parts` returns the list of workers for the supervisor. `get_sink_factories`,
`get_consumer_factories` and `get_slurm_factories` return factories of consumers. ``run_...``
functions are the main functions of worker processes: journal, receivers of controllers and compute
nodes, Kafka, mover, socket, capture. `open_capture` and `recover_orphans` assemble spool capture
and its crash recovery (also for `once.py`).
"""

import importlib
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial

import msgspec

from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.contents import make_script_contents
from steward.archive.files.sink import FilesSink
from steward.archive.sinks import make_sink
from steward.automation.operation import load_operations
from steward.capture.captured_scripts import CapturedScripts
from steward.capture.crash_recovery import recover_lost_scripts
from steward.capture.schedulers import SpoolPlan, load_scheduler
from steward.capture.spool import AppendRows, SpoolCapture
from steward.capture.unfinished_runs import catch_up_runs, read_unfinished_runs
from steward.core.access import Caller
from steward.core.config import Settings
from steward.core.consumers import Consumer
from steward.core.errors import Unavailable, UsageError
from steward.core.events import Event, make_script_key
from steward.core.incoming import make_stores
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.server import JournalServer
from steward.core.poll_status import PollStatusFiles
from steward.core.records import JobRecord
from steward.core.redaction import make_redactor
from steward.core.sqlite import SqliteUnavailable
from steward.core.waits import Backoff, Stop
from steward.daemon.consumer_workers import (
    ConsumerFactory,
    make_accounting_parts,
    run_consumers,
    wait_for_resource,
)
from steward.daemon.source_workers import make_jobcomp_parts, make_sensor_parts
from steward.daemon.supervisor import SendHeartbeat, WorkerSpec
from steward.jobs import Jobs, JobsConsumer, database_path
from steward.reports.history.consumer import HistoryConsumer
from steward.slurm import Slurm


def preload_page_modules(settings: Settings) -> None:
    """Import the modules that requests of web pages need."""
    for name in _list_page_modules(settings):
        importlib.import_module(name)
    load_operations()


def _list_page_modules(settings: Settings) -> Iterator[str]:
    """Yield the names of modules that requests of web pages need."""
    yield "ClusterShell.NodeSet"
    yield "steward.automation.rules.rulebook"
    yield "steward.automation.rules.templates"
    yield "jinja2.async_utils"
    yield "steward.reports.history.reader"
    yield "steward.accounting.job_page.page"
    if settings.bank.enabled:
        yield "steward.bank.ledger.ledger"
        yield "sqlalchemy.dialects.sqlite"
        yield "steward.bank.reconciliation"


log = logging.getLogger(__name__)

JOURNAL = "journal"
_MOVER_HANG_S = 3600.0
_FEEDING_HANG_S = 300.0
_BACKGROUND_NICENESS = 10
"""Niceness of workers that must not delay the archive: indexing may take seconds longer."""


def make_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the workers that a configuration needs, in the order in which they start.

    Raises:
        UsageError: The configuration is a controller's.
    """
    if settings.forward.to:
        raise UsageError("the configuration has [forward]: start 'steward controller' with it")
    workers = [
        WorkerSpec(
            name=JOURNAL,
            run=lambda stop, send_heartbeat: run_journal(settings, stop, send_heartbeat),
            last=True,
        )
    ]
    sinks = tuple(f"archive.{name}" for name in settings.files_sinks())
    workers += [
        _make_consumer_worker(settings, name, [factory])
        for name, factory in get_sink_factories(settings).items()
    ]
    workers += [
        _make_consumer_worker(
            settings,
            name,
            [factory],
            niceness=_BACKGROUND_NICENESS if name == CatalogConsumer.name else 0,
        )
        for name, factory in get_consumer_factories(settings).items()
    ]
    for cluster, cluster_settings in settings.cluster.items():
        if cluster_settings.remote:
            continue
        if cluster_settings.asks_slurm:
            factories = get_slurm_factories(settings, cluster)
            workers.append(
                _make_consumer_worker(settings, f"slurm.{cluster}", factories, registered=False)
            )
        for share in range(settings.capture_processes):
            workers.append(_make_capture_part(settings, cluster, share, after=(JOURNAL, *sinks)))
    workers += [
        WorkerSpec(
            name=f"mover.{name}", run=partial(run_mover, settings, name), hang_s=_MOVER_HANG_S
        )
        for name, sink in settings.files_sinks().items()
        if sink.move_to
    ]
    if settings.receive.listen:
        workers.append(_make_receiver_part(settings, after=(JOURNAL, *sinks)))
    if settings.nodes.listen:
        workers.append(make_nodes_worker(settings))
    workers += [
        _make_kafka_part(settings, name, after=(JOURNAL, *sinks)) for name in settings.consume
    ]
    workers += make_jobcomp_parts(settings)
    workers += make_sensor_parts(settings)
    workers += make_accounting_parts(settings)
    if settings.bank.enabled:
        from steward.daemon.consumer_workers import make_bank_parts

        workers += make_bank_parts(settings)
    if settings.rules.enabled:
        from steward.daemon.consumer_workers import make_rules_part

        workers.append(make_rules_part(settings))
    if settings.socket:
        workers.append(WorkerSpec(name="socket", run=partial(run_socket, settings)))
    return workers


def get_sink_factories(settings: Settings) -> dict[str, ConsumerFactory]:
    """Return the factory of each sink's consumer, by name."""
    return {
        f"archive.{name}": partial(_make_sink_consumer, settings, name)
        for name in settings.archive.sink
    }


def _make_sink_consumer(settings: Settings, name: str) -> Consumer:
    """Make a sink's consumer, and prepare its directories if possible."""
    sink = make_sink(settings, name)
    if isinstance(sink, FilesSink):
        try:
            # Capture starts after the sinks, and then finds the store that it prefers.
            sink.prepare()
        except Unavailable as error:
            # The feed retries; 'steward journal status' shows it.
            log.debug("%s is not ready: %s", sink.name, error)
    return sink


def get_consumer_factories(settings: Settings) -> dict[str, ConsumerFactory]:
    """Return the factory of each consumer in the state directory, by name."""
    factories: dict[str, ConsumerFactory] = {
        JobsConsumer.name: lambda: JobsConsumer(settings),
        HistoryConsumer.name: lambda: HistoryConsumer(settings),
    }
    if settings.archive.catalogue:
        directory = f"{settings.state_dir}/catalogue"
        factories[CatalogConsumer.name] = lambda: CatalogConsumer(
            directory, make_script_contents(settings, make_stores(settings))
        )
    return factories


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

    list_jobs = partial(list_unfinished, settings, cluster)
    redact = make_redactor(settings).redact_record
    return QueuePoller(
        *(cluster, settings.cluster[cluster]),
        unfinished=list_jobs,
        redact=redact,
        # On a controller, the gate implies that there is a bank elsewhere.
        report_polls=settings.bank.enabled or bool(settings.gate.ask),
        on_poll=partial(PollStatusFiles(settings.state_dir).put, cluster),
    )


def list_unfinished(settings: Settings, cluster: str) -> list[JobRecord]:
    """List the latest records of a cluster's jobs that have not ended as far as is known."""
    try:
        reader = JournalReader(settings.state_dir)
    except SqliteUnavailable:
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
    except SqliteUnavailable:
        return [], 0  # the database does not exist yet
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


def _make_consumer_worker(
    settings: Settings,
    name: str,
    factories: Sequence[ConsumerFactory],
    *,
    registered: bool = True,
    niceness: int = 0,
) -> WorkerSpec:
    """Return a worker that feeds consumers."""

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        os.nice(niceness)
        run_consumers(settings, factories, stop, send_heartbeat, registered=registered)

    return WorkerSpec(name=name, run=run, after=(JOURNAL,), hang_s=_FEEDING_HANG_S)


def _make_capture_part(
    settings: Settings, cluster: str, share: int, after: tuple[str, ...]
) -> WorkerSpec:
    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        run_capture(settings, cluster, share, stop, send_heartbeat)

    return WorkerSpec(name=f"capture.{cluster}.{share}", run=run, after=after)


def _make_receiver_part(settings: Settings, after: tuple[str, ...]) -> WorkerSpec:
    run = partial(run_receiver, settings)
    return WorkerSpec(name="receive", run=run, after=after, hang_s=_FEEDING_HANG_S)


def make_nodes_worker(settings: Settings) -> WorkerSpec:
    """Return the worker that receives data from compute nodes."""
    run = partial(run_nodes, settings)
    return WorkerSpec(name="nodes", run=run, after=(JOURNAL,), hang_s=_FEEDING_HANG_S)


def _make_kafka_part(settings: Settings, name: str, after: tuple[str, ...]) -> WorkerSpec:
    run = partial(run_kafka_source, settings, name)
    return WorkerSpec(name=f"consume.{name}", run=run, after=after, hang_s=_FEEDING_HANG_S)


def run_journal(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the journal's writer."""
    JournalServer(settings.state_dir, settings.journal, make_stores(settings)).run(
        stop, send_heartbeat
    )


def run_receiver(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the receiver of events from controllers on other hosts."""
    from steward.extensions.controllers import ControllerReceiver

    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    undivided = msgspec.structs.replace(settings, capture_processes=1)
    for cluster, cluster_settings in settings.cluster.items():
        if cluster_settings.remote:
            link.append(recover_orphans(undivided, cluster, 0, reader))
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
        lambda: NodeReceiver(settings, lambda rows: link.send_command("append", *rows)),
        stop,
        send_heartbeat,
    )
    receiver.run(stop, send_heartbeat)


def run_kafka_source(
    settings: Settings, name: str, stop: Stop, send_heartbeat: SendHeartbeat
) -> None:
    """Run the consumer of a Kafka topic."""
    from steward.daemon.source_workers import make_kafka_source, recover_foreign_orphans

    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    if name == min(settings.consume):
        link.append(recover_foreign_orphans(settings, reader))
    make_kafka_source(settings, name, reader, link.append).run(stop, send_heartbeat)


def run_mover(settings: Settings, name: str, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the mover of a sink's files; a dead mount hangs only this process."""
    from steward.archive.files.mover import ArchiveMover

    mover = wait_for_resource(lambda: ArchiveMover(settings, name), stop, send_heartbeat)
    backoff = Backoff(1.0, 60.0)
    last_error = ""
    while not stop.is_set():
        send_heartbeat()
        try:
            wait_s = mover.run_once(stop)
            backoff.reset()
            last_error = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if str(error) != last_error:
                last_error = str(error)
                log.error("archive.%s is not moved on for now: %s", name, error)
        stop.wait(wait_s)
    mover.close()


def run_socket(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the server of the daemon's socket."""
    from steward.admin.credentials.sessions import CredentialsContext, list_web_uids
    from steward.core.access import make_access
    from steward.daemon.contexts import make_registry
    from steward.daemon.idempotency import IdempotencyStore
    from steward.daemon.request_service import RequestService
    from steward.daemon.socket import SocketServer

    @cache
    def credentials() -> CredentialsContext:
        # Called in the process that serves a connection, never before the fork.
        return CredentialsContext(settings, access=make_access(settings))

    def knows(secret: str) -> Caller:
        return credentials().find_bearer(secret)

    @cache
    def repeats() -> IdempotencyStore:
        # Likewise.
        return IdempotencyStore(settings.state_dir)

    if settings.web.listen:
        preload_page_modules(settings)
    server = SocketServer(
        settings.socket,
        RequestService(make_registry(settings), identify=knows, open_store=repeats),
        is_web_server=lambda uid: uid in list_web_uids(settings),
    )
    server.run(stop, send_heartbeat)


def run_capture(
    settings: Settings, cluster: str, share: int, stop: Stop, send_heartbeat: SendHeartbeat
) -> None:
    """Run the capture of one share of a cluster's spool."""
    link = JournalLink(settings.state_dir, stop)
    reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
    with open_capture(
        settings, cluster, share, reader, link.append_rows, stop, send_heartbeat
    ) as capture:
        link.append(recover_orphans(settings, cluster, share, reader))
        capture.run(stop, send_heartbeat)


@contextmanager
def open_capture(
    settings: Settings,
    cluster: str,
    share: int,
    reader: JournalReader,
    append: AppendRows,
    stop: Stop,
    send_heartbeat: SendHeartbeat,
) -> Iterator[SpoolCapture]:
    """Open the capture of one share of a cluster's spool, with everything that it needs."""
    cluster_settings = settings.cluster[cluster]
    plan = SpoolPlan(
        cluster=cluster,
        root=wait_for_resource(lambda: find_cluster_spool(settings, cluster), stop, send_heartbeat),
        share=share,
        of=settings.capture_processes,
        known=partial(_is_known, CapturedScripts(settings.state_dir, reader), cluster),
        unfinished=partial(list_unfinished, settings, cluster),
        max_held=raise_descriptor_limit(),
        options={"torque_subdirs": cluster_settings.torque_subdirs},
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
        log.warning("cannot look up what was captured before: %s", error)
        return False


def raise_descriptor_limit() -> int:
    """Raise the descriptor limit; return how many scripts a capture may hold open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Services and shells start with a soft limit of 1024, for the sake of select(2).
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Two for each script, and as many again may come by inotify between two reads.
    return min(4000, hard // 8)


def recover_orphans(
    settings: Settings, cluster: str, share: int, reader: JournalReader
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
                lambda job_id: scheduler.share_of(job_id, settings.capture_processes) == share,
            )
        except Unavailable as error:
            # The next start retries; meanwhile nothing in the store can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
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
