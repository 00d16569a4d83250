"""What the daemon's supervisor leaves for others to read: its parts, and how they fare.

That it is still there is told by a lock that it holds. A process number would say
nothing to who asks from another container: processes have other numbers there.
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
from steward.core.actions import Shape
from steward.core.files import StatusWriteError, read_status, write_status

_FILENAME: Final = "daemon.json"
_LOCK: Final = "daemon.lock"
_FLOCK: Final = struct.Struct("hhqqi")
"""struct flock, see fcntl(2): type, whence, start, length, pid."""


class PartLine(Shape, frozen=True, kw_only=True):
    """One of the daemon's processes.

    Attributes:
        name: The part's name.
        pid: Its process; 0 while it does not run.
        since: Since when it runs; None while it does not.
        restarts: How often it was started again because it failed.
        error: Why it last ended unasked; "" if it never did.
        error_at: When that was.
    """

    name: str
    pid: int = 0
    since: datetime | None = None
    restarts: int = 0
    error: str = ""
    error_at: datetime | None = None


class DaemonStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon, as its supervisor left it written.

    Attributes:
        version: Steward's; "" where the daemon runs and could not write anything down yet.
        since: Since when it runs.
        parts: Its processes.
    """

    version: str = ""
    since: datetime | None = None
    parts: tuple[PartLine, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it has told how it stands."""
        return self.since is not None


class Leaving:
    """Writes down how the parts of this process stand.

    Args:
        state_dir: Where to.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _FILENAME)
        self._lock_path = os.path.join(state_dir, _LOCK)
        self._lock = -1
        self._since = datetime.now(UTC)
        # The lock is of whoever has the descriptor: a part that is stuck would hold it on.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def put(self, parts: Sequence[PartLine]) -> None:
        """Write it down; the lock is held before, for as long as this process lives.

        Raises:
            NotLeft: It cannot be written, or another daemon holds the lock.
        """
        if self._lock < 0:
            self._lock = _hold(self._lock_path, self._path)
        write_status(
            self._path, DaemonStanding(version=__version__, since=self._since, parts=tuple(parts))
        )

    def _leave_to_parent(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read(state_dir: str) -> DaemonStanding | None:
    """The daemon that runs on a state directory; None where none does."""
    if not _is_held(os.path.join(state_dir, _LOCK)):
        return None
    found = read_status(os.path.join(state_dir, _FILENAME), DaemonStanding)
    return found[0] if found else DaemonStanding()


def _hold(path: str, told: str) -> int:
    """Take the lock, of an open file: a process's own goes with any descriptor that it closes.

    What a daemon before has told is taken away, as long as nobody can take it for ours.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StatusWriteError(f"cannot use {path}: {error.strerror}", path) from error
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(told)
    except BlockingIOError as error:
        os.close(fd)
        raise StatusWriteError(f"another steward holds {path}", path) from error
    except OSError as error:
        os.close(fd)
        raise StatusWriteError(f"cannot lock {path}: {error.strerror}", path) from error
    return fd


def _is_held(path: str) -> bool:
    """Whether a process holds a lock, which is asked about without taking it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # not there, or not for us to see
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    except OSError:
        return False  # a file system without locks, on which nobody could have taken one
    finally:
        os.close(fd)
    kind: int = _FLOCK.unpack(found)[0]
    return kind != fcntl.F_UNLCK
