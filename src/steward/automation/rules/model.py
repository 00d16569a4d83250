"""What a rule is, once it was read: the nouns of this room."""

from typing import Any, Final, Literal

import msgspec

OnUnknown = Literal["end", "repeat"]

Key = tuple[str | int, ...]
"""Where something stands in a rule's file: the keys and indices down to it."""


class Criterion(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison that a payload has to stand.

    Attributes:
        key: As the file has it: ``trigger.node``, ``trigger.labels['a-b']#2``.
        path: The keys and indices into the payload; empty for the whole of it.
        type: The operator, in its long form.
        pattern: What is compared with.
        is_template: Whether the pattern is to be rendered first.
        condition: Of ``search``: how many of the items have to match how much.
        inner: Of ``search``: what each item is compared with.
    """

    key: str
    path: tuple[str | int, ...]
    type: str
    pattern: Any = None
    is_template: bool = False
    condition: str = ""
    inner: "tuple[Criterion, ...]" = ()


class Rate(msgspec.Struct, frozen=True):
    """So many at the most in so many seconds."""

    most: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.most}/{as_duration(self.seconds)}"


class Care(msgspec.Struct, frozen=True, kw_only=True):
    """What Steward adds to StackStorm's rules, under ``context: steward:``.

    Attributes:
        rate_limit: How often its action is run at the most.
        dedup_window_s: Of events of the same subject within so many seconds only the first
            is acted on; 0 for each.
        dedup_by: What makes the subject: payload paths; the trigger type's own if empty.
        most_nodes_percent: Share of a cluster's nodes, in percent, that it may have taken away
            at a time; None for what all rules together may.
        dry_run: Whether its action is only described.
        on_unknown: What is done where a crash left open whether the action was done, and
            Slurm cannot tell: ``end`` or ``repeat``.
        retries: How often an action that failed is tried again.
        backoff_s: Seconds until the first of them; doubled each time.
        timeout_s: How long the action may take, in seconds; None for what [actions] says.
        max_age_s: Events that are older than so many seconds are not acted on any more.
    """

    rate_limit: Rate = Rate(60, 3600.0)
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
    """One rule.

    Attributes:
        name: What it is called everywhere: ``name``, or ``pack.name`` where it has a pack.
        trigger: The type of trigger that it is about.
        action: Name of the operation that it runs.
        description: For people.
        enabled: What its file says.
        wanted: What the trigger's payload must hold: the trigger's parameters.
        criteria: All of them must hold.
        parameters: The action's, with templates.
        care: How carefully it is run.
        path: The file that it was read from.
        shipped: Whether it came with Steward.
        lines: For keys of the file the line that they stand on.
    """

    name: str
    trigger: str
    action: str
    description: str = ""
    enabled: bool = False
    wanted: dict[str, Any] = msgspec.field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    care: Care = Care()
    path: str = ""
    shipped: bool = False
    lines: dict[Key, int] = msgspec.field(default_factory=dict)

    def at(self, *key: str | int) -> str:
        """Where a key stands, for a message: ``/etc/…/a.yaml:12: action.ref``."""
        line = next(
            (self.lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.lines), 1
        )
        return f"{self.path}:{line}: {'.'.join(map(str, key))}"


_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0))


def as_duration(seconds: float) -> str:
    """Seconds in the largest unit that shows them whole: ``90s``, ``10m``, ``1h``, ``1d``."""
    for unit, length in _UNITS:
        if seconds >= length and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{seconds:g}s"
