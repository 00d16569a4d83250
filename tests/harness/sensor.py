"""Sensor runs: a cluster whose states a test sets, and a journal that can fail."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harness.events import NOON
from steward.capture.sensor.sensor import ClusterSensor
from steward.capture.sensor.store import SensorStore
from steward.capture.sensor.triggers import FiredTrigger
from steward.core.events import (
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    Event,
    NodeState,
)
from steward.core.journal.store import JournalUnavailable
from steward.slurm import SlurmDown
from steward.slurm.cluster import Ping
from steward.slurm.cluster_records import NodeRecord, PartitionRecord, ReservationRecord
from steward.slurm.state_files import StateStamp

SILENT = "IDLE+NOT_RESPONDING"
Patch = pytest.MonkeyPatch


class Shown:
    """A scripted slurmctld: states of nodes, partitions, reservations and daemons."""

    def __init__(self) -> None:
        self.ping_count = 0
        self.states: dict[str, str] = {"n1": "IDLE", "n2": "IDLE"}
        self.reasons: dict[str, tuple[str, str, datetime | None]] = {}
        self.parts: dict[str, str] = {"main": "UP"}
        self.reserved: dict[str, ReservationRecord] = {}
        self.booted = NOON
        self.daemons: tuple[Ping, ...] = (
            Ping(daemon="slurmctld", role="primary", host="ctl1", up=True),
        )
        self.down = False
        self.takes: Callable[[], None] = lambda: None

    def node_states(self) -> dict[str, NodeRecord]:
        self._answer()
        self.takes()
        nodes = {}
        for name, state in self.states.items():
            reason, user, at = self.reasons.get(name, ("", "", None))
            nodes[name] = NodeRecord(
                name=name,
                base=state.partition("+")[0],
                state=state,
                reason=reason,
                reason_user=user,
                reason_at=at,
                partitions=("main",),
            )
        return nodes

    def partitions(self) -> dict[str, PartitionRecord]:
        self._answer()
        return {name: PartitionRecord(name=name, state=state) for name, state in self.parts.items()}

    def reservations(self) -> dict[str, ReservationRecord]:
        self._answer()
        return dict(self.reserved)

    def read_start_time(self) -> datetime:
        self._answer()
        return self.booted

    def pings(self) -> tuple[Ping, ...]:
        self.ping_count += 1
        return self.daemons

    def ping_slurmdbd(self) -> Ping:
        return next(ping for ping in self.daemons if ping.daemon == "slurmdbd")

    def _answer(self) -> None:
        if self.down:
            raise SlurmDown("nobody listens")


class Told:
    """A journal that keeps the first event of a key; it can fail, or die after an append."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.away = False
        self.dies_after = False

    def append(self, new: Sequence[Event]) -> None:
        if self.away:
            raise JournalUnavailable("the journal is away")
        keys = {event.key for event in self.events}
        self.events += [event for event in new if event.key not in keys]
        if self.dies_after:
            raise KeyboardInterrupt

    def bodies(self, kind: str) -> list[Any]:
        return [event.body for event in self.events if event.kind == kind]

    def replayed(self) -> dict[str, dict[str, str]]:
        """Return the states after applying all events; check that each starts from the last."""
        states: dict[str, dict[str, str]] = {
            NODE_STATE: {},
            PARTITION_STATE: {},
            RESERVATION_STATE: {},
        }
        for event in self.events:
            body = event.body
            if event.kind not in states:
                continue
            name = getattr(body, event.kind.partition(".")[0])
            assert body.old_state == states[event.kind].get(name, ""), body
            if body.state == "REMOVED":
                del states[event.kind][name]
            else:
                states[event.kind][name] = body.state
        return states


class SensorRun:
    """A sensor with its cluster and journal, which a test can restart and whose clock it moves."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: Patch,
        *,
        usage: bool = True,
        interval_s: float = 1.0,
    ) -> None:
        self.usage = usage
        self.interval_s = interval_s
        self.shown = Shown()
        self.told = Told()
        self.now_s = 1000.0
        self.kept = 0
        self.stands_by = False
        self.stamp: StateStamp | None = None
        self._state_dir = str(tmp_path)
        monkeypatch.setattr("steward.capture.sensor.sensor.time.monotonic", lambda: self.now_s)
        self.restart()

    def restart(self) -> None:
        """Start a new sensor on the old database, as after a kill."""
        self.sensor = ClusterSensor(
            "c1",
            self.shown,
            SensorStore(self._state_dir, "c1"),
            interval_s=self.interval_s,
            usage=self.usage,
            triggers=self,
            check_standby=lambda _pings: self.stands_by,
            read_stamp=lambda: self.stamp,
        )

    def sync(self) -> bool:
        self.kept += 1
        return True

    def turn(self, *wakes: str, after_s: float = 1.0) -> float:
        self.now_s += after_s
        self.sensor.wake(FiredTrigger(*wake.split(" ")) for wake in wakes)
        return self.sensor.run_turn(self.told.append)

    def news(self) -> list[NodeState]:
        states = self.told.bodies(NODE_STATE)
        self.told.events.clear()
        return states


@pytest.fixture
def site(tmp_path: Path, monkeypatch: Patch) -> SensorRun:
    return SensorRun(tmp_path, monkeypatch)
