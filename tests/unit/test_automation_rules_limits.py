"""Limits of rules: rates and taken nodes, also across restarts."""

import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import NOON
from harness.rules import DRAIN, MAIL, RulesSite, World, failure, with_care
from steward.automation.errors import OperationForbidden
from steward.automation.rules import limits
from steward.automation.rules.execution import NodeAvailability, RecoveredOutcome
from steward.automation.rules.limits import TakenNode, find_taken_nodes, find_taken_partition
from steward.automation.rules.store import Execution
from steward.core.events import Event


def test_a_rate_is_not_exceeded(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, rate_limit="3/1m"))
    site.give(*(failure(number, f"n{number}") for number in range(1, 10)))
    site.settle()
    assert Counter(site.statuses()) == {"succeeded": 3, "held-back": 6}
    assert site.history()[-1].message == "the rate limit 3/1m is reached"
    site.now += timedelta(seconds=61)
    site.give(failure(20, at=site.now))
    site.settle()
    assert site.statuses()[-1] == "succeeded"


@pytest.mark.parametrize(
    ("own", "everyones", "allowed"), [(5, 100, 5), (100, 7, 7), (None, 10, 10), (0, 100, 0)]
)
def test_only_so_many_nodes_are_taken_away(
    tmp_path: Path, own: int | None, everyones: float, allowed: int
) -> None:
    rule = DRAIN if own is None else with_care(DRAIN, most_nodes_percent=own)
    site = RulesSite(tmp_path, rule, most_nodes_percent=everyones)
    site.give(*(failure(number, f"n{number}") for number in range(1, 31)))
    site.settle()
    assert len(site.world.drained) == allowed
    assert Counter(site.statuses())["held-back"] == 30 - allowed
    refused = [one.message for one in site.history() if one.status == "held-back"]
    assert f"% allows {allowed}" in refused[0]


def test_nodes_that_come_back_make_room(tmp_path: Path) -> None:
    rule = with_care(DRAIN, most_nodes_percent=1)
    site = RulesSite(tmp_path, rule, world=World(250))
    site.give(failure(1, "n1"), failure(2, "n2"), failure(3, "n3"))
    site.settle()
    assert site.world.drained == {"n1", "n2"}
    site.world.drained = {"n2"}
    site.now += timedelta(seconds=1)
    site.give(failure(4, "n4"), failure(5, "n5"))
    site.settle()
    assert site.world.drained == {"n2", "n4"}
    # A node that no longer exists is taken by no rule.
    site.world.nodes.discard("n2")
    site.now += timedelta(seconds=1)
    site.give(failure(6, "n6"))
    site.settle()
    assert site.world.drained >= {"n4", "n6"}


def test_what_a_cap_holds_back_counts_for_the_rate(tmp_path: Path) -> None:
    """For each event slurmctld is asked for its nodes."""
    rule = with_care(DRAIN, rate_limit="5/1h", most_nodes_percent=2)
    site = RulesSite(tmp_path, rule)
    for number in range(1, 20):
        site.give(failure(number, f"n{number}"))
        site.settle()
    held = [one.message for one in site.history() if one.status == "held-back"]
    assert sum("take away" in message for message in held) == 3
    assert sum("rate limit" in message for message in held) == 14


@pytest.mark.parametrize(
    ("action", "infos", "takes", "kept_by"),
    [
        ("slurm.node.update", {"comment": "x", "Weight": 3}, False, ""),
        ("slurm.node.update", {"state": "resume", "reason": "x"}, False, ""),
        ("slurm.node.update", {"state": "DRAIN"}, True, ""),
        ("slurm.node.update", {"node_state": "DRAIN", "reason": "x"}, True, ""),
        ("slurm.node.update", {"NodeState": "down"}, True, ""),
        ("slurm.node.update", {"state_up": "FAIL"}, True, ""),
        ("slurm.node.update", {"st_ate": "DRAIN"}, True, ""),
        ("slurm.node.update", {"features": ""}, True, ""),
        ("slurm.node.update", {"comment": "x", "Comment": "y"}, True, ""),
        ("slurm.node.update", {"nodename": "n3"}, True, ""),
        ("slurm.node.update", {7: "x"}, True, ""),
        ("slurm.node.update", {}, False, ""),
        ("slurm.node.update", '{"state": "DRAIN"}', True, ""),
        ("slurm.partition.update", {"state": "UP", "max_time": "1:00"}, False, ""),
        ("slurm.partition.update", {"state": "DOWN"}, True, "debug"),
        ("slurm.partition.update", {"State_Up": "DOWN", "default": "NO"}, True, "debug"),
        ("slurm.partition.update", {"nodes": "n1"}, True, "*"),
        ("slurm.partition.update", {"RootOnly": "YES"}, True, "*"),
        ("slurm.partition.update", {"state": "DOWN", "partition": "main"}, True, "*"),
        ("slurm.partition.update", "what is this", True, "*"),
    ],
)
def test_what_an_update_takes_away(action: str, infos: object, takes: bool, kept_by: str) -> None:
    given = {"nodes": "n[1-2]", "partition": "debug", "infos": infos}
    assert bool(find_taken_nodes(action, given) or find_taken_partition(action, given)) is takes
    assert limits.find_return_partition(action, given) == kept_by


