"""A remote sink's own database: its cursor, what is still to be sent, and what was.

Bytes are not in it. What was sent is remembered for some time, so that a later
correction can be a whole document with a higher version.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from steward.core.events import JobIdentity, JobScript
from steward.core.sqlite import Connection, open_database, open_reader, transaction, translated

SENT, AWAITS_IDENTITY, DUE, REFUSED = 0, 1, 2, 3
"""States of a script: done; waits for its job's identity; to be sent; will never be taken, and
the journal has not been told yet."""

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL, made_ns INTEGER NOT NULL);
    CREATE TABLE script (
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        state INTEGER NOT NULL,
        version INTEGER NOT NULL,
        event INTEGER NOT NULL,
        since_ns INTEGER NOT NULL,
        deleted INTEGER NOT NULL,
        has_bytes INTEGER NOT NULL,
        body BLOB,
        identity BLOB,
        error TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE INDEX script_open ON script (state, event) WHERE state != 0;
    CREATE INDEX script_waiting ON script (since_ns) WHERE state = 1;
    CREATE INDEX script_sent ON script (since_ns) WHERE state = 0;
    """,
)
_FORGET_AT_ONCE = 1000
_CHUNK = 400

Ref = tuple[str, str]
"""(cluster, key): what identifies a script."""


class Row(msgspec.Struct, frozen=True):
    """One script, as the table has it.

    Attributes:
        cluster: The cluster's name.
        key: Key of the job.script event.
        state: SENT, WAITING, DUE or REFUSED.
        version: Of the document, as it was or is to be sent.
        event: Position of the oldest event whose news was not sent yet; 0 for none.
        since_ns: When the latest news came, ns since the epoch.
        deleted: Whether it was purged.
        has_bytes: Whether the other end has its script: what follows may be a correction.
        body: The job.script event's body (JSON); None where it was never seen here.
        identity: The latest job.identity event's body (JSON), until it was sent.
        error: Why it was refused.
    """

    cluster: str
    key: str
    state: int
    version: int
    event: int
    since_ns: int
    deleted: bool = False
    has_bytes: bool = False
    body: bytes | None = None
    identity: bytes | None = None
    error: str = ""

    @property
    def ref(self) -> Ref:
        """What identifies it."""
        return self.cluster, self.key


_COLUMNS = ", ".join(Row.__struct_fields__)
_SELECT = f"SELECT {_COLUMNS} FROM script"  # noqa: S608 - our own names
_MARKS = ", ".join("?" * len(Row.__struct_fields__))
_SAVE = f"INSERT OR REPLACE INTO script ({_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608 - likewise

body_of = msgspec.json.Decoder(JobScript).decode
identity_of = msgspec.json.Decoder(JobIdentity).decode
encoded = msgspec.json.Encoder().encode


