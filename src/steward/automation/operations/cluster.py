"""Cluster operations: read Slurm's configuration, update partitions, manage reservations.

Three groups, each with its parameters, functions and declarations, joined in :data:`OPERATIONS`:
``slurm.config.get``; ``slurm.partition.update``; ``slurm.node.reserve`` and
``slurm.node.unreserve``. All run ``scontrol`` through :mod:`steward.slurm`.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters
from steward.automation.operation import Operation, OperationContext, Parameters
from steward.automation.operations.nodes import NodeList
from steward.slurm import UnknownPartition, UnknownReservation, WrongUpdate


class ConfigGetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.config.get."""

    item: Annotated[
        str,
        msgspec.Meta(description="One setting, in snake_case (topology_plugin); all if empty."),
    ] = ""


def get_config(doing: OperationContext, asked: ConfigGetParameters) -> dict[str, Any]:
    """Return one or all settings of Slurm, by name."""
    items = doing.machine.config_items()
    if not asked.item:
        return items
    if asked.item not in items:
        raise InvalidParameters(
            f"Slurm's configuration has no {asked.item!r}: slurm.config.get without item shows all",
            asked.item,
        )
    return {asked.item: items[asked.item]}


CONFIG_OPERATIONS: Final = (
    Operation(
        ref="slurm.config.get",
        help="Show one or all settings of Slurm.",
        gives="Each setting's name and value.",
        parameters=ConfigGetParameters,
        run=get_config,
        pack=True,
    ),
)


# Partitions


class PartitionUpdateParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.partition.update."""

    partition: Annotated[str, msgspec.Meta(description="Its name.")]
    infos: Annotated[
        dict[str, Any],
        msgspec.Meta(
            description="What to set, by the names that 'scontrol update partition' takes: "
            '{"state": "DRAIN", "max_time": "1-00:00:00"}.'
        ),
    ]


def update_partition(doing: OperationContext, asked: PartitionUpdateParameters) -> dict[str, Any]:
    """Update a partition and return its state before and after."""
    from steward.slurm.cluster_changes import normalize_partition_changes

    try:
        infos = normalize_partition_changes(asked.infos)
    except WrongUpdate as error:
        raise InvalidParameters(f"slurm.partition.update: {error}") from error
    known = doing.machine.partitions()
    if asked.partition not in known:
        names = ", ".join(known)
        raise UnknownPartition(
            f"there is no partition {asked.partition!r}: there are {names}", (), asked.partition
        )
    before = known[asked.partition]
    told = {"partition": asked.partition, "old_state": before.state}
    if doing.dry_run:
        return {**told, "state": before.state, "would_change": True}
    doing.begin()
    doing.changing.update_partition(asked.partition, infos)
    after = doing.machine.partitions()[asked.partition]
    return {**told, "state": after.state, "changed": True}


PARTITION_OPERATIONS: Final = (
    Operation(
        ref="slurm.partition.update",
        help="Change something of a partition.",
        gives="The partition's state before and after.",
        parameters=PartitionUpdateParameters,
        run=update_partition,
        right="administrator",
        changes=True,
    ),
)


# Reservations

ReservationNameParameter = Annotated[str, msgspec.Meta(description="The reservation's name.")]
_DEFAULT_RESERVATION: Final = "steward"
"""Default name of the reservation."""
_DEFAULT_FLAGS: Final = ("MAINT", "IGNORE_JOBS", "OVERLAP")
"""Default flags of a new reservation."""


class ReservationProps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a new reservation."""

    start_time: Annotated[
        int | str | None,
        msgspec.Meta(
            description="When it begins: a time as Slurm takes it, or seconds since 1970."
        ),
    ] = None
    duration: Annotated[
        int | str, msgspec.Meta(description="How long: minutes, D-HH:MM:SS, or infinite.")
    ] = "infinite"
    users: Annotated[
        tuple[str, ...] | str, msgspec.Meta(description="Who may use it.")
    ] = ("root",)  # fmt: skip
    flags: Annotated[
        tuple[str, ...] | str, msgspec.Meta(description="What it is, as scontrol takes it.")
    ] = _DEFAULT_FLAGS


class ReserveParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.reserve."""

    nodes: NodeList
    reservation_name: ReservationNameParameter = _DEFAULT_RESERVATION
    props: Annotated[
        ReservationProps,
        msgspec.Meta(description="What it is like if it is made now; else the nodes are added."),
    ] = ReservationProps()


class UnreserveParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.unreserve."""

    nodes: NodeList
    reservation_name: ReservationNameParameter = _DEFAULT_RESERVATION


