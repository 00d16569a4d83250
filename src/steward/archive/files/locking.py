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
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    @contextmanager
    def held(self) -> "Iterator[None]":
        """Hold the lock.

        Raises:
            ArchiveUnavailable: The file cannot be made.
        """
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ArchiveUnavailable(
                    f"cannot lock {self._path}: {error.strerror}", self._path
                ) from error
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
