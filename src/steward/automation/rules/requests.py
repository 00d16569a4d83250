"""Requests and replies of the rules actions (``rules.check``, ``rules.list``, ...).

:mod:`steward.automation.rules.actions` handles them; command line and HTTP API send them. Each
request is followed by its reply and the parts of the reply. ``rules.test`` uses ``RuleTrial...``,
``rules.enable`` and ``rules.disable`` share ``SwitchRule...``.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from steward.automation.rules.store import Execution
from steward.core.actions import (
    ActionMessage,
    Answer,
    HostZone,
    Request,
    argument,
    described,
    option,
)
from steward.core.layouts import Column, Layout


class CheckRulesRequest(Request, frozen=True, kw_only=True):
    """Request of rules.check: validate the rules' files."""


class RuleProblem(ActionMessage, frozen=True, kw_only=True):
    """Problem in a rule's file.

    Attributes:
        path: The file.
        problem: Message, beginning with file and line.
    """

    path: str
    problem: str


class CheckRulesReply(Answer, frozen=True, kw_only=True):
    """Reply of rules.check.

    Attributes:
        rules: Number of valid rules.
        problems: Errors in invalid files, and enabled shipped rules that ``directories`` excludes.
        differences: For valid rules: what StackStorm lacks or does differently.
    """

    rules: int
    problems: tuple[RuleProblem, ...] = ()
    differences: tuple[RuleProblem, ...] = ()


class ListRulesRequest(Request, frozen=True, kw_only=True):
    """Request of rules.list: list all rules."""


class RuleSummary(ActionMessage, frozen=True, kw_only=True):
    """Rule in a reply, with its state and execution count.

    Attributes:
        rule: Name.
        enabled: Whether it is enabled.
        switched_by: Administrator who overrode the file; "" if nobody.
        trigger: Type of trigger.
        action: Operation it runs.
        description: Description for people.
        dry_run: Whether its action only reports what it would do.
        executions: Number of executions in the history.
        last_execution: Time of the last execution; None if never.
        path: File of the rule.
        shipped: Whether it is part of Steward's distribution.
    """

    rule: str
    enabled: bool
    switched_by: str = ""
    trigger: str
    action: str
    description: str = ""
    dry_run: bool = False
    executions: int = 0
    last_execution: datetime | None = None
    path: str
    shipped: bool = False


def _describe_switch(rule: RuleSummary, _: object) -> str:
    """Return whether a rule is on, off or in dry run."""
    if not rule.enabled:
        return "off"
    return "on (dry run)" if rule.dry_run else "on"


