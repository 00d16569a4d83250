"""What a sandbox is to be, and what is written down of one: the records that the room shares."""

import os
import tempfile
from typing import Final

import msgspec

from steward.core.errors import StewardError

MARKER = "sandbox.json"
"""The file that says a directory is a sandbox's; nothing else is ever removed."""

CONTROLLER: Final = "slurmctld"
BACKUP: Final = "slurmctld.backup"
"""The services that answer Slurm's commands: the second stands by until the first is gone."""
BACKUP_ADDRESS: Final = "127.0.0.2"
"""Where the second controller listens, on the port that both have."""


class SandboxError(StewardError):
    """A sandbox cannot be brought up, used or ended."""


class SlurmMissing(SandboxError):
    """There is no Slurm to run, or not in the version asked for."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up.

    Attributes:
        directory: Where everything goes; one below the system's temporary directory if empty.
        nodes: How many virtual nodes, one slurmd each.
        cpus: CPUs that each node says it has, whatever the host has.
        memory_mib: Memory that each node says it has, in MiB.
        slurm: Version to run (``24.11``); the installed one if empty.
        cluster: ClusterName.
        user_names: The ordinary users; only root can have them.
        groups: Unix groups and their members, beside each user's own; only root can have them.
        slurm_user: SlurmUser where root brings the cluster up.
        first_job_id: Where job ids begin.
        max_job_id: Where job ids begin anew.
        min_job_age_s: Seconds that slurmctld keeps a finished job.
        private_data: PrivateData (``jobs,users``); nothing is private if empty.
        job_requeue: JobRequeue.
        contained: Whether to take namespaces of its own where they are permitted.
        extra: Further lines of slurm.conf.
        plugstack: Lines of plugstack.conf. What they name must be in the temporary directory or
            in the sandbox's own, written ``{directory}``, to be found by every version of Slurm.
        jobcomp_lua: Path of a script, or its text if that has several lines, that slurmctld runs
            for every job that ends (JobCompType=jobcomp/lua); "" for none. It becomes
            ``etc/jobcomp.lua`` in the sandbox's directory, where a test may change it.
        job_submit: What JobSubmitPlugins names, in this order (``lua``, ``steward``).
        job_submit_lua: Path of a script, or its text if that has several lines, for job_submit/lua;
            it becomes ``etc/job_submit.lua`` in the sandbox's directory.
        plugin_dirs: Directories behind Slurm's own in PluginDir. They must be in the temporary
            directory or in the sandbox's own, written ``{directory}``.
        controller_env: Variables that slurmctld is started with; values may hold ``{directory}``.
        backup: Whether there is a second slurmctld that takes over, on the same state; it takes
            root and namespaces.
        accounting: Whether jobs are kept in Slurm's own books, by slurmdbd and MariaDB.
        accounts: What jobs can be charged to in these; every user may charge every one, the
            first is everybody's default, and the first user is its coordinator.
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


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who may submit jobs in the sandbox."""

    name: str
    uid: int
    gid: int
    home: str


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs as long as the sandbox does.

    Attributes:
        name: ``munged``, ``mariadbd``, ``slurmdbd``, ``slurmctld``, ``slurmctld.backup`` or
            ``slurmd.NODE``.
        argv: What to start; the first word is a path.
        log: File that its output is appended to.
        env: Variables beside those that every service is given.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    env: dict[str, str] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is settled before the first process starts; kept in the marker file.

    Attributes:
        directory: The sandbox's directory, absolute.
        contained: Whether it has mount, PID and UTS namespaces of its own.
        host: Host name that Slurm's daemons go by.
        slurm_version: As ``slurmctld -V`` says it.
        root: Root directory that Slurm's programs are started in; "" for the machine's own.
        slurm_bin: Directory of Slurm's commands, valid inside.
        users: The ordinary users; the calling user where there can be no others.
        slurm_user: Who slurmctld and slurmdbd run as.
        services: In the order in which they start.
        opened: Directories on the way to this program that others may not enter.
        ports: Every TCP port that the sandbox holds: slurmctld's, one for each node, and
            slurmdbd's where there is one.
        spec: What was asked for.
    """

    directory: str
    contained: bool
    host: str
    slurm_version: str
    root: str
    slurm_bin: str
    users: tuple[User, ...]
    slurm_user: str
    services: tuple[Service, ...]
    opened: tuple[str, ...]
    ports: tuple[int, ...]
    spec: SandboxSpec

    @property
    def slurm_conf(self) -> str:
        """Path of slurm.conf."""
        return f"{self.directory}/etc/slurm.conf"

    @property
    def spool(self) -> str:
        """StateSaveLocation of slurmctld."""
        return f"{self.directory}/state"

    @property
    def slurmdbd_port(self) -> int:
        """The port of slurmdbd; 0 if there is none."""
        return self.ports[-1] if self.spec.accounting else 0

    @property
    def munge_socket(self) -> str:
        """The socket of munged."""
        return f"{self.directory}/run/munge.socket"

    @property
    def control_socket(self) -> str:
        """Socket of the process that keeps the services."""
        return f"{self.directory}/keeper/control"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process and when it started: together they are never re-used."""

    pid: int
    started: int


class Keepers(msgspec.Struct, frozen=True, kw_only=True):
    """The two processes that keep a sandbox: the keeper outside, the init inside."""

    keeper: Process
    init: Process


def default_directory() -> str:
    """Where a sandbox goes if nobody says where: one for each user of the machine."""
    return os.path.join(tempfile.gettempdir(), f"steward-sandbox-{os.geteuid()}")


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if none runs (proc(5), stat)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # One that has ended and only waits for its parent to ask how runs no more.
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(process: Process) -> bool:
    """Whether it is the same process still."""
    return process.started != 0 and start_time(process.pid) == process.started
