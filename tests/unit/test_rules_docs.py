"""What the page of rules shows is what there is."""

import json
import re
from pathlib import Path

import pytest

from steward.automation.rules.actions import tried
from steward.automation.rules.criteria import in_long
from steward.automation.rules.parser import KEYS, read_rule
from steward.automation.rules.rulebook import SHIPPED, problems
from steward.automation.rules.triggers import TYPES

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_rules_that_are_shown_are_right(text: str) -> None:
    assert list(problems(read_rule(text, "docs/rules.md"))) == []


def test_the_event_that_is_shown_is_one() -> None:
    (event,) = blocks("json")
    rules = [read_rule(text, "docs/rules.md") for text in blocks("yaml")]
    answer = tried(json.loads(event), rules, set(), explicit=False)
    assert [line.matches for line in answer.rules] == [False, True]
    assert answer.rules[1].parameters == {"nodes": "n7", "reason": "failed 3 times"}


def test_the_triggers_and_their_fields_are_there() -> None:
    section = TEXT.split("## Triggers")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z.]+)` \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE))
    assert set(rows) == set(TYPES)
    for name, fields in rows.items():
        assert set(re.findall(r"`(\w+)`", fields)) <= TYPES[name].fields


def test_every_key_of_stewards_own_is_told() -> None:
    section = TEXT.split("## What Steward adds")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(KEYS)


def test_every_operator_that_is_named_is_one() -> None:
    section = TEXT.split("- **criteria**")[1].split("- **action**")[0]
    named = re.findall(r"`([a-z_]+)`", section.split("`search`")[0])
    assert len(named) > 20
    assert all(in_long(name) == name for name in named)


def test_the_shipped_rules_are_told() -> None:
    section = TEXT.split("## The rules that come with Steward")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| .* \| (yes|no) \|$", section, re.MULTILINE))
    there = {
        path.stem: "yes" if read_rule(path.read_text(), path.name).enabled else "no"
        for path in Path(SHIPPED).glob("*.yaml")
    }
    assert told == there
