"""Plan of a sandbox: its users, services and ports, and its /etc/passwd, group and hosts files.

`make_users` assigns user ids. `format_passwd`, `format_group` and `format_hosts` return the
machine's files with lines prepended; they are bind-mounted in the sandbox's mount namespace only.
`make_plan` turns a `SandboxSpec` into a `SandboxPlan` with the command lines of all services.
"""

import grp
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from steward.sandbox import configuration
from steward.sandbox.configuration import get_backup_host, list_node_names
from steward.sandbox.slurm_install import SlurmInstallation
from steward.sandbox.spec import (
    BACKUP_CONTROLLER,
    CONTROLLER,
    SandboxError,
    SandboxPlan,
    SandboxService,
    SandboxSpec,
    SandboxUser,
)

FIRST_UID: Final = 70001
"""First uid that the sandbox's users may get."""
# Names that useradd(8) accepts, none of which needs quoting.
_VALID_NAME: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
SLURM_UID: Final = 64030
"""Uid that Debian assigns to the user slurm."""


def make_users(names: Sequence[str], homes_dir: str) -> tuple[SandboxUser, ...]:
    """Create ordinary users with ids that are unused on this machine.

    Args:
        names: Their names.
        homes_dir: Directory of their home directories.

    Raises:
        SandboxError: A user name is invalid.
    """
    users: list[SandboxUser] = []
    uid = FIRST_UID
    for name in names:
        if not _VALID_NAME.fullmatch(name):
            raise SandboxError(f"invalid user name {name!r}: use letters and digits", name)
        while _is_id_taken(uid):
            uid += 1
        users.append(SandboxUser(name=name, uid=uid, gid=uid, home=f"{homes_dir}/{name}"))
        uid += 1
    return tuple(users)


def get_calling_user() -> SandboxUser:
    """Return the calling user, with the machine's name and home."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise SandboxError(
            f"cannot run Slurm as uid {uid}: the uid has no user name", uid
        ) from None
    return SandboxUser(name=entry.pw_name, uid=uid, gid=os.getegid(), home=entry.pw_dir)


def get_slurm_user(name: str) -> SandboxUser:
    """Return SlurmUser: the machine's, or one made for the sandbox."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return SandboxUser(name=name, uid=SLURM_UID, gid=SLURM_UID, home="/nonexistent")
    return SandboxUser(name=name, uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir)


def format_passwd(users: Iterable[SandboxUser]) -> str:
    """Return the text of the sandbox's /etc/passwd, see passwd(5).

    The password field is ``*``, not ``x``: the users have no entry in /etc/shadow, where su(1)
    would look for one. slurmd runs su to get the environment of scrontab's jobs.
    """
    lines = {
        user.name: f"{user.name}:*:{user.uid}:{user.gid}:{user.name}:{user.home}:/bin/bash"
        for user in users
    }
    return _prepend_lines(lines, "/etc/passwd")


def format_group(users: Iterable[SandboxUser], groups: Mapping[str, Iterable[str]]) -> str:
    """Return the text of the sandbox's /etc/group, see group(5): users' and requested groups.

    Raises:
        SandboxError: A group name is invalid.
    """
    user_list = tuple(users)
    lines = {user.name: f"{user.name}:x:{user.gid}:" for user in user_list}
    gid = max((user.gid for user in user_list), default=FIRST_UID) + 100
    for name, members in groups.items():
        if not _VALID_NAME.fullmatch(name):
            raise SandboxError(f"invalid group name {name!r}: use letters and digits", name)
        while _is_id_taken(gid):
            gid += 1
        lines[name] = f"{name}:x:{gid}:{','.join(members)}"
        gid += 1
    return _prepend_lines(lines, "/etc/group")


def format_hosts(host: str) -> str:
    """Return the text of the sandbox's /etc/hosts: its own name is the loopback address."""
    return f"127.0.0.1 localhost {host}\n" + _read_text("/etc/hosts")


def _prepend_lines(lines: Mapping[str, str], path: str) -> str:
    other_lines = [
        line for line in _read_text(path).splitlines() if line.partition(":")[0] not in lines
    ]
    return "\n".join([*lines.values(), *other_lines]) + "\n"


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _is_id_taken(number: int) -> bool:
    """Return True if an id is a user's or a group's on this machine."""
    for look_up in (pwd.getpwuid, grp.getgrgid):
        try:
            look_up(number)
        except KeyError:
            continue
        return True
    return False


