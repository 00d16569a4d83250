"""What is wrong with [rules]."""

import os
from collections.abc import Iterator

from steward.core.config import Settings
from steward.core.config.problem import Problem


def rule_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with the settings of rules; 'steward rules check' looks at the rules."""
    rules = settings.rules
    for directory in rules.directories:
        if not os.path.isabs(directory):
            yield Problem(
                ("rules", "directories"),
                f"'rules.directories' must hold absolute paths, not {directory!r}",
            )
    if rules.most_nodes_percent > 100:
        yield Problem(
            ("rules", "most_nodes_percent"), "'rules.most_nodes_percent' is above 100 percent"
        )
    if not rules.history_days:
        yield Problem(("rules", "history_days"), "'rules.history_days' must be above 0")
    if rules.enabled and not settings.cluster:
        yield Problem(("rules", "enabled"), "rules need events: add a table [cluster.NAME]")
    if rules.enabled and settings.forward.to:
        yield Problem(
            ("rules", "enabled"),
            f"a controller runs no rules: set it in the Steward at {settings.forward.to}",
        )
    if rules.enabled and not rules.shipped and not rules.directories:
        yield Problem(
            ("rules", "directories"), "there is no rule: name a directory, or set shipped = true"
        )
