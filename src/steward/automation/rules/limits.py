"""Limits on nodes that rules may take out of service, so that a faulty rule cannot drain a cluster.

The parameters of an action determine which nodes it takes. A node counts as taken from the moment
before the action until Slurm shows that it accepts jobs again, so that neither a crash nor a slow
slurmctld lets a rule exceed the limit. First come functions that find out which nodes or partition
an action takes (``find_taken_nodes``, ``find_taken_partition``) and when they count as given back
(``find_return_partition``); ``check_node_limit`` decides.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from steward.automation.rules.model import Rule
from steward.slurm import WrongUpdate

_RESTORING_STATES: Final = frozenset(
    {"RESUME", "UNDRAIN", "IDLE", "POWER_UP", "CANCEL_REBOOT", "UP"}
)
"""States that give a node or partition back."""
_PARTITION: Final = "slurm.partition.update"
_NODE: Final = "slurm.node.update"
_HARMLESS_FIELDS: Final = {
    _NODE: frozenset({"Comment", "Extra", "Reason", "Weight"}),
    _PARTITION: frozenset(
        {"Default", "DefaultTime", "GraceTime", "MaxTime", "PriorityJobFactor", "PriorityTier"}
    ),
}
"""Fields of each action that take no nodes away."""
UNKNOWN_RETURN: Final = "*"
"""Stands for every partition: a change whose end cannot be observed."""


def can_take_nodes(action: str) -> bool:
    """Return whether an action can take nodes out of service."""
    return action in _TAKEN_NODES_BY_ACTION


def find_taken_nodes(action: str, parameters: Mapping[str, Any]) -> str:
    """Return the node list that an action would take away, in any of Slurm's forms; "" if none."""
    get_nodes = _TAKEN_NODES_BY_ACTION.get(action)
    return get_nodes(parameters) if get_nodes is not None else ""


def find_taken_partition(action: str, parameters: Mapping[str, Any]) -> str:
    """Return the partition whose nodes an action would take away; "" if none."""
    if action != _PARTITION or not _may_take(action, _parse_changes(action, parameters)):
        return ""
    return str(parameters.get("partition", ""))


def find_return_partition(action: str, parameters: Mapping[str, Any]) -> str:
    """Return the partition that a node must be in again before it counts as given back.

    Returns:
        "" if the node's own state decides; :data:`UNKNOWN_RETURN` if nothing does.
    """
    partition = find_taken_partition(action, parameters)
    if not partition:
        return ""
    changes = _parse_changes(action, parameters) or {}
    others = {key: value for key, value in changes.items() if key != "State"}
    # Limits, permitted users or nodes of the partition change: its being up proves nothing.
    return UNKNOWN_RETURN if not changes or _may_take(action, others) else partition


def _join_node_names(parameters: Mapping[str, Any]) -> str:
    """Return the ``nodes`` parameter as one node list."""
    nodes = parameters.get("nodes", "")
    return ",".join(map(str, nodes)) if isinstance(nodes, list | tuple) else str(nodes)


def _find_updated_nodes(parameters: Mapping[str, Any]) -> str:
    """Return the nodes that a node update takes away; "" if none."""
    return (
        _join_node_names(parameters) if _may_take(_NODE, _parse_changes(_NODE, parameters)) else ""
    )


def _parse_changes(action: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the changes of an update under Slurm's names; None if they cannot be determined."""
    from steward.slurm.cluster_changes import normalize_node_changes, normalize_partition_changes

    infos = parameters.get("infos")
    if not infos:
        return {}
    # JSON text is not parsed here, so its meaning is unknown.
    if not isinstance(infos, Mapping):
        return None
    # YAML keys may be numbers.
    fields = {str(name): value for name, value in infos.items()}
    try:
        return (
            normalize_node_changes(fields)
            if action == _NODE
            else normalize_partition_changes(fields)
        )
    except WrongUpdate:
        # The action will be rejected; if it is not, it is safer to have counted it.
        return None


def _may_take(action: str, changes: Mapping[str, Any] | None) -> bool:
    """Return whether an update may take nodes away: everything but known harmless fields may."""
    if changes is None:
        return True
    return not all(
        str(value).strip().upper() in _RESTORING_STATES
        if key == "State"
        else key in _HARMLESS_FIELDS[action]
        for key, value in changes.items()
    )


_TAKEN_NODES_BY_ACTION: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "slurm.node.down": _join_node_names,
    "slurm.node.drain": _join_node_names,
    "slurm.node.reserve": _join_node_names,
    _NODE: _find_updated_nodes,
    _PARTITION: lambda _parameters: "",
}
"""For each action that may take nodes away: returns the node list from its parameters."""


class TakenNode(msgspec.Struct, frozen=True):
    """Node that a rule has taken away and that has not been given back.

    Attributes:
        node: Name of the node.
        rule: Rule that took it.
        return_partition: See :func:`find_return_partition`.
    """

    node: str
    rule: str
    return_partition: str = ""


def check_node_limit(
    rule: Rule, to_take: set[str], taken: list[TakenNode], total: int, max_percent: float
) -> str:
    """Return why an action would exceed the node limit; "" if it would not.

    Args:
        rule: Rule that wants to act.
        to_take: Nodes that the action would take.
        taken: Nodes that rules have taken on this cluster and not given back.
        total: Number of nodes of the cluster.
        max_percent: Limit for all rules together, in percent of nodes.
    """
    own_percent = rule.limits.most_nodes_percent
    rule_nodes = {taken_node.node for taken_node in taken if taken_node.rule == rule.name} | to_take
    all_nodes = {taken_node.node for taken_node in taken} | to_take
    if own_percent is not None and len(rule_nodes) > count_allowed_nodes(own_percent, total):
        return _explain_limit("the rule", rule_nodes, to_take, own_percent, total)
    if len(all_nodes) > count_allowed_nodes(max_percent, total):
        return _explain_limit("all rules together", all_nodes, to_take, max_percent, total)
    return ""


def count_allowed_nodes(percent: float, total: int) -> int:
    """Convert a percentage to a number of nodes: at least one, unless it is 0 %."""
    # Add a hair, so that 7 percent of 100 is 7 despite binary fractions.
    allowed = math.floor(percent * total / 100 + 1e-9)
    return max(1, allowed) if percent > 0 else 0


def _explain_limit(
    subject: str, nodes: set[str], to_take: set[str], percent: float, total: int
) -> str:
    """Explain that a limit would be exceeded."""
    return (
        f"with {len(to_take)} more, {subject} would take away {len(nodes)} of {total} nodes; "
        f"the limit of {percent:g} % allows {count_allowed_nodes(percent, total)}"
    )
