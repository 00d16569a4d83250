"""Rules actions (``rules.*``): check, list, test, enable and disable rules, show their history.

Their context is :class:`RulesContext`; requests and replies are in
:mod:`steward.automation.rules.requests`. The handlers come first, then :data:`ACTIONS`, which
registers them, then ``try_rules``, which tests an event against rules for the handler ``try_event``
(``rules.test``) and for ``steward rules test``, which calls it without a daemon.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.automation.errors import OperationForbidden, RuleError
from steward.automation.rules.criteria import TimeLimitExceeded
from steward.automation.rules.decisions import find_mismatch, render_parameters
from steward.automation.rules.model import Rule
from steward.automation.rules.requests import (
    CheckRulesReply,
    CheckRulesRequest,
    ListRulesReply,
    ListRulesRequest,
    RuleProblem,
    RulesHistoryReply,
    RulesHistoryRequest,
    RuleSummary,
    RuleTrialReply,
    RuleTrialRequest,
    RuleTrialResult,
    SwitchRuleReply,
    SwitchRuleRequest,
)
from steward.automation.rules.triggers import (
    FAILURE_WINDOWS,
    TRIGGER_KINDS,
    TRIGGER_TYPES,
    Trigger,
    make_trigger,
)
from steward.core.access import Access, Caller
from steward.core.actions import Action
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import BODIES, Event, utc_now
from steward.core.sqlite import SqliteUnavailable
from steward.slurm.times import load_zone, parse_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steward.automation.rules.rulebook import FileError, FilesSignature, Rulebook
    from steward.automation.rules.store import RulesStore


class RulesContext:
    """Context of the rules' actions: loaded rules, history store and permission checks.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
    """

    def __init__(self, settings: Settings, *, access: Access) -> None:
        self.settings = settings
        self._access = access
        self._book: tuple[FilesSignature, Rulebook] | None = None

    def need_operator(self, asker: Caller) -> None:
        """Check that the caller is an operator of every cluster: rules see all jobs and nodes.

        Raises:
            OperationForbidden: The caller is not.
        """
        if not all(self._access.is_operator(asker, name) for name in self._clusters()):
            raise OperationForbidden(
                "rules see everybody's jobs: they are for operators", asker.user
            )

    def need_administrator(self, asker: Caller) -> None:
        """Check that the caller is an administrator of every cluster.

        Raises:
            OperationForbidden: The caller is not.
        """
        if not all(self._access.is_administrator(asker, name) for name in self._clusters()):
            raise OperationForbidden("rules are switched by administrators", asker.user)

    def book(self) -> "Rulebook":
        """Return the rules, reloaded if their files have changed."""
        from steward.automation.rules.rulebook import compute_signature, load_rulebook

        now = compute_signature(self.settings.rules)
        if self._book is None or self._book[0] != now:
            self._book = now, load_rulebook(self.settings.rules)
        return self._book[1]

    def store(self, *, read_only: bool = True) -> "RulesStore":
        """Open the rules' database.

        Raises:
            SqliteUnavailable: It cannot be opened now, or does not exist yet.
        """
        from steward.automation.rules.store import RulesStore

        return RulesStore(self.settings.state_dir, read_only=read_only)

    def _clusters(self) -> list[str]:
        """Return the names of all clusters."""
        return list(self.settings.cluster) or [""]


def validate_rule_files(
    room: RulesContext,
    asker: Caller,
    request: CheckRulesRequest,  # noqa: ARG001 - an action's shape
) -> CheckRulesReply:
    """Check the rules' files and return their errors.

    Raises:
        OperationForbidden: The caller is not an operator.
    """
    room.need_operator(asker)
    rules = room.book()
    return report_check(list(rules.rules.values()), rules.troubles)


def report_check(rules: "Sequence[Rule]", troubles: "Iterable[FileError]") -> CheckRulesReply:
    """Report valid rules, with differences from StackStorm, and errors of invalid files."""
    from steward.automation.rules.validation import compare_with_stackstorm

    return CheckRulesReply(
        rules=len(rules),
        troubles=tuple(RuleProblem(path=one.path, what=one.what) for one in troubles),
        differences=tuple(
            RuleProblem(path=rule.path, what=what)
            for rule in rules
            for what in compare_with_stackstorm(rule)
        ),
    )


def list_rules(room: RulesContext, asker: Caller, request: ListRulesRequest) -> ListRulesReply:  # noqa: ARG001 - an action's shape
    """List the rules with their switches and execution counts.

    Raises:
        OperationForbidden: The caller is not an operator.
    """
    room.need_operator(asker)
    rules = room.book()
    switches, counts = _read_switches_and_counts(room)
    lines = []
    for name, rule in rules.rules.items():
        switch, (acted, last) = switches.get(name), counts.get(name, (0, None))
        lines.append(
            RuleSummary(
                rule=name,
                enabled=rule.enabled if switch is None else switch.enabled,
                switched_by="" if switch is None else switch.who,
                trigger=rule.trigger,
                action=rule.action,
                description=rule.description,
                dry_run=rule.care.dry_run or room.settings.rules.dry_run,
                acted=acted,
                last=last,
                path=rule.path,
                shipped=rule.shipped,
            )
        )
    return ListRulesReply(
        running=room.settings.rules.enabled, rules=tuple(lines), troubles=_list_rule_errors(rules)
    )


def _read_switches_and_counts(room: RulesContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return switches and execution counts by rule; empty if no rule ever ran."""
    try:
        store = room.store()
    except SqliteUnavailable:
        return {}, {}
    try:
        return store.switches(), store.counts()
    finally:
        store.close()


