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
