"""What Steward's own processes are given and kept from."""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable
from typing import Final

_PR_SET_DUMPABLE: Final = 4


def refuse_core_dumps() -> None:
    """Have this process and those it forks leave no core: environments are in their memory.

    A limit of 0 does not keep the kernel from piping a core to a program; not being dumpable does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ROUNDS: Final = 10
_CHILDREN: Final = "/proc/thread-self/children"
"""There where the kernel lists children (CONFIG_PROC_CHILDREN)."""
_libc: Final = ctypes.CDLL(None)

Children = Callable[[int], Iterable[int]]


def end_group(process: "subprocess.Popen[bytes]", *, reap_s: float = 5.0) -> None:
    """Leave nothing behind of a program, which leads a process group of its own.

    Args:
        process: The program. What hangs in the kernel, or became somebody else (sudo), is left
            behind: neither is waited for without end.
        reap_s: Longest wait for the end of the program, in seconds.
    """
    # It may have ended in this moment; of another user's, closed pipes tell it that we are gone.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(BrokenPipeError):  # what was not yet written goes nowhere
                pipe.close()
    try:
        process.wait(reap_s)
    except subprocess.TimeoutExpired:
        log.warning("pid %d (%s) cannot be ended: left behind", process.pid, process.args)


def end_with(parent: int) -> None:
    """Have the kernel kill this process, which was just forked, when its parent ends.

    Args:
        parent: The process that forked this one, in a thread that lasts; where it has ended
            already, this one ends at once.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all that descends from this process and loses its own.

    So what a child has started can still be found, and ended, when the child has ended.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_below(pid: int, but: Collection[int] = ()) -> None:
    """Kill what a process has started, what that has started, and their process groups.

    Args:
        pid: The process, which may be this one. It lives on, and may start something else:
            that is looked for until there is nothing more, or it does so again and again.
        but: Those that live on, with all below them.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        # All of them first: what is below a process that was killed is not found any more.
        try:
            found = [one for one in _below(pid, but) if one not in killed]
        except OSError as error:
            log.warning("what pid %d has started cannot be found, to be ended: %s", pid, error)
            return
        if not found:
            return
        for one in found:
            for kill in (os.kill, os.killpg):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(one, signal.SIGKILL)
        killed.update(found)


def _below(pid: int, but: Collection[int]) -> list[int]:
    """All that descend from a process, parents before their children."""
    children = _listed if os.path.exists(_CHILDREN) else _by_parent()
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = [one for parent in waiting for one in children(parent) if one not in but]
        found += below
        waiting = below
    return found


def _listed(pid: int) -> list[int]:
    """The children of a process as the kernel lists them, for each of its threads."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),  # the thread has
                open(f"/proc/{pid}/task/{thread}/children", "rb") as file,
            ):
                found += map(int, file.read().split())
    return found


def _by_parent() -> Children:
    """Children as each process of the host names its parent."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            with open(f"/proc/{name}/stat", "rb") as file:
                # A program's name, in brackets, may hold anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, ())
