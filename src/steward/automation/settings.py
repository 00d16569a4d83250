"""Settings of automation: sections ``[actions]`` and ``[rules]`` of the configuration."""

from typing import Final, Literal

import msgspec

from steward.core.section import Section

SHIPPED: Final = "shipped"
"""Entry of ``directories`` that stands for the rules that come with Steward."""


class ActionsSettings(Section, frozen=True, kw_only=True):
    """[actions]: limits and targets of operations that people and rules run.

    Attributes:
        programs_file: File owned and writable by root alone: absolute paths of the programs that
            local.command and slurm.trigger.set may name, one per line.
        webhooks: URLs that notify.webhook may post to, by name.
        timeout_s: Time limit of an action, in seconds.
    """

    programs_file: str = "/etc/steward/programs"
    webhooks: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_s: float = 60.0


class RulesSettings(Section, frozen=True, kw_only=True):
    """[rules]: automation rules.

    Attributes:
        mode: ``on``; ``off``; or ``dry-run``, in which rules only report what they would do.
        directories: Directories of rule files; every ``*.yaml`` in them is a rule. ``shipped`` are
            the rules that come with Steward, which those of the same name replace.
        most_nodes_percent: Maximum share of a cluster's nodes, in percent, that all rules together
            may take out of service; a rule may set a lower share for itself.
    """

    mode: Literal["off", "dry-run", "on"] = "off"
    directories: tuple[str, ...] = ("/etc/steward/rules.d", SHIPPED)
    most_nodes_percent: float = 10.0

    @property
    def is_enabled(self) -> bool:
        """Return True if rules run, be it to report alone."""
        return self.mode != "off"
