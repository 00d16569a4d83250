"""Decisions of rules: which rules act on an event, which are held back, and why.

:class:`RuleDecider` is called by the consumer within its transaction. For each enabled rule of the
event's trigger type it compares criteria, applies maximum age, de-duplication and rate limit,
renders the parameters, and stores an execution (waiting, held back or failed).
"""

import logging
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.automation.errors import RuleError
from steward.automation.rules.criteria import (
    FailedCriterion,
    TimeLimitExceeded,
    find_failed_criterion,
    limit_run_time,
    look_up,
)
from steward.automation.rules.model import Rule, format_rule_duration
from steward.automation.rules.store import STATUS_HELD_BACK, Execution, RulesStore
from steward.automation.rules.templates import render_value
from steward.automation.rules.triggers import Trigger, read_subject
from steward.core.events import Event

log = logging.getLogger(__name__)

LIMIT_S: Final = 0.5
"""Time limit per event for a rule's criteria, and for its templates, in seconds each."""
_SKIP_S: Final = 60.0
"""Time for which a rule that exceeded its time limit is skipped, in seconds."""
_MAX_SUBJECT_LENGTH: Final = 500
"""Maximum length of a subject, in characters."""


class RuleDecider:
    """Decider on events: creates the executions that an event causes.

    Args:
        store: Earlier decisions, and where new ones are stored.
        dry_run: Whether actions of all rules only report what they would do.
    """

    def __init__(self, store: RulesStore, *, dry_run: bool) -> None:
        self._store = store
        self._dry_run = dry_run
        self._skipped_until: dict[str, float] = {}

    def decide(
        self, event: Event, trigger: Trigger, rules: Iterable[Rule], now: datetime
    ) -> list[Execution]:
        """Create and store the executions that an event causes, within a transaction.

        Rules that have decided on this event before are skipped.

        Args:
            event: The event.
            trigger: The event as a trigger.
            rules: Enabled rules.
            now: Current time.
        """
        executions = []
        for rule in rules:
            if rule.trigger != trigger.type or self._store.is_decided(rule.name, event):
                continue
            execution = self._decide_rule(rule, event, trigger, now)
            stored = None if execution is None else self._store.insert(execution)
            if stored is not None:
                executions.append(stored)
        return executions

    def _decide_rule(
        self, rule: Rule, event: Event, trigger: Trigger, now: datetime
    ) -> Execution | None:
        """Decide for one rule; None if it does not match."""
        limits = rule.limits
        if time.monotonic() < self._skipped_until.get(rule.name, 0.0):
            return None
        execution = Execution(
            rule=rule.name,
            cluster=event.cluster,
            event=event.key,
            trigger=trigger.type,
            subject=compute_subject(rule, trigger),
            action=rule.action,
            dry_run=self._dry_run or limits.dry_run,
            at=event.at,
            triggered=now,
            due=now,
        )
        try:
            if find_mismatch(rule, trigger, now) is not None:
                return None
            reason = self._find_limit_reason(rule, execution, now)
            if reason:
                return end_unstarted(execution, STATUS_HELD_BACK, reason)
            return msgspec.structs.replace(execution, parameters=render_parameters(rule, trigger))
        except RuleError as error:
            log.error("cannot evaluate rule %s for %s: %s", rule.name, event.key, error)
            return end_unstarted(execution, "failed", str(error))
        except TimeLimitExceeded as error:
            # More events like this one would delay all rules, so this rule is skipped for a while.
            self._skipped_until[rule.name] = time.monotonic() + _SKIP_S
            log.error("rule %s is suspended for %g s: %s", rule.name, _SKIP_S, error)
            return end_unstarted(execution, "failed", str(error))

    def _find_limit_reason(self, rule: Rule, execution: Execution, now: datetime) -> str:
        """Return why a matching rule does not act on an event; "" if it acts."""
        limits = rule.limits
        age_s = (now - execution.at).total_seconds()
        if age_s > limits.max_age_s:
            return (
                f"the event is {format_rule_duration(round(age_s))} old, more than "
                f"{format_rule_duration(limits.max_age_s)}"
            )
        if limits.dedup_window_s:
            since = now - timedelta(seconds=limits.dedup_window_s)
            previous = self._store.find_recent_execution(rule.name, execution.subject, since)
            if previous is not None:
                window = format_rule_duration(limits.dedup_window_s)
                return f"duplicate within {window} of execution {previous.id}"
        since = now - timedelta(seconds=limits.rate_limit.seconds)
        if self._store.count_executions_since(rule.name, since) >= limits.rate_limit.max_count:
            return f"the rate limit {limits.rate_limit} is reached"
        return ""


def find_mismatch(rule: Rule, trigger: Trigger, now: datetime) -> FailedCriterion | None:
    """Return the first condition of a rule that a trigger fails; None if the rule matches.

    Raises:
        TimeLimitExceeded: The rule's criteria exceed the time limit.
    """
    for name, expected in rule.trigger_parameters.items():
        actual = trigger.payload.get(name)
        if actual != expected:
            key = f"trigger.parameters.{name}"
            return FailedCriterion(key=key, type="equals", pattern=expected, value=actual)
    with limit_run_time(LIMIT_S, f"the criteria of rule {rule.name}"):
        return find_failed_criterion(rule.criteria, trigger.payload, now)


def render_parameters(rule: Rule, trigger: Trigger) -> dict[str, Any]:
    """Render a rule's parameters with a trigger's payload.

    Raises:
        RenderError: A template cannot be rendered.
        TimeLimitExceeded: The templates exceed the time limit.
    """
    with limit_run_time(LIMIT_S, f"the templates of rule {rule.name}"):
        parameters: dict[str, Any] = render_value(rule.parameters, trigger.payload)
    return parameters


def compute_subject(rule: Rule, trigger: Trigger) -> str:
    """Compute the subject of a trigger, the value by which a rule de-duplicates."""
    paths = rule.limits.dedup_by
    payload: Mapping[str, Any] = trigger.payload
    values = [look_up(payload, path) for path in paths] if paths else list(read_subject(trigger))
    return msgspec.json.encode(values).decode()[:_MAX_SUBJECT_LENGTH]


def end_unstarted(execution: Execution, status: str, message: str) -> Execution:
    """Return an execution that ends without starting: held back or failed."""
    return msgspec.structs.replace(
        execution, phase="ended", status=status, message=message, ended=execution.triggered
    )
