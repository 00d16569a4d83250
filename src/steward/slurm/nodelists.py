"""Node lists in Slurm's notation ("n[1-3],gpu7"): expand and fold, by ClusterShell's NodeSet."""

import re
from collections.abc import Iterable
from typing import Final

from steward.core.errors import UsageError
from steward.slurm.errors import SlurmError

_BRACKETS: Final = re.compile(r"\[([^\]]*)\]")
_BETWEEN: Final = re.compile(r",(?![^\[\]]*\])")
_MAX_NODES: Final = 100_000


class NodeListError(SlurmError, UsageError):
    """Malformed node list."""


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the node names of a node list, in order.

    Raises:
        NodeListError: The list is malformed, or has more than 100,000 nodes.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    # A leading @ would name a group of ClusterShell's.
    if "@" in nodelist:
        raise NodeListError(
            f"invalid node list {nodelist!r}: write node names without '@'", (), nodelist
        )
    # A short text may stand for billions of nodes.
    if sum(map(_count_nodes, _BETWEEN.split(nodelist))) > _MAX_NODES:
        raise NodeListError(
            f"node list {nodelist[:100]!r} is invalid or names more than {_MAX_NODES} nodes",
            (),
            nodelist,
        )
    try:
        return [str(node) for node in NodeSet(nodelist)]
    except NodeSetException as error:
        raise NodeListError(f"invalid node list {nodelist!r}: {error}", (), nodelist) from error


def _count_nodes(nodes: str) -> int:
    """Count the nodes of one bracket expression; an upper bound."""
    count = 1
    for inner in _BRACKETS.findall(nodes):
        ranges = [part.split("-") for part in inner.split(",")]
        widths = [
            int(ends[-1]) - int(ends[0]) + 1
            for ends in ranges
            if all(end.isdecimal() and len(end) < 10 for end in ends)
        ]
        count *= max(1, sum(widths)) if len(widths) == len(ranges) else _MAX_NODES + 1
    return count


def fold_nodelist(nodes: Iterable[str]) -> str:
    """Return the shortest node list for these names; "" for none.

    Raises:
        NodeListError: A name is not a node name.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    names = list(nodes)
    try:
        return str(NodeSet.fromlist(names))
    except NodeSetException as error:
        raise NodeListError(f"invalid node names {names!r}: {error}", (), str(names)) from error
