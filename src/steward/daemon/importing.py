"""``archive import``, ``accounting import``: take over what was kept before, daemon or no daemon.

With a daemon the events go to its journal's writer; without one this process
is the writer for as long as it takes, and the next daemon puts them to use.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

from steward.accounting import imports as books
from steward.archive.importer import Imported, Stored, TreeKind, import_stored, import_tree
from steward.config import Settings
from steward.consumers import Append
from steward.environment import Environment, read_environment
from steward.errors import UsageError
from steward.events import Event
from steward.incoming import Store, StoreUnavailable, stores_of
from steward.journal import Journal, JournalLink, JournalUnavailable
from steward.journal.lock import take_lock
from steward.journal.store import rows_of
from steward.records import JobRecord
from steward.redact import Redactor
from steward.slurm import Slurm
from steward.slurm.people import People
from steward.waiting import Stop

Report = Callable[[int], None]


def take_over_tree(
    settings: Settings, cluster: str, kind: TreeKind, root: str, report: Report
) -> Imported:
    """Take over a tree of job_archive or SArchive.

    Args:
        settings: Whose archive takes it over.
        cluster: The cluster whose jobs these were.
        kind: Which program made the tree.
        root: Its root directory.
        report: Told how many scripts have been taken over.

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
    """Take over the scripts that a cluster's slurmdbd stored.

    Args:
        settings: Whose archive takes them over.
        cluster: The cluster.
        since: Beginning of the time whose jobs are meant.
        until: Its end.
        report: Told how many scripts have been taken over.

    Raises:
        UsageError: There is no such cluster, or it has no slurmdbd.
        SlurmError: slurmdbd does not answer.
        Unavailable: Nothing can be written.
    """
    _check(settings, cluster)
    slurm = Slurm(cluster, settings.cluster[cluster])
    if not slurm.has_accounting():
        raise UsageError(f"cluster {cluster!r} has no slurmdbd: there is nothing to import from")
    with _appending(settings) as append:
        return import_stored(
            _stored(slurm, since, until, Redactor(settings.redact)),
            cluster,
            _store(settings),
            _redact(settings),
            append,
            environments=settings.archive.environments,
            report=report,
        )


def take_over_history(
    settings: Settings, cluster: str, since: datetime, until: datetime, report: books.Report
) -> books.Taken:
    """Take over what a cluster's slurmdbd knows of jobs and steps, a day a question.

    Args:
        settings: Whose books take it over.
        cluster: The cluster.
        since: Beginning of the time whose jobs are meant.
        until: Its end.
        report: Told how far it is.

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
    maker = books.Maker(cluster, Redactor(settings.redact).record)
    places = books.places_path(settings.state_dir)
    with _appending(settings) as append:
        return books.take_days(
            history, cluster, since, until, maker, slurm.people, append, places, report
        )


def take_over_file(
    settings: Settings,
    cluster: str,
    path: str,
    times: tuple[datetime | None, datetime | None],
    report: books.Report,
) -> books.Taken:
    """Take over a file that sacct wrote, or another Steward's job log.

    Args:
        settings: Whose books take it over.
        cluster: The cluster whose jobs these are.
        path: The file, or a job log's directory.
        times: Only jobs that ended from the first on, and before the second.
        report: Told how far it is.

    Raises:
        UsageError: There is no such cluster.
        AccountingError: The file cannot be read, or is neither.
        Unavailable: Nothing can be written.
    """
    _check(settings, cluster)
    maker = books.Maker(cluster, Redactor(settings.redact).record)
    is_table = books.is_table(path)
    with _appending(settings) as append:
        if not is_table:
            return books.take_log(path, cluster, maker, append, report, times=times)
        places = books.places_path(settings.state_dir)
        zone = _zone(settings.cluster[cluster].timezone)
        return books.take_table(
            path, cluster, maker, People(), append, places, report, zone=zone, times=times
        )


def _zone(name: str) -> tzinfo:
    if name:
        return ZoneInfo(name)
    return datetime.now(UTC).astimezone().tzinfo or UTC


def _stored(
    slurm: Slurm, since: datetime, until: datetime, redactor: Redactor
) -> Iterator[tuple[JobRecord, Stored]]:
    for job_id in slurm.stored_job_ids(since, until):
        records = slurm.accounted(job_id)
        if records:
            yield redactor.record(records[0]), slurm.stored_script(job_id)


def _check(settings: Settings, cluster: str) -> None:
    if cluster not in settings.cluster:
        known = ", ".join(settings.cluster)
        raise UsageError(f"there is no cluster {cluster!r}: the clusters are {known}", cluster)


def _redact(settings: Settings) -> Callable[[bytes], Environment]:
    redactor = Redactor(settings.redact)
    return lambda raw: read_environment(raw, redactor)


def _store(settings: Settings) -> Store:
    """The preferred store that can be written now."""
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
    """The way to the journal: its writer's process, or the writer itself where none runs."""
    stop = Stop()
    link = JournalLink(settings.state_dir, stop)
    try:
        link.ask("standings")
    except JournalUnavailable:
        # No daemon: whoever starts one meanwhile is held off by the lock.
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
