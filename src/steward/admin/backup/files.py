"""Which files of the state directory a backup holds, and in which order they are looked at.

Everything is in it but what is made again by itself, so that a file which comes
with a later part of Steward is in it as well. The gate's holds are made again from
the tokens of the jobs that Slurm shows: kept, they would be those of another day.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.admin.backup.archive import BackupUnavailable
from steward.core.config import Settings

BEFORE: Final = "before-restore-"
"""What a restore moved out of its way."""
_TRANSIENT: Final = re.compile(
    r"gate\.db|daemon\.json|(look|standing)-.*\.json|.*\.lock|.*-(wal|shm|journal)|.*\.json\.\d+"
    rf"|{BEFORE}.*|\.restoring.*"
)
_INCOMING: Final = "incoming"
_FIRST: Final = ("ledger.db", "catalogue/")
_LAST: Final = ("rules.db", "journal.db")
_FILE_KEYS: Final = re.compile(r"(?!log_)(.*_)?file|directories")


class Chosen(msgspec.Struct, frozen=True):
    """Files of the state directory, by their paths below it.

    Attributes:
        databases: SQLite's, in the order in which they are to be looked at.
        files: Others.
        links: Symbolic links within it, and where they lead.
    """

    databases: tuple[str, ...]
    files: tuple[str, ...]
    links: dict[str, str]


def chosen(settings: Settings, *, catalogue: bool) -> Chosen:
    """What of the state directory is in a backup.

    Args:
        settings: The whole configuration.
        catalogue: Whether the catalogue is, which can be made anew from the archive.

    Raises:
        BackupUnavailable: The directory cannot be read.
    """
    root = os.path.abspath(settings.state_dir)
    passed = {_INCOMING} if catalogue else {_INCOMING, "catalogue"}
    trees = {os.path.abspath(settings.sink_path(name)) for name in settings.files_sinks()}
    databases: list[str] = []
    files: list[str] = []
    links: dict[str, str] = {}
    for path, entry in _walk(root, passed, trees):
        if entry.is_symlink():
            target = os.readlink(entry.path)
            if os.path.dirname(target) == "":
                links[path] = target
        elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            (databases if path.endswith(".db") else files).append(path)
    return Chosen(tuple(in_order(databases)), tuple(sorted(files)), links)


def in_order(databases: Iterable[str]) -> list[str]:
    """Databases in the order in which they are to be looked at.

    Whoever has seen more of somebody than that one has kept would miss what comes next under
    the same numbers, and whoever has seen less asks again, which is harmless. So each stands
    before what it has its numbers from: a generation's cursor before its months, rules,
    whose actions are seen outside, as late as may be, and the journal last.
    """

    def rank(path: str) -> tuple[int, int, str]:
        for number, name in enumerate(_LAST, 1):
            if path == name:
                return (number, 0, path)
        for number, name in enumerate(_FIRST, -len(_FIRST)):
            if path == name or path.startswith(name):
                return (number, int(not path.endswith("/cursor.db")), path)
        return (0, 0, path)

    return sorted(databases, key=rank)


def named_files(settings: Settings) -> list[str]:
    """The files that a configuration names, and those in directories that it names: theirs, too."""
    found: set[str] = set()
    for path in _named(msgspec.to_builtins(settings)):
        if os.path.isfile(path):
            found.add(path)
        elif os.path.isdir(path):
            with os.scandir(path) as entries:
                found.update(entry.path for entry in entries if entry.is_file())
    return sorted(found)


def _named(table: object) -> Iterator[str]:
    if not isinstance(table, dict):
        return
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif _FILE_KEYS.fullmatch(str(key)):
            texts = value if isinstance(value, list | tuple) else (value,)
            yield from (text for text in texts if isinstance(text, str) and os.path.isabs(text))


def _walk(
    root: str, passed: set[str], trees: set[str], below: str = ""
) -> "Iterator[tuple[str, os.DirEntry[str]]]":
    try:
        with os.scandir(os.path.join(root, below)) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = os.path.join(below, entry.name)
                if _TRANSIENT.fullmatch(entry.name) or path in passed or entry.path in trees:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(root, passed, trees, path)
                else:
                    yield path, entry
    except FileNotFoundError:
        if not below:
            raise BackupUnavailable(f"there is no state directory {root}", root) from None
        return  # removed since its parent was listed
    except OSError as error:
        raise BackupUnavailable(f"{root} cannot be read: {error.strerror}", root) from error
