"""Keeper process of a sandbox: keeps it alive, and ends all of it when the keeper ends.

The keeper runs outside; its child, the init (`init_process.py`), is the first process of the
sandbox's PID namespace and the ancestor of all that runs in it. If the keeper is killed, the kernel
kills the init and with it everything else. Without namespaces, the init adopts orphans, and the
survivor of the two ends what is left (`kill_strays`). Started by `keeper_client.launch_keeper`.
"""

import os
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

import msgspec

from steward.core.errors import StewardError
from steward.core.processes import read_start_ticks
from steward.sandbox import layout, namespaces
from steward.sandbox.init_process import InitProcess
from steward.sandbox.spec import (
    KeeperProcesses,
    ProcessId,
    SandboxError,
    SandboxPlan,
)

REPORT_FD = 1
"""Descriptor on which the keeper reports, in one line, that the sandbox is up or why not."""


def main(argv: list[str]) -> NoReturn:
    """Run as ``python -m steward.sandbox.keeper DIRECTORY tied|detached``."""
    directory, mode = argv[1:3]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # all that runs inside would inherit it
    plan = layout.read_plan(directory)
    if mode == "detached" and os.fork():
        os._exit(0)  # the caller waits only for this process
    lock_fd = layout.lock_directory(directory)
    if lock_fd is None:
        _report_line(f"error a sandbox is up in {directory} already")
        os._exit(1)
    exit_code = SandboxKeeper(plan, lock_fd).run()
    os._exit(exit_code)


class SandboxKeeper:
    """The process outside that keeps a sandbox alive.

    Standard input is a pipe that closes when the caller ends. If the caller writes to it, the
    sandbox outlives the caller.

    Args:
        plan: The sandbox's plan.
        lock_fd: Descriptor that holds the directory's lock.
    """

    def __init__(self, plan: SandboxPlan, lock_fd: int) -> None:
        self.plan = plan
        self.lock_fd = lock_fd
        self.ends_with_caller = True
        self.init_pid = 0
        self.is_end_requested = False

    def run(self) -> int:
        """Start the init, and stay until it or the caller has ended."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, self._request_end)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        if self.plan.contained:
            namespaces.leave_namespaces(uid=os.geteuid(), gid=os.getegid())
        else:
            namespaces.adopt_orphans()
        alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
        self.init_pid = os.fork()
        if self.init_pid == 0:
            os.close(alive_write)
            _run_init(self.plan, alive_read)
        os.close(alive_read)
        self._write_process_ids()
        _release_descriptor(REPORT_FD)
        self._wait_for_init(wake_read)
        if not self.plan.contained:
            kill_strays(self.plan)
        if self.ends_with_caller and self._has_caller_ended():
            os.close(self.lock_fd)
            layout.remove_directory(self.plan.directory)
        return 0

    def _write_process_ids(self) -> None:
        """Write the process ids of keeper and init to ``keeper/pids.json``."""
        processes = KeeperProcesses(
            keeper=ProcessId(pid=os.getpid(), started=read_start_ticks(os.getpid())),
            init=ProcessId(pid=self.init_pid, started=read_start_ticks(self.init_pid)),
        )
        path = f"{self.plan.directory}/keeper/pids.json"
        with open(f"{path}.new", "wb") as file:
            file.write(msgspec.json.encode(processes))
        os.rename(f"{path}.new", path)

    def _wait_for_init(self, wake_read: int) -> None:
        """Wait until the init ends; end it if the caller ends or a signal asks to."""
        poller = select.poll()
        poller.register(wake_read, select.POLLIN)
        poller.register(0, select.POLLIN)
        is_end_sent = False
        while not self._has_init_ended():
            ready_fds = {fd for fd, _ in poller.poll()}
            if wake_read in ready_fds:
                os.read(wake_read, 512)
            if 0 in ready_fds:
                poller.unregister(0)
                self.ends_with_caller = not os.read(0, 16)
                if self.ends_with_caller:
                    os.kill(
                        self.init_pid, signal.SIGKILL if self.plan.contained else signal.SIGTERM
                    )
            elif self.is_end_requested and not is_end_sent:
                is_end_sent = True
                os.kill(self.init_pid, signal.SIGTERM)

    def _has_init_ended(self) -> bool:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == self.init_pid:
                return True
            if pid == 0:
                return False

    def _has_caller_ended(self) -> bool:
        poller = select.poll()
        poller.register(0, 0)
        return bool(poller.poll(0))

    def _request_end(self, _number: int, _frame: object) -> None:
        self.is_end_requested = True


def _run_init(plan: SandboxPlan, alive_fd: int) -> NoReturn:
    """Run the init in the keeper's child; never return."""
    exit_code = 1
    try:
        namespaces.die_with_parent(signal.SIGKILL if plan.contained else signal.SIGTERM)
        if select.select([alive_fd], [], [], 0)[0]:
            os._exit(1)  # the keeper ended before the call
        init = InitProcess(plan)
        init.start()
        _report_line("up")
        _release_descriptor(REPORT_FD)
        init.serve()
        exit_code = 0
    except StewardError as error:
        _report_line(f"error {error}")
    except OSError as error:
        _report_line(f"error {error.filename or 'the sandbox'}: {error.strerror}")
    except Exception:
        traceback.print_exc()  # to the log, which the caller shows the end of
    finally:
        if not plan.contained:
            kill_strays(plan, spared_pid=os.getppid())
        os._exit(exit_code)


def _report_line(line: str) -> None:
    os.write(REPORT_FD, line.replace("\n", " ").encode(errors="replace") + b"\n")


def _release_descriptor(fd: int) -> None:
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), fd)


def kill_strays(plan: SandboxPlan, spared_pid: int = 0) -> None:
    """Kill every process whose environment names this sandbox's slurm.conf.

    Args:
        plan: Plan of a sandbox without namespaces.
        spared_pid: A process to spare, besides this one.

    Raises:
        SandboxError: Some processes cannot be killed.
    """
    environ_entry = b"SLURM_CONF=" + os.fsencode(plan.slurm_conf)
    spared = {os.getpid(), spared_pid}
    for _ in range(100):
        pids = [
            pid
            for pid in _list_pids()
            if pid not in spared and _has_environ_entry(pid, environ_entry)
        ]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended
        time.sleep(0.02)
    raise SandboxError(f"cannot end all processes of the sandbox in {plan.directory}", plan)


def _list_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has_environ_entry(pid: int, environ_entry: bytes) -> bool:
    """Return True if a process's environment has this entry."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return environ_entry in file.read().split(b"\0")
    except OSError:
        return False  # it has ended, or belongs to another user


if __name__ == "__main__":
    main(sys.argv)
