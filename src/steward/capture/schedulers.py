"""Taking hold of a file that a scheduler may still be writing, or be about to remove.

An open descriptor keeps the bytes whatever is unlinked; a read lease tells
whether a writer still has the file open. Both are the same for every scheduler.
"""

import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.extensions import offers_of
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.slurm.environment import Environment
from steward.slurm.settings import SCHEDULERS

OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a spool's file is opened: no link out of it, and no wait for a pipe's other end."""

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""No descriptor is left, of this process's or of the machine's."""
FOREIGN: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR})
"""Errors of opening what no scheduler made: a link, a socket, a file in place of a directory.

After every other error the file may be read later: a path fails over, a server is away."""
MOST_ENVIRONMENT_BYTES: Final = 8 << 20
"""An environment beyond this is not kept: one user's job must not stop capture for all.

Redacting one of this size may take 5 s, and five times its size in memory. Linux starts
no program with more than 6 MiB of arguments and environment (fs/exec.c), no job either.
"""
MOST_SCRIPT_BYTES: Final = 48 << 20
"""A script beyond this is not kept. Slurm's own limit (max_script_size) is 4 MB unless it is
set, Torque has none. With an environment it fits into one frame between two hosts."""
ENVIRONMENT_MISSING: Final = "environment-missing"
ENVIRONMENT_TOO_LARGE: Final = "environment-too-large"
ENVIRONMENT_UNREADABLE: Final = "environment-unreadable"
SCRIPT_TOO_LARGE: Final = "script-too-large"
_USUAL_BYTES = 1 << 15


def is_written(fd: int, *, remote: bool = False) -> bool | None:
    """Whether no writer has the file open: the kernel grants a read lease only then.

    The lease is dropped at once: while it is held, a writer's open(2) would wait.

    Args:
        fd: The file, opened for reading.
        remote: Whether it is on a network file system: NFSv4 refuses a lease on every
            file that it holds no delegation for.

    Returns:
        None where leases do not work, or a file of another user's needs CAP_LEASE.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN and not remote else None
    return True


def is_unlinked(fd: int) -> bool:
    """Whether a file has no name any more, so that open descriptors alone have its bytes."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return False  # its file system cannot tell now


def read_whole(fd: int, most: int = MOST_SCRIPT_BYTES) -> bytes | None:
    """All of a file, from its beginning, whatever was read of it before; None if it is too large.

    Args:
        fd: The file.
        most: Its largest size, in bytes.
    """
    data = os.pread(fd, _USUAL_BYTES, 0)
    if len(data) < _USUAL_BYTES:
        return data
    size = os.fstat(fd).st_size
    if size > most:
        return None
    # At one go: pieces and what they are joined to would take twice the memory.
    data = os.pread(fd, size + 1, 0)
    if len(data) == size:
        return data
    return _grown(fd, data, most)


def _grown(fd: int, data: bytes, most: int) -> bytes | None:
    """The rest, too, of a file that was written to while it was read."""
    whole = bytearray(data)
    while piece := os.pread(fd, 1 << 20, len(whole)):
        whole += piece
        if len(whole) > most:
            return None
    return bytes(whole)


class SchedulerError(StewardError):
    """A scheduler cannot be used; ``offender`` is its name."""


class Contents(msgspec.Struct, frozen=True):
    """What was read of one thing that was taken from a spool.

    Attributes:
        script: The script as it was submitted; None where there is none to keep, with a flag
            that says why where a job has one.
        environment: The environment in the form of ``environment.py``, redacted.
        flags: What was odd, see ``events.JobScript``.
        directory: Submit directory as the spool claims it, where the environment does not.
        host: Submit host, likewise.
        events: What the spool itself tells of the job, redacted.
    """

    script: bytes | None
    environment: Environment | None = None
    flags: tuple[str, ...] = ()
    directory: str = ""
    host: str = ""
    events: tuple[Event, ...] = ()


class EnvironmentUnreadable(OSError):
    """An environment cannot be read now, while its script can.

    Args:
        error: Why.
        contents: The script without it.
    """

    def __init__(self, error: OSError, contents: Contents) -> None:
        super().__init__(error.errno, error.strerror)
        self.contents = contents


class Taken(Protocol):
    """One thing that was taken from a spool: open descriptors or bytes, safe from any unlink."""

    @property
    def job_id(self) -> int:
        """The raw id of its job; an array's for its script."""

    @property
    def mtime_ns(self) -> int:
        """With the job id, the script's name among events: ns since the epoch."""

    @property
    def is_removed(self) -> bool:
        """Whether the spool has its script no more, so that this alone holds the bytes."""

    def read(self, redactor: Redactor) -> Contents:
        """Read it, once or again; what comes back holds no secret but the script's own.

        Raises:
            OSError: It cannot be read now.
            EnvironmentUnreadable: Its environment alone cannot.
        """

    def close(self) -> None:
        """Let go of it."""


class Spool(Protocol):
    """The part of a spool that one process watches."""

    @property
    def ready(self) -> deque[Taken]:
        """What was taken and waits to be read, the oldest first; who takes it out closes it."""

    @property
    def vanished(self) -> list[int]:
        """Raw ids of jobs removed before their scripts were taken; who reads them empties it."""

    @property
    def fd(self) -> int:
        """Readable when there is something to :meth:`look` at."""

    @property
    def away(self) -> str:
        """Why nothing of it can be watched just now; "" where it is there."""

    def due_s(self) -> float:
        """Seconds until :meth:`look` is to be called even if nothing can be read."""

    def look(self) -> None:
        """Take in what has happened; what is complete is then in ``ready``."""

    def holds(self, job_id: int, mtime_ns: int) -> bool:
        """Whether a script lies in the spool; True where that cannot be known now."""

    def rescan(self) -> None:
        """Have the next :meth:`look` compare the whole spool with what was captured."""

    def close(self) -> None:
        """Let go of everything."""


class SpoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of which spool is to be watched, and what is known already.

    Attributes:
        cluster: The cluster's name, for events.
        root: The spool's directory.
        share: Which part of it, of ``of``: see :meth:`Scheduler.share_of`.
        of: How many processes share the spool.
        known: Whether the script of a job id with this mtime (ns) was captured before.
        unfinished: The latest records of the jobs that are not over as far as is known.
        most_held: How many scripts may be held open before taking pauses.
        options: The cluster's settings that only this scheduler knows.
    """

    cluster: str
    root: str
    share: int = 0
    of: int = 1
    known: Callable[[int, int], bool]
    unfinished: Callable[[], Iterable[JobRecord]] = tuple
    most_held: int = 4000
    options: dict[str, object] = {}


class Scheduler(Protocol):
    """A kind of scheduler whose spool can be watched; what an entry point names."""

    @property
    def default_root(self) -> str:
        """Where the spool is if the settings do not say; "" where Slurm is to be asked."""

    def share_of(self, job_id: int, of: int) -> int:
        """Which of ``of`` processes a job's spool entry falls to."""

    def open(self, plan: SpoolPlan) -> Spool:
        """A watch on the spool; it need not be there yet."""


def scheduler_called(name: str) -> Scheduler:
    """The scheduler of this name, loaded now.

    Raises:
        SchedulerError: No installed package has it, or what it names cannot be loaded.
    """
    found = offers_of(SCHEDULERS)
    if name not in found:
        raise SchedulerError(f"there is no scheduler {name!r}: known are {', '.join(found)}", name)
    try:
        scheduler: Scheduler = found[name].load()
    except (ImportError, AttributeError) as error:
        raise SchedulerError(f"scheduler {name!r} cannot be loaded: {error}", name) from error
    return scheduler
