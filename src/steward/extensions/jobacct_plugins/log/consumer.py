"""Consumer ``accounting.log``: writes the job log, each record once, and closes its days.

:class:`DayCloser` packs a day some time after its end (``parquet``) and blanks the text of purged
jobs (``purges``). Each is a process of its own, which ends and frees its memory. New files are
swapped in by two repeatable steps: the day is marked as swapping, then files are renamed and
removed, then it is marked as closed.

A record belongs to the day of its run's end, so records of unfinished runs wait in a database
(``state``). :class:`LogConsumer` appends a batch to the days' files and commits their lengths
together with the cursor: a crash in between leaves bytes beyond the known length, which are cut off
before the batch is written again.

:class:`LogPlugin` represents the log among the accounting plugins. Its hooks do nothing: hooks are
called at least once, but the log has each record once.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer, Rejected
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    ARCHIVE_PURGE,
    JOB_END,
    JOBS_IMPORTED,
    RUN_END,
    STEP_ACCOUNTED,
    Event,
    JobFacts,
    utc_now,
)
from steward.core.storage import move_cursor
from steward.core.timestamps import from_micros, to_micros
from steward.core.usage import AccountedStep, RunEvent, StepUsage
from steward.extensions.jobacct_plugins.api import JobAcctPlugin
from steward.extensions.jobacct_plugins.log.files import (
    LATE_SUFFIX,
    NEW_SUFFIX,
    OPEN_SUFFIX,
    PACKED_SUFFIX,
    PARQUET_SUFFIX,
    LogCalendar,
    LogFiles,
    list_log_days,
)
from steward.extensions.jobacct_plugins.log.purges import PurgeBlanker
from steward.extensions.jobacct_plugins.log.records import (
    LOG_EVENT_KINDS,
    JobAccounted,
    decode_record,
    encode_log_lines,
    run_submit_time,
)
from steward.extensions.jobacct_plugins.log.state import (
    DAY_CLOSED,
    DAY_SWAPPING,
    IMPORTED,
    LogState,
    LogStateWriter,
    PurgedScript,
    RunKey,
    log_state_path,
)
from steward.jobs.identity import PROMPT_US
from steward.jobs.imported_runs import make_run_events, read_import
from steward.jobs.line_sources import locate_job_log
from steward.jobs.retention import parse_script_key

log = logging.getLogger(__name__)

_MIN_IDLE: Final = timedelta(hours=1)
"""Least idle time of a day before it is closed, so that an import does not reopen it each minute.
"""
_RETRY_S: Final = 3600.0
"""Delay before another try after a failed process, in seconds."""
_PROCESS_TIMEOUT_S: Final = 3000.0
"""Time limit of a packing or blanking process, in seconds."""


class DayCloser:
    """Closer of days: packs them, or blanks purged text in them, by a process each.

    Args:
        files: The log's files.
        state: State database, for the files' lengths.
        state_path: Path of that database.
        calendar: Computes the ends of days.
        min_idle: Least time since the last write to a day that is closed.
    """

    def __init__(
        self,
        files: LogFiles,
        state: LogState,
        state_path: str,
        calendar: LogCalendar,
        min_idle: timedelta = _MIN_IDLE,
    ) -> None:
        self._files = files
        self._state = state
        self._state_path = state_path
        self._calendar = calendar
        self._min_idle = min_idle
        self._retry_at: dict[str, float] = {}

    def list_due_days(self, now: datetime, close_after: timedelta) -> list[str]:
        """Return the days to close, the oldest first.

        Args:
            now: The present time.
            close_after: Delay between the end of a day and its closing.
        """
        days: dict[str, int] = {}
        for name, (_, written_s) in self._state.read_files().items():
            day = name.partition(".")[0]
            days[day] = max(days.get(day, 0), written_s)
        return sorted(
            day
            for day, written_s in days.items()
            if self._calendar.get_day_end(day) + close_after <= now
            and written_s + self._min_idle.total_seconds() <= now.timestamp()
            and time.monotonic() >= self._retry_at.get(day, 0.0)
        )

    def close_day(self, day: str, lengths: Mapping[str, int]) -> bool:
        """Close a day, or close it again; return True on success.

        Args:
            day: The day.
            lengths: Valid lengths of its files.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
        """
        started_s = time.monotonic()
        if self._run_program("parquet", day, lengths) is None:
            log.error("cannot close day %s of the job log, retrying later", day)
            return False
        with self._state.open_writer() as writer:
            writer.set_day(day, DAY_SWAPPING)
        self._swap(day)
        log.info("closed day %s of the job log in %.1f s", day, time.monotonic() - started_s)
        return True

    def blank_day(self, day: str, lengths: Mapping[str, int]) -> bool:
        """Blank the private text of a day's jobs whose scripts were purged.

        Args:
            day: The day.
            lengths: Valid lengths of its files.

        Returns:
            Whether it was done, or there was nothing to do.

        Raises:
            JobLogUnavailable, SqliteUnavailable: As :meth:`close_day`.
        """
        if time.monotonic() < self._retry_at.get(day, 0.0):
            return False
        output = self._run_program("purges", day, lengths)
        if output is None:
            log.error(
                "day %s of the job log may still contain erased texts: retrying in %d minutes",
                day,
                _RETRY_S // 60,
            )
            return False
        if not output:
            return True
        if os.path.exists(self._files.file_path(f"{day}{PACKED_SUFFIX}")):
            return self.close_day(day, lengths)
        for suffix in (OPEN_SUFFIX, LATE_SUFFIX):
            # New and old file are of equal length: the known length holds for either.
            self._files.rename_file(f".{day}{suffix}{NEW_SUFFIX}", f"{day}{suffix}")
        self._files.sync_directory()
        return True

    def _run_program(self, program: str, day: str, lengths: Mapping[str, int]) -> str | None:
        """Run a process on a day; return its output, or None on failure."""
        length_arguments = [
            f"{name}={lengths[name]}"
            for suffix in (OPEN_SUFFIX, LATE_SUFFIX)
            if (name := f"{day}{suffix}") in lengths
        ]
        command = [
            *(sys.executable, "-m", f"steward.extensions.jobacct_plugins.log.{program}"),
            *(self._files.location, day, self._state_path, *length_arguments),
        ]
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_PROCESS_TIMEOUT_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            stderr = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
            reason = stderr.splitlines()[-1] if stderr else str(error)
            log.error("job log program %s failed on day %s: %s", program, day, reason)
            self._retry_at[day] = time.monotonic() + _RETRY_S
            return None
        return process.stdout.decode(errors="replace").strip()

    def finish_swaps(self) -> None:
        """Complete interrupted closings, and remove temporary files.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
        """
        for day, state in self._state.read_days().items():
            if state == DAY_SWAPPING:
                self._swap(day)
        self._files.remove_unfinished()

    def remove_day(self, day: str) -> None:
        """Remove all files of a day."""
        for suffix in (OPEN_SUFFIX, LATE_SUFFIX, PACKED_SUFFIX, PARQUET_SUFFIX):
            self._files.remove_file(f"{day}{suffix}")

    def _swap(self, day: str) -> None:
        """Rename a day's packed files into place and remove its open ones; repeatable."""
        for suffix in (PACKED_SUFFIX, PARQUET_SUFFIX):
            self._files.rename_file(f".{day}{suffix}{NEW_SUFFIX}", f"{day}{suffix}")
        self._files.sync_directory()
        for suffix in (OPEN_SUFFIX, LATE_SUFFIX):
            self._files.remove_file(f"{day}{suffix}")
        with self._state.open_writer() as writer:
            writer.set_day(day, DAY_CLOSED)
            writer.forget_files([f"{day}{OPEN_SUFFIX}", f"{day}{LATE_SUFFIX}"])


