"""Journal reader: read-only queries of events, consumers, dead letters and backlogs.

:class:`JournalReader` opens the SQLite file beside the writer; consumers, status pages and
commands use it. ``refill_command`` names the command that makes up for trimmed events.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from steward.core import events
from steward.core.databases import JOURNAL
from steward.core.events import (
    ARCHIVE_RESEND,
    JOB_SCRIPT,
    Event,
    EventError,
    ImportedJobs,
    UnreadableBody,
    utc_now,
)
from steward.core.imported import measure_unpacked
from steward.core.sqlite import Connection, open_reader, translate_errors

_RATE_HOLDS_S = 60
"""Age, in seconds, above which a reported rate counts as 0."""
_MAX_READ_BYTES = 4 << 20
"""Approximate limit of one read, in bytes: decoded, it takes several times that in a consumer."""


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a consumer.

    Attributes:
        name: Name of the consumer.
        position: Position up to which it needs no events any more.
        lag: Number of events after its position.
        state: ``running``, or ``waiting`` while a dependency is unavailable.
        detail: Reason for waiting.
        since: Start of this state, seconds since the epoch.
        detached: Whether the journal no longer waits for it.
        dead_letters: Number of its dead letters.
        missed: Number of events that were trimmed, while it was detached, before it read them:
            refill its sink (``steward archive resend``) or, for the catalog, rebuild it
            (``steward archive reindex``).
        missed_from: Submit time of the first job among those, seconds since the epoch; 0 if
            they concern no job.
        rate: Events applied per second, over the last minute; each script of a resend or
            purge event counts.
        error: Last error, even if solved since; "" for none.
        error_at: Time of that error, seconds since the epoch; 0 for never.
        oldest: Time its first outstanding event was seen; None for none.
    """

    name: str
    position: int
    lag: int
    state: str
    detail: str
    since: int
    detached: bool
    dead_letters: int
    missed: int = 0
    missed_from: int = 0
    rate: float = 0.0
    error: str = ""
    error_at: int = 0
    oldest: datetime | None = None


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """Events that a sink has still to apply.

    Attributes:
        events: Number of events.
        scripts: Number of scripts in them, to be archived for the first time or again.
        oldest: Time the oldest of them was seen; None for none.
    """

    events: int
    scripts: int
    oldest: datetime | None = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a consumer rejected.

    Attributes:
        consumer: Name of the consumer.
        id: Position of the event.
        kind: Kind of the event.
        cluster: Cluster of the event.
        key: Key of the event.
        error: Last error.
        since: Time of the rejection, seconds since the epoch.
        retry: Whether a retry is pending.
    """

    consumer: str
    id: int
    kind: str
    cluster: str
    key: str
    error: str
    since: int
    retry: bool


def decode_row(row: tuple[int, str, str, str, bytes]) -> Event:
    """Decode a row; a bad row becomes an event with its error, so it cannot block the next."""
    try:
        return events.decode_event(*row)
    except EventError as error:
        now = utc_now()
        return Event(
            kind=row[1],
            cluster=row[2],
            key=row[3],
            at=now,
            seen_at=now,
            source="journal",
            body=UnreadableBody(error=str(error)),
            id=row[0],
        )


class JournalReader:
    """Read access to the journal, beside its writer.

    Args:
        state_dir: Directory of the journal.

    Raises:
        SqliteUnavailable: There is no journal yet.
    """

    def __init__(self, state_dir: str) -> None:
        self.path = JOURNAL.locate(state_dir)
        self._db: Connection = open_reader(self.path)

    def _query(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        """Run a query; every error names the file."""
        with translate_errors(self.path):
            rows: list[Any] = self._db.execute(statement, values).fetchall()
        return rows

    def read(self, after: int, kinds: Iterable[str], limit: int) -> tuple[list[Event], int]:
        """Return the next events of these kinds after a position.

        Returns:
            The events, and the position up to which all events were examined.
        """
        head = self.head()
        with translate_errors(self.path):
            names = ",".join(kind for kind in kinds if "," not in kind)
            # SQLite would compile a bound LIMIT again at each use, and make a table for an IN.
            cursor = self._db.execute(
                "SELECT id, kind, cluster, key, data FROM event WHERE id > ? AND id <= ? "  # noqa: S608 - a number
                f"AND instr(?, ',' || kind || ',') ORDER BY id LIMIT {limit:d}",
                (after, head, f",{names},"),
            )
            taken = list(_take_events(cursor, _MAX_READ_BYTES))
            is_cut = cursor.fetchone() is not None
        upto = taken[-1].id if is_cut or len(taken) == limit else max(head, after)
        return taken, upto

    def head(self) -> int:
        """Return the position of the last event ever appended; 0 for none."""
        rows = self._query("SELECT seq FROM sqlite_sequence WHERE name = 'event'")
        return int(rows[0][0]) if rows else 0

    def has_key(self, cluster: str, key: str) -> bool:
        """Return whether an event of this key was ever appended, as far as keys are remembered."""
        rows = self._query(
            "SELECT 1 FROM event WHERE cluster = ?1 AND key = ?2 UNION ALL "
            "SELECT 1 FROM remembered WHERE cluster = ?1 AND key = ?2 LIMIT 1",
            (cluster, key),
        )
        return bool(rows)

    def has_event(self, cluster: str, key: str) -> bool:
        """Return whether the event of this key is not trimmed, so that its bytes are there too."""
        rows = self._query("SELECT 1 FROM event WHERE cluster = ? AND key = ?", (cluster, key))
        return bool(rows)

    def list_retries(self, name: str) -> list[Event]:
        """Return a consumer's dead letters that are marked for a retry."""
        rows = self._query(
            "SELECT id, kind, cluster, key, data FROM dead WHERE consumer = ? AND replay = 1",
            (name,),
        )
        return [decode_row(row) for row in rows]

    def list_dead_letters(self, name: str = "") -> list[DeadLetter]:
        """Return the dead letters of one consumer, or of all."""
        rows = self._query(
            "SELECT consumer, id, kind, cluster, key, error, since, replay FROM dead "
            "WHERE ?1 = '' OR consumer = ?1 ORDER BY consumer, id",
            (name,),
        )
        fields = ("consumer", "id", "kind", "cluster", "key", "error", "since")
        return [
            DeadLetter(**dict(zip(fields, row[:7], strict=True)), retry=bool(row[7]))
            for row in rows
        ]

    def list_consumers(self) -> list[ConsumerStatus]:
        """Return the status of every consumer."""
        rows = self._query(
            "SELECT name, position, "
            "(SELECT count(*) FROM event WHERE id > position), state, detail, since, "
            "(SELECT count(*) FROM dead WHERE dead.consumer = name), missed, missed_from, "
            # A consumer that is idle or has ended reports no rate: an old one counts as 0.
            "iif(told < ?, 0.0, rate), error, error_at, detached "
            "FROM consumer ORDER BY name",
            (int(utc_now().timestamp()) - _RATE_HOLDS_S,),
        )
        fields = ("name", "position", "lag", "state", "detail", "since", "dead_letters", "missed",
                  "missed_from", "rate", "error", "error_at")  # fmt: skip
        return [
            ConsumerStatus(
                **dict(zip(fields, row[:-1], strict=True)),
                detached=bool(row[-1]),
                oldest=self._find_oldest_seen(row[1]) if row[2] else None,
            )
            for row in rows
        ]

    def _find_oldest_seen(self, position: int) -> datetime | None:
        """Return the time the first event behind a position was seen."""
        rows = self._query(
            "SELECT id, kind, cluster, key, data FROM event WHERE id > ? ORDER BY id LIMIT 1",
            (position,),
        )
        return decode_row(rows[0]).seen_at if rows else None

    def count_backlog(self, sink: str, after: int, kinds: Iterable[str]) -> Backlog:
        """Count the events that a sink has still to apply.

        Args:
            sink: Name of the sink, as in archive.resend events.
            after: Position of the last event that it applied.
            kinds: Event kinds that it takes.
        """
        kinds_json = _encode_json(sorted(kinds))
        # CAST, since SQLite may take JSON in a BLOB for its own binary form.
        ((count, first, scripts),) = self._query(
            "SELECT count(*), min(id), sum(CASE kind WHEN ?3 THEN 1 "
            "WHEN ?4 THEN iif(json_valid(CAST(data AS TEXT)) "
            "AND json_extract(CAST(data AS TEXT), '$.body.sink') = ?5, "
            "json_array_length(CAST(data AS TEXT), '$.body.scripts'), 0) ELSE 0 END) "
            "FROM event WHERE id > ?1 AND kind IN (SELECT value FROM json_each(?2))",
            (after, kinds_json, JOB_SCRIPT, ARCHIVE_RESEND, sink),
        )
        if not count:
            return Backlog(events=0, scripts=0)
        rows = self._query("SELECT id, kind, cluster, key, data FROM event WHERE id = ?", (first,))
        oldest = decode_row(rows[0]).seen_at if rows else None
        return Backlog(events=count, scripts=scripts, oldest=oldest)

    def get_oldest(self) -> int:
        """Return the position of the oldest event not yet trimmed; 0 for none."""
        return int(self._query("SELECT ifnull(min(id), 0) FROM event")[0][0])

    def count(self) -> int:
        """Return the number of events not yet trimmed."""
        return int(self._query("SELECT count(*) FROM event")[0][0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def refill_command(consumer: str, missed_from: int = 0) -> str:
    """Return the command that refills what a detached consumer missed.

    Args:
        consumer: Name of the consumer.
        missed_from: Submit time of the oldest job that it missed, seconds since the epoch; 0 if
            unknown.
    """
    _, _, sink = consumer.partition("archive.")
    if not sink:
        return "steward archive reindex"
    since = datetime.fromtimestamp(missed_from, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"steward archive resend --sink {sink}" + (f" --since {since}" if missed_from else "")


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _take_events(rows: Iterable[Any], most_bytes: int) -> Iterator[Event]:
    """Yield the events of rows, at least one, until their data has ``most_bytes`` bytes."""
    size = 0
    for row in rows:
        event = decode_row(row)
        yield event
        size += len(row[4])
        if isinstance(event.body, ImportedJobs):
            size += measure_unpacked(event.body)
        if size >= most_bytes:
            return
