"""Cluster settings: the configuration section ``[cluster.NAME]``."""

from typing import Final

from steward.core.section import Section

SCHEDULERS: Final = "steward.scheduler"
"""Entry point group whose names are the values of ``scheduler``."""


class ClusterSettings(Section, frozen=True, kw_only=True):
    """[cluster.NAME]: settings of one cluster.

    Attributes:
        scheduler: ``slurm``, ``torque``, or a scheduler that another package provides, see
            docs/torque.md.
        slurm: Whether to query Slurm. If false, jobs stay unverified.
        spool: slurmctld's StateSaveLocation; queried from Slurm if empty. For Torque: server_priv.
        slurm_conf: Path passed to Slurm's commands as SLURM_CONF; their default if empty.
        slurm_bin: Directory of Slurm's commands; found in PATH if empty.
        slurm_prefix: Words placed before each of Slurm's commands (``chroot /srv/slurm-26.05``).
        timezone: IANA time zone of dates in paths and output; the system's if empty.
        snapshot_interval_s: Minimum interval of queue polls, in seconds.
        remote: Whether a ``steward controller`` elsewhere reports for this cluster, see
            docs/controllers.md. If so, this host reads neither its spool nor its Slurm.
        controllers: Hosts of its slurmctld, names or addresses: they may report for it, and their
            gates may ask the gate of this host, see docs/gate.md.
        munge_socket: Socket of this cluster's munged; MUNGE's default if empty.
        jobcomp_lines: File that native/jobcomp.lua appends to on this host, see
            docs/accounting.md; "" if JobCompType is not Steward's.
    """

    scheduler: str = "slurm"
    slurm: bool = True
    spool: str = ""
    slurm_conf: str = ""
    slurm_bin: str = ""
    slurm_prefix: tuple[str, ...] = ()
    timezone: str = ""
    snapshot_interval_s: float = 5.0
    remote: bool = False
    controllers: tuple[str, ...] = ()
    munge_socket: str = ""
    jobcomp_lines: str = ""

    @property
    def asks_slurm(self) -> bool:
        """Whether Steward runs Slurm's commands for this cluster."""
        return self.slurm and self.scheduler == "slurm"
