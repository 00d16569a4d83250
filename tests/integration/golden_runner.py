"""Runner of ``steward`` command lines, each in a child of a process that has imported everything.

It reads requests from stdin, one JSON object a line, and answers each with its exit code.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import pty
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

import click

import steward
from steward.__main__ import main
from steward.cli.app import app

_LIMIT_S: Final = 60
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_BY_FUNCTIONS: Final = ("pygments.formatters", "pygments.lexers", "rich.console", "rich.syntax")
"""Modules that functions of Steward import from other packages."""


def command_line() -> list[tuple[tuple[str, ...], Any]]:
    """Return every command and group of ``steward``, with the words that call it."""
    return list(_commands(app, ()))


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    if hasattr(command, "list_commands"):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*words, name))


def serve() -> None:
    """Answer requests until the input ends."""
    _import_all()
    for line in sys.stdin:
        request = json.loads(line)
        terminal = pty.openpty() if request["terminal"] else None
        child = os.fork()
        if not child:
            _be_command(request, terminal)
        if terminal is not None:
            _copy_terminal(terminal, request["stdout"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _import_all() -> None:
    """Import every module that a command may import, so that each command starts at once."""
    found = pkgutil.walk_packages(steward.__path__, "steward.")
    names = [module.name for module in found if "migrations" not in module.name]
    for name in (*names, *_BY_FUNCTIONS):
        # Some want packages that are not installed.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _be_command(request: dict[str, Any], terminal: tuple[int, int] | None) -> None:
    code = 70
    try:
        code = _run(request, terminal)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(request: dict[str, Any], terminal: tuple[int, int] | None) -> int:
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], _NEW, 0o600) if terminal is None else terminal[1], number)
    if request["uid"]:
        os.setgroups([])
        os.setgid(request["gid"])
        os.setuid(request["uid"])
    # As a new process has them: a file may be sought in, a terminal gets each line at once.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.environ.update(request["environment"])
    signal.alarm(_LIMIT_S)
    sys.argv = request["words"]
    try:
        return main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def _copy_terminal(terminal: tuple[int, int], path: str) -> None:
    """Write what a command shows on a terminal to a file."""
    shown, used = terminal
    os.close(used)
    with open(path, "wb") as out, contextlib.suppress(OSError):  # the last that had it open ended
        while piece := os.read(shown, 65536):
            out.write(piece)
    os.close(shown)


if __name__ == "__main__":
    serve()
