"""Data model of rules: :class:`Rule`, its :class:`Criterion` list and :class:`RuleLimits`.

:mod:`steward.automation.rules.parser` creates them from YAML files. :class:`RateLimit` is part of
the limits; ``format_rule_duration`` formats times as rule files write them.
"""

from typing import Any, Final, Literal

import msgspec

OnUnknown = Literal["end", "repeat"]
"""What to do if it is unknown whether an action was done before a crash."""

RuleKey = tuple[str | int, ...]
"""Position in a rule's file: keys and indices from the root."""


class Criterion(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison that a trigger's payload must satisfy.

    Attributes:
        key: Key in the file: ``trigger.node``, ``trigger.labels['a-b']#2``.
        path: Keys and indices into the payload; empty for the whole payload.
        type: Operator, by its long name.
        pattern: Value to compare with.
        is_template: Whether the pattern is a template to be rendered first.
        condition: For ``search``: whether any or all items must match any or all criteria.
        inner: For ``search``: criteria for each item.
    """

    key: str
    path: tuple[str | int, ...]
    type: str
    pattern: Any = None
    is_template: bool = False
    condition: str = ""
    inner: "tuple[Criterion, ...]" = ()


class RateLimit(msgspec.Struct, frozen=True):
    """Rate limit: at most ``max_count`` executions in ``seconds``."""

    max_count: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.max_count}/{format_rule_duration(self.seconds)}"


class RuleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Steward's additions to StackStorm's rules, below ``context: steward:`` in a rule's file.

    Attributes:
        rate_limit: Maximum rate of executions.
        dedup_window_s: After an execution, further events with the same subject are held back for
            this long, in seconds; 0 disables.
        dedup_by: Payload paths that make up the subject; empty for the default of the trigger type.
        most_nodes_percent: Maximum share of a cluster's nodes, in percent, that the rule may have
            taken away at a time; None for the limit of all rules.
        dry_run: Whether the action only reports what it would do.
        on_unknown: What to do if a crash left open whether the action was done, and Slurm cannot
            tell: ``end`` or ``repeat``.
        retries: Number of retries of a failed action.
        backoff_s: Seconds until the first retry; doubled for each further one.
        timeout_s: Time limit of the action, in seconds; None for that of [actions].
        max_age_s: Maximum age of an event, in seconds; older ones are held back.
    """

    rate_limit: RateLimit = RateLimit(60, 3600.0)
    dedup_window_s: float = 0.0
    dedup_by: tuple[tuple[str | int, ...], ...] = ()
    most_nodes_percent: float | None = None
    dry_run: bool = False
    on_unknown: OnUnknown = "end"
    retries: int = 0
    backoff_s: float = 10.0
    timeout_s: float | None = None
    max_age_s: float = 3600.0


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule: trigger, criteria and action, as parsed from its file.

    Attributes:
        name: Full name: ``name``, or ``pack.name`` if the file names a pack.
        trigger: Type of trigger it reacts to.
        action: Operation it runs.
        description: Description for people.
        enabled: Whether the file enables it; administrators can override that.
        trigger_parameters: Values that fields of the payload must equal (the trigger's parameters).
        criteria: Criteria, all of which must hold.
        parameters: Parameters of the action, with templates.
        limits: Limits and retries.
        path: File it was read from.
        shipped: Whether it is part of Steward's distribution.
        lines: Line number of each key in the file.
    """

    name: str
    trigger: str
    action: str
    description: str = ""
    enabled: bool = False
    trigger_parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    limits: RuleLimits = RuleLimits()
    path: str = ""
    shipped: bool = False
    lines: dict[RuleKey, int] = msgspec.field(default_factory=dict)

    def format_position(self, *key: str | int) -> str:
        """Format the position of a key for a message: ``/etc/…/a.yaml:12: action.ref``."""
        line = next(
            (self.lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.lines), 1
        )
        return f"{self.path}:{line}: {'.'.join(map(str, key))}"


_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0))


def format_rule_duration(seconds: float) -> str:
    """Format seconds in the largest unit that divides them: ``90s``, ``10m``, ``1h``, ``1d``."""
    for unit, length in _UNITS:
        if seconds >= length and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{seconds:g}s"
