"""Rule actions: permissions, and their command line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.rules import DRAIN, MAIL, RulesSite, failure
from steward.automation.errors import OperationForbidden
from steward.automation.rules import actions
from steward.automation.rules.actions import RulesContext
from steward.automation.rules.requests import (
    CheckRulesRequest,
    ListRulesRequest,
    RuleProblem,
    RulesHistoryRequest,
    RuleTrialRequest,
    SwitchRuleRequest,
)
from steward.automation.settings import SHIPPED, RulesSettings
from steward.cli.app import run
from steward.core.access import Access, Caller
from steward.core.actions import Registry
from steward.core.config import AccessSettings, Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.errors import UsageError
from steward.core.sqlite import SqliteUnavailable
from steward.daemon.registry import import_actions

OLGA = Caller(uid=4001, user="olga")
CARL = Caller(uid=4002, user="carl")
ADA = Caller(uid=4003, user="ada")


def room_of(settings: Settings) -> RulesContext:
    access = Access(
        AccessSettings(operators=("olga",), administrators=("carl",)), 0, lambda _cluster: None
    )
    return RulesContext(settings, access=access)


@pytest.fixture
def site(tmp_path: Path) -> RulesSite:
    return RulesSite(tmp_path, DRAIN, MAIL)


def test_rules_are_for_operators(site: RulesSite) -> None:
    registry = Registry(import_actions("rules").values(), {"rules": lambda: room_of(site.settings)})
    for name, request in (
        ("rules.check", CheckRulesRequest()),
        ("rules.list", ListRulesRequest()),
        ("rules.test", RuleTrialRequest(event={})),
        ("rules.history", RulesHistoryRequest()),
        ("rules.enable", SwitchRuleRequest(rule="mail")),
        ("rules.disable", SwitchRuleRequest(rule="mail")),
    ):
        with pytest.raises(OperationForbidden):
            registry.call(name, ADA, request)


def test_rules_are_switched_by_administrators(site: RulesSite) -> None:
    room = room_of(site.settings)
    with pytest.raises(OperationForbidden):
        actions.disable_rule(room, OLGA, SwitchRuleRequest(rule="mail"))
    answer = actions.disable_rule(room, CARL, SwitchRuleRequest(rule="mail"))
    assert (answer.enabled, answer.was) == (False, True)
    lines = {one.rule: one for one in actions.list_rules(room, OLGA, ListRulesRequest()).rules}
    assert (lines["mail"].enabled, lines["mail"].switched_by) == (False, "carl")
    assert (lines["drain"].enabled, lines["drain"].switched_by) == (True, "")
    with pytest.raises(UsageError, match="the rules are drain, mail"):
        actions.enable_rule(room, CARL, SwitchRuleRequest(rule="none"))


def test_enabled_shipped_rules_that_directories_excludes_are_one_finding(site: RulesSite) -> None:
    own = site.settings.rules

    def find_troubles(*directories: str) -> tuple[RuleProblem, ...]:
        rules = msgspec.structs.replace(own, directories=directories)
        room = room_of(msgspec.structs.replace(site.settings, rules=rules))
        for name in ("node_down_notify", "bank_threshold_notify") if SHIPPED in directories else ():
            actions.enable_rule(room, CARL, SwitchRuleRequest(rule=name))
        return actions.validate_rule_files(room, OLGA, CheckRulesRequest()).problems

    directory = next(name for name in own.directories if name != SHIPPED)
    assert not find_troubles(directory)
    assert not find_troubles(directory, SHIPPED)
    (trouble,) = find_troubles(directory)
    assert trouble.path == "[rules] directories"
    assert "do not run: bank_threshold_notify, node_down_notify. Add 'shipped'" in trouble.problem
    replaced = MAIL.replace("name: mail", "name: node_down_notify")
    (Path(directory) / "mail.yaml").write_text(replaced)
    (trouble,) = find_troubles(directory)
    assert "do not run: bank_threshold_notify. " in trouble.problem


def test_history_is_told_newest_first_and_narrowed(site: RulesSite) -> None:
    site.give(failure(1), failure(2, "n2"))
    site.settle()
    room = room_of(site.settings)

    def ids(**given: Any) -> list[int]:
        return [
            one.id
            for one in actions.list_executions(room, OLGA, RulesHistoryRequest(**given)).executions
        ]

    assert ids() == [4, 3, 2, 1]
    assert len(ids(rule="mail")) == 2
    assert ids(limit=1) == [4]
    assert ids(id=2) == [2]
    assert ids(status="succeeded") == [4, 3, 2, 1]
    assert ids(status="failed") == ids(since="2026-03-02") == []
    assert len(ids(since="2026-03-01T11:00", zone="UTC")) == 4
    with pytest.raises(UsageError, match="unknown cluster 'c2'"):
        ids(cluster="c2")


def test_a_list_without_rows_says_why(site: RulesSite) -> None:
    context = room_of(site.settings)
    for request in (RulesHistoryRequest(), RulesHistoryRequest(status="failed")):
        reply = actions.list_executions(context, OLGA, request)
        assert reply.executions == ()
        assert reply.empty_reason.startswith("No execution matches. Only enabled rules start some")
    without = msgspec.structs.replace(site.settings, rules=RulesSettings(directories=()))
    rules = actions.list_rules(room_of(without), OLGA, ListRulesRequest())
    assert rules.empty_reason == "No rules: 'directories' in [rules] hold no valid rule."
    assert (rules.rules, bool(actions.list_rules(context, OLGA, ListRulesRequest()).rules)) == (
        (),
        True,
    )


def test_where_nothing_ever_ran_there_is_nothing(tmp_path: Path) -> None:
    room = room_of(Settings(state_dir=str(tmp_path)))
    assert actions.list_executions(room, Caller(uid=0), RulesHistoryRequest()).executions == ()
    assert not (tmp_path / "rules.db").exists()


def test_a_database_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rules.db").mkdir()
    room = room_of(Settings(state_dir=str(tmp_path)))
    with pytest.raises(SqliteUnavailable, match=r"rules\.db"):
        actions.list_executions(room, Caller(uid=0), RulesHistoryRequest())
    with pytest.raises(SqliteUnavailable, match=r"rules\.db"):
        actions.list_rules(room, Caller(uid=0), ListRulesRequest())


EVENT = {
    "kind": "node.state",
    "cluster": "c1",
    "at": "2026-03-01T12:00:00Z",
    "body": {"node": "n1", "state": "DOWN", "old_state": "IDLE", "failed": True},
}


@pytest.mark.parametrize(
    "event",
    [
        EVENT,
        {**EVENT, "id": 3, "key": "k", "seen_at": "2026-03-01T12:00:01Z", "source": "sensor"},
        {"trigger": "slurm.node.state", "payload": {"node": "n1", "failed": True, "reason": ""}},
    ],
)
def test_an_event_is_tried_in_any_form(site: RulesSite, event: dict[str, Any]) -> None:
    answer = actions.try_event(room_of(site.settings), OLGA, RuleTrialRequest(event=event))
    assert [(one.rule, one.matches) for one in answer.rules] == [("drain", True), ("mail", True)]
    assert answer.rules[1].parameters == {"to": ["root"], "subject": "n1"}
    assert site.world.done == []


def test_why_a_rule_is_not_about_an_event(site: RulesSite) -> None:
    body = {**EVENT["body"], "failed": False}  # type: ignore[dict-item]
    event = {**EVENT, "body": body}
    answer = actions.try_event(
        room_of(site.settings), OLGA, RuleTrialRequest(event=event, rule="mail")
    )
    assert [one.reason for one in answer.rules] == [
        "trigger.failed is False, but the criterion is equals True"
    ]


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"kind": "job.script"},
        {"kind": "node.state", "body": {}},
        {
            "kind": "node.state",
            "cluster": "c1",
            "at": "soon",
            "body": {"node": "n", "state": "IDLE"},
        },
        {"trigger": "nothing", "payload": {}},
        {"trigger": "slurm.node.state", "payload": []},
        {"trigger": ["x"], "payload": {}},
    ],
)
def test_what_is_no_event_is_told(site: RulesSite, event: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        actions.try_event(room_of(site.settings), OLGA, RuleTrialRequest(event=event))


@pytest.fixture
def config(site: RulesSite, tmp_path: Path) -> str:
    path = tmp_path / "steward.toml"
    cluster = msgspec.structs.replace(
        site.settings.cluster["c1"], slurm=False, spool=str(tmp_path / "spool")
    )
    settings = msgspec.structs.replace(site.settings, cluster={"c1": cluster})
    path.write_text(render_config(LoadedConfig(settings)))
    return str(path)


def test_the_command_line(
    site: RulesSite, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.give(failure(1))
    site.settle()

    def said(*words: str, code: int = 0) -> str:
        assert run(["rules", *words, "--config", config]) == code, capsys.readouterr()
        return capsys.readouterr().out

    assert said("check") == "2 rules valid, 0 files invalid.\n"
    assert said("list").splitlines()[1].split()[:4] == [
        *("drain", "on", "slurm.node.state", "slurm.node.drain")
    ]
    event = tmp_path / "event.json"
    event.write_text(json.dumps(EVENT))
    assert 'mail: yes, notify.email\n    to: ["root"]\n    subject: n1\n' in said(
        "test", str(event)
    )
    assert said("disable", "mail") == "mail is off.\n"
    assert said("disable", "mail") == "mail is off already.\n"
    assert said("enable", "mail") == "mail is on.\n"
    rows = said("history", "-n").splitlines()
    assert [row.split()[0] for row in rows] == ["2", "1"]
    assert "succeeded" in rows[0]
    found = json.loads(said("history", "--json"))["executions"]
    assert [one["parameters"]["subject"] for one in found if one["rule"] == "mail"] == ["n1"]
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(DRAIN.replace("nodes:", "nodez:"))
    assert run(["rules", "check", str(wrong)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "0 rules valid, 1 file invalid.\n"
    assert "wrong.yaml:13: action.parameters.nodez: slurm.node.drain has no such" in captured.err
    assert run(["rules", "test", str(event), "--file", str(wrong)]) == 2
    capsys.readouterr()
    event.write_text("[]")
    said("test", str(event), code=2)


def test_what_is_wrong_is_said_to_programs_too(
    site: RulesSite, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(site.settings.rules.directories[0]) / "wrong.yaml").write_text("name: a\n")
    for words in (("-P", "-n"), ("--json",), ("--csv",)):
        assert run(["rules", "list", *words, "--config", config]) == 0
        assert "wrong.yaml" in capsys.readouterr().err


def test_what_was_seen_is_shown_safely(
    site: RulesSite, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site.give(failure(1, reason="\x1b[31mred\n|"))
    site.settle()
    assert run(["rules", "history", "-P", "--config", config]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3


def test_the_site_may_leave_out_what_is_shipped(tmp_path: Path) -> None:
    site = RulesSite(tmp_path, directories=(str(tmp_path / "rules.d"), "shipped"))
    room = room_of(site.settings)
    assert actions.validate_rule_files(room, OLGA, CheckRulesRequest()).rules == 5
