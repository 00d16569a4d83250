"""Submit plugin installation and checks: job_submit/steward in C, or job_submit.lua.

``install_submit`` and ``install_submit_lua`` change no file of the site; they return the lines to
add to slurm.conf. slurmctld does not start if a plugin is missing or was built for another version
than its own, to the patch level. So ``check_submit`` examines what slurmctld would load, now or
after an upgrade. ``check_reach`` examines whether slurmctld can reach the gate's socket and the
file that names it: if not, the plugin says so only in slurmctld's log, and the outage policy
applies to every job as if the gate were down.
"""

import os
import pwd
import re
import stat
from collections.abc import Mapping, Sequence
from glob import glob
from typing import Final, Literal

from steward.admin.plugins.build import SUBMIT_LIBRARY, PluginBuild, SlurmVersion, read_source
from steward.admin.plugins.errors import PluginInstallError
from steward.admin.plugins.installation import (
    OWN_FILE_MARK,
    InstallResult,
    describe_error,
    find_conf_owner,
    is_own_file,
    make_directory,
    replace_if_changed,
    require_plain_path,
)
from steward.admin.plugins.jobcomp import parse_slurm_user
from steward.admin.plugins.spank import check_library
from steward.bank.gate.plugin_conf import PLUGIN_NAME, parse_submit_plugins
from steward.core.files import can_access

LUA_MODULE: Final = "steward_gate.lua"
"""Our Lua module."""
LUA_FILES: Final = (LUA_MODULE, "steward_wire.lua")
"""Files of the Lua module: the module itself, and what it loads from its directory."""
LUA_SCRIPT: Final = "job_submit.lua"
"""Script beside slurm.conf that slurmctld calls."""

_LUA_SOCKETS: Final = (
    *("/usr/lib/*/lua/5.?/socket/unix.so", "/usr/lib64/lua/5.?/socket/unix.so"),
    *("/usr/local/lib/lua/5.?/socket/unix.so", "/usr/local/lib/*/lua/5.?/socket/unix.so"),
)
_DOFILE_PATTERN: Final = re.compile(r"""^[^\n-]*\bdofile\(?\s*["']([^"'\n]+)["']""", re.MULTILINE)
_SUBMIT_CALL_PATTERN: Final = re.compile(r"^[^\n-]*\bsteward[A-Za-z_]*\.submit\b", re.MULTILINE)


def install_submit(build: PluginBuild, *, libdir: str, config: Mapping[str, str]) -> InstallResult:
    """Install the plugin in C on this host, and return the lines to add to slurm.conf.

    Args:
        build: Build for exactly this host's Slurm; copied if it is elsewhere.
        libdir: Directory of all builds on this host.
        config: Output of ``scontrol show config``; empty if slurmctld does not run yet.

    Raises:
        PluginInstallError: Something cannot be written.
    """
    directory = os.path.join(os.path.abspath(libdir), str(build.version))
    library_path = os.path.join(directory, SUBMIT_LIBRARY)
    require_plain_path(library_path)
    try:
        make_directory(directory, 0o755)
        with open(os.path.join(os.path.dirname(build.path), SUBMIT_LIBRARY), "rb") as file:
            replace_if_changed(library_path, file.read(), 0o755)
    except OSError as error:
        raise PluginInstallError(describe_error(error, library_path), library_path) from error
    conf_lines = [
        _format_plugin_dir(config, directory),
        _format_submit_plugins(config, PLUGIN_NAME),
    ]
    steps = [f"set in slurm.conf: {line}" for line in conf_lines if line]
    if steps:
        steps.append("check it with steward plugins check --job-submit")
        steps.append("restart slurmctld on every host that runs one: each needs this library")
    return InstallResult(written_paths=(library_path,), remaining=tuple(steps))


