"""Executions of rules that fail, hang or are killed: each ends once, with a record."""

import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from harness.rules import DRAIN, MAIL, Killed, RulesSite, failure, ran, with_care
from steward.automation.errors import OperationForbidden
from steward.automation.rules.execution import RecoveredOutcome
from steward.automation.rules.store import Execution, RulesStore
from steward.core.events import Event
from steward.slurm import SlurmUnavailable


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
    assert (one.status, one.message, one.attempts) == ("failed", "no mail today", 3)


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
    assert site.history()[0].attempts == 1
    site.world.ran = away
    site.give(failure(2, at=site.now))
    site.settle()
    site.now += timedelta(minutes=6)
    site.settle()
    assert site.statuses()[-1] == "held-back"


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(DRAIN, retries=5))

    def refuse(one: Execution) -> None:
        raise OperationForbidden("node n1 has the reason 'mine' by ada")

    site.world.ran = refuse
    site.give(failure(1))
    site.settle()
    (one,) = site.history()
    assert (one.status, one.message) == ("failed", "node n1 has the reason 'mine' by ada")


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
    assert (one.status, one.attempts) == (status, tries)


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
    # The process is killed while the action runs; its result is lost.
    site.world.ran = lambda one: (hangs.wait(60), ran(one))[1]
    site.give(failure(1))
    site.engine.tick(site.append)
    assert site.statuses() == ["started"]
    site.world.ran = lambda _one: None
    site.world.found = lambda _one: RecoveredOutcome(state=traces)  # type: ignore[arg-type]
    site.restart()
    site.settle()
    if traces not in ("not-begun", "done"):
        # The started action may still run, until its time-out.
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
        site.engine.tick(site.append)
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
    monkeypatch.setattr("steward.automation.rules.execution.GRACE_S", 0.05)
    site = RulesSite(tmp_path, MAIL)
    hangs = threading.Event()
    site.world.ran = lambda one: (hangs.wait(60), None)[1] if one.event.endswith(":1") else None
    site.give(failure(1), failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["timeout", "succeeded"]
    hangs.set()


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
    site.world.found = lambda _one: RecoveredOutcome(state="not-begun")
    if moment == "append":
        site.kill_at_append = True
        with pytest.raises(Killed):
            site.give(*events)
        site.kill_at_append = False
    else:
        if moment != "decided":
            site.give(*events)
        name = {"decided": "insert", "start": "record_start", "end": "record_end"}[moment]
        original = getattr(RulesStore, name)
        left = [2]

        def killed(self: RulesStore, *args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return original(self, *args, **more)

        monkeypatch.setattr(RulesStore, name, killed)
        with pytest.raises(Killed):
            give_and_settle(site, *events)
        monkeypatch.undo()
    site.restart()
    assert site.engine.cursor() in (0, 5)
    site.give(*events)
    site.settle()
    assert Counter(site.statuses()) == {"succeeded": 2, "held-back": 3}
    assert len({(one.rule, one.event) for one in site.history()}) == 5
    assert len(site.said) == 5


def test_what_is_under_way_at_the_end_is_waited_for_and_told_at_the_next_start(
    tmp_path: Path,
) -> None:
    site = RulesSite(tmp_path, MAIL)
    ends = threading.Event()
    site.world.ran = lambda one: (ends.wait(0.2), None)[1]
    site.give(failure(1))
    site.engine.tick(site.append)
    assert site.statuses() == ["started"]
    site.engine.close()
    assert site.statuses() == ["succeeded"]
    assert site.said == {}
    site.start()
    site.settle()
    assert [event.body.status for event in site.said.values()] == ["succeeded"]
    assert len(site.world.done) == 1
