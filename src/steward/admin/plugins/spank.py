"""Checks of the SPANK plugin ("shim"): spool, libraries, and the plugstack lines that load it.

They run before Slurm loads the plugin, because a wrong file is an error for every job. The spool is
the directory of the lines that the plugin writes and the agent sends. It must be root's alone:
slurmstepd and the agent use it as root, while the daemon's directories and that of job lines belong
to SlurmUser, so one directory cannot serve both. ``describe_spool_conflict``,
``require_usable_spool`` and ``find_spool_faults`` check it. ``check_library`` loads a library in
another process, which may crash without harm, and compares its version with Slurm's. ``check_shim``
and ``find_shim_faults`` check all of it on a node; ``install_command`` is the repair.
"""

import contextlib
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from steward.admin.plugins.build import (
    DEFAULT_LIBDIR,
    HOOKS,
    NODE_LIBRARIES,
    PROLOG_LIBRARY,
    SUBMIT_LIBRARY,
    SlurmVersion,
    find_build,
)
from steward.admin.plugins.errors import PluginFault, PluginInstallError
from steward.admin.plugins.installation import (
    DEFAULT_LINES_PATH,
    DEFAULT_SPOOL,
    get_conf_directory,
    get_own_conf,
    has_include,
    install_command,
    list_included,
    read_plugstack,
)
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.files import find_network_type

log = logging.getLogger(__name__)

_SPOOL_FILE: Final = re.compile(r".+\.(?:log(?:\.\d+)?|place|lock)")
"""Names of files that the plugin and the agent write to the spool."""

_AGENT_FILE: Final = re.compile(r".+\.(?:place|lock)")
"""Names of files that only the agent writes."""

SPOOL_OWNER: Final = "root:root"
SPOOL_MODE: Final = 0o700


def list_daemon_directories(settings: Settings) -> dict[str, str]:
    """Return the directories of the daemon and of jobcomp, each with its setting or purpose.

    Args:
        settings: The configuration. The result includes the default directories, too.
    """
    directories = {os.path.dirname(DEFAULT_LINES_PATH): "jobcomp's lines"}
    directories |= {Settings().state_dir: "the daemon's state", settings.state_dir: "state_dir"}
    directories[settings.run_dir] = "run_dir"
    for name in settings.files_sinks():
        directories[settings.sink_path(name)] = f"[archive.sink.{name}] path"
        if move_to := settings.files_sink(name).move_to:
            directories[move_to] = f"[archive.sink.{name}] move_to"
    for name, cluster in settings.cluster.items():
        directories |= _map_parent(f"[cluster.{name}] jobcomp_lines", cluster.jobcomp_lines)
        if cluster.spool:
            directories[cluster.spool] = f"[cluster.{name}] spool"
    return directories


def _map_parent(key: str, path: str) -> dict[str, str]:
    return {os.path.dirname(path): key} if path else {}


def describe_spool_conflict(spool: str, directories: Mapping[str, str]) -> str:
    """Return why a directory cannot be the spool, as words that follow "it is"; "" if it can.

    The directory must not be one of the daemon's or jobcomp's, nor above or below one. Unless it is
    root's alone, it must not contain files of other programs.

    Args:
        spool: The directory.
        directories: As :func:`list_daemon_directories` returns them.
    """
    return _describe_overlap(spool, directories) or _find_foreign_file(spool)


def _describe_overlap(spool: str, directories: Mapping[str, str]) -> str:
    """Describe how a directory overlaps with one of the daemon's; "" if it does not."""
    path = os.path.realpath(spool)
    for directory, key in directories.items():
        other_path = os.path.realpath(directory)
        if path == other_path:
            return f"the directory of {key}"
        if _is_below(path, other_path):
            return f"in {directory}, the directory of {key}"
        if _is_below(other_path, path):
            return f"a parent of {directory}, the directory of {key}"
    return ""


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def _find_foreign_file(spool: str) -> str:
    """Return a sign that other programs use a directory, as words that follow "it is"."""
    if os.path.abspath(spool) == DEFAULT_SPOOL and not os.path.islink(DEFAULT_SPOOL):
        return ""
    try:
        status = os.stat(spool)
        if (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, SPOOL_MODE):
            return ""
        names = os.listdir(spool)
    except OSError:
        return ""  # It does not exist, or only root can read it.
    # Other programs write logs too, but not beside the agent's .place files.
    has_agent_files = any(name.endswith((".place", ".lock")) for name in names)
    pattern = _SPOOL_FILE if has_agent_files or status.st_uid == 0 else _AGENT_FILE
    foreign_file = next((name for name in names if pattern.fullmatch(name) is None), "")
    return (
        f"a directory with {foreign_file}, which the plugin did not write" if foreign_file else ""
    )


