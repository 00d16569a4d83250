"""Which programs may be started: those that root has listed, and nobody else can list."""

import os
import stat
from typing import Final

from steward.automation.errors import NotYours
from steward.core.errors import UsageError

_LONGEST: Final = 1024 * 1024
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_LISTED: Final = "nothing listed there is started"
_STARTED: Final = "what others could exchange is not started"


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
        if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK):
            raise NotYours(f"{path} is no program that can be started", path)
        _need_safe(status, path, _STARTED)
        _need_roots_link(path, _STARTED)
        # Both ways to it: whoever can exchange a link names another program.
        for way in {os.path.dirname(path), os.path.dirname(os.path.realpath(path))}:
            _need_directories(way, _STARTED)
    except OSError as error:
        raise NotYours(f"{path} cannot be started: {error.strerror}", path) from error


def listed(programs_file: str) -> frozenset[str]:
    """The programs of the list: an absolute path a line; ``#`` begins a remark.

    Raises:
        ProgramsFileError: It cannot be read, or could be written by somebody else than root.
    """
    try:
        # Followed, where it is a link: what counts is who can write what is read.
        with open(programs_file, "rb") as file:
            _need_safe(os.fstat(file.fileno()), programs_file, _LISTED)
            data = file.read(_LONGEST)
        _need_directories(os.path.dirname(os.path.realpath(programs_file)), _LISTED)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise ProgramsFileError(
            f"{programs_file} cannot be read: {error.strerror}", programs_file
        ) from error
    lines = (line.partition("#")[0].strip() for line in data.decode("utf-8", "replace").split("\n"))
    return frozenset(line for line in lines if line.startswith("/"))


def _need_directories(directory: str, then: str) -> None:
    while True:
        _need_safe(os.stat(directory), directory, then, is_file=False)
        _need_roots_link(directory, then)
        if directory in ("/", "//"):
            return
        directory = os.path.dirname(directory)


def _need_roots_link(path: str, then: str) -> None:
    if os.lstat(path).st_uid != 0:
        raise ProgramsFileError(f"{path} must be root's: {then}", path)


def _need_safe(status: os.stat_result, path: str, then: str, *, is_file: bool = True) -> None:
    # What is root's stays where it is in a directory with the sticky bit.
    is_shared = not is_file and bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0 or (status.st_mode & _OTHERS_WRITE and not is_shared):
        raise ProgramsFileError(f"{path} must be root's, and writable by nobody else: {then}", path)
    if is_file and not stat.S_ISREG(status.st_mode):
        raise ProgramsFileError(f"{path} is no file", path)
