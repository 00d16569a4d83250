"""Configuration of a sandbox's daemons: slurm.conf, slurmdbd.conf, and MariaDB's command lines.

`make_mariadb_service`, `make_mariadb_environment` and `make_install_command` describe MariaDB,
which slurmdbd needs. It listens on a socket in the sandbox's directory and on no port, and is fast
because its data need not survive a power failure. `format_slurmdbd_conf` and `format_slurm_conf`
return the texts of the files; `check_slurm_conf` validates a spec first. `list_sacctmgr_commands`
lists the commands that add accounts and users. All daemons run on one host. The options are valid
in Slurm 22.05, 24.11 and 26.05, see slurm.conf(5) of each.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

from steward.sandbox.spec import (
    BACKUP_ADDRESS,
    SandboxError,
    SandboxPlan,
    SandboxService,
    SandboxSpec,
    SlurmNotInstalled,
)

MARIADB: Final = "mariadbd"
SLURMDBD: Final = "slurmdbd"
INIT_FILE: Final = "mariadb.sql"
"""Name of the SQL file in the sandbox's ``etc`` that MariaDB runs at its start."""
INIT_SQL: Final = "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
"""Its content. Without it slurmdbd creates its database itself, and then waits five seconds."""
_SEARCH_PATH: Final = (
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
)
# Fast options: no fsync, small files.
_FAST_OPTIONS: Final = (
    "--innodb-log-file-size=16M",
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-method=nosync",
    "--innodb-flush-log-at-trx-commit=0",
)


def find_mariadb_program(name: str) -> str:
    """Find one of MariaDB's programs.

    Raises:
        SlurmNotInstalled: It is not installed.
    """
    program = shutil.which(name, path=os.pathsep.join(_SEARCH_PATH))
    if program is None:
        raise SlurmNotInstalled(
            f"slurmdbd needs {name}, which is not installed: install MariaDB "
            "(Debian: apt-get install mariadb-server slurmdbd)",
            name,
        )
    return program


def make_mariadb_service(directory: str, user: str) -> SandboxService:
    """Return MariaDB's service, to run as ``user``, like slurmdbd.

    Raises:
        SlurmNotInstalled: It is not installed.
    """
    argv = (
        find_mariadb_program(MARIADB),
        "--no-defaults",
        *_get_user_option(user),
        f"--datadir={directory}/db/data",
        f"--socket={get_mariadb_socket(directory)}",
        f"--pid-file={directory}/db/pid",
        f"--tmpdir={directory}/db",
        f"--init-file={directory}/etc/{INIT_FILE}",
        "--skip-networking",
        "--performance-schema=off",
        "--max-allowed-packet=64M",
        "--innodb-lock-wait-timeout=900",  # slurmdbd requires it
        *_FAST_OPTIONS,
    )
    return SandboxService(name=MARIADB, argv=argv, log=f"{directory}/log/{MARIADB}.log")


def _get_user_option(user: str) -> tuple[str, ...]:
    return (f"--user={user}",) if os.geteuid() == 0 else ()  # only root may become another


def get_mariadb_socket(directory: str) -> str:
    """Return MariaDB's socket; only the databases' user can enter its directory."""
    return f"{directory}/db/socket"


def make_mariadb_environment(directory: str) -> dict[str, str]:
    """Return the environment that leads MariaDB clients, such as slurmdbd, to the socket."""
    return {"MYSQL_UNIX_PORT": get_mariadb_socket(directory)}


def make_install_command(directory: str, user: str) -> tuple[str, ...]:
    """Return the command that creates MariaDB's system tables, in less than a second.

    Raises:
        SlurmNotInstalled: It is not installed.
    """
    return (
        find_mariadb_program("mariadb-install-db"),
        "--no-defaults",
        *_get_user_option(user),
        f"--datadir={directory}/db/data",
        f"--tmpdir={directory}/db",
        # No password: only slurmdbd's user can reach the socket.
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        *_FAST_OPTIONS,
    )


def format_slurmdbd_conf(
    *, directory: str, host: str, port: int, slurm_user: str, munge_socket: str, plugin_dir: str
) -> str:
    """Return the text of slurmdbd.conf.

    Args:
        directory: The sandbox's directory.
        host: Host name that its daemons see.
        port: slurmdbd's port.
        slurm_user: User that slurmdbd runs as.
        munge_socket: munged's socket.
        plugin_dir: PluginDir; "" for the built-in one.
    """
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        f"DbdHost={host}",
        "DbdAddr=127.0.0.1",
        f"DbdPort={port}",
        f"SlurmUser={slurm_user}",
        f"LogFile={directory}/log/{SLURMDBD}.log",
        f"PidFile={directory}/pid/{SLURMDBD}.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageLoc=slurm_acct_db",
        "StorageUser=root",
    ]
    if plugin_dir:
        lines.append(f"PluginDir={plugin_dir}")
    return "\n".join(lines) + "\n"


def list_accounting_lines(port: int, munge_socket: str) -> tuple[str, ...]:
    """Return the lines of slurm.conf for accounting by slurmdbd."""
    return (
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={munge_socket}",  # AuthInfo does not apply to slurmdbd
        "AccountingStoreFlags=job_comment,job_env,job_script",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
    )


