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
    decode_unsent_event,
    encode_event,
    node_states_path,
    utc_now,
)
from steward.core.files import read_status, write_status
from steward.core.sqlite import Database
from steward.core.storage import Table
from steward.core.timestamps import to_micros

SENSOR_SOURCE: Final = "sensor"
"""Source name of the events."""

_CHUNK: Final = 500
"""Maximum number of events per append."""

_pack: Final = msgspec.json.Encoder().encode


class DaemonState(msgspec.Struct, frozen=True, kw_only=True):
    """Last observed state of one of Slurm's daemons.

    Attributes:
        name: ``slurmctld`` or ``slurmdbd``.
        up: Whether it answered.
        started_at: Start time, UTC; None if unknown.
    """

    name: str
    up: bool
    started_at: datetime | None = None


class _StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """Name of the store, number of its last event, and time of the last poll."""

    name: str = ""
    number: int = 0
    polled_at: datetime | None = None


class _StoredObject(msgspec.Struct, frozen=True):
    """Last reported facts of an object, as JSON."""

    kind: str
    name: str
    data: str


class _UnsentEvent(msgspec.Struct, frozen=True):
    """Event that was not sent yet, as JSON."""

    number: int
    kind: str
    key: str
    data: str


_STATE: Final = Table(_StoreState, "store", has_one_row=True)
_OBJECTS: Final = Table(_StoredObject, "shown", key="kind, name")
_DAEMONS: Final = Table(DaemonState, "daemon", key="name")
_EVENTS: Final = Table(_UnsentEvent, "outbox", key="number")
_NAME_STORE: Final = "UPDATE store SET name = lower(hex(randomblob(6)))"
"""A lost store starts counting at 0 again: its random name keeps the event keys unique."""
_TABLES: Final = (_STATE, _OBJECTS, _DAEMONS, _EVENTS)
_MIGRATIONS: Final = ("".join((*(table.schema for table in _TABLES), _NAME_STORE)),)


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
        (state,) = _STATE.select(self._database)
        self._name = state.name
        self.polled_at = state.polled_at
        """Time of the last poll; None before the first."""
        self.snapshot: dict[str, dict[str, ObjectFacts]] = {kind: {} for kind in FACTS_BY_KIND}
        """Last reported facts, by kind and name."""
        for row in _OBJECTS.select(self._database):
            facts = msgspec.json.decode(row.data, type=FACTS_BY_KIND[row.kind])
            self.snapshot[row.kind][row.name] = facts
        self.daemons = {daemon.name: daemon for daemon in _DAEMONS.select(self._database)}
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
        if reported or self.polled_at is None:
            self._write_changes(reported, at, silent=silent)
        for change in changes:
            if change.facts is None:
                self.snapshot[change.kind].pop(change.name, None)
            else:
                self.snapshot[change.kind][change.name] = change.facts
        self.polled_at = at
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
        # After a start ``polled_at`` is older than the file, which every change rewrites.
        written_at = datetime.fromtimestamp(status[1], UTC)
        polled_at = max(written_at, self.polled_at or written_at)
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
                    facts = _pack(change.facts).decode()
                    row = _StoredObject(change.kind, change.name, facts)
                    _OBJECTS.insert(database, row, "replace")
                if not silent and change.body is not None:
                    number += 1
                    # Event keys must be printable, whatever a node or reservation is named.
                    key = f"{change.kind}:{_make_printable(change.name)}:{self._name}.{number}"
                    self._put_event(
                        number, self._build_event(change.kind, key, change.at, change.body)
                    )
            database.execute("UPDATE store SET number = ?, polled_at = ?", (number, to_micros(at)))

    def store_daemon(self, state: DaemonState, body: ControllerState | None, key: str = "") -> None:
        """Store the observed state of a daemon, with its event.

        Args:
            state: Observed state.
            body: Body of the event; None for no event.
            key: Suffix of the event key; a unique number if empty.

        Raises:
            SqliteUnavailable: The database cannot be written now; nothing has changed.
        """
        if state == self.daemons.get(state.name) and body is None:
            return
        with self._database.transaction() as database:
            _DAEMONS.insert(database, state, "replace")
            if body is not None:
                database.execute("UPDATE store SET number = number + 1")
                ((number,),) = database.execute("SELECT number FROM store").fetchall()
                event_key = f"{CONTROLLER_STATE}:{state.name}:{key or f'{self._name}.{number}'}"
                self._put_event(
                    number, self._build_event(CONTROLLER_STATE, event_key, utc_now(), body)
                )
        self.daemons[state.name] = state

    def send_outbox(self, append: Append) -> None:
        """Send the events in the outbox to the journal.

        Raises:
            Unavailable: The journal or the database is unavailable; all events will be sent again.
        """
        while True:
            rows = _EVENTS.select(self._database, "ORDER BY number LIMIT ?", _CHUNK)
            if not rows:
                return
            append(
                [
                    decode_unsent_event(row.kind, self._cluster, row.key, row.data.encode())
                    for row in rows
                ]
            )
            with self._database.transaction() as database:
                database.execute("DELETE FROM outbox WHERE number <= ?", (rows[-1].number,))

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
        row = _UnsentEvent(number, event.kind, event.key, encode_event(event).decode())
        _EVENTS.insert(self._database.connection, row)


def _make_printable(name: str) -> str:
    """Replace characters that event keys must not contain."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in " :" else "_" for c in name)
    return plain[:128]
