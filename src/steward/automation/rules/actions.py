"""Rules actions (``rules.*``): check, list, test, enable and disable rules, show their history.

Their context is :class:`RulesRoom`; requests and replies are in
:mod:`steward.automation.rules.requests`. The handlers come first, then :data:`ACTIONS`, which
registers them, then ``tried``, the dry run of an event behind ``rules.test``, which ``steward rules
test`` also calls without a daemon.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.automation.errors import NotYours, RuleError
from steward.automation.rules.criteria import TookTooLong
from steward.automation.rules.decisions import rendered, why_not
from steward.automation.rules.model import Rule
from steward.automation.rules.requests import (
    CheckAnswer,
    CheckRequest,
    HistoryAnswer,
    HistoryRequest,
    ListAnswer,
    ListRequest,
    RuleLine,
    SwitchAnswer,
    SwitchRequest,
    TriedLine,
    TroubleLine,
    TryAnswer,
    TryRequest,
)
from steward.automation.rules.triggers import KINDS, TYPES, WINDOWS, Trigger, trigger_of
from steward.core.access import Access, Asker
from steward.core.actions import Action
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import BODIES, Event, utc_now
from steward.core.sqlite import SqliteUnavailable
from steward.slurm.times import parse_time, zone_called

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steward.automation.rules.rulebook import Book, Signature, Trouble
    from steward.automation.rules.store import Store


class RulesRoom:
    """Context of the rules' actions: loaded rules, history store and permission checks.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
    """

    def __init__(self, settings: Settings, *, access: Access) -> None:
        self.settings = settings
        self._access = access
        self._book: tuple[Signature, Book] | None = None

    def need_operator(self, asker: Asker) -> None:
        """Check that the caller is an operator of every cluster: rules see all jobs and nodes.

        Raises:
            NotYours: The caller is not.
        """
        if not all(self._access.is_operator(asker, name) for name in self._clusters()):
            raise NotYours("rules see everybody's jobs: they are for operators", asker.user)

    def need_administrator(self, asker: Asker) -> None:
        """Check that the caller is an administrator of every cluster.

        Raises:
            NotYours: The caller is not.
        """
        if not all(self._access.is_administrator(asker, name) for name in self._clusters()):
            raise NotYours("rules are switched by administrators", asker.user)

    def book(self) -> "Book":
        """Return the rules, reloaded if their files have changed."""
        from steward.automation.rules.rulebook import load, signature

        now = signature(self.settings.rules)
        if self._book is None or self._book[0] != now:
            self._book = now, load(self.settings.rules)
        return self._book[1]

    def store(self, *, read_only: bool = True) -> "Store":
        """Open the rules' database.

        Raises:
            SqliteUnavailable: It cannot be opened now, or does not exist yet.
        """
        from steward.automation.rules.store import Store

        return Store(self.settings.state_dir, read_only=read_only)

    def _clusters(self) -> list[str]:
        """Return the names of all clusters."""
        return list(self.settings.cluster) or [""]


def check(room: RulesRoom, asker: Asker, request: CheckRequest) -> CheckAnswer:  # noqa: ARG001 - an action's shape
    """Check the rules' files and return their errors.

    Raises:
        NotYours: The caller is not an operator.
    """
    room.need_operator(asker)
    rules = room.book()
    return checked(list(rules.rules.values()), rules.troubles)


def checked(rules: "Sequence[Rule]", troubles: "Iterable[Trouble]") -> CheckAnswer:
    """Report valid rules, with differences from StackStorm, and errors of invalid files."""
    from steward.automation.rules.rulebook import differences

    return CheckAnswer(
        rules=len(rules),
        troubles=tuple(TroubleLine(path=one.path, what=one.what) for one in troubles),
        differences=tuple(
            TroubleLine(path=rule.path, what=what) for rule in rules for what in differences(rule)
        ),
    )


def list_(room: RulesRoom, asker: Asker, request: ListRequest) -> ListAnswer:  # noqa: ARG001 - an action's shape
    """List the rules with their switches and execution counts.

    Raises:
        NotYours: The caller is not an operator.
    """
    room.need_operator(asker)
    rules = room.book()
    switches, counts = _known(room)
    lines = []
    for name, rule in rules.rules.items():
        switch, (acted, last) = switches.get(name), counts.get(name, (0, None))
        lines.append(
            RuleLine(
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
    return ListAnswer(
        running=room.settings.rules.enabled, rules=tuple(lines), troubles=_troubles(rules)
    )


def _known(room: RulesRoom) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return switches and execution counts by rule; empty if no rule ever ran."""
    try:
        store = room.store()
    except SqliteUnavailable:
        return {}, {}
    try:
        return store.switches(), store.counts()
    finally:
        store.close()


