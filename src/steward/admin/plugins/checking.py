"""Looks at what Slurm would load, before Slurm does: a wrong file is an error for every job.

A library is loaded in a process of its own, which may crash without harm.
"""

import os
import stat
import subprocess
import sys
from typing import Final

import msgspec

from steward.admin.plugins.building import (
    HOOKS,
    SHIM,
    SUBMIT_LIBRARY,
    Built,
    SlurmVersion,
    find_built,
)
from steward.admin.plugins.errors import NativeError
from steward.admin.plugins.installing import (
    OUR_CONF,
    conf_directory,
    includes,
    plugstack_lines,
)
from steward.core.filesystems import network_kind

_TIMEOUT_S: Final = 30.0
_LOOK: Final = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
number = lambda name: ctypes.c_uint.in_dll(library, name).value
text = lambda name: ctypes.string_at(
    ctypes.addressof(ctypes.c_char.in_dll(library, name))
).decode()
print(json.dumps({
    "type": text("plugin_type"), "version": number("plugin_version"),
    "missing": [name for name in sys.argv[2:] if not hasattr(library, name)],
}))
"""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a library says of itself.

    Attributes:
        type: plugin_type.
        version: plugin_version: SLURM_VERSION_NUMBER of the headers.
        missing: Hooks that it lacks.
    """

    type: str
    version: int
    missing: list[str]


def look(path: str) -> Look:
    """Load a library in another process, and say what it is.

    Raises:
        NativeError: It cannot be loaded, or is no plugin of Slurm's.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LOOK, path, *HOOKS.get(os.path.basename(path), ())],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{path} took longer than {_TIMEOUT_S:g} s to load", path) from error
    if result.returncode:
        said = result.stderr.strip().rpartition("\n")[2]
        why = said.partition(": ")[2] or said or f"signal {-result.returncode}"
        raise NativeError(f"{path} cannot be loaded: {why}", path)
    return msgspec.json.decode(result.stdout, type=Look)


def check_library(path: str, version: SlurmVersion, *, is_exact: bool = False) -> list[str]:
    """What is wrong with a plugin of ours for a version of Slurm, a line each.

    Args:
        path: The library.
        version: Of the Slurm that is to load it.
        is_exact: Whether it has to be of the same patch level, as slurmctld wants it.
    """
    try:
        seen = look(path)
    except NativeError as error:
        return [str(error)]
    wrong = []
    wanted = "job_submit/steward" if os.path.basename(path) == SUBMIT_LIBRARY else "spank"
    if seen.type != wanted:
        wrong.append(f"{path} is no plugin of the type {wanted} but {seen.type!r}")
    made_for = SlurmVersion.of_number(seen.version)
    if not (made_for == version if is_exact else made_for.serves(version)):
        wrong.append(f"{path} was built for Slurm {made_for}, not for {version}: build it anew")
    if seen.missing:
        wrong.append(f"{path} lacks {', '.join(seen.missing)}: build it anew")
    return wrong


def check_coming(version: SlurmVersion, *, libdir: str) -> list[str]:
    """What would be wrong with the plugin under a Slurm that is to come, a line each."""
    built = find_built(libdir, version)
    if built is None:
        return [f"there is no build for Slurm {version} in {libdir}: run steward plugins build"]
    directory = os.path.dirname(built.path)
    return [line for name in SHIM for line in check_library(os.path.join(directory, name), version)]


def check_shim(version: SlurmVersion, *, libdir: str, plugstack: str) -> list[str]:
    """What keeps this node from telling of its jobs, a line each.

    Args:
        version: Of the Slurm that is on this node.
        libdir: Where builds lie side by side.
        plugstack: Slurm's PlugStackConfig.
    """
    built = find_built(libdir, version)
    wrong = check_coming(version, libdir=libdir)
    if built is not None:
        wrong += _check_conf(built, plugstack)
    return [*wrong, *_check_spool(plugstack)]


def spool_of(plugstack: str) -> str:
    """The directory of the lines, as our file beside plugstack.conf names it; "" if none does."""
    for words in plugstack_lines(os.path.join(conf_directory(plugstack), OUR_CONF)):
        for word in words[2:]:
            if word.startswith("spool="):
                return word.removeprefix("spool=")
    return ""


def _check_conf(built: Built, plugstack: str) -> list[str]:
    conf = os.path.join(conf_directory(plugstack), OUR_CONF)
    lines = plugstack_lines(conf)
    if not lines:
        return [f"{conf} is missing: run steward plugins install"]
    wrong = []
    for words in lines:
        if words[0] != "optional":
            wrong.append(f"{conf} says {words[0]!r}: only optional keeps a job from failing")
        path = words[1] if len(words) > 1 else ""
        if not os.path.exists(path):
            wrong.append(f"{conf} names {path or 'no file'}, which is not there")
        elif not os.path.samefile(os.path.dirname(path), os.path.dirname(built.path)):
            wrong.append(f"{conf} names {path}, not {built.path}: run steward plugins install")
    if not includes(plugstack, conf):
        wrong.append(f"{plugstack} does not include {conf_directory(plugstack)}/*.conf: add it")
    return wrong


def _check_spool(plugstack: str) -> list[str]:
    spool = spool_of(plugstack)
    if not spool:
        return []
    kind = network_kind(spool)
    if kind:
        return [f"{spool} is on {kind}: nothing is written there, take a local disk"]
    try:
        status = os.stat(spool)
    except OSError as error:
        return [f"{spool}: {error.strerror}: every line is lost"]
    if not stat.S_ISDIR(status.st_mode):
        return [f"{spool} is no directory: every line is lost"]
    if os.path.realpath(spool) != os.path.abspath(spool):
        return [f"{spool} is reached by a symbolic link: name {os.path.realpath(spool)} itself"]
    if status.st_mode & stat.S_IWOTH:
        return [f"{spool} may be written by anybody: nothing is written there, chmod 0700 it"]
    if status.st_uid != 0:
        return [
            f"{spool} belongs to uid {status.st_uid}, who could change what is told: give it root"
        ]
    return []