def try_event(room: RulesContext, asker: Caller, request: RuleTrialRequest) -> RuleTrialReply:
    """Test an event against rules without running anything.

    Raises:
        OperationForbidden: The caller is not an operator.
        UsageError: The rule does not exist, or the event is invalid.
    """
    room.need_operator(asker)
    rules = room.book()
    switches, _ = _read_switches_and_counts(room)
    named = _find_rule(rules, request.rule) if request.rule else None
    chosen = [named] if named is not None else list(rules.rules.values())
    on = {one.name for one in chosen if _is_rule_enabled(one, switches)}
    return try_rules(request.event, chosen, on, explicit=named is not None)


def enable_rule(room: RulesContext, asker: Caller, request: SwitchRuleRequest) -> SwitchRuleReply:
    """Enable a rule, whatever its file says.

    Raises:
        OperationForbidden: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(room, asker, request.rule, enabled=True)


def disable_rule(room: RulesContext, asker: Caller, request: SwitchRuleRequest) -> SwitchRuleReply:
    """Disable a rule; its waiting executions will not run.

    Raises:
        OperationForbidden: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(room, asker, request.rule, enabled=False)


def _switch(room: RulesContext, asker: Caller, name: str, *, enabled: bool) -> SwitchRuleReply:
    """Override a rule's file and return the previous state."""
    room.need_administrator(asker)
    rule = _find_rule(room.book(), name)
    store = room.store(read_only=False)
    try:
        was = _is_rule_enabled(rule, store.switches())
        store.switch(rule.name, enabled, asker.user or f"uid {asker.uid}", utc_now())
    finally:
        store.close()
    return SwitchRuleReply(rule=rule.name, enabled=enabled, was=was)


def list_executions(
    room: RulesContext, asker: Caller, request: RulesHistoryRequest
) -> RulesHistoryReply:
    """List executions of rules, newest first.

    Raises:
        OperationForbidden: The caller is not an operator.
        TimeError: ``since`` is not a valid time.
    """
    room.need_operator(asker)
    since = None
    if request.since:
        since = parse_time(request.since, utc_now(), load_zone(request.zone))
    try:
        store = room.store()
    except SqliteUnavailable:
        # The database does not exist yet: no rule has run.
        return RulesHistoryReply(executions=())
    try:
        found = store.history(
            limit=request.limit,
            rule=request.rule,
            cluster=request.cluster,
            status=request.status,
            since=since,
            before=request.before,
            number=request.id,
        )
    finally:
        store.close()
    return RulesHistoryReply(executions=tuple(found))


def _find_rule(rules: "Rulebook", name: str) -> "Rule":
    """Return the rule with this name, or raise UsageError."""
    if name not in rules.rules:
        known = ", ".join(rules.rules) or "none"
        raise UsageError(f"there is no rule {name!r}: there are {known}", name)
    return rules.rules[name]


def _is_rule_enabled(rule: "Rule", switches: dict[str, Any]) -> bool:
    """Return whether a rule is enabled, by switch or file."""
    switch = switches.get(rule.name)
    return rule.enabled if switch is None else bool(switch.enabled)


