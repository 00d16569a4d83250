"""local.command: a program that root has listed, on the host that Steward runs on."""

import os
import selectors
import subprocess
import time
from typing import IO, Annotated, Any, Final

import msgspec

from steward.automation.errors import AutomationError, DoneInPart, OutOfTime, WrongParameters
from steward.automation.operation import Doing, Operation, Parameters
from steward.automation.programs import need_listed
from steward.core.ending import end_group

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
