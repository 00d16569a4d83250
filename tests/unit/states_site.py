"""A cluster whose states the test writes, and a journal that can be away, for the sensor."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from steward.events import NODE_STATE, PARTITION_STATE, RESERVATION_STATE, Event
from steward.journal.store import JournalUnavailable
from steward.slurm import SlurmDown
from steward.slurm.machine import Ping
from steward.slurm.machine_rows import NodeRecord, PartitionRecord, ReservationRecord

BOOTED = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Shown:
    """A machine as slurmctld would show it."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {"n1": "IDLE", "n2": "IDLE"}
        self.reasons: dict[str, tuple[str, str, datetime | None]] = {}
        self.parts: dict[str, str] = {"main": "UP"}
        self.reserved: dict[str, ReservationRecord] = {}
        self.booted = BOOTED
        self.daemons: tuple[Ping, ...] = (
            Ping(daemon="slurmctld", role="primary", host="ctl1", up=True),
        )
        self.down = False
        self.takes: Callable[[], None] = lambda: None

    def node_states(self) -> dict[str, NodeRecord]:
        self._answer()
        self.takes()
        found = {}
        for name, state in self.states.items():
            reason, user, at = self.reasons.get(name, ("", "", None))
            found[name] = NodeRecord(
                name=name,
                base=state.partition("+")[0],
                state=state,
                reason=reason,
                reason_user=user,
                reason_at=at,
                partitions=("main",),
            )
        return found

    def partitions(self) -> dict[str, PartitionRecord]:
        self._answer()
        return {name: PartitionRecord(name=name, state=one) for name, one in self.parts.items()}

    def reservations(self) -> dict[str, ReservationRecord]:
        self._answer()
        return dict(self.reserved)

    def started_at(self) -> datetime:
        self._answer()
        return self.booted

    def pings(self) -> tuple[Ping, ...]:
        return self.daemons

    def _answer(self) -> None:
        if self.down:
            raise SlurmDown("nobody listens")


class Told:
    """A journal: keeps the first event of a key; may be away, or be killed after an append."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.away = False
        self.dies_after = False

    def append(self, new: Sequence[Event]) -> None:
        if self.away:
            raise JournalUnavailable("the journal is away")
        known = {event.key for event in self.events}
        self.events += [event for event in new if event.key not in known]
        if self.dies_after:
            raise KeyboardInterrupt

    def bodies(self, kind: str) -> list[Any]:
        return [event.body for event in self.events if event.kind == kind]

    def replayed(self) -> dict[str, dict[str, str]]:
        """The states after the last event, by who takes each of them in turn."""
        shown: dict[str, dict[str, str]] = {
            NODE_STATE: {},
            PARTITION_STATE: {},
            RESERVATION_STATE: {},
        }
        for event in self.events:
            body = event.body
            if event.kind not in shown:
                continue
            name = getattr(body, event.kind.partition(".")[0])
            assert body.old_state == shown[event.kind].get(name, ""), body
            if body.state == "REMOVED":
                del shown[event.kind][name]
            else:
                shown[event.kind][name] = body.state
        return shown
