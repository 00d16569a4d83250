"""Which programs may be started: those that root has listed, and nobody else can list."""

import os
import stat
from typing import Final

from steward.automation.errors import NotYours
from steward.errors import UsageError

_LONGEST: Final = 1024 * 1024
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class ProgramsFileError(UsageError):
    """The list of programs is not one that root alone writes."""


def need_listed(path: str, programs_file: str) -> None:
    """Refuse a program that is not listed.

    Args:
        path: Its absolute path.
        programs_file: The list ([actions] programs_file).

    Raises:
        NotYours: It is not listed.
        ProgramsFileError: The list, or the program, could be written by somebody else than root.
    """
    if path not in listed(programs_file):
        raise NotYours(f"{path} is not in {programs_file}, where root lists what may be started")
    try:
        status = os.stat(path)
    except OSError as error:
        raise NotYours(f"{path} cannot be started: {error.strerror}", path) from error
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK):
        raise NotYours(f"{path} is no program that can be started", path)
    if status.st_mode & _OTHERS_WRITE:
        raise ProgramsFileError(f"{path} can be written by others than its owner", path)


def listed(programs_file: str) -> frozenset[str]:
    """The programs of the list: an absolute path a line; ``#`` begins a remark.

    Raises:
        ProgramsFileError: It cannot be read, or could be written by somebody else than root.
    """
    try:
        # Followed, where it is a link: what counts is who can write what is read.
        with open(programs_file, "rb") as file:
            _need_roots(os.fstat(file.fileno()), programs_file, is_file=True)
            data = file.read(_LONGEST)
        directory = os.path.dirname(os.path.realpath(programs_file))
        while True:
            _need_roots(os.stat(directory), directory, is_file=False)
            if directory == "/":
                break
            directory = os.path.dirname(directory)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise ProgramsFileError(
            f"{programs_file} cannot be read: {error.strerror}", programs_file
        ) from error
    lines = (line.partition("#")[0].strip() for line in data.decode("utf-8", "replace").split("\n"))
    return frozenset(line for line in lines if line.startswith("/"))


def _need_roots(status: os.stat_result, path: str, *, is_file: bool) -> None:
    # What is root's stays where it is in a directory with the sticky bit.
    is_shared = not is_file and bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0 or (status.st_mode & _OTHERS_WRITE and not is_shared):
        raise ProgramsFileError(
            f"{path} must be root's, and writable by nobody else: nothing listed there is started",
            path,
        )
    if is_file and not stat.S_ISREG(status.st_mode):
        raise ProgramsFileError(f"{path} is no file", path)
