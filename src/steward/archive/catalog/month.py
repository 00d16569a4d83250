"""One month of the catalogue: an index of the scripts that were spooled in it, and of their uses.

Each distinct script is indexed once, by groups of three letters (FTS5's
trigram tokenizer, ``detail=none``: 0.9 bytes of index for a byte of script),
and kept compressed beside the index: a hit must be proved on the script
itself, and the archive may lie on a file system that is slow, full of small
files, or away. The index itself holds no text (``content=''``), so what is
taken out of it must be given back to it, which is the second use of the copy.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from steward.archive.catalog.matches import decode, indexed_form
from steward.core.errors import StewardError, Unavailable
from steward.core.sqlite import (
    Connection,
    SqliteError,
    open_database,
    open_reader,
    transaction,
    translated,
)

MOST_INDEXED_BYTES: Final = 4 * 1024**2
"""Of a script, what lies beyond is not found. Slurm's own limit (max_script_size) is 4 MiB."""

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


class CatalogueError(StewardError):
    """The catalogue is not what it should be."""


class CatalogueUnavailable(CatalogueError, Unavailable):
    """The catalogue cannot be used now; nothing is lost."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A script that a job ran.

    Attributes:
        cluster: The job's cluster.
        key: Key of the job.script event.
        job_id: The id in the spool: an array's or a het job's leader.
        at: The script's time in the spool, microseconds since the epoch.
        uid: The owner; None while Slurm has not said.
        user: The owner's name at submit.
        account: The account that the job is charged to.
        partition: The job's partition.
        name: The job's name.
        event: Position in the journal of the last event that said something of it.
        script: Number of the script in the month's file; 0 before it is there.
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
        """The script's time in the spool."""
        return moment(self.at)

    @property
    def place(self) -> tuple[int, str, str]:
        """Where it stands in the order of all: time in microseconds, key, cluster."""
        return self.at, self.key, self.cluster


USE_COLUMNS: Final = ", ".join(f"use.{name}" for name in Use.__struct_fields__)


def moment(microseconds: int) -> datetime:
    """The time that so many microseconds since the epoch are, UTC."""
    return datetime.fromtimestamp(microseconds // 10**6, UTC).replace(
        microsecond=microseconds % 10**6
    )


def month_of(microseconds: int) -> str:
    """The month of a time, in UTC: ``2026-11``."""
    return moment(microseconds).strftime("%Y-%m")


def month_path(directory: str, month: str) -> str:
    """Where a month's file lies."""
    return os.path.join(directory, f"{month}.db")


def months_in(directory: str) -> list[str]:
    """The months that have a file, oldest first."""
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
def damage_named(path: str) -> Iterator[None]:
    """Say of a damaged file what helps, and let it be tried again after that.

    Raises:
        CatalogueUnavailable: The file is damaged.
    """
    try:
        with translated(path):
            yield
    except SqliteError as error:
        raise CatalogueUnavailable(
            f"the catalogue is damaged ({error}): run 'steward archive reindex'", path
        ) from error


