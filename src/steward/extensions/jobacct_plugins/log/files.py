"""Appends to the files of the job log so that a crash neither doubles nor tears a line.

A database keeps how long each file is; what lies beyond that was written by a
batch that was not finished, and is cut off before anything else is written.
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
from steward.slurm.times import zone_called


class LogError(AccountingError):
    """A job log cannot be used as it is; ``offender`` is its path."""


class LogUnavailable(AccountingUnavailable):
    """A job log cannot be read or written now; ``offender`` is its path."""


OPEN: Final = ".jsonl"
LATE: Final = ".late.jsonl"
PACKED: Final = ".jsonl.zst"
PARQUET: Final = ".parquet"
NEW: Final = ".new"
"""Behind the name of what is being made; it is hidden by a dot before it, too."""

_NAME: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(\.jsonl|\.late\.jsonl|\.jsonl\.zst|\.parquet)")


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One day of a log, as its directory holds it.

    Attributes:
        day: The day, ``2026-11-21``.
        records: Paths of the files that hold its records, in the order in which to read them.
        parquet: Path of its lines in Parquet; "" where it was not closed yet.
        length: Size of all of its files, bytes.
    """

    day: str
    records: tuple[str, ...]
    parquet: str = ""
    length: int = 0


def day_name(day: date) -> str:
    """A day as files are named by."""
    return day.isoformat()


def days_in(location: str) -> list[Day]:
    """The days of a log, the oldest first.

    Raises:
        LogUnavailable: The directory cannot be read now.
    """
    found: dict[str, dict[str, os.DirEntry[str]]] = {}
    try:
        with os.scandir(location) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and _is_date(match[1]) and entry.is_file(follow_symlinks=False):
                    found.setdefault(match[1], {})[match[2]] = entry
        return [_day(day, files) for day, files in sorted(found.items())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LogUnavailable(
            f"the job log in {location} cannot be read: {error.strerror}", location
        ) from error


def _day(day: str, files: "dict[str, os.DirEntry[str]]") -> Day:
    return Day(
        day=day,
        records=tuple(files[kind].path for kind in (PACKED, OPEN, LATE) if kind in files),
        parquet=files[PARQUET].path if PARQUET in files else "",
        length=sum(entry.stat(follow_symlinks=False).st_size for entry in files.values()),
    )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def units_of(path: str) -> Iterable[tuple[str, ...]]:
    """The files that belong together, below a log's directory or for one of its files.

    Args:
        path: A log's directory, or one file of records.

    Raises:
        LogError: It is neither.
        LogUnavailable: It cannot be read now.
    """
    if os.path.isdir(path):
        units = [day.records for day in days_in(path) if day.records]
        if not units:
            raise LogError(f"{path} holds no job log", path)
        return units
    if not os.path.exists(path):
        raise LogError(f"there is no job log {path}", path)
    return [(path,)]


class Calendar:
    """Days in the zones of the clusters.

    Args:
        clusters: The settings of the clusters, by name.
    """

    def __init__(self, clusters: Mapping[str, ClusterSettings]) -> None:
        self._zones = {name: zone_called(of.timezone) for name, of in clusters.items()}
        self._other = zone_called("")

    def day_of(self, cluster: str, moment: datetime) -> str:
        """The name of the day that a moment is on, where the cluster is."""
        zone = self._zones.get(cluster, self._other)
        try:
            return day_name(moment.astimezone(zone).date())
        except OverflowError:
            # At the ends of the calendar there is no such moment in every zone.
            return day_name(moment.date())

    def end_of(self, day: str) -> datetime:
        """When a day is over in all zones."""
        after = date.fromisoformat(day) + timedelta(days=1)
        zones: set[tzinfo] = {*self._zones.values(), self._other}
        return max(datetime.combine(after, time(0), zone) for zone in zones)


log = logging.getLogger(__name__)

_MODE: Final = 0o600
_BLOCK: Final = 1 << 20


class LogFiles:
    """The open files of one log.

    Args:
        location: The directory; made, for us alone, where it is not there.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    def path(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.location, name)

    def append(self, name: str, length: int, chunks: Iterable[bytes]) -> int:
        """Append to a file and have it on disk; how long it is then.

        Args:
            name: The file.
            length: How long it is; what is beyond is cut off.
            chunks: What to append.

        Raises:
            LogUnavailable: It cannot be written now.
        """
        with self._translated(name):
            self._prepare()
            fd = self._open(name)
            try:
                length = _fit(fd, length, self.path(name))
                written = _write(fd, chunks)
                os.fsync(fd)
            finally:
                os.close(fd)
            if length == 0:
                self.sync_directory()
        return length + written

    def fit(self, name: str, length: int) -> int:
        """Cut off what is beyond a length; how long the file is then, 0 where there is none.

        Raises:
            LogUnavailable: It cannot be done now.
        """
        with self._translated(name):
            if not os.path.exists(self.path(name)):
                if length:
                    log.error(
                        "%s is gone, and held %d bytes of the job log", self.path(name), length
                    )
                return 0
            fd = self._open(name)
            try:
                return _fit(fd, length, self.path(name))
            finally:
                os.close(fd)

    def adopt(self, name: str) -> int:
        """How long a file is that nobody knows of; a last line without its end is cut off.

        Raises:
            LogUnavailable: It cannot be read now.
        """
        path = self.path(name)
        with self._translated(name):
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

    def rename(self, name: str, to: str) -> None:
        """Rename a file, if it is there."""
        with self._translated(name), contextlib.suppress(FileNotFoundError):
            os.replace(self.path(name), self.path(to))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._translated(name), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def remove_unfinished(self) -> None:
        """Remove what was being made when its maker was killed."""
        with self._translated(""):
            if not os.path.isdir(self.location):
                return
            for name in os.listdir(self.location):
                if name.startswith(".") and name.endswith(NEW):
                    os.unlink(self.path(name))

    def sync_directory(self) -> None:
        """Have names on disk as well."""
        with self._translated(""):
            fd = os.open(self.location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _prepare(self) -> None:
        if not os.path.isdir(self.location):
            os.makedirs(self.location, mode=0o700, exist_ok=True)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path(name), flags, _MODE)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = self.path(name)
            raise LogUnavailable(f"the job log: {path}: {error.strerror}", path) from error


def _fit(fd: int, length: int, path: str) -> int:
    size = os.fstat(fd).st_size
    if size < length:
        log.error("%s has %d bytes of the job log, and should have %d", path, size, length)
        return size
    if size > length:
        os.ftruncate(fd, length)
        os.fsync(fd)
    return length


def _write(fd: int, chunks: Iterable[bytes]) -> int:
    """Write all of it, some of it at a time; how many bytes there were."""
    written = 0
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= _BLOCK:
            written += _flush(fd, buffer)
            buffer = bytearray()
    return written + _flush(fd, buffer)


def _flush(fd: int, data: bytearray) -> int:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(data)


MODE: Final = 0o600
"""Of the log's files."""

_PR_SET_PDEATHSIG: Final = 1


def stop_with_parent() -> None:
    """Let this process end with the daemon, and its files be for us alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o077)


def created(path: str) -> Any:
    """A new file, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, MODE), "wb")


def sync(file: Any) -> None:
    """Have all of a file on disk."""
    file.flush()
    os.fsync(file.fileno())
