"""Documented rules equal the shipped ones."""

import json
import re
from pathlib import Path

import pytest

from steward.automation.rules.actions import try_rules
from steward.automation.rules.criteria import normalize_operator
from steward.automation.rules.parser import LIMIT_PARSERS, parse_rule
from steward.automation.rules.rulebook import SHIPPED_RULES_DIR
from steward.automation.rules.triggers import TRIGGER_TYPES
from steward.automation.rules.validation import find_rule_errors

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_rules_that_are_shown_are_right(text: str) -> None:
    assert list(find_rule_errors(parse_rule(text, "docs/rules.md"))) == []


def test_the_event_that_is_shown_is_one() -> None:
    (event,) = blocks("json")
    rules = [parse_rule(text, "docs/rules.md") for text in blocks("yaml")]
    answer = try_rules(json.loads(event), rules, set(), include_all=False)
    assert [line.matches for line in answer.rules] == [False, True]
    assert answer.rules[1].parameters == {"nodes": "n7", "reason": "failed 3 times"}


def test_the_triggers_and_their_fields_are_there() -> None:
    section = TEXT.split("## Triggers")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z.]+)` \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE))
    assert set(rows) == set(TRIGGER_TYPES)
    for name, fields in rows.items():
        assert set(re.findall(r"`(\w+)`", fields)) <= TRIGGER_TYPES[name].fields


def test_every_key_of_stewards_own_is_told() -> None:
    section = TEXT.split("## Limits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(LIMIT_PARSERS)


def test_every_operator_that_is_named_is_one() -> None:
    section = TEXT.split("- **criteria**")[1].split("- **action**")[0]
    named = re.findall(r"`([a-z_]+)`", section.split("`search`")[0])
    assert len(named) > 20
    assert all(normalize_operator(name) == name for name in named)


def test_the_shipped_rules_are_told() -> None:
    section = TEXT.split("## Shipped rules")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| .* \| (yes|no) \|$", section, re.MULTILINE))
    there = {
        path.stem: "yes" if parse_rule(path.read_text(), path.name).enabled else "no"
        for path in Path(SHIPPED_RULES_DIR).glob("*.yaml")
    }
    assert told == there
