"""Whether a rule that could be read makes sense: its action, what that takes, what it is given."""

from collections.abc import Iterator
from typing import Any

from steward.automation.catalogue import operation
from steward.automation.describing import parameters_of, read
from steward.automation.errors import UnknownOperation, WrongParameters
from steward.automation.rules import caps, rendering
from steward.automation.rules.model import Key, Rule
from steward.automation.rules.triggers import TYPES


def problems(rule: Rule) -> Iterator[str]:
    """All that is wrong, each with file, line and key."""
    try:
        called = operation(rule.action)
    except UnknownOperation as error:
        yield f"{rule.at('action', 'ref')}: {error}"
        return
    yield from _parameters(rule)
    yield from _fields(rule)
    if rule.care.most_nodes_percent is not None and not caps.takes_nodes(called.ref):
        where = rule.at("context", "steward", "most_nodes_percent")
        yield f"{where}: {rule.action} takes no nodes away"


def differences(rule: Rule) -> Iterator[str]:
    """What StackStorm, given the same file, lacks or does otherwise, each with file, line and key.

    The rule is right for Steward.
    """
    dispatched = TYPES[rule.trigger].dispatched
    if not dispatched:
        yield f"{rule.at('trigger', 'type')}: the slurm pack has no trigger {rule.trigger}"
    if rule.wanted:
        where = rule.at("trigger", "parameters")
        yield f"{where}: StackStorm never fires such a rule: compare the fields in criteria"
    for criterion in rule.criteria:
        for field in criterion.path[:1] if dispatched else ():
            if field not in dispatched:
                yield _undispatched(rule, str(field), ("criteria", criterion.key))
    for key, text in _templates(rule.parameters, ("action", "parameters")):
        for field in sorted(rendering.fields_of(text) - dispatched if dispatched else ()):
            yield _undispatched(rule, field, key)
    if not rule.action.startswith("slurm."):
        yield f"{rule.at('action', 'ref')}: StackStorm calls it slurm.{rule.action}"
    for key in rule.lines:
        if key[:2] == ("context", "steward") and len(key) == 3:
            yield f"{rule.at(*key)}: StackStorm passes over it"


def _undispatched(rule: Rule, field: str, key: Key) -> str:
    return f"{rule.at(*key)}: the slurm pack's {rule.trigger} has no field {field!r}"


def _parameters(rule: Rule) -> Iterator[str]:
    called = operation(rule.action)
    known = {one.name: one for one in parameters_of(called)}
    for name in rule.parameters:
        if name not in known:
            names = ", ".join(known) or "none"
            where = rule.at("action", "parameters", name)
            yield f"{where}: {rule.action} has no such parameter: {names}"
    for one in known.values():
        if one.required and rule.parameters.get(one.name) in (None, ""):
            yield f"{rule.at('action', 'parameters')}: {rule.action} needs {one.name!r}"
    if not any(_is_rendered(value) for value in rule.parameters.values()):
        try:
            read(called, rule.parameters)
        except WrongParameters as error:
            if set(rule.parameters) <= set(known):
                yield f"{rule.at('action', 'parameters')}: {error}"


def _fields(rule: Rule) -> Iterator[str]:
    """Fields that templates name and the trigger has not."""
    fields = TYPES[rule.trigger].fields
    for key, text in _templates(rule.parameters, ("action", "parameters")):
        for field in sorted(rendering.fields_of(text) - fields):
            known = ", ".join(sorted(fields))
            yield f"{rule.at(*key)}: {rule.trigger} has no field {field!r}: {known}"


def _templates(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if rendering.is_template(value):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _templates(one, (*key, name))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _templates(one, (*key, index))


def _is_rendered(value: Any) -> bool:
    return any(True for _ in _templates(value, ()))