def install_submit_lua(directory: str, *, libdir: str, cluster: str = "") -> InstallResult:
    """Install the Lua plugin: slurmctld then asks the gate with JobSubmitPlugins=lua.

    Args:
        directory: Directory of slurm.conf: slurmctld looks for job_submit.lua beside it.
        libdir: Directory of our module; the script beside slurm.conf only calls it.
        cluster: Name of the cluster, which Lua does not know; "" if Steward has just one.

    Raises:
        PluginInstallError: The site has a job_submit.lua of its own, or something cannot be
            written.
    """
    module_path = os.path.join(os.path.abspath(libdir), LUA_MODULE)
    site_script = os.path.join(directory, LUA_SCRIPT)
    for path in (module_path, site_script):
        require_plain_path(path)
    if cluster and not re.fullmatch(r"[A-Za-z0-9_.-]+", cluster):
        raise PluginInstallError(
            f"invalid cluster name {cluster!r}: use letters, digits, '.', '_' and '-'", cluster
        )
    cluster_line = f'steward_gate_cluster = "{cluster}"\n' if cluster else ""
    script_text = read_source(LUA_SCRIPT).replace("MODULE", module_path)
    try:
        make_directory(os.path.dirname(module_path), 0o755)
        for name in LUA_FILES:
            replace_if_changed(
                os.path.join(os.path.dirname(module_path), name), read_source(name).encode(), 0o644
            )
        if os.path.exists(site_script) and not is_own_file(site_script):
            raise PluginInstallError(
                f"{site_script} is the site's own: add "
                f"{cluster_line.strip() + '; ' if cluster_line else ''}"
                f'local steward = dofile("{module_path}"), and end slurm_job_submit with return '
                "steward.submit(job_desc, part_list, submit_uid) and slurm_job_modify with return "
                "steward.modify(job_desc, job_rec, part_list, modify_uid)",
                site_script,
            )
        content = f"-- {OWN_FILE_MARK}.\n{cluster_line}{script_text}".encode()
        replace_if_changed(site_script, content, 0o644, trusted_uids=find_conf_owner(directory))
    except OSError as error:
        raise PluginInstallError(describe_error(error, site_script), site_script) from error
    steps = ["set in slurm.conf: JobSubmitPlugins=lua, last of several, and restart slurmctld"]
    if not find_lua_sockets():
        steps.insert(0, "install LuaSocket (Debian and EPEL: lua-socket) for slurmctld's Lua")
    return InstallResult(written_paths=(module_path, site_script), remaining=tuple(steps))


def find_lua_sockets() -> list[str]:
    """Return LuaSocket's libraries on this host, for any Lua version."""
    return [path for pattern in _LUA_SOCKETS for path in sorted(glob(pattern))]


def check_submit(
    config: Mapping[str, str], version: SlurmVersion, *, directory: str = ""
) -> list[str]:
    """Return the faults of how slurmctld asks the gate, a line each.

    Args:
        config: Output of ``scontrol show config``.
        version: Version of the Slurm that runs, or of a planned upgrade.
        directory: Directory of slurm.conf, for job_submit.lua; from ``config`` if empty.
    """
    plugins = parse_submit_plugins(config)
    if PLUGIN_NAME in plugins:
        return [*_check_order(plugins), *_check_c_plugin(config, version)]
    if "lua" in plugins:
        path = os.path.join(directory or os.path.dirname(config.get("SLURM_CONF", "")), LUA_SCRIPT)
        return [*_check_order(plugins), *_check_lua(path)]
    names = ",".join(plugins) or "(null)"
    return [f"JobSubmitPlugins is {names}: slurmctld asks the gate only with steward or lua in it"]


def _check_order(plugins: Sequence[str]) -> list[str]:
    """Check that our plugin is the last of JobSubmitPlugins."""
    own_plugin = PLUGIN_NAME if PLUGIN_NAME in plugins else "lua"
    if plugins[-1] == own_plugin:
        return []
    later_plugins = ", ".join(plugins[plugins.index(own_plugin) + 1 :])
    order = f"JobSubmitPlugins has {later_plugins} after {own_plugin}"
    return [f"{order}, whose changes the gate does not price"]


def _check_c_plugin(config: Mapping[str, str], version: SlurmVersion) -> list[str]:
    """Check that slurmctld would start; it skips wrong files if a later PluginDir has a right one.

    Returns:
        The faults, a line each.
    """
    if version.micro < 0:
        return [f"slurmctld loads plugins of its own patch level only: give --slurm {version}.N"]
    libraries = [
        os.path.join(directory, SUBMIT_LIBRARY)
        for directory in _split_plugin_dir(config)
        if os.path.exists(os.path.join(directory, SUBMIT_LIBRARY))
    ]
    faults = {path: check_library(path, version, is_exact=True) for path in libraries}
    if any(not lines for lines in faults.values()):
        return []
    problem = f"slurmctld {version} would not start"
    if not libraries:
        return [
            (
                f"{problem}: no directory of PluginDir ({config.get('PluginDir', '')}) has "
                f"{SUBMIT_LIBRARY}"
            )
        ]
    return [f"{problem}: {line}" for lines in faults.values() for line in lines]


