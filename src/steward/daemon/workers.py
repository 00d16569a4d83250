"""Workers that a configuration needs, and how each connects sources, journal and consumers.

`parts_of` returns the list for the supervisor. ``run_...`` functions are the main functions of
worker processes: journal, capture, queue polls, receivers of controllers and compute nodes, Kafka,
mover, socket. `sink_makers`, `consumer_makers` and `slurm_makers` make consumers; `capturing` and
`orphans_of` assemble spool capture and its crash recovery (also for `once.py`).

`preload` imports what web pages need before the socket's process forks: all its children share the
modules. Only with a web server is that worth the memory; command lines can wait a little.
"""

import importlib
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial

import msgspec

from steward.archive.catalog.consumer import Catalogue
from steward.archive.contents import contents_of
from steward.archive.files.sink import FilesSink
from steward.archive.sinks import make_sink
from steward.automation.operation import operations
from steward.capture.captured_jobs import Known
from steward.capture.crash_recovery import recover
from steward.capture.schedulers import SpoolPlan, scheduler_called
from steward.capture.spool import AppendRows, Capture
from steward.capture.unfinished_runs import caught_up, unfinished
from steward.core.access import Asker
from steward.core.config import Settings
from steward.core.consumers import Consumer
from steward.core.errors import Unavailable, UsageError
from steward.core.events import Event, script_key
from steward.core.incoming import stores_of
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.server import JournalServer
from steward.core.poll_status import Looks
from steward.core.records import JobRecord
from steward.core.redaction import redactor_of
from steward.core.sqlite import SqliteUnavailable
from steward.core.waits import Backoff, Stop
from steward.daemon.consumer_workers import MakeConsumer, accounting_parts, patiently, run_consumers
from steward.daemon.source_workers import lines_parts, sensor_parts
from steward.daemon.supervisor import Beat, Part
from steward.jobs import Jobs, JobsConsumer, database_path
from steward.reports.history.consumer import HistoryConsumer
from steward.slurm import Slurm


def preload(settings: Settings) -> None:
    """Import the modules that requests of web pages need."""
    for name in _needed(settings):
        importlib.import_module(name)
    operations()


def _needed(settings: Settings) -> Iterator[str]:
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
_BACKGROUND = 10
"""Niceness of workers that must not delay the archive: indexing may take seconds longer."""


def parts_of(settings: Settings) -> list[Part]:
    """Return the workers that a configuration needs, in the order in which they start.

    Raises:
        UsageError: The configuration is a controller's.
    """
    if settings.forward.to:
        raise UsageError("the configuration has [forward]: start 'steward controller' with it")
    parts = [
        Part(name=JOURNAL, run=lambda stop, beat: run_journal(settings, stop, beat), last=True)
    ]
    sinks = tuple(f"archive.{name}" for name in settings.files_sinks())
    parts += [_feeding(settings, name, [make]) for name, make in sink_makers(settings).items()]
    parts += [
        _feeding(settings, name, [make], niceness=_BACKGROUND if name == Catalogue.name else 0)
        for name, make in consumer_makers(settings).items()
    ]
    for cluster, of in settings.cluster.items():
        if of.remote:
            continue
        if of.asks_slurm:
            asking = slurm_makers(settings, cluster)
            parts.append(_feeding(settings, f"slurm.{cluster}", asking, registered=False))
        for share in range(settings.capture_processes):
            parts.append(_capturing(settings, cluster, share, after=(JOURNAL, *sinks)))
    parts += [
        Part(name=f"mover.{name}", run=partial(run_mover, settings, name), hang_s=_MOVER_HANG_S)
        for name, sink in settings.files_sinks().items()
        if sink.move_to
    ]
    if settings.receive.listen:
        parts.append(_receiving(settings, after=(JOURNAL, *sinks)))
    if settings.nodes.listen:
        parts.append(nodes_part(settings))
    parts += [_consuming(settings, name, after=(JOURNAL, *sinks)) for name in settings.consume]
    parts += lines_parts(settings)
    parts += sensor_parts(settings)
    parts += accounting_parts(settings)
    if settings.bank.enabled:
        from steward.daemon.consumer_workers import banking_parts

        parts += banking_parts(settings)
    if settings.rules.enabled:
        from steward.daemon.consumer_workers import rules_part

        parts.append(rules_part(settings))
    if settings.socket:
        parts.append(Part(name="socket", run=partial(run_socket, settings)))
    return parts


def sink_makers(settings: Settings) -> dict[str, MakeConsumer]:
    """Return the factory of each sink's consumer, by name."""
    return {f"archive.{name}": partial(_sink, settings, name) for name in settings.archive.sink}


def _sink(settings: Settings, name: str) -> Consumer:
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


def consumer_makers(settings: Settings) -> dict[str, MakeConsumer]:
    """Return the factory of each consumer in the state directory, by name."""
    makers: dict[str, MakeConsumer] = {
        JobsConsumer.name: lambda: JobsConsumer(settings),
        HistoryConsumer.name: lambda: HistoryConsumer(settings),
    }
    if settings.archive.catalogue:
        directory = f"{settings.state_dir}/catalogue"
        makers[Catalogue.name] = lambda: Catalogue(
            directory, contents_of(settings, stores_of(settings))
        )
    return makers


