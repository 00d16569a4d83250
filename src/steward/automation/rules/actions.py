"""Rules actions (``rules.*``): check, list, test, enable and disable rules, show their history.

Their context is :class:`RulesContext`; requests and replies are in
:mod:`steward.automation.rules.requests`. The actions come first, then ``try_rules``, which tests an
event against rules for ``rules.test`` and for ``steward rules test``, which calls it without a
daemon.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

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
from steward.automation.settings import SHIPPED, RulesSettings
from steward.core.access import Access, Caller
from steward.core.actions import action, route
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import BODIES, Event, utc_now
from steward.core.sqlite import SqliteMissing
from steward.jobs.queries import check_clusters, list_clusters
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
        self._rulebook: tuple[FilesSignature, Rulebook] | None = None

    def require_operator(self, asker: Caller) -> None:
        """Check that the caller is an operator of every cluster: rules see all jobs and nodes.

        Raises:
            OperationForbidden: The caller is not.
        """
        if not all(self._access.is_operator(asker, name) for name in self._list_clusters()):
            raise OperationForbidden(
                "permission denied: rules concern jobs of all users, so only operators of every "
                "cluster may see them",
                asker.user,
            )

    def require_administrator(self, asker: Caller) -> None:
        """Check that the caller is an administrator of every cluster.

        Raises:
            OperationForbidden: The caller is not.
        """
        if not all(self._access.is_administrator(asker, name) for name in self._list_clusters()):
            raise OperationForbidden(
                "permission denied: only administrators may enable or disable rules", asker.user
            )

    def load_rules(self) -> "Rulebook":
        """Return the rules, reloaded if their files have changed."""
        from steward.automation.rules.rulebook import compute_signature, load_rulebook

        signature = compute_signature(self.settings.rules)
        if self._rulebook is None or self._rulebook[0] != signature:
            self._rulebook = signature, load_rulebook(self.settings.rules)
        return self._rulebook[1]

    def open_store(self, *, read_only: bool = True) -> "RulesStore":
        """Open the rules' database.

        Raises:
            SqliteUnavailable: It cannot be opened now, or does not exist yet.
        """
        from steward.automation.rules.store import RulesStore

        return RulesStore(self.settings.state_dir, read_only=read_only)

    def _list_clusters(self) -> list[str]:
        """Return the names of all clusters."""
        return list(self.settings.cluster) or [""]


@action(
    "rules.check",
    scope="read",
    role="operator",
    only_reads=True,
)
def validate_rule_files(
    context: RulesContext,
    asker: Caller,
    request: CheckRulesRequest,  # noqa: ARG001 - an action's shape
) -> CheckRulesReply:
    """Check rule files and report errors.

    Raises:
        OperationForbidden: The caller is not an operator.
    """
    context.require_operator(asker)
    rulebook = context.load_rules()
    errors = [*rulebook.troubles, *_find_excluded_rules(context, rulebook)]
    return report_check(list(rulebook.rules.values()), errors)


def _find_excluded_rules(context: RulesContext, rulebook: "Rulebook") -> Iterator["FileError"]:
    """Yield an error if administrators enabled shipped rules that ``directories`` excludes."""
    from steward.automation.rules.rulebook import FileError, load_rulebook

    if SHIPPED in context.settings.rules.directories:
        return
    switches, _ = _read_switches_and_counts(context)
    shipped = load_rulebook(RulesSettings(directories=(SHIPPED,))).rules.keys()
    names = sorted(
        name
        for name in shipped - rulebook.rules.keys()
        if name in switches and switches[name].enabled
    )
    if names:
        subject = "[rules] directories"
        message = (
            f"{subject}: enabled shipped rules do not run: {', '.join(names)}. Add {SHIPPED!r}; "
            "'steward rules disable RULE' then disables one"
        )
        yield FileError(path=subject, what=message)


def report_check(rules: "Sequence[Rule]", errors: "Iterable[FileError]") -> CheckRulesReply:
    """Report valid rules, with differences from StackStorm, and errors of invalid files."""
    from steward.automation.rules.validation import compare_with_stackstorm

    return CheckRulesReply(
        rules=len(rules),
        problems=tuple(RuleProblem(path=error.path, problem=error.what) for error in errors),
        differences=tuple(
            RuleProblem(path=rule.path, problem=message)
            for rule in rules
            for message in compare_with_stackstorm(rule)
        ),
    )


@action(
    "rules.list",
    scope="admin",
    role="operator",
    command="rules list",
    rows="rules",
    routes=(route("GET /rules"),),
    only_reads=True,
)
def list_rules(context: RulesContext, asker: Caller, request: ListRulesRequest) -> ListRulesReply:  # noqa: ARG001 - an action's shape
    """List rules with their states and execution counts.

    Raises:
        OperationForbidden: The caller is not an operator.
    """
    context.require_operator(asker)
    rulebook = context.load_rules()
    switches, counts = _read_switches_and_counts(context)
    summaries = []
    for name, rule in rulebook.rules.items():
        switch, (count, last) = switches.get(name), counts.get(name, (0, None))
        summaries.append(
            RuleSummary(
                rule=name,
                enabled=rule.enabled if switch is None else switch.enabled,
                switched_by="" if switch is None else switch.who,
                trigger=rule.trigger,
                action=rule.action,
                description=rule.description,
                dry_run=rule.limits.dry_run or context.settings.rules.mode == "dry-run",
                executions=count,
                last_execution=last,
                path=rule.path,
                shipped=rule.shipped,
            )
        )
    return ListRulesReply(
        running=context.settings.rules.is_enabled,
        rules=tuple(summaries),
        problems=_list_rule_errors(rulebook),
    )


def _read_switches_and_counts(context: RulesContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return switches and execution counts by rule; empty if no rule ever ran."""
    try:
        store = context.open_store()
    except SqliteMissing:
        return {}, {}
    try:
        return store.read_switches(), store.count_executions()
    finally:
        store.close()


