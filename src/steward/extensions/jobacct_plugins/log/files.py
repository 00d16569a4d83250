"""Appends to the files of the job log so that a crash neither doubles nor tears a line.

A database keeps how long each file is; what lies beyond that was written by a
batch that was not finished, and is cut off before anything else is written.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Final

from steward.extensions.jobacct_plugins.log.errors import LogUnavailable
from steward.extensions.jobacct_plugins.log.places import NEW

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
