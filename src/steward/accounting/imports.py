"""Accounting imports: from slurmdbd, from a file of sacct, or from another job log.

:func:`import_days`, :func:`import_sacct_file` and :func:`import_job_log` read the source and make
events of ended runs and their steps through :class:`ImportEventMaker`, which redacts secrets and
counts restarts (:class:`RunCounter`). They append these packed: one jobs.imported event for about
1,000 of them, or for 4 MB of their texts. Runs that have not ended are left to their own cluster.
``imports.json`` keeps the position of each import from slurmdbd or a file of sacct
(:class:`ImportPosition`), so that an interrupted one continues. Importing something twice is
harmless: consumers know runs and steps by their keys.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from steward.accounting.errors import AccountingError
from steward.core.actions import Answer
from steward.core.consumers import Append, Rejected
from steward.core.events import Event, utc_now
from steward.core.files import describe_os_error, replace_file, resolve_path
from steward.core.imported import make_imported_run, make_imported_step, pack_events
from steward.core.layouts import format_count
from steward.core.records import RUN_TIMES, USAGE_LINE_FIELDS, JobRecord, UsageLine
from steward.core.timestamps import from_micros
from steward.jobs.event_intake import validate_event
from steward.jobs.line_sources import SkippedLine, load_job_log
from steward.jobs.run_merge import IMPORTED
from steward.slurm.job_states import FINISHED, strip_state_suffix
from steward.slurm.sacct import SacctRow, parse_job_row, parse_step_row, read_sacct_file
from steward.slurm.users import NameResolver

_MAX_POSITIONS: Final = 64


class ImportResult(Answer, frozen=True, kw_only=True):
    """Result of an import.

    Attributes:
        jobs: Number of runs imported, before an interruption too.
        steps: Number of steps imported.
        passed_over: Number of malformed or incomplete rows.
        unfinished: Number of jobs that have not ended; their own cluster reports them.
        unanswered: Number of observed runs that ended on days of which slurmdbd lists no job.
        went_on: Position from which an interrupted import continued, a day or bytes; "" if none.
    """

    jobs: int = 0
    steps: int = 0
    passed_over: int = 0
    unfinished: int = 0
    unanswered: int = 0
    went_on: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code 1 if the import is incomplete."""
        return 1 if self.unanswered or self.passed_over else 0

    def list_warnings(self) -> Iterable[str]:
        """Return that slurmdbd did not list observed runs, and that rows were skipped."""
        if self.unanswered:
            yield (
                f"slurmdbd did not list {format_count(self.unanswered, 'run')} that ended: it "
                "never had them, purged them, or its query of the database failed. If slurmdbd's "
                "log shows 'Problem getting jobs', repeat the import"
            )
        if self.passed_over:
            yield f"cannot parse {format_count(self.passed_over, 'row')}: no complete import"


class ImportPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of an import, interrupted or finished.

    Attributes:
        name: What is imported, and from which time on.
        done: Position: for slurmdbd the day, ``2026-11-20``; for a file its bytes or lines; ""
            when finished.
        result: Result of the part before that position, for slurmdbd of the days before that day.
    """

    name: str
    done: str = ""
    result: ImportResult = ImportResult()


def get_positions_path(state_dir: str) -> str:
    """Return the path of the file with the positions of imports."""
    return f"{state_dir}/imports.json"


def load_position(path: str, name: str) -> ImportPosition:
    """Return the position of an import, with ``done`` "" if it has not begun.

    Raises:
        AccountingError: The file cannot be read.
    """
    saved = (position for position in _load_positions(path) if position.name == name)
    return next(saved, ImportPosition(name=name))


def save_position(path: str, position: ImportPosition) -> None:
    """Save the position of an import; the oldest positions are dropped.

    Raises:
        AccountingError: The file cannot be written.
    """
    others = [other for other in _load_positions(path) if other.name != position.name]
    data = msgspec.json.encode([*others, position][-_MAX_POSITIONS:])
    try:
        # Root imports, too, into a directory of Steward's user.
        state = os.stat(os.path.dirname(path))
        owner = (state.st_uid, state.st_gid) if os.geteuid() == 0 else None
        target = resolve_path(path)
        with replace_file(target, 0o600, owner=owner, trusted=(state.st_uid,)) as file:
            file.write(data)
    except OSError as error:
        reason = describe_os_error(error, path)
        raise AccountingError(f"cannot write {path}: {reason}", path) from error


def _load_positions(path: str) -> list[ImportPosition]:
    """Load the positions of all imports; [] if there is no file."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[ImportPosition])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise AccountingError(
            f"cannot read {path}: {error}. Remove it: imports then start from the beginning, "
            "which does no harm",
            path,
        ) from error


