"""``steward action``: run an operation on a cluster, list operations, show the audit log.

:func:`parse_typed_parameters` reads ``NAME=VALUE`` parameters; the daemon validates them and checks
permission. Results are printed as YAML or JSON.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steward.automation.actions import (
    AuditReply,
    AuditRequest,
    HelpOnOperationRequest,
    ListOperationsReply,
    ListOperationsRequest,
    OperationDescription,
    RunOperationReply,
    RunOperationRequest,
    format_parameter,
)
from steward.cli.groups import CONTEXT
from steward.cli.options import (
    LARGEST_NUMBER,
    CommandCall,
    reject_empty,
    with_call_and_columns,
    with_json_call,
)
from steward.cli.output import find_requested_zone, print_json, print_table
from steward.core.errors import UsageError

if TYPE_CHECKING:
    from steward.automation.operation import ParameterDescription


app = typer.Typer(context_settings=CONTEXT, no_args_is_help=True, add_completion=False)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RIGHT_NAMES = {
    "everyone": "everyone",
    "owner": "the job's owner",
    "operator": "operators",
    "administrator": "administrators",
}
"""Who may run an operation, by its required right."""

Ref = Annotated[
    str, typer.Argument(metavar="ACTION", help="Its name, as 'steward action list' shows it.")
]
ActionCluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-M",
        metavar="NAME",
        help="On which cluster, where there are several.",
        callback=reject_empty,
    ),
]


@app.callback()
def action_() -> None:
    """Do something to a cluster: drain nodes, hold jobs, reserve."""


@app.command()
@with_json_call
def run(
    call: CommandCall,
    ref: Ref,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Its parameters: 'nodes=n[1-2]' reason=\"bad DIMM\".",
            show_default=False,
        ),
    ] = None,
    cluster: ActionCluster = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at everything, and change nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Override what others gave as a reason.")
    ] = False,
) -> None:
    """Have something done.

    Lists have commas between, objects are JSON: criterias='{"user": "ada"}'. The exit
    code is 1 where it failed.
    """
    request = RunOperationRequest(
        action=ref,
        parameters=parse_typed_parameters(words or ()),
        cluster=cluster,
        dry_run=dry_run,
        force=force,
    )
    reply: RunOperationReply = call.send("automation.run", request)
    if call.style.json:
        print_json(reply)
    else:
        print(_format_yaml(_select_reply_fields(reply)), end="")
    if reply.status != "succeeded":
        raise typer.Exit(1)


def parse_typed_parameters(arguments: Iterable[str]) -> dict[str, str]:
    """Parse parameters typed as ``NAME=VALUE``.

    Raises:
        UsageError: A word has another form, or a name appears twice.
    """
    parameters: dict[str, str] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or _NAME.fullmatch(name) is None:
            raise UsageError(f"{argument!r} is no parameter: write NAME=VALUE", argument)
        if name in parameters:
            raise UsageError(f"{name} is given twice", name)
        parameters[name] = value
    return parameters


@app.command("list")
@with_call_and_columns
def list_(call: CommandCall) -> None:
    """List what can be done."""
    reply: ListOperationsReply = call.send("automation.list", ListOperationsRequest())
    if call.style.json:
        print_json(reply)
    else:
        print_table(reply.layout, reply.actions, call.style, reply)


@app.command("help")
@with_json_call
def help_(call: CommandCall, ref: Ref) -> None:
    """Say what an action takes."""
    reply: ListOperationsReply = call.send("automation.help", HelpOnOperationRequest(action=ref))
    if call.style.json:
        print_json(reply)
        return
    operation = reply.actions[0]
    print(f"{operation.action}: {operation.help}")
    print(f"For {_RIGHT_NAMES[operation.right]}; {_describe_effect(operation)}.")
    for parameter in operation.parameters:
        print(f"\n  {parameter.name} ({_describe_kind(parameter)})")
        print(f"      {parameter.description}")
        for nested in parameter.within:
            print(f"      {nested.name} ({_describe_kind(nested)}): {nested.description}")
    print(f"\nGives: {operation.gives[:1].lower()}{operation.gives[1:]}")


def _describe_effect(operation: OperationDescription) -> str:
    """Describe whether an operation changes the cluster, and whether other hosts may run it."""
    if not operation.changes:
        return "changes nothing"
    return "is in the audit log" + (
        "" if operation.remote else ", and not to be had from other hosts"
    )


def _describe_kind(parameter: "ParameterDescription") -> str:
    """Describe a parameter: type or choices, and whether it is required."""
    parts = [parameter.type if not parameter.enum else " | ".join(parameter.enum)]
    if parameter.required:
        parts.append("required")
    elif parameter.default not in (None, "", [], {}):
        parts.append(f"default {format_parameter(parameter.default)}")
    return ", ".join(parts)


@app.command()
@with_call_and_columns
def audit(
    call: CommandCall,
    number: Annotated[
        int,
        typer.Argument(
            metavar="[ID]",
            min=0,
            max=LARGEST_NUMBER,
            help="Only the action of this id.",
            show_default=False,
        ),
    ] = 0,
    ref: Annotated[
        str, typer.Option("--action", metavar="ACTION", help="Only these actions.")
    ] = "",
    cluster: ActionCluster = "",
    since: Annotated[
        str,
        typer.Option("--starttime", "--since", "-S", metavar="TIME", help="Only what began since."),
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=1, max=100_000, help="How many at the most.")
    ] = 100,
) -> None:
    """Show what was done, by whom, and what became of it.

    Operators are shown all, others what they asked for themselves.
    """
    request = AuditRequest(
        id=number,
        action=ref,
        cluster=cluster,
        since=since,
        limit=limit,
        zone=find_requested_zone(),
    )
    reply: AuditReply = call.send("automation.audit", request)
    if call.style.json:
        print_json(reply)
    else:
        print_table(reply.layout, reply.actions, call.style, reply)


def _select_reply_fields(reply: RunOperationReply) -> dict[str, Any]:
    """Return the parts of a reply to print, without empty ones."""
    fields: dict[str, Any] = {"id": reply.id, "status": reply.status}
    if reply.dry_run:
        fields["dry_run"] = True
    if reply.message:
        fields["message"] = reply.message
    parameters = {
        name: value for name, value in reply.parameters.items() if value not in (None, "", [], {})
    }
    return {**fields, "parameters": parameters, "result": reply.result}


def _format_yaml(value: Any) -> str:
    """Format a value as YAML, with characters that could control a terminal escaped."""
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=100)
    return text