def try_(room: RulesRoom, asker: Asker, request: TryRequest) -> TryAnswer:
    """Test an event against rules without running anything.

    Raises:
        NotYours: The caller is not an operator.
        UsageError: The rule does not exist, or the event is invalid.
    """
    room.need_operator(asker)
    rules = room.book()
    switches, _ = _known(room)
    named = _named(rules, request.rule) if request.rule else None
    chosen = [named] if named is not None else list(rules.rules.values())
    on = {one.name for one in chosen if _is_on(one, switches)}
    return tried(request.event, chosen, on, explicit=named is not None)


def enable(room: RulesRoom, asker: Asker, request: SwitchRequest) -> SwitchAnswer:
    """Enable a rule, whatever its file says.

    Raises:
        NotYours: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(room, asker, request.rule, enabled=True)


def disable(room: RulesRoom, asker: Asker, request: SwitchRequest) -> SwitchAnswer:
    """Disable a rule; its waiting executions will not run.

    Raises:
        NotYours: The caller is not an administrator.
        UsageError: The rule does not exist.
    """
    return _switch(room, asker, request.rule, enabled=False)


def _switch(room: RulesRoom, asker: Asker, name: str, *, enabled: bool) -> SwitchAnswer:
    """Override a rule's file and return the previous state."""
    room.need_administrator(asker)
    rule = _named(room.book(), name)
    store = room.store(read_only=False)
    try:
        was = _is_on(rule, store.switches())
        store.switch(rule.name, enabled, asker.user or f"uid {asker.uid}", utc_now())
    finally:
        store.close()
    return SwitchAnswer(rule=rule.name, enabled=enabled, was=was)


def history(room: RulesRoom, asker: Asker, request: HistoryRequest) -> HistoryAnswer:
    """List executions of rules, newest first.

    Raises:
        NotYours: The caller is not an operator.
        TimeError: ``since`` is not a valid time.
    """
    room.need_operator(asker)
    since = None
    if request.since:
        since = parse_time(request.since, utc_now(), zone_called(request.zone))
    try:
        store = room.store()
    except SqliteUnavailable:
        # The database does not exist yet: no rule has run.
        return HistoryAnswer(executions=())
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
    return HistoryAnswer(executions=tuple(found))


def _named(rules: "Book", name: str) -> "Rule":
    """Return the rule with this name, or raise UsageError."""
    if name not in rules.rules:
        known = ", ".join(rules.rules) or "none"
        raise UsageError(f"there is no rule {name!r}: there are {known}", name)
    return rules.rules[name]


def _is_on(rule: "Rule", switches: dict[str, Any]) -> bool:
    """Return whether a rule is enabled, by switch or file."""
    switch = switches.get(rule.name)
    return rule.enabled if switch is None else bool(switch.enabled)


def _troubles(rules: "Book") -> tuple[TroubleLine, ...]:
    """Return the errors of invalid rule files."""
    return tuple(TroubleLine(path=one.path, what=one.what) for one in rules.troubles)


