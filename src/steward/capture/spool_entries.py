"""Spool entries: the interface that a scheduler's spool implements, and safe reads of its files.

The helpers come first. They secure a file that a scheduler may still be writing or about to remove:
a read lease tells whether a writer still has the file open (``has_no_writer``), and an open
descriptor keeps the bytes whatever is unlinked (``read_whole``).

An entry point of the group ``steward.scheduler`` provides a :class:`Scheduler`, so that another one
can be a separate package; capture itself knows no scheduler's formats. ``load_scheduler`` loads it
by name. Given a :class:`SpoolPlan`, it opens a :class:`WatchedSpool`, which yields
:class:`CapturedEntry` scripts with their :class:`EntryContents`. Slurm's is in
:mod:`steward.capture.slurm_spool`.
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
from steward.core.extensions import list_offers
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.slurm.environment import Environment
from steward.slurm.settings import SCHEDULERS

# File helpers

OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a spool's file: follow no link out of it, do not block on a pipe."""

NO_DESCRIPTOR_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors that mean that the process or the machine has no descriptor left."""
FOREIGN_ERRNOS: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR})
"""Errors of opening an object that no scheduler made: a link, a socket, a file in place of a
directory. After any other error the file may be readable later (path failover, server down).
"""
MOST_ENVIRONMENT_BYTES: Final = 8 << 20
"""Maximum size of an environment, in bytes; larger ones are not kept, because one user's job must
not stop capture for all.

Redacting one of this size may take 5 s and five times its size in memory. Linux starts no program
with more than 6 MiB of arguments and environment (fs/exec.c), so no job either.
"""
MOST_SCRIPT_BYTES: Final = 48 << 20
"""Maximum size of a script, in bytes; larger ones are not kept. Slurm's own limit (max_script_size)
is 4 MB unless set, Torque has none. Script and environment fit into one frame between two hosts.
"""
ENVIRONMENT_MISSING: Final = "environment-missing"
"""Flag: the job has no environment."""
ENVIRONMENT_TOO_LARGE: Final = "environment-too-large"
"""Flag: the environment exceeds its maximum size."""
ENVIRONMENT_UNREADABLE: Final = "environment-unreadable"
"""Flag: the environment cannot be read."""
SCRIPT_TOO_LARGE: Final = "script-too-large"
"""Flag: the script exceeds its maximum size."""
_USUAL_BYTES = 1 << 15
"""Bytes of the first read, enough for most scripts."""


def has_no_writer(fd: int, *, remote: bool = False) -> bool | None:
    """Return whether no writer has the file open: only then the kernel grants a read lease.

    The lease is released at once: while it is held, a writer's open(2) would wait.

    Args:
        fd: File, opened for reading.
        remote: Whether it is on a network file system: NFSv4 refuses a lease on every file without
            a delegation.

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
    """Return whether a file has no name left, so that only open descriptors have its bytes."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return False  # the file system cannot tell now


def read_whole(fd: int, max_bytes: int = MOST_SCRIPT_BYTES) -> bytes | None:
    """Read a whole file from its beginning; None if it is too large.

    Args:
        fd: File descriptor.
        max_bytes: Maximum size, in bytes.
    """
    data = os.pread(fd, _USUAL_BYTES, 0)
    if len(data) < _USUAL_BYTES:
        return data
    size = os.fstat(fd).st_size
    if size > max_bytes:
        return None
    # One read: joining pieces would need twice the memory.
    data = os.pread(fd, size + 1, 0)
    if len(data) == size:
        return data
    return _read_growing(fd, data, max_bytes)


def _read_growing(fd: int, data: bytes, max_bytes: int) -> bytes | None:
    """Read the rest of a file that grew while it was read."""
    whole = bytearray(data)
    while piece := os.pread(fd, 1 << 20, len(whole)):
        whole += piece
        if len(whole) > max_bytes:
            return None
    return bytes(whole)


# Protocols of schedulers and spools


class SchedulerError(StewardError):
    """Error: a scheduler cannot be used; ``offender`` is its name."""


class EntryContents(msgspec.Struct, frozen=True):
    """Content of one spool entry.

    Attributes:
        script: Script as submitted; None if there is none to keep, with a flag that says why.
        environment: Environment as ``steward.slurm.environment`` represents it, redacted.
        flags: Anomalies, see ``steward.core.events.JobScript``.
        directory: Submit directory according to the spool, if the environment does not name it.
        host: Submit host according to the spool, likewise.
        events: Facts about the job from the spool itself, redacted.
    """

    script: bytes | None
    environment: Environment | None = None
    flags: tuple[str, ...] = ()
    directory: str = ""
    host: str = ""
    events: tuple[Event, ...] = ()


class EnvironmentUnreadable(OSError):
    """Error: an environment cannot be read now, but its script can.

    Args:
        error: Cause.
        contents: Content without the environment.
    """

    def __init__(self, error: OSError, contents: EntryContents) -> None:
        super().__init__(error.errno, error.strerror)
        self.contents = contents


class CapturedEntry(Protocol):
    """Script taken from a spool: open descriptors or bytes, safe from any unlink."""

    @property
    def job_id(self) -> int:
        """Raw job id; an array's for its script."""

    @property
    def mtime_ns(self) -> int:
        """Modification time in ns since the epoch; with the job id, it identifies the script."""

    @property
    def is_removed(self) -> bool:
        """Whether the spool no longer has the script, so that only this object holds the bytes."""

    def read(self, redactor: Redactor) -> EntryContents:
        """Read and redact the content, once or again; the script itself stays as it is.

        Raises:
            OSError: It cannot be read now.
            EnvironmentUnreadable: Only the environment cannot be read.
        """

    def close(self) -> None:
        """Close its descriptors."""


