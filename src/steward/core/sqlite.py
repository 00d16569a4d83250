"""SQLite databases: open, create, migrate, shrink, and run transactions with the right pragmas.

All of Steward opens SQLite through ``open_database`` (the writer), ``open_reader`` and
``open_scratch`` (a temporary database), and writes in a ``transaction``; ``translate_errors`` turns
the library's exceptions into Steward's. :class:`Database` does these for one file.
``shrink_databases`` returns free pages to the file system while a process is idle. Times are bound
as µs since the epoch. The library comes with pysqlite3, not from the system:
releases before 3.51.3 can corrupt a WAL that two connections write and checkpoint, and two
SQLite libraries in one process break each other's file locks. State lives on a local disk:
SQLite's locks are not safe on a network file system.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from pysqlite3 import dbapi2

from steward.core.databases import WriterLock, find_database, lock_writer, stat_owner
from steward.core.errors import StewardError, Unavailable
from steward.core.files import describe_os_error, find_network_type, resolve_path
from steward.core.timestamps import to_micros

if TYPE_CHECKING:
    from collections.abc import Iterator


OLDEST_SAFE_VERSION = (3, 51, 3)
"""Oldest SQLite release without the WAL corruption bug."""
scratch_directory = "/var/tmp"  # noqa: S108 - sticky, and each file gets a random name
"""Directory of temporary databases without TMPDIR."""
_MAX_IDLE_WAL_BYTES = 16 << 20
"""Size, in bytes, to which SQLite truncates a larger write-ahead log when it starts it again."""
SLICE_S: Final = 0.005
"""Longest slice of :func:`shrink_database`, in seconds, and the pause after it."""
_SPARE_BYTES: Final = 4 << 20
_SPARE_SHARE: Final = 8
"""Free space that stays in a file for new rows: an eighth of the used, and these bytes at least."""
_LEAST_SLICE_PAGES: Final = 16
_MOST_SLICE_PAGES: Final = 256
_MOST_WAL_FRAMES: Final = 1000
"""Length of the WAL at which a slice checkpoints first; SQLite's default of wal_autocheckpoint."""
_PERMANENT_ERRORS = ("no such", "syntax error", "malformed", "already exists")
"""Parts of error texts that mean a wrong statement or schema, not a busy database."""


def _return_unchanged(value: None) -> None:
    return value


# For each None that is bound, the library searches all protocols for an adapter, which costs
# ten times the binding itself. A registered adapter avoids the search.
dbapi2.register_adapter(type(None), _return_unchanged)
dbapi2.register_adapter(datetime, to_micros)

log = logging.getLogger(__name__)

Connection = Any
"""A ``pysqlite3`` connection; the package has no type information."""

Row = dbapi2.Row


class SqliteError(StewardError):
    """A database cannot be used in its present state."""


class SqliteUnavailable(Unavailable):
    """A database cannot be used now (disk full, locked, I/O error)."""


class SqliteMissing(SqliteUnavailable):
    """A database does not exist yet: no process has stored anything in it."""


