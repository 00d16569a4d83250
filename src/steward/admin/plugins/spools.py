"""The SPANK plugin's spool: checks of its place, owner and mode.

slurmstepd and the agent use the spool as root. The directories of the daemon and of job lines
belong to SlurmUser. One directory cannot serve both.
"""

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from steward.admin.plugins.errors import Fault
from steward.admin.plugins.installing import DEFAULT_LINES, DEFAULT_SPOOL
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.filesystems import network_kind

log = logging.getLogger(__name__)

_OWN_FILE: Final = re.compile(r".+\.(?:log(?:\.\d+)?|place|lock)")
"""Names of the files that the plugin and the agent write to the spool."""

_PLACE: Final = re.compile(r".+\.(?:place|lock)")
"""Those of the agent alone."""

OWNER: Final = "root:root"
MODE: Final = 0o700


def daemon_directories(settings: Settings) -> dict[str, str]:
    """Return the directories of the daemon and of jobcomp, each with its setting or purpose.

    Args:
        settings: The configuration. The result includes the default directories, too.
    """
    directories = {os.path.dirname(DEFAULT_LINES): "jobcomp's lines"}
    directories |= {Settings().state_dir: "the daemon's state", settings.state_dir: "state_dir"}
    directories |= _parent("socket", settings.socket)
    for field in ("socket", "plugin_conf", "off_switch"):
        directories |= _parent(f"[gate] {field}", getattr(settings.gate, field))
    for name in settings.files_sinks():
        directories[settings.sink_path(name)] = f"[archive.sink.{name}] path"
        if move_to := settings.files_sink(name).move_to:
            directories[move_to] = f"[archive.sink.{name}] move_to"
    for name, cluster in settings.cluster.items():
        directories |= _parent(f"[cluster.{name}] jobcomp_lines", cluster.jobcomp_lines)
        if cluster.spool:
            directories[cluster.spool] = f"[cluster.{name}] spool"
    return directories


def _parent(key: str, path: str) -> dict[str, str]:
    return {os.path.dirname(path): key} if path else {}


def taken_by(spool: str, directories: Mapping[str, str]) -> str:
    """Return whose a directory is, as words that follow "it is"; "" if it can be the spool.

    The directory must not be one of the daemon's or jobcomp's, nor above or below one. Unless it is
    root's alone, it must not contain files of other programs.

    Args:
        spool: The directory.
        directories: As :func:`daemon_directories` returns them.
    """
    return _part_of(spool, directories) or _used_by_others(spool)


def _part_of(spool: str, directories: Mapping[str, str]) -> str:
    path = os.path.realpath(spool)
    for directory, key in directories.items():
        other = os.path.realpath(directory)
        if path == other:
            return f"the directory of {key}"
        if _is_below(path, other):
            return f"in {directory}, the directory of {key}"
        if _is_below(other, path):
            return f"a parent of {directory}, the directory of {key}"
    return ""


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def _used_by_others(spool: str) -> str:
    """Return what shows that other programs use a directory, as words that follow "it is"."""
    if os.path.abspath(spool) == DEFAULT_SPOOL and not os.path.islink(DEFAULT_SPOOL):
        return ""
    try:
        status = os.stat(spool)
        if (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, MODE):
            return ""
        names = os.listdir(spool)
    except OSError:
        return ""  # It is not there, or only root can read it.
    # Other programs write logs, too, but no place of the agent's beside them.
    is_read = any(name.endswith((".place", ".lock")) for name in names)
    pattern = _OWN_FILE if is_read or status.st_uid == 0 else _PLACE
    foreign = next((name for name in names if pattern.fullmatch(name) is None), "")
    return f"a directory that holds {foreign}, which is no file of the plugin's" if foreign else ""


def suggest_spool(directories: Mapping[str, str]) -> str:
    """Return a directory that can be the spool: the default, if it can be.

    Args:
        directories: As :func:`daemon_directories` returns them.
    """
    beside = "/var/lib/steward-shim"
    usable = (path for path in (DEFAULT_SPOOL, beside) if not os.path.islink(path))
    return next((path for path in usable if not taken_by(path, directories)), "")


