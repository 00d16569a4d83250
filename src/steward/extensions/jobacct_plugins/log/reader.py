"""Reader of the job log: raw records, or the lines that sacct shows for them.

:func:`read_lines` and :func:`read_unit_lines` merge records into sacct lines, :func:`raw_records`
yields records in a time range. A log may be anybody's file: lines that are not records are counted
and skipped. A file is read twice, first to find the last record of each run, so that memory holds
only the runs that are still incomplete at that point.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, BinaryIO, Final

import msgspec

from steward.core.records import UsageLine
from steward.core.timestamps import to_micros
from steward.extensions.jobacct_plugins.log.files import (
    PACKED_SUFFIX,
    JobLogError,
    JobLogUnavailable,
    file_units,
    list_log_days,
)
from steward.extensions.jobacct_plugins.log.records import (
    AnyJobLogRecord,
    RecordHead,
    RunRecords,
    decode_head,
    decode_record,
)
from steward.jobs.line_sources import JobLog, SkippedLine

_MAX_LINE_BYTES: Final = 8 << 20
"""Longest line in bytes. Steward's records are shorter; a foreign file must not fill the memory."""

RunKey = tuple[str, int, int, int]
"""Run: cluster, job id, its own submit time in µs, restarts."""

LogSource = tuple[str, int | None]
"""File, and how many of its bytes are valid; None for all."""


def read_lines(path: str, on_skipped: SkippedLine | None = None) -> Iterator[UsageLine]:
    """Yield the sacct lines that a job log holds, each run before its steps.

    Args:
        path: A day of a log (``.jsonl``, ``.jsonl.zst``), or the directory of a whole log.
        on_skipped: Called for each line that is not a record.

    Raises:
        JobLogError: There is no such log, or it cannot be unpacked.
        JobLogUnavailable: It cannot be read now.
    """
    for files in file_units(path):
        yield from read_unit_lines([(file, None) for file in files], on_skipped=on_skipped)


def read_unit_lines(
    sources: Sequence[LogSource],
    *,
    is_superseded: Callable[[RunKey], bool] = lambda _: False,
    on_skipped: SkippedLine | None = None,
) -> Iterator[UsageLine]:
    """Yield the sacct lines of one day's files, in which later records correct earlier ones.

    Args:
        sources: The files of a day, in their order.
        is_superseded: Tells whether a later run of the same job is known, on another day.
        on_skipped: Called for each line that is not a record.
    """
    last_numbers: dict[int, int] = {}
    requeued: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for number, head in enumerate(map(_parse_head, _read_lines_raw(sources, on_skipped))):
        if head is not None:
            key = _run_key(head)
            last_numbers[hash(key)] = number
            if head.restarts:
                requeued.setdefault(key[:2], set()).add(key[2:])

    def lines(key: RunKey, run: RunRecords) -> Iterator[UsageLine]:
        later_runs = requeued.get(key[:2], ())
        has_later_run = any(
            submit >= key[2] and restarts > key[3] for submit, restarts in later_runs
        )
        is_latest = not has_later_run and not is_superseded(key)
        try:
            yield from run.build_lines(is_latest=is_latest)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Each record is valid, but together they are impossible.
            if on_skipped is not None:
                on_skipped(sources[0][0], 0, f"job {key[1]}: {error}")

    open_runs: dict[RunKey, RunRecords] = {}
    for number, line in enumerate(_read_lines_raw(sources, None)):
        record = _parse_record(line)
        if record is not None:
            key = _run_key(record)
            open_runs.setdefault(key, RunRecords()).add_record(record)
            if last_numbers.get(hash(key)) == number:
                yield from lines(key, open_runs.pop(key))
    for key, run in open_runs.items():
        # The run's last record was unreadable after all, or the file has grown.
        yield from lines(key, run)


