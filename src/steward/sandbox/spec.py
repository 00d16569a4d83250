"""Records of a sandbox: the requested properties, the plan, and the processes that keep it.

`SandboxSpec` holds the requested properties; `SandboxUser`, `SandboxService` and `SandboxPlan` hold
the decisions made from it, stored in the marker file; `KeeperProcesses` are the process ids of
keeper and init. `is_alive` tells a process from a later one with the same id.
"""

import os
import tempfile
from typing import Final

import msgspec

from steward.core.errors import StewardError
from steward.core.processes import read_start_ticks

MARKER = "sandbox.json"
"""File that marks a directory as a sandbox's; no other directory is ever removed."""

CONTROLLER: Final = "slurmctld"
BACKUP_CONTROLLER: Final = "slurmctld.backup"
"""Names of the two controllers' services: the backup stands by until the first is gone."""
BACKUP_ADDRESS: Final = "127.0.0.2"
"""Address of the backup controller, which uses the same port as the first."""


class SandboxError(StewardError):
    """A sandbox cannot be brought up, used or ended."""


class SlurmNotInstalled(SandboxError):
    """No Slurm is available, or not in the requested version."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a sandbox to bring up.

    Attributes:
        directory: Directory of everything; if empty, one below the system's temporary directory.
        nodes: Number of virtual nodes, one slurmd each.
        cpus: CPUs that each node reports, whatever the host has.
        memory_mib: Memory that each node reports, in MiB.
        slurm: Version to run (``24.11``); if empty, the installed one.
        cluster: ClusterName.
        user_names: Names of the ordinary users; only root can have them.
        groups: Unix groups and their members, besides each user's own; only root can have them.
        slurm_user: SlurmUser, if root brings the cluster up.
        first_job_id: First job id (FirstJobId).
        max_job_id: Job id after which ids start again (MaxJobId); 0 for Slurm's default.
        min_job_age_s: Seconds that slurmctld keeps a finished job (MinJobAge).
        private_data: PrivateData (``jobs,users``); if empty, nothing is private.
        job_requeue: JobRequeue.
        contained: Whether to use namespaces where permitted.
        extra: Additional lines of slurm.conf.
        plugstack: Lines of plugstack.conf. Files that they name must be in the temporary directory
            or in the sandbox's own, written ``{directory}``, so that every version of Slurm finds
            them.
        jobcomp_lua: Path of a script, or its text if that has several lines, that slurmctld runs
            for every ended job (JobCompType=jobcomp/lua); "" for none. It becomes
            ``etc/jobcomp.lua`` in the sandbox's directory, where a test may change it.
        job_submit: Plugins in JobSubmitPlugins, in order (``lua``, ``steward``).
        job_submit_lua: Path of a script, or its text if that has several lines, for job_submit/lua;
            it becomes ``etc/job_submit.lua`` in the sandbox's directory.
        plugin_dirs: Directories after Slurm's own in PluginDir. They must be in the temporary
            directory or in the sandbox's own, written ``{directory}``.
        controller_env: Environment variables of slurmctld; values may hold ``{directory}``.
        backup: Whether to run a backup slurmctld on the same state; needs root and namespaces.
        accounting: Whether to run Slurm's own accounting, with slurmdbd and MariaDB.
        accounts: Slurm accounts; every user may charge every one, the first is the default, and the
            first user is its coordinator.
    """

    directory: str = ""
    nodes: int = 4
    cpus: int = 4
    memory_mib: int = 4096
    slurm: str = ""
    cluster: str = "sandbox"
    user_names: tuple[str, ...] = ("ada", "bela")
    groups: dict[str, tuple[str, ...]] = {}
    slurm_user: str = "slurm"
    first_job_id: int = 1
    max_job_id: int = 0
    min_job_age_s: int = 300
    private_data: str = ""
    job_requeue: bool = True
    contained: bool = True
    extra: tuple[str, ...] = ()
    plugstack: tuple[str, ...] = ()
    jobcomp_lua: str = ""
    job_submit: tuple[str, ...] = ()
    job_submit_lua: str = ""
    plugin_dirs: tuple[str, ...] = ()
    controller_env: dict[str, str] = {}
    backup: bool = False
    accounting: bool = False
    accounts: tuple[str, ...] = ("physics", "chemistry")


class SandboxUser(msgspec.Struct, frozen=True, kw_only=True):
    """A user who may submit jobs in the sandbox."""

    name: str
    uid: int
    gid: int
    home: str


class SandboxService(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs as long as the sandbox does.

    Attributes:
        name: ``munged``, ``mariadbd``, ``slurmdbd``, ``slurmctld``, ``slurmctld.backup`` or
            ``slurmd.NODE``.
        argv: Command line; the first word is a path.
        log: File to which its output is appended.
        env: Environment variables besides those of every service.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    env: dict[str, str] = {}


class SandboxPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided before the first process starts; stored in the marker file.

    Attributes:
        directory: The sandbox's directory, absolute.
        contained: Whether it has its own mount, PID and UTS namespaces.
        host: Host name of Slurm's daemons.
        slurm_version: Version as ``slurmctld -V`` prints it.
        root: Root directory in which to start Slurm's programs; "" for the machine's own.
        slurm_bin: Directory of Slurm's commands, valid inside.
        users: The ordinary users; without root only the calling user.
        slurm_user: User that slurmctld and slurmdbd run as.
        services: In the order in which they start.
        opened_directories: Directories above this program that other users may not enter; the
            sandbox opens them within its mount namespace.
        ports: All TCP ports of the sandbox: slurmctld's, one for each node, and slurmdbd's if it
            runs.
        spec: The requested properties.
    """

    directory: str
    contained: bool
    host: str
    slurm_version: str
    root: str
    slurm_bin: str
    users: tuple[SandboxUser, ...]
    slurm_user: str
    services: tuple[SandboxService, ...]
    opened_directories: tuple[str, ...]
    ports: tuple[int, ...]
    spec: SandboxSpec

    @property
    def slurm_conf(self) -> str:
        """Return the path of slurm.conf."""
        return f"{self.directory}/etc/slurm.conf"

    @property
    def spool(self) -> str:
        """Return slurmctld's StateSaveLocation."""
        return f"{self.directory}/state"

    @property
    def slurmdbd_port(self) -> int:
        """Return slurmdbd's port; 0 if it does not run."""
        return self.ports[-1] if self.spec.accounting else 0

    @property
    def munge_socket(self) -> str:
        """Return the path of munged's socket."""
        return f"{self.directory}/run/munge.socket"

    @property
    def control_socket(self) -> str:
        """Return the path of the init's control socket."""
        return f"{self.directory}/keeper/control"


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process id with its start time: the pair is never reused."""

    pid: int
    started: int


class KeeperProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The two processes that keep a sandbox alive: the keeper outside, the init inside."""

    keeper: ProcessId
    init: ProcessId


def get_default_directory() -> str:
    """Return the default directory of a sandbox: one for each user of the machine."""
    return os.path.join(tempfile.gettempdir(), f"steward-sandbox-{os.geteuid()}")


def is_alive(process: ProcessId) -> bool:
    """Return True if exactly this process still runs."""
    return process.started != 0 and read_start_ticks(process.pid) == process.started
