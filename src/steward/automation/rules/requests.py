"""What the rules are asked, and what they answer."""

from datetime import datetime
from typing import Any

import msgspec

from steward.automation.rules.store import Execution
from steward.core.actions import Answer, Request, Shape


class CheckRequest(Request, frozen=True, kw_only=True):
    """rules.check: whether the rules' files are right."""


class TroubleLine(Shape, frozen=True, kw_only=True):
    """Something wrong.

    Attributes:
        path: The file.
        what: What, beginning with file and line.
    """

    path: str
    what: str


class CheckAnswer(Answer, frozen=True, kw_only=True):
    """What is wrong.

    Attributes:
        rules: How many rules are right.
        troubles: What is wrong with the others.
        differences: What StackStorm lacks or does otherwise, of those that are right.
    """

    rules: int
    troubles: tuple[TroubleLine, ...] = ()
    differences: tuple[TroubleLine, ...] = ()


class ListRequest(Request, frozen=True, kw_only=True):
    """rules.list: which rules there are."""


class RuleLine(Shape, frozen=True, kw_only=True):
    """A rule.

    Attributes:
        rule: Its name.
        enabled: Whether it is on.
        switched_by: Who switched it, whatever its file says; "" for nobody.
        trigger: What it is about.
        action: What it does.
        description: For people.
        dry_run: Whether its action is only described.
        acted: How often it has acted, as far as the history goes.
        last: When it last did; None for never.
        path: Its file.
        shipped: Whether it came with Steward.
    """

    rule: str
    enabled: bool
    switched_by: str = ""
    trigger: str
    action: str
    description: str = ""
    dry_run: bool = False
    acted: int = 0
    last: datetime | None = None
    path: str
    shipped: bool = False


class ListAnswer(Answer, frozen=True, kw_only=True):
    """The rules.

    Attributes:
        running: Whether the configuration has rules run at all.
        rules: They, by name.
        troubles: What is wrong with files that are no rules.
    """

    running: bool
    rules: tuple[RuleLine, ...]
    troubles: tuple[TroubleLine, ...] = ()


class TryRequest(Request, frozen=True, kw_only=True):
    """rules.test: what rules would make of an event; nothing is done.

    Attributes:
        event: An event of Steward's, or ``{"trigger": TYPE, "payload": {…}}``.
        rule: Only this rule; "" for all.
    """

    event: dict[str, Any]
    rule: str = ""


class TriedLine(Shape, frozen=True, kw_only=True):
    """What a rule would make of it.

    Attributes:
        rule: The rule.
        enabled: Whether it is on.
        matches: Whether it is about the event.
        why_not: What the event does not have, where it is not.
        action: What would be done.
        parameters: With what.
        error: Why its templates cannot be filled in, or its criteria not be looked at.
    """

    rule: str
    enabled: bool
    matches: bool
    why_not: str = ""
    action: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""


class TryAnswer(Answer, frozen=True, kw_only=True):
    """What rules would make of it.

    Attributes:
        trigger: What the event is to rules.
        payload: What it holds.
        rules: Those of this type of trigger.
    """

    trigger: str
    payload: dict[str, Any]
    rules: tuple[TriedLine, ...]


class SwitchRequest(Request, frozen=True, kw_only=True):
    """rules.enable, rules.disable: switch a rule, whatever its file says.

    Attributes:
        rule: The rule.
    """

    rule: str


class SwitchAnswer(Answer, frozen=True, kw_only=True):
    """It is switched.

    Attributes:
        rule: The rule.
        enabled: Whether it is on now.
        was: Whether it was on before.
    """

    rule: str
    enabled: bool
    was: bool


class HistoryRequest(Request, frozen=True, kw_only=True):
    """rules.history: what rules did, newest first.

    Attributes:
        id: Only the execution of this number; 0 for the latest.
        rule: Only this rule's; "" for all.
        cluster: Only on this cluster; "" for all.
        status: Only of this status or phase; "" for all.
        since: Only what was decided since; "" for any time.
        before: Only executions of a lower number; 0 for all.
        limit: How many at the most.
        zone: IANA name of the zone that ``since`` is in; "" for the system's.
    """

    id: int = 0
    rule: str = ""
    cluster: str = ""
    status: str = ""
    since: str = ""
    before: int = 0
    limit: int = 100
    zone: str = ""


class HistoryAnswer(Answer, frozen=True, kw_only=True):
    """What rules did.

    Attributes:
        executions: Newest first.
    """

    executions: tuple[Execution, ...]
