"""Runs ``steward`` commands in a sandbox, forked from a process that has imported their modules.

A short command spends most of its CPU time on Python's start and on imports, and the tests run
thousands of commands. The server in this module imports each module that an earlier command had to
import, and forks a child for each request. The child enters the sandbox, becomes the user, replaces
the environment and calls the ``main`` of ``steward``. A test that depends on how the interpreter
starts runs the program itself.
"""

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NoReturn

from steward.sandbox import Sandbox, SandboxError, namespaces

_LONGEST: Final = 1 << 18
"""Maximum length of a request: its words and environment, in bytes."""


@functools.lru_cache(maxsize=1)
def _server() -> socket.socket:
    """Return the connection to this process's server, which ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
    with its:
        server = subprocess.Popen([sys.executable, "-P", __file__], stdin=its.fileno())

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


def run_steward(
    cluster: Sandbox,
    argv: Sequence[str],
    *,
    user: str = "",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """Run a command of Steward's inside, as :meth:`Sandbox.run` does.

    Args:
        cluster: The sandbox.
        argv: The program ``steward`` and its arguments.
        user: User of the command; the calling user if empty.
        env: Further variables of the environment.
        timeout_s: Time after which the command is killed, in seconds.
        check: Whether an exit code other than 0 is an error.

    Raises:
        SandboxError: The sandbox is not up, the command failed or took too long.
    """
    # Behind the interpreter and its script.
    init, user, directory, *words = cluster.make_command(argv, user=user)[4:]
    request = {
        "init": int(init),
        "user": user,
        "directory": directory,
        "argv": words,
        "env": cluster.make_environment(env),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _ask(json.dumps(request).encode(), out, err, timeout_s)
        said = [_text(file) for file in (out, err)]
    if code is None:
        raise SandboxError(f"{' '.join(argv)} did not end within {timeout_s:g} s", argv)
    if check and code:
        raise SandboxError(f"{' '.join(argv)} ended with {code}: {said[1].strip()}", argv)
    return subprocess.CompletedProcess(list(argv), code, *said)


def _ask(request: bytes, out: IO[bytes], err: IO[bytes], timeout_s: float) -> int | None:
    """Return the command's exit code, as subprocess has it; None if it was killed for its time."""
    read, write = os.pipe2(os.O_CLOEXEC)
    with open(read, "rb", buffering=0) as told:
        try:
            fds = array.array("i", [out.fileno(), err.fileno(), write])
            _server().sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        finally:
            os.close(write)
        deadline = time.monotonic() + timeout_s
        lines = b""
        in_time = True
        # The first line is the command's process id, the second its exit code.
        while lines.count(b"\n") < 2:
            left_s = max(deadline - time.monotonic(), 0.0) if in_time else 10.0
            if not select.select([told], [], [], left_s)[0]:
                assert in_time, "a command that was killed did not end"
                in_time = False
                if lines:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(lines), signal.SIGKILL)
                continue
            more = told.read(100)
            assert more, "what forks the commands has ended"
            lines += more
    return int(lines.split()[1]) if in_time else None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="surrogateescape")


def serve(requests: socket.socket) -> None:
    """Fork a child for each request; in a child that runs a command, return."""
    # Ctrl-C ends the tests, and the server with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    learned, teach = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    gc.disable()
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _LONGEST, 3)
        if not data:
            sys.exit(0)
        _import_learned(learned)
        gc.freeze()
        if os.fork() == 0:
            requests.close()
            out, err, told = fds
            request = json.loads(data)
            _fork_inside(request["init"], told)
            _become(request, out, err)
            gc.enable()
            atexit.register(_teach, teach, frozenset(sys.modules))
            return
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _import_learned(learned: int) -> None:
    """Import the modules that commands had to import since the last request."""
    with contextlib.suppress(BlockingIOError):
        for name in os.read(learned, 1 << 16).decode().split():
            if name not in sys.modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)


def _teach(teach: int, known: frozenset[str]) -> None:
    new = [name for name in sys.modules if name.startswith("steward.") and name not in known]
    if new:
        # The next command reports names that are truncated or do not fit.
        with contextlib.suppress(OSError):
            os.write(teach, (" ".join(new) + "\n").encode())


def _fork_inside(init_pid: int, told: int) -> None:
    """Return in a new process inside the sandbox; the caller reports its end and exits."""
    if init_pid:
        namespaces.enter_namespaces(init_pid)
    child = os.fork()
    if child == 0:
        os.close(told)
        return
    os.write(told, b"%d\n" % child)
    _, status = os.waitpid(child, 0)
    os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    env = dict(request["env"])
    if request["user"]:
        entry = pwd.getpwnam(request["user"])
        if os.geteuid() != entry.pw_uid:
            os.initgroups(entry.pw_name, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
        env |= {"USER": entry.pw_name, "LOGNAME": entry.pw_name}
        env |= {"HOME": entry.pw_dir, "SHELL": entry.pw_shell}
    namespaces.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    for directory in (request["directory"], os.environ.get("HOME", "/"), "/"):
        with contextlib.suppress(OSError):
            os.chdir(directory)
            break
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = list(request["argv"])


def main() -> NoReturn:
    with socket.socket(fileno=os.dup(0)) as requests:
        # Registered first, it runs last.
        codes: list[int] = []
        atexit.register(_end, codes)
        serve(requests)
    from steward.__main__ import main as run_command

    codes.append(1)
    try:
        codes.append(run_command())
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        codes.append(error.code or 0)
    sys.exit(codes[-1])


def _end(codes: Sequence[int]) -> None:
    """End a command before Python's cleanup, which would copy every module's memory."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[-1])


if __name__ == "__main__":
    main()
