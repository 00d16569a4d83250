"""Writes the list of actions of docs/actions.md from their declarations."""

from typing import Any

from steward.automation.operation import (
    Operation,
    ParameterDescription,
    describe_parameters,
    load_operations,
)

_FOR = {
    "everyone": "everyone",
    "owner": "the job's owner, operators",
    "operator": "operators",
    "administrator": "administrators",
}


def reference() -> str:
    """Return every action with its parameters."""
    return "\n".join(map(_action, load_operations().values()))


def _action(one: Operation) -> str:
    about = [f"For {_FOR[one.role]}"]
    if one.only_reads:
        about.append("changes nothing")
    if not one.remote:
        about.append("not from other hosts")
    if one.pack:
        about.append("also in StackStorm's own pack")
    lines = [f"### {one.ref}", "", f"{one.help} {'; '.join(about)}.", ""]
    lines += ["| parameter | type | default | |", "|---|---|---|---|"]
    for parameter in describe_parameters(one):
        lines.append(_row(parameter, parameter.name))
        lines += [_row(inner, f"{parameter.name}.{inner.name}") for inner in parameter.within]
    return "\n".join(
        [*lines, "", f"Result: {one.result_help[:1].lower()}{one.result_help[1:]}", ""]
    )


def _row(parameter: ParameterDescription, name: str) -> str:
    kind = " or ".join(f"`{value}`" for value in parameter.enum) or parameter.type
    default = "*required*" if parameter.required else _shown(parameter)
    description = parameter.description.replace("|", "\\|")
    return f"| `{name}` | {kind} | {default} | {description} |"


def _shown(parameter: ParameterDescription) -> str:
    value: Any = parameter.default
    if value in (None, "", [], {}) or parameter.within:
        return ""
    if isinstance(value, list):
        return f"`{','.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
