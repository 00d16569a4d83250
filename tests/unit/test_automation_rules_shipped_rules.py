"""Rules that Steward ships: they do what they say, and nothing else."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator

from harness.events import NOON
from harness.rules import RulesSite, failure
from steward.automation.operation import find_operation
from steward.automation.operation import parse_operation_parameters as read_parameters
from steward.automation.rules import rulebook
from steward.automation.settings import RulesSettings
from steward.core.events import BANK_THRESHOLD, RUN_END, BankThreshold, Event
from steward.core.records import JobRecord
from steward.core.usage import RunEvent

SHIPPED = sorted(Path(rulebook.SHIPPED_RULES_DIR).glob("*.yaml"))

STACKSTORMS = {
    "type": "object",
    "required": ["name", "trigger", "action"],
    "properties": {
        **{name: {"type": "string"} for name in ("name", "pack", "description", "ref", "uid")},
        "enabled": {"type": "boolean"},
        "trigger": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string"}, "parameters": {"type": "object"}},
        },
        "criteria": {"type": "object"},
        "action": {
            "type": "object",
            "required": ["ref"],
            "properties": {
                "ref": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "additionalProperties": False,
        },
        "context": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "object"}},
    },
    "additionalProperties": False,
}
"""StackStorm's own schema of a rule."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_stackstorm_would_take_it(path: Path) -> None:
    Draft4Validator(STACKSTORMS).validate(yaml.safe_load(path.read_text()))


def test_all_five_are_there_and_right() -> None:
    found = rulebook.load_rulebook(RulesSettings(directories=("shipped",)))
    assert found.troubles == ()
    # No mail is sent, and no node is drained, before an administrator enables a rule.
    assert {name: rule.enabled for name, rule in found.rules.items()} == {
        "bank_threshold_notify": False,
        "job_node_fail_requeue": False,
        "node_down_notify": False,
        "node_down_often_drain": False,
        "node_drained_collect": False,
    }
    assert all(rule.shipped for rule in found.rules.values())


@pytest.fixture
def site(tmp_path: Path) -> RulesSite:
    site = RulesSite(tmp_path, directories=(str(tmp_path / "rules.d"), "shipped"))
    for path in SHIPPED:
        if path.stem != "job_node_fail_requeue":
            site.store.set_switch(path.stem, True, "root", NOON)
    return site


def done(site: RulesSite) -> list[tuple[str, dict[str, Any]]]:
    """Return the actions that ran, with their parameters."""
    for _rule, action, parameters in site.world.done:
        read_parameters(find_operation(action), parameters)
    found = [(rule, parameters) for rule, _action, parameters in site.world.done]
    return sorted(found, key=lambda one: one[0])


def test_a_node_that_fails_is_told_and_the_third_time_drained(site: RulesSite) -> None:
    for number in range(1, 4):
        site.now = NOON + timedelta(hours=number)
        site.give(failure(number, at=site.now, reason="Not responding", partitions=("debug",)))
        site.settle()
    found = done(site)
    assert [rule for rule, _ in found] == ["node_down_notify"] * 3 + ["node_down_often_drain"]
    assert found[0][1]["subject"] == "c1: node n1 is DOWN"
    assert "Reason: Not responding\nPartitions: debug\n" in found[0][1]["body"]
    assert found[3][1] == {"nodes": "n1", "reason": "failed 3 times within a day"}


@pytest.mark.parametrize(
    ("state", "old_state"),
    [
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD"),
        ("IDLE+CLOUD+POWERING_UP", "IDLE+CLOUD+POWERED_DOWN"),
        ("IDLE+PLANNED", "IDLE"),
        ("MAINT", "IDLE"),
        ("IDLE+MAINTENANCE+RESERVED", "IDLE"),
        ("IDLE+REBOOT_REQUESTED", "IDLE"),
        ("DOWN+REBOOT_ISSUED", "IDLE"),
        ("ALLOCATED", "IDLE"),
        ("REMOVED", "IDLE"),
        ("IDLE", ""),
        ("MIXED+DRAIN", "MIXED"),
    ],
)
def test_what_is_no_failure_is_left_alone(site: RulesSite, state: str, old_state: str) -> None:
    # The field 'failed' marks the sensor's failures; none of these is one.
    for number in range(1, 6):
        site.give(failure(number, state=state, old_state=old_state, failed=False))
    site.settle()
    assert site.history() == []


def test_a_drained_nodes_last_jobs_are_collected_once(site: RulesSite) -> None:
    def change(number: int, old: str, new: str) -> Event:
        return failure(number, state=new, old_state=old, failed=False)

    site.give(
        change(1, "MIXED", "MIXED+DRAIN"),
        change(2, "MIXED+DRAIN", "IDLE+COMPLETING+DRAIN"),
        change(3, "IDLE+COMPLETING+DRAIN", "IDLE+DRAIN"),
        change(4, "IDLE+DRAIN", "IDLE+DRAIN"),
    )
    site.settle()
    assert done(site) == [("node_drained_collect", {"nodes": "n1", "limit": 20})]
    assert site.history()[0].event.endswith(":3")


def ended(number: int, **record: Any) -> Event:
    given: dict[str, Any] = {"job_id": 7, "state": "NODE_FAIL", "failed_node": "n3", **record}
    fact = RunEvent(
        job_id=7, first_submit=NOON, restarts=0, record=JobRecord(**given), correction=number > 9
    )
    return Event(
        kind=RUN_END,
        cluster="c1",
        key=f"run.end:{number}",
        at=NOON,
        seen_at=NOON,
        source="jobs",
        body=fact,
        id=number,
    )


def test_a_job_whose_node_failed_is_queued_again_elsewhere_where_that_is_wanted(
    site: RulesSite,
) -> None:
    site.give(ended(1))
    site.settle()
    assert site.history() == []
    site.store.set_switch("job_node_fail_requeue", True, "root", NOON)
    site.give(
        ended(2),
        ended(3, state="FAILED"),
        ended(4, restarts=3),
        # The same said better.
        ended(10),
    )
    site.settle()
    assert done(site) == [("job_node_fail_requeue", {"jobids": [7], "exclude": "n3"})]


def test_an_allocation_that_runs_out_is_told(site: RulesSite) -> None:
    fact = BankThreshold(
        account="chem", allocation=3, kind="used", value=80, balance=2_000_000, total=10_000_000
    )
    site.give(
        Event(
            kind=BANK_THRESHOLD,
            cluster="c1",
            key="bank.threshold:1",
            at=NOON,
            seen_at=NOON,
            source="bank",
            body=fact,
            id=1,
        )
    )
    site.settle()
    ((rule, parameters),) = done(site)
    assert rule == "bank_threshold_notify"
    assert parameters["subject"] == "account chem: allocation 3 is used to 80 %"
    assert "2.0 of 10.0 left" in parameters["body"]
