"""Reads a job log: its records as they are, or the lines that sacct shows of them.

A log may be anybody's file: a line that is no record is counted and passed
over. A file is read twice, first to learn where each run is told of for the
last time, so that no more than the runs that are open there lie in memory.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, BinaryIO, Final

import msgspec

from steward.accounting.job_log import JobLog, PassedOver
from steward.core.records import Line
from steward.core.timestamps import micros
from steward.extensions.jobacct_plugins.log.files import (
    PACKED,
    LogError,
    LogUnavailable,
    days_in,
    units_of,
)
from steward.extensions.jobacct_plugins.log.records import (
    AnyRecord,
    Head,
    RunRecords,
    head_of,
    record_of,
)

_LONGEST_LINE: Final = 8 << 20
"""Bytes; a record of ours has less, and one of another must not fill the memory."""

RunKey = tuple[str, int, int, int]
"""A run: cluster, job id, its own submit time in µs, restarts."""

Source = tuple[str, int | None]
"""A file, and how many of its bytes count; None for all."""


def read_lines(path: str, passed_over: PassedOver | None = None) -> Iterator[Line]:
    """The lines of sacct that a job log holds, each run before its steps.

    Args:
        path: A day of a log (``.jsonl``, ``.jsonl.zst``), or the directory of a whole log.
        passed_over: Told of each line that is no record.

    Raises:
        LogError: There is no such log, or it cannot be unpacked.
        LogUnavailable: It cannot be read now.
    """
    for files in units_of(path):
        yield from lines_of_unit([(file, None) for file in files], passed_over=passed_over)


def lines_of_unit(
    sources: Sequence[Source],
    *,
    is_superseded: Callable[[RunKey], bool] = lambda _: False,
    passed_over: PassedOver | None = None,
) -> Iterator[Line]:
    """The lines of files that belong together, so that each corrects those before it.

    Args:
        sources: The files of a day, in their order.
        is_superseded: Whether a later run of the same job is known, of another day.
        passed_over: Told of each line that is no record.
    """
    last: dict[int, int] = {}
    requeued: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for number, head in enumerate(map(_head, _raw(sources, passed_over))):
        if head is not None:
            key = _key(head)
            last[hash(key)] = number
            if head.restarts:
                requeued.setdefault(key[:2], set()).add(key[2:])

    def lines(key: RunKey, run: RunRecords) -> Iterator[Line]:
        later = requeued.get(key[:2], ())
        is_followed = any(submit >= key[2] and restarts > key[3] for submit, restarts in later)
        is_latest = not is_followed and not is_superseded(key)
        try:
            yield from run.lines(is_latest=is_latest)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Each record can be read, and together they are nothing that ever was.
            if passed_over is not None:
                passed_over(sources[0][0], 0, f"job {key[1]}: {error}")

    open_runs: dict[RunKey, RunRecords] = {}
    for number, line in enumerate(_raw(sources, None)):
        record = _record(line)
        if record is not None:
            key = _key(record)
            open_runs.setdefault(key, RunRecords()).add(record)
            if last.get(hash(key)) == number:
                yield from lines(key, open_runs.pop(key))
    for key, run in open_runs.items():
        # Its last record could not be read after all, or the file has grown.
        yield from lines(key, run)


def raw_records(
    files: Sequence[str],
    since: datetime | None,
    until: datetime | None,
    passed_over: PassedOver | None = None,
) -> Iterator[bytes]:
    """The records of a log as they are, one line each, of what happened within a time.

    Args:
        files: Files of a log, in the order in which to read them.
        since: Only what happened then or later.
        until: Only what happened before.
        passed_over: Told of each line that is no record.

    Raises:
        LogError: A file cannot be unpacked.
        LogUnavailable: It cannot be read now.
    """
    for line in _raw([(path, None) for path in files], passed_over):
        record = _record(line)
        if record is None:
            continue
        if (since is None or record.at >= since) and (until is None or record.at < until):
            yield line if line.endswith(b"\n") else line + b"\n"


def _raw(sources: Sequence[Source], passed_over: PassedOver | None) -> Iterator[bytes]:
    """The lines of files; told of are those that are no record, but they are counted with."""
    for path, length in sources:
        with _opened(path, length) as file:
            for number, line in enumerate(_bounded(file, path), start=1):
                if passed_over is not None and (why := _why_not(line)):
                    passed_over(path, number, why)
                yield line


_NO_RECORD: Final = (msgspec.MsgspecError, UnicodeDecodeError, TypeError, OverflowError)
"""A time without a zone raises a TypeError where it is reckoned with."""


def _why_not(line: bytes) -> str:
    try:
        _checked(record_of(line))
    except _NO_RECORD as error:
        return str(error)
    return ""


def _record(line: bytes) -> AnyRecord | None:
    try:
        return _checked(record_of(line))
    except _NO_RECORD:
        return None


def _checked(record: AnyRecord) -> AnyRecord:
    _key(record)
    micros(record.at)
    return record


def _head(line: bytes) -> Head | None:
    try:
        head = head_of(line)
        _key(head)
    except _NO_RECORD:
        return None
    return head


def _key(head: Head | AnyRecord) -> RunKey:
    return head.cluster, head.job_id, micros(head.submit), head.restarts


def _bounded(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The lines of a file; of one that is too long, its begin, which is no record."""
    while True:
        try:
            line = file.readline(_LONGEST_LINE)
            if not line:
                return
            rest = line
            while not rest.endswith(b"\n") and len(rest) == _LONGEST_LINE:
                rest = file.readline(_LONGEST_LINE)
        except OSError as error:
            raise LogUnavailable(f"{path} cannot be read: {error.strerror}", path) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise LogError(f"{path} cannot be unpacked: {error}", path) from error
        yield line


@contextmanager
def _opened(path: str, length: int | None) -> Iterator[BinaryIO]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise LogUnavailable(f"{path} cannot be read: {error.strerror}", path) from error
    with file:
        if path.endswith((PACKED, f"{PACKED}.new")):
            with _unpacked(file) as stream:
                yield stream
        elif length is None:
            yield file
        else:
            yield io.BufferedReader(_Begin(file, length))


def _unpacked(file: BinaryIO) -> AbstractContextManager[Any]:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(reader, 1 << 20)


class _Begin(io.RawIOBase):
    """The first bytes of a file: what was appended after them does not count.

    Args:
        file: The file.
        length: How many bytes.
    """

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file = file
        self._left = length

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; 0 at the end."""
        data = self._file.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)


def records_of(sources: Iterable[Source]) -> Iterator[bytes]:
    """The lines of files as they are, those that are no records with them."""
    return _raw(list(sources), None)


JOB_LOG: Final = JobLog(read_lines=read_lines, days_in=days_in)
"""How accounting reads the job log."""
