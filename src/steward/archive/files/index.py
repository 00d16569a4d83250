"""Files sink database: tables, migrations and queries (``archive-NAME.db``).

:class:`FileRow` is one script, :class:`FilesRecords` reads it; :func:`save_rows` and
:func:`delete_rows` write rows inside a transaction. :class:`ByteCounts` keeps for each holder
(cluster, user and account) the sum of bytes, for quotas; a content shared by links counts once. The
index ``script_holder`` exists only if limits are configured, because it costs time for every job.

A script begins as WAITING, unless it is filed at once. It becomes PLACED when its owner is known,
or UNVERIFIED when it waited too long; a later identity makes it PLACED. The mover makes it MOVED. A
purge deletes the row.
"""

import operator
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from steward.archive.errors import ArchiveError, ArchiveUnavailable
from steward.core.config import Settings
from steward.core.databases import SINK
from steward.core.records import JobRecord
from steward.core.sqlite import (
    Connection,
    open_database,
    open_reader,
    transaction,
    translate_errors,
)
from steward.core.storage import CURSOR

MIGRATIONS: Final = (
    f"""
    {CURSOR.schema}
    CREATE TABLE marker (tree TEXT PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE directory (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE);
    CREATE TABLE script (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        state INTEGER NOT NULL,
        directory INTEGER NOT NULL,
        script_name TEXT NOT NULL,
        script_sha BLOB,
        script_length INTEGER NOT NULL,
        env_name TEXT NOT NULL,
        env_sha BLOB,
        env_length INTEGER NOT NULL,
        uid INTEGER,
        user TEXT NOT NULL,
        since_ns INTEGER NOT NULL,
        came_from TEXT NOT NULL,
        body BLOB,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE INDEX script_age ON script (state, mtime_ns);
    CREATE INDEX script_directory ON script (directory);
    CREATE TABLE owner (
        scope TEXT NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        directory TEXT NOT NULL,
        shut INTEGER NOT NULL DEFAULT 0,
        shut_there INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (scope, uid, user),
        UNIQUE (scope, directory)
    ) WITHOUT ROWID;
    CREATE TABLE moving (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        row BLOB NOT NULL,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE TABLE later (
        number INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        body BLOB NOT NULL
    );
    """,
    """
    CREATE INDEX script_owner ON script (uid, user, directory) WHERE uid IS NOT NULL;
    CREATE TABLE admitting (
        moved INTEGER NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        shut INTEGER NOT NULL,
        directory INTEGER NOT NULL,
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        PRIMARY KEY (moved, uid, user)
    ) WITHOUT ROWID;
    ALTER TABLE later ADD COLUMN tries INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE later ADD COLUMN due_s INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE holder (
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        account TEXT NOT NULL,
        bytes INTEGER NOT NULL DEFAULT 0,
        UNIQUE (cluster, uid, user, account)
    );
    ALTER TABLE script ADD COLUMN holder INTEGER;
    ALTER TABLE script ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
    INSERT INTO holder (cluster, uid, user, account)
        SELECT DISTINCT cluster, uid, user, '' FROM script WHERE uid IS NOT NULL AND state >= 2;
    UPDATE script SET holder = (
        SELECT number FROM holder
        WHERE holder.cluster = script.cluster AND holder.uid = script.uid
            AND holder.user = script.user
    ) WHERE uid IS NOT NULL AND state >= 2;
    UPDATE holder SET bytes = (
        SELECT total(script_length) + total(env_length) FROM script
        WHERE script.holder = holder.number
    );

    -- number: see counting.py. job_id: of the last script that has it.
    CREATE TABLE content (
        number INTEGER PRIMARY KEY,
        holder INTEGER NOT NULL,
        uses INTEGER NOT NULL,
        length INTEGER NOT NULL,
        job_id INTEGER NOT NULL
    );
    CREATE TRIGGER content_in AFTER INSERT ON content BEGIN
        UPDATE holder SET bytes = bytes + NEW.length WHERE number = NEW.holder;
    END;
    CREATE TRIGGER content_out AFTER DELETE ON content BEGIN
        UPDATE holder SET bytes = bytes - OLD.length WHERE number = OLD.holder;
    END;

    -- What a limit has ordered to be purged, and is not gone yet.
    CREATE TABLE ordered (
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        at_s INTEGER NOT NULL,
        PRIMARY KEY (cluster, key)
    ) WITHOUT ROWID;
    CREATE TRIGGER ordered_out AFTER DELETE ON script BEGIN
        DELETE FROM ordered WHERE cluster = OLD.cluster AND key = OLD.key;
    END;
    """,
    """
    DROP TRIGGER content_in;

    -- Files that were replaced, until they are removed. moved: as in admitting.
    CREATE TABLE leaving (
        moved INTEGER NOT NULL,
        directory TEXT NOT NULL,
        name TEXT NOT NULL,
        PRIMARY KEY (moved, directory, name)
    ) WITHOUT ROWID;
    """,
)