def suggest_spool(directories: Mapping[str, str]) -> str:
    """Return a directory that can be the spool, the default if possible; "" if there is none.

    Args:
        directories: As :func:`list_daemon_directories` returns them.
    """
    alternative = "/var/lib/steward-shim"
    usable = (path for path in (DEFAULT_SPOOL, alternative) if not os.path.islink(path))
    return next((path for path in usable if not describe_spool_conflict(path, directories)), "")


def require_usable_spool(spool: str, directories: Mapping[str, str], current_spool: str) -> None:
    """Check that a directory can be the plugin's spool.

    Of existing directories only one that the plugin uses already, or one of root's alone, is
    accepted: the commands that close it to others would break programs that use it.

    Args:
        spool: The directory.
        directories: As :func:`list_daemon_directories` returns them.
        current_spool: Spool that plugstack.conf names; "" if it names none.

    Raises:
        UsageError: It cannot be the spool.
    """
    conflict = describe_spool_conflict(spool, directories)
    if not conflict and os.path.realpath(spool) not in (
        DEFAULT_SPOOL,
        os.path.realpath(current_spool or "/"),
    ):
        conflict = _describe_open_spool(spool)
    if conflict:
        raise UsageError(
            f"cannot use {spool} as the SPANK plugin's spool: it is {conflict}, and the spool "
            f"must belong to root alone: give --spool {suggest_spool(directories) or 'DIR'}",
            spool,
        )


def _describe_open_spool(spool: str) -> str:
    """Describe an existing directory that is not root's alone; "" for others."""
    try:
        status = os.stat(spool)
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode) or (status.st_uid, status.st_mode & 0o7777) == (
        0,
        SPOOL_MODE,
    ):
        return ""
    return f"a directory of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"


def require_outside_spool(lines_path: str, spool: str) -> None:
    """Check that jobcomp's lines do not go to the SPANK plugin's spool.

    Args:
        lines_path: The file of job lines.
        spool: Spool that plugstack.conf names; "" if it names none.

    Raises:
        UsageError: The file is in the spool, or in a directory above or below it.
    """
    for path in filter(None, (spool, DEFAULT_SPOOL)):
        if _describe_overlap(path, {os.path.dirname(lines_path): "jobcomp's lines"}):
            raise UsageError(
                f"cannot write job lines to {lines_path}: {path} is the SPANK plugin's spool, "
                "for root only, and SlurmUser writes job lines: give --lines "
                f"{DEFAULT_LINES_PATH}",
                lines_path,
            )


def find_spool_faults(spool: str) -> Iterator[PluginFault]:
    """Yield faults of a spool: lost lines, lines that the agent cannot read, access by others."""
    network_type = find_network_type(spool)
    if network_type:
        yield PluginFault(
            f"{spool} is on {network_type}, so the plugin writes nothing: choose a local disk"
        )
        return
    make_command = f"install -d -o root -g root -m 0700 {spool}"
    try:
        status = os.stat(spool)
    except OSError as error:
        yield PluginFault(f"{spool}: {error.strerror}: every line is lost", (make_command,))
        return
    if not stat.S_ISDIR(status.st_mode):
        move_command = f"mv -T --backup=numbered {spool} {spool}.old"
        yield PluginFault(
            f"{spool} is not a directory: every line is lost", (move_command, make_command)
        )
    elif os.path.realpath(spool) == os.path.abspath(spool):
        yield from _find_access_faults(spool, status)


