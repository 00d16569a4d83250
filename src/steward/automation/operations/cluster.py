"""Cluster operations: read Slurm's configuration, update partitions, manage reservations.

In order: ``slurm.config.get``; ``slurm.partition.update``; ``slurm.node.reserve`` and
``slurm.node.unreserve``. All run ``scontrol`` through :mod:`steward.slurm`.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters
from steward.automation.operation import OperationContext, Parameters, operation
from steward.automation.operations.nodes import NodeList
from steward.core.actions import described
from steward.slurm import UnknownPartition, UnknownReservation, WrongUpdate


class ConfigGetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.config.get."""

    item: Annotated[
        str,
        described("Name of one setting, in snake_case (topology_plugin); all if empty."),
    ] = ""


@operation("slurm.config.get", only_reads=True, pack=True)
def get_config(context: OperationContext, parameters: ConfigGetParameters) -> dict[str, Any]:
    """Show one or all settings of Slurm.

    Returns:
        Names and values of the settings.
    """
    items = context.machine.config_items()
    if not parameters.item:
        return items
    if parameters.item not in items:
        raise InvalidParameters(
            f"Slurm's configuration has no setting {parameters.item!r}: slurm.config.get "
            "without item lists all",
            parameters.item,
        )
    return {parameters.item: items[parameters.item]}


# Partitions


class PartitionUpdateParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.partition.update."""

    partition: Annotated[str, described("Name of the partition.")]
    infos: Annotated[
        dict[str, Any],
        described(
            "Fields to set, named as in 'scontrol update partition': "
            '{"state": "DRAIN", "max_time": "1-00:00:00"}.'
        ),
    ]


@operation("slurm.partition.update", role="administrator")
def update_partition(
    context: OperationContext, parameters: PartitionUpdateParameters
) -> dict[str, Any]:
    """Change fields of a partition.

    Returns:
        State of the partition before and after.
    """
    from steward.slurm.cluster_changes import normalize_partition_changes

    try:
        infos = normalize_partition_changes(parameters.infos)
    except WrongUpdate as error:
        raise InvalidParameters(f"slurm.partition.update: {error}") from error
    partitions = context.machine.partitions()
    if parameters.partition not in partitions:
        names = ", ".join(partitions)
        raise UnknownPartition(
            f"unknown partition {parameters.partition!r}: use one of {names}",
            (),
            parameters.partition,
        )
    before = partitions[parameters.partition]
    outcome = {"partition": parameters.partition, "old_state": before.state}
    if context.dry_run:
        return {**outcome, "state": before.state, "would_change": True}
    context.begin()
    context.cluster_changes.update_partition(parameters.partition, infos)
    after = context.machine.partitions()[parameters.partition]
    return {**outcome, "state": after.state, "changed": True}


# Reservations

ReservationNameParameter = Annotated[str, described("Name of the reservation.")]
_DEFAULT_RESERVATION: Final = "steward"
"""Default name of the reservation."""
_DEFAULT_FLAGS: Final = ("MAINT", "IGNORE_JOBS", "OVERLAP")
"""Default flags of a new reservation."""


class ReservationProps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a new reservation."""

    start_time: Annotated[
        int | str | None,
        described("Start: a time as Slurm accepts it, or seconds since 1970. Default now."),
    ] = None
    duration: Annotated[int | str, described("Duration: minutes, D-HH:MM:SS, or infinite.")] = (
        "infinite"
    )
    users: Annotated[
        tuple[str, ...] | str, described("Users who may use the reservation.")
    ] = ("root",)  # fmt: skip
    flags: Annotated[
        tuple[str, ...] | str,
        described("Flags, as scontrol accepts them."),
    ] = _DEFAULT_FLAGS


class ReserveParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.reserve."""

    nodes: NodeList
    reservation_name: ReservationNameParameter = _DEFAULT_RESERVATION
    props: Annotated[
        ReservationProps,
        described("Properties of a new reservation; an existing one keeps its own."),
    ] = ReservationProps()


class UnreserveParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.unreserve."""

    nodes: NodeList
    reservation_name: ReservationNameParameter = _DEFAULT_RESERVATION


