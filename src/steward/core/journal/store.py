"""Journal store: one append-only SQLite table of events, consumer positions and dead letters.

One process writes it (:class:`Journal`); all others read it through ``reader``. The position of an
event is its rowid and is never reused. Appending ignores an event whose (cluster, key) is known,
even after the event was trimmed: a table of its own remembers the keys that sources can repeat.

``drop_purged`` removes purged scripts from dead letters, so that none can bring one back. Consumers
apply a purge in the order of events, but a dead letter stands outside that order: its scripts are
dropped when it is marked for a retry, or when the purge itself is trimmed, whichever comes first.
``prepare_restored`` prepares a journal restored from a backup.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from steward.core import events
from steward.core.databases import JOURNAL
from steward.core.errors import StewardError, Unavailable
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchivePurge,
    ArchiveResend,
    Event,
    JobIdentity,
    JobScript,
    encode_event,
    utc_now,
)
from steward.core.journal.reader import decode_row
from steward.core.sqlite import (
    Connection,
    check_schema_version,
    open_database,
    shrink_database,
    transaction,
)


def drop_purged(connection: Connection, purges: Iterable[Event]) -> None:
    """Delete the dead letters about scripts that a later event purged.

    Args:
        connection: The journal, inside a transaction.
        purges: Events; those of other kinds than archive.purge are ignored.
    """
    for purge in purges:
        if isinstance(purge.body, ArchivePurge):
            _drop_dead_letters(connection, purge, purge.body)


def list_recent_purges(connection: Connection) -> list[Event]:
    """Return the archive.purge events after the oldest dead letter that are not yet trimmed."""
    rows = connection.execute(
        "SELECT id, kind, cluster, key, data FROM event "
        "WHERE id > (SELECT min(id) FROM dead) AND kind = ?",
        (ARCHIVE_PURGE,),
    )
    return [decode_row(row) for row in rows]


def _drop_dead_letters(connection: Connection, purge: Event, body: ArchivePurge) -> None:
    """Delete or shorten the dead letters about the scripts of one purge."""
    purged = frozenset(body.script_keys)
    consumer = f"archive.{body.sink}" if body.sink else ""
    rows = connection.execute(
        "SELECT consumer, id, kind, cluster, key, data FROM dead "
        "WHERE id < ?1 AND cluster = ?2 AND (?3 = '' OR consumer = ?3) AND kind IN (?4, ?5, ?6)",
        (purge.id, purge.cluster, consumer, JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_RESEND),
    ).fetchall()
    for name, *row in rows:
        letter = decode_row(tuple(row))
        shortened = _remove_scripts(letter, purged)
        if shortened is None:
            connection.execute("DELETE FROM dead WHERE consumer = ? AND id = ?", (name, letter.id))
        elif shortened is not letter:
            connection.execute(
                "UPDATE dead SET data = ? WHERE consumer = ? AND id = ?",
                (encode_event(shortened), name, letter.id),
            )


def _remove_scripts(letter: Event, purged: frozenset[str]) -> Event | None:
    """Remove purged scripts from a dead letter; return None if nothing is left."""
    body = letter.body
    if isinstance(body, JobScript):
        return None if letter.key in purged else letter
    if isinstance(body, JobIdentity):
        return None if body.script_key in purged else letter
    if not isinstance(body, ArchiveResend):
        return letter
    scripts = tuple(script for script in body.scripts if script.script_key not in purged)
    if len(scripts) == len(body.scripts):
        return letter
    if not scripts:
        return None
    return msgspec.structs.replace(letter, body=msgspec.structs.replace(body, scripts=scripts))


_MIGRATIONS = (
    """
