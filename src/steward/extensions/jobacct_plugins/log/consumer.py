"""Consumer ``accounting.log``: writes the job log, each record once, and closes its days.

:class:`DayCloser` packs a day some time after its end (``packing``) and blanks the text of purged
jobs (``blanking``). Each is a process of its own, which ends and frees its memory. New files are
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
from steward.core.consumers import Append, Rejected
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    ARCHIVE_PURGE,
    RUN_END,
    STEP_ACCOUNTED,
    Event,
    utc_now,
)
from steward.core.timestamps import from_micros, to_micros
from steward.core.usage import AccountedStep, RunEvent, StepUsage
from steward.extensions.jobacct_plugins.api import JobAcctPlugin
from steward.extensions.jobacct_plugins.consumer import log_location
from steward.extensions.jobacct_plugins.log.blanking import PurgeBlanker
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
    LogState,
    LogStateWriter,
    PurgedScript,
    RunKey,
    log_state_path,
)
from steward.jobs.identity import PROMPT_US
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
        keeping: State database, for the files' lengths.
        keeping_path: Path of that database.
        calendar: Computes the ends of days.
        idle: Least time since the last write to a day that is closed.
    """

    def __init__(
        self,
        files: LogFiles,
        keeping: LogState,
        keeping_path: str,
        calendar: LogCalendar,
        idle: timedelta = _MIN_IDLE,
    ) -> None:
        self._files = files
        self._keeping = keeping
        self._keeping_path = keeping_path
        self._calendar = calendar
        self._idle = idle
        self._again_at: dict[str, float] = {}

    def due(self, now: datetime, after: timedelta) -> list[str]:
        """Return the days to close, the oldest first.

        Args:
            now: The present time.
            after: Delay between the end of a day and its closing.
        """
        days: dict[str, int] = {}
        for name, (_, written_s) in self._keeping.files().items():
            day = name.partition(".")[0]
            days[day] = max(days.get(day, 0), written_s)
        return sorted(
            day
            for day, written_s in days.items()
            if self._calendar.end_of(day) + after <= now
            and written_s + self._idle.total_seconds() <= now.timestamp()
            and time.monotonic() >= self._again_at.get(day, 0.0)
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
        began = time.monotonic()
        if self._work("packing", day, lengths) is None:
            log.error("the job log's day %s stays open for now", day)
            return False
        with self._keeping.writing() as writer:
            writer.set_day(day, DAY_SWAPPING)
        self._swap(day)
        log.info("closed the job log's day %s in %.1f s", day, time.monotonic() - began)
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
        if time.monotonic() < self._again_at.get(day, 0.0):
            return False
        said = self._work("blanking", day, lengths)
        if said is None:
            log.error("the job log's day %s may still tell of what was purged", day)
            return False
        if not said:
            return True
        if os.path.exists(self._files.path(f"{day}{PACKED_SUFFIX}")):
            return self.close_day(day, lengths)
        for kind in (OPEN_SUFFIX, LATE_SUFFIX):
            # New and old file are of equal length: the known length holds for either.
            self._files.rename(f".{day}{kind}{NEW_SUFFIX}", f"{day}{kind}")
        self._files.sync_directory()
        return True

    def _work(self, what: str, day: str, lengths: Mapping[str, int]) -> str | None:
        """Run a process on a day; return its output, or None on failure."""
        parts = [
            f"{name}={lengths[name]}"
            for kind in (OPEN_SUFFIX, LATE_SUFFIX)
            if (name := f"{day}{kind}") in lengths
        ]
        command = [
            *(sys.executable, "-m", f"steward.extensions.jobacct_plugins.log.{what}"),
            *(self._files.location, day, self._keeping_path, *parts),
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_PROCESS_TIMEOUT_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
            why = said.splitlines()[-1] if said else str(error)
            log.error("%s the job log's day %s: %s", what, day, why)
            self._again_at[day] = time.monotonic() + _RETRY_S
            return None
        return done.stdout.decode(errors="replace").strip()

    def finish(self) -> None:
        """Complete interrupted closings, and remove temporary files.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
        """
        for day, state in self._keeping.days().items():
            if state == DAY_SWAPPING:
                self._swap(day)
        self._files.remove_unfinished()

    def remove(self, day: str) -> None:
        """Remove all files of a day."""
        for kind in (OPEN_SUFFIX, LATE_SUFFIX, PACKED_SUFFIX, PARQUET_SUFFIX):
            self._files.remove(f"{day}{kind}")

    def _swap(self, day: str) -> None:
        """Rename a day's packed files into place and remove its open ones; repeatable."""
        for kind in (PACKED_SUFFIX, PARQUET_SUFFIX):
            self._files.rename(f".{day}{kind}{NEW_SUFFIX}", f"{day}{kind}")
        self._files.sync_directory()
        for kind in (OPEN_SUFFIX, LATE_SUFFIX):
            self._files.remove(f"{day}{kind}")
        with self._keeping.writing() as writer:
            writer.set_day(day, DAY_CLOSED)
            writer.forget_files([f"{day}{OPEN_SUFFIX}", f"{day}{LATE_SUFFIX}"])


_CLOSE_INTERVAL_S: Final = 60.0
"""Interval of the checks for days to close, in seconds."""
_RUN_RETENTION: Final = timedelta(days=14)
"""How long after a day's closing a correction finds its run without an end time."""

_PURGE_RETENTION_S: Final = 86_400
"""How long a purge is remembered, for records that were made before it was known, in seconds."""

_MAX_INT64: Final = 2**63 - 1
_encode = msgspec.json.Encoder().encode


class _WaitingLines(msgspec.Struct, frozen=True):
    """Reference to lines that wait for a run's end; they may be too many for memory.

    Attributes:
        under: The run key that they wait under.
        run: The run's real key.
    """

    under: RunKey
    run: RunKey


_LogPiece = bytes | _WaitingLines


class _LogBatch:
    """Changes that a batch of events makes."""

    def __init__(self) -> None:
        self.lines: dict[str, list[_LogPiece]] = {}
        self.waiting: dict[RunKey, list[bytes]] = {}
        self.ended: dict[RunKey, str] = {}
        self.expire_before: datetime | None = None
        self.purges: list[PurgedScript] = []


class LogConsumer:
    """Consumer that writes the job log; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        now: Returns the current time.

    Raises:
        SqliteError, SqliteUnavailable: Its database is unusable.
    """

    name = "accounting.log"
    kinds = LOG_EVENT_KINDS | {ACCOUNTING_EXPIRE, ARCHIVE_PURGE}
    batch_events = 100

    def __init__(self, settings: Settings, now: Callable[[], datetime] = utc_now) -> None:
        self._files = LogFiles(log_location(settings))
        self._keeping = LogState(log_state_path(settings.state_dir))
        self._calendar = LogCalendar(settings.cluster)
        self._closing = DayCloser(
            self._files, self._keeping, log_state_path(settings.state_dir), self._calendar
        )
        self._close_after = timedelta(days=settings.accounting.close_after_days)
        self._now = now
        self._lengths: dict[str, int] = {}
        self._blanking = PurgeBlanker(self._keeping.purges())
        self._is_mended = False
        self._look_at = 0.0

    def cursor(self) -> int:
        """Return the position of the last applied event; 0 at first."""
        return self._keeping.cursor()

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Write the records of events, and move the cursor to ``upto``.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
            Rejected: An event's body is not what its kind promises.
        """
        self._mend()
        batch = self._batch_of(events)
        by_file = self._by_file(batch)
        written_s = int(self._now().timestamp())
        self._meet(by_file.keys() - self._lengths.keys(), written_s)
        lengths = dict(self._lengths)
        with self._keeping.writing() as writer:
            for name, pieces in sorted(by_file.items()):
                lengths[name] = self._files.append(name, lengths[name], self._chunks(pieces))
                writer.wrote(name, lengths[name], written_s)
            for run, day in batch.ended.items():
                writer.end(run, day)
            for run, chunks in batch.waiting.items():
                writer.wait(run, b"".join(chunks))
            if batch.expire_before is not None:
                self._expire(batch.expire_before, writer, lengths)
            if batch.purges:
                self._purge(batch.purges, writer, written_s)
            writer.advance(upto)
        self._lengths = lengths
        if batch.purges:
            self._keeping.overwrite()
            self._look_at = 0.0

    def _batch_of(self, events: Sequence[Event]) -> _LogBatch:
        """Sort a batch's events into lines by day, waiting lines, purges and expiry."""
        batch = _LogBatch()
        for event in events:
            # Learn the batch's purges before its records: what they purge must not be written
            # either.
            if event.kind == ARCHIVE_PURGE:
                self._blanking.add(_purged_scripts(event))
        for event in events:
            if event.kind == ACCOUNTING_EXPIRE:
                if not event.body.keep_log:
                    latest = batch.expire_before or event.body.before
                    batch.expire_before = max(latest, event.body.before)
            elif event.kind == ARCHIVE_PURGE:
                batch.purges += _purged_scripts(event)
            else:
                _check_body(event)
                self._sort(event, batch)
        return batch

    def _meet(self, names: Collection[str], written_s: int) -> None:
        """Record the lengths of files before the first write to them.

        Otherwise the rest of a crash in an unrecorded file would pass as valid.
        """
        if not names:
            return
        found = {name: self._files.adopt(name) for name in names}
        with self._keeping.writing() as writer:
            for name, length in found.items():
                writer.wrote(name, length, written_s)
        self._lengths |= found

    def _by_file(self, batch: _LogBatch) -> dict[str, list[_LogPiece]]:
        """Map lines by day to lines by file: ``.late`` for days that are closed."""
        closed = self._keeping.days() if batch.lines else {}
        return {
            f"{day}{LATE_SUFFIX if day in closed else OPEN_SUFFIX}": pieces
            for day, pieces in batch.lines.items()
        }

    def _chunks(self, pieces: Sequence[_LogPiece]) -> Iterator[bytes]:
        """Yield the bytes of pieces, reading waiting lines from the database."""
        for piece in pieces:
            if isinstance(piece, bytes):
                yield piece
            elif piece.under == piece.run:
                yield from self._keeping.waiting(piece.run)
            else:
                for lines in self._keeping.waiting(piece.under):
                    yield from (_assign_run(line, piece.run) for line in lines.splitlines())

    def _sort(self, event: Event, batch: _LogBatch) -> None:
        """Find the day of an event's records, or let them wait for it."""
        body = event.body
        if event.kind == STEP_ACCOUNTED:
            self._sort_accounted(event, body, batch)
            return
        run = (event.cluster, body.job_id, to_micros(run_submit_time(body)), body.restarts)
        lines = self._lines_of(event)
        day = self._day_of(run, batch)
        if not day and event.kind == RUN_END and body.piece_end is None:
            day = self._end(event, run, batch)
        if not day:
            day = self._day_of_old(event.cluster, body)
        if day:
            batch.lines.setdefault(day, []).append(lines)
        else:
            batch.waiting.setdefault(run, []).append(lines)

    def _lines_of(self, event: Event) -> bytes:
        """Encode an event's lines; blank text of jobs whose purge was recorded earlier."""
        lines = encode_log_lines(event)
        return self._blanking.blank_all(lines) if self._blanking else lines

    def _purge(self, purges: Sequence[PurgedScript], writer: LogStateWriter, noted_s: int) -> None:
        """Blank waiting lines of purged scripts' jobs, and schedule days for a scan."""
        oldest_us: dict[str, int] = {}
        for cluster, _job_id, written_us in purges:
            since_us = written_us - PROMPT_US
            oldest_us[cluster] = min(since_us, oldest_us.get(cluster, since_us))
        for cluster, since_us in oldest_us.items():
            for number in self._keeping.waiting_since(cluster, since_us):
                lines = self._keeping.waiting_lines(number)
                blanked = self._blanking.blank_all(lines)
                if blanked != lines:
                    writer.wait_anew(number, blanked)
        since = from_micros(min(oldest_us.values()))
        days = {name.partition(".")[0] for name in self._lengths}
        days |= {day.day for day in list_log_days(self._files.location)}
        writer.purge(
            purges, noted_s, sorted(day for day in days if self._calendar.end_of(day) > since)
        )

    def _blank_days(self) -> bool:
        """Scan one day for purged text; return True if more days may follow."""
        for day in self._keeping.looks():
            names = {f"{day}{kind}" for kind in (OPEN_SUFFIX, LATE_SUFFIX)}
            there = {name for name in names if os.path.exists(self._files.path(name))}
            self._meet(there - self._lengths.keys(), int(self._now().timestamp()))
            if self._closing.blank_day(day, self._lengths):
                self._lengths = self._known_lengths()
                with self._keeping.writing() as writer:
                    writer.looked(day)
                return True
        return False

    def _day_of_old(self, cluster: str, body: RunEvent | StepUsage) -> str:
        """Return the day of a run that ended too long ago to be recorded; "" for others."""
        end = body.run_end if isinstance(body, StepUsage) else body.record.end
        if not body.correction or end is None or end >= self._remembered_since():
            return ""
        return self._calendar.day_of(cluster, end)

    def _remembered_since(self) -> datetime:
        return self._now().astimezone(UTC) - self._close_after - _RUN_RETENTION

    def _end(self, event: Event, run: RunKey, batch: _LogBatch) -> str:
        """Record the end of a run and write its waiting lines first; return its day."""
        record = event.body.record
        day = self._calendar.day_of(event.cluster, record.end or event.at)
        by_submit = (*run[:3], -1)
        pieces = batch.lines.setdefault(day, [])
        pieces += [_WaitingLines(run, run), *batch.waiting.pop(run, ())]
        pieces.append(_WaitingLines(by_submit, run))
        accounted = b"".join(batch.waiting.pop(by_submit, ()))
        pieces += [_assign_run(line, run) for line in accounted.splitlines()]
        batch.ended[run] = day
        return day

    def _sort_accounted(self, event: Event, body: AccountedStep, batch: _LogBatch) -> None:
        """Assign an imported step to its run's day, or let it wait."""
        named = (event.cluster, body.job_id, to_micros(run_submit_time(body)))
        found = self._keeping.run_of_submit(*named)
        for run, day in batch.ended.items():
            if run[:3] == named:
                found = run, day
        lines = self._lines_of(event)
        if found is None:
            batch.waiting.setdefault((*named, -1), []).append(lines)
        else:
            batch.lines.setdefault(found[1], []).append(_assign_run(lines, found[0]))

    def _day_of(self, run: RunKey, batch: _LogBatch) -> str:
        """Return the day of an ended run, from this batch or the database; "" if none."""
        if run in batch.ended:
            return batch.ended[run]
        return self._keeping.day_of(run)

    def _expire(self, before: datetime, writer: LogStateWriter, lengths: dict[str, int]) -> None:
        """Remove the days that ended before a time; idempotent."""
        for day in list_log_days(self._files.location):
            if self._calendar.end_of(day.day) > before:
                continue
            names = [f"{day.day}{kind}" for kind in (OPEN_SUFFIX, LATE_SUFFIX)]
            self._closing.remove(day.day)
            writer.forget_files(names)
            writer.forget_day(day.day)
            for name in names:
                lengths.pop(name, None)
            log.info("the job log's day %s was removed", day.day)

    def tick(self, append: Append) -> float:  # noqa: ARG002 - likewise
        """Blank or close one day that is due; return the seconds until the next call.

        Raises:
            JobLogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
        """
        self._mend()
        now_s = time.monotonic()
        if now_s < self._look_at:
            return self._look_at - now_s
        if self._blank_days():
            return 0.0
        due = self._closing.due(self._now(), self._close_after)
        if due:
            self._closing.close_day(due[0], self._lengths)
            self._lengths = self._known_lengths()
            if len(due) > 1:
                return 0.0
        self._look_at = now_s + _CLOSE_INTERVAL_S
        with self._keeping.writing() as writer:
            # One day less, because of time zones.
            oldest = self._remembered_since() - timedelta(days=1)
            writer.forget_runs(oldest.date().isoformat())
            writer.forget_purges(int(self._now().timestamp()) - _PURGE_RETENTION_S)
        if self._blanking and not self._keeping.purges():
            self._blanking = PurgeBlanker()
        return _CLOSE_INTERVAL_S

    def _mend(self) -> None:
        """Repair the files once after the start: cut them to their recorded lengths."""
        if self._is_mended:
            return
        location = self._keeping.location()
        if location != self._files.location:
            if location:
                log.warning(
                    "the job log was in %s and is in %s now; what is there stays as it is",
                    location,
                    self._files.location,
                )
            with self._keeping.writing() as writer:
                writer.move_to(self._files.location)
        self._closing.finish()
        for name, length in self._known_lengths().items():
            self._lengths[name] = self._files.fit(name, length)
        self._is_mended = True

    def _known_lengths(self) -> dict[str, int]:
        return {name: length for name, (length, _) in self._keeping.files().items()}

    def close(self) -> None:
        """Close the database."""
        self._keeping.close()


def _assign_run(line: bytes, run: RunKey) -> bytes:
    """Assign an imported record to the run that it turned out to belong to."""
    record = decode_record(line)
    assert isinstance(record, JobAccounted), "nothing else waits under a submit time alone"
    named = msgspec.structs.replace(record, restarts=run[3])
    return _encode(named) + b"\n"


def _purged_scripts(event: Event) -> list[PurgedScript]:
    """Return the scripts that an event purges from every sink."""
    if event.body.sink:
        return []
    found = filter(None, map(parse_script_key, event.body.script_keys))
    return [(event.cluster, job_id, mtime_ns // 1000) for job_id, mtime_ns in found]


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
