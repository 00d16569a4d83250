"""Recovery of nodes: reported after a failure, not after mere absence."""

from datetime import UTC, datetime

import msgspec
import pytest

from steward.automation.rules.triggers import make_trigger
from steward.capture.sensor.changes import NodeFacts, compare_snapshots
from steward.core.events import NODE_STATE, Event, NodeState

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
SILENT = "IDLE+NOT_RESPONDING"
GONE = "DOWN+NOT_RESPONDING"


def told(*states: str, usage: bool = True) -> list[NodeState]:
    """Return the events for these states, with the sensor restarted after each poll."""
    known: dict[str, NodeFacts] = {}
    news: list[NodeState] = []
    for state in states:
        # Each poll is repeated: the second one gives no events.
        for _ in range(2):
            for change in compare_snapshots(
                {NODE_STATE: known},
                {NODE_STATE: {"n1": NodeFacts(state=state)}},
                source="interval",
                at=NOON,
                usage=usage,
            ):
                kept = msgspec.json.encode(change.facts)
                known = {"n1": msgspec.json.decode(kept, type=NodeFacts)}
                if isinstance(change.body, NodeState):
                    news.append(change.body)
    return news


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(
    ("states", "recovered"),
    [
        (["IDLE+DRAIN", "IDLE"], []),
        (["IDLE+DRAIN", SILENT, "IDLE"], []),
        (["ALLOCATED+DRAIN", "ALLOCATED+NOT_RESPONDING", "ALLOCATED"], []),
        (["DOWN+REBOOT_ISSUED", SILENT, "IDLE"], []),
        (["IDLE+POWERING_DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP", "IDLE"], []),
        (["DOWN", "IDLE"], ["IDLE"]),
        ([GONE, SILENT, "MIXED"], ["MIXED"]),
        (["ALLOCATED+NOT_RESPONDING", "ALLOCATED", "IDLE"], ["ALLOCATED"]),
        # An administrator has drained it meanwhile.
        ([GONE, "DOWN+DRAIN+NOT_RESPONDING", "IDLE+DRAIN", "IDLE"], ["IDLE"]),
        (["IDLE+FAIL", "IDLE+DRAIN", SILENT, "IDLE"], ["IDLE"]),
        (["DOWN", "DOWN+REBOOT_ISSUED", "IDLE+DRAIN", SILENT, "IDLE"], ["IDLE"]),
        # Resumed in vain, and then with success.
        (["IDLE+DRAIN", SILENT, GONE, "IDLE"], ["IDLE"]),
        # Once: a later drain has other reasons.
        (["DOWN", "IDLE", "IDLE+DRAIN", SILENT, "IDLE"], ["IDLE"]),
        # Turned off and on in between: what does not boot again was not back.
        (["DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP", "DOWN", "IDLE"], ["IDLE"]),
        (["DOWN", "UNKNOWN+POWERED_DOWN", "ALLOCATED+POWERING_UP", "ALLOCATED"], ["ALLOCATED"]),
        (["DOWN+POWERED_DOWN", "IDLE+POWERED_DOWN", "IDLE+DRAIN", "IDLE"], ["IDLE"]),
        # Each time that it fails.
        (["DOWN", "IDLE", "IDLE+FAIL", "IDLE"], ["IDLE", "IDLE"]),
    ],
)
def test_what_is_back_after_a_failure_has_recovered(
    states: list[str], recovered: list[str], usage: bool
) -> None:
    news = told("IDLE", *states, usage=usage)
    assert [body.state for body in news if body.recovered] == recovered


def test_a_node_that_does_not_boot_again_fails_again() -> None:
    news = told("IDLE", "DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP", "DOWN")
    assert [(body.failed, body.recovered) for body in news] == [
        (False, False),
        (True, False),
        (False, False),
        (False, False),
        (True, False),
    ]


def test_a_node_that_failed_before_anybody_looked_recovers() -> None:
    assert [body.recovered for body in told("DOWN", SILENT, "IDLE")] == [False, False, True]
    assert [body.recovered for body in told("IDLE+DRAIN", SILENT, "IDLE")] == [False] * 3


def test_only_what_the_state_does_not_show_is_kept() -> None:
    shown = NodeFacts(state="DOWN")
    assert (
        compare_snapshots(
            {NODE_STATE: {"n1": shown}}, {NODE_STATE: {"n1": shown}}, source="interval", at=NOON
        )
        == []
    )


@pytest.mark.parametrize("recovered", [True, False])
def test_rules_are_told_what_the_event_says(recovered: bool) -> None:
    """Rules use the event's field, not its two states: a resumed node looks as if it had failed."""
    event = Event(
        kind=NODE_STATE,
        cluster="c1",
        key="k",
        at=NOON,
        seen_at=NOON,
        source="sensor",
        body=NodeState(node="n1", state="IDLE", old_state=SILENT, recovered=recovered),
    )
    trigger = make_trigger(event, lambda _: {})
    assert trigger is not None
    assert trigger.payload["recovered"] is recovered
