"""Runs checks each in a process of its own: one that hangs on a dead mount stops no other.

What a check has to say comes through a pipe. A process that does not say it in time is
killed, and one that cannot even be killed is left behind.
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

from steward.admin.doctor.findings import Finding, wrong
from steward.core.ending import end_below, end_with
from steward.core.errors import StewardError

Work = Callable[[], Sequence[Finding]]
"""A check, with all that it looks at."""

_AT_ONCE: Final = 4
_READ: Final = 1 << 16
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[Finding, ...]).decode


class _Running(msgspec.Struct):
    """A check under way."""

    number: int
    pid: int
    fd: int
    until: float
    said: bytearray


def run_apart(works: Sequence[Work], timeout_s: float) -> list[tuple[Finding, ...]]:
    """What each check found, in the order in which they were given.

    Args:
        works: The checks.
        timeout_s: How long each may take, in seconds.
    """
    found: list[tuple[Finding, ...]] = [()] * len(works)
    waiting = deque(enumerate(works))
    running: dict[int, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, work = waiting.popleft()
                try:
                    one = _start(number, work, timeout_s)
                except OSError as error:
                    what = f"the check cannot be started: {error.strerror}"
                    found[number] = (wrong("", what),)
                    continue
                running[one.fd] = one
            for one in _ready(running) if running else ():
                found[one.number] = _end(running.pop(one.fd), timeout_s)
    finally:
        for one in running.values():
            _kill(one)
    return found


def _start(number: int, work: Work, timeout_s: float) -> _Running:
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _be(work, theirs, parent)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return _Running(number, pid, ours, time.monotonic() + timeout_s, bytearray())


def _be(work: Work, fd: int, parent: int) -> None:
    """In the new process: do the check, say what it found, and end."""
    code = 1
    try:
        end_with(parent)
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(_encode(_said(work)))
        code = 0
    finally:
        os._exit(code)


def _said(work: Work) -> tuple[Finding, ...]:
    try:
        return tuple(work())
    except StewardError as error:
        return (wrong("", str(error)),)
    except Exception as error:
        # A check of one thing must not hide what the others say.
        return (wrong("", f"the check failed, please report it: {type(error).__name__}: {error}"),)


def _ready(running: dict[int, _Running]) -> list[_Running]:
    """Those that have said all, or whose time is over."""
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


def _end(one: _Running, timeout_s: float) -> tuple[Finding, ...]:
    is_late = time.monotonic() >= one.until
    _kill(one)
    try:
        return _decode(bytes(one.said))
    except msgspec.MsgspecError:
        if is_late:
            what = f"it took longer than {timeout_s:g} s: something that it looks at hangs"
        else:
            what = "the check ended without a word"
        return (wrong("", what),)


def _kill(one: _Running) -> None:
    os.close(one.fd)
    # Stopped, it starts nothing more; what it has started would outlive it.
    os.kill(one.pid, signal.SIGSTOP)
    try:
        end_below(one.pid)
    finally:
        os.kill(one.pid, signal.SIGKILL)
    until = time.monotonic() + 1.0
    # Who hangs in the kernel is left behind.
    while os.waitpid(one.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.005)