HOLDER_INDEX: Final = (
    "CREATE INDEX IF NOT EXISTS script_holder ON script (holder, mtime_ns) WHERE holder IS NOT NULL"
)
NO_HOLDER_INDEX: Final = "DROP INDEX IF EXISTS script_holder"


WAITING, UNVERIFIED, PLACED, MOVED = 0, 1, 2, 3
"""States of a script: bytes in the store or ``.waiting/`` only; under ``unverified/``; in its final
place; in the second tree (``move_to``)."""

PAGE_ROWS = 200
"""Rows per query where there may be millions."""

LOST_NS = 2**63 - 1
"""``since_ns`` of a waiting script whose bytes were not found: it is not tried again."""


class FileRow(msgspec.Struct, frozen=True):
    """One script in the table.

    Attributes:
        key: Key of the job.script event.
        cluster: The cluster's name.
        job_id: The id in the spool entry's name.
        mtime_ns: The script's time in the spool, ns since the epoch.
        state: WAITING, UNVERIFIED, PLACED or MOVED.
        directory: Number of its directory; 0 for none.
        script_name: Name of the script's file; "" for none.
        script_sha: SHA-256 of the script.
        script_length: Size of the script in bytes.
        env_name: Name of the environment's file; "" for none.
        env_sha: SHA-256 of the environment.
        env_length: Size of the environment in bytes.
        uid: Owner's uid; None while unknown.
        user: Owner's name at submit; "" while the uid does not resolve.
        since_ns: Time at which the sink received it, ns since the epoch; LOST_NS if its bytes are
            lost.
        came_from: Numbers of its former directories, comma-separated.
        body: Body of the job.script event (JSON), while a later manifest needs it.
        holder: Number of its holder, for whom its bytes count; None while unknown.
        shared: 1 if its files may be links to those of an identical script, else 0.
    """

    key: str
    cluster: str
    job_id: int
    mtime_ns: int
    state: int
    directory: int
    script_name: str
    script_sha: bytes | None
    script_length: int
    env_name: str
    env_sha: bytes | None
    env_length: int
    uid: int | None
    user: str
    since_ns: int
    came_from: str
    body: bytes | None
    holder: int | None = None
    shared: int = 0


_SELECT = f"SELECT {', '.join(FileRow.__struct_fields__)} FROM script"  # noqa: S608 - our own names
_MARKS = ", ".join("?" * len(FileRow.__struct_fields__))
_INSERT_SCRIPT = f"INSERT INTO script VALUES ({_MARKS})"  # noqa: S608 - question marks alone
_MUTABLE_COLUMNS = (
    *("state", "directory", "script_name", "env_name", "uid", "user"),
    *("since_ns", "came_from", "body", "holder", "shared", "env_sha", "env_length"),
)
"""Columns that may change in an existing row. A resent script may come without environment."""
_UPDATE_SCRIPT = (
    f"UPDATE script SET {', '.join(f'{name} = ?' for name in _MUTABLE_COLUMNS)} "  # noqa: S608 - our own names
    "WHERE key = ? AND cluster = ?"
)
_get_changing_values = operator.attrgetter(*_MUTABLE_COLUMNS, "key", "cluster")
_SELECT_REFS = (
    f"SELECT {', '.join(f'script.{name}' for name in FileRow.__struct_fields__)} "  # noqa: S608 - our own names
    "FROM json_each(?) AS ref CROSS JOIN script ON script.key = ref.value AND script.cluster = ?"
)
# A batch of capture fits into one query; a resend may be larger.
_MAX_NUMBERS = 2000

