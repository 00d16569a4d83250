"""Who there is in a sandbox: its own /etc/passwd, /etc/group and /etc/hosts.

They are the machine's files with lines put before, bound over the machine's
inside the sandbox's mount namespace alone.
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
# What useradd(8) takes, and nothing that would need quoting anywhere.
_NAME: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
SLURM_UID: Final = 64030
"""What Debian gives the user slurm."""


def choose(names: Sequence[str], homes: str) -> tuple[User, ...]:
    """Ordinary users with ids that nobody on this machine has.

    Args:
        names: Their names.
        homes: Directory that their home directories go to.

    Raises:
        SandboxError: A name that cannot be a user's.
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
    """The user who calls, under the name and home that the machine knows."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise SandboxError(f"uid {uid} has no name: Slurm cannot run as it", uid) from None
    return User(name=entry.pw_name, uid=uid, gid=os.getegid(), home=entry.pw_dir)


def slurm_user_of(name: str) -> User:
    """SlurmUser: the machine's, or one made for the sandbox where it has none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return User(name=name, uid=SLURM_UID, gid=SLURM_UID, home="/nonexistent")
    return User(name=name, uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir)


def passwd_text(users: Iterable[User]) -> str:
    """The sandbox's /etc/passwd, see passwd(5).

    Nobody has a password, nor an entry in /etc/shadow, which su(1), with which slurmd asks for
    the environment of scrontab's jobs, would miss.
    """
    ours = {
        user.name: f"{user.name}:*:{user.uid}:{user.gid}:{user.name}:{user.home}:/bin/bash"
        for user in users
    }
    return _before(ours, "/etc/passwd")


def group_text(users: Iterable[User], groups: Mapping[str, Iterable[str]]) -> str:
    """The sandbox's /etc/group: one for each user and those asked for, see group(5).

    Raises:
        SandboxError: A name that cannot be a group's.
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
    """The sandbox's /etc/hosts: its own name is the loopback address."""
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
    """The plan of a sandbox.

    Args:
        spec: What is asked for.
        slurm: The Slurm that runs.
        directory: The sandbox's directory, absolute.
        contained: Whether it has namespaces of its own.
        ports: As many as :func:`ports_of` says.

    Raises:
        SandboxError: There is to be a second controller where none can be.
        SlurmMissing: A program that is asked for is not installed.
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
    """How many TCP ports a sandbox takes."""
    return spec.nodes + 1 + int(spec.accounting)


def at_least(version: str, wanted: tuple[int, int]) -> bool:
    """Whether a version of Slurm, ``24.11.5``, is this series or a later one."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= wanted


def _services(
    spec: SandboxSpec, slurm: Slurm, directory: str, host: str, slurm_user: str
) -> Iterator[Service]:
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
    log = f"{directory}/log"
    env = {
        key: value.replace("{directory}", directory) for key, value in spec.controller_env.items()
    }
    argv = slurm.argv("slurmctld", "-D")
    yield Service(name=CONTROLLER, argv=argv, log=f"{log}/slurmctld.out", env=env)
    if spec.backup:
        # A controller knows which one it is by its host's name, and ends the process that its
        # PID file names; both controllers read the same slurm.conf, and so name the same file.
        name, pid = backup_host(host), f"{directory}/pid"
        script = (
            f"echo {name} > /proc/sys/kernel/hostname && "
            f'mount --bind {pid}.backup {slurm.root}{pid} && exec "$@"'
        )
        words = ("/usr/bin/unshare", "--uts", "--mount", "/bin/sh", "-c", script, "sh")
        argv = (*words, *argv, "-L", f"{log}/{BACKUP}.log")
        yield Service(name=BACKUP, argv=argv, log=f"{log}/{BACKUP}.out", env=env)


def _closed_to_others(directory: str) -> tuple[str, ...]:
    """Directories that keep ordinary users from this Python, from Steward and from the sandbox."""
    needed = {directory, sys.prefix, sys.base_prefix, os.path.dirname(__file__)}
    found: set[str] = set()
    for path in needed | {os.path.realpath(path) for path in needed}:
        above = os.path.dirname(path)
        while above != "/":
            if not os.stat(above).st_mode & stat.S_IXOTH:
                found.add(os.path.realpath(above))
            above = os.path.dirname(above)
    return tuple(sorted(found, key=len))