_CLOSE_INTERVAL_S: Final = 60.0
"""Interval of the checks for days to close, in seconds."""
_CORRECTION_WAIT: Final = timedelta(days=14)
"""How long after a day's closing a correction waits for the end of a run that the log lacks."""

_PURGE_RETENTION_S: Final = 86_400
"""How long a purge is remembered, for records that were made before it was known, in seconds."""

_MAX_INT64: Final = 2**63 - 1
_encode = msgspec.json.Encoder().encode


class _WaitingReference(msgspec.Struct, frozen=True):
    """Reference to lines that wait for a run's end; they may be too many for memory.

    Attributes:
        waiting_key: The run key that they wait under.
        run_key: The run's real key.
    """

    waiting_key: RunKey
    run_key: RunKey


_LogPiece = bytes | _WaitingReference
_SubmitKey = tuple[str, int, int]
"""Cluster, job id and submit time (µs) of a run, which an imported step knows."""


class _LogBatch:
    """Changes that a batch of events makes."""

    def __init__(self) -> None:
        self.lines: dict[str, list[_LogPiece]] = {}
        self.waiting: dict[RunKey, list[bytes]] = {}
        self.ended: dict[RunKey, str] = {}
        self.ended_by_submit: dict[_SubmitKey, RunKey] = {}
        self.expire_before: datetime | None = None
        self.purges: list[PurgedScript] = []


