"""Files of the job log: names, days in the clusters' zones, and crash-safe appends.

A day has up to four files: ``2026-11-21.jsonl`` (open), ``.late.jsonl`` (records after closing),
``.jsonl.zst`` (packed) and ``.parquet`` (sacct lines). :func:`list_log_days` lists days,
:class:`LogCalendar` computes them, :class:`LogFiles` appends. Listing and reading need no database.
The last functions serve the processes that make new files (``parquet``, ``purges``).

No crash doubles or tears a line: a database records each file's length; bytes beyond it come from
an unfinished batch and are cut off before the next write.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any, Final

import msgspec

from steward.accounting.errors import AccountingError, AccountingUnavailable
from steward.slurm.settings import ClusterSettings
from steward.slurm.times import load_zone


class JobLogError(AccountingError):
    """Job log that is unusable as it is; ``offender`` is its path."""


class JobLogUnavailable(AccountingUnavailable):
    """Job log that cannot be read or written now; ``offender`` is its path."""


OPEN_SUFFIX: Final = ".jsonl"
"""Suffix of the growing file of an open day."""
LATE_SUFFIX: Final = ".late.jsonl"
"""Suffix of the growing file for records that arrive after a day's closing."""
PACKED_SUFFIX: Final = ".jsonl.zst"
"""Suffix of the packed records of a closed day (zstd)."""
PARQUET_SUFFIX: Final = ".parquet"
"""Suffix of the sacct lines of a closed day."""
NEW_SUFFIX: Final = ".new"
"""Suffix of a file that is being made; a dot in front of its name hides it, too."""

_FILE_PATTERN: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})(\.jsonl|\.late\.jsonl|\.jsonl\.zst|\.parquet)"
)


class JobLogDay(msgspec.Struct, frozen=True, kw_only=True):
    """One day of a log, as its directory holds it.

    Attributes:
        day: The day, ``2026-11-21``.
        records: Paths of the files that hold its records, in the order in which to read them.
        parquet: Path of its lines in Parquet; "" while it is not closed.
        length: Size of all of its files, bytes.
    """

    day: str
    records: tuple[str, ...]
    parquet: str = ""
    length: int = 0


def day_name(day: date) -> str:
    """Format a day as file names have it."""
    return day.isoformat()


