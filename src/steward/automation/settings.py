"""The settings of automation: the sensor that looks at nodes, what actions may do, and rules."""

import msgspec

from steward.core.section import Section


class ActionsSettings(Section, frozen=True, kw_only=True):
    """[actions]: what ``steward action run`` and rules may do.

    Attributes:
        programs_file: A file that is root's and that nobody else can write: the absolute paths
            of the programs that local.command and slurm.trigger.set may name, a line each.
        webhooks: URLs that notify.webhook may post to; by their names.
        timeout_s: How long an action may take, in seconds.
    """

    programs_file: str = "/etc/steward/programs"
    webhooks: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_s: float = 60.0


class RulesSettings(Section, frozen=True, kw_only=True):
    """[rules]: what is done about events.

    Attributes:
        enabled: Whether rules are run at all.
        directories: Where rules are: every ``*.yaml`` in them is one.
        shipped: Whether the rules that come with Steward are run where they are enabled.
        dry_run: Whether every rule's action is only described.
        most_nodes_percent: Share of a cluster's nodes, in percent, that all rules together
            may take away; a rule may have a lower one of its own.
        history_days: How long executions are kept in the history, in days.
    """

    enabled: bool = False
    directories: tuple[str, ...] = ("/etc/steward/rules.d",)
    shipped: bool = True
    dry_run: bool = False
    most_nodes_percent: float = 10.0
    history_days: int = 365
