"""What rules do about events: once, within their bounds, whatever happens meanwhile."""

import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_site import DRAIN, MAIL, NOON, Killed, RulesSite, World, failure, ran, with_care

from steward.automation.errors import NotYours
from steward.automation.rules import caps
from steward.automation.rules.hand import Found, Look
from steward.automation.rules.store import Store
from steward.automation.rules.tables import Execution
from steward.events import Event
from steward.slurm import SlurmUnavailable


def test_a_rule_acts_once_on_an_event_and_tells_it(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, DRAIN, MAIL)
    site.give(failure(1), failure(2, failed=False, state="IDLE"))
    site.settle()
    assert sorted(site.world.done) == [
        ("drain", "slurm.node.drain", {"nodes": "n1", "reason": "failed: "}),
        ("mail", "notify.email", {"to": ["root"], "subject": "n1"}),
    ]
    # The same again, as after a crash before the cursor was moved.
    site.restart()
    site.give(failure(1))
    site.settle()
    assert len(site.world.done) == 2
    assert site.statuses() == ["succeeded", "succeeded"]
    told = sorted(site.said.values(), key=lambda event: event.key)
    assert [event.key for event in told] == [
        "rule.execution:drain:node.state:n1:1",
        "rule.execution:mail:node.state:n1:1",
    ]
    assert told[0].body.status == "succeeded"
    assert told[0].body.parameters == {"nodes": "n1", "reason": "failed: "}
    assert site.consumer.cursor() == 1


def test_what_a_reason_holds_is_never_a_template(tmp_path: Path) -> None:
    reason = "{{ 7 * 7 }} {% for x in range(9) %}{{ trigger }}{% endfor %} $(id) `id`; rm -rf /"
    site = RulesSite(tmp_path, DRAIN)
    site.give(failure(1, reason=reason))
    site.settle()
    assert site.world.done[0][2]["reason"] == f"failed: {reason}"


def test_what_was_seen_before_there_were_rules_is_not_acted_on(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL)
    site.give(failure(1, at=NOON - timedelta(seconds=5)), failure(2))
    site.settle()
    assert [one.event for one in site.history()] == ["node.state:n1:2"]


def test_old_events_are_held_back(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, max_age="10m"))
    site.now = NOON + timedelta(hours=1)
    site.give(failure(1), failure(2, at=site.now))
    site.settle()
    assert site.statuses() == ["held-back", "succeeded"]
    assert site.history()[0].message == "it is 3599s old: over 10m"


def test_the_same_subject_is_acted_on_once_in_a_window(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, dedup_window="10m"))
    site.give(failure(1), failure(2), failure(3, "n2"))
    site.settle()
    assert site.statuses() == ["succeeded", "held-back", "succeeded"]
    assert site.history()[1].message == "the same was acted on within 10m, by execution 1"
    site.now += timedelta(minutes=11)
    site.give(failure(4, at=site.now))
    site.settle()
    assert site.statuses()[-1] == "succeeded"


