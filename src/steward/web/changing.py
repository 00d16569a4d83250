"""What operators have done to nodes from a page: which operations, and what each is given."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from steward.admin.credentials.shapes import ClusterRole
from steward.automation.actions import RunRequest
from steward.core.errors import UsageError

Needs = Literal["operator", "administrator"]


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """Something that can be done to nodes.

    Attributes:
        name: What it is called in addresses and on buttons.
        says: What it means.
        operation: The operation that does it.
        needs: Who may; what is decided is decided by the operation.
        fields: What has to be filled in, by the operation's names.
        is_grave: Whether jobs are lost by it.
        overrides: Whether it can override what others said of the nodes.
    """

    name: str
    says: str
    operation: str
    needs: Needs = "administrator"
    fields: tuple[str, ...] = ()
    is_grave: bool = False
    overrides: bool = True


VERBS: Final[dict[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb(
            name="drain",
            says="Jobs on them go on, no new ones start.",
            operation="slurm.node.drain",
            fields=("reason",),
        ),
        Verb(
            name="resume",
            says="Bring them back that are drained, down or failing.",
            operation="slurm.node.resume",
        ),
        Verb(
            name="down",
            says="Set them down: jobs on them are ended.",
            operation="slurm.node.down",
            fields=("reason",),
            is_grave=True,
        ),
        Verb(
            name="reserve",
            says="Put them into a reservation, which is made where there is none of its name.",
            operation="slurm.node.reserve",
            needs="operator",
            fields=("reservation_name", "start_time", "duration", "users", "flags"),
            overrides=False,
        ),
        Verb(
            name="unreserve",
            says="Take them out of a reservation; with the last one it goes.",
            operation="slurm.node.unreserve",
            needs="operator",
            fields=("reservation_name",),
            overrides=False,
        ),
    )
}
"""By name."""

_PROPS: Final = ("start_time", "duration", "users", "flags")
_LONGEST: Final = 2000


def verbs_of(role: ClusterRole) -> tuple[Verb, ...]:
    """What somebody is offered on a cluster."""
    return tuple(
        verb
        for verb in VERBS.values()
        if (role.administrator if verb.needs == "administrator" else role.operator)
    )


def run_request(verb: Verb, cluster: str, given: Mapping[str, str], *, dry_run: bool) -> RunRequest:
    """What is to be done.

    Args:
        verb: What.
        cluster: Where.
        given: The form's fields.
        dry_run: Whether it is only to be said what would be done.

    Raises:
        UsageError: Something is missing, or too long.
    """
    values = {name: given.get(name, "").strip() for name in ("nodes", *verb.fields)}
    for name, value in values.items():
        if len(value) > _LONGEST:
            raise UsageError(f"{_called(name)} is too long", name)
        if not value and name not in _PROPS:
            raise UsageError(f"{_called(name)} is missing", name)
    props = {name: values.pop(name) for name in _PROPS if name in values}
    parameters: dict[str, Any] = dict(values)
    if any(props.values()):
        parameters["props"] = {name: value for name, value in props.items() if value}
    return RunRequest(
        action=verb.operation,
        parameters=parameters,
        cluster=cluster,
        dry_run=dry_run,
        force=verb.overrides and bool(given.get("force")),
    )


def _called(name: str) -> str:
    return {"nodes": "the list of nodes", "reservation_name": "the reservation's name"}.get(
        name, f"the {name.replace('_', ' ')}"
    )


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What was, or would be, done to one node or reservation.

    Attributes:
        name: Its name.
        changes: Whether it was, or would be, changed.
        says: What more there is to say, in words.
        error: What went wrong; "" for nothing.
    """

    name: str
    changes: bool
    says: str = ""
    error: str = ""


def lines_of(result: Any) -> list[Line]:
    """An operation's result, line by line."""
    if not isinstance(result, dict):
        return []
    if "reservation_name" in result:
        return [_line(str(result["reservation_name"]), result)]
    return [_line(str(name), one) for name, one in result.items() if isinstance(one, dict)]


def _line(name: str, one: Mapping[str, Any]) -> Line:
    told = {
        key: value
        for key, value in one.items()
        if key not in ("changed", "would_change", "message", "reservation_name")
    }
    before, after = told.pop("old_state", ""), told.pop("state", "")
    states = f"{before} \N{RIGHTWARDS ARROW} {after}" if before and after != before else after
    said = [str(states)] if states else []
    said += [
        str(key) if value is True else f"{key}: {value}"
        for key, value in told.items()
        if value not in (None, "", False, [], {})
    ]
    return Line(
        name=name,
        changes=bool(one.get("changed") or one.get("would_change")),
        says="; ".join(said),
        error=str(one.get("message") or ""),
    )