class WatchedSpool(Protocol):
    """Watched part of a spool, owned by one process."""

    @property
    def ready(self) -> deque[CapturedEntry]:
        """Scripts ready to be read, oldest first; the caller that removes one closes it."""

    @property
    def vanished(self) -> list[int]:
        """Raw ids of jobs removed before their scripts were taken; the reader empties the list."""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when :meth:`process_events` has something to process."""

    @property
    def unavailable_reason(self) -> str:
        """Reason why the spool cannot be watched now; "" if it can."""

    def due_s(self) -> float:
        """Return seconds until :meth:`process_events` is due even without inotify events."""

    def process_events(self) -> None:
        """Process inotify events; complete scripts are then in ``ready``."""

    def has_script(self, job_id: int, mtime_ns: int) -> bool:
        """Return whether a script is in the spool; True if that cannot be determined now."""

    def rescan(self) -> None:
        """Make the next :meth:`process_events` compare the whole spool with captured scripts."""

    def close(self) -> None:
        """Close all descriptors."""


class SpoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a spool to watch, and what is known already.

    Attributes:
        cluster: Name of the cluster, for events.
        root: Directory of the spool.
        share: Number of this part among ``of`` parts, see :meth:`Scheduler.share_of`.
        of: Number of processes that share the spool.
        known: Returns whether the script of a job id with this mtime (ns) was captured before.
        unfinished: Returns the latest records of jobs known to be unfinished.
        max_held: Maximum number of scripts held open before pausing.
    """

    cluster: str
    root: str
    share: int = 0
    of: int = 1
    known: Callable[[int, int], bool]
    unfinished: Callable[[], Iterable[JobRecord]] = tuple
    max_held: int = 4000


class Scheduler(Protocol):
    """Kind of scheduler whose spool can be watched, named by an entry point."""

    @property
    def default_root(self) -> str:
        """Default spool directory; "" if Slurm is to be asked."""

    def share_of(self, job_id: int, of: int) -> int:
        """Return which of ``of`` processes handles a job's spool entry."""

    def open(self, plan: SpoolPlan) -> WatchedSpool:
        """Open a watch on the spool, which need not exist yet."""


def load_scheduler(name: str) -> Scheduler:
    """Load the scheduler with this name.

    Raises:
        SchedulerError: No installed package provides it, or its module cannot be loaded.
    """
    offers = list_offers(SCHEDULERS)
    if name not in offers:
        raise SchedulerError(f"unknown scheduler {name!r}: use one of {', '.join(offers)}", name)
    try:
        scheduler: Scheduler = offers[name].load()
    except (ImportError, AttributeError) as error:
        raise SchedulerError(f"cannot load scheduler {name!r}: {error}", name) from error
    return scheduler
