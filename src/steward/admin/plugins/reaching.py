"""Looks at whether slurmctld gets as far as the gate's socket, and the file that names it.

Where it does not, the plugin says so in slurmctld's log alone, and the policy holds for
every job as if the gate were down.
"""

import os
import pwd
import re
import stat
from collections.abc import Mapping
from typing import Final, Literal

from steward.admin.plugins.submitting import CALLED
from steward.admin.plugins.telling import slurm_user
from steward.bank.gate.plugin_conf import PLUGIN, plugins_of
from steward.core.filesystems import may

CONF: Final = "/run/steward/gate.conf"
"""What the plugin reads where STEWARD_GATE_CONF names nothing else."""
_NAMED: Final = re.compile(r"""^\s*steward_gate_conf\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_SOCKET: Final = "/run/steward/gate.sock"
_COST: Final = "so the policy holds for every job"


def conf_of(shown: Mapping[str, str], directory: str = "") -> str:
    """The file that the plugin reads, as far as that can be told from here.

    Args:
        shown: What ``scontrol show config`` shows.
        directory: Where slurm.conf is, for job_submit.lua; as Slurm shows it if empty.
    """
    path = os.path.join(directory or os.path.dirname(shown.get("SLURM_CONF", "")), CALLED)
    named = None
    if PLUGIN not in plugins_of(shown):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                named = _NAMED.search(file.read())
        except OSError:
            pass  # that it is not there is said by who looks at the file itself
    return named[1] if named else os.environ.get("STEWARD_GATE_CONF", CONF)


def check_reach(shown: Mapping[str, str], conf: str = CONF) -> list[str]:
    """What keeps slurmctld from the gate, a line each, with the command that mends it.

    Of what is not there yet nothing is said: the daemon makes it.

    Args:
        shown: What ``scontrol show config`` shows.
        conf: The file that the plugin reads.
    """
    user = slurm_user(shown)
    if user is None or user[1] == 0:
        return []
    name, uid = user
    socket = socket_of(conf)
    closed = {_closed(uid, socket, "w"), _closed(uid, conf, "r")} - {""}
    wrong = [
        f"{directory} is closed to SlurmUser {name}, who cannot reach the gate, "
        f"{_COST}: chmod o+x {directory}"
        for directory in sorted(closed)
    ]
    if not wrong and os.path.exists(socket) and may(uid, "w", socket) is False:
        wrong.append(
            f"{socket} does not let SlurmUser {name} in, {_COST}: "
            f'set plugin_users = ["{name}"] in [gate], and restart steward serve'
        )
    return wrong


def socket_of(conf: str) -> str:
    """The gate's socket, as the plugin's file names it."""
    try:
        with open(conf, encoding="utf-8", errors="replace") as file:
            words = [line.split(maxsplit=1) for line in file]
    except OSError:
        return _SOCKET
    found = [rest[1].strip() for rest in words if len(rest) == 2 and rest[0] == "socket"]
    return found[-1] if found else _SOCKET


def _closed(uid: int, path: str, way: Literal["r", "w"]) -> str:
    """The first directory on the way to a file that a user cannot pass; "" for none."""
    if os.path.exists(path) and may(uid, way, path):
        return ""  # by an access control list, maybe
    for directory in _above(path):
        try:
            status = os.stat(directory)
        except OSError:
            return ""
        if not _passes(uid, status):
            return directory
    return ""


def _above(path: str) -> list[str]:
    """The directories above a file, the root first."""
    found = []
    directory = os.path.dirname(os.path.abspath(path))
    while True:
        found.append(directory)
        if directory == os.path.dirname(directory):
            return found[::-1]
        directory = os.path.dirname(directory)


def _passes(uid: int, status: os.stat_result) -> bool:
    """Whether the mode alone lets a user through a directory."""
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid in _groups(uid):
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _groups(uid: int) -> set[int]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(entry.pw_name, entry.pw_gid))
