"""Checks of [rules] name the key."""

from typing import Any

import pytest

from steward.automation.settings import RulesSettings
from steward.core.config import Settings
from steward.core.config.component_checks import check_rules
from steward.slurm.settings import ClusterSettings


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"directories": ("rules.d",)}, ("rules", "directories")),
        ({"most_nodes_percent": 101.0}, ("rules", "most_nodes_percent")),
        ({"mode": "on", "directories": ()}, ("rules", "directories")),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, Any], key: tuple[str, ...]) -> None:
    settings = Settings(cluster={"c1": ClusterSettings()}, rules=RulesSettings(**given))
    assert [problem.key for problem in check_rules(settings)] == [key]


def test_what_is_right_is_let_be() -> None:
    for rules in (RulesSettings(), RulesSettings(mode="on", most_nodes_percent=100.0)):
        settings = Settings(cluster={"c1": ClusterSettings()}, rules=rules)
        assert list(check_rules(settings)) == []


def test_rules_need_a_cluster() -> None:
    settings = Settings(rules=RulesSettings(mode="on"))
    assert [problem.key for problem in check_rules(settings)] == [("rules", "mode")]
