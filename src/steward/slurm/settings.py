"""The settings of clusters: where their Slurm is, and how it is asked."""

from typing import Final

from steward.core.section import Section

SCHEDULERS: Final = "steward.scheduler"
"""The group of entry points whose names ``scheduler`` takes."""


class ClusterSettings(Section, frozen=True, kw_only=True):
    """[cluster.NAME]: one cluster whose books are kept.

    Attributes:
        scheduler: ``slurm``, ``torque``, or what another package offers, see docs/torque.md.
        slurm: Whether to ask Slurm at all; without it jobs stay unverified.
        spool: slurmctld's StateSaveLocation; asked of Slurm where it is not given. Of
            Torque its server_priv.
        slurm_conf: Path given to Slurm's commands as SLURM_CONF; their default if empty.
        slurm_bin: Directory of Slurm's commands; found in PATH if empty.
        slurm_prefix: Words put before each of Slurm's commands (``chroot /srv/slurm-26.05``).
        timezone: IANA name of the zone of dates in paths and output; the system's if empty.
        snapshot_interval_s: Least seconds between two snapshots of the queue.
        command_timeout_s: How long one of Slurm's commands may take, in seconds.
        remote: Whether a ``steward controller`` elsewhere reports for it, see
            docs/controllers.md: then neither its spool nor its Slurm is looked at here.
        controllers: The hosts that may report for it, names or addresses.
        munge_socket: Socket of this cluster's munged; MUNGE's default if empty.
        jobcomp_lines: File that native/jobcomp.lua appends to on this host, see
            docs/accounting.md; "" where JobCompType is not ours.
        torque_subdirs: Whether Torque keeps its jobs in ``jobs/0`` to ``jobs/9``
            (use_jobs_subdirs); found out where it is not said.
    """

    scheduler: str = "slurm"
    slurm: bool = True
    spool: str = ""
    slurm_conf: str = ""
    slurm_bin: str = ""
    slurm_prefix: tuple[str, ...] = ()
    timezone: str = ""
    snapshot_interval_s: float = 5.0
    command_timeout_s: float = 30.0
    remote: bool = False
    controllers: tuple[str, ...] = ()
    munge_socket: str = ""
    jobcomp_lines: str = ""
    torque_subdirs: bool | None = None

    @property
    def asks_slurm(self) -> bool:
        """Whether any of Slurm's commands is run for it."""
        return self.slurm and self.scheduler == "slurm"
