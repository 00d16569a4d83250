"""The journal as everybody but its writer sees it: read-only, beside the one who writes."""

import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from steward.core import events
from steward.core.events import ARCHIVE_RESEND, JOB_SCRIPT, Event, EventError, Unreadable, utc_now
from steward.core.sqlite import Connection, open_reader, translated

FILENAME = "journal.db"
_RATE_HOLDS_S = 60
_MOST_BYTES = 4 << 20
"""About how much is read at once: decoded it takes several times that, in every consumer."""


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where a consumer stands.

    Attributes:
        name: The consumer.
        position: The last event that it put to use.
        behind: How many events it has still to see.
        state: ``running``, or ``waiting`` where something it needs is away.
        detail: Why it is waiting.
        since: When it went into this state, seconds since the epoch.
        detached: Whether the journal no longer waits for it.
        dead: How many events were set aside for it.
        missed: How many events were trimmed, while it was detached, before it saw them: what
            it keeps has to be filled up (``steward archive resend``) or, of the catalogue,
            to be made anew (``steward archive reindex``).
        missed_from: When the first job of those was submitted, seconds since the epoch; 0
            where nothing of a job was missed.
        rate: How many events a second it puts to use, over the last minute; each script of
            an order to send or to purge counts.
        error: What went wrong last, also where it went on since; "" for nothing.
        error_at: When that was, seconds since the epoch; 0 for never.
        oldest: When the first event that it has still to see was seen; None for none.
    """

    name: str
    position: int
    behind: int
    state: str
    detail: str
    since: int
    detached: bool
    dead: int
    missed: int = 0
    missed_from: int = 0
    rate: float = 0.0
    error: str = ""
    error_at: int = 0
    oldest: datetime | None = None


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink has still to put to use.

    Attributes:
        events: How many events.
        scripts: How many scripts are in them, to be archived for the first time or again.
        oldest: When the oldest of them was seen; None for none.
    """

    events: int
    scripts: int
    oldest: datetime | None = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a consumer could not put to use.

    Attributes:
        consumer: Who could not.
        id: The event's position.
        kind: The event's kind.
        cluster: The event's cluster.
        key: The event's key.
        error: What went wrong the last time.
        since: When it was set aside, seconds since the epoch.
        replay: Whether it is to be tried again.
    """

    consumer: str
    id: int
    kind: str
    cluster: str
    key: str
    error: str
    since: int
    replay: bool


def event_of(row: tuple[int, str, str, str, bytes]) -> Event:
    """One bad row must not block the next: it becomes an event that says what is wrong with it."""
    try:
        return events.decode(*row)
    except EventError as error:
        now = utc_now()
        return Event(
            kind=row[1],
            cluster=row[2],
            key=row[3],
            at=now,
            seen_at=now,
            source="journal",
            body=Unreadable(error=str(error)),
            id=row[0],
        )


class JournalReader:
    """Reads the journal, beside its writer.

    Args:
        state_dir: The directory that holds the journal.

    Raises:
        SqliteUnavailable: There is no journal yet.
    """

    def __init__(self, state_dir: str) -> None:
        self.path = os.path.join(state_dir, FILENAME)
        self._db: Connection = open_reader(self.path)

    def _rows(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        """What a question answers; every error names the file."""
        with translated(self.path):
            rows: list[Any] = self._db.execute(statement, values).fetchall()
        return rows

    def read(self, after: int, kinds: Iterable[str], limit: int) -> tuple[list[Event], int]:
        """The next events of these kinds.

        Returns:
            The events, and the position up to which all was looked at.
        """
        head = self.head()
        with translated(self.path):
            found = self._db.execute(
                "SELECT id, kind, cluster, key, data FROM event WHERE id > ? AND id <= ? "
                "AND kind IN (SELECT value FROM json_each(?)) ORDER BY id LIMIT ?",
                (after, head, _json(sorted(kinds)), limit),
            )
            rows = list(_within(found, _MOST_BYTES))
            is_cut = found.fetchone() is not None
        upto = rows[-1][0] if is_cut or len(rows) == limit else max(head, after)
        return [event_of(row) for row in rows], upto

    def head(self) -> int:
        """Position of the last event ever appended; 0 for none."""
        rows = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'event'")
        return int(rows[0][0]) if rows else 0

    def known(self, cluster: str, key: str) -> bool:
        """Whether an event of this key was ever appended, as far as it is remembered."""
        rows = self._rows(
            "SELECT 1 FROM event WHERE cluster = ?1 AND key = ?2 UNION ALL "
            "SELECT 1 FROM remembered WHERE cluster = ?1 AND key = ?2 LIMIT 1",
            (cluster, key),
        )
        return bool(rows)

    def present(self, cluster: str, key: str) -> bool:
        """Whether the event of this key is still here, so that its bytes are kept."""
        rows = self._rows("SELECT 1 FROM event WHERE cluster = ? AND key = ?", (cluster, key))
        return bool(rows)

    def replays(self, name: str) -> list[Event]:
        """The dead letters of a consumer that are to be tried again."""
        rows = self._rows(
            "SELECT id, kind, cluster, key, data FROM dead WHERE consumer = ? AND replay = 1",
            (name,),
        )
        return [event_of(row) for row in rows]

    def dead(self, name: str = "") -> list[DeadLetter]:
        """What was set aside, for one consumer or all."""
        rows = self._rows(
            "SELECT consumer, id, kind, cluster, key, error, since, replay FROM dead "
            "WHERE ?1 = '' OR consumer = ?1 ORDER BY consumer, id",
            (name,),
        )
        fields = ("consumer", "id", "kind", "cluster", "key", "error", "since")
        return [
            DeadLetter(**dict(zip(fields, row[:7], strict=True)), replay=bool(row[7]))
            for row in rows
        ]

    def consumers(self) -> list[ConsumerStatus]:
        """Where every consumer stands."""
        rows = self._rows(
            "SELECT name, position, "
            "(SELECT count(*) FROM event WHERE id > position), state, detail, since, "
            "(SELECT count(*) FROM dead WHERE dead.consumer = name), missed, missed_from, "
            # Nothing is told while there is nothing to do, nor by one that has ended.
            "iif(told < ?, 0.0, rate), error, error_at, detached "
            "FROM consumer ORDER BY name",
            (int(utc_now().timestamp()) - _RATE_HOLDS_S,),
        )
        fields = ("name", "position", "behind", "state", "detail", "since", "dead", "missed",
                  "missed_from", "rate", "error", "error_at")  # fmt: skip
        return [
            ConsumerStatus(
                **dict(zip(fields, row[:-1], strict=True)),
                detached=bool(row[-1]),
                oldest=self._seen_behind(row[1]) if row[2] else None,
            )
            for row in rows
        ]

    def _seen_behind(self, position: int) -> datetime | None:
        """When the first event behind a position was seen."""
        found = self._rows(
            "SELECT id, kind, cluster, key, data FROM event WHERE id > ? ORDER BY id LIMIT 1",
            (position,),
        )
        return event_of(found[0]).seen_at if found else None

    def backlog(self, sink: str, after: int, kinds: Iterable[str]) -> Backlog:
        """What the sink of that name, which takes these kinds, has still to put to use.

        Args:
            sink: The sink's name, as orders to send again have it.
            after: Position of the last event that it put to use.
            kinds: What it takes.
        """
        wanted = _json(sorted(kinds))
        # CAST, since SQLite may take JSON in a BLOB for its own binary form.
        ((count, first, scripts),) = self._rows(
            "SELECT count(*), min(id), sum(CASE kind WHEN ?3 THEN 1 "
            "WHEN ?4 THEN iif(json_valid(CAST(data AS TEXT)) "
            "AND json_extract(CAST(data AS TEXT), '$.body.sink') = ?5, "
            "json_array_length(CAST(data AS TEXT), '$.body.scripts'), 0) ELSE 0 END) "
            "FROM event WHERE id > ?1 AND kind IN (SELECT value FROM json_each(?2))",
            (after, wanted, JOB_SCRIPT, ARCHIVE_RESEND, sink),
        )
        if not count:
            return Backlog(events=0, scripts=0)
        found = self._rows("SELECT id, kind, cluster, key, data FROM event WHERE id = ?", (first,))
        oldest = event_of(found[0]).seen_at if found else None
        return Backlog(events=count, scripts=scripts, oldest=oldest)

    def oldest(self) -> int:
        """Position of the oldest event that is still here; 0 for none."""
        return int(self._rows("SELECT ifnull(min(id), 0) FROM event")[0][0])

    def count(self) -> int:
        """How many events are here."""
        return int(self._rows("SELECT count(*) FROM event")[0][0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def refill_command(consumer: str, missed_from: int = 0) -> str:
    """The command that makes up for what a detached consumer missed.

    Args:
        consumer: Its name.
        missed_from: When the oldest job of what it missed was submitted, seconds since the
            epoch; 0 if that is not known.
    """
    _, _, sink = consumer.partition("archive.")
    if not sink:
        return "steward archive reindex"
    since = datetime.fromtimestamp(missed_from, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"steward archive resend --sink {sink}" + (f" --since {since}" if missed_from else "")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _within(rows: Iterable[Any], most_bytes: int) -> Iterator[Any]:
    """The first rows, one at least, that have so many bytes of data together."""
    size = 0
    for row in rows:
        yield row
        size += len(row[4])
        if size >= most_bytes:
            return
