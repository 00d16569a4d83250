"""Process control: core dumps, process groups, orphans, and killing all descendants.

``refuse_core_dumps`` protects secrets in memory. ``kill_group`` kills a program that leads a
process group, ``kill_descendants`` everything that a process has started. ``exit_with_parent`` and
``adopt_orphans`` tie children to their parent, so that none of them outlives the daemon.
``read_boot_id`` and ``read_start_ticks`` identify a process across reboots and reused pids.
"""

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
    """Disable core dumps of this process and its children: their memory holds environments.

    A core limit of 0 does not stop the kernel from piping a core to a program; PR_SET_DUMPABLE
    does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ROUNDS: Final = 10
"""Most searches for new descendants."""
_CHILDREN: Final = "/proc/thread-self/children"
"""File that exists if the kernel lists children of threads (CONFIG_PROC_CHILDREN)."""
_libc: Final = ctypes.CDLL(None)

Children = Callable[[int], Iterable[int]]


def kill_group(process: "subprocess.Popen[bytes]", *, reap_s: float = 5.0) -> None:
    """Kill a program that leads a process group, with its group, and reap it.

    Args:
        process: The program. One that hangs in the kernel, or runs as another user (sudo), is
            left behind, so that nobody waits for it forever.
        reap_s: Longest wait for the end of the program, in seconds.
    """
    # It may just have ended; another user's process learns from closed pipes that we are gone.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(BrokenPipeError):  # what was not yet written goes nowhere
                pipe.close()
    try:
        process.wait(reap_s)
    except subprocess.TimeoutExpired:
        log.warning("cannot kill pid %d (%s): it keeps running", process.pid, process.args)


def exit_with_parent(parent: int) -> None:
    """Make the kernel kill this process, which was just forked, when its parent ends.

    Args:
        parent: Pid of the process that forked this one, in a lasting thread; if it has ended
            already, this process exits at once.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants of this process that lose their own.

    Then everything that a child has started can be found and killed after the child has ended.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, spared: Collection[int] = ()) -> None:
    """Kill all descendants of a process, and their process groups.

    Args:
        pid: The process, which may be this one. It stays alive and may start others: the
            search repeats until none is left, or up to a number of rounds.
        spared: Pids to spare, with their descendants.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        # Collect all first: the descendants of a killed process cannot be found any more.
        try:
            pids = [child for child in _list_descendants(pid, spared) if child not in killed]
        except OSError as error:
            log.warning("cannot find the children of pid %d to end them: %s", pid, error)
            return
        if not pids:
            return
        for child in pids:
            for kill in (os.kill, os.killpg):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child, signal.SIGKILL)
        killed.update(pids)


def _list_descendants(pid: int, spared: Collection[int]) -> list[int]:
    """Return all descendants of a process, parents before their children."""
    list_children = _read_children if os.path.exists(_CHILDREN) else _map_children()
    pids: list[int] = []
    parents = [pid]
    while parents:
        level = [
            child for parent in parents for child in list_children(parent) if child not in spared
        ]
        pids += level
        parents = level
    return pids


def _read_children(pid: int) -> list[int]:
    """Return the children of a process from the kernel's list for each of its threads."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),  # the thread has
                open(f"/proc/{pid}/task/{thread}/children", "rb") as file,
            ):
                children += map(int, file.read().split())
    return children


def _map_children() -> Children:
    """Map parents to children by reading each process's parent in /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            with open(f"/proc/{name}/stat", "rb") as file:
                # A program's name, in brackets, may contain anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, ())


def read_boot_id() -> str:
    """Return the kernel's boot id; "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if it does not run.

    With the boot id it tells the process from a later one of the same pid. Source: proc(5).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name in brackets may contain anything, brackets and blanks included.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    # A zombie does not run any more.
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
