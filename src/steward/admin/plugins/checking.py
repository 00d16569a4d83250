"""Looks at what Slurm would load, before Slurm does: a wrong file is an error for every job.

A library is loaded in a process of its own, which may crash without harm.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from steward.admin.plugins.building import (
    DEFAULT_LIBDIR,
    HOOKS,
    PROLOG_LIBRARY,
    SHIM,
    SUBMIT_LIBRARY,
    SlurmVersion,
    find_built,
)
from steward.admin.plugins.errors import Fault, NativeError
from steward.admin.plugins.installing import (
    DEFAULT_PLUGSTACK,
    DEFAULT_SPOOL,
    conf_directory,
    included,
    includes,
    our_conf,
    plugstack_lines,
)
from steward.admin.plugins.spools import daemon_directories, spool_faults, suggest_spool, taken_by
from steward.core.config import Settings

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


class ShimLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of Slurm's configuration that loads the SPANK plugin.

    Attributes:
        file: The file that it is in.
        keyword: Its first word: ``optional`` or ``required``.
        library: The library.
        spool: The directory of the lines; "" where none is named.
    """

    file: str
    keyword: str
    library: str
    spool: str


def shim_lines(plugstack: str) -> list[ShimLine]:
    """Read the lines that load the SPANK plugin: our file's, plugstack.conf's and its includes'.

    Args:
        plugstack: Slurm's PlugStackConfig.
    """
    ours = our_conf(plugstack)
    lines = [_shim_line(ours, words) for words in plugstack_lines(ours)]
    for path in included(plugstack):
        if os.path.realpath(path) == os.path.realpath(ours):
            continue
        named = (words for words in plugstack_lines(path) if len(words) > 1)
        lines += [_shim_line(path, words) for words in named if is_shim(words[1])]
    return lines


def is_shim(library: str) -> bool:
    """Whether a path names a library of the SPANK plugin."""
    return os.path.basename(library) in SHIM


def _shim_line(file: str, words: list[str]) -> ShimLine:
    spools = [word.removeprefix("spool=") for word in words[2:] if word.startswith("spool=")]
    return ShimLine(
        file=file,
        keyword=words[0],
        library=words[1] if len(words) > 1 else "",
        spool=spools[-1] if spools else "",
    )


def spool_of(plugstack: str) -> str:
    """The directory of the lines, as plugstack.conf names it; "" if nothing does."""
    return next((line.spool for line in shim_lines(plugstack) if line.spool), "")


def check_shim(
    version: SlurmVersion, *, libdir: str, plugstack: str, settings: Settings | None = None
) -> list[str]:
    """What keeps this node from telling of its jobs, and what mends it, a line each.

    Args:
        version: Of the Slurm that is on this node.
        libdir: Where builds lie side by side.
        plugstack: Slurm's PlugStackConfig.
        settings: This host's configuration, whose directories are no spool; the defaults if None.
    """
    faults = shim_faults(version, libdir=libdir, plugstack=plugstack, settings=settings)
    return [str(fault) for fault in faults]


def shim_faults(
    version: SlurmVersion, *, libdir: str, plugstack: str, settings: Settings | None = None
) -> list[Fault]:
    """As :func:`check_shim`, with the commands apart from what is wrong."""
    found = _Shim(version, libdir, plugstack, daemon_directories(settings or Settings()))
    return [*found.of_build(), *found.of_conf(), *found.of_spools()]


