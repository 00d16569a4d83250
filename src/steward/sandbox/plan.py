"""Plan of a sandbox: its users, services and ports, and its /etc/passwd, group and hosts files.

`make` turns a `SandboxSpec` into a `Plan` with the command lines of all services. `choose` assigns
user ids; `passwd_text`, `group_text` and `hosts_text` are the machine's files with lines prepended;
they are bind-mounted in the sandbox's mount namespace only.
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
from steward.sandbox.configuration import backup_host, node_names
from steward.sandbox.slurm_install import Slurm
from steward.sandbox.spec import BACKUP, CONTROLLER, Plan, SandboxError, SandboxSpec, Service, User

FIRST_UID: Final = 70001
"""First uid that the sandbox's users may get."""
# Names that useradd(8) accepts, none of which needs quoting.
_NAME: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
SLURM_UID: Final = 64030
"""Uid that Debian assigns to the user slurm."""


def choose(names: Sequence[str], homes: str) -> tuple[User, ...]:
    """Create ordinary users with ids that are unused on this machine.

    Args:
        names: Their names.
        homes: Directory of their home directories.

    Raises:
        SandboxError: A user name is invalid.
    """
    users: list[User] = []
    uid = FIRST_UID
    for name in names:
        if not _NAME.fullmatch(name):
            raise SandboxError(f"{name!r} cannot be a user's name: use letters and digits", name)
        while _taken(uid):
            uid += 1
        users.append(User(name=name, uid=uid, gid=uid, home=f"{homes}/{name}"))
        uid += 1
    return tuple(users)


def calling_user() -> User:
    """Return the calling user, with the machine's name and home."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise SandboxError(f"uid {uid} has no name: Slurm cannot run as it", uid) from None
    return User(name=entry.pw_name, uid=uid, gid=os.getegid(), home=entry.pw_dir)


def slurm_user_of(name: str) -> User:
    """Return SlurmUser: the machine's, or one made for the sandbox."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return User(name=name, uid=SLURM_UID, gid=SLURM_UID, home="/nonexistent")
    return User(name=name, uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir)


def passwd_text(users: Iterable[User]) -> str:
    """Write the sandbox's /etc/passwd, see passwd(5).

    The password field is ``*``, not ``x``: the users have no entry in /etc/shadow, where su(1)
    would look for one. slurmd runs su to get the environment of scrontab's jobs.
    """
    ours = {
        user.name: f"{user.name}:*:{user.uid}:{user.gid}:{user.name}:{user.home}:/bin/bash"
        for user in users
    }
    return _before(ours, "/etc/passwd")


def group_text(users: Iterable[User], groups: Mapping[str, Iterable[str]]) -> str:
    """Write the sandbox's /etc/group: one for each user and the requested ones, see group(5).

    Raises:
        SandboxError: A group name is invalid.
    """
    people = tuple(users)
    ours = {user.name: f"{user.name}:x:{user.gid}:" for user in people}
    gid = max((user.gid for user in people), default=FIRST_UID) + 100
    for name, members in groups.items():
        if not _NAME.fullmatch(name):
            raise SandboxError(f"{name!r} cannot be a group's name: use letters and digits", name)
        while _taken(gid):
            gid += 1
        ours[name] = f"{name}:x:{gid}:{','.join(members)}"
        gid += 1
    return _before(ours, "/etc/group")


def hosts_text(host: str) -> str:
    """Write the sandbox's /etc/hosts: its own name is the loopback address."""
    return f"127.0.0.1 localhost {host}\n" + _read("/etc/hosts")


def _before(lines: Mapping[str, str], path: str) -> str:
    theirs = [line for line in _read(path).splitlines() if line.partition(":")[0] not in lines]
    return "\n".join([*lines.values(), *theirs]) + "\n"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _taken(number: int) -> bool:
    """Return True if an id is a user's or a group's on this machine."""
    for look_up in (pwd.getpwuid, grp.getgrgid):
        try:
            look_up(number)
        except KeyError:
            continue
        return True
    return False