@action(
    "rules.test",
    scope="admin",
    role="operator",
    only_reads=True,
)
def try_event(context: RulesContext, asker: Caller, request: RuleTrialRequest) -> RuleTrialReply:
    """Test an event against rules without running actions.

    Raises:
        OperationForbidden: The caller is not an operator.
        UsageError: The rule does not exist, or the event is invalid.
    """
    context.require_operator(asker)
    rulebook = context.load_rules()
    switches, _ = _read_switches_and_counts(context)
    named_rule = _find_rule(rulebook, request.rule) if request.rule else None
    candidates = [named_rule] if named_rule is not None else list(rulebook.rules.values())
    enabled = {rule.name for rule in candidates if _is_rule_enabled(rule, switches)}
    return try_rules(request.event, candidates, enabled, include_all=named_rule is not None)


@action(
    "rules.enable",
    scope="admin",
    role="administrator",
    command="rules enable",
    routes=(route("POST /rules/{rule}/enable"),),
)
def enable_rule(
    context: RulesContext, asker: Caller, request: SwitchRuleRequest
) -> SwitchRuleReply:
    """Enable a rule, whatever its file says.

    Raises:
        OperationForbidden: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(context, asker, request.rule, enabled=True)


@action(
    "rules.disable",
    scope="admin",
    role="administrator",
    command="rules disable",
    routes=(route("POST /rules/{rule}/disable"),),
)
def disable_rule(
    context: RulesContext, asker: Caller, request: SwitchRuleRequest
) -> SwitchRuleReply:
    """Disable a rule, whatever its file says, and hold back its waiting executions.

    Raises:
        OperationForbidden: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(context, asker, request.rule, enabled=False)


def _switch(context: RulesContext, asker: Caller, name: str, *, enabled: bool) -> SwitchRuleReply:
    """Override a rule's file and return the previous state."""
    context.require_administrator(asker)
    rule = _find_rule(context.load_rules(), name)
    store = context.open_store(read_only=False)
    try:
        was_enabled = _is_rule_enabled(rule, store.read_switches())
        store.set_switch(rule.name, enabled, asker.signature, utc_now())
    finally:
        store.close()
    return SwitchRuleReply(rule=rule.name, enabled=enabled, was=was_enabled)


