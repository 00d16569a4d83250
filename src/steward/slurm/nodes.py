"""Where a cluster's nodes are, as ``scontrol show node`` tells it: names and addresses."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.slurm.client import Slurm
from steward.slurm.machine import Machine
from steward.slurm.settings import ClusterSettings

_UID: Final = re.compile(r".*\((\d+)\)")


class NodePlace(msgspec.Struct, frozen=True):
    """Where a node is.

    Attributes:
        address: NodeAddr: a name or an address.
        hostname: NodeHostName.
    """

    address: str
    hostname: str


def places(cluster: str, settings: ClusterSettings) -> Mapping[str, NodePlace]:
    """Where each node of a cluster is, by NodeName.

    Raises:
        SlurmError: Slurm does not answer, or says that it may not.
    """
    nodes = Machine(cluster, settings).node_states()
    # One that is off and not shown has no place yet.
    return {
        name: NodePlace(node.address, node.hostname or node.address)
        for name, node in nodes.items()
        if node.address
    }


def slurmd_uid(cluster: str, settings: ClusterSettings) -> int:
    """The uid that slurmd runs as on a cluster's nodes (SlurmdUser).

    Raises:
        SlurmError: Slurm does not answer.
    """
    match = _UID.fullmatch(Slurm(cluster, settings).config().get("SlurmdUser", ""))
    return int(match[1]) if match else 0