class _ErrorTranslation:
    """Context manager of :func:`translate_errors`; a generator costs five times as much."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, dbapi2.DatabaseError):
            return
        is_permanent = any(sign in str(error) for sign in _PERMANENT_ERRORS)
        text = f"{self._path}: {error}"
        if isinstance(error, dbapi2.OperationalError) and not is_permanent:
            raise SqliteUnavailable(text, self._path) from error
        raise SqliteError(text, self._path) from error


def translate_errors(path: str) -> AbstractContextManager[None]:
    """Translate SQLite's exceptions into Steward's, naming the file.

    Raises:
        SqliteUnavailable: Disk full, I/O error, locked for longer than the time-out.
        SqliteError: The file is damaged, is no database, or the statement is wrong.
    """
    return _ErrorTranslation(path)


def open_database(
    path: str,
    migrations: Sequence[str],
    *,
    synchronous: str = "FULL",
    timeout_s: float = 10.0,
    shrinks: bool = True,
) -> Connection:
    """Open a database for writing; create it with mode 0600 if missing, and migrate its schema.

    Args:
        path: The database file; its directory must exist.
        migrations: Scripts in order; the n-th takes the schema from version n to n + 1.
        synchronous: SQLite's pragma of that name (FULL, NORMAL or OFF).
        timeout_s: Longest wait for a lock, in seconds.
        shrinks: Whether :func:`shrink_databases` shrinks its file in the thread that opens it;
            False if other threads use the connection.

    Raises:
        SecondWriter: Another process is its only writer.
        UnsafeLock: The file with the lock's name is not a lock.
        SqliteError: A library too old, a network file system, a schema from a newer Steward.
        SqliteUnavailable: The disk is full, or the file is locked or cannot be opened.
    """
    if dbapi2.sqlite_version_info < OLDEST_SAFE_VERSION:
        oldest = ".".join(map(str, OLDEST_SAFE_VERSION))
        raise SqliteError(
            f"SQLite {dbapi2.sqlite_version} is too old, {oldest} or later is needed: "
            "reinstall the pysqlite3 package"
        )
    kind = find_network_type(os.path.dirname(path) or ".")
    if kind:
        raise SqliteError(
            f"{path} is on {kind}, where SQLite locks are not safe: set state_dir to a local disk",
            path,
        )
    with translate_errors(path):
        _create_file(path)
        database = find_database(os.path.basename(path))
        lock = lock_database(path) if database and database.has_one_writer else None
        connection = _connect(path, timeout_s, _WriterConnection)
        connection.path, connection.writer_lock = path, lock
        if not _read_pragma(connection, "page_count"):
            # Not for an existing file: the pragma would wait there for another writer.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        _enable_wal(connection, timeout_s)
        connection.execute(f"PRAGMA journal_size_limit={_MAX_IDLE_WAL_BYTES}")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate_schema(connection, path, migrations)
    if shrinks:
        _own.connections.add(connection)
    return connection


def shrink_databases() -> bool:
    """Shrink the databases that this thread opened for writing, by one slice in all.

    Called while nothing waits; the caller pauses for ``SLICE_S`` or handles what came in before it
    calls again. Errors are logged: the next transaction meets and reports those that matter.

    Returns:
        Whether another call can return more now.
    """
    for connection in list(_own.connections):
        try:
            if connection.is_open and shrink_database(connection):
                return True
        except (SqliteError, SqliteUnavailable) as error:
            log.debug("cannot shrink a database: %s", error)
    return False


def shrink_database(connection: Connection) -> bool:
    """Return free pages at the end of a database file to the file system, one slice a call.

    A slice is a transaction that no fsync ends: a power loss may undo it, together with nothing
    else. The checkpoint that cuts the file is a slice of its own.

    Args:
        connection: Opened with :func:`open_database`.

    Returns:
        Whether another call can return more now; False while a transaction or reader prevents it.

    Raises:
        SqliteUnavailable: The disk is full or fails.
    """
    if connection.in_transaction:
        return False
    with translate_errors(connection.path):
        free, surplus = _count_free_pages(connection)
        if surplus and _get_wal_backlog(connection, "NOOP") < _MOST_WAL_FRAMES:
            return _free_pages(connection, free, surplus)
        if surplus or connection.is_cut_due:
            connection.is_cut_due = _get_wal_backlog(connection, "PASSIVE") > 0
        return bool(surplus and not connection.is_cut_due)


def free_slice(connection: Connection) -> bool:
    """Return free pages as :func:`shrink_database`, for a caller that does the checkpoints itself.

    The next checkpoint cuts the file.

    Args:
        connection: Opened with :func:`open_database`.

    Returns:
        Whether pages were freed.

    Raises:
        SqliteUnavailable: The disk is full or fails.
    """
    with translate_errors(connection.path):
        free, surplus = _count_free_pages(connection)
        return bool(surplus) and _free_pages(connection, free, surplus)


def _count_free_pages(connection: Connection) -> tuple[int, int]:
    """Return the number of free pages, and how many of them need not stay for new rows."""
    pages, free, size = (
        _read_pragma(connection, name) for name in ("page_count", "freelist_count", "page_size")
    )
    return free, max(0, free - max(_SPARE_BYTES // size, (pages - free) // _SPARE_SHARE))


def _get_wal_backlog(connection: Connection, checkpoint: str) -> int:
    """Checkpoint without waiting for anything; return the number of frames not written back."""
    statement = f"PRAGMA wal_checkpoint({checkpoint})"
    _, frames, written_back = connection.execute(statement).fetchone()
    return int(frames - written_back)


def _free_pages(connection: Connection, free: int, most: int) -> bool:
    """Free up to ``most`` of the ``free`` pages in one slice.

    Returns:
        False if another process writes now, or the file was created without auto_vacuum.
    """
    settings = ("busy_timeout", "synchronous")
    before = [_read_pragma(connection, name) for name in settings]
    began = time.monotonic()
    try:
        connection.execute("PRAGMA busy_timeout=0").fetchall()
        connection.execute("PRAGMA synchronous=NORMAL")
        # Each fetched row is a page that was freed.
        count = min(most, connection.slice_pages)
        connection.execute(f"PRAGMA incremental_vacuum({count})").fetchall()
    except dbapi2.OperationalError as error:
        if "locked" not in str(error):
            raise
        return False
    finally:
        for name, value in zip(settings, before, strict=True):
            connection.execute(f"PRAGMA {name}={value}").fetchall()
    if _read_pragma(connection, "freelist_count") >= free:
        return False
    spent_s = time.monotonic() - began
    if spent_s > SLICE_S:
        connection.slice_pages = max(connection.slice_pages // 2, _LEAST_SLICE_PAGES)
    elif spent_s < SLICE_S / 2:
        connection.slice_pages = min(connection.slice_pages * 2, _MOST_SLICE_PAGES)
    connection.is_cut_due = True
    return True


def read_free_bytes(path: str) -> int:
    """Read the size of a database's free pages, in bytes.

    Raises:
        SqliteMissing, SqliteUnavailable, SqliteError: It cannot be read now.
    """
    connection = open_reader(path)
    try:
        with translate_errors(path):
            size, free = (_read_pragma(connection, n) for n in ("page_size", "freelist_count"))
    finally:
        connection.close()
    return size * free


def _read_pragma(connection: Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def create_for_owner(path: str) -> None:
    """Create a missing database file for the owner of its directory.

    If root needs a database first, Steward's own user can still use it; SQLite gives the files
    beside it to the same owner.

    Raises:
        SqliteUnavailable: It cannot be made now.
    """
    if os.geteuid() != 0:
        _create_file(path)
        return
    try:
        owner = os.stat(os.path.dirname(path) or ".")
    except OSError as error:
        raise SqliteUnavailable(f"{path}: {error.strerror}", path) from error
    _create_file(path, owner)


def open_reader(path: str, *, timeout_s: float = 10.0, migrated: bool = False) -> Connection:
    """Open a database read-only; statements that would write fail.

    Args:
        path: The database file.
        timeout_s: Longest wait for a lock, in seconds.
        migrated: Whether a database whose schema is not yet complete counts as missing.

    Raises:
        SqliteMissing: There is no such database yet.
        SqliteUnavailable: It cannot be read now.
    """
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise SqliteMissing(f"{path} does not exist: start the daemon once", path) from error
    except OSError as error:
        raise SqliteUnavailable(f"cannot open {path}: {error.strerror}", path) from error
    with translate_errors(path):
        connection = _connect(path, timeout_s)
        connection.execute("PRAGMA query_only=ON")
        is_incomplete = migrated and not _read_schema_version(connection)
    if is_incomplete:
        connection.close()
        raise SqliteMissing(f"{path} is being created: try again in a moment", path)
    return connection


def use_scratch_directory(state_dir: str) -> None:
    """Have this process and its children make temporary databases in ``scratch`` of ``state_dir``.

    Only the daemon may call it, before its workers start: it removes the files of killed processes.

    Raises:
        OSError: The directory cannot be made.
    """
    global scratch_directory  # noqa: PLW0603 - of the process, like TMPDIR
    directory = os.path.join(state_dir, "scratch")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    os.chmod(directory, 0o700)
    for path in os.scandir(directory):
        if path.is_file(follow_symlinks=False):
            os.unlink(path)
    scratch_directory = directory


def open_scratch(script: str) -> Connection:
    """Create a temporary database in a file; begin a transaction.

    The file is in TMPDIR if that is set, else in the daemon's ``scratch``, or in /var/tmp for other
    commands: /tmp may be in memory. It has no name and disappears with its connection. SQLite's own
    temporary databases, those of ORDER BY included, are in memory.

    Args:
        script: SQL script that creates its tables.

    Raises:
        SqliteUnavailable: There is no place for temporary files.
    """
    import tempfile  # random and shutil, which few processes need

    directory = os.environ.get("TMPDIR") or scratch_directory
    try:
        fd, path = tempfile.mkstemp(prefix="steward-", dir=directory)
    except OSError as error:
        raise SqliteUnavailable(
            f"cannot create a temporary file in {directory}: {error.strerror}", directory
        ) from error
    try:
        os.close(fd)
        with translate_errors("a temporary file"):
            connection = dbapi2.connect(path, isolation_level=None, check_same_thread=False)
            connection.executescript(
                "PRAGMA locking_mode=EXCLUSIVE;\nPRAGMA journal_mode=OFF;\n"
                f"PRAGMA synchronous=OFF;\n{script}\nBEGIN;"
            )
    finally:
        # Another daemon that starts here by mistake may have been faster.
        with suppress(FileNotFoundError):
            os.unlink(path)
    return connection


class _WriterConnection(dbapi2.Connection):  # type: ignore[misc]
    """Connection that holds the lock of its database's writer until it is closed.

    Attributes:
        path: The file, for errors.
        writer_lock: The lock; None for a database that several processes write.
        slice_pages: Pages that the next slice frees, adapted to the time of the last.
        is_cut_due: Whether the file is longer than the database until a checkpoint.
        is_open: Whether it was not closed, by whichever thread.
    """

    path = ""
    writer_lock: WriterLock | None = None
    slice_pages = _LEAST_SLICE_PAGES
    is_cut_due = False
    is_open = True

    def close(self) -> None:
        self.is_open = False
        super().close()
        self.writer_lock = None


class _OwnConnections(threading.local):
    """Connections that a thread opened for writing and alone uses."""

    def __init__(self) -> None:
        self.connections: WeakSet[_WriterConnection] = WeakSet()


_own: Final = _OwnConnections()


def lock_database(path: str) -> WriterLock:
    """Take the lock of a database's worker, until it is closed or forgotten.

    ``open_database`` takes that of a database with one writer. A worker whose effects leave the
    host takes it before anything else, although other processes write its database too.

    Raises:
        SecondWriter: Another process is the worker.
        UnsafeLock: The file with the lock's name is not a lock.
        SqliteUnavailable: The lock file cannot be used now.
    """
    lock_path = f"{path}.lock"
    try:
        _create_file(lock_path, stat_owner(path) if os.geteuid() == 0 else None)
        return lock_writer(lock_path, path)
    except OSError as error:
        raise SqliteUnavailable(f"cannot use {lock_path}: {error.strerror}", path) from error


def _connect(path: str, timeout_s: float, factory: Any = dbapi2.Connection) -> Connection:
    resolved_path = _resolve_path(path)
    connection = dbapi2.connect(
        resolved_path,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
        factory=factory,
    )
    # SQLite follows links itself, and one may have been planted since the path was resolved. The
    # pragma reads no page: whoever reads first reports a damaged file.
    connection.text_factory = bytes
    ((_, _, opened_path),) = connection.execute("PRAGMA database_list").fetchall()
    connection.text_factory = str
    if os.geteuid() == 0 and opened_path != os.fsencode(resolved_path):
        connection.close()
        raise SqliteUnavailable(f"cannot open {path}: another process replaced it: try again", path)
    connection.execute("PRAGMA temp_store=MEMORY")
    return connection


def _resolve_path(path: str) -> str:
    """Resolve a database's path, as root without links that others planted."""
    try:
        return resolve_path(path)
    except OSError as error:
        raise SqliteUnavailable(
            f"cannot open {path}: {describe_os_error(error, path)}", path
        ) from error


