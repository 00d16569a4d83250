"""What rules can be asked: which there are, what they would do, what they did."""

from typing import TYPE_CHECKING, Any, Final

from steward.automation.errors import NotYours
from steward.automation.rules.shapes import (
    CheckAnswer,
    CheckRequest,
    HistoryAnswer,
    HistoryRequest,
    ListAnswer,
    ListRequest,
    RuleLine,
    SwitchAnswer,
    SwitchRequest,
    TroubleLine,
    TryAnswer,
    TryRequest,
)
from steward.core.access import Access, Asker
from steward.core.actions import Action
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import utc_now
from steward.core.sqlite import SqliteUnavailable
from steward.slurm.times import parse_time, zone_called

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from steward.automation.rules.book import Book, Signature, Trouble
    from steward.automation.rules.model import Rule
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
        from steward.automation.rules.book import load, signature

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
    from steward.automation.rules.checking import differences

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
    from steward.automation.rules.trying import tried

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
