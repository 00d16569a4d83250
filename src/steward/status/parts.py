"""What the daemon's supervisor leaves for others to read: its parts, and how they fare."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward import __version__
from steward.actions import Shape
from steward.leaving import leave, left

_FILENAME: Final = "daemon.json"


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
        version: Steward's.
        pid: The supervisor.
        born: When that process began, in the kernel's clock ticks since boot: another process
            of the same number is told from it by that.
        since: Since when it runs.
        parts: Its processes.
    """

    version: str
    pid: int
    born: int
    since: datetime
    parts: tuple[PartLine, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the supervisor is still there."""
        return bool(self.born) and _born(self.pid) == self.born


class Leaving:
    """Writes down how the parts of this process stand.

    Args:
        state_dir: Where to.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _FILENAME)
        self._since = datetime.now(UTC)

    def put(self, parts: Sequence[PartLine]) -> None:
        """Write it down.

        Raises:
            NotLeft: It cannot be written.
        """
        pid = os.getpid()
        standing = DaemonStanding(
            version=__version__, pid=pid, born=_born(pid), since=self._since, parts=tuple(parts)
        )
        leave(self._path, standing)


def read(state_dir: str) -> DaemonStanding | None:
    """The daemon that ran last on a state directory; None where none did."""
    found = left(os.path.join(state_dir, _FILENAME), DaemonStanding)
    return found[0] if found else None


def _born(pid: int) -> int:
    """When a process began, in clock ticks since boot, see proc(5); 0 where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name, which may hold anything.
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
