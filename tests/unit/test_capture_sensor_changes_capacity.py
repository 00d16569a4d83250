"""Capacity of nodes: reported with their states, and when it changes."""

from datetime import UTC, datetime

import msgspec
import pytest

from steward.automation.rules.triggers import make_trigger
from steward.capture.sensor.changes import NodeFacts, ObjectChange, compare_snapshots
from steward.capture.sensor.sensor import extract_node_facts
from steward.core.events import NODE_STATE, Event, NodeState
from steward.slurm.cluster_records import NodeRecord, make_powered_down_node

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def told(
    before: NodeFacts | None, after: NodeFacts | None, *, usage: bool = False
) -> list[ObjectChange]:
    pictures = [{NODE_STATE: {"n1": one} if one else {}} for one in (before, after)]
    return compare_snapshots(*pictures, source="interval", at=NOON, usage=usage)


def body(changes: list[ObjectChange]) -> NodeState:
    (change,) = changes
    assert isinstance(change.body, NodeState)
    return change.body


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", 0),
        ("gpu:4", 4),
        ("gpu:a100:4(S:0-1),gpu:l4:2,shard:8", 6),
        ("nic:2", 0),
        ("gpu:(null):0", 0),
    ],
)
def test_what_a_node_has(gres: str, gpus: int) -> None:
    record = NodeRecord(
        name="n1", base="IDLE", state="IDLE", cpus=8, memory_bytes=1 << 34, gres=gres
    )
    assert extract_node_facts(record).capacity == (8, 1 << 34, gpus)


def test_it_is_told_with_the_state_and_when_it_changes() -> None:
    small = NodeFacts(state="IDLE", cpus=4, memory_bytes=1 << 30)
    large = msgspec.structs.replace(small, cpus=8, gpus=1)
    assert body(told(None, small)).cpus == 4
    assert told(small, small) == []
    change = body(told(small, large))
    assert (change.state, change.old_state, change.cpus, change.gpus) == ("IDLE", "IDLE", 8, 1)
    assert not change.failed
    assert change.resized
    down = msgspec.structs.replace(large, state="DOWN")
    assert not body(told(small, down)).resized
    why = msgspec.structs.replace(large, reason="a fan")
    assert not body(told(small, why)).resized
    gone = body(told(large, None))
    assert (gone.state, gone.cpus) == ("REMOVED", 8)


def test_a_picture_of_before_gets_to_know_it() -> None:
    before = msgspec.json.decode(b'{"state":"IDLE","partitions":["main"]}', type=NodeFacts)
    after = NodeFacts(state="IDLE", partitions=("main",), cpus=4, memory_bytes=1 << 30)
    assert body(told(before, after)).cpus == 4


def test_a_node_that_is_hidden_while_it_is_off_keeps_what_it_has() -> None:
    on = NodeFacts(state="IDLE+CLOUD", cpus=4, memory_bytes=1 << 30, gpus=2)
    (change,) = told(on, extract_node_facts(make_powered_down_node("n1")))
    assert isinstance(change.facts, NodeFacts)
    assert change.facts.capacity == on.capacity
    assert isinstance(change.body, NodeState)
    assert (change.body.cpus, change.body.gpus) == (4, 2)
    # And is no news when it is back.
    back = body(told(change.facts, on))
    assert (back.state, back.cpus) == ("IDLE+CLOUD", 4)


def test_rules_are_not_told_of_it() -> None:
    def event(resized: bool) -> Event:
        shown = NodeState(node="n1", state="DOWN", old_state="DOWN", cpus=4, resized=resized)
        return Event(
            kind=NODE_STATE,
            cluster="c1",
            key="node.state:1",
            at=NOON,
            seen_at=NOON,
            source="sensor",
            body=shown,
        )

    assert make_trigger(event(resized=True), lambda _: {}) is None
    assert make_trigger(event(resized=False), lambda _: {}) is not None
