"""What was last told of a cluster's states, and what of it is not in the journal yet.

A change and the event that tells of it are committed together, and the event goes
to the journal after that. So it is told once however often the process is killed,
and in the order of the changes; and what is in the journal, taken in turn, gives
the picture that is here.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.capture.sensor.changes import SHOWN, Change, Shown
from steward.core.consumers import Append
from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    ControllerState,
    Event,
    NodesNow,
    decode,
    encode,
    nodes_now_path,
    utc_now,
)
from steward.core.files import read_status, write_status
from steward.core.sqlite import open_database, transaction, translated
from steward.core.timestamps import micros

SOURCE: Final = "sensor"
"""The source of the events."""

_MIGRATIONS: Final = (
    # A lost store begins with numbers that were given before: its name keeps the keys apart.
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

_pack: Final = msgspec.json.Encoder().encode


class DaemonSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How one of Slurm's daemons was last seen.

    Attributes:
        up: Whether it answered.
        started_at: When it was started, UTC; None where that is not told.
    """

    up: bool
    started_at: datetime | None = None


class StateStore:
    """The database ``states-CLUSTER.db``.

    Args:
        state_dir: Steward's state directory.
        cluster: The cluster's name.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be used now.
    """

    def __init__(self, state_dir: str, cluster: str) -> None:
        self._cluster = cluster
        self._now_path = nodes_now_path(state_dir, cluster)
        self._is_now_stale = True
        self._path = os.path.join(state_dir, f"states-{cluster}.db")
        self._database = open_database(self._path, _MIGRATIONS)
        with translated(self._path):
            ((self._name, looked_us),) = self._database.execute("SELECT name, looked_us FROM store")
            rows = self._database.execute("SELECT kind, name, data FROM shown").fetchall()
            daemons = self._database.execute("SELECT name, up, started_us FROM daemon").fetchall()
        self.looked_at: datetime | None = _moment(looked_us)
        """When the picture was taken; None where there was none yet."""
        self.picture: dict[str, dict[str, Shown]] = {kind: {} for kind in SHOWN}
        """What was last told, by kind and name."""
        for kind, name, data in rows:
            self.picture[kind][name] = msgspec.json.decode(data, type=SHOWN[kind])
        self.daemons = {
            name: DaemonSeen(up=bool(up), started_at=_moment(us)) for name, up, us in daemons
        }
        """How Slurm's daemons were last seen, by name."""

    def keep(self, changes: Sequence[Change], at: datetime, *, silent: bool = False) -> None:
        """Make changes part of the picture, and what they tell part of the outbox.

        Args:
            changes: What changed.
            at: When the picture was taken.
            silent: Whether nothing is to be told, because somebody else tells it.

        Raises:
            SqliteUnavailable: The database cannot be written now; nothing has changed.
            NotLeft: The file of the states now cannot be written.
        """
        told = [change for change in changes if change.body is not None]
        if told or self.looked_at is None:
            self._write(told, at, silent=silent)
        for change in changes:
            if change.shown is None:
                self.picture[change.kind].pop(change.name, None)
            else:
                self.picture[change.kind][change.name] = change.shown
        self.looked_at = at
        if self._is_now_stale or any(change.kind == NODE_STATE for change in changes):
            self._is_now_stale = True
            self._leave_now()

    def keep_silence(self) -> None:
        """Leave with the states of the last poll that slurmctld has not answered since.

        Raises:
            NotLeft: The file of the states now cannot be written.
        """
        found = read_status(self._now_path, NodesNow)
        if found is None or found[0].silent_since is not None:
            return
        # After a start what was told last is older than the file, which each change makes anew.
        written_at = datetime.fromtimestamp(found[1], UTC)
        polled_at = max(written_at, self.looked_at or written_at)
        write_status(self._now_path, msgspec.structs.replace(found[0], silent_since=polled_at))
        self._is_now_stale = True

    def _leave_now(self) -> None:
        states: dict[str, list[str]] = {}
        for name, shown in self.picture[NODE_STATE].items():
            states.setdefault(shown.state, []).append(name)
        now = NodesNow(states={state: tuple(names) for state, names in states.items()})
        write_status(self._now_path, now)
        self._is_now_stale = False

    def _write(self, told: Sequence[Change], at: datetime, *, silent: bool) -> None:
        """Write down what was news; of the rest the next look after a start knows again."""
        with transaction(self._database, self._path) as database:
            ((number,),) = database.execute("SELECT number FROM store").fetchall()
            for change in told:
                if change.shown is None:
                    database.execute(
                        "DELETE FROM shown WHERE kind = ? AND name = ?", (change.kind, change.name)
                    )
                else:
                    database.execute(
                        "INSERT OR REPLACE INTO shown VALUES (?, ?, ?)",
                        (change.kind, change.name, _pack(change.shown).decode()),
                    )
                if not silent and change.body is not None:
                    number += 1
                    # An event's key must be printable whatever a thing is called.
                    key = f"{change.kind}:{_safe(change.name)}:{self._name}.{number}"
                    self._put(number, self._event(change.kind, key, change.at, change.body))
            database.execute("UPDATE store SET number = ?, looked_us = ?", (number, micros(at)))

    def see(
        self, daemon: str, seen: DaemonSeen, told: ControllerState | None, key: str = ""
    ) -> None:
        """Keep how a daemon was seen, and what that tells.

        Args:
            daemon: ``slurmctld`` or ``slurmdbd``.
            seen: How.
            told: What is to be told; None for nothing.
            key: What the event's key ends with; a number that is used once if empty.

        Raises:
            SqliteUnavailable: The database cannot be written now; nothing has changed.
        """
        if seen == self.daemons.get(daemon) and told is None:
            return
        with transaction(self._database, self._path) as database:
            started_us = None if seen.started_at is None else micros(seen.started_at)
            database.execute(
                "INSERT OR REPLACE INTO daemon VALUES (?, ?, ?)", (daemon, seen.up, started_us)
            )
            if told is not None:
                database.execute("UPDATE store SET number = number + 1")
                ((number,),) = database.execute("SELECT number FROM store").fetchall()
                whole = f"{CONTROLLER_STATE}:{daemon}:{key or f'{self._name}.{number}'}"
                self._put(number, self._event(CONTROLLER_STATE, whole, utc_now(), told))
        self.daemons[daemon] = seen

    def send(self, append: Append) -> None:
        """Give the journal what is in the outbox.

        Raises:
            Unavailable: The journal, or the database, is away: all of it is given again.
        """
        while True:
            with translated(self._path):
                rows = self._database.execute(
                    "SELECT number, kind, key, data FROM outbox ORDER BY number LIMIT ?", (_CHUNK,)
                ).fetchall()
            if not rows:
                return
            append(
                [
                    decode(0, kind, self._cluster, key, data.encode())
                    for _number, kind, key, data in rows
                ]
            )
            with transaction(self._database, self._path) as database:
                database.execute("DELETE FROM outbox WHERE number <= ?", (rows[-1][0],))

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def _event(self, kind: str, key: str, at: datetime, body: msgspec.Struct) -> Event:
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=at,
            seen_at=utc_now(),
            source=SOURCE,
            body=body,
        )

    def _put(self, number: int, event: Event) -> None:
        self._database.execute(
            "INSERT INTO outbox VALUES (?, ?, ?, ?)",
            (number, event.kind, event.key, encode(event).decode()),
        )


def _safe(name: str) -> str:
    plain = "".join(c if c.isascii() and c.isprintable() and c not in " :" else "_" for c in name)
    return plain[:128]


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else datetime.fromtimestamp(at_us / 1_000_000, UTC)
