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
        behind_nat: Whether nodes connect from addresses other than those Slurm knows. Then MUNGE
            alone identifies a node, and root on any node can report for any other.
        most_connections: Maximum number of batches read at once; further nodes wait, or are asked
            to retry.
        shared_from: Networks whose addresses several nodes share (NAT). Limits on connections are
            wider there.
        listener: User of ``steward listen``, which then listens instead of the daemon and forwards
            requests it cannot open; if empty, the daemon listens itself.
    """

    listen: str = ""
    tls: TlsReference = None
    behind_nat: bool = False
    most_connections: int = 64
    shared_from: tuple[str, ...] = ()
    listener: str = ""


class SensorSettings(Section, frozen=True, kw_only=True):
    """[sensor]: detects state changes of nodes, partitions and reservations.

    Attributes:
        enabled: Whether the sensor runs.
        interval_s: Minimum interval of regular polls, in seconds.
        usage: Whether to report jobs starting and ending on nodes (``IDLE``, ``MIXED``,
            ``ALLOCATED``, ``PLANNED``, ``COMPLETING``), on a busy cluster most changes; and, after
            a start of slurmctld, nodes it does not know yet (``UNKNOWN``).
        triggers: Whether to keep permanent triggers set in slurmctld (strigger) that wake the
            sensor at once; requires SlurmUser's rights.
        helper: Program that slurmctld starts for the triggers; the same path on every controller.
        secret_file: File with the helper's secret, owned by SlurmUser, mode 0600.
    """

    enabled: bool = False
    interval_s: float = 1.0
    usage: bool = False
    triggers: bool = True
    helper: str = "/usr/libexec/steward/steward-trigger"
    secret_file: str = "/etc/steward/trigger.secret"  # noqa: S105 - a path