def _list_rule_errors(rules: "Rulebook") -> tuple[RuleProblem, ...]:
    """Return the errors of invalid rule files."""
    return tuple(RuleProblem(path=one.path, what=one.what) for one in rules.troubles)


ACTIONS: Final = (
    Action(
        name="rules.check",
        help="Say whether the rules' files are right.",
        request=CheckRulesRequest,
        answer=CheckRulesReply,
        run=validate_rule_files,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.list",
        help="List the rules.",
        request=ListRulesRequest,
        answer=ListRulesReply,
        run=list_rules,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.test",
        help="Say what rules would make of an event.",
        request=RuleTrialRequest,
        answer=RuleTrialReply,
        run=try_event,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.enable",
        help="Switch a rule on.",
        request=SwitchRuleRequest,
        answer=SwitchRuleReply,
        run=enable_rule,
        role="administrator",
    ),
    Action(
        name="rules.disable",
        help="Switch a rule off.",
        request=SwitchRuleRequest,
        answer=SwitchRuleReply,
        run=disable_rule,
        role="administrator",
    ),
    Action(
        name="rules.history",
        help="Show what rules did.",
        request=RulesHistoryRequest,
        answer=RulesHistoryReply,
        run=list_executions,
        only_reads=True,
        role="operator",
    ),
)


# Test of an event against rules (rules.test)


def try_rules(
    given: dict[str, Any], rules: Iterable[Rule], on: set[str], *, explicit: bool
) -> RuleTrialReply:
    """Test an event against rules: which match, and with which parameters each would act.

    Args:
        given: Event, in one of the forms of :class:`RuleTrialRequest`.
        rules: Rules to test.
        on: Names of the enabled rules.
        explicit: Whether to include rules for another type of trigger.

    Raises:
        UsageError: The event is invalid.
    """
    trigger = _parse_trigger(given)
    lines = [
        _test_rule(rule, trigger, rule.name in on)
        for rule in rules
        if explicit or rule.trigger == trigger.type
    ]
    return RuleTrialReply(trigger=trigger.type, payload=trigger.payload, rules=tuple(lines))


def _test_rule(rule: Rule, trigger: Trigger, enabled: bool) -> RuleTrialResult:
    """Test one rule against a trigger."""
    line = RuleTrialResult(rule=rule.name, enabled=enabled, matches=False)
    if rule.trigger != trigger.type:
        why = f"it is about {rule.trigger}"
        return msgspec.structs.replace(line, why_not=why)
    try:
        missed = find_mismatch(rule, trigger, utc_now())
        if missed is not None:
            why = f"{missed.key} is {missed.value!r}, not {missed.type} {missed.pattern!r}"
            return msgspec.structs.replace(line, why_not=why)
        line = msgspec.structs.replace(line, matches=True, action=rule.action)
        return msgspec.structs.replace(line, parameters=render_parameters(rule, trigger))
    except (RuleError, TimeLimitExceeded) as error:
        return msgspec.structs.replace(line, error=str(error))


def _parse_trigger(given: dict[str, Any]) -> Trigger:
    """Convert an event in either form of :class:`RuleTrialRequest` to a trigger.

    Raises:
        UsageError: The event has neither form, or rules do not handle its kind.
    """
    if "trigger" in given:
        name, payload = str(given["trigger"]), given.get("payload")
        if name not in TRIGGER_TYPES or not isinstance(payload, dict):
            raise UsageError(
                f'an event is {{"trigger": …, "payload": {{…}}}} with one of '
                f"{', '.join(TRIGGER_TYPES)}"
            )
        return Trigger(type=name, payload=payload)
    kind = str(given.get("kind"))
    if kind not in TRIGGER_KINDS:
        raise UsageError(
            f"rules are told of these kinds of events: {', '.join(sorted(TRIGGER_KINDS))}"
        )
    try:
        whole = {"key": "", "source": "", "seen_at": given.get("at"), **given}
        event = msgspec.convert({**whole, "body": None}, Event, strict=False)
        body = msgspec.convert(given.get("body"), BODIES[kind], strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"this is no event of kind {kind}: {error}") from error
    event = msgspec.structs.replace(event, body=body)
    # The event does not include earlier failures: if it is a failure, count it as the first.
    count = int(bool(getattr(body, "failed", False)))
    found = make_trigger(event, lambda _event: {name: count for name, _ in FAILURE_WINDOWS})
    if found is None:
        raise UsageError("rules are not told of this event: another tells of the same")
    return found
