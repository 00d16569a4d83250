"""Imports of old data: ``archive import`` and ``accounting import``, with or without a daemon.

`take_over_tree` imports an archive of job_archive or SArchive, `take_over_stored` the scripts in
slurmdbd, `take_over_history` jobs and steps from slurmdbd, `take_over_file` a file by sacct or a
job log. All append events to the journal: through its writer's process if a daemon runs, otherwise
directly (`_appending`); the next daemon then applies them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from steward.accounting import imports
from steward.accounting.imports import (
    Maker,
    RunCounter,
    Taken,
    places_path,
    take_days,
    take_log,
    take_table,
)
from steward.archive.imports import Imported, Submission, TreeKind, import_stored, import_tree
from steward.capture.captured_jobs import Known
from steward.capture.slurm_spool import spooled_script
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import UsageError
from steward.core.events import Event, script_key
from steward.core.incoming import Store, StoreUnavailable, stores_of
from steward.core.journal import Journal, JournalLink, JournalReader, JournalUnavailable
from steward.core.journal.server import take_lock
from steward.core.journal.store import rows_of
from steward.core.records import JobRecord
from steward.core.redaction import Redactor, redactor_of
from steward.core.waits import Stop
from steward.jobs.identity import is_prompt
from steward.jobs.retention import leader_of
from steward.slurm import Slurm
from steward.slurm.environment import Environment, read_environment
from steward.slurm.sacct import History, job_from_row
from steward.slurm.users import People

Report = Callable[[int], None]

_DAY: Final = timedelta(days=1)
_MOST_REMEMBERED: Final = 200_000


def take_over_tree(
    settings: Settings, cluster: str, kind: TreeKind, root: str, report: Report
) -> Imported:
    """Import the archive tree of job_archive or SArchive.

    Args:
        settings: Settings of the importing Steward.
        cluster: The cluster of the jobs.
        kind: The program that made the tree.
        root: Its root directory.
        report: Called with the number of scripts imported so far.

    Raises:
        UsageError: There is no such cluster in the settings.
        Unavailable: The tree cannot be read, or nothing can be written.
    """
    _check(settings, cluster)
    with _appending(settings) as append:
        return import_tree(
            root,
            kind,
            cluster,
            _store(settings),
            _redact(settings),
            append,
            environments=settings.archive.environments,
            report=report,
        )


def take_over_stored(
    settings: Settings, cluster: str, since: datetime, until: datetime, report: Report
) -> Imported:
    """Import the scripts that a cluster's slurmdbd stored.

    Args:
        settings: Settings of the importing Steward.
        cluster: The cluster.
        since: Start of the period.
        until: End of the period.
        report: Called with the number of scripts imported so far.

    Raises:
        UsageError: There is no such cluster, or it has no slurmdbd.
        SlurmError: slurmdbd does not answer.
        Unavailable: Nothing can be written.
    """
    _check(settings, cluster)
    slurm = Slurm(cluster, settings.cluster[cluster])
    history = slurm.history()
    if history is None:
        raise UsageError(f"cluster {cluster!r} has no slurmdbd: there is nothing to import from")
    with (
        _appending(settings) as append,
        closing(Known(settings.state_dir, JournalReader(settings.state_dir))) as known,
    ):
        return import_stored(
            _submissions(settings, slurm, history, (since, until), known),
            cluster,
            _store(settings),
            _redact(settings),
            append,
            environments=settings.archive.environments,
            report=report,
        )


def take_over_history(
    settings: Settings, cluster: str, since: datetime, until: datetime, report: imports.Report
) -> Taken:
    """Import jobs and steps from a cluster's slurmdbd, one day per query.

    Args:
        settings: Settings of the importing Steward.
        cluster: The cluster.
        since: Start of the period.
        until: End of the period.
        report: Called with the progress.

    Raises:
        UsageError: There is no such cluster, or it has no slurmdbd.
        SlurmError: slurmdbd does not answer.
        Unavailable: Nothing can be written.
    """
    _check(settings, cluster)
    slurm = Slurm(cluster, settings.cluster[cluster])
    history = slurm.history()
    if history is None:
        raise UsageError(f"cluster {cluster!r} has no slurmdbd: there is nothing to import from")
    maker = Maker(cluster, redactor_of(settings).record)
    places = places_path(settings.state_dir)
    with _appending(settings) as append:
        return take_days(
            history, cluster, since, until, maker, slurm.people, append, places, report
        )


def take_over_file(
    settings: Settings,
    cluster: str,
    path: str,
    times: tuple[datetime | None, datetime | None],
    report: imports.Report,
) -> Taken:
    """Import a file that sacct wrote, or another Steward's job log.

    Args:
        settings: Settings of the importing Steward.
        cluster: The cluster of the jobs.
        path: The file, or a job log's directory.
        times: Import only jobs that ended from the first time on, and before the second.
        report: Called with the progress.

    Raises:
        UsageError: There is no such cluster.
        AccountingError: The file cannot be read, or is of neither kind.
        Unavailable: Nothing can be written.
    """
    _check(settings, cluster)
    maker = Maker(cluster, redactor_of(settings).record)
    is_table = imports.is_table(path)
    with _appending(settings) as append:
        if not is_table:
            return take_log(path, cluster, maker, append, report, times=times)
        places = places_path(settings.state_dir)
        zone = _zone(settings.cluster[cluster].timezone)
        return take_table(
            path, cluster, maker, People(), append, places, report, zone=zone, times=times
        )


def _zone(name: str) -> tzinfo:
    if name:
        return ZoneInfo(name)
    return datetime.now(UTC).astimezone().tzinfo or UTC


def _submissions(
    settings: Settings,
    slurm: Slurm,
    history: History,
    times: tuple[datetime, datetime],
    known: Known,
) -> Iterator[Submission]:
    """Yield each submission in a period once: sacct also lists tasks and later runs."""
    redactor = redactor_of(settings)
    spool = settings.cluster[slurm.cluster].spool or slurm.config()["StateSaveLocation"]
    runs = RunCounter()
    # The last submission seen of each job id: an id may be used again.
    met: dict[int, tuple[int | None, datetime]] = {}
    since, until = times
    while since < until:
        # One day per query: sacct's output is on disk meanwhile.
        ends = min(until, since + _DAY)
        for row in history.rows(since, ends, steps=False):
            record = job_from_row(row, slurm.people)
            submit = record.submit if record else None
            if record is None or submit is None:
                continue
            record = runs.counted(record)
            leader, last = leader_of(record), met.get(leader_of(record))
            if len(met) >= _MOST_REMEMBERED:
                met.clear()  # a repeated submission has the same key
            if last == (record.uid, submit) or (last and record.restarts and last[0] == record.uid):
                continue
            met[leader] = (record.uid, submit)
            yield _submission(slurm, spool, redactor, record, submit, known)
        since = ends


def _submission(
    slurm: Slurm,
    spool: str,
    redactor: Redactor,
    record: JobRecord,
    submit: datetime,
    known: Known,
) -> Submission:
    """Make one submission: script from the spool or slurmdbd, unless it is archived already."""
    leader, clean = leader_of(record), redactor.record(record)
    mtime_ns, script = spooled_script(spool, leader) or (0, None)
    if not is_prompt(mtime_ns, submit):
        mtime_ns, script = int(submit.timestamp()) * 10**9, None
    key = script_key(leader, mtime_ns)
    if known.known(slurm.cluster, key) or known.has_script(slurm.cluster, leader, submit):
        return Submission(record=clean, is_known=True)
    stored = slurm.stored_script(record)
    # The spool's mtime gives the same key as capture of the same entry; and a database may have
    # stored bytes that are not UTF-8 as "?".
    return Submission(
        record=clean,
        script=script if script is not None and stored.script is not None else stored.script,
        environment=stored.environment,
        mtime_ns=mtime_ns,
    )


def _check(settings: Settings, cluster: str) -> None:
    if cluster not in settings.cluster:
        known = ", ".join(settings.cluster)
        raise UsageError(f"there is no cluster {cluster!r}: the clusters are {known}", cluster)


def _redact(settings: Settings) -> Callable[[bytes], Environment]:
    redactor = redactor_of(settings)
    return lambda raw: read_environment(raw, redactor)


def _store(settings: Settings) -> Store:
    """Return the preferred store that can be written now."""
    stores = list(stores_of(settings))
    for store in stores[:-1]:
        try:
            store.check()
        except StoreUnavailable:
            continue
        return store
    return stores[-1]


@contextmanager
def _appending(settings: Settings) -> Iterator[Append]:
    """Connect to the journal: through its writer's process, or as the writer if none runs."""
    stop = Stop()
    link = JournalLink(settings.state_dir, stop)
    try:
        link.ask("standings")
    except JournalUnavailable:
        # No daemon runs; the lock keeps one from starting meanwhile.
        lock = take_lock(settings.state_dir, wait_s=1.0)
        journal = Journal(settings.state_dir)

        def append(new: Sequence[Event]) -> None:
            journal.append(rows_of(new))

        try:
            yield append
        finally:
            journal.close()
            lock.close()
        return
    try:
        yield link.append
    finally:
        link.close()