class LogConsumer(DatabaseConsumer):
    """Consumer that writes the job log; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        now: Returns the current time.

    Raises:
        SqliteError, SqliteUnavailable: Its database is unusable.
    """

    name = "accounting.log"
    kinds = LOG_EVENT_KINDS | {ACCOUNTING_EXPIRE, ARCHIVE_PURGE, JOBS_IMPORTED}
    batch_events = 100

    def __init__(self, settings: Settings, now: Callable[[], datetime] = utc_now) -> None:
        self._files = LogFiles(locate_job_log(settings))
        self._state_dir = settings.state_dir
        self._state = LogState(log_state_path(settings.state_dir))
        super().__init__(self._state.database)
        self._calendar = LogCalendar(settings.cluster)
        self._day_closer = DayCloser(
            self._files, self._state, log_state_path(settings.state_dir), self._calendar
        )
        self._close_after = timedelta(days=settings.accounting.close_after_days)
        self._now = now
        self._lengths: dict[str, int] = {}
        self._blanker = PurgeBlanker(self._state.list_purges())
        self._is_repaired = False
        self._next_check_at = 0.0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Write the records of events, and move the cursor to ``upto``.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
            Rejected: An event's body is not what its kind promises.
        """
        self._repair_files()
        batch = self._sort_events(events)
        pieces_by_file = self._group_by_file(batch)
        written_s = int(self._now().timestamp())
        self._record_new_files(pieces_by_file.keys() - self._lengths.keys(), written_s)
        lengths = dict(self._lengths)
        with self._state.open_writer() as writer:
            for name, pieces in sorted(pieces_by_file.items()):
                lengths[name] = self._files.append(name, lengths[name], self._read_pieces(pieces))
                writer.set_file_length(name, lengths[name], written_s)
            writer.end_runs(batch.ended)
            for run, lines in batch.waiting.items():
                writer.wait(run, b"".join(lines))
            if batch.expire_before is not None:
                self._remove_expired_days(batch.expire_before, writer, lengths)
            if batch.purges:
                self._record_purges(batch.purges, writer, written_s)
            move_cursor(self._connection, upto)
        self._lengths = lengths
        if batch.purges:
            self._state.truncate_wal()
            self._next_check_at = 0.0

    def _sort_events(self, events: Sequence[Event]) -> _LogBatch:
        """Sort a batch's events into lines by day, waiting lines, purges and expiry."""
        batch = _LogBatch()
        for event in events:
            # Learn the batch's purges before its records: what they purge must not be written
            # either.
            if event.kind == ARCHIVE_PURGE:
                self._blanker.add_purges(_list_purged_scripts(event))
        for event in events:
            if event.kind == ACCOUNTING_EXPIRE:
                if not event.body.keep_log:
                    latest = batch.expire_before or event.body.before
                    batch.expire_before = max(latest, event.body.before)
            elif event.kind == ARCHIVE_PURGE:
                batch.purges += _list_purged_scripts(event)
            elif event.kind == JOBS_IMPORTED:
                self._sort_import(event, batch)
            else:
                _check_body(event)
                self._sort_event(event, batch)
        return batch

    def _sort_import(self, event: Event, batch: _LogBatch) -> None:
        """Sort the runs and steps of an import; skip those that an earlier one brought."""
        parts = read_import(event, self._state_dir)
        if event.body.is_continued:
            self._sort_further_steps(parts, batch)
            return
        job_ids = {part.body.record.job_id for part in parts if part.kind == JOB_END}
        # What earlier batches ended, and earlier events of this batch.
        days = self._state.find_days(event.cluster, job_ids) | batch.ended
        for part in (*make_run_events(parts), *parts):
            body = part.body
            if isinstance(body, JobFacts):
                continue
            _check_body(part)
            submit_key = (part.cluster, body.job_id, to_micros(run_submit_time(body)))
            if (*submit_key, IMPORTED) in days:
                continue
            if isinstance(body, AccountedStep):
                self._sort_event(part, batch)
                continue
            run = (*submit_key, body.restarts)
            if run not in days or body.piece_end is not None:
                self._sort_event(part, batch)
            if part.kind == RUN_END and body.piece_end is None:
                batch.ended[(*submit_key, IMPORTED)] = days.get(run) or batch.ended[run]

    def _sort_further_steps(self, parts: Sequence[Event], batch: _LogBatch) -> None:
        """Sort the steps of an import whose run and first steps came with the event before."""
        run, *steps = parts
        record = run.body.record
        submit_key = (run.cluster, record.job_id, to_micros(record.submit))
        if submit_key not in batch.ended_by_submit and not self._state.find_run(*submit_key):
            # The event before became a dead letter, or the run's day was removed since.
            run_key = (*submit_key, record.restarts)
            batch.ended[run_key] = self._calendar.find_day(run.cluster, record.end)
            batch.ended_by_submit[submit_key] = run_key
        for step in steps:
            self._sort_event(step, batch)

    def _record_new_files(self, names: Collection[str], written_s: int) -> None:
        """Record the lengths of files before the first write to them.

        Otherwise the rest of a crash in an unrecorded file would pass as valid.
        """
        if not names:
            return
        lengths = {name: self._files.find_valid_length(name) for name in names}
        with self._state.open_writer() as writer:
            for name, length in lengths.items():
                writer.set_file_length(name, length, written_s)
        self._lengths |= lengths

    def _group_by_file(self, batch: _LogBatch) -> dict[str, list[_LogPiece]]:
        """Map lines by day to lines by file: ``.late`` for days that are closed."""
        closed = self._state.read_days() if batch.lines else {}
        return {
            f"{day}{LATE_SUFFIX if day in closed else OPEN_SUFFIX}": pieces
            for day, pieces in batch.lines.items()
        }

    def _read_pieces(self, pieces: Sequence[_LogPiece]) -> Iterator[bytes]:
        """Yield the bytes of pieces, reading waiting lines from the database."""
        for piece in pieces:
            if isinstance(piece, bytes):
                yield piece
            elif piece.waiting_key == piece.run_key:
                yield from self._state.read_waiting(piece.run_key)
            else:
                for lines in self._state.read_waiting(piece.waiting_key):
                    yield from (_assign_run(line, piece.run_key) for line in lines.splitlines())

    def _sort_event(self, event: Event, batch: _LogBatch) -> None:
        """Find the day of an event's records, or let them wait for it."""
        body = event.body
        if event.kind == STEP_ACCOUNTED:
            self._sort_imported_step(event, body, batch)
            return
        run = (event.cluster, body.job_id, to_micros(run_submit_time(body)), body.restarts)
        lines = self._encode_lines(event)
        day = self._find_day(run, batch)
        if not day and event.kind == RUN_END and body.piece_end is None:
            day = self._end_run(event, run, batch)
        if not day:
            day = self._find_old_run_day(event.cluster, body)
        if day:
            batch.lines.setdefault(day, []).append(lines)
        else:
            batch.waiting.setdefault(run, []).append(lines)

    def _encode_lines(self, event: Event) -> bytes:
        """Encode an event's lines; blank text of jobs whose purge was recorded earlier."""
        lines = encode_log_lines(event)
        return self._blanker.blank_lines(lines) if self._blanker else lines

    def _record_purges(
        self, purges: Sequence[PurgedScript], writer: LogStateWriter, noted_s: int
    ) -> None:
        """Blank waiting lines of purged scripts' jobs, and schedule days for a scan."""
        oldest_us: dict[str, int] = {}
        for cluster, _job_id, written_us in purges:
            since_us = written_us - PROMPT_US
            oldest_us[cluster] = min(since_us, oldest_us.get(cluster, since_us))
        for cluster, since_us in oldest_us.items():
            for number in self._state.list_waiting_since(cluster, since_us):
                lines = self._state.read_waiting_lines(number)
                blanked = self._blanker.blank_lines(lines)
                if blanked != lines:
                    writer.replace_waiting(number, blanked)
        since = from_micros(min(oldest_us.values()))
        days = {name.partition(".")[0] for name in self._lengths}
        days |= {day.day for day in list_log_days(self._files.location)}
        writer.purge(
            purges, noted_s, sorted(day for day in days if self._calendar.get_day_end(day) > since)
        )

    def _blank_days(self) -> bool:
        """Scan one day for purged text; return True if more days may follow."""
        for day in self._state.list_scan_days():
            names = {f"{day}{suffix}" for suffix in (OPEN_SUFFIX, LATE_SUFFIX)}
            existing = {name for name in names if os.path.exists(self._files.file_path(name))}
            self._record_new_files(existing - self._lengths.keys(), int(self._now().timestamp()))
            if self._day_closer.blank_day(day, self._lengths):
                self._lengths = self._read_lengths()
                with self._state.open_writer() as writer:
                    writer.mark_scanned(day)
                return True
        return False

    def _find_old_run_day(self, cluster: str, body: RunEvent | StepUsage) -> str:
        """Return the day of a run that the log lacks and that ended long ago; "" for others."""
        end = body.run_end if isinstance(body, StepUsage) else body.record.end
        oldest_end = self._now().astimezone(UTC) - self._close_after - _CORRECTION_WAIT
        if not body.correction or end is None or end >= oldest_end:
            return ""
        return self._calendar.find_day(cluster, end)

    def _end_run(self, event: Event, run: RunKey, batch: _LogBatch) -> str:
        """Record the end of a run and write its waiting lines first; return its day."""
        record = event.body.record
        day = self._calendar.find_day(event.cluster, record.end or event.at)
        submit_key = (*run[:3], IMPORTED)
        pieces = batch.lines.setdefault(day, [])
        pieces += [_WaitingReference(run, run), *batch.waiting.pop(run, ())]
        pieces.append(_WaitingReference(submit_key, run))
        imported_lines = b"".join(batch.waiting.pop(submit_key, ()))
        pieces += [_assign_run(line, run) for line in imported_lines.splitlines()]
        batch.ended[run] = day
        batch.ended_by_submit[run[:3]] = run
        return day

    def _sort_imported_step(self, event: Event, body: AccountedStep, batch: _LogBatch) -> None:
        """Assign an imported step to its run's day, or let it wait."""
        submit_key = (event.cluster, body.job_id, to_micros(run_submit_time(body)))
        run = batch.ended_by_submit.get(submit_key)
        run_and_day = (run, batch.ended[run]) if run else self._state.find_run(*submit_key)
        lines = self._encode_lines(event)
        if run_and_day is None:
            batch.waiting.setdefault((*submit_key, IMPORTED), []).append(lines)
        else:
            batch.lines.setdefault(run_and_day[1], []).append(_assign_run(lines, run_and_day[0]))

    def _find_day(self, run: RunKey, batch: _LogBatch) -> str:
        """Return the day of an ended run, from this batch or the database; "" if none."""
        if run in batch.ended:
            return batch.ended[run]
        return self._state.find_day(run)

    def _remove_expired_days(
        self, before: datetime, writer: LogStateWriter, lengths: dict[str, int]
    ) -> None:
        """Remove the days that ended before a time; idempotent."""
        days = [day.day for day in list_log_days(self._files.location)]
        expired_days = [day for day in days if self._calendar.get_day_end(day) <= before]
        for day in expired_days:
            names = [f"{day}{suffix}" for suffix in (OPEN_SUFFIX, LATE_SUFFIX)]
            self._day_closer.remove_day(day)
            writer.forget_files(names)
            for name in names:
                lengths.pop(name, None)
            log.info("removed day %s of the job log", day)
        writer.forget_days(expired_days)

    def tick(self, append: Append) -> float:  # noqa: ARG002 - likewise
        """Blank or close one day that is due; return the seconds until the next call.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
        """
        self._repair_files()
        now_s = time.monotonic()
        if now_s < self._next_check_at:
            return self._next_check_at - now_s
        if self._blank_days():
            return 0.0
        due = self._day_closer.list_due_days(self._now(), self._close_after)
        if due:
            self._day_closer.close_day(due[0], self._lengths)
            self._lengths = self._read_lengths()
            if len(due) > 1:
                return 0.0
        self._next_check_at = now_s + _CLOSE_INTERVAL_S
        with self._state.open_writer() as writer:
            writer.forget_purges(int(self._now().timestamp()) - _PURGE_RETENTION_S)
        if self._blanker and not self._state.list_purges():
            self._blanker = PurgeBlanker()
        return _CLOSE_INTERVAL_S

    def _repair_files(self) -> None:
        """Repair the files once after the start: cut them to their recorded lengths."""
        if self._is_repaired:
            return
        location = self._state.read_location()
        if location != self._files.location:
            if location:
                log.warning(
                    "the job log moved from %s to %s; files in the old directory stay unchanged",
                    location,
                    self._files.location,
                )
            with self._state.open_writer() as writer:
                writer.set_location(self._files.location)
        self._day_closer.finish_swaps()
        for name, length in self._read_lengths().items():
            self._lengths[name] = self._files.truncate_file(name, length)
        self._is_repaired = True

    def _read_lengths(self) -> dict[str, int]:
        return {name: length for name, (length, _) in self._state.read_files().items()}


