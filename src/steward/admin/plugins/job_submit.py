"""Puts the submit plugin, or its form in Lua, where slurmctld finds it, and looks it over there.

slurmctld does not start with a plugin that is missing, or was built for another version of
Slurm than itself, to the patch level. So what is looked at is what slurmctld would load,
now or after an upgrade; and no file of the site's is changed.
"""

import os
import pwd
import re
import stat
from collections.abc import Mapping, Sequence
from glob import glob
from typing import Final, Literal

from steward.admin.plugins.build import SUBMIT_LIBRARY, Built, SlurmVersion, source
from steward.admin.plugins.errors import NativeError
from steward.admin.plugins.installation import (
    MARK,
    Installed,
    is_ours,
    make_directory,
    owner_of_conf,
    replace,
    require_plain,
    said,
)
from steward.admin.plugins.jobcomp import slurm_user
from steward.admin.plugins.spank import check_library
from steward.bank.gate.plugin_conf import PLUGIN, plugins_of
from steward.core.files import may

MODULE: Final = "steward_gate.lua"
MODULES: Final = (MODULE, "steward_wire.lua")
"""The module in Lua, and what it reads from beside itself."""
CALLED: Final = "job_submit.lua"

_LUA_SOCKETS: Final = (
    *("/usr/lib/*/lua/5.?/socket/unix.so", "/usr/lib64/lua/5.?/socket/unix.so"),
    *("/usr/local/lib/lua/5.?/socket/unix.so", "/usr/local/lib/*/lua/5.?/socket/unix.so"),
)
_CALLS: Final = re.compile(r"""^[^\n-]*\bdofile\(?\s*["']([^"'\n]+)["']""", re.MULTILINE)
_DECIDES: Final = re.compile(r"^[^\n-]*\bsteward[A-Za-z_]*\.submit\b", re.MULTILINE)


def install_submit(built: Built, *, libdir: str, shown: Mapping[str, str]) -> Installed:
    """Put the plugin in C into its place on this host, and say what slurm.conf is to say.

    Args:
        built: For just the Slurm of this host; copied if it lies elsewhere.
        libdir: Where builds lie side by side on this host.
        shown: What ``scontrol show config`` shows; empty where slurmctld does not run yet.

    Raises:
        NativeError: Something cannot be written.
    """
    directory = os.path.join(os.path.abspath(libdir), str(built.version))
    target = os.path.join(directory, SUBMIT_LIBRARY)
    require_plain(target)
    try:
        make_directory(directory, 0o755)
        with open(os.path.join(os.path.dirname(built.path), SUBMIT_LIBRARY), "rb") as file:
            replace(target, file.read(), 0o755)
    except OSError as error:
        raise NativeError(said(error, target), target) from error
    left = [_line_of_directories(shown, directory), _line_of_plugins(shown, PLUGIN)]
    lines = [f"set in slurm.conf: {line}" for line in left if line]
    if lines:
        lines.append("look it over with steward plugins check --job-submit")
        lines.append("restart slurmctld on every host that runs one: each needs this library")
    return Installed(written=(target,), left=tuple(lines))


def install_submit_lua(directory: str, *, libdir: str, cluster: str = "") -> Installed:
    """Have slurmctld ask the gate by JobSubmitPlugins=lua.

    Args:
        directory: Where slurm.conf is: slurmctld looks for job_submit.lua beside it.
        libdir: Our module goes there; the one beside slurm.conf only calls it.
        cluster: The cluster's name, which Lua is not told; "" where Steward knows just one.

    Raises:
        NativeError: The site has a job_submit.lua of its own, or something cannot be written.
    """
    module = os.path.join(os.path.abspath(libdir), MODULE)
    called = os.path.join(directory, CALLED)
    for path in (module, called):
        require_plain(path)
    if cluster and not re.fullmatch(r"[A-Za-z0-9_.-]+", cluster):
        raise NativeError(f"{cluster!r} is no cluster's name", cluster)
    names = f'steward_gate_cluster = "{cluster}"\n' if cluster else ""
    text = source(CALLED).replace("MODULE", module)
    try:
        make_directory(os.path.dirname(module), 0o755)
        for name in MODULES:
            replace(os.path.join(os.path.dirname(module), name), source(name).encode(), 0o644)
        if os.path.exists(called) and not is_ours(called):
            raise NativeError(
                f"{called} is the site's own: put there {names.strip() + '; ' if names else ''}"
                f'local steward = dofile("{module}"), and end slurm_job_submit with return '
                "steward.submit(job_desc, part_list, submit_uid) and slurm_job_modify with return "
                "steward.modify(job_desc, job_rec, part_list, modify_uid)",
                called,
            )
        data = f"-- {MARK}.\n{names}{text}".encode()
        replace(called, data, 0o644, trusted=owner_of_conf(directory))
    except OSError as error:
        raise NativeError(said(error, called), called) from error
    left = ["set in slurm.conf: JobSubmitPlugins=lua, last of several, and restart slurmctld"]
    if not lua_sockets():
        left.insert(0, "install LuaSocket (Debian and EPEL: lua-socket) for slurmctld's Lua")
    return Installed(written=(module, called), left=tuple(left))