def list_log_days(location: str) -> list[JobLogDay]:
    """List the days of a log, the oldest first.

    Raises:
        JobLogUnavailable: The directory cannot be read now.
    """
    files_by_day: dict[str, dict[str, os.DirEntry[str]]] = {}
    try:
        with os.scandir(location) as entries:
            for entry in entries:
                match = _FILE_PATTERN.fullmatch(entry.name)
                if match and _is_date(match[1]) and entry.is_file(follow_symlinks=False):
                    files_by_day.setdefault(match[1], {})[match[2]] = entry
        return [_build_day(day, files) for day, files in sorted(files_by_day.items())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobLogUnavailable(
            f"cannot read the job log in {location}: {error.strerror}", location
        ) from error


def _build_day(day: str, files: "dict[str, os.DirEntry[str]]") -> JobLogDay:
    return JobLogDay(
        day=day,
        records=tuple(
            files[suffix].path
            for suffix in (PACKED_SUFFIX, OPEN_SUFFIX, LATE_SUFFIX)
            if suffix in files
        ),
        parquet=files[PARQUET_SUFFIX].path if PARQUET_SUFFIX in files else "",
        length=sum(entry.stat(follow_symlinks=False).st_size for entry in files.values()),
    )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def file_units(path: str) -> Iterable[tuple[str, ...]]:
    """Return the files of a log by day, or a single file as one unit.

    Args:
        path: A log's directory, or one file of records.

    Raises:
        JobLogError: It is neither.
        JobLogUnavailable: It cannot be read now.
    """
    if os.path.isdir(path):
        units = [day.records for day in list_log_days(path) if day.records]
        if not units:
            raise JobLogError(f"{path} contains no job log", path)
        return units
    if not os.path.exists(path):
        raise JobLogError(f"{path}: no such job log", path)
    return [(path,)]


class LogCalendar:
    """Days in the time zones of the clusters.

    Args:
        clusters: The settings of the clusters, by name.
    """

    def __init__(self, clusters: Mapping[str, ClusterSettings]) -> None:
        self._zones = {name: load_zone(cluster.timezone) for name, cluster in clusters.items()}
        self._local_zone = load_zone("")

    def find_day(self, cluster: str, moment: datetime) -> str:
        """Return the day of a moment in the cluster's zone."""
        zone = self._zones.get(cluster, self._local_zone)
        try:
            return day_name(moment.astimezone(zone).date())
        except OverflowError:
            # At the ends of the calendar some zones have no such moment.
            return day_name(moment.date())

    def get_day_end(self, day: str) -> datetime:
        """Return the time when a day is over in all zones."""
        next_day = date.fromisoformat(day) + timedelta(days=1)
        zones: set[tzinfo] = {*self._zones.values(), self._local_zone}
        return max(datetime.combine(next_day, time(0), zone) for zone in zones)


log = logging.getLogger(__name__)

_MODE: Final = 0o600
_BLOCK: Final = 1 << 20
"""Bytes of one read or write."""


class LogFiles:
    """Growing files of one log.

    Args:
        location: The directory; created with mode 0700 where it is missing.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    def file_path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.location, name)

    def append(self, name: str, length: int, chunks: Iterable[bytes]) -> int:
        """Append to a file and fsync it; return its new length.

        Args:
            name: The file.
            length: Its valid length; bytes beyond are cut off.
            chunks: Bytes to append.

        Raises:
            JobLogUnavailable: It cannot be written now.
        """
        with self._translate_errors(name):
            self._create_directory()
            fd = self._open_file(name)
            try:
                length = _truncate_to(fd, length, self.file_path(name))
                written = _write(fd, chunks)
                os.fsync(fd)
            finally:
                os.close(fd)
            if length == 0:
                self.sync_directory()
        return length + written

    def truncate_file(self, name: str, length: int) -> int:
        """Cut a file to a length; return the resulting length, 0 where there is no file.

        Raises:
            JobLogUnavailable: It cannot be done now.
        """
        with self._translate_errors(name):
            if not os.path.exists(self.file_path(name)):
                if length:
                    log.error(
                        "%s is missing; it held %d bytes of the job log",
                        self.file_path(name),
                        length,
                    )
                return 0
            fd = self._open_file(name)
            try:
                return _truncate_to(fd, length, self.file_path(name))
            finally:
                os.close(fd)

    def find_valid_length(self, name: str) -> int:
        """Return the valid length of an unrecorded file: up to its last newline.

        Raises:
            JobLogUnavailable: It cannot be read now.
        """
        path = self.file_path(name)
        with self._translate_errors(name):
            if not os.path.exists(path):
                return 0
            with open(path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                while end:
                    start = max(0, end - _BLOCK)
                    file.seek(start)
                    newline = file.read(end - start).rfind(b"\n")
                    if newline >= 0:
                        return start + newline + 1
                    end = start
        return 0

    def rename_file(self, name: str, new_name: str) -> None:
        """Rename a file, if it exists."""
        with self._translate_errors(name), contextlib.suppress(FileNotFoundError):
            os.replace(self.file_path(name), self.file_path(new_name))

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists."""
        with self._translate_errors(name), contextlib.suppress(FileNotFoundError):
            os.unlink(self.file_path(name))

    def remove_unfinished(self) -> None:
        """Remove temporary files of a killed process."""
        with self._translate_errors(""):
            if not os.path.isdir(self.location):
                return
            for name in os.listdir(self.location):
                if name.startswith(".") and name.endswith(NEW_SUFFIX):
                    os.unlink(self.file_path(name))

    def sync_directory(self) -> None:
        """Sync the directory, so that new names are durable."""
        with self._translate_errors(""):
            fd = os.open(self.location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _create_directory(self) -> None:
        if not os.path.isdir(self.location):
            os.makedirs(self.location, mode=0o700, exist_ok=True)

    def _open_file(self, name: str) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.file_path(name), flags, _MODE)

    @contextlib.contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Raise JobLogUnavailable for an OSError."""
        try:
            yield
        except OSError as error:
            path = self.file_path(name)
            raise JobLogUnavailable(
                f"cannot use the job log {path}: {error.strerror}", path
            ) from error


def _truncate_to(fd: int, length: int, path: str) -> int:
    """Cut a file to a length; return the shorter length if bytes are missing."""
    size = os.fstat(fd).st_size
    if size < length:
        log.error("%s has %d bytes of the job log, expected %d", path, size, length)
        return size
    if size > length:
        os.ftruncate(fd, length)
        os.fsync(fd)
    return length


def _write(fd: int, chunks: Iterable[bytes]) -> int:
    """Write all chunks through a buffer; return the number of bytes."""
    written = 0
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= _BLOCK:
            written += _flush(fd, buffer)
            buffer = bytearray()
    return written + _flush(fd, buffer)


def _flush(fd: int, data: bytearray) -> int:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]
    return len(data)


LOG_FILE_MODE: Final = 0o600
"""Mode of the log's files."""

_PR_SET_PDEATHSIG: Final = 1


def stop_with_parent() -> None:
    """Tie this process to the daemon's life (PR_SET_PDEATHSIG), and make its files private."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o077)


def create_log_file(path: str) -> Any:
    """Create a file, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, LOG_FILE_MODE), "wb")


def sync_file(file: Any) -> None:
    """Flush and fsync a file."""
    file.flush()
    os.fsync(file.fileno())
