"""The settings of sources: what nodes report, and the sensor."""

from typing import Final

from steward.core.section import Section

LISTENER_USER: Final = "steward-listen"
"""The user that packages make for ``steward listen``."""
LISTENER_SOCKET: Final = "nodes.sock"
"""Where the daemon hears ``steward listen``: beside the socket that commands ask through."""


HELPER_NAME: Final = "steward-trigger"
"""What the triggers' helper is called wherever it lies: so our triggers are known again."""


class NodesSettings(Section, frozen=True, kw_only=True):
    """[nodes]: what is taken from ``steward agent`` on compute nodes.

    Attributes:
        listen: Address and port (``0.0.0.0:6826``); nothing is taken if empty.
        certificate_file: Our certificate, with what signed it; without one, no encryption.
        key_file: The key of that certificate.
        client_ca_file: Certificates that the nodes' are checked against; with it a node is
            known by the name in its certificate, else by MUNGE.
        behind_nat: Whether nodes connect from other addresses than Slurm knows of: then MUNGE
            alone says which node it is, and any node's root can speak for any other.
        most_connections: How many nodes are heard at once; others are asked to come again.
        shared_from: Networks whose addresses many nodes share (NAT): where there is no room, their
            connections are ended last.
        listener: User of ``steward listen``, which then listens in the daemon's place and passes
            on what it cannot open; the daemon listens itself if empty.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    behind_nat: bool = False
    most_connections: int = 64
    shared_from: tuple[str, ...] = ()
    listener: str = ""


class SensorSettings(Section, frozen=True, kw_only=True):
    """[sensor]: tells when nodes, partitions and reservations change their state.

    Attributes:
        enabled: Whether there is one.
        interval_s: Least seconds between two looks that nobody asked for.
        usage: Whether it is told that jobs come to nodes and leave them (``IDLE``, ``MIXED``,
            ``ALLOCATED``, ``PLANNED``, ``COMPLETING``), which on a busy cluster is most of all;
            and of a slurmctld that has just started, what it does not know yet (``UNKNOWN``).
        triggers: Whether permanent triggers are kept set in slurmctld (strigger), that wake the
            sensor at once; they need SlurmUser's rights.
        helper: The program that slurmctld starts for them: the same path on every controller.
        socket: The Unix socket on which the helper wakes the sensor.
        secret_file: What the helper proves itself with: a file of SlurmUser's, mode 0600.
    """

    enabled: bool = False
    interval_s: float = 1.0
    usage: bool = False
    triggers: bool = True
    helper: str = "/usr/libexec/steward/steward-trigger"
    socket: str = "/run/steward/trigger.sock"
    secret_file: str = "/etc/steward/trigger.secret"  # noqa: S105 - a path
