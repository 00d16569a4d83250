"""Files below a directory in which a daemon works: some may vanish meanwhile."""

import fnmatch
import os
from pathlib import Path


def files_below(root: Path, pattern: str = "*") -> list[Path]:
    """Return the files whose name matches; unlike ``rglob`` tolerate vanishing directories."""
    return [
        Path(directory, name)
        for directory, _, names in os.walk(root)
        for name in fnmatch.filter(names, pattern)
    ]


def contents_below(root: Path) -> dict[Path, bytes]:
    """Return the content of every file, without symbolic links.

    A file that vanishes meanwhile may have moved to a place that was read before: then this reads
    all files again.
    """
    while True:
        found = [path for path in files_below(root) if path.is_file() and not path.is_symlink()]
        try:
            return {path: path.read_bytes() for path in found}
        except FileNotFoundError:
            continue