def _is_reserved(context: OperationContext, parameters: ReserveParameters) -> bool | None:
    """Check after an interruption: are all nodes in the reservation?"""
    reserved = _find_reserved_nodes(context, parameters.reservation_name)
    return reserved is not None and set(context.machine.node_names(parameters.nodes)) <= set(
        reserved
    )


def _is_unreserved(context: OperationContext, parameters: UnreserveParameters) -> bool | None:
    """Check after an interruption: is none of the nodes in the reservation?"""
    reserved = _find_reserved_nodes(context, parameters.reservation_name)
    return reserved is None or not set(context.machine.node_names(parameters.nodes)) & set(reserved)


@operation("slurm.node.reserve", role="operator", pack=True, check=_is_reserved)
def reserve_nodes(context: OperationContext, parameters: ReserveParameters) -> dict[str, Any]:
    """Add nodes to a reservation; create it if it does not exist.

    Returns:
        Name and nodes of the reservation, and whether it was created or changed.
    """
    nodes = context.machine.node_names(parameters.nodes)
    name = parameters.reservation_name
    start = _parse_start(context, parameters.props.start_time)
    reserved = _find_reserved_nodes(context, name)
    after = list(dict.fromkeys((*(reserved or ()), *nodes)))
    outcome = _describe_reservation_change(
        name, after, created=reserved is None, changed=after != reserved, context=context
    )
    if context.dry_run or after == reserved:
        return outcome
    context.begin()
    if reserved is None:
        context.cluster_changes.create_reservation(
            name,
            nodes,
            start=start,
            duration=str(parameters.props.duration),
            users=_split_list(parameters.props.users),
            flags=_split_list(parameters.props.flags),
        )
    else:
        context.cluster_changes.set_reservation_nodes(name, after)
    return outcome


@operation("slurm.node.unreserve", role="operator", pack=True, check=_is_unreserved)
def unreserve_nodes(context: OperationContext, parameters: UnreserveParameters) -> dict[str, Any]:
    """Remove nodes from a reservation; delete it if none is left.

    Returns:
        Name and remaining nodes of the reservation, and whether it was deleted.
    """
    nodes = set(context.machine.node_names(parameters.nodes))
    name = parameters.reservation_name
    reserved = _find_reserved_nodes(context, name)
    if reserved is None:
        raise UnknownReservation(f"unknown reservation {name!r}", (), name)
    remaining = [node for node in reserved if node not in nodes]
    outcome = _describe_reservation_change(
        name, remaining, deleted=not remaining, changed=remaining != reserved, context=context
    )
    if context.dry_run or remaining == reserved:
        return outcome
    context.begin()
    if remaining:
        context.cluster_changes.set_reservation_nodes(name, remaining)
    else:
        context.cluster_changes.delete_reservation(name)
    return outcome


def _describe_reservation_change(
    name: str,
    nodes: list[str],
    *,
    changed: bool,
    context: OperationContext,
    created: bool = False,
    deleted: bool = False,
) -> dict[str, Any]:
    """Describe the outcome of a change for the result."""
    from steward.slurm.nodelists import fold_nodelist

    outcome: dict[str, Any] = {"reservation_name": name, "nodes": fold_nodelist(nodes)}
    if context.dry_run:
        outcome["would_change"] = changed
    else:
        outcome["changed"] = changed
    return {**outcome, "created": created, "deleted": deleted}


def _find_reserved_nodes(context: OperationContext, name: str) -> list[str] | None:
    """Return the nodes of a reservation, or None if it does not exist."""
    from steward.slurm.nodelists import expand_nodelist

    reservation = context.machine.reservations().get(name)
    if reservation is None:
        return None
    return expand_nodelist(reservation.nodes) if reservation.nodes else []


def _parse_start(context: OperationContext, value: int | str | None) -> datetime | None:
    """Parse a start time; None means now."""
    if value is None or value in ("", "now"):
        return None
    try:
        if isinstance(value, int) or value.isdigit():
            return datetime.fromtimestamp(int(value), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidParameters(
            f"invalid start_time {value!r}: give a time as Slurm accepts it", value
        ) from error
    from steward.core.events import utc_now
    from steward.slurm.times import load_zone, parse_time

    return parse_time(value, utc_now(), load_zone(context.cluster_settings.timezone))


def _split_list(value: tuple[str, ...] | str) -> list[str]:
    """Split a comma-separated text, or pass a list on, without blank entries."""
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]
