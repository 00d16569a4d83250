"""Monthly index: one SQLite file with the scripts spooled in a month, and the jobs that used them.

Each distinct script is indexed once by groups of three letters (FTS5's trigram tokenizer,
``detail=none``: 0.9 bytes of index per byte of script), and its compressed text is stored beside
the index. The copy serves two purposes. A hit must be checked on the script itself, and the archive
may be on a file system that is slow, full of small files, or unavailable. And the index holds no
text (``content=''``), so removing a script from it requires the text.

:class:`ScriptUse` is a script run by a job, :class:`MonthReader` and :class:`MonthWriter` open a
file.
"""

import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from steward.archive.catalog.matches import decode_script_text, fold_for_index
from steward.core.errors import StewardError, Unavailable
from steward.core.sqlite import (
    Connection,
    SqliteError,
    open_database,
    open_reader,
    transaction,
    translate_errors,
)

MAX_INDEXED_BYTES: Final = 4 * 1024**2
"""Indexed size of a script; text beyond is not found. Slurm's own limit (max_script_size) is 4 MiB.
"""

_DAY_US: Final = 86_400_000_000

MIGRATIONS: Final = (
    """
    CREATE TABLE script(
        number INTEGER PRIMARY KEY,
        sha256 BLOB NOT NULL UNIQUE,
        length INTEGER NOT NULL,
        packed BLOB NOT NULL
    );
    CREATE VIRTUAL TABLE words USING fts5(
        body, content='', columnsize=0, detail=none, tokenize='trigram case_sensitive 1'
    );
    INSERT INTO words(words, rank) VALUES('secure-delete', 1);
    CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, row);
    CREATE TABLE use(
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        script INTEGER NOT NULL REFERENCES script(number),
        job_id INTEGER NOT NULL,
        at INTEGER NOT NULL,
        uid INTEGER,
        user TEXT NOT NULL,
        account TEXT NOT NULL,
        partition TEXT NOT NULL,
        name TEXT NOT NULL,
        event INTEGER NOT NULL,
        UNIQUE(cluster, key)
    );
    CREATE INDEX use_at ON use(at, key, cluster);
    CREATE INDEX use_owner ON use(uid, at, key, cluster);
    CREATE INDEX use_script ON use(script);
    """,
)


class CatalogError(StewardError):
    """Error of the catalog; base class of the others."""


class CatalogUnavailable(CatalogError, Unavailable):
    """Error: the catalog cannot be used now; nothing is lost."""


class ScriptUse(msgspec.Struct, frozen=True, kw_only=True):
    """Script that a job ran, with the job's owner, account, partition and name.

    Attributes:
        cluster: The job's cluster.
        key: Key of the job.script event.
        job_id: Id in the spool: that of an array or of a het job's leader.
        at: The script's time in the spool, microseconds since the epoch.
        uid: Owner's uid; None until Slurm reports it.
        user: Owner's name at submit.
        account: Account of the job.
        partition: The job's partition.
        name: The job's name.
        event: Journal position of the last event about it.
        script: Row number of the script in the month's file; 0 before it is stored.
    """

    cluster: str
    key: str
    job_id: int
    at: int
    uid: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    name: str = ""
    event: int = 0
    script: int = 0

    @property
    def time(self) -> datetime:
        """Return the script's time in the spool."""
        return convert_microseconds(self.at)

    @property
    def position(self) -> tuple[int, str, str]:
        """Return its sort position: time in microseconds, key, cluster."""
        return self.at, self.key, self.cluster


USE_COLUMNS: Final = ", ".join(f"use.{name}" for name in ScriptUse.__struct_fields__)
_INSERT_USE: Final = (
    f"INSERT OR IGNORE INTO use({', '.join(ScriptUse.__struct_fields__)}) "
    f"VALUES({', '.join('?' * len(ScriptUse.__struct_fields__))})"
)
_UPDATE_USE: Final = (
    "UPDATE use SET uid = ?, user = ?, account = ?, partition = ?, name = ?, event = ? "
    "WHERE cluster = ? AND key = ?"
)


def convert_microseconds(microseconds: int) -> datetime:
    """Convert microseconds since the epoch to a datetime in UTC."""
    return datetime.fromtimestamp(microseconds // 10**6, UTC).replace(
        microsecond=microseconds % 10**6
    )


