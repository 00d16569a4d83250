"""Worker status file daemon.json: the daemon's processes, written by its supervisor.

The supervisor writes it with :class:`DaemonStatusWriter`, status pages and health checks read it
with ``read_daemon_status``. A lock that the supervisor holds (daemon.lock) shows that the daemon
runs. A process id would mean nothing to a reader in another container, where process ids differ.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward import __version__
from steward.core.actions import ActionMessage
from steward.core.files import StatusWriteError, read_status, write_status

_FILENAME: Final = "daemon.json"
_LOCK: Final = "daemon.lock"
_FLOCK: Final = struct.Struct("hhqqi")
"""struct flock, see fcntl(2): type, whence, start, length, pid."""


class WorkerLine(ActionMessage, frozen=True, kw_only=True):
    """Status of one worker process of the daemon.

    Attributes:
        name: Name of the worker.
        pid: Process id; 0 while it does not run.
        since: Start time; None while it does not run.
        restarts: Number of restarts after failures.
        error: Reason of its last unexpected end; "" for none.
        error_at: Time of that end.
    """

    name: str
    pid: int = 0
    since: datetime | None = None
    restarts: int = 0
    error: str = ""
    error_at: datetime | None = None

    @property
    def state(self) -> str:
        """``running`` or ``down``."""
        return "running" if self.pid else "down"


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the daemon, as its supervisor wrote it.

    Attributes:
        version: Steward's version; "" if the daemon runs but could not write its status yet.
        since: Start of the daemon.
        workers: Worker processes of the daemon.
    """

    version: str = ""
    since: datetime | None = None
    workers: tuple[WorkerLine, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the supervisor has written a status."""
        return self.since is not None


class DaemonStatusWriter:
    """Writer of the workers' status, for the supervisor.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _FILENAME)
        self._lock_path = os.path.join(state_dir, _LOCK)
        self._lock = -1
        self._since = datetime.now(UTC)
        # A lock belongs to all processes with the descriptor: a stuck child would keep it held.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def write(self, workers: Sequence[WorkerLine]) -> None:
        """Write the workers' status; first take the lock, for the life of this process.

        Raises:
            StatusWriteError: It cannot be written, or another daemon holds the lock.
        """
        if self._lock < 0:
            self._lock = _take_lock(self._lock_path, self._path)
        write_status(
            self._path, DaemonStatus(version=__version__, since=self._since, workers=tuple(workers))
        )

    def _leave_to_parent(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read_daemon_status(state_dir: str) -> DaemonStatus | None:
    """Read the status of the daemon of a state directory; None if none runs."""
    if not _is_held(os.path.join(state_dir, _LOCK)):
        return None
    status = read_status(os.path.join(state_dir, _FILENAME), DaemonStatus)
    return status[0] if status else DaemonStatus()


def _take_lock(path: str, status_path: str) -> int:
    """Take the daemon's lock and delete an earlier daemon's status file ``status_path``.

    The file is deleted while the lock is held, before a reader can take it for this daemon's. The
    lock is one of the open file (F_OFD_SETLK): a process's own lock would be released by closing
    any other descriptor of the file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StatusWriteError(f"cannot use {path}: {error.strerror}", path) from error
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(status_path)
    except BlockingIOError as error:
        os.close(fd)
        raise StatusWriteError(f"another process of Steward has locked {path}", path) from error
    except OSError as error:
        os.close(fd)
        raise StatusWriteError(f"cannot lock {path}: {error.strerror}", path) from error
    return fd


def _is_held(path: str) -> bool:
    """Return whether a process holds a lock, without taking it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # it does not exist, or this user may not read it
    try:
        query = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        reply = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query)
    except OSError:
        return False  # a file system without locks, on which no process can hold one
    finally:
        os.close(fd)
    lock_type: int = _FLOCK.unpack(reply)[0]
    return lock_type != fcntl.F_UNLCK
