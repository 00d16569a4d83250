"""The SPANK plugin's spool: checks of its place, owner and mode.

slurmstepd and the agent use the spool as root. The directories of the daemon and of job lines
belong to SlurmUser. One directory cannot serve both.
"""

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

_OWN_FILE: Final = re.compile(r".+\.(?:log(?:\.\d+)?|place|lock)")
"""Names of the files that the plugin and the agent write to the spool."""

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

    The directory must not be one of the daemon's or jobcomp's, nor above or below one, nor contain
    files of other programs.

    Args:
        spool: The directory.
        directories: As :func:`daemon_directories` returns them.
    """
    path = os.path.realpath(spool)
    for directory, key in directories.items():
        other = os.path.realpath(directory)
        if path == other:
            return f"the directory of {key}"
        if _is_below(path, other):
            return f"in {directory}, the directory of {key}"
        if _is_below(other, path):
            return f"a parent of {directory}, the directory of {key}"
    # The default directory is the plugin's, even with files of other programs in it.
    other = "" if path == os.path.realpath(DEFAULT_SPOOL) else _foreign_file(path)
    return f"a directory that holds {other}, which is no file of the plugin's" if other else ""


def _foreign_file(directory: str) -> str:
    try:
        with os.scandir(directory) as entries:
            return next((e.name for e in entries if _OWN_FILE.fullmatch(e.name) is None), "")
    except OSError:
        return ""


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def suggest_spool(directories: Mapping[str, str]) -> str:
    """Return a directory that can be the spool, the default first; "" if there is none."""
    fallback = "/var/lib/steward-shim"
    return next((path for path in (DEFAULT_SPOOL, fallback) if not taken_by(path, directories)), "")


def require_free(spool: str, directories: Mapping[str, str]) -> None:
    """Check that a directory can be the plugin's spool.

    Args:
        spool: The directory.
        directories: As :func:`daemon_directories` returns them.

    Raises:
        UsageError: The daemon, jobcomp or another program uses the directory.
    """
    conflict = taken_by(spool, directories)
    if conflict:
        raise UsageError(
            f"cannot use {spool} as the SPANK plugin's spool: it is {conflict}, and the spool must "
            f"be root's alone: give --spool {suggest_spool(directories) or 'DIR'}",
            spool,
        )


def require_no_spool(lines: str, spool: str) -> None:
    """Check that jobcomp's lines do not go to the SPANK plugin's spool.

    Args:
        lines: The file of job lines.
        spool: The spool that plugstack.conf names; "" if it names none.

    Raises:
        UsageError: The file is in the spool, or in a directory above or below it.
    """
    for path in filter(None, (spool, DEFAULT_SPOOL)):
        if taken_by(path, {os.path.dirname(lines): "jobcomp's lines"}):
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
    if status.st_uid != 0:
        yield Fault(
            f"{spool} belongs to uid {status.st_uid}, who could change what is told",
            (f"chown {OWNER} {spool}", f"chmod {MODE:04o} {spool}"),
        )
    others = next(_files_of_others(spool), "")
    if others:
        text = f"{others} belongs to another user than root: the agent cannot read it"
        yield Fault(text, (f"chown -R {OWNER} {spool}",))
    repair = (f"chmod {MODE:04o} {spool}",)
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        yield Fault(f"{spool} is closed to its owner: the agent cannot read it", repair)
    if status.st_mode & stat.S_IWOTH:
        yield Fault(f"{spool} may be written by anybody: nothing is written there", repair)
    elif status.st_mode & stat.S_IWGRP:
        yield Fault(f"{spool} may be written by its group, who could change what is told", repair)
    elif status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield Fault(f"{spool} is open to others than root", repair)


def _files_of_others(spool: str) -> Iterator[str]:
    with os.scandir(spool) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_uid != 0:
                yield entry.path
