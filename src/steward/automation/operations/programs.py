"""local.command: a program that root has listed, on the host that Steward runs on."""

import os
import selectors
import stat
import subprocess
import time
from typing import IO, Annotated, Any, Final

import msgspec

from steward.automation.errors import (
    AutomationError,
    DoneInPart,
    NotYours,
    OutOfTime,
    WrongParameters,
)
from steward.automation.operation import Doing, Operation, Parameters
from steward.core.errors import UsageError
from steward.core.processes import end_group

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


_MOST_SAID: Final = 64 * 1024
"""Bytes of what a program writes that are kept, of each of its two outputs."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Command(Parameters, frozen=True, kw_only=True):
    """local.command."""

    program: Annotated[
        str, msgspec.Meta(description="Its absolute path, as [actions] programs_file lists it.")
    ]
    arguments: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Its arguments, each as it is: no shell looks at them."),
    ] = ()


def run(doing: Doing, asked: Command) -> dict[str, Any]:
    """Run a program to its end."""
    words = [asked.program, *asked.arguments]
    if any("\0" in word for word in words):
        raise WrongParameters("local.command: no argument of a program can hold a NUL")
    need_listed(asked.program, doing.settings.actions.programs_file)
    if doing.dry_run:
        return {"command": words, "would_run": True}
    doing.begin()
    code, out, err = _run(words, doing)
    result = {"exit_code": code, "stdout": out, "stderr": err}
    if code:
        how = f"by signal {-code}" if code < 0 else f"with {code}"
        raise DoneInPart(f"{asked.program} ended {how}", result)
    return result


def _run(words: list[str], doing: Doing) -> tuple[int, str, str]:
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "STEWARD_ACTION": "local.command"}
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise AutomationError(f"{words[0]} cannot be started: {error}", words[0]) from error
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said = _said(process.stdout, process.stderr, doing)
        code = process.wait(max(0.01, doing.left_s))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise OutOfTime(f"{words[0]} took longer than {doing.timeout_s:g} s", words[0]) from error
    finally:
        end_group(process)  # what it left running as well
    return code, *said


def _said(stdout: IO[bytes], stderr: IO[bytes], doing: Doing) -> tuple[str, str]:
    """What a program writes until it closes both; more than is kept is read and left.

    Raises:
        TimeoutError: It took too long.
    """
    kept = {stdout: bytearray(), stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            selector.register(pipe, selectors.EVENT_READ)
        until = time.monotonic() + doing.left_s
        while selector.get_map():
            left_s = until - time.monotonic()
            ready = selector.select(left_s) if left_s > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                pipe = next(one for one in kept if one is key.fileobj)
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(pipe)
                kept[pipe] += piece[: max(0, _MOST_SAID - len(kept[pipe]))]
    out, err = (bytes(data).decode("utf-8", "backslashreplace") for data in kept.values())
    return out, err


OPERATIONS: Final = (
    Operation(
        ref="local.command",
        help="Run a program that root has listed, where Steward runs.",
        gives="The exit code, and what was written to both outputs.",
        parameters=Command,
        run=run,
        right="administrator",
        changes=True,
        remote=False,
        on_cluster=False,
    ),
)
