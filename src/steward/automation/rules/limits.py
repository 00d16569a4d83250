"""How many nodes rules may take away: a rule that is wrong must not drain a cluster.

What an action would take is known by what it is given. A node counts as taken from the
moment before the action until it is seen to take jobs again, so that neither
a crash nor a slow slurmctld lets a rule take more.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from steward.automation.rules.model import Rule
from steward.slurm import WrongUpdate

_GIVING_BACK: Final = frozenset({"RESUME", "UNDRAIN", "IDLE", "POWER_UP", "CANCEL_REBOOT", "UP"})
_PARTITION: Final = "slurm.partition.update"
_NODE: Final = "slurm.node.update"
_HARMLESS: Final = {
    _NODE: frozenset({"Comment", "Extra", "Reason", "Weight"}),
    _PARTITION: frozenset(
        {"Default", "DefaultTime", "GraceTime", "MaxTime", "PriorityJobFactor", "PriorityTier"}
    ),
}
FOR_EVER: Final = "*"
"""Stands for every partition: what nobody can see to be given back."""


def takes_nodes(action: str) -> bool:
    """Whether an action may take nodes away."""
    return action in _TAKING


def nodes_taken(action: str, parameters: Mapping[str, Any]) -> str:
    """The node list that an action would take away, in any of Slurm's forms; "" for none."""
    taken = _TAKING.get(action)
    return taken(parameters) if taken is not None else ""


def partition_taken(action: str, parameters: Mapping[str, Any]) -> str:
    """The partition whose nodes an action would take away; "" for none."""
    if action != _PARTITION or not _may_take(action, _changes(action, parameters)):
        return ""
    return str(parameters.get("partition", ""))


def kept_by(action: str, parameters: Mapping[str, Any]) -> str:
    """The partition that a node has to be in again before it counts as given back.

    Returns:
        "" where the node's own state tells; :data:`FOR_EVER` where nothing does.
    """
    partition = partition_taken(action, parameters)
    if not partition:
        return ""
    changes = _changes(action, parameters) or {}
    others = {key: value for key, value in changes.items() if key != "State"}
    # A limit, who may use it, which nodes it has: that the partition is up says nothing.
    return FOR_EVER if not changes or _may_take(action, others) else partition


def _named(parameters: Mapping[str, Any]) -> str:
    nodes = parameters.get("nodes", "")
    return ",".join(map(str, nodes)) if isinstance(nodes, list | tuple) else str(nodes)


def _of_update(parameters: Mapping[str, Any]) -> str:
    return _named(parameters) if _may_take(_NODE, _changes(_NODE, parameters)) else ""


def _changes(action: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an update is to change, under Slurm's names; None where that is not known."""
    from steward.slurm.cluster_changes import node_infos, partition_infos

    infos = parameters.get("infos")
    if not infos:
        return {}
    # JSON in a text: what it says is not known here.
    if not isinstance(infos, Mapping):
        return None
    # YAML's keys may be numbers.
    named = {str(name): value for name, value in infos.items()}
    try:
        return node_infos(named) if action == _NODE else partition_infos(named)
    except WrongUpdate:
        # The action will be refused; should it not be, it is better to have counted it.
        return None


def _may_take(action: str, changes: Mapping[str, Any] | None) -> bool:
    """Whether an update may take something away: what is not known to be harmless may."""
    if changes is None:
        return True
    return not all(
        str(value).strip().upper() in _GIVING_BACK if key == "State" else key in _HARMLESS[action]
        for key, value in changes.items()
    )


_TAKING: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "slurm.node.down": _named,
    "slurm.node.drain": _named,
    "slurm.node.reserve": _named,
    _NODE: _of_update,
    _PARTITION: lambda _parameters: "",
}


class Taken(msgspec.Struct, frozen=True):
    """A node that a rule has taken away, as far as is known.

    Attributes:
        node: Its name.
        rule: The rule.
        kept_by: See :func:`kept_by`.
    """

    node: str
    rule: str
    kept_by: str = ""


def over_cap(
    rule: Rule, wanted: set[str], taken: list[Taken], total: int, most_percent: float
) -> str:
    """Why an action would take too many nodes; "" where it would not.

    Args:
        rule: Whose action it is.
        wanted: The nodes that it would take.
        taken: Those that rules have taken on this cluster and not given back.
        total: How many nodes the cluster has.
        most_percent: What all rules together may take, in percent.
    """
    own_percent = rule.care.most_nodes_percent
    own = {one.node for one in taken if one.rule == rule.name} | wanted
    everyones = {one.node for one in taken} | wanted
    if own_percent is not None and len(own) > allowed(own_percent, total):
        return _say("the rule", own, wanted, own_percent, total)
    if len(everyones) > allowed(most_percent, total):
        return _say("all rules together", everyones, wanted, most_percent, total)
    return ""


def allowed(percent: float, total: int) -> int:
    """How many of so many nodes a share is; at least one, unless the share is nothing."""
    # A hair above: 7 percent of 100 are 7, whatever binary fractions make of it.
    share = math.floor(percent * total / 100 + 1e-9)
    return max(1, share) if percent > 0 else 0


def _say(who: str, nodes: set[str], wanted: set[str], percent: float, total: int) -> str:
    return (
        f"with {len(wanted)} more {who} would have {len(nodes)} of {total} nodes taken away; "
        f"{percent:g} % are {allowed(percent, total)}"
    )