def get_month(microseconds: int) -> str:
    """Return the month of a time, in UTC: ``2026-11``."""
    return _format_month(microseconds // _DAY_US)


@lru_cache(maxsize=64)
def _format_month(day: int) -> str:
    return convert_microseconds(day * _DAY_US).strftime("%Y-%m")


def make_month_path(directory: str, month: str) -> str:
    """Return the path of a month's file."""
    return os.path.join(directory, f"{month}.db")


def list_months(directory: str) -> list[str]:
    """List the months that have a file, oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(
        name[:-3]
        for name in names
        if name.endswith(".db") and len(name) == 10 and name[:4].isdecimal() and name[4] == "-"
    )


@contextmanager
def translate_damage(path: str) -> Iterator[None]:
    """Convert SQLite errors to CatalogUnavailable with advice, as a context manager.

    Raises:
        CatalogUnavailable: The file is damaged.
    """
    try:
        with translate_errors(path):
            yield
    except SqliteError as error:
        raise CatalogUnavailable(
            f"the catalog is damaged ({error}): run 'steward archive reindex'", path
        ) from error


class MonthReader:
    """Read access to a month's file.

    Args:
        path: The file.

    Raises:
        SqliteUnavailable: The file does not exist, or cannot be read now.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.connection: Connection = open_reader(path)

    def query(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query."""
        with translate_damage(self.path):
            yield from self.connection.execute(sql, values)

    def read_text(self, script: int) -> str:
        """Return the indexed text of a script."""
        return decode_script_text(self.read_data(script))

    def read_data(self, script: int) -> bytes:
        """Return the indexed bytes of a script.

        Raises:
            CatalogUnavailable: The file is damaged.
        """
        rows = list(self.query("SELECT packed FROM script WHERE number = ?", (script,)))
        if not rows:
            raise CatalogUnavailable(
                f"the catalog is damaged ({self.path} lacks script {script}): run 'steward "
                "archive reindex'",
                self.path,
            )
        return _decompress_script(rows[0][0])

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


class MonthWriter:
    """Write access to a month's file; there is one writer.

    Args:
        path: The file; created if needed.
        synchronous: SQLite's pragma; OFF only for a file that is not current yet.

    Raises:
        CatalogUnavailable: The file is damaged.
        SqliteUnavailable: The disk is full, or the file cannot be opened now.
    """

    def __init__(self, path: str, synchronous: str = "FULL") -> None:
        self.path = path
        with translate_damage(path):
            self._connection: Connection = open_database(path, MIGRATIONS, synchronous=synchronous)
            self._connection.execute("PRAGMA secure_delete=ON")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the body in one transaction."""
        with translate_damage(self.path), transaction(self._connection, self.path):
            yield

    def begin(self) -> None:
        """Begin a long transaction; only for a file that no other process writes."""
        with translate_damage(self.path):
            self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit the transaction of :meth:`begin`.

        Raises:
            SqliteUnavailable: The disk is full.
        """
        with translate_damage(self.path):
            self._connection.execute("COMMIT")

    def find_scripts(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Return the row numbers of the scripts that are stored, by SHA-256."""
        marks = ", ".join("?" * len(digests))
        sql = f"SELECT sha256, number FROM script WHERE sha256 IN ({marks})"  # noqa: S608 - question marks alone
        return dict(self._connection.execute(sql, digests).fetchall())

    def add_script(self, sha256: bytes, data: bytes) -> int:
        """Store and index a new script; return its row number."""
        indexed = data[:MAX_INDEXED_BYTES]
        # Compressing a small script takes less time than clearing zlib's usual memory.
        compressor = zlib.compressobj(1, memLevel=5)
        packed = compressor.compress(indexed) + compressor.flush()
        number = self._connection.execute(
            "INSERT INTO script(sha256, length, packed) VALUES(?, ?, ?)",
            (sha256, len(data), packed if len(packed) < len(indexed) else b"\0" + indexed),
        ).lastrowid
        self._connection.execute(
            "INSERT INTO words(rowid, body) VALUES(?, ?)",
            (number, fold_for_index(decode_script_text(indexed))),
        )
        return int(number)

    def add_uses(self, uses: Iterable[ScriptUse]) -> int:
        """Store that jobs ran scripts; leave known uses alone. Return the number of new ones."""
        rows = map(msgspec.structs.astuple, uses)
        return int(self._connection.executemany(_INSERT_USE, rows).rowcount)

    def find_uses(self, keys: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of some scripts, by cluster and key, of which a use is stored."""
        return find_keys(self._connection, "use", keys)

    def update_uses(self, uses: Iterable[ScriptUse]) -> None:
        """Update owner, account, partition and name of existing uses."""
        self._connection.executemany(
            _UPDATE_USE,
            (
                (
                    *(use.uid, use.user, use.account, use.partition, use.name, use.event),
                    *(use.cluster, use.key),
                )
                for use in uses
            ),
        )

    def remove_use(self, cluster: str, key: str) -> bool:
        """Remove a use, and its script if unused; return whether the use existed."""
        execute = self._connection.execute
        row = execute(
            "DELETE FROM use WHERE cluster = ? AND key = ? RETURNING script", (cluster, key)
        ).fetchone()
        if row is None:
            return False
        if execute("SELECT 1 FROM use WHERE script = ? LIMIT 1", row).fetchone() is None:
            packed = execute("SELECT packed FROM script WHERE number = ?", row).fetchone()[0]
            body = fold_for_index(decode_script_text(_decompress_script(packed)))
            execute("INSERT INTO words(words, rowid, body) VALUES('delete', ?, ?)", (row[0], body))
            execute("DELETE FROM script WHERE number = ?", row)
        return True

    def shrink_log(self) -> None:
        """Truncate the write-ahead log, from which removed text could still be read."""
        with translate_damage(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def count_rows(self) -> tuple[int, int]:
        """Return the number of uses and of distinct scripts."""
        sql = "SELECT (SELECT count(*) FROM use), (SELECT count(*) FROM script)"
        uses, scripts = self._connection.execute(sql).fetchone()
        return int(uses), int(scripts)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def find_keys(
    connection: Connection, table: str, keys: Collection[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return those of some scripts, by cluster and key, that a table contains."""
    by_cluster: dict[str, list[str]] = {}
    for cluster, key in keys:
        by_cluster.setdefault(cluster, []).append(key)
    found: set[tuple[str, str]] = set()
    for cluster, cluster_keys in by_cluster.items():
        rows = connection.execute(
            f"SELECT cluster, key FROM {table} WHERE cluster = ? "  # noqa: S608 - our own names
            "AND key IN (SELECT value FROM json_each(?))",
            (cluster, msgspec.json.encode(cluster_keys).decode()),
        )
        found.update(rows.fetchall())
    return found


def _decompress_script(packed: bytes) -> bytes:
    # zlib data never begins with 0, which marks bytes stored uncompressed.
    if packed[:1] == b"\0":
        return packed[1:]
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise CatalogUnavailable(
            f"the catalog is damaged (cannot decode a script: {error}): run 'steward archive "
            "reindex'"
        ) from error