def slurm_makers(settings: Settings, cluster: str) -> list[MakeConsumer]:
    """Return factories of the sources that query a cluster's Slurm, for a process of their own.

    Not the journal's process: reading twenty thousand jobs would delay its commits.
    """
    return [partial(snapshots_of, settings, cluster), partial(_standings, settings, cluster)]


def snapshots_of(settings: Settings, cluster: str) -> Consumer:
    """Make the source that polls a cluster's queue."""
    from steward.capture.queue_polls import Snapshots

    known = partial(unfinished_of, settings, cluster)
    redact = redactor_of(settings).record
    return Snapshots(
        *(cluster, settings.cluster[cluster]),
        unfinished=known,
        redact=redact,
        # On a controller, the gate implies that there is a bank elsewhere.
        tells_looks=settings.bank.enabled or bool(settings.gate.ask),
        looked=partial(Looks(settings.state_dir).put, cluster),
    )


def unfinished_of(settings: Settings, cluster: str) -> list[JobRecord]:
    """List the latest records of a cluster's jobs that have not ended as far as is known."""
    try:
        reader = JournalReader(settings.state_dir)
    except SqliteUnavailable:
        # The first start: no jobs are known, so none can have ended meanwhile.
        return []
    with closing(reader):
        if settings.forward.to:
            known, position = unfinished(settings.state_dir, cluster)
        else:
            known, position = _unfinished_in_jobs(settings, cluster)
        return caught_up(known, reader, cluster, position)


def _unfinished_in_jobs(settings: Settings, cluster: str) -> tuple[list[JobRecord], int]:
    """List unfinished jobs in the jobs database, with its journal position."""
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteUnavailable:
        return [], 0  # the database does not exist yet
    with closing(jobs):
        # Events applied twice are harmless; events left out would be missing.
        position = jobs.cursor()
        return jobs.unfinished(cluster), position


def _standings(settings: Settings, cluster: str) -> Consumer:
    """Make the source that reads a cluster's administrators and coordinators."""
    from steward.capture.associations import StandingSource
    from steward.core.access import Standings
    from steward.slurm import Slurm

    ask = Slurm(cluster, settings.cluster[cluster]).standing
    return StandingSource(cluster, ask, Standings(settings.state_dir))


def _feeding(
    settings: Settings,
    name: str,
    makers: Sequence[MakeConsumer],
    *,
    registered: bool = True,
    niceness: int = 0,
) -> Part:
    """Return a worker that feeds consumers."""

    def run(stop: Stop, beat: Beat) -> None:
        os.nice(niceness)
        run_consumers(settings, makers, stop, beat, registered=registered)

    return Part(name=name, run=run, after=(JOURNAL,), hang_s=_FEEDING_HANG_S)


def _capturing(settings: Settings, cluster: str, share: int, after: tuple[str, ...]) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        run_capture(settings, cluster, share, stop, beat)

    return Part(name=f"capture.{cluster}.{share}", run=run, after=after)


def _receiving(settings: Settings, after: tuple[str, ...]) -> Part:
    run = partial(run_receiving, settings)
    return Part(name="receive", run=run, after=after, hang_s=_FEEDING_HANG_S)


def nodes_part(settings: Settings) -> Part:
    """Return the worker that receives data from compute nodes."""
    run = partial(run_nodes, settings)
    return Part(name="nodes", run=run, after=(JOURNAL,), hang_s=_FEEDING_HANG_S)


def _consuming(settings: Settings, name: str, after: tuple[str, ...]) -> Part:
    run = partial(run_consuming, settings, name)
    return Part(name=f"consume.{name}", run=run, after=after, hang_s=_FEEDING_HANG_S)