def _check_lua(path: str) -> list[str]:
    """Check that job_submit.lua calls our module and LuaSocket is installed."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            script_text = file.read()
    except OSError as error:
        return [f"JobSubmitPlugins names lua, but {path}: {error.strerror}"]
    if not _SUBMIT_CALL_PATTERN.search(script_text):
        return [f"{path} does not call steward's submit: see docs/gate.md"]
    missing_scripts = [
        script for script in _DOFILE_PATTERN.findall(script_text) if not os.path.exists(script)
    ]
    faults = [f"{path} calls {script}, which does not exist" for script in missing_scripts]
    if not find_lua_sockets():
        faults.append(
            "LuaSocket is missing, so the outage policy applies to every job: install lua-socket"
        )
    return faults


def _split_plugin_dir(config: Mapping[str, str]) -> list[str]:
    return [directory for directory in config.get("PluginDir", "").split(":") if directory]


def _format_plugin_dir(config: Mapping[str, str], directory: str) -> str:
    directories = _split_plugin_dir(config)
    if directory in directories:
        return ""
    return f"PluginDir={':'.join([*(directories or ['the one of Slurm']), directory])}"


def _format_submit_plugins(config: Mapping[str, str], name: str) -> str:
    plugins = parse_submit_plugins(config)
    if plugins and plugins[-1] == name:
        return ""
    return f"JobSubmitPlugins={','.join([*(plugin for plugin in plugins if plugin != name), name])}"


DEFAULT_GATE_CONF: Final = "/run/steward/gate.conf"
"""Default path of the plugin's configuration, unless STEWARD_GATE_CONF names another."""
_GATE_CONF_PATTERN: Final = re.compile(
    r"""^\s*steward_gate_conf\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE
)
_DEFAULT_SOCKET: Final = "/run/steward/gate.sock"
"""Default socket of the gate."""
_CONSEQUENCE: Final = "so the outage policy applies to every job"


def find_gate_conf(config: Mapping[str, str], directory: str = "") -> str:
    """Return the configuration file that the plugin reads, as far as can be known here.

    Args:
        config: Output of ``scontrol show config``.
        directory: Directory of slurm.conf, for job_submit.lua; from ``config`` if empty.
    """
    path = os.path.join(directory or os.path.dirname(config.get("SLURM_CONF", "")), LUA_SCRIPT)
    match = None
    if PLUGIN_NAME not in parse_submit_plugins(config):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                match = _GATE_CONF_PATTERN.search(file.read())
        except OSError:
            pass  # the check of the file itself reports that it is missing
    return match[1] if match else os.environ.get("STEWARD_GATE_CONF", DEFAULT_GATE_CONF)


def check_reach(config: Mapping[str, str], gate_conf: str = DEFAULT_GATE_CONF) -> list[str]:
    """Return what keeps slurmctld from the gate's socket, with the repair, a line each.

    Missing files are no fault: the daemon creates them.

    Args:
        config: Output of ``scontrol show config``.
        gate_conf: Configuration file that the plugin reads.
    """
    slurm_user = parse_slurm_user(config)
    if slurm_user is None or slurm_user[1] == 0:
        return []
    name, uid = slurm_user
    socket_path = find_gate_socket(gate_conf)
    closed_directories = {
        _find_closed_directory(uid, socket_path, "w"),
        _find_closed_directory(uid, gate_conf, "r"),
    } - {""}
    faults = [
        f"SlurmUser {name} cannot enter {directory} to reach the gate, {_CONSEQUENCE}: chmod "
        f"o+x {directory}"
        for directory in sorted(closed_directories)
    ]
    if not faults and os.path.exists(socket_path) and can_access(uid, "w", socket_path) is False:
        faults.append(
            f"SlurmUser {name} has no access to {socket_path}, {_CONSEQUENCE}: set "
            f'plugin_users = ["{name}"] in [gate], and restart steward serve'
        )
    return faults


def find_gate_socket(gate_conf: str) -> str:
    """Return the gate's socket that the plugin's configuration names."""
    try:
        with open(gate_conf, encoding="utf-8", errors="replace") as file:
            split_lines = [line.split(maxsplit=1) for line in file]
    except OSError:
        return _DEFAULT_SOCKET
    socket_paths = [
        fields[1].strip() for fields in split_lines if len(fields) == 2 and fields[0] == "socket"
    ]
    return socket_paths[-1] if socket_paths else _DEFAULT_SOCKET


def _find_closed_directory(uid: int, path: str, access: Literal["r", "w"]) -> str:
    """Return the first directory above a file that a user cannot enter; "" for none."""
    if os.path.exists(path) and can_access(uid, access, path):
        return ""  # perhaps by an access control list
    for directory in _list_parents(path):
        try:
            status = os.stat(directory)
        except OSError:
            return ""
        if not _can_enter(uid, status):
            return directory
    return ""


def _list_parents(path: str) -> list[str]:
    """Return the directories above a file, the root first."""
    parents = []
    directory = os.path.dirname(os.path.abspath(path))
    while True:
        parents.append(directory)
        if directory == os.path.dirname(directory):
            return parents[::-1]
        directory = os.path.dirname(directory)


def _can_enter(uid: int, status: os.stat_result) -> bool:
    """Return whether the mode alone lets a user enter a directory."""
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid in _list_groups(uid):
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _list_groups(uid: int) -> set[int]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(entry.pw_name, entry.pw_gid))