FileRef = tuple[str, str]
"""Identity of a script: (cluster, key)."""

StorageHolder = tuple[str, int, str, str]
"""(cluster, uid, user at submit, account at submit): for whom a script's bytes count."""


class FilesRecords:
    """Database of the files sink ``name``.

    Args:
        settings: The whole configuration.
        name: The sink's name.
        read_only: Whether to open it read-only.
        moved: Whether the caller works on the second tree (``move_to``).
        page_rows: Maximum number of rows per query where there may be millions.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        read_only: bool = False,
        moved: bool = False,
        page_rows: int = PAGE_ROWS,
    ) -> None:
        self.moved = moved
        self.page_rows = page_rows
        self.states = (MOVED, MOVED) if moved else (WAITING, PLACED)
        self.path = SINK.locate(settings.state_dir, name)
        self._connection: Connection = (
            open_reader(self.path) if read_only else open_database(self.path, MIGRATIONS)
        )
        self._directory_numbers: dict[str, int] = {}
        self._directory_paths: dict[int, str] = {}
        self._new_directories: dict[int, str] = {}
        self._holder_numbers: dict[StorageHolder, int] = {}
        self._markers: dict[str, str] = {}

    def query(self, sql: str, *parameters: object) -> list[Any]:
        """Return the rows of a read-only statement."""
        with translate_errors(self.path):
            return list(self._connection.execute(sql, parameters))

    @contextmanager
    def writing(self) -> "Iterator[Connection]":
        """Open one transaction; it also saves new directories."""
        with transaction(self._connection, self.path) as connection:
            insert_unique(
                connection,
                "INSERT OR IGNORE INTO directory VALUES (?, ?)",
                list(self._new_directories.items()),
            )
            yield connection
        self._new_directories.clear()

    def load_cursor(self) -> int:
        """Return the position of the last applied event."""
        return int(self.query("SELECT position FROM cursor")[0][0])

    def load_marker(self, tree: str = "root") -> str:
        """Return the required marker id of a tree (``root`` or ``move_to``); "" if unknown."""
        if tree not in self._markers:
            rows = self.query("SELECT id FROM marker WHERE tree = ?", tree)
            if not rows:
                return ""
            self._markers[tree] = str(rows[0][0])
        return self._markers[tree]

    def set_marker(self, tree: str, identifier: str) -> None:
        """Store the marker id of a tree."""
        with self.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO marker VALUES (?, ?)", (tree, identifier))
        self._markers[tree] = identifier

    def load_rows(self, refs: Iterable[FileRef]) -> dict[FileRef, FileRow]:
        """Return the rows of the given scripts, if known."""
        by_cluster: dict[str, list[str]] = {}
        for cluster, key in refs:
            by_cluster.setdefault(cluster, []).append(key)
        rows: dict[FileRef, FileRow] = {}
        for cluster, keys in by_cluster.items():
            for values in self.query(_SELECT_REFS, msgspec.json.encode(keys).decode(), cluster):
                row = FileRow(*values)
                rows[row.cluster, row.key] = row
        return rows

    def select_rows(self, where: str, *parameters: object) -> list[FileRow]:
        """Return rows by an SQL condition of this package."""
        return [FileRow(*values) for values in self.query(f"{_SELECT} WHERE {where}", *parameters)]

    def iterate_rows(self, where: str = "TRUE", *parameters: object) -> Iterator[FileRow]:
        """Yield rows by an SQL condition, by key, in pages: no read snapshot lasts long."""
        last_key = ("", "")
        condition = f"{where} AND (key, cluster) > (?, ?) ORDER BY key, cluster LIMIT ?"
        while True:
            page = self.select_rows(condition, *parameters, *last_key, self.page_rows)
            yield from page
            if not page:
                return
            last_key = (page[-1].key, page[-1].cluster)

    def iterate_directory_numbers(self) -> Iterator[int]:
        """Yield the number of every directory with scripts, those added meanwhile included."""
        sql = "SELECT directory FROM script WHERE directory > ? ORDER BY directory LIMIT 1"
        number = 0
        while rows := self.query(sql, number):
            number = int(rows[0][0])
            yield number

    def iterate_names(self, path: str, states: tuple[int, int]) -> Iterator[str]:
        """Return the names of the files of scripts in a directory, as of the time of the call."""
        sql = (
            "SELECT script_name, env_name FROM script WHERE state BETWEEN ? AND ? "
            "AND directory = (SELECT number FROM directory WHERE path = ?)"
        )
        with translate_errors(self.path):
            rows = self._connection.execute(sql, (*states, path))
        return self._iterate_values(rows)

    def _iterate_values(self, rows: Iterable[Iterable[str]]) -> Iterator[str]:
        with translate_errors(self.path):
            for row in rows:
                yield from row

    def get_directory_number(self, path: str) -> int:
        """Return the number of a directory; the next :meth:`writing` saves a new one."""
        number = self._directory_numbers.get(path)
        if number is not None:
            return number
        rows = self.query("SELECT number FROM directory WHERE path = ?", path)
        if rows:
            number = int(rows[0][0])
        else:
            last_number = self.query("SELECT max(number) FROM directory")[0][0] or 0
            number = max(last_number, *self._new_directories, 0) + 1
            self._new_directories[number] = path
        if len(self._directory_numbers) > 4096:
            # New ones are still found: they stay in _new_directories until saved.
            self._directory_numbers = {
                path: number for number, path in self._new_directories.items()
            }
            self._directory_paths.clear()
        self._directory_numbers[path] = number
        return number

    def get_directory_path(self, number: int) -> str:
        """Return the path of a directory below the root.

        Raises:
            ArchiveError: The number is unknown.
        """
        path = self._new_directories.get(number) or self._directory_paths.get(number)
        if path is None:
            rows = self.query("SELECT path FROM directory WHERE number = ?", number)
            if not rows:
                raise ArchiveError(
                    f"{self.path} is damaged: it refers to directory {number}, but does not list it"
                )
            path = self._directory_paths[number] = str(rows[0][0])
            if len(self._directory_paths) > 4096:
                self._directory_paths = {number: path}
        return path

    def get_or_add_holder(self, holder: StorageHolder) -> int:
        """Return the number of a holder; a new one is saved at once, since there are few.

        Must not be called within :meth:`writing`.
        """
        number = self._holder_numbers.get(holder) or self.find_holder(holder)
        if number is None:
            with transaction(self._connection, self.path) as connection:
                connection.execute(
                    "INSERT OR IGNORE INTO holder (cluster, uid, user, account) "
                    "VALUES (?, ?, ?, ?)",
                    holder,
                )
            number = self.find_holder(holder)
        assert number is not None, "the directory has no number"
        return number

    def find_holder(self, holder: StorageHolder) -> int | None:
        """Return the number of a holder; None if it has no scripts yet."""
        number = self._holder_numbers.get(holder)
        if number is None:
            rows = self.query(
                "SELECT number FROM holder "
                "WHERE cluster = ? AND uid = ? AND user = ? AND account = ?",
                *holder,
            )
            if not rows:
                return None
            if len(self._holder_numbers) > 4096:
                self._holder_numbers.clear()
            number = self._holder_numbers[holder] = int(rows[0][0])
        return number

    def find_contents(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return the known ones of some contents, with the id of the last job that has each."""
        with translate_errors(self.path):
            return find_known_contents(self._connection, numbers)

    def is_used(self, number: int) -> bool:
        """Return whether a directory of this tree contains a script."""
        sql = "SELECT 1 FROM script WHERE directory = ? AND state BETWEEN ? AND ? LIMIT 1"
        return bool(self.query(sql, number, *self.states))

    def is_name_taken(self, job_id: int, key: str, directory: int, name: str) -> bool:
        """Return whether a file name in a directory belongs to another script than ``key``."""
        # All keys of a job's scripts have the same prefix: no index on names is needed.
        sql = (
            "SELECT 1 FROM script WHERE key >= ? AND key < ? AND key != ? AND directory = ? "
            "AND (script_name = ? OR env_name = ?) AND state BETWEEN ? AND ? LIMIT 1"
        )
        first, end = f"script:{job_id}:", f"script:{job_id};"
        return bool(self.query(sql, first, end, key, directory, name, name, *self.states))

    def discard_new(self) -> None:
        """Drop unsaved directory numbers of a failed batch."""
        for path in self._new_directories.values():
            self._directory_numbers.pop(path, None)
        self._new_directories.clear()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


