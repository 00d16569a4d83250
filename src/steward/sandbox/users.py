"""Who there is in a sandbox: its own /etc/passwd, /etc/group and /etc/hosts.

They are the machine's files with lines put before, bound over the machine's
inside the sandbox's mount namespace alone.
"""

import grp
import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from steward.sandbox.spec import SandboxError, User

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


def caller() -> User:
    """The user who calls, under the name and home that the machine knows."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise SandboxError(f"uid {uid} has no name: Slurm cannot run as it", uid) from None
    return User(name=entry.pw_name, uid=uid, gid=os.getegid(), home=entry.pw_dir)


def slurm_user(name: str) -> User:
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