_END_STATES: Final = FINISHED | {"REQUEUED", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
# A requeue sets the end of one run and the submit time of the next to the same moment.
_SAME_SUBMIT: Final = timedelta(seconds=2)
_MOST_REMEMBERED: Final = 200_000
_CACHED: Final = 1024
"""Number of redacted texts of steps in memory."""
_LONGEST_CACHED: Final = 400
"""Longest texts in that cache, in characters."""


class _LastRun(msgspec.Struct, frozen=True):
    """Last run seen of a job id."""

    submit: datetime
    end: datetime | None
    uid: int | None
    restarts: int
    state: str


class RunCounter:
    """Counter of restarts, from runs in time order; sacct shows restarts only since 23.02."""

    def __init__(self) -> None:
        self._last: dict[int, _LastRun] = {}

    def count_restarts(self, record: JobRecord) -> JobRecord:
        """Return the record of a run with its restart count."""
        submit = record.submit
        if submit is None:
            return record
        last = self._last.get(record.job_id)
        restarts = record.restarts
        if not restarts and last is not None and last.uid == record.uid:
            if submit == last.submit:
                restarts = last.restarts
            elif submit > last.submit and (
                last.state == "REQUEUED"
                or (last.end is not None and abs(submit - last.end) <= _SAME_SUBMIT)
            ):
                restarts = last.restarts + 1
        if len(self._last) >= _MOST_REMEMBERED:
            # Drop the older half; newer jobs are more likely to have further records.
            for job_id in list(self._last)[: _MOST_REMEMBERED // 2]:
                del self._last[job_id]
        self._last.pop(record.job_id, None)
        state = strip_state_suffix(record.state)
        self._last[record.job_id] = _LastRun(submit, record.end, record.uid, restarts, state)
        return msgspec.structs.replace(record, restarts=restarts)


class ImportEventMaker:
    """Maker of events from imported records and lines, in the source's order.

    Args:
        cluster: Cluster name of the jobs.
        redact: Removes secrets from a record.
        now: Returns the present time.
    """

    def __init__(
        self,
        cluster: str,
        redact: Callable[[JobRecord], JobRecord],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._redact = redact
        # Most steps are batch, extern, or repeat a submit line.
        self._redact_cached = lru_cache(_CACHED)(self._redact_texts)
        self._now = now
        self._runs = RunCounter()

    def make_run_event(self, record: JobRecord) -> Event | None:
        """Return the event of an ended run; None for a running one, which its cluster reports.

        Raises:
            Rejected: A number is out of range.
        """
        is_over = strip_state_suffix(record.state) in _END_STATES
        if record.submit is None or record.end is None or not is_over:
            return None
        record = self._redact(self._runs.count_restarts(record))
        event = make_imported_run(record, self._cluster, IMPORTED, self._now())
        validate_event(event)
        return event

    def make_step_event(self, run: Event, line: UsageLine) -> Event:
        """Return the event of a step of that run; raises as :meth:`make_run_event`."""
        texts = (line.name, line.submit_line)
        is_short = sum(map(len, texts)) <= _LONGEST_CACHED
        name, submit_line = (self._redact_cached if is_short else self._redact_texts)(*texts)
        if (name, submit_line) != texts:
            line = msgspec.structs.replace(line, name=name, submit_line=submit_line)
        event = make_imported_step(run, line)
        validate_event(event)
        return event

    def _redact_texts(self, name: str, submit_line: str) -> tuple[str, str]:
        """Redact the name and the submit line of a step."""
        record = self._redact(JobRecord(job_id=0, name=name, submit_line=submit_line))
        return record.name, record.submit_line


_ROWS_AT_ONCE: Final = 1000
"""Number of runs and steps from which one event is appended for them."""
_TEXT_AT_ONCE: Final = 4_000_000
"""Length of their texts, in characters, from which one event is appended for them."""
_ROW_LENGTH: Final = 300
"""Length that a run or step counts besides its texts, which its numbers take."""
_DAY: Final = timedelta(days=1)

ImportProgress = Callable[[int, int | None, str], None]
"""Progress callback: amount done, total (None if unknown), and unit."""


class RowSource(Protocol):
    """Source of accounting rows by period, such as ``steward.slurm.sacct.SacctHistory``."""

    passed_over: int

    def rows(self, since: datetime, until: datetime) -> Iterable[SacctRow]:
        """Return all rows of a period."""
        ...


class _ImportState:
    """State of an import: the current run, and events not appended yet."""

    def __init__(
        self,
        maker: ImportEventMaker,
        resolver: NameResolver,
        append: Append,
        zone: tzinfo,
        result: ImportResult = ImportResult(),  # noqa: B008 -- it is frozen
    ) -> None:
        self._maker = maker
        self._resolver = resolver
        self._append = append
        self._zone = zone
        self._events: list[Event] = []
        self._job: JobRecord | None = None
        self._run: Event | None = None
        self._length = 0
        self._run_length = 0
        self._is_continued = False
        self.jobs = result.jobs
        self.steps = result.steps
        self.passed_over = result.passed_over
        self.unfinished = result.unfinished
        self.unanswered = result.unanswered

    def process_row(self, row: SacctRow, cluster: str) -> None:
        """Process a row; a step's row follows its job's."""
        if "." in (row.get("jobid") or row.get("jobidraw", "")):
            self._process_step_row(row, cluster)
            return
        record = parse_job_row(row, self._resolver, self._zone)
        if record is None:
            self._job = self._run = None
            self.passed_over += 1
        else:
            self.process_run(record)

    def process_run(self, record: JobRecord) -> None:
        """Process a run, whose steps follow."""
        self.flush_full()
        self._job, self._run = record, None
        try:
            self._run = self._maker.make_run_event(record)
        except Rejected:
            self._job = None
            self.passed_over += 1
            return
        if self._run is None:
            self.unfinished += 1
        else:
            self.jobs += 1
            self._run_length = 0
            self._add(self._run, record)

    def _process_step_row(self, row: SacctRow, cluster: str) -> None:
        """Process a step's row, if it belongs to the current job."""
        job = self._job
        line = None if job is None else parse_step_row(row, job, cluster, self._zone)
        raw = row.get("jobidraw", "").partition(".")[0]
        if job is None or line is None or (raw and raw != str(job.job_id)):
            self.passed_over += 1
        else:
            self.process_step(line)

    def process_step(self, line: UsageLine) -> None:
        """Process a step of the last run."""
        if self._run is None:
            return
        try:
            event = self._maker.make_step_event(self._run, line)
        except Rejected:
            self.passed_over += 1
            return
        if self._run_length >= _TEXT_AT_ONCE:
            # Where a run is divided depends on it alone: repeated, its events have the same keys.
            self.flush()
            self._is_continued = True
            self._run_length = 0
            self._add(self._run, self._run.body.record)
        self.steps += 1
        self._add(event, line)

    def _add(self, event: Event, record: JobRecord | UsageLine) -> None:
        """Collect an event, and count its length."""
        texts = (value for value in msgspec.structs.astuple(record) if isinstance(value, str))
        length = _ROW_LENGTH + sum(map(len, texts))
        self._length += length
        self._run_length += length
        self._events.append(event)

    def flush_full(self) -> bool:
        """Append the collected events if they are many, long or continued; return True if so."""
        is_full = len(self._events) >= _ROWS_AT_ONCE or self._length >= _TEXT_AT_ONCE
        if not (is_full or self._is_continued):
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Append the collected events."""
        if self._events:
            self._append([pack_events(self._events, is_continued=self._is_continued)])
        self._events = []
        self._length = 0
        self._is_continued = False

    def make_result(self, went_on: str = "") -> ImportResult:
        """Return the result so far."""
        counts = msgspec.convert(self, ImportResult, from_attributes=True)
        return msgspec.structs.replace(counts, went_on=went_on)


def import_days(
    source: RowSource,
    cluster: str,
    since: datetime,
    until: datetime,
    maker: ImportEventMaker,
    resolver: NameResolver,
    append: Append,
    positions_path: str,
    report: ImportProgress,
    *,
    count_observed: Callable[[datetime, datetime], int],
) -> ImportResult:
    """Import slurmdbd's history of a period, one query per day.

    Args:
        source: The source, such as slurmdbd.
        cluster: Cluster name of the jobs.
        since: Begin of the period.
        until: End of the period.
        maker: Makes the events.
        resolver: Resolves names.
        append: Appends events to the journal.
        positions_path: Path of the file with positions of imports.
        report: Progress callback, in days.
        count_observed: Counts the observed runs in jobs.db that ended in a period.

    Raises:
        SlurmError: slurmdbd does not answer.
        Unavailable: The journal or the positions cannot be written now.
    """
    name = f"slurmdbd {cluster} {since.isoformat()}"
    saved = load_position(positions_path, name)
    # Repeat the last day: a job requeued at its end continues on the next day.
    done = saved.done
    period_start = max(since, _get_midnight(date.fromisoformat(done))) if done else since
    state = _ImportState(maker, resolver, append, UTC, saved.result)
    total = max(1, -(-(until - since) // _DAY))
    while period_start < until:
        period_end = min(until, _get_midnight(period_start.date() + _DAY))
        has_rows = False
        before, malformed_before = state.make_result(), source.passed_over
        for row in source.rows(period_start, period_end):
            has_rows = True
            state.process_row(row, cluster)
        state.flush()
        state.passed_over += source.passed_over - malformed_before
        if not has_rows:
            # If slurmdbd's query of its database fails, sacct lists nothing and exits with 0.
            state.unanswered += count_observed(period_start, period_end)
        if period_end < until:
            day = period_start.date().isoformat()
            save_position(positions_path, ImportPosition(name=name, done=day, result=before))
        report(min(total, (period_end - since) // _DAY), total, f"days, {state.jobs} jobs")
        period_start = period_end
    # Finished: a repeated import starts anew, which is harmless.
    save_position(positions_path, ImportPosition(name=name))
    return state.make_result(done)


def import_sacct_file(
    path: str,
    cluster: str,
    maker: ImportEventMaker,
    resolver: NameResolver,
    append: Append,
    positions_path: str,
    report: ImportProgress,
    *,
    zone: tzinfo = UTC,
    delimiter: str = "|",
    window: tuple[datetime | None, datetime | None] = (None, None),
) -> ImportResult:
    """Import a file that ``sacct -P`` wrote.

    Args:
        path: The file.
        cluster: Cluster name of the jobs.
        maker: Makes the events.
        resolver: Resolves names.
        append: Appends events to the journal.
        positions_path: Path of the file with positions of imports.
        report: Progress callback, in bytes.
        zone: Time zone of the file's times.
        delimiter: Separator of columns.
        window: Import only jobs that ended at or after the first time and before the second.

    Raises:
        AccountingError: The file cannot be read.
        SlurmError: The file is not output of sacct.
        Unavailable: The journal or the positions cannot be written now.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            name = f"file {cluster} {path} {status.st_size} {status.st_mtime_ns}"
            saved = load_position(positions_path, name)
            done = int(saved.done or 0)
            state = _ImportState(maker, resolver, append, zone, saved.result)
            is_wanted = False
            previous = 0
            for row, position in read_sacct_file(file, delimiter):
                if row is None:
                    state.passed_over += position > done
                    previous = position
                    continue
                is_job = "." not in (row.get("jobid") or row.get("jobidraw", ""))
                if is_job:
                    if state.flush_full():
                        so_far = ImportPosition(
                            name=name, done=str(previous), result=state.make_result()
                        )
                        save_position(positions_path, so_far)
                    report(position, status.st_size, "bytes")
                    is_wanted = position > done and _is_within(row, zone, window)
                if is_wanted:
                    state.process_row(row, cluster)
                previous = position
            state.flush()
            save_position(positions_path, ImportPosition(name=name))
    except OSError as error:
        raise AccountingError(f"cannot read {path}: {error.strerror}", path) from error
    return state.make_result(saved.done)


def import_job_log(
    path: str,
    cluster: str,
    maker: ImportEventMaker,
    append: Append,
    report: ImportProgress,
    *,
    window: tuple[datetime | None, datetime | None] = (None, None),
) -> ImportResult:
    """Import the job log of another Steward.

    Args:
        path: The job log's directory, or one day's file.
        cluster: Cluster name of the jobs; lines of other clusters are skipped.
        maker: Makes the events.
        append: Appends events to the journal.
        report: Progress callback, in lines.
        window: Import only jobs that ended at or after the first time and before the second.

    Raises:
        AccountingError: The job log cannot be read.
        Unavailable: The journal cannot be written now.
    """
    state = _ImportState(maker, NameResolver(), append, UTC)
    garbled = 0

    def count_skipped(_path: str, _number: int, _why: str) -> None:
        nonlocal garbled
        garbled += 1

    is_wanted = False
    for number, line in enumerate(_read_lines(path, count_skipped), start=1):
        if line.step == "":
            report(number, None, "lines")
            ended = from_micros(line.end_us) if line.end_us else None
            is_wanted = (
                line.cluster == cluster and not line.piece_us and _is_in_window(ended, window)
            )
            if is_wanted:
                state.process_run(_line_to_record(line))
        elif is_wanted:
            state.process_step(msgspec.structs.replace(line, source="slurmdbd"))
    state.flush()
    state.passed_over += garbled
    return state.make_result("")


def is_sacct_file(path: str) -> bool:
    """Return True if a file looks like output of sacct, not a directory or JSON lines.

    Raises:
        AccountingError: The file cannot be read.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode) or path.endswith((".zst", ".parquet")):
            return False
        with open(path, "rb") as file:
            return not file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise AccountingError(f"cannot read {path}: {error.strerror}", path) from error


def _read_lines(path: str, passed_over: SkippedLine) -> Iterator[UsageLine]:
    yield from load_job_log().read_lines(path, passed_over)


def _get_midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _is_within(
    row: SacctRow, zone: tzinfo, window: tuple[datetime | None, datetime | None]
) -> bool:
    """Return True if a row's job ended within the requested times."""
    if window == (None, None):
        return True
    record = parse_job_row(row, NameResolver(), zone)
    return record is not None and _is_in_window(record.end, window)


def _is_in_window(end: datetime | None, window: tuple[datetime | None, datetime | None]) -> bool:
    """Return True if an end lies within the requested times."""
    since, until = window
    if end is None:
        return False
    return (since is None or end >= since) and (until is None or end < until)


def _line_to_record(line: UsageLine) -> JobRecord:
    """Convert a run's line to a record."""
    fields = {
        field: getattr(line, field)
        for field in USAGE_LINE_FIELDS
        if field in JobRecord.__struct_fields__
    }
    for name in RUN_TIMES:
        value_us = getattr(line, f"{name}_us")
        fields[name] = from_micros(value_us) if value_us else None
    return JobRecord(**fields)


__all__ = [
    "ImportEventMaker",
    "ImportPosition",
    "ImportProgress",
    "ImportResult",
    "RunCounter",
    "get_positions_path",
    "import_days",
    "import_job_log",
    "import_sacct_file",
    "is_sacct_file",
]
