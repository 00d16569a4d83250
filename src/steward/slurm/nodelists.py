"""Slurm's node lists ("n[1-3],gpu7"), read and written by ClusterShell's NodeSet."""

from collections.abc import Iterable

from steward.errors import UsageError
from steward.slurm.errors import SlurmError


class NodeListError(SlurmError, UsageError):
    """A node list that cannot be read."""


def expand(nodelist: str) -> list[str]:
    """The nodes of a list, in order.

    Raises:
        NodeListError: It is no node list.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    # A leading @ would name one of ClusterShell's own groups, not nodes.
    if "@" in nodelist:
        raise NodeListError(f"{nodelist!r} is no node list", (), nodelist)
    try:
        return [str(node) for node in NodeSet(nodelist)]
    except NodeSetException as error:
        raise NodeListError(f"{nodelist!r} is no node list: {error}", (), nodelist) from error


def fold(nodes: Iterable[str]) -> str:
    """The shortest list of these nodes; "" for none.

    Raises:
        NodeListError: One of them is no node name.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    names = list(nodes)
    try:
        return str(NodeSet.fromlist(names))
    except NodeSetException as error:
        raise NodeListError(f"{names!r} are no node names: {error}", (), str(names)) from error
