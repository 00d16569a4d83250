"""Output of ``steward action run`` and ``steward action help``: results as YAML, help as text."""

from typing import TYPE_CHECKING, Any

from steward.automation.actions import (
    ListOperationsReply,
    OperationDescription,
    format_parameter,
)
from steward.automation.runner import OperationOutcome
from steward.cli.commands import prints

if TYPE_CHECKING:
    from steward.automation.operation import ParameterDescription


_ROLE_NAMES = {
    "everyone": "everyone",
    "owner": "the job's owner",
    "operator": "operators",
    "administrator": "administrators",
}
"""Who may run an operation, by its required role."""


@prints("automation.help")
def print_operation(reply: ListOperationsReply) -> None:
    """Print the description of an operation."""
    operation = reply.actions[0]
    print(f"{operation.action}: {operation.help}")
    print(f"For {_ROLE_NAMES[operation.right]}; {_describe_effect(operation)}.")
    for parameter in operation.parameters:
        print(f"\n  {parameter.name} ({_describe_kind(parameter)})")
        print(f"      {parameter.description}")
        for nested in parameter.within:
            print(f"      {nested.name} ({_describe_kind(nested)}): {nested.description}")
    print(f"\nResult: {operation.gives[:1].lower()}{operation.gives[1:]}")


def _describe_effect(operation: OperationDescription) -> str:
    """Describe whether an operation changes the cluster, and whether other hosts may run it."""
    if not operation.changes:
        return "changes nothing"
    return "recorded in the audit log" + ("" if operation.remote else "; not from other hosts")


def _describe_kind(parameter: "ParameterDescription") -> str:
    """Describe a parameter: type or choices, and whether it is required."""
    parts = [parameter.type if not parameter.enum else " | ".join(parameter.enum)]
    if parameter.required:
        parts.append("required")
    elif parameter.default not in (None, "", [], {}):
        parts.append(f"default {format_parameter(parameter.default)}")
    return ", ".join(parts)


@prints("automation.run")
def print_outcome(reply: OperationOutcome) -> None:
    """Print the outcome of an operation as YAML, without empty parts.

    YAML escapes characters that could control a terminal.
    """
    import yaml

    fields: dict[str, Any] = {"id": reply.id, "status": reply.status}
    if reply.dry_run:
        fields["dry_run"] = True
    if reply.message:
        fields["message"] = reply.message
    fields["parameters"] = {
        name: value for name, value in reply.parameters.items() if value not in (None, "", [], {})
    }
    fields["result"] = reply.result
    print(yaml.safe_dump(fields, sort_keys=False, default_flow_style=False, width=100), end="")