def has_other_owner(row: FileRow, record: JobRecord) -> bool:
    """Return whether a job record names another owner than the script was filed under."""
    if record.uid is None:
        return False
    # Names stay as they were at submit: only an unresolved uid gets one later.
    return row.uid != record.uid or (not row.user and bool(record.user))


def insert_unique(connection: Connection, sql: str, rows: Sequence[Sequence[object]]) -> None:
    """Insert rows that the sink's other process may insert at the same time.

    Raises:
        ArchiveUnavailable: The other process did: the caller must choose again.
    """
    if rows and connection.executemany(sql, rows).rowcount != len(rows):
        raise ArchiveUnavailable(
            "sink and mover created a directory at the same time: trying again"
        )


def find_known_contents(connection: Connection, numbers: Sequence[int]) -> dict[int, int]:
    """Return the known ones of some contents, with the id of the last job that has each."""
    job_ids: dict[int, int] = {}
    for first in range(0, len(numbers), _MAX_NUMBERS):
        chunk = numbers[first : first + _MAX_NUMBERS]
        marks = ", ".join("?" * len(chunk))
        sql = f"SELECT number, job_id FROM content WHERE number IN ({marks})"  # noqa: S608 - question marks alone
        job_ids.update(connection.execute(sql, chunk).fetchall())
    return job_ids


