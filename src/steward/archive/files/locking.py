"""Keeps a files sink and its mover from changing the same scripts at the same moment.

They are two processes, so that a target that hangs holds up only the mover; the
lock is held for local work alone, and the kernel drops it when its holder dies.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from steward.archive.errors import ArchiveUnavailable


class TreeLock:
    """A lock between processes.

    Args:
        path: Its file, made 0600 if need be.
        making: Whether it may be made. One who only reads may be another user than those who
            file, whom a file of his would keep out; where there is none, nobody has filed.
    """

    def __init__(self, path: str, *, making: bool = True) -> None:
        self._path = path
        self._making = making
        self._fd = -1

    @contextmanager
    def held(self) -> "Iterator[None]":
        """Hold the lock.

        Raises:
            ArchiveUnavailable: The file cannot be made, or not be read.
        """
        if self._fd < 0:
            self._open()
        if self._fd < 0:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT if self._making else os.O_RDONLY
        try:
            self._fd = os.open(self._path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._making:
                return  # nobody has filed
            raise ArchiveUnavailable(
                f"cannot lock {self._path}: {error.strerror}", self._path
            ) from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