class ListRulesReply(Answer, frozen=True, kw_only=True):
    """Reply of rules.list.

    Attributes:
        running: Whether the configuration enables rules.
        rules: Rules, by name.
        problems: Errors in invalid files.
    """

    running: bool
    rules: tuple[RuleSummary, ...]
    problems: tuple[RuleProblem, ...] = ()
    layout: ClassVar[Layout] = (
        Column("Rule", "rule", link="rule"),
        Column("Enabled", _describe_switch, "state"),
        Column("Trigger", "trigger"),
        Column("Action", "action"),
        Column("Executions", "executions", "count"),
        Column("LastExecution", "last_execution", "time", title="Last execution"),
        Column("SwitchedBy", "switched_by", title="Switched by"),
        Column("Description", "description", "prose", show="pages"),
        Column("File", lambda row, _: "shipped" if row.shipped else row.path, exact="path"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No rules: 'directories' in [rules] hold no valid rule."

    def list_warnings(self) -> Iterable[str]:
        """Return errors in rule files, and that rules are disabled."""
        yield from (problem.problem for problem in self.problems)
        if not self.running:
            yield "rules are disabled: set 'mode = \"on\"' in [rules]"


class RuleTrialRequest(Request, frozen=True, kw_only=True):
    """Request of rules.test: test an event against rules without running actions."""

    event: Annotated[
        dict[str, Any],
        described(
            "Event as 'steward events list --json' prints it, or "
            '``{"trigger": TYPE, "payload": {…}}``.'
        ),
    ]
    rule: Annotated[str, described("Only this rule; all if empty.")] = ""


class RuleTrialResult(ActionMessage, frozen=True, kw_only=True):
    """Outcome of a test for one rule.

    Attributes:
        rule: Name.
        enabled: Whether it is enabled.
        matches: Whether it matches the event.
        reason: Condition that failed, if it does not match.
        action: Operation that would run.
        parameters: Rendered parameters.
        error: Why templates or criteria could not be evaluated.
    """

    rule: str
    enabled: bool
    matches: bool
    reason: str = ""
    action: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""


class RuleTrialReply(Answer, frozen=True, kw_only=True):
    """Reply of rules.test.

    Attributes:
        trigger: Type of trigger that the event is.
        payload: Payload of the trigger.
        rules: Outcome for each rule with this type of trigger.
    """

    trigger: str
    payload: dict[str, Any]
    rules: tuple[RuleTrialResult, ...]


class SwitchRuleRequest(Request, frozen=True, kw_only=True):
    """Request of rules.enable and rules.disable: override the rule's file."""

    rule: Annotated[str, argument("Name of the rule.", "RULE")]


class SwitchRuleReply(Answer, frozen=True, kw_only=True):
    """Reply of rules.enable and rules.disable.

    Attributes:
        rule: Name.
        enabled: Whether it is enabled now.
        was: Whether it was enabled before.
    """

    rule: str
    enabled: bool
    was: bool

    def list_lines(self) -> Iterable[str]:
        """Return the state of the rule, and whether it is new."""
        state = "on" if self.enabled else "off"
        yield f"{self.rule} is {state}{' already' if self.was == self.enabled else ''}."


class RulesHistoryRequest(Request, frozen=True, kw_only=True):
    """Request of rules.history: list executions, newest first."""

    id: Annotated[int, argument("Only the execution with this number.", "ID", ge=0)] = 0
    rule: Annotated[str, option("Only executions of this rule.", "--rule", metavar="NAME")] = ""
    cluster: Annotated[
        str, option("Only executions of this cluster.", "--cluster", "-M", metavar="NAME")
    ] = ""
    status: Annotated[
        str,
        option(
            "Only executions of this phase or status: waiting, started, ended; succeeded, failed, "
            "timeout, unknown, dry-run, held-back.",
            "--status",
            metavar="STATUS",
        ),
    ] = ""
    since: Annotated[
        str,
        option(
            "Earliest decision time: now-1day, 2026-11-21T08:00.",
            *("--starttime", "--since", "-S"),
            metavar="TIME",
        ),
    ] = ""
    before: Annotated[int, described("Only executions with a lower number; all if 0.")] = 0
    limit: Annotated[
        int, option("Maximum number of executions.", "--limit", "-L", ge=1, le=100_000)
    ] = 100
    zone: HostZone = ""


def _read_run_time_s(row: Execution, _: object) -> str:
    """Return the duration of an execution, in seconds."""
    if row.started is None or row.ended is None:
        return ""
    return f"{(row.ended - row.started).total_seconds():.2f}"


class RulesHistoryReply(Answer, frozen=True, kw_only=True):
    """Reply of rules.history.

    Attributes:
        executions: Executions, newest first.
    """

    executions: tuple[Execution, ...]
    layout: ClassVar[Layout] = (
        Column("ID", "id", link="execution", right=True),
        Column("Triggered", "triggered", "time"),
        Column("Rule", "rule"),
        Column("Cluster", "cluster", show="pages"),
        Column("Event", "event"),
        Column("Subject", "subject_text", show="pages", max_width=60, exact="subject"),
        Column("Action", "action"),
        Column("Status", lambda row, _: row.status or row.phase, "state"),
        Column("Seconds", _read_run_time_s, title="Duration, s", right=True),
        Column("Attempts", "attempts", "count", show="requested"),
        Column("Audit", lambda row, _: row.audit or None, "count", show="requested"),
        Column(
            "Parameters",
            lambda row, _: msgspec.json.encode(row.parameters).decode(),
            show="requested",
        ),
        Column("Message", "message", max_width=70),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No execution matches. Only enabled rules start some: see 'steward rules list'."
