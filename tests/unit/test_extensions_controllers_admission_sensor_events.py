"""Admission of events from a controller's sensor."""

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.events import NOON
from harness.sensor import Shown, Told
from steward.capture.sensor.sensor import ClusterSensor
from steward.capture.sensor.store import SensorStore
from steward.core.events import NODE_STATE, Event, NodeState, encode_event
from steward.extensions.controllers.admission import EventAdmission
from steward.extensions.controllers.wire import ForwardedEvent
from steward.slurm.cluster_records import ReservationRecord


def no_store() -> Any:
    raise AssertionError("nothing of it has bytes")


def admitted(*events: Event) -> tuple[int, list[str]]:
    """Return the number of admitted events, and the errors of the others."""
    rows = [ForwardedEvent(e.kind, e.cluster, e.key, encode_event(e), None, None) for e in events]
    taken, refused = EventAdmission("c1", lambda _cluster, _key: False).admit_events(rows, no_store)
    return len(taken), [why for _, why in refused]


@pytest.fixture
def told(tmp_path: Path) -> list[Event]:
    shown, told = Shown(), Told()
    shown.states["n1"] = "DOWN"
    shown.reasons["n1"] = ("a reason", "root", NOON)
    shown.reserved["r"] = ReservationRecord(name="r", state="ACTIVE", start=NOON, end=NOON)
    sensor = ClusterSensor("c1", shown, SensorStore(str(tmp_path), "c1"), interval_s=1.0)
    sensor.run_turn(told.append)
    return told.events


def test_what_the_sensor_tells_is_taken(told: list[Event]) -> None:
    assert {event.kind.partition(".")[0] for event in told} == {"node", "partition", "reservation"}
    assert admitted(*told) == (len(told), [])


def test_a_time_without_a_zone_is_refused(told: list[Event]) -> None:
    event = next(event for event in told if event.kind == NODE_STATE)
    body = NodeState(node="n1", state="DOWN", reason_at=datetime(2026, 3, 1))  # noqa: DTZ001 -- the point
    strange = msgspec.structs.replace(event, body=body)
    assert admitted(strange) == (0, ["a time lacks its time zone"])
    key = msgspec.structs.replace(event, key="job.seen:1:2")
    assert admitted(key) == (0, ["the key does not match an event of kind node.state"])
