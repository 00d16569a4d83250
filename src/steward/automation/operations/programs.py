"""Program operation ``local.command``: run a program that root has listed, on Steward's host.

The first half checks the list (``[actions] programs_file``) and the program: root must own both,
their directories and links, and nobody else may write them. Triggers use ``require_listed_program``
too. The second half runs the program without a shell, in a clean environment and within the time
limit, and keeps the first 64 KiB of each output.
"""

import os
import selectors
import stat
import subprocess
import time
from typing import IO, Annotated, Any, Final

from steward.automation.errors import (
    AutomationError,
    InvalidParameters,
    OperationForbidden,
    OperationTimeout,
    PartialFailure,
)
from steward.automation.operation import OperationContext, Parameters, operation
from steward.core.actions import described
from steward.core.errors import UsageError
from steward.core.processes import kill_group

# List of programs

_MAX_LIST_BYTES: Final = 1024 * 1024
"""Bytes read of the list."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
"""Permission bits that let others write."""
_LIST_CONSEQUENCE: Final = "no program in it may run"
"""End of an error message about the list."""
_PROGRAM_CONSEQUENCE: Final = "a program that others can change does not run"
"""End of an error message about a program."""


class ProgramsFileError(UsageError):
    """The list of programs, or a program, could be written by somebody other than root."""


def require_listed_program(path: str, programs_file: str) -> None:
    """Raise an error unless a program is listed and only root can change it.

    Args:
        path: Absolute path of the program.
        programs_file: File that lists allowed programs ([actions] programs_file).

    Raises:
        OperationForbidden: It is not listed.
        ProgramsFileError: The list or the program is writable by somebody other than root.
    """
    if path not in read_listed_programs(programs_file):
        raise OperationForbidden(
            f"program {path} is not allowed: root must add it to {programs_file}"
        )
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK):
            raise OperationForbidden(f"{path} is not an executable file", path)
        _require_root_only_writable(status, path, _PROGRAM_CONSEQUENCE)
        _require_root_owner(path, _PROGRAM_CONSEQUENCE)
        # Check the parents of both the link and its target: whoever can replace a link chooses the
        # program.
        for directory in {os.path.dirname(path), os.path.dirname(os.path.realpath(path))}:
            _require_root_directories(directory, _PROGRAM_CONSEQUENCE)
    except OSError as error:
        raise OperationForbidden(f"cannot start {path}: {error.strerror}", path) from error


def read_listed_programs(programs_file: str) -> frozenset[str]:
    """Read the list of programs: one absolute path per line; ``#`` starts a comment.

    Raises:
        ProgramsFileError: The file cannot be read, or somebody other than root can write it.
    """
    try:
        # Links are followed: what counts is who can write the file that is read.
        with open(programs_file, "rb") as file:
            _require_root_only_writable(os.fstat(file.fileno()), programs_file, _LIST_CONSEQUENCE)
            data = file.read(_MAX_LIST_BYTES)
        _require_root_directories(
            os.path.dirname(os.path.realpath(programs_file)), _LIST_CONSEQUENCE
        )
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise ProgramsFileError(
            f"cannot read {programs_file}: {error.strerror}", programs_file
        ) from error
    lines = (line.partition("#")[0].strip() for line in data.decode("utf-8", "replace").split("\n"))
    return frozenset(line for line in lines if line.startswith("/"))


def _require_root_directories(directory: str, consequence: str) -> None:
    """Check that only root can change a directory and all its parents."""
    while True:
        _require_root_only_writable(os.stat(directory), directory, consequence, is_file=False)
        _require_root_owner(directory, consequence)
        if directory in ("/", "//"):
            return
        directory = os.path.dirname(directory)


def _require_root_owner(path: str, consequence: str) -> None:
    """Check that root owns a path itself, which may be a link."""
    if os.lstat(path).st_uid != 0:
        raise ProgramsFileError(f"{path} must belong to root: {consequence}", path)


def _require_root_only_writable(
    status: os.stat_result, path: str, consequence: str, *, is_file: bool = True
) -> None:
    """Check that root owns a file or directory and nobody else can write it."""
    # In a directory with the sticky bit nobody else can rename or remove root's entries.
    is_shared = not is_file and bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0 or (status.st_mode & _OTHERS_WRITE and not is_shared):
        raise ProgramsFileError(
            f"{path} must belong to root and be writable by root only: {consequence}", path
        )
    if is_file and not stat.S_ISREG(status.st_mode):
        raise ProgramsFileError(f"{path} is not a regular file", path)


# Execution

_MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Bytes kept of each of a program's two outputs."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the programs."""


class CommandParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of local.command."""

    program: Annotated[
        str, described("Absolute path of the program, as listed in [actions] programs_file.")
    ]
    arguments: Annotated[
        tuple[str, ...],
        described("Arguments, passed unchanged and without a shell."),
    ] = ()


@operation("local.command", role="administrator", remote=False, on_cluster=False)
def run_program(context: OperationContext, parameters: CommandParameters) -> dict[str, Any]:
    """Run a program that root has listed, on Steward's host.

    Returns:
        Exit code and both outputs of the program.
    """
    argv = [parameters.program, *parameters.arguments]
    if any("\0" in word for word in argv):
        raise InvalidParameters("local.command: an argument contains a NUL character: remove it")
    require_listed_program(parameters.program, context.settings.actions.programs_file)
    if context.dry_run:
        return {"command": argv, "would_run": True}
    context.begin()
    exit_code, out, err = _execute_program(argv, context)
    result = {"exit_code": exit_code, "stdout": out, "stderr": err}
    if exit_code:
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with {exit_code}"
        raise PartialFailure(f"{parameters.program} ended {how}", result)
    return result


def _execute_program(argv: list[str], context: OperationContext) -> tuple[int, str, str]:
    """Run a program; return its exit code (negative for a signal) and both outputs."""
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "STEWARD_ACTION": "local.command"}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise AutomationError(f"cannot start {argv[0]}: {error}", argv[0]) from error
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = _read_outputs(process.stdout, process.stderr, context)
        exit_code = process.wait(max(0.01, context.remaining_s))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise OperationTimeout(
            f"{argv[0]} took longer than {context.timeout_s:g} s", argv[0]
        ) from error
    finally:
        kill_group(process)  # also ends processes that the program left behind
    return exit_code, *outputs


def _read_outputs(
    stdout: IO[bytes], stderr: IO[bytes], context: OperationContext
) -> tuple[str, str]:
    """Read a program's outputs until it closes both; discard what exceeds the limit.

    Raises:
        TimeoutError: The time limit passed.
    """
    outputs = {stdout: bytearray(), stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in outputs:
            selector.register(pipe, selectors.EVENT_READ)
        deadline = time.monotonic() + context.remaining_s
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            ready = selector.select(remaining_s) if remaining_s > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                pipe = next(output for output in outputs if output is key.fileobj)
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(pipe)
                outputs[pipe] += chunk[: max(0, _MAX_OUTPUT_BYTES - len(outputs[pipe]))]
    out, err = (bytes(data).decode("utf-8", "backslashreplace") for data in outputs.values())
    return out, err