def test_the_subject_can_be_another(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, dedup_window="10m", dedup_by=["trigger.cluster"]))
    site.give(failure(1), failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["succeeded", "held-back"]


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
    assert f"% are {allowed}" in refused[0]


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
    # One that is not there any more is nobody's.
    site.world.nodes.discard("n2")
    site.now += timedelta(seconds=1)
    site.give(failure(6, "n6"))
    site.settle()
    assert site.world.drained >= {"n4", "n6"}


def test_what_a_cap_holds_back_counts_for_the_rate(tmp_path: Path) -> None:
    """Each has slurmctld asked what nodes there are."""
    rule = with_care(DRAIN, rate_limit="5/1h", most_nodes_percent=2)
    site = RulesSite(tmp_path, rule)
    for number in range(1, 20):
        site.give(failure(number, f"n{number}"))
        site.settle()
    held = [one.message for one in site.history() if one.status == "held-back"]
    assert sum("taken away" in message for message in held) == 3
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
    assert bool(caps.nodes_taken(action, given) or caps.partition_taken(action, given)) is takes
    assert caps.kept_by(action, given) == kept_by


def test_when_a_node_has_come_back() -> None:
    look = Look(
        wanted=frozenset(),
        available=frozenset({"n1", "n2"}),
        names=frozenset({"n1", "n2", "n3"}),
        members={"debug": frozenset({"n1"})},
        seen=NOON,
    )
    assert look.has_back(caps.Taken("n1", "r"))
    assert look.has_back(caps.Taken("n1", "r", "debug"))
    assert look.has_back(caps.Taken("gone", "r", "*"))
    assert not look.has_back(caps.Taken("n2", "r", "debug"))
    assert not look.has_back(caps.Taken("n1", "r", "*"))
    assert not look.has_back(caps.Taken("n3", "r"))


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


def test_failures_are_counted_over_the_history(tmp_path: Path) -> None:
    often = DRAIN.replace(
        "criteria:", "criteria:\n  trigger.failures_1d: {type: greaterthan, pattern: 2}"
    )
    site = RulesSite(tmp_path, with_care(often))
    day = timedelta(days=1)
    site.now = NOON + 2 * day
    for number, at in enumerate((NOON, NOON + day, NOON + 1.5 * day, NOON + 2 * day), start=1):
        site.give(failure(number, at=at))
    site.give(failure(5, "n2", at=NOON + 2 * day))
    site.settle()
    # The first is a day too old to count for the fourth, which is the third of its day.
    assert [one.event for one in site.history()] == []
    site.give(failure(6, at=NOON + 2 * day))
    site.settle()
    assert [one.event for one in site.history()] == ["node.state:n1:6"]


def test_what_failed_is_tried_again_with_a_longer_wait_each_time(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, retries=2, backoff="10s"))
    site.world.ran = lambda one: ran(one, status="failed", message="no mail today")
    site.give(failure(1))
    waits = []
    for _ in range(3):
        site.settle()
        if site.open_():
            waits.append((site.open_()[0].due - site.now).total_seconds())
            site.now = site.open_()[0].due
    assert waits == [10, 20]
    (one,) = site.history()
    assert (one.status, one.message, one.tries) == ("failed", "no mail today", 3)


def test_without_retries_what_failed_has_failed(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL)
    site.world.ran = lambda one: ran(one, status="failed", message="no")
    site.give(failure(1))
    site.settle()
    assert site.statuses() == ["failed"]


def test_what_could_not_begin_is_tried_until_it_is_too_old(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, max_age="5m"))

    def away(one: Execution) -> None:
        raise SlurmUnavailable("slurmctld does not answer", ())

    site.world.ran = away
    site.give(failure(1))
    site.settle()
    assert site.statuses() == ["waiting"]
    site.now += timedelta(minutes=1)
    site.settle()
    site.world.ran = lambda _one: None
    site.now += timedelta(minutes=1)
    site.settle()
    assert site.statuses() == ["succeeded"]
    assert site.history()[0].tries == 1
    site.world.ran = away
    site.give(failure(2, at=site.now))
    site.settle()
    site.now += timedelta(minutes=6)
    site.settle()
    assert site.statuses()[-1] == "held-back"


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(DRAIN, retries=5))

    def refuse(one: Execution) -> None:
        raise NotYours("n1 shows the reason 'mine' by ada")

    site.world.ran = refuse
    site.give(failure(1))
    site.settle()
    (one,) = site.history()
    assert (one.status, one.message) == ("failed", "n1 shows the reason 'mine' by ada")


def test_what_is_refused_takes_no_room(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(DRAIN, most_nodes_percent=1))

    def refuse(one: Execution) -> None:
        if one.parameters["nodes"] == "n1":
            raise NotYours("n1 shows the reason 'mine' by ada")

    site.world.ran = refuse
    # Not available, before and afterwards: it is never seen to be given back.
    site.world.drained = {"n1"}
    for number, node in enumerate(("n1", "n2", "n3"), start=1):
        site.give(failure(number, node))
        site.settle()
    assert site.statuses() == ["failed", "succeeded", "held-back"]


def test_a_fault_of_ours_ends_its_execution_alone(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, DRAIN, MAIL)

    def break_(one: Execution) -> None:
        if one.rule == "drain":
            raise ZeroDivisionError

    site.world.ran = break_
    site.give(failure(1))
    site.settle()
    assert {one.rule: one.status for one in site.history()} == {
        "drain": "failed",
        "mail": "succeeded",
    }


