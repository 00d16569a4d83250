"""Compiles what Slurm loads against the headers of one Slurm, beside those of other versions.

A SPANK plugin serves one major.minor version of Slurm, the submit plugin of slurmctld just
one patch level, and while a cluster is upgraded two versions run. So builds lie in
directories named by the version, ``LIBDIR/22.05.8/spank_steward.so``, and none ever takes
another's place.

Prolog and Epilog are told of by a library of their own: for a plugin that has
hooks for these slurmd starts a process more before each job, and one after it.
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

from steward.admin.plugins.errors import BuildFailed, HeadersMissing, NativeError, NoVersion
from steward.core.files import open_directory, replacing

LIBRARY: Final = "spank_steward.so"
PROLOG_LIBRARY: Final = "spank_steward_prolog.so"
SUBMIT_LIBRARY: Final = "job_submit_steward.so"
HOOKS: Final = {
    LIBRARY: (
        *("slurm_spank_init", "slurm_spank_task_post_fork"),
        *("slurm_spank_task_exit", "slurm_spank_exit"),
    ),
    PROLOG_LIBRARY: ("slurm_spank_job_prolog", "slurm_spank_job_epilog"),
    SUBMIT_LIBRARY: ("init", "fini", "job_submit", "job_modify"),
}
"""What each library shows Slurm; those of SPANK are made of the same sources."""
SHIM: Final = (LIBRARY, PROLOG_LIBRARY)
"""The libraries of compute nodes."""
DEFAULT_LIBDIR: Final = "/usr/local/lib/steward"
HEADER_DIRECTORIES: Final = ("/usr/include", "/usr/local/include", "/opt/slurm/include")
"""Where headers are looked for if nobody says where they are."""

_OF_SPANK: Final = (
    *("spank_steward.c", "shim_line.c", "shim_step.c", "facts.c", "mounts.c", "utf8.c"),
)
SOURCES: Final = {
    LIBRARY: _OF_SPANK,
    PROLOG_LIBRARY: _OF_SPANK,
    SUBMIT_LIBRARY: ("job_submit_steward.c", "gate_ask.c", "gate_conf.c", "gate_wire.c", "utf8.c"),
}
"""What each library is compiled from."""
_HEADERS: Final = ("facts.h", "gate.h", "mounts.h", "shim.h", "utf8.h")
FLAGS: Final = (
    *("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"),
    *("-Wl,-z,relro", "-Wl,-z,now"),
)
_OF_EVERY_PLUGIN: Final = ("plugin_name", "plugin_type", "plugin_version")
_OF_SPANK_PLUGINS: Final = ("spank_plugin_version",)
_TIMEOUT_S: Final = 120.0
_NUMBER: Final = re.compile(r"#define\s+SLURM_VERSION_NUMBER\s+0x([0-9a-fA-F]+)")
_DESCRIPTION: Final = re.compile(r"struct job_descriptor\s*{.*?}\s*job_desc_msg_t;", re.DOTALL)
_LIKE_VERSION: Final = re.compile(r"(\d{2})\.(\d{2})(?:\.(\d{1,3}))?")


class SlurmVersion(msgspec.Struct, frozen=True, order=True):
    """A version of Slurm; ``str()`` writes it as Slurm does: 22.05.8.

    Attributes:
        major: The year.
        minor: The month.
        micro: The patch level; -1 where none was named.
    """

    major: int
    minor: int
    micro: int = -1

    def __str__(self) -> str:
        """As Slurm writes it, without the patch level where there is none."""
        series = f"{self.major}.{self.minor:02d}"
        return series if self.micro < 0 else f"{series}.{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "SlurmVersion":
        """A version as it is typed: 24.11 or 24.11.5.

        Raises:
            NoVersion: It is none.
        """
        found = _LIKE_VERSION.fullmatch(text)
        if not found:
            raise NoVersion(f"{text!r} is no version of Slurm: write 24.11 or 24.11.5", text)
        return cls(int(found[1]), int(found[2]), int(found[3] or -1))

    @classmethod
    def of_number(cls, number: int) -> "SlurmVersion":
        """The version that SLURM_VERSION_NUMBER stands for."""
        return cls(number >> 16 & 0xFF, number >> 8 & 0xFF, number & 0xFF)

    def serves(self, other: "SlurmVersion") -> bool:
        """Whether a SPANK plugin that was built for this one is loaded by the other."""
        return (self.major, self.minor) == (other.major, other.minor)


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What was built for one Slurm.

    Attributes:
        path: Of the library that tells of steps; the others are beside it.
        version: Of the Slurm that it was built for.
    """

    path: str
    version: SlurmVersion


def headers_of(directory: str) -> SlurmVersion:
    """The version of Slurm whose headers are in ``directory``/slurm.

    Raises:
        HeadersMissing: There are none.
    """
    path = os.path.join(directory, "slurm", "slurm_version.h")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _NUMBER.search(file.read())
    except OSError as error:
        raise HeadersMissing(
            f"Slurm's headers are not in {directory} ({path}: {error.strerror}): install Slurm's "
            "development package (libslurm-dev, slurm-devel), or say --headers DIR",
            directory,
        ) from error
    if not found:
        raise HeadersMissing(f"{path} names no SLURM_VERSION_NUMBER", directory)
    return SlurmVersion.of_number(int(found[1], 16))


