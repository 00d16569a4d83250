"""Backup contents: which files of the state directory a backup holds, and in which order.

``select_files`` lists them, with the databases in the order of ``sort_databases``;
``list_named_files`` lists the files that the configuration names. Everything is included that
Steward does not rebuild itself, so that files of future parts of Steward are included too. The
gate's holds are excluded: the gate rebuilds them from the tokens of the jobs that Slurm shows, and
stored ones would be outdated.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.admin.backup.archive import BackupUnavailable
from steward.core.config import Settings
from steward.core.databases import DATABASES, find_database

PREVIOUS_STATE_PREFIX: Final = "before-restore-"
"""Prefix of the directory to which a restore moves the previous state."""
_TRANSIENT: Final = re.compile(
    r"daemon\.json|(poll|roles)-.*\.json|.*\.lock|.*-(wal|shm|journal)|.*\.json\.\d+"
    rf"|{PREVIOUS_STATE_PREFIX}.*|\.restoring.*"
)
_INCOMING: Final = "incoming"
_CATALOG: Final = "catalog"
_REBUILT: Final = {file.name.split("/")[0] for file in DATABASES if file.backup == "rebuildable"}
"""Databases and directories of databases that Steward rebuilds."""
_FILE_KEYS: Final = re.compile(r"(?!log_)(.*_)?file|directories")


class BackupFiles(msgspec.Struct, frozen=True):
    """Files of the state directory to back up, by their paths below it.

    Attributes:
        databases: SQLite databases, in the order of their read transactions.
        files: Other files.
        links: Symbolic links within the directory, with their targets.
    """

    databases: tuple[str, ...]
    files: tuple[str, ...]
    links: dict[str, str]


def select_files(settings: Settings, *, with_catalog: bool) -> BackupFiles:
    """Select the files of the state directory for a backup.

    Args:
        settings: The whole configuration.
        with_catalog: Whether to include the catalog, which can be rebuilt from the archive.

    Raises:
        BackupUnavailable: The directory cannot be read.
    """
    state_dir = os.path.abspath(settings.state_dir)
    excluded_paths = {_INCOMING, *_REBUILT} - ({_CATALOG} if with_catalog else set())
    sink_dirs = {os.path.abspath(settings.sink_path(name)) for name in settings.files_sinks()}
    databases: list[str] = []
    files: list[str] = []
    links: dict[str, str] = {}
    for path, entry in _walk_files(state_dir, excluded_paths, sink_dirs):
        if entry.is_symlink():
            target = os.readlink(entry.path)
            if os.path.dirname(target) == "":
                links[path] = target
        elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            (databases if path.endswith(".db") else files).append(path)
    return BackupFiles(tuple(sort_databases(databases)), tuple(sorted(files)), links)


def sort_databases(databases: Iterable[str]) -> list[str]:
    """Sort databases into the order of their read transactions.

    A consumer that is ahead of the source it was copied with would miss what comes next under
    the same numbers; one that is behind reads again, which is harmless. So each database
    comes before the one it has its numbers from: a generation's cursor before its months,
    rules, whose actions have outside effects, as late as possible, and the journal last.
    """

    def rank(path: str) -> tuple[int, str]:
        file = find_database(path)
        return (file.copy_order if file else 0, path)

    return sorted(databases, key=rank)


def list_named_files(settings: Settings) -> list[str]:
    """Return the files that a configuration names, and those in directories that it names."""
    paths: set[str] = set()
    for path in _find_named_paths(msgspec.to_builtins(settings)):
        if os.path.isfile(path):
            paths.add(path)
        elif os.path.isdir(path):
            with os.scandir(path) as entries:
                paths.update(entry.path for entry in entries if entry.is_file())
    return sorted(paths)


def _find_named_paths(value_tree: object) -> Iterator[str]:
    """Yield the absolute paths under keys that name files or directories."""
    if not isinstance(value_tree, dict):
        return
    for key, value in value_tree.items():
        if isinstance(value, dict):
            yield from _find_named_paths(value)
        elif _FILE_KEYS.fullmatch(str(key)):
            candidates = value if isinstance(value, list | tuple) else (value,)
            yield from (
                candidate
                for candidate in candidates
                if isinstance(candidate, str) and os.path.isabs(candidate)
            )


def _walk_files(
    state_dir: str, excluded_paths: set[str], sink_dirs: set[str], subdirectory: str = ""
) -> "Iterator[tuple[str, os.DirEntry[str]]]":
    """Yield files below the state directory, without transient and excluded ones."""
    try:
        with os.scandir(os.path.join(state_dir, subdirectory)) as entries:
            for entry in sorted(entries, key=lambda item: item.name):
                path = os.path.join(subdirectory, entry.name)
                if (
                    _TRANSIENT.fullmatch(entry.name)
                    or path in excluded_paths
                    or entry.path in sink_dirs
                ):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk_files(state_dir, excluded_paths, sink_dirs, path)
                else:
                    yield path, entry
    except FileNotFoundError:
        if not subdirectory:
            raise BackupUnavailable(
                f"state directory {state_dir} does not exist: check state_dir", state_dir
            ) from None
        return  # removed since its parent was listed
    except OSError as error:
        raise BackupUnavailable(
            f"cannot read {error.filename or state_dir}: {error.strerror}", state_dir
        ) from error
