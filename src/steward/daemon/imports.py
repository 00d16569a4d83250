"""Imports of old data: ``archive import`` and ``accounting import``, with or without a daemon.

`import_archive_tree` imports an archive of job_archive or SArchive, `import_stored_scripts` the
scripts in slurmdbd, `import_history` jobs and steps from slurmdbd, `import_records_file` a file by
sacct or a job log. All append events to the journal: through its writer's process if a daemon runs,
otherwise directly (`_open_journal`); the next daemon then applies them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from steward.accounting import imports
from steward.accounting.imports import (
    ImportEventMaker,
    ImportResult,
    RunCounter,
    get_positions_path,
    import_days,
    import_job_log,
    import_sacct_file,
)
from steward.archive.imports import (
    ScriptImportResult,
    StoredSubmission,
    TreeKind,
    import_stored,
    import_tree,
)
from steward.capture.script_lookup import CapturedScripts
from steward.capture.slurm_spool import read_spooled_script
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import NotFound, UsageError
from steward.core.events import Event, make_script_key
from steward.core.journal import Journal, JournalLink, JournalReader, JournalUnavailable
from steward.core.journal.control import WritePositions, send_command
from steward.core.journal.server import lock_state_dir
from steward.core.journal.store import encode_rows
from steward.core.records import JobRecord
from steward.core.redaction import Redactor, make_redactor
from steward.core.script_stores import make_stores
from steward.core.sqlite import SqliteMissing
from steward.core.waits import Stop
from steward.jobs import JobFilter, Jobs, ListPosition, database_path
from steward.jobs.identity import is_prompt
from steward.jobs.retention import get_leader_id
from steward.slurm import Slurm
from steward.slurm.environment import Environment, read_environment
from steward.slurm.sacct import SacctHistory, parse_job_row
from steward.slurm.users import NameResolver

Report = Callable[[int], None]

_DAY: Final = timedelta(days=1)
_MOST_JOB_IDS: Final = 200_000
_PAGE_JOBS: Final = 500


def import_archive_tree(
    settings: Settings, cluster: str, kind: TreeKind, root: str, report: Report
) -> ScriptImportResult:
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
    _check_cluster(settings, cluster)
    with _open_journal(settings) as append:
        return import_tree(
            root,
            kind,
            cluster,
            make_stores(settings).find_usable(),
            _make_redactor(settings),
            append,
            environments=settings.archive.environments,
            report=report,
        )


def import_stored_scripts(
    settings: Settings, cluster: str, since: datetime, until: datetime, report: Report
) -> ScriptImportResult:
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
        NotFound: slurmdbd lists no job in the period.
        Unavailable: Nothing can be written.
    """
    _check_cluster(settings, cluster)
    slurm = Slurm(cluster, settings.cluster[cluster])
    history = slurm.history()
    if history is None:
        raise UsageError(f"cluster {cluster!r} has no slurmdbd to import from")
    with (
        _open_journal(settings) as append,
        closing(CapturedScripts(settings.state_dir, JournalReader(settings.state_dir))) as captured,
    ):
        result = import_stored(
            _iterate_submissions(settings, slurm, history, (since, until), captured),
            cluster,
            make_stores(settings).find_usable(),
            _make_redactor(settings),
            append,
            environments=settings.archive.environments,
            report=report,
        )
    if result == ScriptImportResult() and not history.passed_over:
        raise _make_no_jobs(cluster, since, until)
    return msgspec.structs.replace(result, malformed=history.passed_over)


