"""slurm.conf for a cluster that is thrown away: every daemon on one host, nothing of it outside.

The options are those that 22.05, 24.11 and 26.05 all understand, see
slurm.conf(5) of each.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

from steward.sandbox.spec import (
    BACKUP_ADDRESS,
    Plan,
    SandboxError,
    SandboxSpec,
    Service,
    SlurmMissing,
)

MARIADB: Final = "mariadbd"
SLURMDBD: Final = "slurmdbd"
INIT: Final = "mariadb.sql"
"""The file in the sandbox's ``etc`` with what MariaDB does first."""
STATEMENTS: Final = "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
"""What it does: slurmdbd would make its database, and then wait five seconds to use it."""
_PLACES: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin")
# Nothing is synchronised to disk, and files are small.
_QUICK: Final = (
    "--innodb-log-file-size=16M",
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-method=nosync",
    "--innodb-flush-log-at-trx-commit=0",
)


def program(name: str) -> str:
    """Path of one of MariaDB's programs.

    Raises:
        SlurmMissing: It is not installed.
    """
    found = shutil.which(name, path=os.pathsep.join(_PLACES))
    if found is None:
        raise SlurmMissing(
            f"{name} is not installed, which slurmdbd needs: install MariaDB "
            "(Debian: apt-get install mariadb-server slurmdbd)",
            name,
        )
    return found


def service(directory: str, user: str) -> Service:
    """MariaDB, to run as ``user`` (who slurmdbd runs as, too).

    Raises:
        SlurmMissing: It is not installed.
    """
    argv = (
        program(MARIADB),
        "--no-defaults",
        *_as(user),
        f"--datadir={directory}/db/data",
        f"--socket={socket_of(directory)}",
        f"--pid-file={directory}/db/pid",
        f"--tmpdir={directory}/db",
        f"--init-file={directory}/etc/{INIT}",
        "--skip-networking",
        "--performance-schema=off",
        "--max-allowed-packet=64M",
        "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
        *_QUICK,
    )
    return Service(name=MARIADB, argv=argv, log=f"{directory}/log/{MARIADB}.log")


def _as(user: str) -> tuple[str, ...]:
    return (f"--user={user}",) if os.geteuid() == 0 else ()  # only root may become another


def socket_of(directory: str) -> str:
    """MariaDB's socket; its directory lets in who runs the databases alone."""
    return f"{directory}/db/socket"


def environment(directory: str) -> dict[str, str]:
    """What leads a client library of MariaDB, slurmdbd's, to the socket."""
    return {"MYSQL_UNIX_PORT": socket_of(directory)}


def making(directory: str, user: str) -> tuple[str, ...]:
    """The command that makes MariaDB's own tables; it takes less than a second.

    Raises:
        SlurmMissing: It is not installed.
    """
    return (
        program("mariadb-install-db"),
        "--no-defaults",
        *_as(user),
        f"--datadir={directory}/db/data",
        f"--tmpdir={directory}/db",
        # Whoever reaches the socket is let in, and only who runs slurmdbd reaches it.
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        *_QUICK,
    )