def make(
    spec: SandboxSpec, slurm: Slurm, directory: str, *, contained: bool, ports: tuple[int, ...]
) -> Plan:
    """Make the plan of a sandbox.

    Args:
        spec: The cluster's properties.
        slurm: The Slurm to run.
        directory: The sandbox's directory, absolute.
        contained: Whether it has its own namespaces.
        ports: As many ports as :func:`ports_of` says.

    Raises:
        SandboxError: A backup controller is requested but impossible.
        SlurmMissing: A requested program is not installed.
    """
    as_root = os.geteuid() == 0
    own = as_root and contained
    if spec.backup and not own:
        raise SandboxError("a second slurmctld takes root and namespaces: run this as root", spec)
    caller = calling_user()
    slurm_user = slurm_user_of(spec.slurm_user).name if own else caller.name
    host = spec.cluster if contained else os.uname().nodename.partition(".")[0] or "localhost"
    return Plan(
        directory=directory,
        contained=contained,
        host=host,
        slurm_version=slurm.version,
        root=slurm.root,
        slurm_bin=f"{directory}/bin" if slurm.root else slurm.commands,
        users=choose(spec.user_names, f"{directory}/home") if own else (caller,),
        slurm_user=slurm_user,
        services=tuple(_services(spec, slurm, directory, host, slurm_user)),
        opened=_closed_to_others(directory) if own else (),
        ports=ports,
        spec=spec,
    )


def ports_of(spec: SandboxSpec) -> int:
    """Return the number of TCP ports that a sandbox needs."""
    return spec.nodes + 1 + int(spec.accounting)


def at_least(version: str, wanted: tuple[int, int]) -> bool:
    """Return True if a Slurm version, ``24.11.5``, is of this series or a later one."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= wanted


def _services(
    spec: SandboxSpec, slurm: Slurm, directory: str, host: str, slurm_user: str
) -> Iterator[Service]:
    """Yield the services in the order in which they start."""
    log = f"{directory}/log"
    munged = slurm.argv(
        "munged",
        *("--foreground", "--force", "--num-threads=2"),
        f"--key-file={directory}/etc/munge.key",
        f"--socket={directory}/run/munge.socket",
        f"--pid-file={directory}/run/munged.pid",
        f"--seed-file={directory}/run/munged.seed",
    )
    yield Service(name="munged", argv=munged, log=f"{log}/munged.log")
    if spec.accounting:
        yield configuration.service(directory, slurm_user)
        yield Service(
            name="slurmdbd",
            argv=slurm.argv("slurmdbd", "-D"),
            log=f"{log}/slurmdbd.out",
            env=configuration.environment(directory),
        )
    yield from _controllers(spec, slurm, directory, host)
    for node in node_names(spec):
        yield Service(
            name=f"slurmd.{node}",
            argv=slurm.argv("slurmd", "-D", "-N", node),
            log=f"{log}/slurmd.{node}.out",
        )


def _controllers(spec: SandboxSpec, slurm: Slurm, directory: str, host: str) -> Iterator[Service]:
    """Yield the service of slurmctld, and of the backup controller if requested."""
    log = f"{directory}/log"
    env = {
        key: value.replace("{directory}", directory) for key, value in spec.controller_env.items()
    }
    argv = slurm.argv("slurmctld", "-D")
    yield Service(name=CONTROLLER, argv=argv, log=f"{log}/slurmctld.out", env=env)
    if spec.backup:
        # A controller recognizes itself by its host name, and ends the process in its PID file;
        # both controllers read the same slurm.conf, and so name the same file.
        name, pid = backup_host(host), f"{directory}/pid"
        script = (
            f"echo {name} > /proc/sys/kernel/hostname && "
            f'mount --bind {pid}.backup {slurm.root}{pid} && exec "$@"'
        )
        words = ("/usr/bin/unshare", "--uts", "--mount", "/bin/sh", "-c", script, "sh")
        argv = (*words, *argv, "-L", f"{log}/{BACKUP}.log")
        yield Service(name=BACKUP, argv=argv, log=f"{log}/{BACKUP}.out", env=env)


def _closed_to_others(directory: str) -> tuple[str, ...]:
    """List directories that keep users from this Python, Steward or the sandbox."""
    needed = {directory, sys.prefix, sys.base_prefix, os.path.dirname(__file__)}
    found: set[str] = set()
    for path in needed | {os.path.realpath(path) for path in needed}:
        above = os.path.dirname(path)
        while above != "/":
            if not os.stat(above).st_mode & stat.S_IXOTH:
                found.add(os.path.realpath(above))
            above = os.path.dirname(above)
    return tuple(sorted(found, key=len))
