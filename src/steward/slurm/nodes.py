"""Where a cluster's nodes are, as ``scontrol show node`` tells it: names and addresses."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.config import ClusterSettings
from steward.slurm.client import Slurm
from steward.slurm.commands import Commands

# NodeAddr and NodeHostName come before every text that a user or a node may write.
_NODE: Final = re.compile(
    r"^NodeName=(\S+) .*? NodeAddr=(\S+)(?: NodeHostName=(\S+))?", re.MULTILINE
)
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
    out = Commands(cluster, settings).run("scontrol", "-a", "-o", "show", "node")
    return parse(out)


def parse(out: bytes) -> dict[str, NodePlace]:
    """What ``scontrol -o show node`` writes, read."""
    text = out.decode("utf-8", "backslashreplace")
    return {name: NodePlace(addr, host or addr) for name, addr, host in _NODE.findall(text)}


def slurmd_uid(cluster: str, settings: ClusterSettings) -> int:
    """The uid that slurmd runs as on a cluster's nodes (SlurmdUser).

    Raises:
        SlurmError: Slurm does not answer.
    """
    match = _UID.fullmatch(Slurm(cluster, settings).config().get("SlurmdUser", ""))
    return int(match[1]) if match else 0