def save_rows(
    connection: Connection, rows: Iterable[FileRow], existing: Collection[FileRef]
) -> None:
    """Insert or update rows, inside a transaction.

    Args:
        connection: Connection in a transaction.
        rows: The rows.
        existing: Scripts that already have a row.
    """
    new, old = [], []
    for row in rows:
        if (row.cluster, row.key) in existing:
            old.append(_get_changing_values(row))
        else:
            new.append(msgspec.structs.astuple(row))
    execute_all(connection, _INSERT_SCRIPT, new)
    execute_all(connection, _UPDATE_SCRIPT, old)


def delete_rows(connection: Connection, refs: Collection[FileRef]) -> None:
    """Delete scripts, inside a transaction."""
    execute_all(connection, "DELETE FROM script WHERE cluster = ? AND key = ?", refs)


def execute_all(connection: Connection, sql: str, rows: Collection[Sequence[object]]) -> None:
    """Run a statement for each row; without rows, spare the call."""
    if rows:
        connection.executemany(sql, rows)


_ENVIRONMENT, _MOVED = 1, 2

_INSERT_CONTENT = "INSERT INTO content VALUES (?, ?, ?, ?, ?)"
_INCREASE_USES = "UPDATE content SET uses = uses + ?, job_id = ? WHERE number = ?"
_DECREASE_USES = "UPDATE content SET uses = uses - ? WHERE number = ?"
_DELETE_UNUSED = "DELETE FROM content WHERE number = ? AND uses <= 0"

# Fibonacci hashing: 2**64 divided by the golden ratio.
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15
_unpack = struct.Struct("<Q").unpack_from