class _Shim:
    """The SPANK plugin of a node: its build, the lines that load it, and its spool."""

    def __init__(
        self, version: SlurmVersion, libdir: str, plugstack: str, taken: Mapping[str, str]
    ) -> None:
        self._version = version
        self._libdir = libdir
        self._plugstack = plugstack
        self._taken = taken
        self._conf = our_conf(plugstack)
        self._lines = shim_lines(plugstack)

    def of_build(self) -> Iterator[Fault]:
        libdir = "" if self._libdir == DEFAULT_LIBDIR else f" --libdir {self._libdir}"
        mend = (f"steward plugins build{libdir}", self._install())
        if find_built(self._libdir, self._version) is None:
            yield Fault(f"there is no build for Slurm {self._version} in {self._libdir}", mend)
            return
        for line in check_coming(self._version, libdir=self._libdir):
            yield Fault(line, mend)

    def of_conf(self) -> Iterator[Fault]:
        built = find_built(self._libdir, self._version)
        if built is None:
            return
        if not self._lines:
            yield Fault(f"{self._conf} is missing", (self._install(),))
            return
        for line in self._lines:
            mend = self._set(line)
            if line.keyword != "optional":
                what = f"{line.file} says {line.keyword!r}: only optional keeps a job from failing"
                yield Fault(what, mend)
            if not os.path.exists(line.library):
                named = line.library or "no file"
                yield Fault(f"{line.file} names {named}, which is not there", mend)
            elif not os.path.samefile(os.path.dirname(line.library), os.path.dirname(built.path)):
                yield Fault(f"{line.file} names {line.library}, not {built.path}", mend)
        if any(line.file == self._conf for line in self._lines):
            yield from self._of_include()

    def _of_include(self) -> Iterator[Fault]:
        if not includes(self._plugstack, self._conf):
            line = f"include {conf_directory(self._plugstack)}/*.conf"
            what = f"{self._plugstack} does not include {self._conf}"
            yield Fault(what, (f"{self._plugstack}: {line}",))

    def of_spools(self) -> Iterator[Fault]:
        looked_at: set[str] = set()
        for line in self._lines:
            if not line.spool:
                yield Fault(f"{line.file} names no spool: nothing is written", self._set(line))
                continue
            if not os.path.isabs(line.spool):
                what = f"{line.file} names spool={line.spool}, which is no absolute path: nothing "
                yield Fault(f"{what}is written", self._set(line))
                continue
            if line.spool in looked_at and line.file == self._conf:
                continue
            taken = taken_by(line.spool, self._taken)
            real = os.path.realpath(line.spool)
            if taken:
                yield Fault(
                    f"{line.file} names spool={line.spool}, which is {taken}: change the path in "
                    f"{line.file} to the SPANK plugin's own spool, which is root's alone",
                    self._set(line),
                )
            elif real != os.path.abspath(line.spool) or os.path.islink(real):
                what = (
                    f"{line.spool} is reached by a symbolic link: name {self._spool(line)} itself"
                )
                yield Fault(what, self._set(line))
            elif line.spool not in looked_at:
                yield from spool_faults(line.spool)
            looked_at.add(line.spool)

    def _set(self, line: ShimLine) -> tuple[str, ...]:
        """Return what sets all of a line right, whichever of its faults is told.

        It is our command, or words to type into the site's own file.
        """
        if line.file == self._conf:
            return (self._install(),)
        if any(other.file == self._conf for other in self._lines):
            return (f"{line.file}: remove the line that names {line.library}, {self._conf} has it",)
        built, library = find_built(self._libdir, self._version), line.library
        if built is not None:
            library = os.path.join(os.path.dirname(built.path), os.path.basename(library))
        spool = self._spool(line)
        words = f"{line.file}: optional {library} spool={spool}"
        return (words, f"install -d -o root -g root -m 0700 {spool}") if spool else (words,)

    def _spool(self, line: ShimLine) -> str:
        """Return the spool that a line should name: its own, if that can be one."""
        real = os.path.realpath(line.spool)
        is_place = real == os.path.abspath(line.spool) or os.path.isdir(real)
        is_usable = os.path.isabs(line.spool) and is_place and not os.path.islink(real)
        if is_usable and not taken_by(line.spool, self._taken):
            return real if real != os.path.abspath(line.spool) else line.spool
        return suggest_spool(self._taken)

    def _install(self) -> str:
        """Return the command that writes our file, with what it says now kept."""
        libraries = {os.path.basename(one.library) for one in self._lines}
        line = next((one for one in self._lines if one.spool), None)
        return install_command(
            plugstack=self._plugstack,
            libdir=self._libdir,
            spool=self._spool(line) if line else suggest_spool(self._taken),
            prolog=PROLOG_LIBRARY in libraries,
            # Without Slurm's commands in PATH nothing tells which Slurm is here.
            slurm="" if shutil.which("scontrol") else str(self._version),
        )


def install_command(
    *,
    plugstack: str,
    libdir: str = DEFAULT_LIBDIR,
    spool: str = DEFAULT_SPOOL,
    prolog: bool = False,
    slurm: str = "",
) -> str:
    """Return the command line that installs the SPANK plugin, with options that are no defaults."""
    words = ["steward plugins install"]
    if libdir != DEFAULT_LIBDIR:
        words.append(f"--libdir {libdir}")
    if plugstack != DEFAULT_PLUGSTACK:
        words.append(f"--plugstack {plugstack}")
    if spool != DEFAULT_SPOOL:
        words.append(f"--spool {spool}")
    if slurm:
        words.append(f"--slurm {slurm}")
    return " ".join([*words, "--prolog"] if prolog else words)
