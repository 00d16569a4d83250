"""Client side of a sandbox's keeper: start it, read its report, detach it, end it.

`launch_keeper` starts the process of `keeper.py`; `read_report` waits for its one line;
`read_keepers` reads the process ids that it wrote. `detach_keeper` lets it outlive the caller;
`end_keeper`, `abandon_keeper`, `signal_process` and `wait_for_end` stop it. Used by `Sandbox` in
`cluster.py`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from steward.core.processes import read_start_ticks
from steward.sandbox.spec import (
    KeeperProcesses,
    ProcessId,
    SandboxError,
    SandboxPlan,
    is_alive,
)

UP_TIMEOUT_S: Final = 120.0
DOWN_TIMEOUT_S: Final = 20.0


def launch_keeper(
    plan: SandboxPlan, port_sockets: Sequence[socket.socket], *, detached: bool
) -> subprocess.Popen[bytes]:
    """Start the keeper of a sandbox whose directory is laid out.

    Args:
        plan: The sandbox's plan.
        port_sockets: Sockets that reserve the sandbox's ports; the keeper owns them from here on.
        detached: Whether it shall outlive the caller, see :func:`detach_keeper`.
    """
    mode = "detached" if detached else "tied"
    try:
        with open(f"{plan.directory}/log/keeper.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "steward.sandbox.keeper", plan.directory, mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[port_socket.fileno() for port_socket in port_sockets],
                start_new_session=True,
                cwd="/",
            )
    finally:
        for port_socket in port_sockets:
            port_socket.close()


def read_keepers(directory: str) -> KeeperProcesses | None:
    """Read the process ids of a sandbox's keeper and init; None if none was started yet.

    Raises:
        SandboxError: The file cannot be read.
    """
    try:
        with open(f"{directory}/keeper/pids.json", "rb") as file:
            return msgspec.json.decode(file.read(), type=KeeperProcesses)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise SandboxError(
            f"{directory} is damaged ({error}): end its processes, and remove it", directory
        ) from error


def end_keeper(keeper: subprocess.Popen[bytes], *, keep: bool) -> None:
    """End a keeper that is a child of this process, and with it the sandbox.

    Args:
        keeper: The keeper; an ended one is harmless.
        keep: Whether to keep the directory; otherwise the keeper removes it.
    """
    if keep:
        keeper.terminate()
    elif keeper.stdin is not None:
        keeper.stdin.close()
    try:
        keeper.wait(DOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    if keeper.stdin is not None:
        keeper.stdin.close()


def read_report(keeper: subprocess.Popen[bytes]) -> str:
    """Wait for the keeper's report line; return the error, "" for none."""
    stream = keeper.stdout
    if stream is None:
        raise SandboxError("the keeper has no pipe to report through", keeper)
    poller = select.poll()  # select(2) cannot watch the descriptors of a process with many files
    poller.register(stream, select.POLLIN)
    if not poller.poll(UP_TIMEOUT_S * 1000):
        return f"no report of the keeper within {UP_TIMEOUT_S:.0f} s"
    status, _, failure = stream.readline().decode(errors="replace").strip().partition(" ")
    if status == "up":
        return ""
    return failure or "the keeper ended without a report"


def detach_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Tell a detached keeper to outlive this process."""
    keeper.wait()  # the started process; the keeper itself is its child
    if keeper.stdin is not None:
        with contextlib.suppress(BrokenPipeError), keeper.stdin:  # it has failed, and reported why
            keeper.stdin.write(b"stay")


def abandon_keeper(keeper: subprocess.Popen[bytes], directory: str) -> None:
    """End a keeper that has not reported yet, and wait until it has removed its directory."""
    for stream in (keeper.stdin, keeper.stdout):
        if stream is not None:
            stream.close()
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while os.path.exists(directory) and time.monotonic() < deadline:
        time.sleep(0.02)
    keeper.wait(DOWN_TIMEOUT_S)


def signal_process(process: ProcessId, signal_number: int) -> None:
    """Send a signal to exactly this process, never to another that reuses its id."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # Check again now that the descriptor holds the process, whose id may be reused.
        if read_start_ticks(process.pid) == process.started:
            signal.pidfd_send_signal(fd, signal_number)
    except ProcessLookupError:
        return  # it ended in between
    finally:
        os.close(fd)


def wait_for_end(processes: KeeperProcesses) -> None:
    """Wait until keeper and init have ended; kill them if they take too long.

    Raises:
        SandboxError: They do not end even so.
    """
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while is_alive(processes.keeper) or is_alive(processes.init):
        if time.monotonic() > deadline:
            signal_process(processes.init, signal.SIGKILL)
            signal_process(processes.keeper, signal.SIGKILL)
        if time.monotonic() > deadline + 5:
            raise SandboxError(
                "cannot stop the sandbox: "
                f"its processes {processes.keeper.pid} and {processes.init.pid} survive SIGKILL",
                processes,
            )
        time.sleep(0.02)
