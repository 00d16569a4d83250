"""Checks of jobcomp.lua: what keeps slurmctld from reporting the jobs that end.

slurmctld reports such faults only in its log, and only once: it does not look again for a
script that was missing at its start, and loses the line if it cannot write to a directory.

``find_jobcomp_faults`` returns the faults with their repairs, ``check_jobcomp`` the same as text.
``parse_lines_path`` and ``parse_slurm_user`` read the script and scontrol's output for others too.
"""

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from steward.admin.plugins.errors import PluginFault
from steward.admin.plugins.installation import (
    DEFAULT_LINES,
    JOBCOMP,
    describe_open_directory,
    is_world_accessible,
)
from steward.core.files import can_access, find_network_type

_LINES: Final = re.compile(r"""^\s*steward_jobcomp_file\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_CALLED: Final = re.compile(r"""^[^\n-]*\bdofile\(?\s*["']([^"'\n]+)["']""", re.MULTILINE)
_USER: Final = re.compile(r"(.*)\((\d+)\)")


def check_jobcomp(shown: Mapping[str, str], directory: str) -> list[str]:
    """Return what keeps slurmctld from reporting ended jobs, with the repair, a line each.

    Args:
        shown: Output of ``scontrol show config``.
        directory: Directory of slurm.conf.
    """
    return [str(fault) for fault in find_jobcomp_faults(shown, directory)]


def find_jobcomp_faults(shown: Mapping[str, str], directory: str) -> list[PluginFault]:
    """Return the faults of :func:`check_jobcomp`, with their repairs as separate commands."""
    kind = shown.get("JobCompType", "")
    install = f"steward plugins install --jobcomp {directory}"
    restart = "systemctl restart slurmctld"
    if kind != "jobcomp/lua":
        told = "what it would tell comes from snapshots and sacct"
        what = f"JobCompType is {kind or 'jobcomp/none'}, not jobcomp/lua: {told}"
        return [PluginFault(what, (install, "slurm.conf: JobCompType=jobcomp/lua", restart))]
    path = os.path.join(directory, JOBCOMP)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        what = f"JobCompType is jobcomp/lua, but {path}: {error.strerror}"
        return [PluginFault(what, (install, restart))]
    if "steward" not in text:
        # For a site's own script the install command says what to add to it.
        return [PluginFault(f"{path} does not call Steward's", (install, restart))]
    lines = parse_lines_path(text)
    again = install if lines == DEFAULT_LINES else f"{install} --lines {lines}"
    missing = [called for called in _CALLED.findall(text) if not os.path.exists(called)]
    faults = [
        PluginFault(f"{path} calls {called}, which is not there", (again, restart))
        for called in missing
    ]
    user = parse_slurm_user(shown)
    return [
        *faults,
        *_check_lines_file(lines, user, install),
        *_check_start_time(path, lines, shown),
    ]


def parse_lines_path(text: str) -> str:
    """Return the file that a jobcomp.lua writes its lines to."""
    named = _LINES.search(text)
    return named[1] if named else DEFAULT_LINES


def parse_slurm_user(shown: Mapping[str, str]) -> tuple[str, int] | None:
    """Return SlurmUser's name and uid from ``scontrol show config``; None if absent."""
    found = _USER.fullmatch(shown.get("SlurmUser", ""))
    return (found[1], int(found[2])) if found is not None else None


def _check_lines_file(
    lines: str, user: tuple[str, int] | None, install: str
) -> Iterator[PluginFault]:
    """Check that slurmctld can append to the file of lines, or create it."""
    directory = os.path.dirname(lines)
    name, uid = user or ("SlurmUser", -1)
    kind = find_network_type(directory)
    if kind:
        local = f"{install} --lines DIR/jobcomp.jsonl"
        what = f"{directory} is on {kind}, which could stall slurmctld: take a local disk as DIR"
        yield PluginFault(what, (local,))
    elif not os.path.isdir(directory):
        make = f"install -d -o {name} -m 0750 {directory}"
        yield PluginFault(f"{directory} is not there, so every line is lost", (make,))
    elif is_world_accessible(directory):
        yield PluginFault(describe_open_directory(directory), (f"chmod o= {directory}",))
    elif user is not None:
        # slurmctld creates the file only if it is missing.
        path = lines if os.path.lexists(lines) else directory
        if os.path.islink(lines) or os.path.isdir(lines):
            # SlurmUser can make a link to any file, and chown and chmod follow links.
            aside = f"mv -T --backup=numbered {lines} {lines}.old"
            yield PluginFault(f"{lines} is no regular file: move it away", (aside,))
        elif can_access(uid, "w", path) is False:
            mend = [f"chown {name} {directory}", f"chmod u=rwx {directory}"]
            mend += [f"chown {name} {lines}", f"chmod u+rw {lines}"] if path == lines else []
            what = f"{path} cannot be written by SlurmUser {name}, so every line is lost"
            yield PluginFault(what, tuple(mend))


def _check_start_time(path: str, lines: str, shown: Mapping[str, str]) -> list[PluginFault]:
    """Check whether slurmctld started before the script existed and has written nothing since."""
    try:
        began = datetime.fromisoformat(shown.get("BOOT_TIME", "")).timestamp()
        placed = os.stat(path).st_mtime
    except (OSError, ValueError):
        return []
    try:
        written = os.stat(lines).st_mtime
    except OSError:
        written = 0.0
    # BOOT_TIME is truncated to whole seconds.
    if placed < began + 1 or written >= began:
        return []
    since = f"slurmctld runs since {shown['BOOT_TIME']}, {path} is newer"
    restart = ("systemctl restart slurmctld",)
    return [PluginFault(f"{since}, and nothing was written since: restart slurmctld", restart)]