def _assign_run(line: bytes, run: RunKey) -> bytes:
    """Assign an imported record to the run that it turned out to belong to."""
    if not run[3]:
        return line if line.endswith(b"\n") else line + b"\n"
    record = decode_record(line)
    assert isinstance(record, JobAccounted), "only jobs wait under a submit time"
    assigned = msgspec.structs.replace(record, restarts=run[3])
    return _encode(assigned) + b"\n"


def _list_purged_scripts(event: Event) -> list[PurgedScript]:
    """Return the scripts that an event purges from every sink."""
    if event.body.sink:
        return []
    script_keys = filter(None, map(parse_script_key, event.body.script_keys))
    return [(event.cluster, job_id, mtime_ns // 1000) for job_id, mtime_ns in script_keys]


def _check_body(event: Event) -> None:
    """Reject an event whose numbers do not fit the database."""
    body = event.body
    restarts = 0 if isinstance(body, AccountedStep) else body.restarts
    if not (0 < body.job_id <= _MAX_INT64 and 0 <= restarts <= _MAX_INT64):
        raise Rejected(f"{event.kind} {event.key!r} has no usable body", event)


class LogPlugin(JobAcctPlugin):
    """Plugin class that represents the job log."""

    plugin_name = "The job log"
    plugin_type = "jobacct/log"