@pytest.mark.parametrize(
    ("is_done", "on_unknown", "status", "tries"),
    [
        (True, "end", "succeeded", 1),
        (False, "end", "timeout", 3),
        (None, "end", "timeout", 1),
        (None, "repeat", "timeout", 3),
    ],
)
def test_after_a_time_out_slurm_is_asked(
    tmp_path: Path, is_done: bool | None, on_unknown: str, status: str, tries: int
) -> None:
    rule = with_care(DRAIN, retries=2, backoff="1s", on_unknown=on_unknown)
    site = RulesSite(tmp_path, rule)
    site.world.ran = lambda one: ran(one, status="timeout", message="too slow")
    site.world.checked = lambda _one: is_done
    site.give(failure(1))
    for _ in range(4):
        site.settle()
        site.now += timedelta(seconds=30)
    (one,) = site.history()
    assert (one.status, one.tries) == (status, tries)


@pytest.mark.parametrize(
    ("traces", "on_unknown", "statuses", "times"),
    [
        ("not-begun", "end", ["succeeded"], 1),
        ("done", "end", ["succeeded"], 0),
        ("not-done", "end", ["succeeded"], 1),
        ("unseen", "end", ["unknown"], 0),
        ("unseen", "repeat", ["succeeded"], 1),
        ("running", "end", ["unknown"], 0),
    ],
)
def test_what_a_crash_left_open_is_looked_up(
    tmp_path: Path, traces: str, on_unknown: str, statuses: list[str], times: int
) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, on_unknown=on_unknown))
    hangs = threading.Event()
    # The process is killed while the action is under way; what it does then is lost on us.
    site.world.ran = lambda one: (hangs.wait(60), ran(one))[1]
    site.give(failure(1))
    site.consumer.tick(site.append)
    assert site.statuses() == ["started"]
    site.world.ran = lambda _one: None
    site.world.found = lambda _one: Found(traces=traces)  # type: ignore[arg-type]
    site.restart()
    site.settle()
    if traces not in ("not-begun", "done"):
        # What was begun may still be at it, until its time is over.
        assert site.statuses() == ["started"]
        assert site.world.done == []
        site.now += timedelta(seconds=1)
        site.settle()
    hangs.set()
    assert site.statuses() == statuses
    assert len(site.world.done) == times
    assert len(site.said) == 1


def test_a_slow_action_holds_up_its_own_rule_alone(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, DRAIN, MAIL)
    hangs = threading.Event()
    site.world.ran = lambda one: None if one.rule == "mail" else (hangs.wait(60), None)[1]
    site.give(failure(1, "n1"), failure(2, "n2"))
    for _ in range(2000):
        site.consumer.tick(site.append)
        if site.statuses().count("succeeded") == 2:
            break
        time.sleep(0.002)
    by_rule = {(one.rule, one.event[-1]): one.phase for one in site.history()}
    assert by_rule == {
        ("drain", "1"): "started",
        ("drain", "2"): "waiting",
        ("mail", "1"): "ended",
        ("mail", "2"): "ended",
    }
    hangs.set()
    site.settle()
    assert set(site.statuses()) == {"succeeded"}


