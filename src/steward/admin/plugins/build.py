"""Compilation of the C plugins that Slurm loads, against the headers of one Slurm version.

A SPANK plugin works with one major.minor version of Slurm, slurmctld's submit plugin with
exactly one patch level, and during an upgrade of a cluster two versions run. So builds lie
side by side in directories named by version, ``LIBDIR/22.05.8/spank_steward.so``, and none
replaces another's. ``build_plugins`` makes a build; ``find_build`` finds the one for a version.
``HOOKS`` and ``SOURCES`` list each library's exported symbols and source files.

A separate library reports Prolog and Epilog, because for a plugin with these hooks slurmd starts
one more process before and one after each job.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Final

import msgspec

from steward.admin.plugins.errors import (
    BuildFailed,
    HeadersMissing,
    InvalidVersion,
    PluginInstallError,
)
from steward.core.files import open_directory, replace_file

LIBRARY: Final = "spank_steward.so"
"""SPANK plugin that reports steps and tasks."""
PROLOG_LIBRARY: Final = "spank_steward_prolog.so"
"""SPANK plugin that reports Prolog and Epilog."""
SUBMIT_LIBRARY: Final = "job_submit_steward.so"
"""Submit plugin of slurmctld."""
HOOKS: Final = {
    LIBRARY: (
        *("slurm_spank_init", "slurm_spank_task_post_fork"),
        *("slurm_spank_task_exit", "slurm_spank_exit"),
    ),
    PROLOG_LIBRARY: ("slurm_spank_job_prolog", "slurm_spank_job_epilog"),
    SUBMIT_LIBRARY: ("init", "fini", "job_submit", "job_modify"),
}
"""Symbols that each library exports to Slurm; both SPANK libraries have the same sources."""
NODE_LIBRARIES: Final = (LIBRARY, PROLOG_LIBRARY)
"""Libraries for compute nodes."""
DEFAULT_LIBDIR: Final = "/usr/local/lib/steward"
"""Default directory of all builds."""
HEADER_DIRECTORIES: Final = ("/usr/include", "/usr/local/include", "/opt/slurm/include")
"""Default directories to search for headers."""

_SPANK_SOURCES: Final = (
    *("spank_steward.c", "shim_line.c", "shim_step.c", "facts.c", "mounts.c", "utf8.c"),
)
SOURCES: Final = {
    LIBRARY: _SPANK_SOURCES,
    PROLOG_LIBRARY: _SPANK_SOURCES,
    SUBMIT_LIBRARY: ("job_submit_steward.c", "gate_ask.c", "gate_conf.c", "gate_wire.c", "utf8.c"),
}
"""Sources of each library."""
_HEADERS: Final = ("facts.h", "gate.h", "mounts.h", "shim.h", "utf8.h")
COMPILER_FLAGS: Final = (
    *("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"),
    *("-Wl,-z,relro", "-Wl,-z,now"),
)
_PLUGIN_SYMBOLS: Final = ("plugin_name", "plugin_type", "plugin_version")
_SPANK_SYMBOLS: Final = ("spank_plugin_version",)
_TIMEOUT_S: Final = 120.0
"""Longest run of the compiler, in seconds."""
_VERSION_NUMBER_PATTERN: Final = re.compile(r"#define\s+SLURM_VERSION_NUMBER\s+0x([0-9a-fA-F]+)")
_JOB_DESCRIPTOR_PATTERN: Final = re.compile(
    r"struct job_descriptor\s*{.*?}\s*job_desc_msg_t;", re.DOTALL
)
_VERSION_PATTERN: Final = re.compile(r"(\d{2})\.(\d{2})(?:\.(\d{1,3}))?")


class SlurmVersion(msgspec.Struct, frozen=True, order=True):
    """Version of Slurm; ``str()`` writes it as Slurm does: 22.05.8.

    Attributes:
        major: The year.
        minor: The month.
        micro: Patch level; -1 if not given.
    """

    major: int
    minor: int
    micro: int = -1

    def __str__(self) -> str:
        """Return the version as Slurm writes it, without a missing patch level."""
        series = f"{self.major}.{self.minor:02d}"
        return series if self.micro < 0 else f"{series}.{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "SlurmVersion":
        """Parse a version as people type it: 24.11 or 24.11.5.

        Raises:
            InvalidVersion: It is not a version of Slurm.
        """
        match = _VERSION_PATTERN.fullmatch(text)
        if not match:
            raise InvalidVersion(f"invalid Slurm version {text!r}: write 24.11 or 24.11.5", text)
        return cls(int(match[1]), int(match[2]), int(match[3] or -1))

    @classmethod
    def from_number(cls, number: int) -> "SlurmVersion":
        """Convert SLURM_VERSION_NUMBER to a version."""
        return cls(number >> 16 & 0xFF, number >> 8 & 0xFF, number & 0xFF)

    def is_loadable_by(self, slurm_version: "SlurmVersion") -> bool:
        """Return whether Slurm of that version loads a SPANK plugin built for this one."""
        return (self.major, self.minor) == (slurm_version.major, slurm_version.minor)


class PluginBuild(msgspec.Struct, frozen=True, kw_only=True):
    """A build of the plugins for one Slurm version.

    Attributes:
        path: Path of the SPANK library; the other libraries are in the same directory.
        version: Slurm version of the build.
    """

    path: str
    version: SlurmVersion


def read_header_version(directory: str) -> SlurmVersion:
    """Return the version of the Slurm headers in ``directory``/slurm.

    Raises:
        HeadersMissing: There are none.
    """
    path = os.path.join(directory, "slurm", "slurm_version.h")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = _VERSION_NUMBER_PATTERN.search(file.read())
    except OSError as error:
        raise HeadersMissing(
            f"no Slurm headers in {directory} ({path}: {error.strerror}): install Slurm's "
            "development package (libslurm-dev, slurm-devel), or give --headers DIR",
            directory,
        ) from error
    if not match:
        raise HeadersMissing(f"{path} does not define SLURM_VERSION_NUMBER", directory)
    return SlurmVersion.from_number(int(match[1], 16))


def list_header_flags(headers: str) -> tuple[str, ...]:
    """Return compiler flags for header differences that no version number shows.

    Raises:
        HeadersMissing: They cannot be read.
    """
    path = os.path.join(headers, "slurm", "slurm.h")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = _JOB_DESCRIPTOR_PATTERN.search(file.read())
    except OSError as error:
        raise HeadersMissing(f"{path}: {error.strerror}", headers) from error
    # Later versions have the job id in a struct within the job description.
    return ("-DSTEWARD_STEP_ID",) if match and "step_id;" in match[0] else ()


def find_headers() -> str:
    """Return the first default directory that contains Slurm's headers.

    Raises:
        HeadersMissing: None has.
    """
    for directory in HEADER_DIRECTORIES:
        if os.path.exists(os.path.join(directory, "slurm", "spank.h")):
            return directory
    raise HeadersMissing(
        f"no Slurm headers in {', '.join(HEADER_DIRECTORIES)}: install Slurm's development "
        "package (libslurm-dev, slurm-devel), or give --headers DIR",
        HEADER_DIRECTORIES,
    )


def build_plugins(headers: str, libdir: str, *, compiler: str = "") -> PluginBuild:
    """Compile the plugins into ``libdir``/VERSION.

    An existing build of the same version is replaced atomically; daemons that have loaded it
    keep the old one.

    Args:
        headers: Directory with slurm/spank.h.
        libdir: Directory of all builds; created if missing.
        compiler: The C compiler; CC of the environment, or ``cc``, if empty.

    Raises:
        HeadersMissing: There are no headers.
        BuildFailed: There is no compiler, or it rejected the sources.
        PluginInstallError: The directory cannot be written.
    """
    version = read_header_version(headers)
    directory = os.path.join(os.path.abspath(libdir), str(version))
    library_path = os.path.join(directory, LIBRARY)
    try:
        os.close(open_directory(directory, create_mode=0o755))
        with tempfile.TemporaryDirectory(prefix="steward-build-") as build_dir:
            _write_sources(build_dir)
            command = [
                compiler or os.environ.get("CC") or "cc",
                *COMPILER_FLAGS,
                *list_header_flags(headers),
            ]
            command.append(f"-I{headers}")
            with ThreadPoolExecutor() as pool:
                # Each thread waits for a compiler process.
                list(pool.map(lambda library: _compile_library(command, build_dir, library), HOOKS))
            for library in HOOKS:
                with (
                    open(os.path.join(build_dir, library), "rb") as source,
                    replace_file(os.path.join(directory, library), 0o755) as file,
                ):
                    shutil.copyfileobj(source, file)
    except OSError as error:
        raise PluginInstallError(
            f"{error.filename or directory}: {error.strerror}", directory
        ) from error
    return PluginBuild(path=library_path, version=version)


def find_build(libdir: str, version: SlurmVersion, library: str = LIBRARY) -> PluginBuild | None:
    """Find the build for a version: of the same patch level, or else the latest compatible one.

    Args:
        libdir: Directory of all builds.
        version: Version of the Slurm that will load it.
        library: Library that must exist; slurmctld loads none of another patch level.
    """
    builds = []
    try:
        names = os.listdir(libdir)
    except OSError:
        names = []
    for name in names:
        directory = os.path.join(os.path.abspath(libdir), name)
        if _VERSION_PATTERN.fullmatch(name) and os.path.exists(os.path.join(directory, library)):
            path = os.path.join(directory, LIBRARY)
            build = PluginBuild(path=path, version=SlurmVersion.parse(name))
            if build.version.is_loadable_by(version) and (
                library in NODE_LIBRARIES or build.version == version
            ):
                builds.append(build)
    return max(builds, key=lambda build: (build.version == version, build.version), default=None)


def build_version_script(library: str) -> str:
    """Return the linker's version script of a library, which exports only Slurm's symbols."""
    extra_names = _SPANK_SYMBOLS if library in NODE_LIBRARIES else ()
    names = "; ".join((*_PLUGIN_SYMBOLS, *extra_names, *HOOKS[library]))
    return f"{{ global: {names}; local: *; }};\n"


def list_sources() -> tuple[str, ...]:
    """Return the names of all source and header files."""
    return tuple(sorted({*_HEADERS, *(source for names in SOURCES.values() for source in names)}))


def read_source(name: str) -> str:
    """Read a source file from the package ``steward.native``."""
    return resources.files("steward.native").joinpath(name).read_text(encoding="utf-8")


def _write_sources(build_dir: str) -> None:
    for name in list_sources():
        with open(os.path.join(build_dir, name), "w", encoding="utf-8") as file:
            file.write(read_source(name))


def _compile_library(command: Sequence[str], build_dir: str, library: str) -> None:
    """Compile one library, which exports only its hooks."""
    script_path = os.path.join(build_dir, f"{library}.map")
    with open(script_path, "w", encoding="utf-8") as file:
        file.write(build_version_script(library))
    sources = [os.path.join(build_dir, name) for name in SOURCES[library]]
    library_path = os.path.join(build_dir, library)
    _run_compiler([*command, f"-Wl,--version-script={script_path}", "-o", library_path, *sources])
    os.chmod(library_path, 0o755)  # noqa: S103 - a library is everybody's to load


def _run_compiler(command: Sequence[str]) -> None:
    """Run the compiler; report its first errors."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise BuildFailed(
            f"C compiler {command[0]} not found: install gcc, or set CC", command
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} did not end within {_TIMEOUT_S:g} s", command) from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        message = (
            "; ".join(lines[:3]) or result.stderr.strip()[-300:] or f"exit {result.returncode}"
        )
        raise BuildFailed(f"{command[0]} failed to compile the plugin: {message}", command)
