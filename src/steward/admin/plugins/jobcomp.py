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
    DEFAULT_LINES_PATH,
    JOBCOMP_SCRIPT,
    describe_open_directory,
    is_world_accessible,
)
from steward.core.files import can_access, find_network_type

_LINES_PATH_PATTERN: Final = re.compile(
    r"""^\s*steward_jobcomp_file\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE
)
_DOFILE_PATTERN: Final = re.compile(r"""^[^\n-]*\bdofile\(?\s*["']([^"'\n]+)["']""", re.MULTILINE)
_USER: Final = re.compile(r"(.*)\((\d+)\)")


def check_jobcomp(config: Mapping[str, str], directory: str) -> list[str]:
    """Return what keeps slurmctld from reporting ended jobs, with the repair, a line each.

    Args:
        config: Output of ``scontrol show config``.
        directory: Directory of slurm.conf.
    """
    return [str(fault) for fault in find_jobcomp_faults(config, directory)]


def find_jobcomp_faults(config: Mapping[str, str], directory: str) -> list[PluginFault]:
    """Return the faults of :func:`check_jobcomp`, with their repairs as separate commands."""
    jobcomp_type = config.get("JobCompType", "")
    install_command = f"steward plugins install --jobcomp {directory}"
    restart_command = "systemctl restart slurmctld"
    if jobcomp_type != "jobcomp/lua":
        consequence = "Steward takes job ends from queue polls and sacct instead"
        problem = f"JobCompType is {jobcomp_type or 'jobcomp/none'}, not jobcomp/lua: {consequence}"
        return [
            PluginFault(
                problem, (install_command, "slurm.conf: JobCompType=jobcomp/lua", restart_command)
            )
        ]
    path = os.path.join(directory, JOBCOMP_SCRIPT)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            script_text = file.read()
    except OSError as error:
        problem = f"JobCompType is jobcomp/lua, but {path}: {error.strerror}"
        return [PluginFault(problem, (install_command, restart_command))]
    if "steward" not in script_text:
        # For a site's own script the install command says what to add to it.
        return [
            PluginFault(
                f"{path} does not call Steward's script", (install_command, restart_command)
            )
        ]
    lines_path = parse_lines_path(script_text)
    reinstall_command = (
        install_command
        if lines_path == DEFAULT_LINES_PATH
        else f"{install_command} --lines {lines_path}"
    )
    missing_scripts = [
        script for script in _DOFILE_PATTERN.findall(script_text) if not os.path.exists(script)
    ]
    faults = [
        PluginFault(
            f"{path} calls {script}, which does not exist", (reinstall_command, restart_command)
        )
        for script in missing_scripts
    ]
    slurm_user = parse_slurm_user(config)
    return [
        *faults,
        *_check_lines_file(lines_path, slurm_user, install_command),
        *_check_start_time(path, lines_path, config),
    ]


def parse_lines_path(script_text: str) -> str:
    """Return the file that a jobcomp.lua writes its lines to."""
    match = _LINES_PATH_PATTERN.search(script_text)
    return match[1] if match else DEFAULT_LINES_PATH


def parse_slurm_user(config: Mapping[str, str]) -> tuple[str, int] | None:
    """Return SlurmUser's name and uid from ``scontrol show config``; None if absent."""
    match = _USER.fullmatch(config.get("SlurmUser", ""))
    return (match[1], int(match[2])) if match is not None else None


def _check_lines_file(
    lines_path: str, slurm_user: tuple[str, int] | None, install_command: str
) -> Iterator[PluginFault]:
    """Check that slurmctld can append to the file of lines, or create it."""
    directory = os.path.dirname(lines_path)
    name, uid = slurm_user or ("SlurmUser", -1)
    network_type = find_network_type(directory)
    if network_type:
        install_local = f"{install_command} --lines DIR/jobcomp.jsonl"
        problem = (
            f"{directory} is on {network_type}, which could block slurmctld: choose a local "
            "disk as DIR"
        )
        yield PluginFault(problem, (install_local,))
    elif not os.path.isdir(directory):
        make_command = f"install -d -o {name} -m 0750 {directory}"
        yield PluginFault(f"{directory} does not exist, so every line is lost", (make_command,))
    elif is_world_accessible(directory):
        yield PluginFault(describe_open_directory(directory), (f"chmod o= {directory}",))
    elif slurm_user is not None:
        # slurmctld creates the file only if it is missing.
        path = lines_path if os.path.lexists(lines_path) else directory
        if os.path.islink(lines_path) or os.path.isdir(lines_path):
            # SlurmUser can make a link to any file, and chown and chmod follow links.
            move_command = f"mv -T --backup=numbered {lines_path} {lines_path}.old"
            yield PluginFault(f"{lines_path} is not a regular file: move it away", (move_command,))
        elif can_access(uid, "w", path) is False:
            repairs = [f"chown {name} {directory}", f"chmod u=rwx {directory}"]
            repairs += (
                [f"chown {name} {lines_path}", f"chmod u+rw {lines_path}"]
                if path == lines_path
                else []
            )
            problem = f"SlurmUser {name} cannot write {path}, so every line is lost"
            yield PluginFault(problem, tuple(repairs))


def _check_start_time(path: str, lines_path: str, config: Mapping[str, str]) -> list[PluginFault]:
    """Check whether slurmctld started before the script existed and has written nothing since."""
    try:
        started_at = datetime.fromisoformat(config.get("BOOT_TIME", "")).timestamp()
        placed_at = os.stat(path).st_mtime
    except (OSError, ValueError):
        return []
    try:
        written_at = os.stat(lines_path).st_mtime
    except OSError:
        written_at = 0.0
    # BOOT_TIME is truncated to whole seconds.
    if placed_at < started_at + 1 or written_at >= started_at:
        return []
    reason = f"slurmctld runs since {config['BOOT_TIME']}, but {path} is newer"
    restart_commands = ("systemctl restart slurmctld",)
    return [
        PluginFault(
            f"{reason}, and slurmctld has written no line since: restart it", restart_commands
        )
    ]
