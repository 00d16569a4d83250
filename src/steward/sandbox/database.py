"""Slurm's own books in a sandbox: MariaDB, slurmdbd, and who may charge jobs to what.

MariaDB listens on a socket in the sandbox's directory and on no port. It keeps
what it is told as long as the sandbox lives, and takes no care that it would
outlive a power failure: so it is quick.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Final

from steward.sandbox.spec import Plan, SandboxError, SandboxSpec, Service, SlurmMissing

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


def text(
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


def check(spec: SandboxSpec) -> None:
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
