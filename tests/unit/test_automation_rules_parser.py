"""Parser of rules in StackStorm's YAML: every error names its position."""

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.rules import DRAIN
from steward.automation.errors import RuleError
from steward.automation.rules import rulebook
from steward.automation.rules.model import RateLimit
from steward.automation.rules.parser import parse_rule
from steward.automation.rules.validation import compare_with_stackstorm, find_rule_errors
from steward.automation.settings import RulesSettings

WHOLE = """\
---
name: node_down
pack: site
description: what it is for
enabled: true
tags: [{name: a, value: b}]
trigger:
  type: slurm.node.state
  parameters:
    cluster: c1
criteria:
  trigger.state:
    type: iregex
    pattern: "^down"
  trigger.state#2:
    type: ncontains
    pattern: MAINT
  trigger['partitions']:
    type: search
    condition: any
    pattern:
      item: {type: equals, pattern: gpu}
  trigger.partitions[0]:
    type: exists
action:
  ref: slurm.node.drain
  description: out with it
  parameters:
    nodes: "{{ trigger.node }}"
    reason: "it is {{ trigger.state }}"
context:
  user: st2admin
  steward:
    rate_limit: 10 / 30m
    dedup_window: 90
    dedup_by: trigger.node
    most_nodes_percent: 5%
    dry_run: true
    on_unknown: repeat
    retries: 3
    backoff: 5s
    timeout: 2m
    max_age: 1d
"""


def test_a_whole_rule() -> None:
    rule = parse_rule(WHOLE, "/etc/a.yaml")
    assert rule.name == "site.node_down"
    assert (rule.enabled, rule.trigger, rule.action) == (
        True,
        "slurm.node.state",
        "slurm.node.drain",
    )
    assert rule.trigger_parameters == {"cluster": "c1"}
    assert [(one.path, one.type) for one in rule.criteria] == [
        (("state",), "iregex"),
        (("state",), "ncontains"),
        (("partitions",), "search"),
        (("partitions", 0), "exists"),
    ]
    care = rule.limits
    assert care.rate_limit == RateLimit(10, 1800.0)
    assert (care.dedup_window_s, care.dedup_by) == (90.0, (("node",),))
    assert (care.most_nodes_percent, care.dry_run, care.on_unknown) == (5.0, True, "repeat")
    assert (care.retries, care.backoff_s, care.timeout_s, care.max_age_s) == (
        3,
        5.0,
        120.0,
        86400.0,
    )
    assert (
        rule.format_position("action", "parameters", "reason")
        == "/etc/a.yaml:30: action.parameters.reason"
    )
    assert list(find_rule_errors(rule)) == []


def test_a_rule_is_off_unless_it_says_otherwise() -> None:
    assert not parse_rule(DRAIN.replace("enabled: true\n", ""), "a").enabled


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: node_down", "nome: node_down", "a:2: nome: unknown key 'nome'"),
        ("name: node_down", "name: 'a b'", "a:2: name: invalid name: use letters"),
        ("name: node_down", f"name: {'a' * 60}", "a:2: name: name and pack together are longer"),
        ("name: node_down", "name: [a]", "a:2: name: must be text"),
        ("enabled: true", "enabled: 'yes'", "a:5: enabled: must be true or false"),
        (
            "slurm.node.state",
            "core.st2.webhook",
            "a:8: trigger.type: unknown trigger 'core.st2.webhook'",
        ),
        ("cluster: c1", "clutser: c1", "a:10: trigger.parameters.clutser: slurm.node.state has no"),
        ("trigger.state:", "trigger.stat:", "a:12: criteria.trigger.stat: slurm.node.state has no"),
        ("trigger.state:", "payload.state:", "a:12: criteria.payload.state: a key must begin"),
        ("[0]:", "[*]:", "a:23: criteria.trigger.partitions[*]: cannot parse '[*]'"),
        (
            "type: iregex",
            "type: nregex",
            "a:13: criteria.trigger.state.type: unknown operator 'nregex'",
        ),
        (
            '"^down"',
            '"(down"',
            "a:14: criteria.trigger.state.pattern: invalid regular expression '(down'",
        ),
        (
            '"^down"',
            '"{{ trigger.node }}"',
            "a:14: criteria.trigger.state.pattern: the pattern of 'iregex' cannot",
        ),
        ("condition: any", "condition: most", "a:20: criteria.trigger['partitions'].condition"),
        ("pattern: MAINT", "pattern: '{{ st2kv.system.x }}'", "unknown name 'st2kv'"),
        (
            '"{{ trigger.node }}"',
            '"{{ trigger.node"',
            "a:29: action.parameters.nodes: cannot parse the template",
        ),
        ("ref: slurm.node.drain", "reff: x", "a:26: action.reff: unknown key 'reff'"),
        ("10 / 30m", "often", "a:34: context.steward.rate_limit: not a rate"),
        ("dedup_window: 90", "dedup_window: a while", "a:35: context.steward.dedup_window"),
        ("dedup_by: trigger.node", "dedup_by: trigger.nod", "a:36: context.steward.dedup_by"),
        ("5%", "500%", "a:37: context.steward.most_nodes_percent: not a percentage"),
        (
            "on_unknown: repeat",
            "on_unknown: retry",
            "a:39: context.steward.on_unknown: must be 'end' or",
        ),
        ("retries: 3", "retries: true", "a:40: context.steward.retries: must be a number"),
        ("timeout: 2m", "timeout: 0", "a:42: context.steward.timeout: must be above 0"),
        ("max_age: 1d", "max_agee: 1d", "a:43: context.steward.max_agee: unknown key"),
        ("enabled: true", "name: again", "a:5: duplicate key 'name'"),
        ("enabled: true", "enabled: [true", "a:6: "),
        ("enabled: true", "enabled: !!python/name:os.system x", "a:5: "),
    ],
)
def test_an_error_names_file_line_and_key(old: str, new: str, message: str) -> None:
    assert WHOLE.count(old) >= 1
    with pytest.raises(RuleError) as caught:
        parse_rule(WHOLE.replace(old, new, 1), "a")
    assert message in str(caught.value)
    assert str(caught.value).startswith("a:")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slurm.node.drain", "slurm.node.drian", "a:26: action.ref: unknown action"),
        ("reason:", "reasons:", "a:30: action.parameters.reasons: slurm.node.drain has no such"),
        ("reason:", "# reason:", "a:28: action.parameters: slurm.node.drain needs 'reason'"),
        (
            "trigger.node }}",
            "trigger.host }}",
            "a:29: action.parameters.nodes: slurm.node.state has",
        ),
    ],
)
def test_what_makes_no_sense_is_told(old: str, new: str, message: str) -> None:
    found = list(find_rule_errors(parse_rule(WHOLE.replace(old, new, 1), "a")))
    assert message in found[0]