ACTIONS: Final = (
    Action(
        name="rules.check",
        help="Say whether the rules' files are right.",
        request=CheckRequest,
        answer=CheckAnswer,
        run=check,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.list",
        help="List the rules.",
        request=ListRequest,
        answer=ListAnswer,
        run=list_,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.test",
        help="Say what rules would make of an event.",
        request=TryRequest,
        answer=TryAnswer,
        run=try_,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="rules.enable",
        help="Switch a rule on.",
        request=SwitchRequest,
        answer=SwitchAnswer,
        run=enable,
        role="administrator",
    ),
    Action(
        name="rules.disable",
        help="Switch a rule off.",
        request=SwitchRequest,
        answer=SwitchAnswer,
        run=disable,
        role="administrator",
    ),
    Action(
        name="rules.history",
        help="Show what rules did.",
        request=HistoryRequest,
        answer=HistoryAnswer,
        run=history,
        only_reads=True,
        role="operator",
    ),
)


# Test of an event against rules (rules.test)


def tried(
    given: dict[str, Any], rules: Iterable[Rule], on: set[str], *, explicit: bool
) -> TryAnswer:
    """Test an event against rules: which match, and with which parameters each would act.

    Args:
        given: Event, in one of the forms of :class:`TryRequest`.
        rules: Rules to test.
        on: Names of the enabled rules.
        explicit: Whether to include rules for another type of trigger.

    Raises:
        UsageError: The event is invalid.
    """
    trigger = _trigger(given)
    lines = [
        _tried(rule, trigger, rule.name in on)
        for rule in rules
        if explicit or rule.trigger == trigger.type
    ]
    return TryAnswer(trigger=trigger.type, payload=trigger.payload, rules=tuple(lines))


def _tried(rule: Rule, trigger: Trigger, enabled: bool) -> TriedLine:
    """Test one rule against a trigger."""
    line = TriedLine(rule=rule.name, enabled=enabled, matches=False)
    if rule.trigger != trigger.type:
        why = f"it is about {rule.trigger}"
        return msgspec.structs.replace(line, why_not=why)
    try:
        missed = why_not(rule, trigger, utc_now())
        if missed is not None:
            why = f"{missed.key} is {missed.value!r}, not {missed.type} {missed.pattern!r}"
            return msgspec.structs.replace(line, why_not=why)
        line = msgspec.structs.replace(line, matches=True, action=rule.action)
        return msgspec.structs.replace(line, parameters=rendered(rule, trigger))
    except (RuleError, TookTooLong) as error:
        return msgspec.structs.replace(line, error=str(error))


def _trigger(given: dict[str, Any]) -> Trigger:
    """Convert an event in either form of :class:`TryRequest` to a trigger.

    Raises:
        UsageError: The event has neither form, or rules do not handle its kind.
    """
    if "trigger" in given:
        name, payload = str(given["trigger"]), given.get("payload")
        if name not in TYPES or not isinstance(payload, dict):
            raise UsageError(
                f'an event is {{"trigger": …, "payload": {{…}}}} with one of {", ".join(TYPES)}'
            )
        return Trigger(type=name, payload=payload)
    kind = str(given.get("kind"))
    if kind not in KINDS:
        raise UsageError(f"rules are told of these kinds of events: {', '.join(sorted(KINDS))}")
    try:
        whole = {"key": "", "source": "", "seen_at": given.get("at"), **given}
        event = msgspec.convert({**whole, "body": None}, Event, strict=False)
        body = msgspec.convert(given.get("body"), BODIES[kind], strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"this is no event of kind {kind}: {error}") from error
    event = msgspec.structs.replace(event, body=body)
    # The event does not include earlier failures: if it is a failure, count it as the first.
    count = int(bool(getattr(body, "failed", False)))
    found = trigger_of(event, lambda _event: {name: count for name, _ in WINDOWS})
    if found is None:
        raise UsageError("rules are not told of this event: another tells of the same")
    return found