def slurmdbd_conf_text(
    *, directory: str, host: str, port: int, slurm_user: str, munge_socket: str, plugin_dir: str
) -> str:
    """slurmdbd.conf.

    Args:
        directory: The sandbox's directory.
        host: Name of the host, as its daemons see it.
        port: slurmdbd's.
        slurm_user: Who slurmdbd runs as.
        munge_socket: munged's socket.
        plugin_dir: PluginDir; "" for the one that was built in.
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


def lines_of_slurm_conf(port: int, munge_socket: str) -> tuple[str, ...]:
    """What slurm.conf says where jobs are kept by slurmdbd."""
    return (
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={munge_socket}",  # AuthInfo does not hold for slurmdbd
        "AccountingStoreFlags=job_comment,job_env,job_script",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
    )


def check_accounts(spec: SandboxSpec) -> None:
    """See that accounts have names that sacctmgr takes as one word.

    Raises:
        SandboxError: One has not.
    """
    for name in spec.accounts:
        if not name.isidentifier() or not name.isascii() or not name.islower():
            raise SandboxError(f"{name!r} cannot be an account's name: use small letters", name)


def peopling(plan: Plan) -> Iterator[tuple[str, ...]]:
    """What to tell sacctmgr: the cluster, its accounts, their users and a coordinator."""
    cluster, accounts = plan.spec.cluster.lower(), ",".join(plan.spec.accounts)
    yield ("add", "cluster", cluster)
    yield ("add", "account", accounts, f"cluster={cluster}")
    names = [user.name for user in plan.users]
    yield (
        *("add", "user", ",".join(names), f"cluster={cluster}", f"account={accounts}"),
        f"defaultaccount={plan.spec.accounts[0]}",
    )
    yield ("add", "coordinator", f"account={plan.spec.accounts[0]}", f"names={names[0]}")


def node_names(spec: SandboxSpec) -> tuple[str, ...]:
    """The virtual nodes: node1, node2 and so on."""
    return tuple(f"node{number}" for number in range(1, spec.nodes + 1))


def backup_host(host: str) -> str:
    """What the second controller's host is called, beside that of the first."""
    return f"{host}b"


def check_slurm_conf(spec: SandboxSpec) -> None:
    """See that nothing in a spec would break out of its line of slurm.conf.

    Raises:
        SandboxError: A value that cannot be written, or makes no sense.
    """
    if not 1 <= spec.nodes <= 256:
        raise SandboxError(f"{spec.nodes} nodes cannot be had: ask for 1 to 256", spec.nodes)
    if not spec.cluster.isidentifier() or not spec.cluster.isascii() or len(spec.cluster) > 40:
        raise SandboxError(f"{spec.cluster!r} cannot be a cluster's name: use letters", spec)
    check_accounts(spec)
    words = (spec.private_data, spec.slurm_user, *spec.job_submit, *spec.plugin_dirs)
    lines = [(line, "slurm.conf") for line in (*words, *spec.extra)]
    lines += [(line, "plugstack.conf") for line in spec.plugstack]
    for line, file in lines:
        if (line and not line.isprintable()) or line.endswith("\\"):  # which would join lines
            raise SandboxError(f"{line!r} cannot be one line of {file}", line)


def slurm_conf_text(
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
    """The whole file.

    Args:
        spec: What was asked for.
        directory: The sandbox's directory.
        host: Name of the host, as its daemons see it.
        ports: slurmctld's, then one for each node, then slurmdbd's where there is one.
        slurm_user: Who slurmctld runs as.
        slurmd_user: Who slurmd runs as.
        munge_socket: munged's socket.
        plugin_dir: PluginDir, all of it; "" for the one that was built in.
    """
    lines = [
        f"ClusterName={spec.cluster}",
        f"SlurmctldHost={host}(127.0.0.1)",
        *_lines_of_backup(spec, host),
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
        # Daemons listen on the address that they go by, the loopback, and on no other.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        # Neither cgroups nor affinity: they are the host's, and several sandboxes share it.
        "ProctrackType=proctrack/linuxproc",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        # A node has the CPUs that we say, so that jobs run side by side on a small host.
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
        lines += lines_of_slurm_conf(ports[-1], munge_socket)
    if plugin_dir:
        lines.append(f"PluginDir={plugin_dir}")
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={spec.cpus} RealMemory={spec.memory_mib} State=UNKNOWN"
        for name, port in zip(node_names(spec), ports[1 : spec.nodes + 1], strict=True)
    ]
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=debug Nodes=ALL MaxTime=00:30:00 State=UP",
        *spec.extra,
    ]
    return "\n".join(lines) + "\n"


def _lines_of_backup(spec: SandboxSpec, host: str) -> list[str]:
    if not spec.backup:
        return []
    # Soon, as far as it goes: Slurm asks the first controller a few times within this.
    return [f"SlurmctldHost={backup_host(host)}({BACKUP_ADDRESS})", "SlurmctldTimeout=5"]
