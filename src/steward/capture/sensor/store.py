"""State store of the sensor: last reported states of a cluster, and events not yet sent (SQLite).

:class:`SensorStore` commits a change together with its event in ``states-CLUSTER.db`` and sends the
event to the journal afterwards (outbox). So each change is reported once and in order, however
often the process is killed, and replaying the journal yields the states stored here. It also writes
the status file with the present states of nodes.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.capture.sensor.changes import FACTS_BY_KIND, ObjectChange, ObjectFacts
from steward.core.consumers import Append
from steward.core.databases import SENSOR_STATES
from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    ControllerState,
    Event,
    NodeStatesFile,
    decode_event,
    encode_event,
    node_states_path,
    utc_now,
)
from steward.core.files import read_status, write_status
from steward.core.sqlite import Database
from steward.core.timestamps import to_micros

SENSOR_SOURCE: Final = "sensor"
"""Source name of the events."""

_MIGRATIONS: Final = (
    # A lost store starts counting at 0 again: its random name keeps the event keys unique.
    """
    CREATE TABLE store (name TEXT NOT NULL, number INTEGER NOT NULL, looked_us INTEGER);
    INSERT INTO store VALUES (lower(hex(randomblob(6))), 0, NULL);
    CREATE TABLE shown (
        kind TEXT NOT NULL, name TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (kind, name)
    ) WITHOUT ROWID;
    CREATE TABLE daemon (
        name TEXT PRIMARY KEY, up INTEGER, started_us INTEGER
    ) WITHOUT ROWID;
    CREATE TABLE outbox (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, data TEXT NOT NULL
    );
    """,
)
_CHUNK: Final = 500
"""Maximum number of events per append."""

_pack: Final = msgspec.json.Encoder().encode


class DaemonState(msgspec.Struct, frozen=True, kw_only=True):
    """Last observed state of one of Slurm's daemons.

    Attributes:
        up: Whether it answered.
        started_at: Start time, UTC; None if unknown.
    """

    up: bool
    started_at: datetime | None = None


class SensorStore:
    """Database ``states-CLUSTER.db``, with its content in memory.

    Args:
        state_dir: Steward's state directory.
        cluster: Name of the cluster.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be opened now.
    """

    def __init__(self, state_dir: str, cluster: str) -> None:
        self._cluster = cluster
        self._status_path = node_states_path(state_dir, cluster)
        self._is_status_stale = True
        path = SENSOR_STATES.locate(state_dir, cluster)
        self._database = Database(path, _MIGRATIONS)
        ((self._name, looked_us),) = self._database.fetch("SELECT name, looked_us FROM store")
        rows = self._database.fetch("SELECT kind, name, data FROM shown")
        daemons = self._database.fetch("SELECT name, up, started_us FROM daemon")
        self.looked_at: datetime | None = _decode_time(looked_us)
        """Time of the last poll; None before the first."""
        self.snapshot: dict[str, dict[str, ObjectFacts]] = {kind: {} for kind in FACTS_BY_KIND}
        """Last reported facts, by kind and name."""
        for kind, name, data in rows:
            self.snapshot[kind][name] = msgspec.json.decode(data, type=FACTS_BY_KIND[kind])
        self.daemons = {
            name: DaemonState(up=bool(up), started_at=_decode_time(us)) for name, up, us in daemons
        }
        """Last observed state of Slurm's daemons, by name."""

    def store_changes(
        self, changes: Sequence[ObjectChange], at: datetime, *, silent: bool = False
    ) -> None:
        """Store changes and put their events into the outbox.

        Args:
            changes: Changes found by a poll.
            at: Time of the poll.
            silent: Emit no events, because another host's sensor does.

        Raises:
            SqliteUnavailable: The database cannot be written now; nothing has changed.
            StatusWriteError: The status file of node states cannot be written.
        """
        reported = [change for change in changes if change.body is not None]
        if reported or self.looked_at is None:
            self._write_changes(reported, at, silent=silent)
        for change in changes:
            if change.facts is None:
                self.snapshot[change.kind].pop(change.name, None)
            else:
                self.snapshot[change.kind][change.name] = change.facts
        self.looked_at = at
        if self._is_status_stale or any(change.kind == NODE_STATE for change in changes):
            self._is_status_stale = True
            self._write_status()

    def mark_silent(self) -> None:
        """Mark in the status file that slurmctld has not answered since the last poll.

        Raises:
            StatusWriteError: The status file of node states cannot be written.
        """
        status = read_status(self._status_path, NodeStatesFile)
        if status is None or status[0].silent_since is not None:
            return
        # After a start ``looked_at`` is older than the file, which every change rewrites.
        written_at = datetime.fromtimestamp(status[1], UTC)
        polled_at = max(written_at, self.looked_at or written_at)
        write_status(self._status_path, msgspec.structs.replace(status[0], silent_since=polled_at))
        self._is_status_stale = True

    def _write_status(self) -> None:
        """Write the status file of present node states."""
        states: dict[str, list[str]] = {}
        for name, facts in self.snapshot[NODE_STATE].items():
            states.setdefault(facts.state, []).append(name)
        now = NodeStatesFile(states={state: tuple(names) for state, names in states.items()})
        write_status(self._status_path, now)
        self._is_status_stale = False

    def _write_changes(
        self, reported: Sequence[ObjectChange], at: datetime, *, silent: bool
    ) -> None:
        """Write reported changes; the first poll after a start finds the rest again."""
        with self._database.transaction() as database:
            ((number,),) = database.execute("SELECT number FROM store").fetchall()
            for change in reported:
                if change.facts is None:
                    database.execute(
                        "DELETE FROM shown WHERE kind = ? AND name = ?", (change.kind, change.name)
                    )
                else:
                    database.execute(
                        "INSERT OR REPLACE INTO shown VALUES (?, ?, ?)",
                        (change.kind, change.name, _pack(change.facts).decode()),
                    )
                if not silent and change.body is not None:
                    number += 1
                    # Event keys must be printable, whatever a node or reservation is named.
                    key = f"{change.kind}:{_make_printable(change.name)}:{self._name}.{number}"
                    self._put_event(
                        number, self._build_event(change.kind, key, change.at, change.body)
                    )
            database.execute("UPDATE store SET number = ?, looked_us = ?", (number, to_micros(at)))

    def store_daemon(
        self, daemon: str, state: DaemonState, body: ControllerState | None, key: str = ""
    ) -> None:
        """Store the observed state of a daemon, with its event.

        Args:
            daemon: ``slurmctld`` or ``slurmdbd``.
            state: Observed state.
            body: Body of the event; None for no event.
            key: Suffix of the event key; a unique number if empty.

        Raises:
            SqliteUnavailable: The database cannot be written now; nothing has changed.
        """
        if state == self.daemons.get(daemon) and body is None:
            return
        with self._database.transaction() as database:
            started_us = None if state.started_at is None else to_micros(state.started_at)
            database.execute(
                "INSERT OR REPLACE INTO daemon VALUES (?, ?, ?)", (daemon, state.up, started_us)
            )
            if body is not None:
                database.execute("UPDATE store SET number = number + 1")
                ((number,),) = database.execute("SELECT number FROM store").fetchall()
                event_key = f"{CONTROLLER_STATE}:{daemon}:{key or f'{self._name}.{number}'}"
                self._put_event(
                    number, self._build_event(CONTROLLER_STATE, event_key, utc_now(), body)
                )
        self.daemons[daemon] = state

    def send_outbox(self, append: Append) -> None:
        """Send the events in the outbox to the journal.

        Raises:
            Unavailable: The journal or the database is unavailable; all events will be sent again.
        """
        while True:
            rows = self._database.fetch(
                "SELECT number, kind, key, data FROM outbox ORDER BY number LIMIT ?", _CHUNK
            )
            if not rows:
                return
            append(
                [
                    decode_event(0, kind, self._cluster, key, data.encode())
                    for _number, kind, key, data in rows
                ]
            )
            with self._database.transaction() as database:
                database.execute("DELETE FROM outbox WHERE number <= ?", (rows[-1][0],))

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _build_event(self, kind: str, key: str, at: datetime, body: msgspec.Struct) -> Event:
        """Build an event of the sensor."""
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=at,
            seen_at=utc_now(),
            source=SENSOR_SOURCE,
            body=body,
        )

    def _put_event(self, number: int, event: Event) -> None:
        """Put an event into the outbox."""
        self._database.connection.execute(
            "INSERT INTO outbox VALUES (?, ?, ?, ?)",
            (number, event.kind, event.key, encode_event(event).decode()),
        )


def _make_printable(name: str) -> str:
    """Replace characters that event keys must not contain."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in " :" else "_" for c in name)
    return plain[:128]


def _decode_time(at_us: int | None) -> datetime | None:
    """Convert µs since the epoch to a time."""
    return None if at_us is None else datetime.fromtimestamp(at_us / 1_000_000, UTC)