def defines(headers: str) -> tuple[str, ...]:
    """What the compiler has to be told of the headers, which no number in them says.

    Raises:
        HeadersMissing: They cannot be read.
    """
    path = os.path.join(headers, "slurm", "slurm.h")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _DESCRIPTION.search(file.read())
    except OSError as error:
        raise HeadersMissing(f"{path}: {error.strerror}", headers) from error
    # Later versions have a job's number in a struct inside of its description.
    return ("-DSTEWARD_STEP_ID",) if found and "step_id;" in found[0] else ()


def find_headers() -> str:
    """The first of the usual directories that has Slurm's headers.

    Raises:
        HeadersMissing: None has.
    """
    for directory in HEADER_DIRECTORIES:
        if os.path.exists(os.path.join(directory, "slurm", "spank.h")):
            return directory
    raise HeadersMissing(
        f"Slurm's headers are in none of {', '.join(HEADER_DIRECTORIES)}: install Slurm's "
        "development package (libslurm-dev, slurm-devel), or say --headers DIR",
        HEADER_DIRECTORIES,
    )


def build_plugins(headers: str, libdir: str, *, compiler: str = "") -> Built:
    """Compile the plugins into ``libdir``/VERSION.

    What is there already for the same version is replaced in one step; daemons that have it
    loaded keep theirs.

    Args:
        headers: Directory with slurm/spank.h.
        libdir: Where builds lie side by side; made if missing.
        compiler: The C compiler; CC of the environment, or ``cc``, if empty.

    Raises:
        HeadersMissing: There are no headers.
        BuildFailed: There is no compiler, or it did not take the sources.
        NativeError: The directory cannot be written.
    """
    version = headers_of(headers)
    directory = os.path.join(os.path.abspath(libdir), str(version))
    target = os.path.join(directory, LIBRARY)
    try:
        os.close(open_directory(directory, make=0o755))
        with tempfile.TemporaryDirectory(prefix="steward-build-") as work:
            _write_sources(work)
            words = [compiler or os.environ.get("CC") or "cc", *FLAGS, *defines(headers)]
            words.append(f"-I{headers}")
            with ThreadPoolExecutor() as pool:
                # Each of them is a compiler's own process.
                list(pool.map(lambda library: _compile_library(words, work, library), HOOKS))
            for library in HOOKS:
                with (
                    open(os.path.join(work, library), "rb") as built,
                    replacing(os.path.join(directory, library), 0o755) as file,
                ):
                    shutil.copyfileobj(built, file)
    except OSError as error:
        raise NativeError(f"{error.filename or directory}: {error.strerror}", directory) from error
    return Built(path=target, version=version)


def find_built(libdir: str, version: SlurmVersion, library: str = LIBRARY) -> Built | None:
    """The build for a version: of the same patch level, or else the latest that serves it.

    Args:
        libdir: Where builds lie side by side.
        version: Of the Slurm that is to load it.
        library: Which one has to be there; slurmctld loads none of another patch level.
    """
    found = []
    try:
        names = os.listdir(libdir)
    except OSError:
        names = []
    for name in names:
        directory = os.path.join(os.path.abspath(libdir), name)
        if _LIKE_VERSION.fullmatch(name) and os.path.exists(os.path.join(directory, library)):
            path = os.path.join(directory, LIBRARY)
            built = Built(path=path, version=SlurmVersion.parse(name))
            if built.version.serves(version) and (library in SHIM or built.version == version):
                found.append(built)
    return max(found, key=lambda built: (built.version == version, built.version), default=None)


def version_script(library: str) -> str:
    """What the linker is told of a library's names: only what Slurm looks for is shown."""
    more = _OF_SPANK_PLUGINS if library in SHIM else ()
    names = "; ".join((*_OF_EVERY_PLUGIN, *more, *HOOKS[library]))
    return f"{{ global: {names}; local: *; }};\n"


def sources() -> tuple[str, ...]:
    """Names of all files that the libraries are compiled from."""
    return tuple(sorted({*_HEADERS, *(one for names in SOURCES.values() for one in names)}))


def source(name: str) -> str:
    """The text of a file that is carried beside this one."""
    return resources.files("steward.native").joinpath(name).read_text(encoding="utf-8")


def _write_sources(work: str) -> None:
    for name in sources():
        with open(os.path.join(work, name), "w", encoding="utf-8") as file:
            file.write(source(name))


def _compile_library(words: Sequence[str], work: str, library: str) -> None:
    """Compile one library, from which only its hooks can be called."""
    shown = os.path.join(work, f"{library}.map")
    with open(shown, "w", encoding="utf-8") as file:
        file.write(version_script(library))
    sources = [os.path.join(work, name) for name in SOURCES[library]]
    target = os.path.join(work, library)
    _compile([*words, f"-Wl,--version-script={shown}", "-o", target, *sources])
    os.chmod(target, 0o755)  # noqa: S103 - a library is everybody's to load


def _compile(words: Sequence[str]) -> None:
    try:
        result = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise BuildFailed(
            f"there is no C compiler {words[0]}: install gcc, or set CC", words
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{words[0]} took longer than {_TIMEOUT_S:g} s", words) from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        said = "; ".join(lines[:3]) or result.stderr.strip()[-300:] or f"exit {result.returncode}"
        raise BuildFailed(f"{words[0]} did not compile the plugin: {said}", words)
