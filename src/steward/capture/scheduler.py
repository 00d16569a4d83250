"""What capture needs of a scheduler: a spool to watch, and things that are taken from it.

A scheduler is found by name among the entry points of the group
``steward.scheduler``, so that a third one is a package of its own: its entry
point names a :class:`Scheduler`. Capture itself knows no scheduler's formats.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.extensions import offers_of
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.slurm.environment import Environment
from steward.slurm.settings import SCHEDULERS


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
