"""What a process that answers pages would import at its first question, imported before it starts.

The process that accepts connections forks one for each; what it has imported, they all
have. Only where there are pages is that worth its memory: command lines wait a little.
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
    """Import what the pages' questions need."""
    for name in _needed(settings):
        importlib.import_module(name)
    operations()


def _needed(settings: Settings) -> Iterator[str]:
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
"""Niceness of what must not hold up the archive: indexing may take seconds longer."""


def parts_of(settings: Settings) -> list[Part]:
    """The processes that a configuration asks for, in the order in which they start.

    Raises:
        UsageError: It is the configuration of a controller.
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
    """For each sink its consumer's name and how to make it."""
    return {f"archive.{name}": partial(_sink, settings, name) for name in settings.archive.sink}


def _sink(settings: Settings, name: str) -> Consumer:
    sink = make_sink(settings, name)
    if isinstance(sink, FilesSink):
        try:
            # Capture starts after the sinks: it then finds the store that it prefers.
            sink.prepare()
        except Unavailable as error:
            # The feed tries again, and says so where 'steward journal status' shows it.
            log.debug("%s is not ready: %s", sink.name, error)
    return sink


def consumer_makers(settings: Settings) -> dict[str, MakeConsumer]:
    """For each consumer within the state directory its name and how to make it."""
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
    """How to make the sources that ask a cluster's Slurm, for a process of their own.

    Not in the journal's: taking in twenty thousand jobs would hold up its commits.
    """
    return [partial(snapshots_of, settings, cluster), partial(_standings, settings, cluster)]


def snapshots_of(settings: Settings, cluster: str) -> Consumer:
    """The source that looks at a cluster's queue."""
    from steward.capture.queue_polls import Snapshots

    known = partial(unfinished_of, settings, cluster)
    redact = redactor_of(settings).record
    return Snapshots(
        *(cluster, settings.cluster[cluster]),
        unfinished=known,
        redact=redact,
        # On a controller it is the gate that tells that there is a bank elsewhere.
        tells_looks=settings.bank.enabled or bool(settings.gate.ask),
        looked=partial(Looks(settings.state_dir).put, cluster),
    )


def unfinished_of(settings: Settings, cluster: str) -> list[JobRecord]:
    """The latest records of a cluster's jobs that are not over as far as is known here."""
    try:
        reader = JournalReader(settings.state_dir)
    except SqliteUnavailable:
        # The first start: nothing is known yet, so nothing can have ended meanwhile.
        return []
    with closing(reader):
        if settings.forward.to:
            known, position = unfinished(settings.state_dir, cluster)
        else:
            known, position = _unfinished_in_jobs(settings, cluster)
        return caught_up(known, reader, cluster, position)


def _unfinished_in_jobs(settings: Settings, cluster: str) -> tuple[list[JobRecord], int]:
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteUnavailable:
        return [], 0  # It is not made yet.
    with closing(jobs):
        # Taken in again, events say no less; not taken in, they would be missing.
        position = jobs.cursor()
        return jobs.unfinished(cluster), position


def _standings(settings: Settings, cluster: str) -> Consumer:
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
    """The process that takes in what compute nodes send."""
    run = partial(run_nodes, settings)
    return Part(name="nodes", run=run, after=(JOURNAL,), hang_s=_FEEDING_HANG_S)


def _consuming(settings: Settings, name: str, after: tuple[str, ...]) -> Part:
    run = partial(run_consuming, settings, name)
    return Part(name=f"consume.{name}", run=run, after=after, hang_s=_FEEDING_HANG_S)


def run_journal(settings: Settings, stop: Stop, beat: Beat) -> None:
    """The process of the journal's writer."""
    JournalServer(settings.state_dir, settings.journal, stores_of(settings)).run(stop, beat)


def run_receiving(settings: Settings, stop: Stop, beat: Beat) -> None:
    """The process that takes in what controllers on other hosts report."""
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
    """The process that takes in what agents on compute nodes send."""
    from steward.capture.nodes.receiver import NodeReceiver

    link = JournalLink(settings.state_dir, stop)
    receiver = patiently(
        lambda: NodeReceiver(settings, lambda rows: link.ask("append", *rows)), stop, beat
    )
    receiver.run(stop, beat)


def run_consuming(settings: Settings, name: str, stop: Stop, beat: Beat) -> None:
    """The process that takes a topic of Kafka in."""
    from steward.daemon.source_workers import orphans_of_others, source_of

    link = JournalLink(settings.state_dir, stop)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    if name == min(settings.consume):
        link.append(orphans_of_others(settings, reader))
    source_of(settings, name, reader, link.append).run(stop, beat)


def run_mover(settings: Settings, name: str, stop: Stop, beat: Beat) -> None:
    """The process that moves a sink's files on; it may hang on a dead mount, alone."""
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
    """The process that answers requests."""
    from steward.admin.credentials.context import CredentialsRoom, web_uids
    from steward.core.access import access_of
    from steward.daemon.answers import Service
    from steward.daemon.contexts import action_registry
    from steward.daemon.idempotency import Repeats
    from steward.daemon.socket import SocketServer

    @cache
    def credentials() -> CredentialsRoom:
        # Called in the process that serves a connection, never before it is forked.
        return CredentialsRoom(settings, access=access_of(settings))

    def knows(secret: str) -> Asker:
        return credentials().bearer(secret)

    @cache
    def repeats() -> Repeats:
        # So is this.
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
    """A process that captures one share of a cluster's spool."""
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
    """A capture of one share of a cluster's spool, with everything that it needs."""
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
    # Each process has its own stores: descriptors of one must not be closed by another.
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
    try:
        return known.known(cluster, script_key(job_id, mtime_ns))
    except Unavailable as error:
        # Taking a script again is harmless; ending would drop those that are held open.
        log.warning("cannot look up what was captured before: %s", error)
        return False


def most_held() -> int:
    """How many scripts a capture may hold open, after taking all descriptors that it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Services and shells start with a soft limit of 1024, for the sake of select(2).
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Two for each script, and as many again may come by inotify between two looks.
    return min(4000, hard // 8)


def orphans_of(settings: Settings, cluster: str, share: int, reader: JournalReader) -> list[Event]:
    """The events of a cluster's kept bytes that lost theirs, of every store that can be read."""
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
            # The next start looks again; meanwhile nothing in there can be lost.
            log.debug("no orphans are looked for in %s: %s", store.directory, error)
    known.close()
    return found


def spool_of(settings: Settings, cluster: str) -> str:
    """A cluster's spool: the scheduler's usual one, or asked of Slurm, where not configured.

    Raises:
        Unavailable: Slurm does not answer.
    """
    of = settings.cluster[cluster]
    return (
        of.spool
        or scheduler_called(of.scheduler).default_root
        or Slurm(cluster, of).config()["StateSaveLocation"]
    )
