"""What is wrong with the settings between ``steward agent`` on compute nodes and its receiver."""

import ipaddress
from collections.abc import Iterator
from typing import Final

from steward.core.config import Settings
from steward.core.config.forwarding_checks import file_problems
from steward.core.config.problem import Problem
from steward.core.listening import host_and_port

_MOST_CONNECTIONS: Final = 1024
"""Each is a thread, and may hold a megabyte."""


def node_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with [nodes]."""
    nodes = settings.nodes
    key = ("nodes",)
    if nodes.listen and host_and_port(nodes.listen) is None:
        yield Problem(
            (*key, "listen"),
            f"'nodes.listen' must be an address and a port, '0.0.0.0:6826', not {nodes.listen!r}",
        )
    if nodes.listen and nodes.listen == settings.forward.to:
        yield Problem(
            (*key, "listen"),
            "[nodes] needs a port of its own: agents speak HTTP, controllers do not",
        )
    yield from file_problems("nodes", nodes)
    if nodes.client_ca_file and not nodes.certificate_file:
        yield Problem(
            (*key, "client_ca_file"),
            "'nodes.client_ca_file' is for TLS: set 'certificate_file' and 'key_file', too",
        )
    if nodes.listener and nodes.client_ca_file:
        yield Problem(
            (*key, "listener"),
            "'nodes.listener' cannot be set with 'client_ca_file': the daemon itself checks the "
            "certificates of nodes, so take one of both out",
        )
    if nodes.listener and not nodes.listen:
        yield Problem((*key, "listener"), "'nodes.listener' has no address: set 'listen'")
    if not 0 < nodes.most_connections <= _MOST_CONNECTIONS:
        yield Problem(
            (*key, "most_connections"),
            f"'nodes.most_connections' must be between 1 and {_MOST_CONNECTIONS}",
        )
    for network in nodes.shared_from:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            what = f"'nodes.shared_from' holds {network!r}, which is no network: '10.1.2.0/24'"
            yield Problem((*key, "shared_from"), what)
    if nodes.listen and not any(of.scheduler == "slurm" for of in settings.cluster.values()):
        yield Problem((*key, "listen"), "[nodes] is for clusters of Slurm, and none is named")
