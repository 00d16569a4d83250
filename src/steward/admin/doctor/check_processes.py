"""Check processes: run health checks side by side, each in a process with a time limit.

``run_in_processes`` forks a process for each check, four at a time, reads its findings from a pipe,
and kills one that exceeds its time limit, so that a check that crashes, or hangs on a dead mount,
cannot stop the others. A process that cannot even be killed is left behind.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from steward.admin.doctor.findings import CheckFinding, make_wrong
from steward.core.errors import StewardError
from steward.core.processes import exit_with_parent, kill_descendants

CheckRun = Callable[[], Sequence[CheckFinding]]
"""A check bound to its context; returns findings."""

_MAX_RUNNING: Final = 4
"""Most checks that run at the same time."""
_READ: Final = 1 << 16
"""Bytes read from a check's pipe at once."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[CheckFinding, ...]).decode


class _RunningCheck(msgspec.Struct):
    """A running check process, with the output so far."""

    number: int
    pid: int
    fd: int
    deadline: float
    output: bytearray


def run_in_processes(
    checks: Sequence[CheckRun], timeout_s: float
) -> list[tuple[CheckFinding, ...]]:
    """Run checks in processes of their own; return their findings in the given order.

    Args:
        checks: The checks.
        timeout_s: Time limit of each check, in seconds.
    """
    findings: list[tuple[CheckFinding, ...]] = [()] * len(checks)
    pending = deque(enumerate(checks))
    running: dict[int, _RunningCheck] = {}
    try:
        while pending or running:
            while pending and len(running) < _MAX_RUNNING:
                number, check = pending.popleft()
                try:
                    process = _start_check(number, check, timeout_s)
                except OSError as error:
                    problem = f"cannot start the check: {error.strerror}"
                    findings[number] = (make_wrong("", problem),)
                    continue
                running[process.fd] = process
            for process in _wait_for_ended(running) if running else ():
                findings[process.number] = _end_check(running.pop(process.fd), timeout_s)
    finally:
        for process in running.values():
            _kill_check(process)
    return findings


def _start_check(number: int, check: CheckRun, timeout_s: float) -> _RunningCheck:
    """Fork a process for a check."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _run_in_child(check, write_fd, parent)
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return _RunningCheck(number, pid, read_fd, time.monotonic() + timeout_s, bytearray())


def _run_in_child(check: CheckRun, fd: int, parent: int) -> None:
    """Run a check in the forked process, write its findings to the pipe, and exit."""
    code = 1
    try:
        exit_with_parent(parent)
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(_encode(_collect_findings(check)))
        code = 0
    finally:
        os._exit(code)


def _collect_findings(check: CheckRun) -> tuple[CheckFinding, ...]:
    try:
        return tuple(check())
    except StewardError as error:
        return (make_wrong("", str(error)),)
    except Exception as error:
        # A failing check must not hide the findings of the others.
        return (
            make_wrong("", f"the check failed, please report it: {type(error).__name__}: {error}"),
        )


def _wait_for_ended(running: dict[int, _RunningCheck]) -> list[_RunningCheck]:
    """Wait for output; return the checks that ended or exceeded their time limit."""
    poller = select.poll()
    for fd in running:
        poller.register(fd, select.POLLIN)
    timeout_s = min(process.deadline for process in running.values()) - time.monotonic()
    ended = []
    for fd, _ in poller.poll(max(0.0, timeout_s) * 1000):
        chunk = os.read(fd, _READ)
        running[fd].output += chunk
        if not chunk:
            ended.append(running[fd])
    now = time.monotonic()
    late = [
        process for process in running.values() if process.deadline <= now and process not in ended
    ]
    return ended + late


def _end_check(process: _RunningCheck, timeout_s: float) -> tuple[CheckFinding, ...]:
    """End a check's process and decode its findings."""
    is_late = time.monotonic() >= process.deadline
    _kill_check(process)
    try:
        return _decode(bytes(process.output))
    except msgspec.MsgspecError:
        if is_late:
            problem = f"the check did not end within {timeout_s:g} s: something that it reads hangs"
        else:
            problem = "the check ended without a result"
        return (make_wrong("", problem),)


def _kill_check(process: _RunningCheck) -> None:
    """Kill a check's process and its descendants."""
    os.close(process.fd)
    # A stopped process starts nothing more; its children would outlive it otherwise.
    os.kill(process.pid, signal.SIGSTOP)
    try:
        kill_descendants(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    # A process that hangs in the kernel is left behind.
    while os.waitpid(process.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