def lua_sockets() -> list[str]:
    """LuaSocket's libraries on this host, for any Lua."""
    return [path for pattern in _LUA_SOCKETS for path in sorted(glob(pattern))]


def check_submit(
    shown: Mapping[str, str], version: SlurmVersion, *, directory: str = ""
) -> list[str]:
    """What is wrong with how slurmctld is to ask the gate, a line each.

    Args:
        shown: What ``scontrol show config`` shows.
        version: Of the Slurm that runs, or that is to come.
        directory: Where slurm.conf is, for job_submit.lua; as Slurm shows it if empty.
    """
    plugins = plugins_of(shown)
    if PLUGIN in plugins:
        return [*_check_order(plugins), *_check_c(shown, version)]
    if "lua" in plugins:
        path = os.path.join(directory or os.path.dirname(shown.get("SLURM_CONF", "")), CALLED)
        return [*_check_order(plugins), *_check_lua(path)]
    named = ",".join(plugins) or "(null)"
    return [f"JobSubmitPlugins is {named}: with neither steward nor lua in it nothing is asked"]


def _check_order(plugins: Sequence[str]) -> list[str]:
    ours = PLUGIN if PLUGIN in plugins else "lua"
    if plugins[-1] == ours:
        return []
    behind = ", ".join(plugins[plugins.index(ours) + 1 :])
    return [f"JobSubmitPlugins has {behind} behind {ours}: what they change is not priced"]


def _check_c(shown: Mapping[str, str], version: SlurmVersion) -> list[str]:
    """Whether slurmctld would start: it goes on to the next directory if one has a wrong file."""
    if version.micro < 0:
        return [f"slurmctld takes no plugin of another patch level: write --slurm {version}.N"]
    found = [
        os.path.join(directory, SUBMIT_LIBRARY)
        for directory in _directories(shown)
        if os.path.exists(os.path.join(directory, SUBMIT_LIBRARY))
    ]
    wrong = {path: check_library(path, version, is_exact=True) for path in found}
    if any(not lines for lines in wrong.values()):
        return []
    stop = f"slurmctld {version} would not start"
    if not found:
        return [
            f"{stop}: no directory of PluginDir ({shown.get('PluginDir', '')}) has {SUBMIT_LIBRARY}"
        ]
    return [f"{stop}: {line}" for lines in wrong.values() for line in lines]


def _check_lua(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return [f"JobSubmitPlugins names lua, but {path}: {error.strerror}"]
    if not _DECIDES.search(text):
        return [f"{path} does not call steward's submit: see docs/gate.md"]
    missing = [called for called in _CALLS.findall(text) if not os.path.exists(called)]
    wrong = [f"{path} calls {called}, which is not there" for called in missing]
    if not lua_sockets():
        wrong.append("LuaSocket is missing, so the policy holds for every job: install lua-socket")
    return wrong


def _directories(shown: Mapping[str, str]) -> list[str]:
    return [part for part in shown.get("PluginDir", "").split(":") if part]


def _line_of_directories(shown: Mapping[str, str], directory: str) -> str:
    known = _directories(shown)
    if directory in known:
        return ""
    return f"PluginDir={':'.join([*(known or ['the one of Slurm']), directory])}"


def _line_of_plugins(shown: Mapping[str, str], name: str) -> str:
    plugins = plugins_of(shown)
    if plugins and plugins[-1] == name:
        return ""
    return f"JobSubmitPlugins={','.join([*(one for one in plugins if one != name), name])}"


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
