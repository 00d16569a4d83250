"""Action ``doctor.run``: run the health checks in processes of their own and collect findings.

``run_checks`` selects the checks, queries Slurm once for all of them (``make_check_context``), and
passes them to ``run_in_processes``. That forks a process for each check, four at a time, reads its
findings from a pipe, and kills one that exceeds its time limit, so that a check that crashes, or
hangs on a dead mount, cannot stop the others. A process that cannot even be killed is left behind.
"""

import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from steward import __version__
from steward.admin.doctor.checks import CHECKS, HealthCheck
from steward.admin.doctor.context import CheckContext, make_check_context
from steward.admin.doctor.findings import (
    CheckFinding,
    DoctorAnswer,
    DoctorContext,
    DoctorRequest,
    find_worst_status,
    make_wrong,
)
from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import PermissionRefused, StewardError, UsageError
from steward.core.events import utc_now
from steward.core.processes import exit_with_parent, kill_descendants
from steward.jobs.queries import list_clusters

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
    until: float
    said: bytearray


def run_in_processes(works: Sequence[CheckRun], timeout_s: float) -> list[tuple[CheckFinding, ...]]:
    """Run checks in processes of their own; return their findings in the given order.

    Args:
        works: The checks.
        timeout_s: Time limit of each check, in seconds.
    """
    found: list[tuple[CheckFinding, ...]] = [()] * len(works)
    waiting = deque(enumerate(works))
    running: dict[int, _RunningCheck] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _MAX_RUNNING:
                number, work = waiting.popleft()
                try:
                    one = _start_check(number, work, timeout_s)
                except OSError as error:
                    what = f"the check cannot be started: {error.strerror}"
                    found[number] = (make_wrong("", what),)
                    continue
                running[one.fd] = one
            for one in _wait_for_ended(running) if running else ():
                found[one.number] = _end_check(running.pop(one.fd), timeout_s)
    finally:
        for one in running.values():
            _kill_check(one)
    return found


def _start_check(number: int, work: CheckRun, timeout_s: float) -> _RunningCheck:
    """Fork a process for a check."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _run_in_child(work, theirs, parent)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return _RunningCheck(number, pid, ours, time.monotonic() + timeout_s, bytearray())


def _run_in_child(work: CheckRun, fd: int, parent: int) -> None:
    """Run a check in the forked process, write its findings to the pipe, and exit."""
    code = 1
    try:
        exit_with_parent(parent)
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(_encode(_collect_findings(work)))
        code = 0
    finally:
        os._exit(code)


def _collect_findings(work: CheckRun) -> tuple[CheckFinding, ...]:
    try:
        return tuple(work())
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
    left_s = min(one.until for one in running.values()) - time.monotonic()
    ended = []
    for fd, _ in poller.poll(max(0.0, left_s) * 1000):
        piece = os.read(fd, _READ)
        running[fd].said += piece
        if not piece:
            ended.append(running[fd])
    now = time.monotonic()
    late = [one for one in running.values() if one.until <= now and one not in ended]
    return ended + late


def _end_check(one: _RunningCheck, timeout_s: float) -> tuple[CheckFinding, ...]:
    """End a check's process and decode its findings."""
    is_late = time.monotonic() >= one.until
    _kill_check(one)
    try:
        return _decode(bytes(one.said))
    except msgspec.MsgspecError:
        if is_late:
            what = f"it took longer than {timeout_s:g} s: something that it looks at hangs"
        else:
            what = "the check ended without a word"
        return (make_wrong("", what),)


def _kill_check(one: _RunningCheck) -> None:
    """Kill a check's process and its descendants."""
    os.close(one.fd)
    # A stopped process starts nothing more; its children would outlive it otherwise.
    os.kill(one.pid, signal.SIGSTOP)
    try:
        kill_descendants(one.pid)
    finally:
        os.kill(one.pid, signal.SIGKILL)
    until = time.monotonic() + 1.0
    # A process that hangs in the kernel is left behind.
    while os.waitpid(one.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.005)


_TIMEOUT_S: Final = 60.0
"""Time limit of each check, in seconds."""


def run_checks(room: DoctorContext, asker: Asker, request: DoctorRequest) -> DoctorAnswer:
    """Run all health checks, or the named ones.

    Raises:
        PermissionRefused: The asker is not an operator of every cluster.
        UsageError: There is no such check.
    """
    if not all(room.access.is_operator(asker, name) for name in list_clusters(room.settings)):
        raise PermissionRefused("only operators may have Steward looked over", asker.user)
    chosen = _select_checks(request.only)
    taken_at, began = utc_now(), time.monotonic()
    asks_slurm = any(check.asks_slurm for check in chosen)
    ground = make_check_context(room.settings, room.fresh, asker, asks_slurm=asks_slurm)
    works = [_bind_check(check, ground) for check in chosen]
    findings = tuple(
        msgspec.structs.replace(finding, check=check.name)
        for check, found in zip(chosen, run_in_processes(works, _TIMEOUT_S), strict=True)
        for finding in found
    )
    return DoctorAnswer(
        findings=findings,
        status=find_worst_status(tuple(finding.status for finding in findings)),
        host=socket.gethostname(),
        steward=__version__,
        taken_at=taken_at,
        took_s=round(time.monotonic() - began, 3),
    )


def _bind_check(check: HealthCheck, ground: CheckContext) -> CheckRun:
    return lambda: tuple(check.run(ground))


def _select_checks(only: Sequence[str]) -> tuple[HealthCheck, ...]:
    known = {check.name: check for check in CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(f"there is no check {unknown[0]!r}: there are {', '.join(known)}", unknown)
    return tuple(check for check in CHECKS if not only or check.name in only)


def run_doctor(room: DoctorContext, asker: Asker, request: DoctorRequest) -> DoctorAnswer:
    """Run all health checks, or the named ones.

    Raises:
        PermissionRefused: The asker is no operator of every cluster.
        UsageError: There is no such check.
    """
    return run_checks(room, asker, request)


ACTIONS: Final = (
    Action(
        name="doctor.run",
        help="Look whether all is as it must be.",
        request=DoctorRequest,
        answer=DoctorAnswer,
        run=run_doctor,
        only_reads=True,
        role="operator",
    ),
)