def test_an_action_that_never_comes_back_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.automation.rules.executing.GRACE_S", 0.05)
    site = RulesSite(tmp_path, MAIL)
    hangs = threading.Event()
    site.world.ran = lambda one: (hangs.wait(60), None)[1] if one.event.endswith(":1") else None
    site.give(failure(1), failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["timeout", "succeeded"]
    hangs.set()


def test_a_rule_that_is_switched_off_does_not_do_what_waits(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL)
    site.give(failure(1))
    store = Store(site.settings.state_dir)
    store.switch("mail", False, "root", NOON)
    store.close()
    site.settle()
    site.give(failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["held-back"]
    assert site.world.done == []


def test_what_ended_long_ago_is_forgotten(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL, history_days=1)
    site.give(failure(1))
    site.settle()
    site.now += timedelta(days=2)
    site.restart()
    site.give(failure(2, at=site.now))
    site.settle()
    assert [one.event for one in site.history()] == ["node.state:n1:2"]


def test_criteria_that_take_ages_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steward.automation.rules.deciding.LIMIT_S", 0.05)
    slow = MAIL.replace(
        "criteria:", "criteria:\n  trigger.reason: {type: regex, pattern: '(a+)+$'}"
    ).replace("name: mail", "name: slow")
    site = RulesSite(tmp_path, slow, MAIL)
    # The second is not even looked at: a batch of such events would hold up all others.
    site.give(*(failure(number, reason="a" * 40 + "!") for number in (1, 2)))
    site.settle()
    assert sorted((one.rule, one.status, one.message) for one in site.history()) == [
        ("mail", "succeeded", ""),
        ("mail", "succeeded", ""),
        ("slow", "failed", "the criteria of rule slow took longer than 0.05 s"),
    ]


def give_and_settle(site: RulesSite, *events: Event) -> None:
    site.give(*events)
    site.settle()


@pytest.mark.parametrize("moment", ["append", "decided", "start", "end"])
def test_kills_at_each_step_leave_each_execution_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    rule = with_care(MAIL, rate_limit="2/1h")
    site = RulesSite(tmp_path, rule)
    events = [failure(number, f"n{number}") for number in range(1, 6)]
    site.world.found = lambda _one: Found(traces="not-begun")
    if moment == "append":
        site.kill_at_append = True
        with pytest.raises(Killed):
            site.give(*events)
        site.kill_at_append = False
    else:
        if moment != "decided":
            site.give(*events)
        name = {"decided": "put", "start": "start", "end": "end"}[moment]
        original = getattr(Store, name)
        left = [2]

        def killed(self: Store, *args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return original(self, *args, **more)

        monkeypatch.setattr(Store, name, killed)
        with pytest.raises(Killed):
            give_and_settle(site, *events)
        monkeypatch.undo()
    site.restart()
    assert site.consumer.cursor() in (0, 5)
    site.give(*events)
    site.settle()
    assert Counter(site.statuses()) == {"succeeded": 2, "held-back": 3}
    assert len({(one.rule, one.event) for one in site.history()}) == 5
    assert len(site.said) == 5


def test_a_storm_keeps_to_its_bounds(tmp_path: Path) -> None:
    often = with_care(MAIL, rate_limit="20/1m", dedup_window="10s")
    drain = with_care(DRAIN, rate_limit="100/1h")
    site = RulesSite(tmp_path, drain, often, most_nodes_percent=4)
    events = [failure(number, f"n{number % 100 + 1}", at=NOON) for number in range(1, 2001)]
    for start in range(0, len(events), 200):
        site.give(*events[start : start + 200])
        site.consumer.tick(site.append)
    site.settle()
    assert len(site.world.drained) == 4
    assert sum(rule == "mail" for rule, _, _ in site.world.done) == 20
    assert len(site.history()) == 4000
    assert len(site.said) == 4000
    assert not site.open_()


def test_what_is_under_way_at_the_end_is_waited_for_and_told_at_the_next_start(
    tmp_path: Path,
) -> None:
    site = RulesSite(tmp_path, MAIL)
    ends = threading.Event()
    site.world.ran = lambda one: (ends.wait(0.2), None)[1]
    site.give(failure(1))
    site.consumer.tick(site.append)
    assert site.statuses() == ["started"]
    site.consumer.close()
    assert site.statuses() == ["succeeded"]
    assert site.said == {}
    site.start()
    site.settle()
    assert [event.body.status for event in site.said.values()] == ["succeeded"]
    assert len(site.world.done) == 1


def test_what_is_too_old_after_a_long_rest_is_not_begun(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, max_age="10m"))
    site.give(failure(1))
    site.now += timedelta(hours=1)
    site.restart()
    site.settle()
    assert site.statuses() == ["held-back"]
    assert site.world.done == []


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
        world.found = lambda one: Found(
            traces="done" if (one.rule, one.event) in world.acted else "not-begun"
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
                site.consumer.tick(site.append)
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
            made = [one.made for one in history if one.rule == rule and one.status == "succeeded"]
            for moment in made:
                within = [one for one in made if moment <= one < moment + timedelta(minutes=10)]
                assert len(within) <= most
        site.consumer.close()
