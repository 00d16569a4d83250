"""What rules would make of an event, without anything being done."""

from collections.abc import Iterable
from typing import Any

import msgspec

from steward.automation.errors import RuleError
from steward.automation.rules.bounded import TookTooLong
from steward.automation.rules.deciding import rendered, why_not
from steward.automation.rules.model import Rule
from steward.automation.rules.shapes import TriedLine, TryAnswer
from steward.automation.rules.triggers import KINDS, TYPES, WINDOWS, Trigger, trigger_of
from steward.core.errors import UsageError
from steward.core.events import BODIES, Event, utc_now


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
