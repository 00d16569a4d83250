"""Rule consumer: it acts once on each event that matches."""

from datetime import timedelta
from pathlib import Path

import pytest

from harness.events import NOON
from harness.rules import DRAIN, MAIL, RulesSite, failure, with_care
from steward.automation.rules import rulebook
from steward.automation.rules.rulebook import Rulebook
from steward.automation.rules.store import RulesStore
from steward.automation.settings import RulesSettings


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
    assert site.engine.cursor() == 2


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
    assert site.history()[0].message == "the event is 3599s old, more than 10m"


def test_the_same_subject_is_acted_on_once_in_a_window(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, dedup_window="10m"))
    site.give(failure(1), failure(2), failure(3, "n2"))
    site.settle()
    assert site.statuses() == ["succeeded", "held-back", "succeeded"]
    assert site.history()[1].message == "duplicate within 10m of execution 1"
    assert [one.subject_text for one in site.history()] == ["c1 n1", "c1 n1", "c1 n2"]
    site.now += timedelta(minutes=11)
    site.give(failure(4, at=site.now))
    site.settle()
    assert site.statuses()[-1] == "succeeded"


def test_the_subject_can_be_another(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, dedup_window="10m", dedup_by=["trigger.cluster"]))
    site.give(failure(1), failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["succeeded", "held-back"]


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


def test_a_rule_that_is_switched_off_does_not_do_what_waits(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL)
    site.give(failure(1))
    store = RulesStore(site.settings.state_dir)
    store.set_switch("mail", False, "root", NOON)
    store.close()
    site.settle()
    site.give(failure(2, "n2"))
    site.settle()
    assert site.statuses() == ["held-back"]
    assert site.world.done == []


def test_what_ended_long_ago_is_forgotten(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, MAIL)
    site.give(failure(1))
    site.settle()
    site.now += timedelta(days=site.settings.history_days + 1)
    site.restart()
    site.give(failure(2, at=site.now))
    site.settle()
    assert [one.event for one in site.history()] == ["node.state:n1:2"]


def test_criteria_that_take_ages_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steward.automation.rules.decisions.LIMIT_S", 0.05)
    slow = MAIL.replace(
        "criteria:", "criteria:\n  trigger.reason: {type: regex, pattern: '(a+)+$'}"
    ).replace("name: mail", "name: slow")
    site = RulesSite(tmp_path, slow, MAIL)
    # The second one is not even evaluated: a batch of such events would delay all others.
    site.give(*(failure(number, reason="a" * 40 + "!") for number in (1, 2)))
    site.settle()
    assert sorted((one.rule, one.status, one.message) for one in site.history()) == [
        ("mail", "succeeded", ""),
        ("mail", "succeeded", ""),
        ("slow", "failed", "the criteria of rule slow took longer than 0.05 s"),
    ]


def test_what_is_too_old_after_a_long_rest_is_not_begun(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, with_care(MAIL, max_age="10m"))
    site.give(failure(1))
    site.now += timedelta(hours=1)
    site.restart()
    site.settle()
    assert site.statuses() == ["held-back"]
    assert site.world.done == []


def test_rule_files_are_read_outside_the_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = RulesSite(tmp_path, MAIL)
    load = rulebook.load_rulebook
    loads: list[bool] = []

    def load_rulebook(settings: RulesSettings) -> Rulebook:
        loads.append(site.store.database.connection.in_transaction)
        return load(settings)

    monkeypatch.setattr(rulebook, "load_rulebook", load_rulebook)
    site.give(failure(1))
    assert loads == [False]
