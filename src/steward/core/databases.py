"""Databases of the state directory: file, writer and backup class of each, and the writer's lock.

:data:`DATABASES` declares every SQLite file once: a backup takes its contents and their order from
it, the status the writers of each file (``list_files``). A file with one writer has one writing
process: ``core.sqlite.open_database`` takes its lock (:class:`WriterLock`) and rejects a second
process. Readers are not affected. Several processes write the other files, one transaction at a
time, under SQLite's own locks; the workers among them whose effects leave the host (sinks, rules,
bank) take the lock before they start.

A lock is on a separate file, ``NAME.lock``, because closing a database drops SQLite's locks on
it, see fcntl(2). It is flock(2)'s: a lock of the process would be freed by closing another
connection. A sink and its mover, and the catalog and its rebuild, have locks of their own.
"""

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal
from weakref import WeakValueDictionary

import msgspec

from steward.core.errors import Unavailable

BackupClass = Literal["irreplaceable", "rebuildable", "secret"]
"""Backup class. ``irreplaceable``: a backup must hold the database. ``rebuildable``: Steward
rebuilds it from other data. ``secret``: a backup must hold it, and a restore ends credentials that
were revoked since."""


ACTIONS: Final = "actions"
"""Writer of databases that actions of any process write."""


class DatabaseFile(msgspec.Struct, frozen=True):
    """SQLite database of the state directory.

    Attributes:
        name: Path below the directory; ``*`` stands for a cluster, sink, plugin or month.
        writers: Workers that write it; ``*`` stands for the same as in ``name``.
        backup: Backup class.
        copy_order: Order of its copy in a backup: a database precedes the one whose positions it
            stores.
        keeps_pages: Why its free pages stay in the file; "" if an idle worker returns them to the
            file system.
    """

    name: str
    writers: tuple[str, ...]
    backup: BackupClass = "irreplaceable"
    copy_order: int = 0
    keeps_pages: str = ""

    @property
    def rule(self) -> str:
        """Rule of the database's lock, for the error about a second process."""
        if self.has_one_writer:
            return f"only the worker {self.writers[0]} may write it"
        return f"only one process may run its worker {self.writers[0]}"

    @property
    def has_one_writer(self) -> bool:
        """Whether one process alone writes it."""
        return len(self.writers) == 1 and self.writers != (ACTIONS,)

    def name_writers(self, name: str) -> tuple[str, ...]:
        """Return the workers that write the database with this path below the state directory."""
        start, _, end = self.name.partition("*")
        part = name.removeprefix(start).removesuffix(end)
        return tuple(writer.replace("*", part) for writer in self.writers)

    def locate(self, state_dir: str, part: str = "") -> str:
        """Return the path of the database of a cluster, sink or plugin, if it has one for each."""
        return os.path.join(state_dir, self.name.replace("*", part))


