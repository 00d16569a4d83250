"""Rule validation: errors of a parsed rule, and its differences from StackStorm's rules.

``find_rule_errors`` checks a rule against operations, trigger types and their fields. A valid rule
may still lack something in StackStorm: ``compare_with_stackstorm`` lists that.
"""

from collections.abc import Iterator
from typing import Any

from steward.automation.errors import InvalidParameters, UnknownOperation
from steward.automation.operation import (
    describe_parameters,
    find_operation,
    parse_operation_parameters,
)
from steward.automation.rules.limits import can_take_nodes
from steward.automation.rules.model import Rule, RuleKey
from steward.automation.rules.templates import find_trigger_fields, is_template
from steward.automation.rules.triggers import TRIGGER_TYPES
from steward.core.errors import PermissionRefused
from steward.core.principals import RULES


def find_rule_errors(rule: Rule) -> Iterator[str]:
    """List all errors of a rule, each with file, line and key."""
    try:
        operation = find_operation(rule.action)
    except UnknownOperation as error:
        yield f"{rule.format_position('action', 'ref')}: {error}"
        return
    try:
        RULES.require(operation.ref)
    except PermissionRefused as error:
        yield f"{rule.format_position('action', 'ref')}: {error}"
    yield from _check_parameters(rule)
    yield from _check_template_fields(rule)
    if rule.limits.most_nodes_percent is not None and not can_take_nodes(operation.ref):
        position = rule.format_position("context", "steward", "most_nodes_percent")
        yield f"{position}: {rule.action} takes no nodes away: remove the limit"


def compare_with_stackstorm(rule: Rule) -> Iterator[str]:
    """List what StackStorm lacks or does differently with this file, each with file, line and key.

    The rule is valid for Steward.
    """
    dispatched = TRIGGER_TYPES[rule.trigger].dispatched
    if not dispatched:
        position = rule.format_position("trigger", "type")
        yield f"{position}: the slurm pack has no trigger {rule.trigger}"
    if rule.trigger_parameters:
        position = rule.format_position("trigger", "parameters")
        yield f"{position}: StackStorm never fires such a rule: compare the fields in 'criteria'"
    for criterion in rule.criteria:
        for field in criterion.path[:1] if dispatched else ():
            if field not in dispatched:
                yield _explain_undispatched(rule, str(field), ("criteria", criterion.key))
    for key, text in _walk_templates(rule.parameters, ("action", "parameters")):
        for field in sorted(find_trigger_fields(text) - dispatched if dispatched else ()):
            yield _explain_undispatched(rule, field, key)
    if not rule.action.startswith("slurm."):
        yield f"{rule.format_position('action', 'ref')}: StackStorm calls it slurm.{rule.action}"
    for key in rule.lines:
        if key[:2] == ("context", "steward") and len(key) == 3:
            yield f"{rule.format_position(*key)}: StackStorm ignores it"


def _explain_undispatched(rule: Rule, field: str, key: RuleKey) -> str:
    """Explain that StackStorm's trigger lacks a field."""
    return f"{rule.format_position(*key)}: the slurm pack's {rule.trigger} has no field {field!r}"


def _check_parameters(rule: Rule) -> Iterator[str]:
    """Check the action's parameters, as far as they contain no templates."""
    operation = find_operation(rule.action)
    parameters = {parameter.name: parameter for parameter in describe_parameters(operation)}
    for name in rule.parameters:
        if name not in parameters:
            names = ", ".join(parameters) or "none"
            position = rule.format_position("action", "parameters", name)
            yield f"{position}: {rule.action} has no such parameter: the parameters are {names}"
    for parameter in parameters.values():
        if parameter.required and rule.parameters.get(parameter.name) in (None, ""):
            position = rule.format_position("action", "parameters")
            yield f"{position}: {rule.action} needs {parameter.name!r}"
    if not any(_has_template(value) for value in rule.parameters.values()):
        try:
            parse_operation_parameters(operation, rule.parameters)
        except InvalidParameters as error:
            if set(rule.parameters) <= set(parameters):
                yield f"{rule.format_position('action', 'parameters')}: {error}"


def _check_template_fields(rule: Rule) -> Iterator[str]:
    """List fields used in templates that the trigger lacks."""
    fields = TRIGGER_TYPES[rule.trigger].fields
    for key, text in _walk_templates(rule.parameters, ("action", "parameters")):
        for field in sorted(find_trigger_fields(text) - fields):
            choices = ", ".join(sorted(fields))
            yield (
                f"{rule.format_position(*key)}: {rule.trigger} has no field {field!r}: use "
                f"one of {choices}"
            )


def _walk_templates(value: Any, key: RuleKey) -> Iterator[tuple[RuleKey, str]]:
    """Yield all templates inside a value, with their positions."""
    if is_template(value):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _walk_templates(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk_templates(item, (*key, index))


def _has_template(value: Any) -> bool:
    """Return whether a value contains a template."""
    return any(True for _ in _walk_templates(value, ()))
