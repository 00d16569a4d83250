"""The daemon's socket: a server in a child process, with test actions."""

import contextlib
import ctypes
import os
import resource
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from steward.admin.doctor.check_processes import run_in_processes
from steward.admin.doctor.findings import CheckFinding
from steward.core.access import Caller
from steward.core.actions import Action, Registry
from steward.core.errors import PermissionRefused
from steward.core.rpc_server import get_peer_uid
from steward.core.waits import Stop
from steward.daemon.request_service import IdentifySecret, PeerLimits, RequestService
from steward.daemon.socket import SocketServer
from steward.slurm.commands import CommandRunner
from steward.slurm.settings import ClusterSettings


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str = ""
    number: int = 0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    uid: int
    user: str
    pid: int


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="item"):
    number: int
    filler: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    steps: int


def echo(_context: Any, asker: Caller, request: Question) -> Told:
    return Told(text=request.text, uid=asker.uid, user=asker.user, pid=os.getpid())


def look(_context: Any, asker: Caller, request: Question) -> Told:
    """Do as echo, in an action that only reads."""
    return echo(_context, asker, request)


def count(_context: Any, _asker: Caller, request: Question) -> Iterator[Step | Done]:
    for number in range(request.number):
        yield Step(number=number, filler=request.text)
    yield Done(steps=request.number)


def refuse(_context: Any, _asker: Caller, request: Question) -> Told:
    raise PermissionRefused(f"{request.text!r} is not yours\nsecond line")


def fail(_context: Any, _asker: Caller, _request: Question) -> Told:
    raise ZeroDivisionError("a secret of the program")


def crash(_context: Any, _asker: Caller, _request: Question) -> Told:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(_context: Any, _asker: Caller, _request: Question) -> Told:
    while True:
        time.sleep(60)


def swell(_context: Any, _asker: Caller, _request: Question) -> Told:
    return Told(uid=0, user="", pid=0, text="x" * (1 << 30))


def dally(_context: Any, _asker: Caller, request: Question) -> Iterator[Step | Done]:
    """Write this process's id to a file, stream one item and hang."""
    Path(request.text).write_text(str(os.getpid()))
    yield Step(number=0)
    time.sleep(60)


def command(_context: Any, _asker: Caller, request: Question) -> Iterator[Step | Done]:
    """Run a child process that does not end, as for Slurm's commands; write its id to a file."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(request.text).write_text(str(process.pid))
    yield Step(number=0)
    process.wait()


def check(_context: Any, _asker: Caller, request: Question) -> Iterator[Step | Done]:
    """Run a health check whose Slurm command never ends."""
    yield Step(number=0)
    run_in_processes([lambda: _hang(Path(request.text))], 600.0)


def _hang(pid_file: Path) -> tuple[CheckFinding, ...]:
    path = shlex.quote(str(pid_file))
    squeue = pid_file.with_name("squeue")
    squeue.write_text(f"#!/bin/sh\necho $$ > {path}.new; mv {path}.new {path}; exec sleep 600\n")
    squeue.chmod(0o755)
    CommandRunner("c1", ClusterSettings(slurm_bin=str(pid_file.parent))).run(
        "squeue", timeout_s=600.0
    )
    return ()


def starve(context: Any, asker: Caller, request: Question) -> Iterator[Step | Done]:
    """Run a child process that does not end, without file descriptors to search for it."""
    running = command(context, asker, request)
    first = next(running)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))  # poll(2) still takes one
    yield first
    yield from running


def finish(_context: Any, asker: Caller, request: Question) -> Told:
    """Run until the file ``go on`` exists; touch ``begun`` before and ``done`` after."""
    directory = Path(request.text)
    (directory / "begun").touch()
    while not (directory / "go on").exists():
        time.sleep(0.01)
    (directory / "done").touch()
    return echo(_context, asker, request)


def late(_context: Any, _asker: Caller, request: Question) -> Iterator[Step | Done]:
    yield Step(number=0)
    raise PermissionRefused("in the middle")


def registry() -> Registry:
    runs: dict[str, Callable[[Any, Caller, Question], Any]] = {
        name: run
        for name, run in globals().items()
        if name in {"echo", "refuse", "fail", "crash", "hang", "swell", "finish"}
    }
    actions = [
        Action(name=f"test.{name}", help="", request=Question, answer=Told, run=run)
        for name, run in runs.items()
    ]
    actions += [
        Action(
            name=f"test.{run.__name__}",
            help="",
            request=Question,
            answer=Done,
            run=run,
            stream=True,
            items=(Step,),
            only_reads=True,
        )
        for run in (count, late, dally, command, check, starve)
    ]
    actions.append(
        Action(name="test.look", help="", request=Question, answer=Told, run=look, only_reads=True)
    )
    return Registry(tuple(actions), {"test": lambda: None})


LIMITS = PeerLimits(connections=6, per_user=4, request_s=1.0, silence_s=1.0, send_s=1.0)


@contextlib.contextmanager
def serving(
    path: str,
    limits: PeerLimits = LIMITS,
    user: int = 0,
    *,
    keeps: bool = False,
    asked: Registry | None = None,
    knows: IdentifySecret | None = None,
    uid_of: Callable[[socket.socket], int] = get_peer_uid,
    state_dir: str = "",
) -> Iterator[int]:
    """Run a server in a child process; yield its process id."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
            if user:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            stop = Stop()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            beaten: list[int] = []

            def beat() -> None:
                if not beaten:
                    os.write(tell, b"!")
                beaten.append(1)

            service = RequestService(asked or registry(), limits, knows, state_dir=state_dir)
            server = SocketServer(path, service, is_web_server=lambda _: keeps, get_uid=uid_of)
            server.run(stop, beat)
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"!", "the server did not start"
        yield pid
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