def make_plan(
    spec: SandboxSpec,
    slurm: SlurmInstallation,
    directory: str,
    *,
    contained: bool,
    ports: tuple[int, ...],
) -> SandboxPlan:
    """Make the plan of a sandbox.

    Args:
        spec: The cluster's properties.
        slurm: The Slurm to run.
        directory: The sandbox's directory, absolute.
        contained: Whether it has its own namespaces.
        ports: As many ports as :func:`count_ports` says.

    Raises:
        SandboxError: A backup controller is requested but impossible.
        SlurmNotInstalled: A requested program is not installed.
    """
    is_root = os.geteuid() == 0
    is_isolated = is_root and contained
    if spec.backup and not is_isolated:
        raise SandboxError(
            "a second slurmctld requires root and namespaces: run this as root", spec
        )
    caller = get_calling_user()
    slurm_user = get_slurm_user(spec.slurm_user).name if is_isolated else caller.name
    host = spec.cluster if contained else os.uname().nodename.partition(".")[0] or "localhost"
    return SandboxPlan(
        directory=directory,
        contained=contained,
        host=host,
        slurm_version=slurm.version,
        root=slurm.root,
        slurm_bin=f"{directory}/bin" if slurm.root else slurm.commands_dir,
        users=make_users(spec.user_names, f"{directory}/home") if is_isolated else (caller,),
        slurm_user=slurm_user,
        services=tuple(_list_services(spec, slurm, directory, host, slurm_user)),
        opened_directories=_list_closed_directories(directory) if is_isolated else (),
        ports=ports,
        spec=spec,
    )


def count_ports(spec: SandboxSpec) -> int:
    """Return the number of TCP ports that a sandbox needs."""
    return spec.nodes + 1 + int(spec.accounting)


def is_at_least_version(version: str, minimum: tuple[int, int]) -> bool:
    """Return True if a Slurm version, ``24.11.5``, is of this series or a later one."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= minimum


def _list_services(
    spec: SandboxSpec, slurm: SlurmInstallation, directory: str, host: str, slurm_user: str
) -> Iterator[SandboxService]:
    """Yield the services in the order in which they start."""
    log_dir = f"{directory}/log"
    munged_argv = slurm.make_argv(
        "munged",
        *("--foreground", "--force", "--num-threads=2"),
        f"--key-file={directory}/etc/munge.key",
        f"--socket={directory}/run/munge.socket",
        f"--pid-file={directory}/run/munged.pid",
        f"--seed-file={directory}/run/munged.seed",
    )
    yield SandboxService(name="munged", argv=munged_argv, log=f"{log_dir}/munged.log")
    if spec.accounting:
        yield configuration.make_mariadb_service(directory, slurm_user)
        yield SandboxService(
            name="slurmdbd",
            argv=slurm.make_argv("slurmdbd", "-D"),
            log=f"{log_dir}/slurmdbd.out",
            env=configuration.make_mariadb_environment(directory),
        )
    yield from _list_controllers(spec, slurm, directory, host)
    for node in list_node_names(spec):
        yield SandboxService(
            name=f"slurmd.{node}",
            argv=slurm.make_argv("slurmd", "-D", "-N", node),
            log=f"{log_dir}/slurmd.{node}.out",
        )


def _list_controllers(
    spec: SandboxSpec, slurm: SlurmInstallation, directory: str, host: str
) -> Iterator[SandboxService]:
    """Yield the service of slurmctld, and of the backup controller if requested."""
    log_dir = f"{directory}/log"
    env = {
        key: value.replace("{directory}", directory) for key, value in spec.controller_env.items()
    }
    argv = slurm.make_argv("slurmctld", "-D")
    yield SandboxService(name=CONTROLLER, argv=argv, log=f"{log_dir}/slurmctld.out", env=env)
    if spec.backup:
        # A controller recognizes itself by its host name, and ends the process in its PID file;
        # both controllers read the same slurm.conf, and so name the same file.
        backup_host, pid_dir = get_backup_host(host), f"{directory}/pid"
        script = (
            f"echo {backup_host} > /proc/sys/kernel/hostname && "
            f'mount --bind {pid_dir}.backup {slurm.root}{pid_dir} && exec "$@"'
        )
        wrapper = ("/usr/bin/unshare", "--uts", "--mount", "/bin/sh", "-c", script, "sh")
        argv = (*wrapper, *argv, "-L", f"{log_dir}/{BACKUP_CONTROLLER}.log")
        yield SandboxService(
            name=BACKUP_CONTROLLER, argv=argv, log=f"{log_dir}/{BACKUP_CONTROLLER}.out", env=env
        )


def _list_closed_directories(directory: str) -> tuple[str, ...]:
    """List directories that keep users from this Python, Steward or the sandbox."""
    needed_paths = {directory, sys.prefix, sys.base_prefix, os.path.dirname(__file__)}
    closed_dirs: set[str] = set()
    for path in needed_paths | {os.path.realpath(path) for path in needed_paths}:
        parent = os.path.dirname(path)
        while parent != "/":
            if not os.stat(parent).st_mode & stat.S_IXOTH:
                closed_dirs.add(os.path.realpath(parent))
            parent = os.path.dirname(parent)
    return tuple(sorted(closed_dirs, key=len))