def _find_access_faults(spool: str, status: os.stat_result) -> Iterator[PluginFault]:
    """Yield faults of owner and mode of a spool and its files."""
    close_command = f"chmod {SPOOL_MODE:04o} {spool}"
    chown_command = f"chown {SPOOL_OWNER} {spool}"
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    foreign_owners = {path: uid for path, uid in _list_owners(spool).items() if uid != 0}
    if foreign_owners:
        foreign_path, uid = next(iter(foreign_owners.items()))
        # In a closed directory only root and its owner wrote: the files came with the directory.
        if is_closed and set(foreign_owners.values()) == {uid} and status.st_uid in (0, uid):
            repairs = (f"chown -R {SPOOL_OWNER} {spool}", close_command)
        else:
            move_command = f"mv -T --backup=numbered {spool} {spool}.old"
            repairs = (move_command, f"install -d -o root -g root -m {SPOOL_MODE:04o} {spool}")
        yield PluginFault(
            f"{foreign_path} belongs to uid {uid}: the agent ignores its lines", repairs
        )
        return
    if status.st_uid != 0:
        problem = f"{spool} belongs to uid {status.st_uid}, who could change the lines"
        yield PluginFault(problem, (chown_command, close_command))
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        yield PluginFault(
            f"{spool} is closed to its owner: the agent cannot read it", (close_command,)
        )
    if status.st_mode & stat.S_IWOTH:
        yield PluginFault(
            f"{spool} is writable by everybody, so the plugin writes nothing", (close_command,)
        )
    elif status.st_mode & stat.S_IWGRP:
        yield PluginFault(
            f"{spool} is writable by its group, which could change the lines", (close_command,)
        )
    elif status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield PluginFault(f"{spool} is accessible to users other than root", (close_command,))


def _list_owners(spool: str) -> dict[str, int]:
    """Return the owners of a spool's files by path; nothing if only root can read it."""
    owners: dict[str, int] = {}
    try:
        for name in sorted(os.listdir(spool)):
            path = os.path.join(spool, name)
            # The agent deletes files that it has sent.
            with contextlib.suppress(FileNotFoundError):
                owners[path] = os.lstat(path).st_uid
    except PermissionError:
        log.debug("cannot check the files in %s: only root can read the directory", spool)
    return owners


_LOAD_TIMEOUT_S: Final = 30.0
"""Longest time to load a library in another process, in seconds."""
_INSPECT_PROGRAM: Final = """
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


class LibraryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Type, version and missing hooks of a plugin library.

    Attributes:
        type: plugin_type.
        version: plugin_version: SLURM_VERSION_NUMBER of the headers.
        missing: Hooks that it lacks.
    """

    type: str
    version: int
    missing: list[str]


def inspect_library(path: str) -> LibraryInfo:
    """Load a library in another process, and return its type and version.

    Raises:
        PluginInstallError: It cannot be loaded, or is not a plugin of Slurm's.
    """
    try:
        result = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _INSPECT_PROGRAM,
                path,
                *HOOKS.get(os.path.basename(path), ()),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise PluginInstallError(
            f"cannot load {path} within {_LOAD_TIMEOUT_S:g} s", path
        ) from error
    if result.returncode:
        message = result.stderr.strip().rpartition("\n")[2]
        reason = message.partition(": ")[2] or message or f"signal {-result.returncode}"
        raise PluginInstallError(f"cannot load {path}: {reason}", path)
    return msgspec.json.decode(result.stdout, type=LibraryInfo)


def check_library(path: str, version: SlurmVersion, *, is_exact: bool = False) -> list[str]:
    """Return the faults of one of Steward's libraries for a version of Slurm, a line each.

    Args:
        path: The library.
        version: Version of the Slurm that will load it.
        is_exact: Whether the patch level must match too, as slurmctld requires.
    """
    try:
        library_info = inspect_library(path)
    except PluginInstallError as error:
        return [str(error)]
    faults = []
    expected_type = "job_submit/steward" if os.path.basename(path) == SUBMIT_LIBRARY else "spank"
    if library_info.type != expected_type:
        faults.append(
            f"{path} is not a plugin of type {expected_type} but of {library_info.type!r}"
        )
    build_version = SlurmVersion.from_number(library_info.version)
    if not (build_version == version if is_exact else build_version.is_loadable_by(version)):
        faults.append(
            f"{path} was built for Slurm {build_version}, not for {version}: build it again"
        )
    if library_info.missing:
        faults.append(f"{path} lacks {', '.join(library_info.missing)}: build it again")
    return faults


def check_upgrade(version: SlurmVersion, *, libdir: str) -> list[str]:
    """Return the faults of the installed builds for another Slurm version, a line each."""
    build = find_build(libdir, version)
    if build is None:
        return [f"no build for Slurm {version} in {libdir}: run steward plugins build"]
    directory = os.path.dirname(build.path)
    return [
        fault
        for name in NODE_LIBRARIES
        for fault in check_library(os.path.join(directory, name), version)
    ]


class ShimLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of plugstack.conf that loads the SPANK plugin.

    Attributes:
        file: File of the line.
        keyword: First word: ``optional`` or ``required``.
        library: Path of the library.
        spool: Directory of the plugin's lines; "" if the line names none.
    """

    file: str
    keyword: str
    library: str
    spool: str


def read_shim_lines(plugstack: str) -> list[ShimLine]:
    """Read the lines that load the SPANK plugin, in our file, plugstack.conf and its includes.

    Args:
        plugstack: Slurm's PlugStackConfig.
    """
    own_conf = get_own_conf(plugstack)
    lines = [_parse_shim_line(own_conf, words) for words in read_plugstack(own_conf)]
    for path in list_included(plugstack):
        if os.path.realpath(path) == os.path.realpath(own_conf):
            continue
        shim_words = (words for words in read_plugstack(path) if len(words) > 1)
        lines += [
            _parse_shim_line(path, words) for words in shim_words if is_shim_library(words[1])
        ]
    return lines


def is_shim_library(library: str) -> bool:
    """Return whether a path names a library of the SPANK plugin."""
    return os.path.basename(library) in NODE_LIBRARIES


def _parse_shim_line(file: str, words: list[str]) -> ShimLine:
    spools = [word.removeprefix("spool=") for word in words[2:] if word.startswith("spool=")]
    return ShimLine(
        file=file,
        keyword=words[0],
        library=words[1] if len(words) > 1 else "",
        spool=spools[-1] if spools else "",
    )


def find_spool(plugstack: str) -> str:
    """Return the spool that plugstack.conf names; "" for none."""
    return next((line.spool for line in read_shim_lines(plugstack) if line.spool), "")


def check_shim(
    version: SlurmVersion, *, libdir: str, plugstack: str, settings: Settings | None = None
) -> list[str]:
    """Return what keeps this node from reporting its jobs, with the repair, a line each.

    Args:
        version: Version of Slurm on this node.
        libdir: Directory of all builds.
        plugstack: Slurm's PlugStackConfig.
        settings: This host's configuration, whose directories are no spool; the defaults if None.
    """
    faults = find_shim_faults(version, libdir=libdir, plugstack=plugstack, settings=settings)
    return [str(fault) for fault in faults]


def find_shim_faults(
    version: SlurmVersion, *, libdir: str, plugstack: str, settings: Settings | None = None
) -> list[PluginFault]:
    """Return the faults of :func:`check_shim`, with their repairs as separate commands."""
    checks = _ShimChecks(
        version, libdir, plugstack, list_daemon_directories(settings or Settings())
    )
    return [*checks.check_build(), *checks.check_conf(), *checks.check_spools()]


class _ShimChecks:
    """Checks of a node's SPANK plugin: its build, the lines that load it, and its spool."""

    def __init__(
        self, version: SlurmVersion, libdir: str, plugstack: str, directories: Mapping[str, str]
    ) -> None:
        self._version = version
        self._libdir = libdir
        self._plugstack = plugstack
        self._daemon_directories = directories
        self._own_conf = get_own_conf(plugstack)
        self._shim_lines = read_shim_lines(plugstack)

    def check_build(self) -> Iterator[PluginFault]:
        """Yield faults of the build for this Slurm."""
        libdir = "" if self._libdir == DEFAULT_LIBDIR else f" --libdir {self._libdir}"
        repairs = (f"steward plugins build{libdir}", self._install_command())
        if find_build(self._libdir, self._version) is None:
            yield PluginFault(f"no build for Slurm {self._version} in {self._libdir}", repairs)
            return
        for fault in check_upgrade(self._version, libdir=self._libdir):
            yield PluginFault(fault, repairs)

    def check_conf(self) -> Iterator[PluginFault]:
        """Yield faults of the lines that load the plugin."""
        build = find_build(self._libdir, self._version)
        if build is None:
            return
        if not self._shim_lines:
            yield PluginFault(f"{self._own_conf} is missing", (self._install_command(),))
            return
        for line in self._shim_lines:
            repairs = self._suggest_repair(line)
            if line.keyword != "optional":
                problem = (
                    f"{line.file} has {line.keyword!r}: use 'optional', which keeps jobs from "
                    "failing"
                )
                yield PluginFault(problem, repairs)
            if not os.path.exists(line.library):
                library = line.library or "no file"
                yield PluginFault(f"{line.file} names {library}, which does not exist", repairs)
            elif not os.path.samefile(os.path.dirname(line.library), os.path.dirname(build.path)):
                yield PluginFault(f"{line.file} names {line.library}, not {build.path}", repairs)
        if any(line.file == self._own_conf for line in self._shim_lines):
            yield from self._check_include()

    def _check_include(self) -> Iterator[PluginFault]:
        if not has_include(self._plugstack, self._own_conf):
            line = f"include {get_conf_directory(self._plugstack)}/*.conf"
            problem = f"{self._plugstack} does not include {self._own_conf}"
            yield PluginFault(problem, (f"{self._plugstack}: {line}",))

    def check_spools(self) -> Iterator[PluginFault]:
        """Yield faults of the spools that the lines name."""
        checked_spools: set[str] = set()
        for line in self._shim_lines:
            if not line.spool:
                yield PluginFault(
                    f"{line.file} names no spool, so the plugin writes nothing",
                    self._suggest_repair(line),
                )
                continue
            if not os.path.isabs(line.spool):
                yield PluginFault(
                    f"{line.file} names spool={line.spool}, which is not an absolute path, so the "
                    "plugin writes nothing",
                    self._suggest_repair(line),
                )
                continue
            if line.spool in checked_spools and line.file == self._own_conf:
                continue
            conflict = describe_spool_conflict(line.spool, self._daemon_directories)
            real_path = os.path.realpath(line.spool)
            if conflict:
                yield PluginFault(
                    f"{line.file} names spool={line.spool}, which is {conflict}: in "
                    f"{line.file}, name the SPANK plugin's own spool, which belongs to root "
                    "alone",
                    self._suggest_repair(line),
                )
            elif real_path != os.path.abspath(line.spool) or os.path.islink(real_path):
                problem = (
                    f"{line.spool} is a symbolic link or below one: name "
                    f"{self._suggest_spool(line)} itself"
                )
                yield PluginFault(problem, self._suggest_repair(line))
            elif line.spool not in checked_spools:
                yield from find_spool_faults(line.spool)
            checked_spools.add(line.spool)

    def _suggest_repair(self, line: ShimLine) -> tuple[str, ...]:
        """Return the repair of a line, which is the same for each of its faults.

        It is our install command, or words to type into the site's own file.
        """
        if line.file == self._own_conf:
            return (self._install_command(),)
        if any(other_line.file == self._own_conf for other_line in self._shim_lines):
            return (
                f"{line.file}: remove the line that names {line.library}, {self._own_conf} has it",
            )
        build, library = find_build(self._libdir, self._version), line.library
        if build is not None:
            library = os.path.join(os.path.dirname(build.path), os.path.basename(library))
        spool = self._suggest_spool(line)
        edit_step = f"{line.file}: optional {library} spool={spool}"
        return (edit_step, f"install -d -o root -g root -m 0700 {spool}") if spool else (edit_step,)

    def _suggest_spool(self, line: ShimLine) -> str:
        """Return the spool that a line should name: its own, if that can be one."""
        real_path = os.path.realpath(line.spool)
        is_direct = real_path == os.path.abspath(line.spool) or os.path.isdir(real_path)
        is_usable = os.path.isabs(line.spool) and is_direct and not os.path.islink(real_path)
        if is_usable and not describe_spool_conflict(line.spool, self._daemon_directories):
            return real_path if real_path != os.path.abspath(line.spool) else line.spool
        return suggest_spool(self._daemon_directories)

    def _install_command(self) -> str:
        """Return the command that writes our file again with its present values."""
        libraries = {os.path.basename(candidate.library) for candidate in self._shim_lines}
        line_with_spool = next(
            (candidate for candidate in self._shim_lines if candidate.spool), None
        )
        return install_command(
            plugstack=self._plugstack,
            libdir=self._libdir,
            spool=self._suggest_spool(line_with_spool)
            if line_with_spool
            else suggest_spool(self._daemon_directories),
            with_prolog=PROLOG_LIBRARY in libraries,
            # Without Slurm's commands in PATH the command cannot find the version itself.
            slurm_version="" if shutil.which("scontrol") else str(self._version),
        )