def reserve_nodes(doing: OperationContext, asked: ReserveParameters) -> dict[str, Any]:
    """Add nodes to a reservation; create it if it does not exist."""
    nodes = doing.machine.node_names(asked.nodes)
    name = asked.reservation_name
    start = _parse_start(doing, asked.props.start_time)
    has = _find_reserved_nodes(doing, name)
    after = list(dict.fromkeys((*(has or ()), *nodes)))
    told = _describe_reservation_change(
        name, after, created=has is None, changed=after != has, doing=doing
    )
    if doing.dry_run or after == has:
        return told
    doing.begin()
    if has is None:
        doing.changing.create_reservation(
            name,
            nodes,
            start=start,
            duration=str(asked.props.duration),
            users=_split_list(asked.props.users),
            flags=_split_list(asked.props.flags),
        )
    else:
        doing.changing.set_reservation_nodes(name, after)
    return told


def unreserve_nodes(doing: OperationContext, asked: UnreserveParameters) -> dict[str, Any]:
    """Remove nodes from a reservation; delete it when none are left."""
    nodes = set(doing.machine.node_names(asked.nodes))
    name = asked.reservation_name
    has = _find_reserved_nodes(doing, name)
    if has is None:
        raise UnknownReservation(f"there is no reservation {name!r}", (), name)
    left = [node for node in has if node not in nodes]
    told = _describe_reservation_change(
        name, left, deleted=not left, changed=left != has, doing=doing
    )
    if doing.dry_run or left == has:
        return told
    doing.begin()
    if left:
        doing.changing.set_reservation_nodes(name, left)
    else:
        doing.changing.delete_reservation(name)
    return told


def _describe_reservation_change(
    name: str,
    nodes: list[str],
    *,
    changed: bool,
    doing: OperationContext,
    created: bool = False,
    deleted: bool = False,
) -> dict[str, Any]:
    """Describe the outcome of a change for the result."""
    from steward.slurm.nodelists import fold_nodelist

    told: dict[str, Any] = {"reservation_name": name, "nodes": fold_nodelist(nodes)}
    if doing.dry_run:
        told["would_change"] = changed
    else:
        told["changed"] = changed
    return {**told, "created": created, "deleted": deleted}


def _find_reserved_nodes(doing: OperationContext, name: str) -> list[str] | None:
    """Return the nodes of a reservation, or None if it does not exist."""
    from steward.slurm.nodelists import expand_nodelist

    found = doing.machine.reservations().get(name)
    if found is None:
        return None
    return expand_nodelist(found.nodes) if found.nodes else []


def _parse_start(doing: OperationContext, given: int | str | None) -> datetime | None:
    """Parse a start time; None means now."""
    if given is None or given in ("", "now"):
        return None
    try:
        if isinstance(given, int) or given.isdigit():
            return datetime.fromtimestamp(int(given), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidParameters(f"start_time {given!r} is no time", given) from error
    from steward.core.events import utc_now
    from steward.slurm.times import load_zone, parse_time

    return parse_time(given, utc_now(), load_zone(doing.cluster_settings.timezone))


def _split_list(value: tuple[str, ...] | str) -> list[str]:
    """Split a comma-separated text, or pass a list on, without blank entries."""
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]


def _is_reserved(doing: OperationContext, asked: ReserveParameters) -> bool | None:
    """Check after an interruption: are all nodes in the reservation?"""
    has = _find_reserved_nodes(doing, asked.reservation_name)
    return has is not None and set(doing.machine.node_names(asked.nodes)) <= set(has)


def _is_unreserved(doing: OperationContext, asked: UnreserveParameters) -> bool | None:
    """Check after an interruption: is none of the nodes in the reservation?"""
    has = _find_reserved_nodes(doing, asked.reservation_name)
    return has is None or not set(doing.machine.node_names(asked.nodes)) & set(has)


RESERVATION_OPERATIONS: Final = (
    Operation(
        ref="slurm.node.reserve",
        help="Put nodes into a reservation, new or there.",
        gives="The reservation's name and nodes, and whether it was created or changed.",
        parameters=ReserveParameters,
        run=reserve_nodes,
        right="operator",
        changes=True,
        pack=True,
        check=_is_reserved,
    ),
    Operation(
        ref="slurm.node.unreserve",
        help="Take nodes out of a reservation; with the last one it goes.",
        gives="The reservation's name, the nodes that are left, and whether it was deleted.",
        parameters=UnreserveParameters,
        run=unreserve_nodes,
        right="operator",
        changes=True,
        pack=True,
        check=_is_unreserved,
    ),
)

OPERATIONS: Final = (*CONFIG_OPERATIONS, *PARTITION_OPERATIONS, *RESERVATION_OPERATIONS)