def require_free(spool: str, directories: Mapping[str, str], used: str) -> None:
    """Check that a directory can be the plugin's spool.

    Only a directory that the plugin uses already, or a directory of root's alone, can be there
    before: the commands that close it to others would break the programs that it belongs to.

    Args:
        spool: The directory.
        directories: As :func:`daemon_directories` returns them.
        used: The spool that plugstack.conf names; "" if it names none.

    Raises:
        UsageError: It cannot.
    """
    taken = taken_by(spool, directories)
    if not taken and os.path.realpath(spool) not in (DEFAULT_SPOOL, os.path.realpath(used or "/")):
        taken = _open_directory(spool)
    if taken:
        raise UsageError(
            f"cannot use {spool} as the SPANK plugin's spool: it is {taken}, and the spool must "
            f"be root's alone: give --spool {suggest_spool(directories) or 'DIR'}",
            spool,
        )


def _open_directory(spool: str) -> str:
    try:
        status = os.stat(spool)
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode) or (status.st_uid, status.st_mode & 0o7777) == (0, MODE):
        return ""
    return f"a directory of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"


def require_no_spool(lines: str, spool: str) -> None:
    """Check that jobcomp's lines do not go to the SPANK plugin's spool.

    Args:
        lines: The file of job lines.
        spool: The spool that plugstack.conf names; "" if it names none.

    Raises:
        UsageError: The file is in the spool, or in a directory above or below it.
    """
    for path in filter(None, (spool, DEFAULT_SPOOL)):
        if _part_of(path, {os.path.dirname(lines): "jobcomp's lines"}):
            raise UsageError(
                f"cannot write job lines to {lines}: {path} is the SPANK plugin's spool, root's "
                f"alone, and SlurmUser writes job lines: give --lines {DEFAULT_LINES}",
                lines,
            )


def spool_faults(spool: str) -> Iterator[Fault]:
    """Yield faults of a spool: lost lines, lines that the agent cannot read, access by others."""
    kind = network_kind(spool)
    if kind:
        yield Fault(f"{spool} is on {kind}: nothing is written there, take a local disk")
        return
    make = f"install -d -o root -g root -m 0700 {spool}"
    try:
        status = os.stat(spool)
    except OSError as error:
        yield Fault(f"{spool}: {error.strerror}: every line is lost", (make,))
        return
    if not stat.S_ISDIR(status.st_mode):
        move = f"mv -T --backup=numbered {spool} {spool}.old"
        yield Fault(f"{spool} is no directory: every line is lost", (move, make))
    elif os.path.realpath(spool) == os.path.abspath(spool):
        yield from _access_faults(spool, status)


def _access_faults(spool: str, status: os.stat_result) -> Iterator[Fault]:
    close = f"chmod {MODE:04o} {spool}"
    give = f"chown {OWNER} {spool}"
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    others = {path: uid for path, uid in _owners(spool).items() if uid != 0}
    if others:
        other, uid = next(iter(others.items()))
        # In a closed directory nobody wrote but root and its owner, whom the files came to with it.
        if is_closed and set(others.values()) == {uid} and status.st_uid in (0, uid):
            repair = (f"chown -R {OWNER} {spool}", close)
        else:
            aside = f"mv -T --backup=numbered {spool} {spool}.old"
            repair = (aside, f"install -d -o root -g root -m {MODE:04o} {spool}")
        yield Fault(f"{other} belongs to uid {uid}: the agent does not take lines from it", repair)
        return
    if status.st_uid != 0:
        what = f"{spool} belongs to uid {status.st_uid}, who could change what is told"
        yield Fault(what, (give, close))
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        yield Fault(f"{spool} is closed to its owner: the agent cannot read it", (close,))
    if status.st_mode & stat.S_IWOTH:
        yield Fault(f"{spool} may be written by anybody: nothing is written there", (close,))
    elif status.st_mode & stat.S_IWGRP:
        yield Fault(f"{spool} may be written by its group, who could change what is told", (close,))
    elif status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield Fault(f"{spool} is open to others than root", (close,))


def _owners(spool: str) -> dict[str, int]:
    """Return the owners of a spool's files by path; nothing if only root can read it."""
    owners: dict[str, int] = {}
    try:
        for name in sorted(os.listdir(spool)):
            path = os.path.join(spool, name)
            # The agent removes files that it has sent.
            with contextlib.suppress(FileNotFoundError):
                owners[path] = os.lstat(path).st_uid
    except PermissionError:
        log.debug("the files in %s are not looked at: only root can read it", spool)
    return owners