def _create_file(path: str, owner: os.stat_result | None = None) -> None:
    """Create a missing file that its owner alone can read.

    An existing file is not opened: closing it would drop every lock that this process has on
    it, see fcntl(2).
    """
    try:
        descriptor = os.open(
            _resolve_path(path), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
    except FileExistsError:
        return
    except OSError as error:
        raise SqliteUnavailable(f"{path}: {error.strerror}", path) from error
    try:
        if owner is not None:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)


def _enable_wal(connection: Connection, timeout_s: float) -> None:
    """Switch the database to WAL; SQLite's own lock time-out does not cover this statement."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except dbapi2.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return


def check_schema_version(path: str, latest: int) -> None:
    """Check that no newer release wrote a database, before anything else uses it.

    Args:
        path: The database file; it need not exist.
        latest: Number of migrations that this release knows.

    Raises:
        SqliteError: A newer Steward wrote it.
        SqliteUnavailable: It cannot be read now.
    """
    if os.path.exists(path):
        connection = open_reader(path)
        try:
            with translate_errors(path):
                _check_version(path, _read_schema_version(connection), latest)
        finally:
            connection.close()


def _check_version(path: str, version: int, latest: int) -> None:
    if version > latest:
        raise SqliteError(
            f"{path} was written by a newer Steward (schema {version}, this one knows {latest}): "
            "install that version again, or restore an older backup with 'steward restore'",
            path,
        )


def _migrate_schema(connection: Connection, path: str, migrations: Sequence[str]) -> None:
    """Run the missing migrations, each in its own transaction."""
    version = _read_schema_version(connection)
    _check_version(path, version, len(migrations))
    while version < len(migrations):
        with transaction(connection, path):
            # Another process may have migrated it meanwhile.
            version = _read_schema_version(connection)
            if version < len(migrations):
                for statement in _split_statements(migrations[version]):
                    connection.execute(statement)
                version += 1
                connection.execute(f"PRAGMA user_version={version}")


def _read_schema_version(connection: Connection) -> int:
    return _read_pragma(connection, "user_version")


def _split_statements(script: str) -> "Iterator[str]":
    """Split a script into statements; semicolons inside triggers and strings do not split."""
    statement = ""
    for piece in script.split(";"):
        statement += piece
        if dbapi2.complete_statement(f"{statement};"):
            yield statement
            statement = ""
        else:
            statement += ";"
    if statement.strip("; \n"):
        yield statement


@contextmanager
def transaction(connection: Connection, path: str = "") -> "Iterator[Connection]":
    """Run one write transaction: commit at the end, roll back on any error."""
    with translate_errors(path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


class Database:
    """Open database file, with its path for errors.

    Args:
        path: The file.
        migrations: Scripts that make its schema, see :func:`open_database`.
        read_only: Open an existing file, for reading only.
        synchronous: SQLite's pragma of that name (FULL, NORMAL or OFF).
        for_owner: Create a missing file for the owner of its directory, who need not run this.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`open_database`.
    """

    def __init__(
        self,
        path: str,
        migrations: Sequence[str],
        *,
        read_only: bool = False,
        synchronous: str = "FULL",
        for_owner: bool = False,
    ) -> None:
        self.path = path
        if for_owner and not read_only:
            create_for_owner(path)
        self.connection: Connection = (
            open_reader(path)
            if read_only
            else open_database(path, migrations, synchronous=synchronous)
        )

    def fetch(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a query."""
        with translate_errors(self.path):
            rows: list[Any] = self.connection.execute(statement, values).fetchall()
        return rows

    def fetch_value(self, statement: str, *values: Any) -> Any:
        """Return the first value of a query's first row; None if there is no row."""
        rows = self.fetch(statement, *values)
        return rows[0][0] if rows else None

    def transaction(self) -> AbstractContextManager[Connection]:
        """Run one write transaction, see :func:`transaction`."""
        return transaction(self.connection, self.path)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