def test_when_a_node_has_come_back() -> None:
    look = NodeAvailability(
        to_take=frozenset(),
        available=frozenset({"n1", "n2"}),
        names=frozenset({"n1", "n2", "n3"}),
        partition_nodes={"debug": frozenset({"n1"})},
        queried_at=NOON,
    )
    assert look.is_given_back(TakenNode("n1", "r"))
    assert look.is_given_back(TakenNode("n1", "r", "debug"))
    assert look.is_given_back(TakenNode("gone", "r", "*"))
    assert not look.is_given_back(TakenNode("n2", "r", "debug"))
    assert not look.is_given_back(TakenNode("n1", "r", "*"))
    assert not look.is_given_back(TakenNode("n3", "r"))


def test_a_small_cluster_may_lose_one_node(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, DRAIN, world=World(4), most_nodes_percent=10)
    site.give(failure(1, "n1"), failure(2, "n2"))
    site.settle()
    assert site.world.drained == {"n1"}


def test_rules_share_what_all_may_take(tmp_path: Path) -> None:
    second = DRAIN.replace("name: drain", "name: drain_too")
    site = RulesSite(tmp_path, DRAIN, second, most_nodes_percent=3)
    site.give(*(failure(number, f"n{number}") for number in range(1, 20)))
    site.settle()
    assert len(site.world.drained) == 3


def test_a_dry_run_changes_nothing_and_takes_no_room(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(DRAIN, most_nodes_percent=1, dry_run=True))
    site.give(failure(1, "n1"), failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["dry-run", "dry-run"]
    assert site.world.done == []
    assert {event.body.status for event in site.said.values()} == {"dry-run"}


def test_what_is_refused_takes_no_room(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(DRAIN, most_nodes_percent=1))

    def refuse(one: Execution) -> None:
        if one.parameters["nodes"] == "n1":
            raise OperationForbidden("node n1 has the reason 'mine' by ada")

    site.world.ran = refuse
    # Not available, before and afterwards: it is never seen to be given back.
    site.world.drained = {"n1"}
    for number, node in enumerate(("n1", "n2", "n3"), start=1):
        site.give(failure(number, node))
        site.settle()
    assert site.statuses() == ["failed", "succeeded", "held-back"]


def test_a_storm_keeps_to_its_bounds(tmp_path: Path) -> None:
    often = with_care(MAIL, rate_limit="20/1m", dedup_window="10s")
    drain = with_care(DRAIN, rate_limit="100/1h")
    site = RulesSite(tmp_path, drain, often, most_nodes_percent=4)
    events = [failure(number, f"n{number % 100 + 1}", at=NOON) for number in range(1, 2001)]
    for start in range(0, len(events), 200):
        site.give(*events[start : start + 200])
        site.engine.tick(site.append)
    site.settle()
    assert len(site.world.drained) == 4
    assert sum(rule == "mail" for rule, _, _ in site.world.done) == 20
    assert len(site.history()) == 4000
    assert len(site.said) == 4000
    assert not site.open_()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(1, 8)),
        st.tuples(st.sampled_from(["again", "tick", "kill", "settle", "repair"]), st.just(0)),
        st.tuples(st.just("rest"), st.integers(1, 1200)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=25)
@given(STEPS)
def test_whatever_comes_in_whatever_order_bounds_are_kept(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as path:
        drain = with_care(DRAIN, rate_limit="6/10m")
        mail = with_care(MAIL, rate_limit="4/10m", dedup_window="1m")
        site = RulesSite(Path(path), drain, mail, most_nodes_percent=3)
        world = site.world
        world.found = lambda one: RecoveredOutcome(
            state="done" if (one.rule, one.event) in world.acted else "not-begun"
        )
        given_events: list[Event] = []
        for step, number in steps:
            if step == "give":
                first = len(given_events) + 1
                given_events += [
                    failure(first + n, f"n{(first + n) % 7}", at=site.now) for n in range(number)
                ]
                site.give(*given_events[-number:])
            elif step == "again" and given_events:
                site.give(*given_events[-5:])
            elif step == "tick":
                site.engine.tick(site.append)
            elif step == "kill":
                site.kill()
            elif step == "settle":
                site.settle()
            elif step == "repair":
                world.drained = set()
            elif step == "rest":
                site.now += timedelta(seconds=number)
            assert len(world.drained) <= 3
        site.kill()
        site.settle()
        history = site.history()
        assert Counter((one.rule, one.event) for one in history) == Counter(
            (rule, event.key) for rule in ("drain", "mail") for event in given_events
        )
        assert max(Counter(world.acted).values(), default=0) <= 1
        assert set(world.acted) == {
            (one.rule, one.event) for one in history if one.status == "succeeded"
        }
        assert len(site.said) == len(history)
        for rule, most in (("drain", 6), ("mail", 4)):
            made = [
                one.triggered for one in history if one.rule == rule and one.status == "succeeded"
            ]
            for moment in made:
                within = [one for one in made if moment <= one < moment + timedelta(minutes=10)]
                assert len(within) <= most
        site.engine.close()