JOURNAL: Final = DatabaseFile("journal.db", ("journal",), copy_order=2)
JOBS: Final = DatabaseFile("jobs.db", ("jobs",))
HISTORY: Final = DatabaseFile("history.db", ("history",))
RULES: Final = DatabaseFile("rules.db", ("rules", ACTIONS), copy_order=1)
"""A backup copies it late, because actions of rules have effects outside Steward."""
_NO_WORKER: Final = "no worker opens it; new rows use them"
_FEW_ROWS: Final = "it has few rows, and new ones use them"
AUDIT: Final = DatabaseFile("audit.db", (ACTIONS,), keeps_pages=_NO_WORKER)
CREDENTIALS: Final = DatabaseFile("credentials.db", (ACTIONS,), "secret", keeps_pages=_NO_WORKER)
REQUEST_KEYS: Final = DatabaseFile("repeats.db", (ACTIONS,), keeps_pages=_NO_WORKER)
LEDGER: Final = DatabaseFile("ledger.db", ("bank", "mybrc", "mybrc.remote", ACTIONS), copy_order=-3)
GATE: Final = DatabaseFile("gate.db", ("gate",), "rebuildable")
"""A backup's SU holds would be outdated: the gate rebuilds them from the tokens of Slurm's jobs."""
NODES: Final = DatabaseFile("nodes.db", ("nodes",), keeps_pages=_FEW_ROWS)
TELEMETRY: Final = DatabaseFile("telemetry.db", ("telemetry",), "rebuildable")
"""A backup leaves its curves out. Not in DATABASES as long as no worker of the daemon writes it."""
SENSOR_STATES: Final = DatabaseFile("states-*.db", ("sensor.*",))
JOBCOMP_POSITIONS: Final = DatabaseFile("lines-*.db", ("jobcomp.*",), keeps_pages=_FEW_ROWS)
UNFINISHED_RUNS: Final = DatabaseFile("runs-*.db", ("runs.*",))
FORWARD: Final = DatabaseFile("forward-*.db", ("forward.*",))
SINK: Final = DatabaseFile("archive-*.db", ("archive.*", "mover.*"))
JOB_LOG: Final = DatabaseFile("accounting-log.db", ("accounting.log",))
PLUGIN: Final = DatabaseFile("accounting-*.db", ("accounting.plugins.*",))
CATALOG_CURSOR: Final = DatabaseFile(
    "catalog/*/cursor.db", ("catalog", ACTIONS), "rebuildable", copy_order=-2
)
CATALOG_MONTH: Final = DatabaseFile(
    "catalog/*/*.db", ("catalog", ACTIONS), "rebuildable", copy_order=-1
)
DATABASES: Final = (
    *(JOURNAL, JOBS, HISTORY, RULES, AUDIT, CREDENTIALS, REQUEST_KEYS, LEDGER, GATE, NODES),
    *(SENSOR_STATES, JOBCOMP_POSITIONS, UNFINISHED_RUNS, FORWARD, SINK, JOB_LOG, PLUGIN),
    *(CATALOG_CURSOR, CATALOG_MONTH),
)
"""All databases; the first that matches a name is the file's."""


def write_table() -> str:
    """Write the table of the databases for the documentation."""
    lines = ["| database | writers | backup class | free pages |", "|---|---|---|---|"]
    for file in DATABASES:
        writers = ", ".join(f"`{writer}`" for writer in file.writers)
        pages = f"stay: {file.keeps_pages}" if file.keeps_pages else "go back to the file system"
        lines.append(f"| `{file.name}` | {writers} | {file.backup} | {pages} |")
    return "\n".join([*lines, ""])


def list_files(state_dir: str) -> list[tuple[DatabaseFile, str]]:
    """Return the databases of a state directory that exist, with the path of each, sorted."""
    paths = {
        path
        for file in DATABASES
        for path in Path(state_dir).glob(file.name)
        # The current generation of a catalog is a link; it has a name of its own.
        if not path.parent.is_symlink()
    }
    names = [(str(path.relative_to(state_dir)), str(path)) for path in sorted(paths)]
    return [(file, path) for name, path in names if (file := find_database(name))]


def find_database(name: str) -> DatabaseFile | None:
    """Find the declaration of a path below the state directory."""
    return next((file for file in DATABASES if fnmatchcase(name, file.name)), None)


class SecondWriter(Unavailable):
    """Another process holds the lock of a database."""


class UnsafeLock(Unavailable):
    """The file with the name of a database's lock is not that lock."""


TAKEOVER_S: Final = 2.0
"""Longest wait for a predecessor that is ending, in seconds."""
_RETRY_S: Final = 0.02