CREATE TABLE event (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    cluster TEXT NOT NULL,
    key TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE UNIQUE INDEX event_key ON event (cluster, key);
CREATE TABLE remembered (
    cluster TEXT NOT NULL,
    key TEXT NOT NULL,
    trimmed_at INTEGER NOT NULL,
    PRIMARY KEY (cluster, key)
) WITHOUT ROWID;
CREATE INDEX remembered_at ON remembered (trimmed_at);
CREATE TABLE consumer (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'running',
    detail TEXT NOT NULL DEFAULT '',
    since INTEGER NOT NULL,
    detached INTEGER NOT NULL DEFAULT 0,
    missed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE dead (
    consumer TEXT NOT NULL,
    id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    cluster TEXT NOT NULL,
    key TEXT NOT NULL,
    data BLOB NOT NULL,
    error TEXT NOT NULL,
    since INTEGER NOT NULL,
    replay INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, id)
) WITHOUT ROWID;
""",
    """
ALTER TABLE consumer ADD COLUMN error TEXT NOT NULL DEFAULT '';
ALTER TABLE consumer ADD COLUMN error_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE consumer ADD COLUMN rate REAL NOT NULL DEFAULT 0;
ALTER TABLE consumer ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
ALTER TABLE consumer ADD COLUMN missed_from INTEGER NOT NULL DEFAULT 0;
""",
    """
CREATE TABLE incoming (bytes INTEGER NOT NULL);
INSERT INTO incoming SELECT ifnull(sum(
        ifnull(json_extract(CAST(data AS TEXT), '$.body.script.length'), 0)
        + ifnull(json_extract(CAST(data AS TEXT), '$.body.environment.length'), 0)
    ), 0) FROM event WHERE kind = 'job.script' AND json_valid(CAST(data AS TEXT));
""",
)
_SCRIPT_AFTER_SUBMIT_S = 300
"""Most seconds between a job's submit time and its script's arrival in the spool."""
_FORGET_KEYS = 10_000
"""Most keys that one transaction forgets."""


class _FileLength(msgspec.Struct, frozen=True):
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _ScriptLengths(msgspec.Struct, frozen=True):
    """Lengths in the body of an encoded job.script event."""

    script: _FileLength | None = None
    environment: _FileLength | None = None


class _EncodedScript(msgspec.Struct, frozen=True):
    body: _ScriptLengths


_decode_script = msgspec.json.Decoder(_EncodedScript).decode

EncodedEvent = tuple[str, str, str, bytes]
"""An event as sent to the writer: kind, cluster, key, encoded rest."""


class JournalError(StewardError):
    """A request to the journal names something that does not exist, or is too large."""


class JournalUnavailable(Unavailable):
    """The journal cannot be written or reached now."""


def encode_rows(new: Iterable[Event]) -> list[EncodedEvent]:
    """Encode events as rows for the writer."""
    return [(event.kind, event.cluster, event.key, events.encode_event(event)) for event in new]


def _get_now_s() -> int:
    return int(utc_now().timestamp())


class Journal:
    """The only writer of the journal; its process holds ``journal.lock`` (see ``server``).

    Args:
        state_dir: Directory of the journal.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, state_dir: str) -> None:
        self.path = JOURNAL.locate(state_dir)
        self._db: Connection = open_database(self.path, _MIGRATIONS)
        self._head = self._read_head()

    def append(self, rows: Sequence[EncodedEvent]) -> int:
        """Append events, ignoring known keys; they are durable on return.

        Returns:
            Position of the last event in the journal.

        Raises:
            SqliteUnavailable: The disk is full or fails; nothing was added.
        """
        with transaction(self._db, self.path):
            changes = self._db.total_changes
            self._db.executemany(
                "INSERT OR IGNORE INTO event (kind, cluster, key, data) SELECT ?1, ?2, ?3, ?4 "
                "WHERE NOT EXISTS (SELECT 1 FROM remembered WHERE cluster = ?2 AND key = ?3)",
                rows,
            )
            if self._db.total_changes - changes == len(rows):
                self._add_incoming(data for kind, _, _, data in rows if kind == JOB_SCRIPT)
                head = self._head + len(rows)
            else:
                # An ignored event may use up a position.
                self._count_incoming(1, "id > ?", self._head)
                head = self._read_head()
        self._head = head
        return head

    def _count_incoming(self, sign: int, condition: str, argument: int | str) -> None:
        """Add the incoming bytes of some events to the count, or subtract them (``sign`` -1)."""
        rows = self._db.execute(
            f"SELECT data FROM event WHERE {condition} AND kind = ?",  # noqa: S608 - of this class
            (argument, JOB_SCRIPT),
        )
        self._add_incoming((data for (data,) in rows), sign)

    def _add_incoming(self, scripts: Iterable[bytes], sign: int = 1) -> None:
        """Add the incoming bytes of encoded job.script events to the count, or subtract them."""
        if change := sign * sum(map(_sum_lengths, scripts)):
            self._db.execute("UPDATE incoming SET bytes = bytes + ?", (change,))

    def head(self) -> int:
        """Return the position of the last event ever appended; 0 for none."""
        return self._head

    def _read_head(self) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'event'").fetchone()
        return int(row[0]) if row else 0

    def record_position(
        self,
        name: str,
        position: int,
        state: str,
        detail: str,
        rate: float = 0.0,
        error: str = "",
        error_at: int = 0,
    ) -> None:
        """Record a consumer's position and state; the first call registers it.

        A detached consumer is attached again once it needs no event that was trimmed.

        Args:
            name: The consumer.
            position: Position up to which it needs no events any more.
            state: ``running``, or ``waiting`` while a dependency is unavailable.
            detail: Reason for waiting.
            rate: Events applied per second.
            error: Last error; "" for none since its process started.
            error_at: Time of that error, seconds since the epoch.
        """
        with transaction(self._db, self.path):
            self._db.execute(
                "INSERT INTO consumer "
                "(name, position, state, detail, since, rate, error, error_at, told) "
                "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?5) ON CONFLICT (name) DO UPDATE SET "
                "position = excluded.position, "
                "since = iif(state = excluded.state, since, excluded.since), "
                "state = excluded.state, detail = excluded.detail, "
                "rate = excluded.rate, told = excluded.told, "
                "error = iif(excluded.error = '', error, excluded.error), "
                "error_at = iif(excluded.error = '', error_at, excluded.error_at), "
                "detached = iif(excluded.position >= (SELECT ifnull(min(id), 0) - 1 FROM event), "
                "0, detached)",
                (name, position, state, detail, _get_now_s(), rate, error, error_at),
            )

    def add_dead_letter(self, name: str, event_id: int, error: str) -> None:
        """Store an event that a consumer rejected as a dead letter, with its error."""
        with transaction(self._db, self.path):
            self._db.execute(
                "INSERT INTO dead (consumer, id, kind, cluster, key, data, error, since) "
                "SELECT ?1, id, kind, cluster, key, data, ?3, ?4 FROM event WHERE id = ?2 "
                "ON CONFLICT (consumer, id) DO NOTHING",
                (name, event_id, error, _get_now_s()),
            )
            # A retried event may have been trimmed meanwhile.
            self._db.execute(
                "UPDATE dead SET error = ?3, since = ?4, replay = 0 "
                "WHERE consumer = ?1 AND id = ?2",
                (name, event_id, error, _get_now_s()),
            )

    def mark_for_retry(self, name: str, event_id: int | None = None) -> int:
        """Mark a consumer's dead letters (or one) for a retry; return how many.

        Those whose scripts were purged since are deleted instead.

        Raises:
            JournalError: There is no such consumer.
        """
        with transaction(self._db, self.path):
            if not self._db.execute("SELECT 1 FROM consumer WHERE name = ?", (name,)).fetchone():
                raise _make_unknown_consumer(name)
            drop_purged(self._db, list_recent_purges(self._db))
            cursor = self._db.execute(
                "UPDATE dead SET replay = 1 WHERE consumer = ?1 AND (?2 IS NULL OR id = ?2)",
                (name, event_id),
            )
        return int(cursor.rowcount)

    def delete_dead_letter(self, name: str, event_id: int) -> None:
        """Delete a dead letter that was applied at last."""
        with transaction(self._db, self.path):
            self._db.execute("DELETE FROM dead WHERE consumer = ? AND id = ?", (name, event_id))

    def remove_consumer(self, name: str) -> None:
        """Delete a consumer and its dead letters: the journal no longer waits for it.

        Raises:
            JournalError: There is no such consumer.
        """
        with transaction(self._db, self.path):
            cursor = self._db.execute("DELETE FROM consumer WHERE name = ?", (name,))
            if not cursor.rowcount:
                raise _make_unknown_consumer(name)
            self._db.execute("DELETE FROM dead WHERE consumer = ?", (name,))

    def detach(self, name: str) -> None:
        """Stop waiting for a consumer; it stays registered, marked as detached."""
        with transaction(self._db, self.path):
            self._db.execute("UPDATE consumer SET detached = 1 WHERE name = ?", (name,))

    def list_attached(self) -> dict[str, int]:
        """Return the consumers that the journal waits for, with their positions."""
        return dict(
            self._db.execute("SELECT name, position FROM consumer WHERE detached = 0").fetchall()
        )

    def list_lagging(self) -> list[tuple[str, int]]:
        """Return the attached consumers that are behind, the furthest behind first."""
        head = self.head()
        positions = sorted(self.list_attached().items(), key=lambda item: item[1])
        return [(name, position) for name, position in positions if position < head]

    def list_trimmable(self, limit: int, *, dead: bool = False) -> list[Event]:
        """Return the oldest events that every attached consumer has passed.

        Args:
            limit: Most events to return.
            dead: Whether to include scripts in dead letters, whose bytes a retry needs.
        """
        rows = self._db.execute(
            "SELECT id, kind, cluster, key, data FROM event WHERE id <= "
            "ifnull((SELECT min(position) FROM consumer WHERE detached = 0), 0) "
            "AND (?2 OR id NOT IN (SELECT id FROM dead WHERE kind = ?3)) ORDER BY id LIMIT ?1",
            (limit, dead, JOB_SCRIPT),
        ).fetchall()
        return [decode_row(row) for row in rows]

    def trim(self, trimmed: Sequence[Event]) -> None:
        """Delete events; remember their keys and what detached consumers miss.

        A detached consumer never misses a purge: archive.purge events become dead letters
        of it that are marked for a retry.
        """
        with transaction(self._db, self.path):
            self._db.executemany(
                "INSERT OR IGNORE INTO remembered (cluster, key, trimmed_at) VALUES (?, ?, ?)",
                [(event.cluster, event.key, _get_now_s()) for event in trimmed],
            )
            for name, position in self._db.execute(
                "SELECT name, position FROM consumer WHERE detached = 1"
            ).fetchall():
                self._record_missed(name, [event for event in trimmed if event.id > position])
            drop_purged(self._db, trimmed)
            ids = msgspec.json.encode([event.id for event in trimmed]).decode()
            self._count_incoming(-1, "id IN (SELECT value FROM json_each(?))", ids)
            self._db.executemany("DELETE FROM event WHERE id = ?", [(e.id,) for e in trimmed])

    def _record_missed(self, name: str, missed: Sequence[Event]) -> None:
        submit_times = [at_s for event in missed if (at_s := _find_submit_time(event)) is not None]
        self._db.execute(
            "UPDATE consumer SET missed = missed + ?2, missed_from = CASE "
            "WHEN ?3 IS NULL THEN missed_from WHEN missed_from = 0 THEN ?3 "
            "ELSE min(missed_from, ?3) END WHERE name = ?1",
            (name, len(missed), min(submit_times, default=None)),
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO dead "
            "(consumer, id, kind, cluster, key, data, error, since, replay) "
            "SELECT ?1, id, kind, cluster, key, data, 'arrived while the consumer was detached', "
            "?3, 1 "
            "FROM event WHERE id = ?2",
            [(name, event.id, _get_now_s()) for event in missed if event.kind == ARCHIVE_PURGE],
        )

    def clear_missed(self, name: str, since_s: int) -> None:
        """Clear a consumer's missed count, if it missed nothing older than ``since_s``.

        Args:
            name: The consumer.
            since_s: Submit time of the oldest job that it receives again, seconds since the epoch.
        """
        with transaction(self._db, self.path):
            self._db.execute(
                "UPDATE consumer SET missed = 0, missed_from = 0 "
                "WHERE name = ? AND (missed_from = 0 OR missed_from >= ?)",
                (name, since_s),
            )

    def forget_old_keys(self, before_s: int) -> bool:
        """Forget some keys remembered before a time (seconds since the epoch).

        Returns:
            Whether there may be more of them.

        Raises:
            SqliteUnavailable: The disk is full or fails.
        """
        with transaction(self._db, self.path):
            cursor = self._db.execute(
                "DELETE FROM remembered WHERE (cluster, key) IN (SELECT cluster, key "
                "FROM remembered WHERE trimmed_at < ? ORDER BY trimmed_at LIMIT ?)",
                (before_s, _FORGET_KEYS),
            )
        return int(cursor.rowcount) == _FORGET_KEYS

    def shrink(self) -> bool:
        """Return some free pages to the file system; return whether there is more to do now.

        Raises:
            SqliteUnavailable: The disk is full or fails.
        """
        return shrink_database(self._db)

    def count_incoming_bytes(self) -> int:
        """Return the size of the incoming files that events of the journal name, in bytes."""
        return int(self._db.execute("SELECT bytes FROM incoming").fetchone()[0])

    def size_bytes(self) -> int:
        """Return the size of the journal's file, in bytes, less its free pages."""
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def check_journal_version(state_dir: str) -> None:
    """Check that this release can use the journal; raises as ``check_schema_version``."""
    check_schema_version(JOURNAL.locate(state_dir), len(_MIGRATIONS))


