"""Settings of sources: sections ``[nodes]`` and ``[sensor]`` of the configuration.

:class:`NodesSettings` is for the receiver of compute nodes' reports, :class:`SensorSettings` for
the sensor. Settings of the spool and of queue polls belong to each cluster, see
``steward.slurm.settings``.
"""

from typing import Final

from steward.core.section import Section, TlsReference

LISTENER_USER: Final = "steward-listen"
"""User that the packages create for ``steward listen``."""
LISTENER_SOCKET: Final = "nodes.sock"
"""Name of the daemon's socket for ``steward listen``, beside the socket for commands."""


HELPER_NAME: Final = "steward-trigger"
"""File name of the triggers' helper program, by which Steward recognizes its triggers."""


class NodesSettings(Section, frozen=True, kw_only=True):
    """[nodes]: receiver of reports from ``steward agent`` on compute nodes.

    Attributes:
        listen: Address and port (``0.0.0.0:6826``); empty disables the receiver.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption. If it has a
            ``client_ca_file``, certificates identify nodes, otherwise MUNGE does.
        behind_nat: Networks (``10.1.2.0/24``) whose nodes share addresses, such as a NAT gateway's,
            or one /64 of IPv6. Each network may hold half of all connections without a complete
            request; any other address may hold 32. Without ``client_ca_file``, Steward does not
            compare their addresses with the node's: root on one node can report for any other.
        listener: User of ``steward listen``, which then listens instead of the daemon and forwards
            requests it cannot open; if empty, the daemon listens itself.
    """

    listen: str = ""
    tls: TlsReference = None
    behind_nat: tuple[str, ...] = ()
    listener: str = ""


class SensorSettings(Section, frozen=True, kw_only=True):
    """[sensor]: detects state changes of nodes, partitions and reservations.

    Attributes:
        enabled: Whether the sensor runs.
        interval_s: Minimum interval of regular polls, in seconds.
        usage: Whether to report jobs starting and ending on nodes (``IDLE``, ``MIXED``,
            ``ALLOCATED``, ``PLANNED``, ``COMPLETING``), on a busy cluster most changes; and, after
            a start of slurmctld, nodes it does not know yet (``UNKNOWN``).
        helper: Program that slurmctld starts to wake the sensor at a change; the same path on every
            controller. The sensor sets permanent triggers (strigger) for it, with SlurmUser's
            rights. If empty, it sets none.
        secret_file: File with the helper's secret, owned by SlurmUser, mode 0600.
    """

    enabled: bool = False
    interval_s: float = 1.0
    usage: bool = False
    helper: str = "/usr/libexec/steward/steward-trigger"
    secret_file: str = "/etc/steward/trigger.secret"  # noqa: S105 - a path
