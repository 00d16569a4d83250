"""Remote sink database: cursor, documents to send, and documents sent (``archive-NAME.db``).

Script bytes are not in it. Sent documents are remembered for some time, so that a later correction
can be a whole document with a higher version. :class:`RemoteRow` is a script's state,
:class:`RemoteRecords` reads and :class:`RemoteRecordsWriter` writes within one transaction.

A script begins as AWAITS_IDENTITY, or DUE if it need not wait. An identity, or the end of the wait,
makes it DUE; sending makes it SENT or REFUSED. A refused one becomes SENT once the journal has it
as a dead letter. Every later change makes it DUE again, with a higher version.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from steward.core.events import JobIdentity, JobScript
from steward.core.sqlite import Connection, Database
from steward.core.storage import Cursor, Index, Table

SENT, AWAITS_IDENTITY, DUE, REFUSED = 0, 1, 2, 3
"""States of a script: done (sent, or a dead letter); waiting for its job's identity; to be sent;
refused by the server, but not yet reported to the journal."""

MAX_DELETED_ROWS = 1000
"""Largest number of documents that one call deletes."""
_CHUNK = 400

RemoteScriptRef = tuple[str, str]
"""Identity of a script: (cluster, key)."""


class RemoteRow(msgspec.Struct, frozen=True):
    """One script in the table.

    Attributes:
        cluster: The cluster's name.
        key: Key of the job.script event.
        state: SENT, AWAITS_IDENTITY, DUE or REFUSED.
        version: Version of the document, sent or to be sent.
        event: Position of the oldest event not yet sent; 0 for none.
        since_ns: Time of the latest change, ns since the epoch.
        deleted: Whether it was purged.
        has_bytes: Whether the server has its bytes, so that the next document may be a correction.
        body: Body of the job.script event (JSON); None if this sink never received it.
        identity: Latest job.identity body (JSON), until it was sent.
        error: Reason of the refusal.
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
    def ref(self) -> RemoteScriptRef:
        """Return the identity of the script."""
        return self.cluster, self.key


class _SinkCursor(Cursor, frozen=True, kw_only=True):
    """Cursor, and when this sink began, ns since the epoch."""

    made_ns: int = 0


_CURSOR: Final = Table(_SinkCursor, "cursor", has_one_row=True)
_SCRIPTS: Final = Table(
    RemoteRow,
    "script",
    key="key, cluster",
    indexes={
        "open": Index("state, event", where="state != 0"),
        "waiting": Index("since_ns", where="state = 1"),
        "sent": Index("since_ns", where="state = 0"),
    },
)

decode_script_body = msgspec.json.Decoder(JobScript).decode
decode_identity_body = msgspec.json.Decoder(JobIdentity).decode
encode_body = msgspec.json.Encoder().encode


class RemoteRecords:
    """Database of one remote sink.

    Args:
        path: Path of the file.
        read_only: Whether to open it read-only.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        migrations = (_CURSOR.schema + _SCRIPTS.schema,)
        self.database = Database(path, migrations, read_only=read_only)
        if read_only:
            return
        # Purged data is overwritten: no copy of a name remains in a free page.
        self.database.connection.execute("PRAGMA secure_delete=ON")
        with self.database.transaction() as connection:
            connection.execute("UPDATE cursor SET made_ns = ? WHERE made_ns = 0", (time.time_ns(),))

    def load_creation_ns(self) -> int:
        """Return when this sink began, ns since the epoch; it may have missed older scripts."""
        return int(self.database.fetch_value("SELECT made_ns FROM cursor"))

    def load_rows(self, refs: Iterable[RemoteScriptRef]) -> dict[RemoteScriptRef, RemoteRow]:
        """Return the rows of the given scripts, if known."""
        by_cluster: dict[str, list[str]] = {}
        for cluster, key in refs:
            by_cluster.setdefault(cluster, []).append(key)
        rows: dict[RemoteScriptRef, RemoteRow] = {}
        for cluster, keys in by_cluster.items():
            for start in range(0, len(keys), _CHUNK):
                chunk = keys[start : start + _CHUNK]
                marks = ", ".join("?" * len(chunk))
                clause = f"WHERE key IN ({marks}) AND cluster = ?"
                found = _SCRIPTS.select(self.database, clause, *chunk, cluster)
                rows |= {row.ref: row for row in found}
        return rows

    def select_due(self, limit: int) -> list[RemoteRow]:
        """Return the next documents to send, in order of their events."""
        clause = "WHERE state = ? AND state != 0 ORDER BY event LIMIT ?"
        return _SCRIPTS.select(self.database, clause, DUE, limit)

    def count_unsent(self) -> tuple[int, int | None]:
        """Return the number of scripts to send, and since when the oldest waits (ns)."""
        sql = "SELECT count(*), min(since_ns) FROM script WHERE state IN (?, ?) AND state != 0"
        ((count, since_ns),) = self.database.fetch(sql, AWAITS_IDENTITY, DUE)
        return count, since_ns

    def select_refused(self) -> list[RemoteRow]:
        """Return refused documents that were not reported to the journal."""
        clause = "WHERE state = ? AND state != 0 ORDER BY event"
        return _SCRIPTS.select(self.database, clause, REFUSED)

    def get_oldest_wait_ns(self) -> int | None:
        """Return since when the oldest script waits for its job's identity, ns; None for none."""
        sql = "SELECT min(since_ns) FROM script WHERE state = 1"
        oldest_ns: int | None = self.database.fetch_value(sql)
        return oldest_ns

    def get_oldest_event(self) -> int | None:
        """Return the position of the oldest unsent event; None if all were sent."""
        sql = "SELECT min(event) FROM script WHERE state != 0"
        oldest: int | None = self.database.fetch_value(sql)
        return oldest

    @contextmanager
    def writing(self) -> "Iterator[RemoteRecordsWriter]":
        """Open one transaction for writing.

        Raises:
            SqliteUnavailable: The disk is full or failing; nothing was written.
        """
        with self.database.transaction() as connection:
            yield RemoteRecordsWriter(connection)

    def close(self) -> None:
        """Close the file."""
        self.database.close()


class RemoteRecordsWriter:
    """Write operations within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def save(self, rows: Iterable[RemoteRow]) -> None:
        """Insert or update rows."""
        _SCRIPTS.insert_all(self._connection, rows, "replace")

    def end_waits(self, before_ns: int) -> None:
        """Mark scripts that have waited since then to be sent without identity."""
        self._connection.execute(
            "UPDATE script SET state = ? WHERE state = 1 AND since_ns <= ?", (DUE, before_ns)
        )

    def mark_reported(self, rows: Iterable[RemoteRow]) -> None:
        """Mark refused documents as reported to the journal; keep their data for a retry.

        A document that changed meanwhile is sent in its new version.
        """
        self._connection.executemany(
            "UPDATE script SET state = ?, event = 0, error = '' "
            "WHERE key = ? AND cluster = ? AND state = ? AND version = ?",
            [(SENT, row.key, row.cluster, REFUSED, row.version) for row in rows],
        )

    def mark_sent(self, rows: Iterable[RemoteRow]) -> None:
        """Mark documents as sent."""
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

    def delete_old(self, before_ns: int) -> int:
        """Delete documents sent and unchanged since then; return the number of rows.

        Dead letters still have an identity, and are kept for a retry.
        """
        cursor = self._connection.execute(
            "DELETE FROM script WHERE (key, cluster) IN (SELECT key, cluster FROM script "
            "WHERE state = 0 AND since_ns < ? AND identity IS NULL LIMIT ?)",
            (before_ns, MAX_DELETED_ROWS),
        )
        return int(cursor.rowcount)
