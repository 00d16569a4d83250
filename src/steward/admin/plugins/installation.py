"""Plugin installation: the SPANK plugin and jobcomp.lua, and the lines that make Slurm load them.

``install_shim`` installs the SPANK plugin on a node, ``install_jobcomp`` the job completion
script on slurmctld's host. Neither changes a file of the site: they write files of their own,
atomically, and return the lines that the administrator has to add (:class:`InstallResult`).
``has_include``, ``list_included`` and ``read_plugstack`` parse plugstack.conf. The other functions
check paths and write files for the installation of all plugins; ``install_command`` is the command
that the checks suggest.
"""

import fnmatch
import glob
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from steward.admin.plugins.build import (
    DEFAULT_LIBDIR,
    LIBRARY,
    PROLOG_LIBRARY,
    PluginBuild,
    read_source,
)
from steward.admin.plugins.errors import PluginInstallError
from steward.core import files
from steward.core.files import find_network_type, replace_file

OWN_CONF_FILENAME: Final = "steward.conf"
"""Our own file in plugstack.conf.d."""
JOBCOMP_SCRIPT: Final = "jobcomp.lua"
DEFAULT_PLUGSTACK: Final = "/etc/slurm/plugstack.conf"
FETCHED_PLUGSTACK: Final = "/run/slurm/conf/plugstack.conf"
"""Path at which a slurmd without its own configuration keeps slurmctld's."""
DEFAULT_SPOOL: Final = "/var/spool/steward-shim"
"""Default directory of the SPANK plugin's lines."""
DEFAULT_LINES_PATH: Final = "/var/spool/steward/jobcomp.jsonl"
"""Default file of ended jobs that slurmctld appends to."""
OWN_FILE_MARK: Final = "Written by steward plugins install"
"""Text in the first line of each file that Steward writes, which identifies it."""

# Other characters would need quotes in plugstack.conf, or end a Lua string.
_PLAIN_PATH: Final = re.compile(r"/[A-Za-z0-9._/+@:%=,-]*")


class InstallResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an installation.

    Attributes:
        written_paths: Files and directories that it created or replaced.
        remaining: Steps left to the administrator, one sentence each.
    """

    written_paths: tuple[str, ...]
    remaining: tuple[str, ...] = ()


def get_conf_directory(plugstack: str) -> str:
    """Return the directory for our own files beside plugstack.conf."""
    return f"{plugstack}.d"


def get_own_conf(plugstack: str) -> str:
    """Return the path of our own file beside plugstack.conf."""
    return os.path.join(get_conf_directory(plugstack), OWN_CONF_FILENAME)


def install_shim(
    build: PluginBuild, *, libdir: str, plugstack: str, spool: str, with_prolog: bool = False
) -> InstallResult:
    """Install the SPANK plugin on this node, and have slurmstepd load it.

    Args:
        build: Build for this node's Slurm; copied if it is elsewhere.
        libdir: Directory of all builds on this node.
        plugstack: Slurm's PlugStackConfig; it is read, not changed.
        spool: Directory of the plugin's lines; created with mode 0700 if missing.
        with_prolog: Whether to report Prolog and Epilog too, which costs two processes a job.

    Raises:
        PluginInstallError: The spool is not local, or something cannot be written.
    """
    directory = os.path.join(os.path.abspath(libdir), str(build.version))
    libraries = (LIBRARY, PROLOG_LIBRARY) if with_prolog else (LIBRARY,)
    for path in (directory, plugstack, spool):
        require_plain_path(path)
    _require_local(spool)
    own_conf = get_own_conf(plugstack)
    conf_lines = "".join(f"optional {directory}/{library} spool={spool}\n" for library in libraries)
    header = (
        f"# {OWN_FILE_MARK}, for Slurm {build.version}.\n"
        "# On compute nodes only: sbatch, srun and salloc also load the plugins of this file.\n"
    )
    try:
        make_directory(spool, 0o700)
        make_directory(os.path.dirname(own_conf), 0o755)
        # Libraries first: a line that names a missing one is an error for every job.
        _copy_libraries(os.path.dirname(build.path), directory)
        replace_if_changed(own_conf, (header + conf_lines).encode(), 0o644)
    except (OSError, shutil.Error) as error:
        raise PluginInstallError(describe_error(error, directory), directory) from error
    remaining: tuple[str, ...] = ()
    if not has_include(plugstack, own_conf):
        remaining = (f"add to {plugstack}: include {get_conf_directory(plugstack)}/*.conf",)
    if with_prolog:
        remaining = (
            *remaining,
            "restart slurmd, which loads the Prolog and Epilog hooks at its start",
        )
    written = tuple(f"{directory}/{library}" for library in libraries)
    return InstallResult(written_paths=(*written, own_conf, spool), remaining=remaining)


def _copy_libraries(source_directory: str, directory: str) -> None:
    make_directory(directory, 0o755)
    if os.path.samefile(source_directory, directory):
        return
    for library in (LIBRARY, PROLOG_LIBRARY):
        with open(os.path.join(source_directory, library), "rb") as file:
            replace_if_changed(os.path.join(directory, library), file.read(), 0o755)


def has_include(plugstack: str, conf: str) -> bool:
    """Return whether plugstack.conf includes a file, by pattern or by name.

    On a node without its own plugstack.conf, the one that slurmd fetched from slurmctld counts.
    """
    return any(_is_match(pattern, conf) for pattern in _list_patterns(_find_plugstack(plugstack)))


def list_included(plugstack: str) -> list[str]:
    """Return plugstack.conf, and the files that it includes, in their order."""
    paths, pending_paths = list[str](), [_find_plugstack(plugstack)]
    while pending_paths:
        path = pending_paths.pop(0)
        if path not in paths:
            paths.append(path)
            included_paths = [
                file for pattern in _list_patterns(path) for file in sorted(glob.glob(pattern))
            ]
            pending_paths = [*included_paths, *pending_paths]
    return paths


def _find_plugstack(plugstack: str) -> str:
    if plugstack == DEFAULT_PLUGSTACK and not os.path.exists(plugstack):
        return FETCHED_PLUGSTACK
    return plugstack


def _list_patterns(plugstack: str) -> Iterator[str]:
    for words in read_plugstack(plugstack):
        if words[0] == "include" and len(words) == 2:
            yield os.path.join(os.path.dirname(plugstack), words[1])


def _is_match(pattern: str, conf: str) -> bool:
    """Return whether a pattern matches a file, existing or not, by any name of its directory."""
    directory, name = os.path.split(conf)
    if not fnmatch.fnmatchcase(name, os.path.basename(pattern)):
        return False
    pattern_directory = os.path.dirname(pattern)
    return pattern_directory == directory or any(
        _is_same(candidate, directory) for candidate in glob.glob(pattern_directory)
    )


def _is_same(path: str, other_path: str) -> bool:
    try:
        return os.path.samefile(path, other_path)
    except OSError:
        return False


def read_plugstack(path: str) -> list[list[str]]:
    """Return the words of each line of a plugstack file; none if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError:
        return []
    return [words for words in lines if words]


def install_jobcomp(directory: str, *, libdir: str, lines_path: str) -> InstallResult:
    """Install jobcomp.lua: slurmctld then reports each job that ends (JobCompType=jobcomp/lua).

    Args:
        directory: Directory of slurm.conf: slurmctld looks for jobcomp.lua beside it.
        libdir: Directory of our script; the one beside slurm.conf only calls it.
        lines_path: File that slurmctld appends to; its directory must be SlurmUser's.

    Raises:
        PluginInstallError: The site has a jobcomp.lua of its own, the directory of the lines is
            open to everybody, or something cannot be written.
    """
    own_script = os.path.join(os.path.abspath(libdir), JOBCOMP_SCRIPT)
    site_script = os.path.join(directory, JOBCOMP_SCRIPT)
    for path in (own_script, site_script, lines_path):
        require_plain_path(path)
    _require_local(os.path.dirname(lines_path))
    if os.path.isdir(os.path.dirname(lines_path)) and is_world_accessible(
        os.path.dirname(lines_path)
    ):
        lines_dir = os.path.dirname(lines_path)
        problem = describe_open_directory(lines_dir)
        raise PluginInstallError(f"{problem}: run 'chmod o= {lines_dir}'", lines_dir)
    script_text = (
        f'-- {OWN_FILE_MARK}.\nsteward_jobcomp_file = "{lines_path}"\n'
        f'return dofile("{own_script}")\n'
    )
    try:
        make_directory(os.path.dirname(own_script), 0o755)
        replace_if_changed(own_script, read_source(JOBCOMP_SCRIPT).encode(), 0o644)
        if os.path.exists(site_script) and not is_own_file(site_script):
            raise PluginInstallError(
                f"{site_script} is the site's own: add steward_jobcomp_file = "
                f'"{lines_path}" and local steward = dofile("{own_script}"), and call '
                "steward.log_record(job) in slurm_jobcomp_log_record(job)",
                site_script,
            )
        replace_if_changed(
            site_script, script_text.encode(), 0o644, trusted_uids=find_conf_owner(directory)
        )
    except OSError as error:
        raise PluginInstallError(describe_error(error, site_script), site_script) from error
    steps = [f'set in [cluster.NAME] of Steward\'s configuration: jobcomp_lines = "{lines_path}"']
    if not os.path.isdir(os.path.dirname(lines_path)):
        steps.insert(0, f"create {os.path.dirname(lines_path)}, mode 0750, writable by SlurmUser")
    steps.append("set in slurm.conf: JobCompType=jobcomp/lua, and restart slurmctld")
    return InstallResult(written_paths=(own_script, site_script), remaining=tuple(steps))


