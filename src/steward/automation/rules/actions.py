"""What rules can be asked: which there are, what they would do, what they did."""

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
    """The context of the rules' actions.

    Args:
        settings: The whole configuration.
        access: Who may see and do what.
    """

    def __init__(self, settings: Settings, *, access: Access) -> None:
        self.settings = settings
        self._access = access
        self._book: tuple[Signature, Book] | None = None

    def need_operator(self, asker: Asker) -> None:
        """Let operators of every cluster pass: rules see all jobs and nodes.

        Raises:
            NotYours: The asker is none.
        """
        if not all(self._access.is_operator(asker, name) for name in self._clusters()):
            raise NotYours("rules see everybody's jobs: they are for operators", asker.user)

    def need_administrator(self, asker: Asker) -> None:
        """Let administrators of every cluster pass.

        Raises:
            NotYours: The asker is none.
        """
        if not all(self._access.is_administrator(asker, name) for name in self._clusters()):
            raise NotYours("rules are switched by administrators", asker.user)

    def book(self) -> "Book":
        """The rules, as their files are now."""
        from steward.automation.rules.rulebook import load, signature

        now = signature(self.settings.rules)
        if self._book is None or self._book[0] != now:
            self._book = now, load(self.settings.rules)
        return self._book[1]

    def store(self, *, read_only: bool = True) -> "Store":
        """The history.

        Raises:
            SqliteUnavailable: It cannot be used now, or is not there yet.
        """
        from steward.automation.rules.store import Store

        return Store(self.settings.state_dir, read_only=read_only)

    def _clusters(self) -> list[str]:
        return list(self.settings.cluster) or [""]


def check(room: RulesRoom, asker: Asker, request: CheckRequest) -> CheckAnswer:  # noqa: ARG001 - an action's shape
    """Whether the rules' files are right.

    Raises:
        NotYours: The asker is no operator.
    """
    room.need_operator(asker)
    rules = room.book()
    return checked(list(rules.rules.values()), rules.troubles)


def checked(rules: "Sequence[Rule]", troubles: "Iterable[Trouble]") -> CheckAnswer:
    """What there is to say of rules that are right, and of files that are wrong."""
    from steward.automation.rules.rulebook import differences

    return CheckAnswer(
        rules=len(rules),
        troubles=tuple(TroubleLine(path=one.path, what=one.what) for one in troubles),
        differences=tuple(
            TroubleLine(path=rule.path, what=what) for rule in rules for what in differences(rule)
        ),
    )


def list_(room: RulesRoom, asker: Asker, request: ListRequest) -> ListAnswer:  # noqa: ARG001 - an action's shape
    """Which rules there are.

    Raises:
        NotYours: The asker is no operator.
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
    """What was switched, and how often each rule acted; nothing where none ever ran."""
    try:
        store = room.store()
    except SqliteUnavailable:
        return {}, {}
    try:
        return store.switches(), store.counts()
    finally:
        store.close()


def try_(room: RulesRoom, asker: Asker, request: TryRequest) -> TryAnswer:
    """What rules would make of an event.

    Raises:
        NotYours: The asker is no operator.
        UsageError: There is no such rule, or the event is none.
    """
    room.need_operator(asker)
    rules = room.book()
    switches, _ = _known(room)
    named = _named(rules, request.rule) if request.rule else None
    chosen = [named] if named is not None else list(rules.rules.values())
    on = {one.name for one in chosen if _is_on(one, switches)}
    return tried(request.event, chosen, on, explicit=named is not None)


def enable(room: RulesRoom, asker: Asker, request: SwitchRequest) -> SwitchAnswer:
    """Switch a rule on.

    Raises:
        NotYours: The asker is no administrator.
        UsageError: There is no such rule.
    """
    return _switch(room, asker, request.rule, enabled=True)


def disable(room: RulesRoom, asker: Asker, request: SwitchRequest) -> SwitchAnswer:
    """Switch a rule off; what waits is not done any more.

    Raises:
        NotYours: The asker is no administrator.
        UsageError: There is no such rule.
    """
    return _switch(room, asker, request.rule, enabled=False)


def _switch(room: RulesRoom, asker: Asker, name: str, *, enabled: bool) -> SwitchAnswer:
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
    """What rules did.

    Raises:
        NotYours: The asker is no operator.
        TimeError: ``since`` is no time.
    """
    room.need_operator(asker)
    since = None
    if request.since:
        since = parse_time(request.since, utc_now(), zone_called(request.zone))
    try:
        store = room.store()
    except SqliteUnavailable:
        # Nothing was ever done.
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
    if name not in rules.rules:
        known = ", ".join(rules.rules) or "none"
        raise UsageError(f"there is no rule {name!r}: there are {known}", name)
    return rules.rules[name]


def _is_on(rule: "Rule", switches: dict[str, Any]) -> bool:
    switch = switches.get(rule.name)
    return rule.enabled if switch is None else bool(switch.enabled)


def _troubles(rules: "Book") -> tuple[TroubleLine, ...]:
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


def tried(
    given: dict[str, Any], rules: Iterable[Rule], on: set[str], *, explicit: bool
) -> TryAnswer:
    """What some rules would make of an event.

    Args:
        given: The event, in one of the forms of :class:`TryRequest`.
        rules: The rules.
        on: Names of those that are on.
        explicit: Whether rules of another trigger are told as well.

    Raises:
        UsageError: The event is none.
    """
    trigger = _trigger(given)
    lines = [
        _tried(rule, trigger, rule.name in on)
        for rule in rules
        if explicit or rule.trigger == trigger.type
    ]
    return TryAnswer(trigger=trigger.type, payload=trigger.payload, rules=tuple(lines))


def _tried(rule: Rule, trigger: Trigger, enabled: bool) -> TriedLine:
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
    """What an event is to rules, from either form.

    Raises:
        UsageError: It has neither form, or rules are not told of its kind.
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
    # What came before is not in the event: where it failed, this is its first failure.
    count = int(bool(getattr(body, "failed", False)))
    found = trigger_of(event, lambda _event: {name: count for name, _ in WINDOWS})
    if found is None:
        raise UsageError("rules are not told of this event: another tells of the same")
    return found