def raw_records(
    files: Sequence[str],
    since: datetime | None,
    until: datetime | None,
    on_skipped: SkippedLine | None = None,
) -> Iterator[bytes]:
    """Yield the records of a log unchanged, one line each, for a range of time.

    Args:
        files: Files of a log, in the order in which to read them.
        since: Only records of this time or later.
        until: Only records before this time.
        on_skipped: Called for each line that is not a record.

    Raises:
        JobLogError: A file cannot be unpacked.
        JobLogUnavailable: It cannot be read now.
    """
    for line in _read_lines_raw([(path, None) for path in files], on_skipped):
        record = _parse_record(line)
        if record is None:
            continue
        if (since is None or record.at >= since) and (until is None or record.at < until):
            yield line if line.endswith(b"\n") else line + b"\n"


def _read_lines_raw(
    sources: Sequence[LogSource], on_skipped: SkippedLine | None
) -> Iterator[bytes]:
    """Yield every line of the files; report those that are no record."""
    for path, length in sources:
        with _open_source(path, length) as file:
            for line_number, line in enumerate(_read_bounded_lines(file, path), start=1):
                if on_skipped is not None and (reason := _explain_invalid(line)):
                    on_skipped(path, line_number, reason)
                yield line


_INVALID_RECORD_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, TypeError, OverflowError)
"""Errors of an invalid record; a time without a zone raises a TypeError in arithmetic."""


def _explain_invalid(line: bytes) -> str:
    """Return why a line is not a record; "" if it is one."""
    try:
        _validate_record(decode_record(line))
    except _INVALID_RECORD_ERRORS as error:
        return str(error)
    return ""


def _parse_record(line: bytes) -> AnyJobLogRecord | None:
    try:
        return _validate_record(decode_record(line))
    except _INVALID_RECORD_ERRORS:
        return None


def _validate_record(record: AnyJobLogRecord) -> AnyJobLogRecord:
    _run_key(record)
    to_micros(record.at)
    return record


def _parse_head(line: bytes) -> RecordHead | None:
    try:
        head = decode_head(line)
        _run_key(head)
    except _INVALID_RECORD_ERRORS:
        return None
    return head


def _run_key(head: RecordHead | AnyJobLogRecord) -> RunKey:
    return head.cluster, head.job_id, to_micros(head.submit), head.restarts


def _read_bounded_lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the lines of a file; of a too long one only its start, which is not a record."""
    while True:
        try:
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                return
            rest = line
            while not rest.endswith(b"\n") and len(rest) == _MAX_LINE_BYTES:
                rest = file.readline(_MAX_LINE_BYTES)
        except OSError as error:
            raise JobLogUnavailable(f"cannot read {path}: {error.strerror}", path) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise JobLogError(f"cannot decompress {path}: {error}", path) from error
        yield line


@contextmanager
def _open_source(path: str, length: int | None) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked, and limited to its valid bytes."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise JobLogUnavailable(f"cannot read {path}: {error.strerror}", path) from error
    with file:
        if path.endswith((PACKED_SUFFIX, f"{PACKED_SUFFIX}.new")):
            with _decompress(file) as stream:
                yield stream
        elif length is None:
            yield file
        else:
            yield io.BufferedReader(_FileStart(file, length))


def _decompress(file: BinaryIO) -> AbstractContextManager[Any]:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(reader, 1 << 20)


class _FileStart(io.RawIOBase):
    """First bytes of a file: bytes appended after them are invisible.

    Args:
        file: The file.
        length: Number of visible bytes.
    """

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file = file
        self._remaining = length

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; return 0 at the end."""
        data = self._file.read(min(len(buffer), self._remaining))
        self._remaining -= len(data)
        buffer[: len(data)] = data
        return len(data)


def read_raw_lines(sources: Iterable[LogSource]) -> Iterator[bytes]:
    """Yield the lines of files unchanged, invalid ones included."""
    return _read_lines_raw(list(sources), None)


JOB_LOG: Final = JobLog(read_lines=read_lines, days_in=list_log_days)
"""Registration of the job log's reader with accounting."""
