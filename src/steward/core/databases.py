"""Databases of the state directory: file, writer and backup class of each, and the writer's lock.

:data:`DATABASES` declares every SQLite file once; a backup takes its contents and their order from
it. A file with one writer has one writing process: ``core.sqlite.open_database`` takes its lock
(:class:`WriterLock`) and refuses a second process. Readers are not affected. Several processes
write the other files, one transaction at a time, under SQLite's own locks.

A lock is on a file of its own, ``NAME.lock``, because closing a database drops SQLite's locks on
it, see fcntl(2). It is flock(2)'s: a lock of the process would be freed by closing another
connection. A sink and its mover, and the catalog and its rebuild, have locks of their own.
"""

import contextlib
import fcntl
import os
import time
from fnmatch import fnmatchcase
from typing import Final, Literal
from weakref import WeakValueDictionary

import msgspec

from steward.core.errors import Unavailable

BackupClass = Literal["irreplaceable", "rebuildable", "secret"]
"""Whether a backup must hold a database: nothing makes it again; Steward makes it again from other
data; nothing makes it again, and a restore ends credentials that were revoked since."""


ACTIONS: Final = "actions"
"""Writer of databases that actions of any process write."""


class DatabaseFile(msgspec.Struct, frozen=True):
    """SQLite database of the state directory.

    Attributes:
        name: Path below the directory; ``*`` stands for a cluster, sink, plugin or month.
        writers: Workers that write it; ``*`` stands for the same as in ``name``.
        backup: Backup class.
        copy_order: Place of its copy in a backup: a database comes before the one that it has
            positions of.
    """

    name: str
    writers: tuple[str, ...]
    backup: BackupClass = "irreplaceable"
    copy_order: int = 0

    @property
    def has_one_writer(self) -> bool:
        """Whether one process alone writes it."""
        return len(self.writers) == 1 and self.writers != (ACTIONS,)

    def locate(self, state_dir: str, part: str = "") -> str:
        """Return the path of the database of a cluster, sink or plugin, if it has one for each."""
        return os.path.join(state_dir, self.name.replace("*", part))


JOURNAL: Final = DatabaseFile("journal.db", ("journal",), copy_order=2)
JOBS: Final = DatabaseFile("jobs.db", ("jobs",))
HISTORY: Final = DatabaseFile("history.db", ("history",))
RULES: Final = DatabaseFile("rules.db", ("rules", ACTIONS), copy_order=1)
"""Copied late, because actions of rules have effects outside."""
AUDIT: Final = DatabaseFile("audit.db", (ACTIONS,))
CREDENTIALS: Final = DatabaseFile("credentials.db", (ACTIONS,), "secret")
REQUEST_KEYS: Final = DatabaseFile("repeats.db", (ACTIONS,))
LEDGER: Final = DatabaseFile("ledger.db", ("bank", "mybrc", "mybrc.remote", ACTIONS), copy_order=-3)
GATE: Final = DatabaseFile("gate.db", ("gate",), "rebuildable")
"""Stored holds would be outdated: the gate makes them again from the tokens of Slurm's jobs."""
NODES: Final = DatabaseFile("nodes.db", ("nodes",))
SENSOR_STATES: Final = DatabaseFile("states-*.db", ("sensor.*",))
JOBCOMP_POSITIONS: Final = DatabaseFile("lines-*.db", ("jobcomp.*",))
UNFINISHED_RUNS: Final = DatabaseFile("runs-*.db", ("runs.*",))
FORWARD: Final = DatabaseFile("forward-*.db", ("forward.*",))
SINK: Final = DatabaseFile("archive-*.db", ("archive.*", "mover.*"))
JOB_LOG: Final = DatabaseFile("accounting-log.db", ("accounting.log",))
PLUGIN: Final = DatabaseFile("accounting-*.db", ("accounting.plugins.*",))
CATALOG_CURSOR: Final = DatabaseFile(
    "catalogue/*/cursor.db", ("catalogue", ACTIONS), "rebuildable", copy_order=-2
)
CATALOG_MONTH: Final = DatabaseFile(
    "catalogue/*.db", ("catalogue", ACTIONS), "rebuildable", copy_order=-1
)
DATABASES: Final = (
    *(JOURNAL, JOBS, HISTORY, RULES, AUDIT, CREDENTIALS, REQUEST_KEYS, LEDGER, GATE, NODES),
    *(SENSOR_STATES, JOBCOMP_POSITIONS, UNFINISHED_RUNS, FORWARD, SINK, JOB_LOG, PLUGIN),
    *(CATALOG_CURSOR, CATALOG_MONTH),
)
"""All databases; the first that matches a name is the file's."""


def find_database(name: str) -> DatabaseFile | None:
    """Find the declaration of a path below the state directory."""
    return next((file for file in DATABASES if fnmatchcase(name, file.name)), None)


class SecondWriter(Unavailable):
    """Another process writes a database that has one writer."""


TAKEOVER_S: Final = 2.0
"""Longest wait for a predecessor that is ending, in seconds."""
_RETRY_S: Final = 0.02


class WriterLock:
    """Lock of the process that writes a database: flock(2) of a file beside it, with its pid.

    Connections of one process share it; it is free when the last is closed or the process ends.

    Args:
        path: The lock file, which exists.
        database_path: The database.
        worker: Name of the worker that writes it.

    Raises:
        SecondWriter: Another process holds it.
        OSError: The lock file cannot be used.
    """

    def __init__(self, path: str, database_path: str, worker: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        deadline = time.monotonic() + TAKEOVER_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(_RETRY_S)
                    continue
                pid = os.pread(self._descriptor, 32, 0).decode()
                raise SecondWriter(
                    f"process {pid} writes {database_path}, and only one process may, the worker "
                    f"{worker}: stop it, or use another state_dir",
                    database_path,
                ) from error
            break
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Close the file, which frees the lock unless another process has it open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


_locks: Final[WeakValueDictionary[str, WriterLock]] = WeakValueDictionary()
"""Locks of this process, by their real paths; the connections that use a lock keep it."""


def _leave_locks() -> None:
    """Leave the locks to the parent: a forked process is another writer."""
    for lock in list(_locks.values()):
        lock.close()
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


def lock_writer(path: str, database_path: str, worker: str) -> WriterLock:
    """Take the lock of a database's writer, or share it if this process has it."""
    key = os.path.realpath(path)
    lock = _locks.get(key)
    if lock is None:
        lock = _locks[key] = WriterLock(path, database_path, worker)
    return lock