class Records:
    """The database of one remote sink.

    Args:
        path: The file.
        reading: Open it for reading only.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str, *, reading: bool = False) -> None:
        self.path = path
        if reading:
            self._connection: Connection = open_reader(path)
            return
        self._connection = open_database(path, MIGRATIONS)
        # What is purged is overwritten: no copy of a name stays in a free page.
        self._connection.execute("PRAGMA secure_delete=ON")
        with transaction(self._connection, path) as connection:
            connection.execute(
                "INSERT INTO cursor SELECT 0, ? WHERE NOT EXISTS (SELECT 1 FROM cursor)",
                (time.time_ns(),),
            )

    def _query(self, sql: str, *values: object) -> list[Any]:
        with translated(self.path):
            return list(self._connection.execute(sql, values))

    def cursor(self) -> int:
        """Position of the last event that was taken in."""
        return int(self._query("SELECT position FROM cursor")[0][0])

    def made_ns(self) -> int:
        """When this sink began, ns since the epoch: what is older it may never have seen."""
        return int(self._query("SELECT made_ns FROM cursor")[0][0])

    def rows(self, refs: Iterable[Ref]) -> dict[Ref, Row]:
        """The known ones of some scripts."""
        by_cluster: dict[str, list[str]] = {}
        for cluster, key in refs:
            by_cluster.setdefault(cluster, []).append(key)
        found: dict[Ref, Row] = {}
        for cluster, keys in by_cluster.items():
            for start in range(0, len(keys), _CHUNK):
                some = keys[start : start + _CHUNK]
                marks = ", ".join("?" * len(some))
                sql = f"{_SELECT} WHERE key IN ({marks}) AND cluster = ?"
                found |= {row.ref: row for row in map(_row, self._query(sql, *some, cluster))}
        return found

    def due(self, limit: int) -> list[Row]:
        """What is to be sent next, in the order of its events."""
        sql = f"{_SELECT} WHERE state = ? AND state != 0 ORDER BY event LIMIT ?"
        return list(map(_row, self._query(sql, DUE, limit)))

    def held(self) -> tuple[int, int | None]:
        """How many scripts are still to be sent, and since when the oldest is (ns)."""
        sql = "SELECT count(*), min(since_ns) FROM script WHERE state IN (?, ?) AND state != 0"
        ((count, since_ns),) = self._query(sql, AWAITS_IDENTITY, DUE)
        return count, since_ns

    def refused(self) -> list[Row]:
        """What will never be taken and has not been told of."""
        sql = f"{_SELECT} WHERE state = ? AND state != 0 ORDER BY event"
        return list(map(_row, self._query(sql, REFUSED)))

    def oldest_wait_ns(self) -> int | None:
        """Since when the script waits that has waited longest for its job's identity."""
        found = self._query("SELECT min(since_ns) FROM script WHERE state = 1")[0][0]
        return None if found is None else int(found)

    def oldest_event(self) -> int | None:
        """Position of the oldest event whose news was not sent yet; None if all was."""
        found = self._query("SELECT min(event) FROM script WHERE state != 0")[0][0]
        return None if found is None else int(found)

    @contextmanager
    def writing(self) -> "Iterator[Writer]":
        """One transaction.

        Raises:
            SqliteUnavailable: The disk is full or fails; nothing was written.
        """
        with transaction(self._connection, self.path) as connection:
            yield Writer(connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class Writer:
    """What can be written in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def save(self, rows: Iterable[Row]) -> None:
        """Write rows, new or changed."""
        self._connection.executemany(_SAVE, [msgspec.structs.astuple(row) for row in rows])

    def advance(self, position: int) -> None:
        """Move the cursor; a replayed event may come with a position passed long ago."""
        self._connection.execute("UPDATE cursor SET position = max(position, ?)", (position,))

    def end_waits(self, before_ns: int) -> None:
        """What has waited since then is to be sent without an identity."""
        self._connection.execute(
            "UPDATE script SET state = ? WHERE state = 1 AND since_ns <= ?", (DUE, before_ns)
        )

    def set_aside(self, rows: Iterable[Row]) -> None:
        """The journal has these by now; what is known of them stays, for a replay.

        One of which there was news meanwhile is to be sent as it is now.
        """
        self._connection.executemany(
            "UPDATE script SET state = ?, event = 0, error = '' "
            "WHERE key = ? AND cluster = ? AND state = ? AND version = ?",
            [(SENT, row.key, row.cluster, REFUSED, row.version) for row in rows],
        )

    def sent(self, rows: Iterable[Row]) -> None:
        """These were sent."""
        self.save(
            msgspec.structs.replace(
                row,
                state=SENT,
                event=0,
                has_bytes=row.has_bytes or row.body is not None,
                identity=None,
                error="",
            )
            for row in rows
        )

    def forget(self, before_ns: int) -> int:
        """Let go of what was sent and has not changed since then; returns how many rows.

        What was set aside has its identity still, and is kept for a replay.
        """
        gone = self._connection.execute(
            "DELETE FROM script WHERE (key, cluster) IN (SELECT key, cluster FROM script "
            "WHERE state = 0 AND since_ns < ? AND identity IS NULL LIMIT ?)",
            (before_ns, _FORGET_AT_ONCE),
        )
        return int(gone.rowcount)


def _row(values: Sequence[Any]) -> Row:
    row = Row(*values)
    # SQLite has no truth values.
    return msgspec.structs.replace(row, deleted=bool(row.deleted), has_bytes=bool(row.has_bytes))