@action(
    "rules.history",
    scope="admin",
    role="operator",
    command="rules history",
    rows="executions",
    routes=(route("GET /rules/executions"),),
    only_reads=True,
)
def list_executions(
    context: RulesContext, asker: Caller, request: RulesHistoryRequest
) -> RulesHistoryReply:
    """List executions of rules, newest first.

    Raises:
        OperationForbidden: The caller is not an operator.
        TimeError: ``since`` is not a valid time.
        UsageError: The cluster does not exist.
    """
    context.require_operator(asker)
    if request.cluster:
        check_clusters([request.cluster], list_clusters(context.settings))
    since = None
    if request.since:
        since = parse_time(request.since, utc_now(), load_zone(request.zone))
    try:
        store = context.open_store()
    except SqliteMissing:
        # The database does not exist yet: no rule has run.
        return RulesHistoryReply(executions=())
    try:
        executions = store.list_executions(
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
    return RulesHistoryReply(executions=tuple(executions))


def _find_rule(rulebook: "Rulebook", name: str) -> "Rule":
    """Return the rule with this name, or raise UsageError."""
    if name not in rulebook.rules:
        names = ", ".join(rulebook.rules) or "none"
        raise UsageError(f"unknown rule {name!r}: the rules are {names}", name)
    return rulebook.rules[name]


def _is_rule_enabled(rule: "Rule", switches: dict[str, Any]) -> bool:
    """Return whether a rule is enabled, by switch or file."""
    switch = switches.get(rule.name)
    return rule.enabled if switch is None else bool(switch.enabled)


def _list_rule_errors(rulebook: "Rulebook") -> tuple[RuleProblem, ...]:
    """Return the errors of invalid rule files."""
    return tuple(RuleProblem(path=error.path, problem=error.what) for error in rulebook.troubles)


# Test of an event against rules (rules.test)


def try_rules(
    event_data: dict[str, Any], rules: Iterable[Rule], enabled: set[str], *, include_all: bool
) -> RuleTrialReply:
    """Test an event against rules: which match, and with which parameters each would act.

    Args:
        event_data: Event, in one of the forms of :class:`RuleTrialRequest`.
        rules: Rules to test.
        enabled: Names of the enabled rules.
        include_all: Whether to include rules for another type of trigger.

    Raises:
        UsageError: The event is invalid.
    """
    trigger = _parse_trigger(event_data)
    results = [
        _test_rule(rule, trigger, rule.name in enabled)
        for rule in rules
        if include_all or rule.trigger == trigger.type
    ]
    return RuleTrialReply(trigger=trigger.type, payload=trigger.payload, rules=tuple(results))


def _test_rule(rule: Rule, trigger: Trigger, enabled: bool) -> RuleTrialResult:
    """Test one rule against a trigger."""
    result = RuleTrialResult(rule=rule.name, enabled=enabled, matches=False)
    if rule.trigger != trigger.type:
        reason = f"the rule's trigger is {rule.trigger}"
        return msgspec.structs.replace(result, reason=reason)
    try:
        failed = find_mismatch(rule, trigger, utc_now())
        if failed is not None:
            reason = (
                f"{failed.key} is {failed.value!r}, but the criterion is {failed.type} "
                f"{failed.pattern!r}"
            )
            return msgspec.structs.replace(result, reason=reason)
        result = msgspec.structs.replace(result, matches=True, action=rule.action)
        return msgspec.structs.replace(result, parameters=render_parameters(rule, trigger))
    except (RuleError, TimeLimitExceeded) as error:
        return msgspec.structs.replace(result, error=str(error))


def _parse_trigger(event_data: dict[str, Any]) -> Trigger:
    """Convert an event in either form of :class:`RuleTrialRequest` to a trigger.

    Raises:
        UsageError: The event has neither form, or rules do not handle its kind.
    """
    if "trigger" in event_data:
        name, payload = str(event_data["trigger"]), event_data.get("payload")
        if name not in TRIGGER_TYPES or not isinstance(payload, dict):
            raise UsageError(
                'invalid event: write {"trigger": …, "payload": {…}} with one of '
                f"{', '.join(TRIGGER_TYPES)}"
            )
        return Trigger(type=name, payload=payload)
    kind = str(event_data.get("kind"))
    if kind not in TRIGGER_KINDS:
        raise UsageError(
            "no rule can have this kind of event as trigger: use one of "
            f"{', '.join(sorted(TRIGGER_KINDS))}"
        )
    try:
        fields = {"key": "", "source": "", "seen_at": event_data.get("at"), **event_data}
        event = msgspec.convert({**fields, "body": None}, Event, strict=False)
        body = msgspec.convert(event_data.get("body"), BODIES[kind], strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid event of kind {kind}: {error}") from error
    event = msgspec.structs.replace(event, body=body)
    # The event does not include earlier failures: if it is a failure, count it as the first.
    count = int(bool(getattr(body, "failed", False)))
    trigger = make_trigger(event, lambda _event: {name: count for name, _ in FAILURE_WINDOWS})
    if trigger is None:
        raise UsageError(
            "this event triggers no rule, because another event reports the same change: "
            "test that event"
        )
    return trigger