def import_history(
    settings: Settings,
    cluster: str,
    since: datetime,
    until: datetime,
    report: imports.ImportProgress,
) -> ImportResult:
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
        NotFound: slurmdbd lists no job in the period, nor for years around it.
        Unavailable: Nothing can be written.
    """
    _check_cluster(settings, cluster)
    slurm = Slurm(cluster, settings.cluster[cluster])
    history = slurm.history()
    if history is None:
        raise UsageError(f"cluster {cluster!r} has no slurmdbd to import from")
    maker = ImportEventMaker(cluster, make_redactor(settings).redact_record)
    positions_path = get_positions_path(settings.state_dir)

    def count_observed(day: datetime, day_end: datetime) -> int:
        try:
            jobs = Jobs(database_path(settings.state_dir))
        except SqliteMissing:
            return 0
        with closing(jobs):
            return jobs.count_observed_runs(day, day_end, cluster)

    with _open_journal(settings) as append:
        result = import_days(
            *(history, cluster, since, until, maker, slurm.resolver, append, positions_path),
            report,
            count_observed=count_observed,
        )
    is_empty = msgspec.structs.replace(result, went_on="") == ImportResult()
    if is_empty and not history.has_jobs_near(since, until):
        raise _make_no_jobs(cluster, since, until)
    return result


def _make_no_jobs(cluster: str, since: datetime, until: datetime) -> NotFound:
    """Return the error of an import from slurmdbd that found no job."""
    return NotFound(
        f"slurmdbd lists no job of cluster {cluster} from {since:%Y-%m-%dT%H:%M:%S} to "
        f"{until:%Y-%m-%dT%H:%M:%S} UTC: give another period with -S and -E. If jobs ran "
        "then, look for 'Problem getting jobs' in slurmdbd's log",
        cluster,
    )


def import_records_file(
    settings: Settings,
    cluster: str,
    path: str,
    times: tuple[datetime | None, datetime | None],
    report: imports.ImportProgress,
) -> ImportResult:
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
    _check_cluster(settings, cluster)
    maker = ImportEventMaker(cluster, make_redactor(settings).redact_record)
    is_table = imports.is_sacct_file(path)
    with _open_journal(settings) as append:
        if not is_table:
            return import_job_log(path, cluster, maker, append, report, window=times)
        positions_path = get_positions_path(settings.state_dir)
        zone = _get_zone(settings.cluster[cluster].timezone)
        return import_sacct_file(
            path,
            cluster,
            maker,
            NameResolver(),
            append,
            positions_path,
            report,
            zone=zone,
            window=times,
        )


def _get_zone(name: str) -> tzinfo:
    if name:
        return ZoneInfo(name)
    return datetime.now(UTC).astimezone().tzinfo or UTC


def _iterate_submissions(
    settings: Settings,
    slurm: Slurm,
    history: SacctHistory,
    times: tuple[datetime, datetime],
    captured: CapturedScripts,
) -> Iterator[StoredSubmission]:
    """Yield each submission in a period once: sacct also lists tasks and later runs."""
    redactor = make_redactor(settings)
    spool = settings.cluster[slurm.cluster].spool or slurm.config()["StateSaveLocation"]
    run_counter = RunCounter()
    # The last submission seen of each job id: an id may be used again.
    last_by_job: dict[int, tuple[int | None, datetime]] = {}
    since, until = times
    while since < until:
        # One day per query: sacct's output is on disk meanwhile.
        end = min(until, since + _DAY)
        has_rows = False
        for row in history.rows(since, end, steps=False):
            has_rows = True
            record = parse_job_row(row, slurm.resolver)
            submit = record.submit if record else None
            if record is None or submit is None:
                continue
            record = run_counter.count_restarts(record)
            leader, last = get_leader_id(record), last_by_job.get(get_leader_id(record))
            if len(last_by_job) >= _MOST_JOB_IDS:
                last_by_job.clear()  # a repeated submission has the same key
            if last == (record.uid, submit) or (last and record.restarts and last[0] == record.uid):
                continue
            last_by_job[leader] = (record.uid, submit)
            yield _make_submission(slurm, spool, redactor, record, submit, captured)
        if not has_rows:
            # If slurmdbd's query of its database fails, sacct lists nothing and exits with 0.
            for record in _iterate_known_jobs(settings, slurm.cluster, since, end):
                yield StoredSubmission(record=record, is_unanswered=True)
        since = end


def _iterate_known_jobs(
    settings: Settings, cluster: str, since: datetime, until: datetime
) -> Iterator[JobRecord]:
    """Yield the jobs in jobs.db that were submitted and started in a period, without tasks."""
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteMissing:
        return
    with closing(jobs):
        job_filter = JobFilter(clusters=(cluster,), since=since, until=until)
        position: ListPosition | None = None
        while page := jobs.list(job_filter, _PAGE_JOBS, position):
            for job in page:
                start = job.record.start
                is_listed = start is not None and since <= start < until
                if is_listed and get_leader_id(job.record) == job.job_id:
                    yield job.record
            position = page[-1].position


def _make_submission(
    slurm: Slurm,
    spool: str,
    redactor: Redactor,
    record: JobRecord,
    submit: datetime,
    captured: CapturedScripts,
) -> StoredSubmission:
    """Make one submission: script from the spool or slurmdbd, unless it is archived already."""
    leader, redacted = get_leader_id(record), redactor.redact_record(record)
    mtime_ns, script = read_spooled_script(spool, leader) or (0, None)
    if not is_prompt(mtime_ns, submit):
        mtime_ns, script = int(submit.timestamp()) * 10**9, None
    key = make_script_key(leader, mtime_ns)
    if captured.was_captured(slurm.cluster, key) or captured.has_script(
        slurm.cluster, leader, submit
    ):
        return StoredSubmission(record=redacted, is_known=True)
    stored = slurm.read_stored_script(record)
    if stored.is_unanswered:
        return StoredSubmission(record=redacted, is_unanswered=True)
    # The spool's mtime gives the same key as capture of the same entry; and a database may have
    # stored bytes that are not UTF-8 as "?".
    return StoredSubmission(
        record=redacted,
        script=script if script is not None and stored.script is not None else stored.script,
        environment=stored.environment,
        mtime_ns=mtime_ns,
    )


def _check_cluster(settings: Settings, cluster: str) -> None:
    if cluster not in settings.cluster:
        clusters = ", ".join(settings.cluster)
        raise UsageError(f"unknown cluster {cluster!r}: use one of {clusters}", cluster)


def _make_redactor(settings: Settings) -> Callable[[bytes], Environment]:
    redactor = make_redactor(settings)
    return lambda raw: read_environment(raw, redactor)


@contextmanager
def _open_journal(settings: Settings) -> Iterator[Append]:
    """Connect to the journal: through its writer's process, or as the writer if none runs."""
    stop = Stop()
    link = JournalLink(settings.state_dir, stop)
    try:
        send_command(settings.state_dir, WritePositions())
    except JournalUnavailable:
        # No daemon runs; the lock keeps one from starting meanwhile.
        lock = lock_state_dir(settings.state_dir, wait_s=1.0)
        journal = Journal(settings.state_dir)

        def append(events: Sequence[Event]) -> None:
            journal.append(encode_rows(events))

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