def compute_content_number(holder: int, sha: bytes, *, environment: bool, moved: bool) -> int:
    """Compute the number of a content that is counted once: 64 bits, fastest in SQLite.

    It derives from the SHA-256, and collisions can be forged: whoever does so has fewer bytes
    counted. Before linking, files are compared by their whole SHA-256.

    Args:
        holder: Number of the holder.
        sha: SHA-256 of the plain bytes.
        environment: Whether it is an environment, not a script.
        moved: Whether it is in the second tree.
    """
    salt = 4 * holder + (_MOVED if moved else 0) + (_ENVIRONMENT if environment else 0)
    prefix: int = _unpack(sha)[0]
    return ((prefix + salt * _HASH_MULTIPLIER) & 0xFFFFFFFFFFFFFFFF) - (1 << 63)


class ByteCounts:
    """Changes of byte counts in one transaction."""

    def __init__(self) -> None:
        self._added: dict[int, tuple[int, int, int, int]] = {}
        self._removed: dict[int, int] = {}
        self._byte_changes: dict[int, int] = {}

    def add(self, row: FileRow, *, moved: bool) -> None:
        """Count a script that was added."""
        if row.holder is None:
            return
        if not row.shared:
            length = row.script_length + row.env_length
            self._byte_changes[row.holder] = self._byte_changes.get(row.holder, 0) + length
            return
        if row.script_sha is not None:
            number = compute_content_number(
                row.holder, row.script_sha, environment=False, moved=moved
            )
            self._add_use(number, row.holder, row.script_length, row.job_id)
        if row.env_sha is not None:
            number = compute_content_number(row.holder, row.env_sha, environment=True, moved=moved)
            self._add_use(number, row.holder, row.env_length, row.job_id)

    def _add_use(self, number: int, holder: int, length: int, job_id: int) -> None:
        previous = self._added.get(number)
        self._added[number] = (holder, previous[1] + 1 if previous else 1, length, job_id)

    def remove(self, row: FileRow, *, moved: bool) -> None:
        """Count a script that was removed."""
        if row.holder is None:
            return
        if not row.shared:
            length = row.script_length + row.env_length
            self._byte_changes[row.holder] = self._byte_changes.get(row.holder, 0) - length
            return
        for sha, environment in ((row.script_sha, False), (row.env_sha, True)):
            if sha is not None:
                number = compute_content_number(
                    row.holder, sha, environment=environment, moved=moved
                )
                self._removed[number] = self._removed.get(number, 0) + 1

    def change(self, before: FileRow | None, after: FileRow, *, moved: bool) -> None:
        """Count a script that changed from ``before``, if it existed, to ``after``."""
        if before is not None:
            if (before.holder, before.shared) == (after.holder, after.shared):
                return
            self.remove(before, moved=moved)
        self.add(after, moved=moved)

    def write(self, connection: Connection) -> None:
        """Write the changes, inside the transaction that writes the rows."""
        # Additions first: a content that only changes its account never disappears in between.
        # Ordered by key, so that neighbors share a database page.
        numbers = sorted(self._added)
        known_contents = find_known_contents(connection, numbers)
        new = [number for number in numbers if number not in known_contents]
        execute_all(connection, _INSERT_CONTENT, [(number, *self._added[number]) for number in new])
        for number in new:
            holder, _, length, _ = self._added[number]
            self._byte_changes[holder] = self._byte_changes.get(holder, 0) + length
        reused = [(number, self._added[number]) for number in numbers if number in known_contents]
        execute_all(
            connection,
            _INCREASE_USES,
            [(uses, job_id, number) for number, (_, uses, _, job_id) in reused],
        )
        removed = sorted(self._removed)
        execute_all(
            connection, _DECREASE_USES, [(self._removed[number], number) for number in removed]
        )
        execute_all(connection, _DELETE_UNUSED, [(number,) for number in removed])
        execute_all(
            connection,
            "UPDATE holder SET bytes = bytes + ? WHERE number = ?",
            [(length, holder) for holder, length in self._byte_changes.items() if length],
        )