def test_a_cap_on_nodes_is_for_what_takes_nodes() -> None:
    mail = WHOLE.replace("slurm.node.drain", "slurm.node.get")
    mail = "\n".join(line for line in mail.splitlines() if "reason:" not in line)
    assert "takes no nodes away" in "".join(find_rule_errors(parse_rule(mail, "a")))


def rule_or_error(text: str) -> None:
    """Parse a text: either it is a valid rule, or the error names its position."""
    error = ""
    try:
        list(find_rule_errors(parse_rule(text, "a")))
    except RuleError as caught:
        error = str(caught)
    assert not error or error.startswith("a:")


@given(st.text())
def test_any_text_is_a_rule_or_an_error(text: str) -> None:
    rule_or_error(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "pattern", "ref", "steward", "a"]), inner)
    ),
    max_leaves=5,
)
KEYS = ["name", "pack", "enabled", "trigger", "criteria", "action", "context", "type", "tags"]


@given(st.sampled_from(KEYS), JSON)
def test_any_value_of_any_key_is_a_rule_or_an_error(key: str, value: Any) -> None:
    whole = {**yaml.safe_load(WHOLE), key: value}
    rule_or_error(yaml.safe_dump(whole))


@given(st.lists(st.sampled_from(list("&a *a []{}:,-\n \"'|>!%@#?x"))).map("".join))
def test_yaml_of_all_kinds_is_a_rule_or_an_error(text: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(text, "a")


def test_what_unfolds_to_millions_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(RuleError, match="too large for a rule"):
        parse_rule("\n".join(lines), "a")


def settings(*directories: Path) -> RulesSettings:
    return RulesSettings(directories=tuple(map(str, directories)))


def test_a_broken_file_takes_out_its_own_rule_alone(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(DRAIN)
    (tmp_path / "bad.yaml").write_text("name: [")
    (tmp_path / "binary.yaml").write_bytes(b"name: \xff")
    (tmp_path / "note.txt").write_text("not a rule")
    (tmp_path / ".swap.yaml").write_text("nor this")
    os.mkfifo(tmp_path / "pipe.yaml")
    found = rulebook.load_rulebook(settings(tmp_path))
    assert list(found.rules) == ["drain"]
    assert [Path(one.path).name for one in found.troubles] == [
        "bad.yaml",
        "binary.yaml",
        "pipe.yaml",
    ]


def test_of_two_of_one_name_the_first_is_it(tmp_path: Path) -> None:
    (tmp_path / "1.yaml").write_text(DRAIN)
    (tmp_path / "2.yaml").write_text(DRAIN)
    found = rulebook.load_rulebook(settings(tmp_path))
    assert found.rules["drain"].path.endswith("1.yaml")
    assert "duplicate rule name 'drain'" in found.troubles[0].what


def test_a_rule_of_the_sites_replaces_a_shipped_one(tmp_path: Path) -> None:
    own = DRAIN.replace("name: drain", "name: node_down_notify")
    (tmp_path / "own.yaml").write_text(own)
    found = rulebook.load_rulebook(RulesSettings(directories=(str(tmp_path), "shipped")))
    assert found.rules["node_down_notify"].action == "slurm.node.drain"
    assert found.troubles == ()
    assert len(found.rules) == 5


def test_what_others_may_write_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(DRAIN)
    path.chmod(0o664)
    assert "writable by others" in rulebook.load_rulebook(settings(tmp_path)).troubles[0].what
    path.chmod(0o644)
    assert rulebook.load_rulebook(settings(tmp_path)).troubles == ()
    tmp_path.chmod(0o777)
    message = rulebook.load_rulebook(settings(tmp_path)).troubles[0].what
    assert message.startswith(f"{tmp_path}: writable by others")
    tmp_path.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert f"'chown root {path}'" in rulebook.load_rulebook(settings(tmp_path)).troubles[0].what


def test_a_change_of_files_is_noticed(tmp_path: Path) -> None:
    before = rulebook.compute_signature(settings(tmp_path))
    (tmp_path / "a.yaml").write_text(DRAIN)
    after = rulebook.compute_signature(settings(tmp_path))
    assert before != after
    (tmp_path / "a.yaml").write_text(textwrap.dedent(DRAIN) + "\n# more\n")
    written = rulebook.compute_signature(settings(tmp_path))
    assert written != after
    # As the log advises if others may write the file.
    (tmp_path / "a.yaml").chmod(0o600)
    assert rulebook.compute_signature(settings(tmp_path)) != written


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "no such directory" in rulebook.load_rulebook(settings(tmp_path / "no")).troubles[0].what
    usual = RulesSettings(directories=RulesSettings().directories[:1])
    if not Path(usual.directories[0]).exists():
        assert rulebook.load_rulebook(usual).troubles == ()


@pytest.mark.parametrize("text", ["name: node_down_notify\nenabled: fasle", "\xff: name: [", "{"])
def test_a_shipped_rule_that_a_broken_file_was_to_replace_is_out(tmp_path: Path, text: str) -> None:
    name = "any" if "node_down" in text else "node_down_notify"
    (tmp_path / f"{name}.yaml").write_bytes(text.encode("latin-1"))
    found = rulebook.load_rulebook(RulesSettings(directories=(str(tmp_path), "shipped")))
    assert len(found.rules) == 4
    assert "node_down_notify" not in found.rules
    assert "the site's own rule 'node_down_notify' is invalid" in found.troubles[-1].what


def test_so_it_is_where_others_may_write(tmp_path: Path) -> None:
    path = tmp_path / "off.yaml"
    path.write_text(DRAIN.replace("name: drain", "name: node_down_often_drain"))
    for wrong in (path, tmp_path):
        wrong.chmod(0o777)
        found = rulebook.load_rulebook(RulesSettings(directories=(str(tmp_path), "shipped")))
        assert "node_down_often_drain" not in found.rules
        wrong.chmod(0o755)


def test_what_stackstorm_does_otherwise_is_told() -> None:
    told = [
        line.removeprefix("x.yaml:").partition(": ")[2]
        for line in compare_with_stackstorm(parse_rule(WHOLE, "x"))
    ]
    assert told[0] == (
        "trigger.parameters: StackStorm never fires such a rule: compare the fields in 'criteria'"
    )
    passed_over = [line for line in told if line.endswith(": StackStorm ignores it")]
    assert "context.steward.rate_limit: StackStorm ignores it" in passed_over
    assert len(told) == 1 + len(passed_over)


UNDISPATCHED = "the slurm pack's slurm.node.state has no field 'drained'"


@pytest.mark.parametrize(
    ("trigger", "field", "ref", "parameters", "told"),
    [
        ("slurm.node.state", "node", "slurm.node.drain", "nodes", []),
        (
            *("slurm.node.state", "drained", "notify.webhook", "url"),
            [
                f"x:5: criteria.trigger.drained: {UNDISPATCHED}",
                f"x:8: action.parameters.url: {UNDISPATCHED}",
                "x:7: action.ref: StackStorm calls it slurm.notify.webhook",
            ],
        ),
        (
            *("bank.threshold", "account", "bank.balance", "accounts"),
            [
                "x:3: trigger.type: the slurm pack has no trigger bank.threshold",
                "x:7: action.ref: StackStorm calls it slurm.bank.balance",
            ],
        ),
    ],
)
def test_what_the_pack_lacks_is_told(
    trigger: str, field: str, ref: str, parameters: str, told: list[str]
) -> None:
    text = f"""\
name: a
trigger:
  type: {trigger}
criteria:
  trigger.{field}: {{type: exists}}
action:
  ref: {ref}
  parameters: {{{parameters}: "{{{{ trigger.{field} }}}}"}}
"""
    assert list(compare_with_stackstorm(parse_rule(text, "x"))) == told
