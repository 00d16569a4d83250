"""Settings of automation: sections ``[actions]`` and ``[rules]`` of the configuration."""

import msgspec

from steward.core.section import Section


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
        enabled: Whether rules run.
        directories: Directories of rule files; every ``*.yaml`` in them is a rule.
        shipped: Whether rules shipped with Steward run if they are enabled.
        dry_run: Whether actions of all rules only report what they would do.
        most_nodes_percent: Maximum share of a cluster's nodes, in percent, that all rules together
            may take away; a rule may set a lower share for itself.
    """

    enabled: bool = False
    directories: tuple[str, ...] = ("/etc/steward/rules.d",)
    shipped: bool = True
    dry_run: bool = False
    most_nodes_percent: float = 10.0
