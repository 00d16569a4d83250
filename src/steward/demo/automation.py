"""Automation in the demo: a node that fails, and a rule that takes it out of service."""

import json
from typing import Final

UNANSWERED_S: Final = 10
SLURM: Final = (f"SlurmdTimeout={UNANSWERED_S}",)
"""So that slurmctld soon knows of a slurmd that has died."""
RULE: Final = "drain_what_fails"

_RULE: Final = f"""\
---
name: {RULE}
description: What fails runs no jobs until somebody has looked at it.
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed:
    type: equals
    pattern: true
action:
  ref: slurm.node.drain
  parameters:
    nodes: "{{{{ trigger.node }}}}"
    reason: "was {{{{ trigger.old_state }}}}, became {{{{ trigger.state }}}}"
context:
  steward:
    dedup_window: 10m
    most_nodes_percent: 50
"""


def settings(directory: str) -> list[str]:
    """The lines of the configuration file."""
    return [
        "[sensor]",
        "enabled = true",
        "interval_s = 1.0",
        "triggers = false",
        "",
        "[rules]",
        "enabled = true",
        f"directories = [{json.dumps(directory)}]",
        "shipped = false",
        "most_nodes_percent = 50.0",
        "",
    ]


def write_rule(directory: str) -> str:
    """Write the rule's file; its path."""
    path = f"{directory}/{RULE}.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(_RULE)
    return path
