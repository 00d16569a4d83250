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

_GIVING_BACK: Final = frozenset({"RESUME", "UNDRAIN", "IDLE", "POWER_UP", "CANCEL_REBOOT", "UP"})
_HARMLESS_OF_NODES: Final = frozenset({"comment", "extra", "reason", "weight"})
_HARMLESS_OF_PARTITIONS: Final = frozenset(
    {"default", "defaulttime", "maxtime", "priorityjobfactor", "prioritytier", "gracetime"}
)
_PARTITION: Final = "slurm.partition.update"
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
    if action != _PARTITION or _is_harmless(parameters, _HARMLESS_OF_PARTITIONS):
        return ""
    return str(parameters.get("partition", ""))


def kept_by(action: str, parameters: Mapping[str, Any]) -> str:
    """The partition that a node has to be in again before it counts as given back.

    Returns:
        "" where the node's own state tells; :data:`FOR_EVER` where nothing does.
    """
    partition = partition_taken(action, parameters)
    infos = parameters.get("infos")
    if not partition or not isinstance(infos, Mapping):
        return FOR_EVER if partition else ""
    others = {name: value for name, value in infos.items() if "state" not in str(name).lower()}
    if _is_harmless({"infos": others}, _HARMLESS_OF_PARTITIONS):
        return partition
    # A limit, who may use it, which nodes it has: that the partition is up says nothing.
    return FOR_EVER


def _named(parameters: Mapping[str, Any]) -> str:
    nodes = parameters.get("nodes", "")
    return ",".join(map(str, nodes)) if isinstance(nodes, list | tuple) else str(nodes)


def _by_infos(parameters: Mapping[str, Any]) -> str:
    return "" if _is_harmless(parameters, _HARMLESS_OF_NODES) else _named(parameters)


def _is_harmless(parameters: Mapping[str, Any], harmless: frozenset[str]) -> bool:
    """Whether an update surely takes nothing away: what is not known to be harmless is not.

    Slurm and we take a key in many spellings: ``State``, ``node_state``, ``state_up``.
    """
    infos = parameters.get("infos")
    if not isinstance(infos, Mapping):
        # JSON in a text: what it says is not known here.
        return not infos
    keys = {str(name).replace("_", "").lower(): value for name, value in infos.items()}
    return all(
        str(value).strip().upper() in _GIVING_BACK if "state" in key else key in harmless
        for key, value in keys.items()
    )


_TAKING: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "slurm.node.down": _named,
    "slurm.node.drain": _named,
    "slurm.node.reserve": _named,
    "slurm.node.update": _by_infos,
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