def is_world_accessible(directory: str) -> bool:
    """Return whether others than a directory's owner and group may enter or list it."""
    return bool(os.stat(directory).st_mode & stat.S_IRWXO)


def describe_open_directory(directory: str) -> str:
    """Return the error text for a directory of job lines that is open to everybody."""
    return (
        f"{directory} is readable by everybody, but its files contain job names and paths of "
        "all users"
    )


def is_own_file(path: str) -> bool:
    """Return whether Steward wrote a file, by the mark in its first line."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return OWN_FILE_MARK in file.readline()
    except OSError:
        return False


def require_plain_path(path: str) -> None:
    """Check that a path needs no quotes in a file of Slurm's.

    Raises:
        PluginInstallError: It would need quotes, or is not absolute.
    """
    if not _PLAIN_PATH.fullmatch(path):
        raise PluginInstallError(
            f"Slurm's configuration cannot contain the path {path!r}: use an absolute path of "
            "plain characters",
            path,
        )


def _require_local(directory: str) -> None:
    network_type = find_network_type(directory)
    if network_type:
        raise PluginInstallError(
            f"{directory} is on {network_type}, which could block Slurm: choose a local disk "
            "or a tmpfs",
            directory,
        )


def replace_if_changed(
    path: str, data: bytes, mode: int, *, trusted_uids: Collection[int] = ()
) -> None:
    """Replace a file atomically, unless it is unchanged.

    An unchanged file keeps its modification time: the check of jobcomp.lua asks for a restart of
    slurmctld if the file is newer than the process.
    """
    if _has_content(path, data, mode):
        return
    with replace_file(path, mode, trusted=trusted_uids) as file:
        file.write(data)


def _has_content(path: str, data: bytes, mode: int) -> bool:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return stat.S_IMODE(status.st_mode) == mode and file.read(len(data) + 1) == data
    except OSError:
        return False


def find_conf_owner(directory: str) -> frozenset[int]:
    """Return the owner of the slurm.conf in a directory, which may be SlurmUser."""
    try:
        return frozenset({os.stat(os.path.join(directory, "slurm.conf")).st_uid})
    except OSError:
        return frozenset()


def make_directory(path: str, mode: int) -> None:
    """Create a directory and its missing parents.

    Raises:
        OSError: It cannot be made, or root would follow a link.
    """
    os.close(files.open_directory(path, create_mode=mode, checks=False))


def describe_error(error: Exception, path: str) -> str:
    """Describe an operating system error, with its path."""
    failed_path = getattr(error, "filename", None) or path
    return f"{failed_path}: {getattr(error, 'strerror', None) or error}"


def install_command(
    *,
    plugstack: str,
    libdir: str = DEFAULT_LIBDIR,
    spool: str = DEFAULT_SPOOL,
    with_prolog: bool = False,
    slurm_version: str = "",
) -> str:
    """Return the command line that installs the SPANK plugin, with options that are no defaults."""
    options = ["steward plugins install"]
    if libdir != DEFAULT_LIBDIR:
        options.append(f"--libdir {libdir}")
    if plugstack != DEFAULT_PLUGSTACK:
        options.append(f"--plugstack {plugstack}")
    if spool != DEFAULT_SPOOL:
        options.append(f"--spool {spool}")
    if slurm_version:
        options.append(f"--slurm {slurm_version}")
    return " ".join([*options, "--prolog"] if with_prolog else options)