def check_accounts(spec: SandboxSpec) -> None:
    """Check that sacctmgr accepts each account's name as one word.

    Raises:
        SandboxError: A name is invalid.
    """
    for name in spec.accounts:
        if not name.isidentifier() or not name.isascii() or not name.islower():
            raise SandboxError(f"invalid account name {name!r}: use lower-case letters", name)


def list_sacctmgr_commands(plan: SandboxPlan) -> Iterator[tuple[str, ...]]:
    """Yield the sacctmgr commands that add the cluster, accounts, users and a coordinator."""
    cluster, accounts = plan.spec.cluster.lower(), ",".join(plan.spec.accounts)
    yield ("add", "cluster", cluster)
    yield ("add", "account", accounts, f"cluster={cluster}")
    user_names = [user.name for user in plan.users]
    yield (
        *("add", "user", ",".join(user_names), f"cluster={cluster}", f"account={accounts}"),
        f"defaultaccount={plan.spec.accounts[0]}",
    )
    yield ("add", "coordinator", f"account={plan.spec.accounts[0]}", f"names={user_names[0]}")


def list_node_names(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the names of the virtual nodes: node1, node2 and so on."""
    return tuple(f"node{number}" for number in range(1, spec.nodes + 1))


def get_backup_host(host: str) -> str:
    """Return the host name of the backup controller."""
    return f"{host}b"


def check_slurm_conf(spec: SandboxSpec) -> None:
    """Check that no value of a spec breaks its line in slurm.conf.

    Raises:
        SandboxError: A value is invalid.
    """
    if not 1 <= spec.nodes <= 256:
        raise SandboxError(f"invalid number of nodes {spec.nodes}: give 1 to 256", spec.nodes)
    if not spec.cluster.isidentifier() or not spec.cluster.isascii() or len(spec.cluster) > 40:
        raise SandboxError(f"invalid cluster name {spec.cluster!r}: use letters", spec)
    check_accounts(spec)
    values = (spec.private_data, spec.slurm_user, *spec.job_submit, *spec.plugin_dirs)
    lines = [(line, "slurm.conf") for line in (*values, *spec.extra)]
    lines += [(line, "plugstack.conf") for line in spec.plugstack]
    for line, file in lines:
        if (line and not line.isprintable()) or line.endswith("\\"):  # which would join lines
            raise SandboxError(
                f"invalid line {line!r} of {file}: use one line of printable characters", line
            )


def format_slurm_conf(
    spec: SandboxSpec,
    *,
    directory: str,
    host: str,
    ports: Sequence[int],
    slurm_user: str,
    slurmd_user: str,
    munge_socket: str,
    plugin_dir: str,
) -> str:
    """Return the text of slurm.conf.

    Args:
        spec: The cluster's properties.
        directory: The sandbox's directory.
        host: Host name that its daemons see.
        ports: slurmctld's port, then one for each node, then slurmdbd's if it runs.
        slurm_user: User that slurmctld runs as.
        slurmd_user: User that slurmd runs as.
        munge_socket: munged's socket.
        plugin_dir: The complete PluginDir; "" for the built-in one.
    """
    lines = [
        f"ClusterName={spec.cluster}",
        f"SlurmctldHost={host}(127.0.0.1)",
        *_list_backup_lines(spec, host),
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={slurm_user}",
        f"SlurmdUser={slurmd_user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/pid/slurmctld.pid",
        f"SlurmdPidFile={directory}/pid/slurmd.%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd.%n.log",
        f"PlugStackConfig={directory}/etc/plugstack.conf",
        # Daemons listen only on their own address, the loopback.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        # No cgroups, no affinity: they belong to the host, which several sandboxes share.
        "ProctrackType=proctrack/linuxproc",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        # Nodes have the configured CPUs, so that jobs run side by side on a small host.
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,bf_interval=5,sched_min_interval=0",
        "ReturnToService=2",
        "PropagateResourceLimits=NONE",
        "MailProg=/bin/true",
        "KillWait=2",
        "CompleteWait=0",
        "MessageTimeout=20",
        "MaxJobCount=200000",
        "MaxArraySize=100001",
        f"MinJobAge={spec.min_job_age_s}",
        f"FirstJobId={spec.first_job_id}",
        f"JobRequeue={int(spec.job_requeue)}",
    ]
    if spec.max_job_id:
        lines.append(f"MaxJobId={spec.max_job_id}")
    if spec.private_data:
        lines.append(f"PrivateData={spec.private_data}")
    if spec.jobcomp_lua:
        lines.append("JobCompType=jobcomp/lua")
    if spec.job_submit:
        lines.append(f"JobSubmitPlugins={','.join(spec.job_submit)}")
    if spec.accounting:
        lines += list_accounting_lines(ports[-1], munge_socket)
    if plugin_dir:
        lines.append(f"PluginDir={plugin_dir}")
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={spec.cpus} RealMemory={spec.memory_mib} State=UNKNOWN"
        for name, port in zip(list_node_names(spec), ports[1 : spec.nodes + 1], strict=True)
    ]
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=debug Nodes=ALL MaxTime=00:30:00 State=UP",
        *spec.extra,
    ]
    return "\n".join(lines) + "\n"


def _list_backup_lines(spec: SandboxSpec, host: str) -> list[str]:
    if not spec.backup:
        return []
    # As short as possible: Slurm queries the first controller a few times within this.
    return [f"SlurmctldHost={get_backup_host(host)}({BACKUP_ADDRESS})", "SlurmctldTimeout=5"]
