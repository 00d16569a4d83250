"""Files below a directory that a daemon works in: it may empty and remove some meanwhile."""

import fnmatch
import os
from pathlib import Path


def files_below(root: Path, pattern: str = "*") -> list[Path]:
    """The files whose name matches; unlike ``rglob`` it bears with a directory that goes."""
    return [
        Path(directory, name)
        for directory, _, names in os.walk(root)
        for name in fnmatch.filter(names, pattern)
    ]


def contents_below(root: Path) -> dict[Path, bytes]:
    """Return the content of every file, without symbolic links.

    A file that goes while they are read may have taken another's place, under whose name it
    would be looked at too late: then all are read again.
    """
    while True:
        found = [path for path in files_below(root) if path.is_file() and not path.is_symlink()]
        try:
            return {path: path.read_bytes() for path in found}
        except FileNotFoundError:
            continue