class WriterLock:
    """Lock of the process that writes a database: flock(2) of a file beside it, with its pid.

    Connections of one process share it; it is free when the last is closed or the process ends.

    Args:
        path: The lock file, which exists.
        database_path: The database.
    """

    def __init__(self, path: str, database_path: str) -> None:
        self._path, self._database_path = path, database_path
        self._descriptor = -1
        self.is_held = False

    def acquire(self) -> None:
        """Take the lock; wait for a predecessor that is ending.

        Raises:
            SecondWriter: Another process holds it.
            UnsafeLock: The lock file is a link, no regular file, or another user's.
            OSError: The lock file cannot be used.
        """
        deadline = time.monotonic() + TAKEOVER_S
        while not self._try_to_acquire():
            if time.monotonic() >= deadline:
                database = find_database(os.path.basename(self._database_path))
                rule = database.rule if database else "only one process may write it"
                raise SecondWriter(
                    f"{self._database_path} is in use by {self._describe_holder()}, and {rule}: "
                    "stop that process, or use another state_dir",
                    self._database_path,
                )
            time.sleep(_RETRY_S)
        self.is_held = True
        pid = str(os.getpid()).encode()
        os.pwrite(self._descriptor, pid, 0)
        os.ftruncate(self._descriptor, len(pid))

    def _try_to_acquire(self) -> bool:
        """Take the lock unless another process holds it, or replaced its file meanwhile."""
        self.close()
        try:
            # Without O_NONBLOCK, opening a FIFO would wait.
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with _open_guard:
                self._descriptor = os.open(self._path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._refuse("a symbolic link") from error
        self._require_lock_file()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(
                os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False)
            )
        except (BlockingIOError, FileNotFoundError):
            return False
        return is_same

    def _require_lock_file(self) -> None:
        """Require a file that no other user planted: the pid is written to it, perhaps by root.

        Raises:
            UnsafeLock: The file may be planted.
        """
        info = os.fstat(self._descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise self._refuse("not a regular file")
        if info.st_nlink > 1:
            raise self._refuse(f"a file with {info.st_nlink} hard links")
        # Without root, a planted file leads no further than the caller's own rights.
        if os.geteuid() == 0:
            owner = stat_owner(self._database_path).st_uid
            if info.st_uid != owner:
                raise self._refuse(f"owned by uid {info.st_uid}, but the database by uid {owner}")

    def _refuse(self, kind: str) -> UnsafeLock:
        return UnsafeLock(
            f"cannot lock {self._database_path}: {self._path} is {kind}: remove it", self._path
        )

    def _describe_holder(self) -> str:
        """Return who holds the lock; a process that took it just now has not written its pid."""
        with contextlib.suppress(OSError):
            pid = os.pread(self._descriptor, 32, 0)
            if pid.isdigit():
                return f"process {int(pid)}"
        return "another process"

    def close(self) -> None:
        """Close the file, which frees the lock unless another process has it open."""
        self.is_held = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def stat_owner(database_path: str) -> os.stat_result:
    """Return the status of a database, or of its directory before it exists.

    Raises:
        OSError: There is no such directory, or it cannot be read.
    """
    try:
        return os.stat(database_path)
    except FileNotFoundError:
        return os.stat(os.path.dirname(database_path) or ".")


_locks: Final[WeakValueDictionary[str, WriterLock]] = WeakValueDictionary()
"""Locks of this process, by their real paths; the connections that use a lock keep it."""
_locks_guard = threading.Lock()
"""Held while a thread looks up, takes or shares a lock."""
_open_guard = threading.Lock()
"""Held while a thread opens a lock file, so that a forked process knows every open one."""


def _leave_locks() -> None:
    """Leave the locks to the parent process: a forked process is another writer."""
    _open_guard.release()
    global _locks_guard  # noqa: PLW0603 -- a lock cannot be made free by another thread
    # A thread that the child does not have may hold it.
    _locks_guard = threading.Lock()
    for lock in list(_locks.values()):
        lock.close()
    _locks.clear()


os.register_at_fork(
    before=_open_guard.acquire, after_in_parent=_open_guard.release, after_in_child=_leave_locks
)


def lock_writer(path: str, database_path: str) -> WriterLock:
    """Take the lock of a database's writer, or share it if this process has it.

    Raises:
        SecondWriter, UnsafeLock, OSError: As :meth:`WriterLock.acquire`.
    """
    key = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    with _locks_guard:
        lock = _locks.get(key)
        if lock is None or not lock.is_held:
            # A process that is forked during the wait closes what it finds here.
            lock = _locks[key] = WriterLock(path, database_path)
            try:
                lock.acquire()
            except BaseException:
                lock.close()
                raise
    return lock