def prepare_restored(path: str, *, leap: int = 0) -> None:
    """Prepare a journal restored from a backup: reset the positions of attached consumers.

    It then trims nothing until each of them has reported its position again.

    Args:
        path: The file.
        leap: Positions to skip, if a consumer outside the backup may have seen more of this
            journal than it holds.

    Raises:
        SqliteError, SqliteUnavailable: It cannot be used.
    """
    db: Connection = open_database(path, _MIGRATIONS)
    with transaction(db, path):
        # The backup copied the consumers' databases before the journal, whose positions of them
        # may therefore be too high.
        db.execute("UPDATE consumer SET position = 0 WHERE detached = 0")
        db.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'event'", (leap,))
    db.close()


def _sum_lengths(data: bytes) -> int:
    """Return the size of the incoming files of an encoded job.script event, in bytes."""
    try:
        body = _decode_script(data).body
    except msgspec.MsgspecError:
        return 0  # whoever reads the event reports it
    return sum(file.length for file in (body.script, body.environment) if file)


def _find_submit_time(event: Event) -> int | None:
    """Return the earliest submit time of an event's job, seconds since the epoch."""
    if isinstance(event.body, JobScript):
        return int(event.at.timestamp()) - _SCRIPT_AFTER_SUBMIT_S
    if isinstance(event.body, JobIdentity):
        return int(event.body.first_submit.timestamp())
    if isinstance(event.body, ArchiveResend) and event.body.scripts:
        first_ns = min(resent.script.spool_mtime_ns for resent in event.body.scripts)
        return first_ns // 10**9 - _SCRIPT_AFTER_SUBMIT_S
    return None


def _make_unknown_consumer(name: str) -> JournalError:
    return JournalError(f"unknown consumer {name!r}: 'steward journal status' lists them", name)
