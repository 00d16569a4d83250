"""Looks at what keeps slurmctld from telling of the jobs that end, by jobcomp.lua.

slurmctld says of it in its log alone, and only once: a script that was not there when it
began is not looked for again, and a directory that it cannot write to costs the line.
"""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from steward.admin.plugins.installing import DEFAULT_LINES, JOBCOMP, is_open, open_directory
from steward.core.filesystems import may, network_kind

_LINES: Final = re.compile(r"""^\s*steward_jobcomp_file\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_CALLED: Final = re.compile(r"""^[^\n-]*\bdofile\(?\s*["']([^"'\n]+)["']""", re.MULTILINE)
_USER: Final = re.compile(r"(.*)\((\d+)\)")


def check_jobcomp(shown: Mapping[str, str], directory: str) -> list[str]:
    """What keeps slurmctld from telling of jobs that end, a line each.

    Args:
        shown: What ``scontrol show config`` shows.
        directory: Where slurm.conf is.
    """
    kind = shown.get("JobCompType", "")
    if kind != "jobcomp/lua":
        told = "what it would tell comes from snapshots and sacct"
        return [f"JobCompType is {kind or 'jobcomp/none'}, not jobcomp/lua: {told}"]
    path = os.path.join(directory, JOBCOMP)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return [f"JobCompType is jobcomp/lua, but {path}: {error.strerror}"]
    if "steward" not in text:
        return [f"{path} does not call Steward's: run steward plugins install"]
    missing = [called for called in _CALLED.findall(text) if not os.path.exists(called)]
    wrong = [f"{path} calls {called}, which is not there" for called in missing]
    lines = lines_of(text)
    return wrong + _check_lines(lines, slurm_user(shown)) + _check_began(path, lines, shown)


def lines_of(text: str) -> str:
    """The file that a jobcomp.lua has its lines written to."""
    named = _LINES.search(text)
    return named[1] if named else DEFAULT_LINES


def slurm_user(shown: Mapping[str, str]) -> tuple[str, int] | None:
    """SlurmUser's name and uid, as ``scontrol show config`` shows them; None where it does not."""
    found = _USER.fullmatch(shown.get("SlurmUser", ""))
    return (found[1], int(found[2])) if found is not None else None


def _check_lines(lines: str, user: tuple[str, int] | None) -> list[str]:
    """Whether slurmctld can append to the file, or make it."""
    directory = os.path.dirname(lines)
    kind = network_kind(directory)
    if kind:
        return [f"{directory} is on {kind}, which could stall slurmctld: take a local disk"]
    if not os.path.isdir(directory):
        return [f"{directory} is not there, so every line is lost: make it, as SlurmUser's"]
    if is_open(directory):
        return [open_directory(directory)]
    if user is None:
        return []
    name, uid = user
    for path in (lines, directory):
        if os.path.lexists(path):
            # slurmctld makes the file anew only where it is not there.
            if may(uid, "w", path) is False:
                return [f"{path} cannot be written by SlurmUser {name}, so every line is lost"]
            return []
    return []


def _check_began(path: str, lines: str, shown: Mapping[str, str]) -> list[str]:
    """Whether slurmctld runs since before the script was there, and has written nothing since."""
    try:
        began = datetime.fromisoformat(shown.get("BOOT_TIME", "")).timestamp()
        placed = os.stat(path).st_mtime
    except (OSError, ValueError):
        return []
    try:
        written = os.stat(lines).st_mtime
    except OSError:
        written = 0.0
    # BOOT_TIME has whole seconds, cut off.
    if placed < began + 1 or written >= began:
        return []
    since = f"slurmctld runs since {shown['BOOT_TIME']}, {path} is newer"
    return [f"{since}, and nothing was written since: restart slurmctld"]