def run_journal(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Run the journal's writer."""
    JournalServer(settings.state_dir, settings.journal, stores_of(settings)).run(stop, beat)


def run_receiving(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Run the receiver of events from controllers on other hosts."""
    from steward.extensions.controllers import Receiver

    link = JournalLink(settings.state_dir, stop)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    undivided = msgspec.structs.replace(settings, capture_processes=1)
    for cluster, of in settings.cluster.items():
        if of.remote:
            link.append(orphans_of(undivided, cluster, 0, reader))
    stores = stores_of(settings)
    known = Known(settings.state_dir, reader).known
    receiver = patiently(lambda: Receiver(settings, stores, known, link), stop, beat)
    receiver.run(stop, beat)


def run_nodes(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Run the receiver of data from agents on compute nodes."""
    from steward.capture.nodes.receiver import NodeReceiver

    link = JournalLink(settings.state_dir, stop)
    receiver = patiently(
        lambda: NodeReceiver(settings, lambda rows: link.ask("append", *rows)), stop, beat
    )
    receiver.run(stop, beat)


def run_consuming(settings: Settings, name: str, stop: Stop, beat: Beat) -> None:
    """Run the consumer of a Kafka topic."""
    from steward.daemon.source_workers import orphans_of_others, source_of

    link = JournalLink(settings.state_dir, stop)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    if name == min(settings.consume):
        link.append(orphans_of_others(settings, reader))
    source_of(settings, name, reader, link.append).run(stop, beat)


def run_mover(settings: Settings, name: str, stop: Stop, beat: Beat) -> None:
    """Run the mover of a sink's files; a dead mount hangs only this process."""
    from steward.archive.files.mover import Mover

    mover = patiently(lambda: Mover(settings, name), stop, beat)
    backoff = Backoff(1.0, 60.0)
    said = ""
    while not stop.is_set():
        beat()
        try:
            wait_s = mover.run_once(stop)
            backoff.reset()
            said = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if str(error) != said:
                said = str(error)
                log.error("archive.%s is not moved on for now: %s", name, error)
        stop.wait(wait_s)
    mover.close()


def run_socket(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Run the server of the daemon's socket."""
    from steward.admin.credentials.context import CredentialsRoom, web_uids
    from steward.core.access import access_of
    from steward.daemon.answers import Service
    from steward.daemon.contexts import action_registry
    from steward.daemon.idempotency import Repeats
    from steward.daemon.socket import SocketServer

    @cache
    def credentials() -> CredentialsRoom:
        # Called in the process that serves a connection, never before the fork.
        return CredentialsRoom(settings, access=access_of(settings))

    def knows(secret: str) -> Asker:
        return credentials().bearer(secret)

    @cache
    def repeats() -> Repeats:
        # Likewise.
        return Repeats(settings.state_dir)

    if settings.web.listen:
        preload(settings)
    server = SocketServer(
        settings.socket,
        Service(action_registry(settings), knows=knows, repeats=repeats),
        is_kept=lambda uid: uid in web_uids(settings),
    )
    server.run(stop, beat)


def run_capture(settings: Settings, cluster: str, share: int, stop: Stop, beat: Beat) -> None:
    """Run the capture of one share of a cluster's spool."""
    link = JournalLink(settings.state_dir, stop)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    with capturing(settings, cluster, share, reader, link.append_rows, stop, beat) as capture:
        link.append(orphans_of(settings, cluster, share, reader))
        capture.run(stop, beat)


@contextmanager
def capturing(
    settings: Settings,
    cluster: str,
    share: int,
    reader: JournalReader,
    append: AppendRows,
    stop: Stop,
    beat: Beat,
) -> Iterator[Capture]:
    """Open the capture of one share of a cluster's spool, with everything that it needs."""
    of = settings.cluster[cluster]
    plan = SpoolPlan(
        cluster=cluster,
        root=patiently(lambda: spool_of(settings, cluster), stop, beat),
        share=share,
        of=settings.capture_processes,
        known=partial(_is_known, Known(settings.state_dir, reader), cluster),
        unfinished=partial(unfinished_of, settings, cluster),
        most_held=most_held(),
        options={"torque_subdirs": of.torque_subdirs},
    )
    spool = scheduler_called(of.scheduler).open(plan)
    # Each process has its own stores, so that none closes another's descriptors.
    stores = stores_of(settings)
    yield Capture(
        cluster,
        spool,
        list(stores),
        redactor_of(settings),
        append,
        environments=settings.archive.environments,
    )


def _is_known(known: Known, cluster: str, job_id: int, mtime_ns: int) -> bool:
    """Return True if a script was captured before."""
    try:
        return known.known(cluster, script_key(job_id, mtime_ns))
    except Unavailable as error:
        # Capturing a script twice is harmless; ending would drop those held open.
        log.warning("cannot look up what was captured before: %s", error)
        return False


def most_held() -> int:
    """Raise the descriptor limit; return how many scripts a capture may hold open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Services and shells start with a soft limit of 1024, for the sake of select(2).
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Two for each script, and as many again may come by inotify between two reads.
    return min(4000, hard // 8)


def orphans_of(settings: Settings, cluster: str, share: int, reader: JournalReader) -> list[Event]:
    """Recover the events that a cluster's stored scripts lost, from all readable stores."""
    found: list[Event] = []
    known = Known(settings.state_dir, reader)
    scheduler = scheduler_called(settings.cluster[cluster].scheduler)
    for store in stores_of(settings):
        try:
            found += recover(
                store,
                cluster,
                lambda job_id, mtime_ns: known.over(cluster, script_key(job_id, mtime_ns)),
                lambda job_id, mtime_ns: reader.present(cluster, script_key(job_id, mtime_ns)),
                lambda job_id: scheduler.share_of(job_id, settings.capture_processes) == share,
            )
        except Unavailable as error:
            # The next start retries; meanwhile nothing in the store can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
    known.close()
    return found


def spool_of(settings: Settings, cluster: str) -> str:
    """Return a cluster's spool: as configured, the scheduler's usual one, or as Slurm says.

    Raises:
        Unavailable: Slurm does not answer.
    """
    of = settings.cluster[cluster]
    return (
        of.spool
        or scheduler_called(of.scheduler).default_root
        or Slurm(cluster, of).config()["StateSaveLocation"]
    )