class MonthReader:
    """A month's file, for reading.

    Args:
        path: The file.

    Raises:
        SqliteUnavailable: There is none, or it cannot be read now.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.connection: Connection = open_reader(path)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """The rows of a question, as they are found."""
        with damage_named(self.path):
            yield from self.connection.execute(sql, values)

    def text(self, script: int) -> str:
        """A script as it was indexed."""
        return decode(self.data(script))

    def data(self, script: int) -> bytes:
        """The indexed bytes of a script.

        Raises:
            CatalogueUnavailable: The file is damaged.
        """
        rows = list(self.rows("SELECT packed FROM script WHERE number = ?", (script,)))
        if not rows:
            raise CatalogueUnavailable(
                f"the catalogue is damaged ({self.path} lacks script {script}): "
                "run 'steward archive reindex'",
                self.path,
            )
        return _unpacked(rows[0][0])

    def close(self) -> None:
        """Let go of the file."""
        self.connection.close()


class MonthWriter:
    """A month's file, for its one writer.

    Args:
        path: The file; made if need be.
        synchronous: SQLite's pragma; OFF only for a file that is not in use yet.

    Raises:
        CatalogueUnavailable: The file is damaged.
        SqliteUnavailable: The disk is full, or the file cannot be opened now.
    """

    def __init__(self, path: str, synchronous: str = "FULL") -> None:
        self.path = path
        with damage_named(path):
            self._connection: Connection = open_database(path, MIGRATIONS, synchronous=synchronous)
            self._connection.execute("PRAGMA secure_delete=ON")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction for all that is written inside."""
        with damage_named(self.path), transaction(self._connection, self.path):
            yield

    def begin(self) -> None:
        """Begin a long transaction; for a file that nobody else writes."""
        with damage_named(self.path):
            self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """End what :meth:`begin` began.

        Raises:
            SqliteUnavailable: The disk is full.
        """
        with damage_named(self.path):
            self._connection.execute("COMMIT")

    def knows(self, sha256: bytes) -> int:
        """The number of a script; 0 if it is not here."""
        sql = "SELECT number FROM script WHERE sha256 = ?"
        row = self._connection.execute(sql, (sha256,)).fetchone()
        return int(row[0]) if row else 0

    def add_script(self, sha256: bytes, data: bytes) -> int:
        """Index a script that is not here yet; its number."""
        known = data[:MOST_INDEXED_BYTES]
        packed = zlib.compress(known, 1)
        number = self._connection.execute(
            "INSERT INTO script(sha256, length, packed) VALUES(?, ?, ?)",
            (sha256, len(data), packed if len(packed) < len(known) else b"\0" + known),
        ).lastrowid
        self._connection.execute(
            "INSERT INTO words(rowid, body) VALUES(?, ?)", (number, indexed_form(decode(known)))
        )
        return int(number)

    def add_use(self, use: Use) -> None:
        """Note that a job ran a script; of a use that is here already nothing changes."""
        names = Use.__struct_fields__
        self._connection.execute(
            f"INSERT OR IGNORE INTO use({', '.join(names)}) VALUES({', '.join('?' * len(names))})",
            msgspec.structs.astuple(use),
        )

    def has_use(self, cluster: str, key: str) -> bool:
        """Whether this use is here."""
        sql = "SELECT 1 FROM use WHERE cluster = ? AND key = ?"
        return self._connection.execute(sql, (cluster, key)).fetchone() is not None

    def identify(self, use: Use) -> None:
        """Note what is known now of the job of a use that is here."""
        self._connection.execute(
            "UPDATE use SET uid = ?, user = ?, account = ?, partition = ?, name = ?, event = ? "
            "WHERE cluster = ? AND key = ?",
            (
                *(use.uid, use.user, use.account, use.partition, use.name, use.event),
                *(use.cluster, use.key),
            ),
        )

    def forget(self, cluster: str, key: str) -> bool:
        """Take out a use, and its script where no other use has it; whether it was here."""
        run = self._connection.execute
        row = run(
            "DELETE FROM use WHERE cluster = ? AND key = ? RETURNING script", (cluster, key)
        ).fetchone()
        if row is None:
            return False
        if run("SELECT 1 FROM use WHERE script = ? LIMIT 1", row).fetchone() is None:
            packed = run("SELECT packed FROM script WHERE number = ?", row).fetchone()[0]
            body = indexed_form(decode(_unpacked(packed)))
            run("INSERT INTO words(words, rowid, body) VALUES('delete', ?, ?)", (row[0], body))
            run("DELETE FROM script WHERE number = ?", row)
        return True

    def shrink_log(self) -> None:
        """Empty the write-ahead log, where what was taken out can still be read."""
        with damage_named(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def counts(self) -> tuple[int, int]:
        """How many uses and how many distinct scripts are here."""
        sql = "SELECT (SELECT count(*) FROM use), (SELECT count(*) FROM script)"
        uses, scripts = self._connection.execute(sql).fetchone()
        return int(uses), int(scripts)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


def _unpacked(packed: bytes) -> bytes:
    # zlib's first byte is never 0, which marks bytes that do not get smaller.
    if packed[:1] == b"\0":
        return packed[1:]
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise CatalogueUnavailable(
            f"the catalogue is damaged (a script in it: {error}): run 'steward archive reindex'"
        ) from error
