"""Node index in jobs.db: the ended runs of each node by their end, so that sacct -N scans nothing.

Tables: ``node`` (names) and ``node_run`` (a row for each node of each ended run or former piece).
:func:`steward.jobs.day_sums.track_lines` maintains both with the day sums, in the same transaction,
and rebuilds them with these. Unended runs are few; the index of ends finds them.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import msgspec

from steward.core.sqlite import Connection
from steward.core.storage import Table
from steward.slurm.nodelists import NodeListError, expand_nodelist

NodeEnd = tuple[str, int, int]
"""Node list, job id and end (s since the epoch) of an ended run or piece."""


class StoredNode(msgspec.Struct, frozen=True):
    """Node of a cluster."""

    number: int
    cluster: str
    name: str


class NodeRun(msgspec.Struct, frozen=True):
    """Ended run on a node; ``end_s`` is its end, s since the epoch."""

    node: int
    end_s: int
    job_id: int


_NODES: Final = Table(StoredNode, "node", key="number", unique="cluster, name")
_NODE_RUNS: Final = Table(NodeRun, "node_run", key="node, end_s, job_id")
NODES_SCHEMA: Final = f"{_NODES.schema}{_NODE_RUNS.schema}"
"""Script that creates the tables."""

_SELECT_NODE: Final = "(SELECT number FROM node WHERE cluster = ? AND name = ?)"
_IF_NEW: Final = " ON CONFLICT DO NOTHING"
_ADD_NODE: Final = _NODES.build_insert("cluster, name") + _IF_NEW
_ADD_RUN: Final = (
    _NODE_RUNS.build_insert("node, end_s, job_id").replace("?", _SELECT_NODE, 1) + _IF_NEW
)
_DROP_RUN: Final = f"DELETE FROM node_run WHERE node = {_SELECT_NODE} AND end_s = ? AND job_id = ?"  # noqa: S608 -- our own names


def write_node_runs(
    connection: Connection, cluster: str, before: Iterable[NodeEnd], after: Iterable[NodeEnd]
) -> None:
    """Replace the index rows of changed runs, inside a transaction."""
    old_rows, new_rows = set(_list_rows(before)), set(_list_rows(after))
    dropped, added = old_rows - new_rows, new_rows - old_rows
    connection.executemany(_DROP_RUN, [(cluster, *row) for row in dropped])
    connection.executemany(_ADD_NODE, [(cluster, name) for name in {row[0] for row in added}])
    connection.executemany(_ADD_RUN, [(cluster, *row) for row in sorted(added)])


def drop_node_runs(connection: Connection, cluster: str) -> None:
    """Delete the index of a cluster, inside a transaction."""
    of_cluster = "(SELECT number FROM node WHERE cluster = ?)"
    connection.execute(f"DELETE FROM node_run WHERE node IN {of_cluster}", (cluster,))  # noqa: S608 -- our own names


def _list_rows(ends: Iterable[NodeEnd]) -> Iterable[tuple[str, int, int]]:
    """Yield node name, end and job id of each index row."""
    for nodelist, job_id, end_s in ends:
        for name in _expand_names(nodelist):
            yield name, end_s, job_id


@lru_cache(maxsize=1024)
def _expand_names(nodelist: str) -> tuple[str, ...]:
    """Expand a node list; empty if malformed."""
    if nodelist.isalnum():
        return (nodelist,)
    try:
        return tuple(expand_nodelist(nodelist))
    except NodeListError:
        return ()
