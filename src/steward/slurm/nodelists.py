"""Slurm's node lists ("n[1-3],gpu7"), read and written by ClusterShell's NodeSet."""

import re
from collections.abc import Iterable
from typing import Final

from steward.core.errors import UsageError
from steward.slurm.errors import SlurmError

_BRACKETS: Final = re.compile(r"\[([^\]]*)\]")
_BETWEEN: Final = re.compile(r",(?![^\[\]]*\])")
_MOST: Final = 100_000


class NodeListError(SlurmError, UsageError):
    """A node list that cannot be read."""


def expand(nodelist: str) -> list[str]:
    """The nodes of a list, in order.

    Raises:
        NodeListError: It is no node list, or of more nodes than any cluster has.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    # A leading @ would name one of ClusterShell's own groups, not nodes.
    if "@" in nodelist:
        raise NodeListError(f"{nodelist!r} is no node list", (), nodelist)
    # A short text may mean billions.
    if sum(map(_count, _BETWEEN.split(nodelist))) > _MOST:
        raise NodeListError(
            f"{nodelist[:100]!r} is no node list, or of more than {_MOST} nodes", (), nodelist
        )
    try:
        return [str(node) for node in NodeSet(nodelist)]
    except NodeSetException as error:
        raise NodeListError(f"{nodelist!r} is no node list: {error}", (), nodelist) from error


def _count(nodes: str) -> int:
    """How many nodes are meant by one name with brackets, at most."""
    count = 1
    for inner in _BRACKETS.findall(nodes):
        ranges = [part.split("-") for part in inner.split(",")]
        widths = [
            int(ends[-1]) - int(ends[0]) + 1
            for ends in ranges
            if all(end.isdecimal() and len(end) < 10 for end in ends)
        ]
        count *= max(1, sum(widths)) if len(widths) == len(ranges) else _MOST + 1
    return count


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
