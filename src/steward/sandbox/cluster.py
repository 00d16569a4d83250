"""Sandbox cluster as its users see it: bring it up, run programs in it, control its daemons.

`Sandbox` is the main class: `up` or `load` one, `run` programs inside, `stop_service` and
`start_service` its daemons, `configure` or `upgrade` Slurm, and take it `down`. `SandboxProcess` is
a running program, a Popen whose signals reach the program itself. The sandbox is laid out by
`layout.py` and kept alive by `keeper.py`; orders go to its init over a Unix socket
(`init_process.py`).
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from steward.sandbox import keeper_client, layout, namespaces
from steward.sandbox.init_process import InitOrder, InitReply
from steward.sandbox.keeper_client import detach_keeper, read_report, wait_for_end
from steward.sandbox.spec import (
    CONTROLLER,
    SandboxError,
    SandboxPlan,
    SandboxSpec,
    SandboxUser,
    is_alive,
)
from steward.slurm.settings import ClusterSettings

UP_TIMEOUT_S: Final = 120.0
DOWN_TIMEOUT_S: Final = 20.0
# The caller's variables for another Slurm must not reach this one's commands.
_FOREIGN_PREFIXES: Final = (
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCONTROL_",
    "SALLOC_",
)


def _ignore_line(_line: str) -> None:
    pass


class SandboxProcess(subprocess.Popen[Any]):
    """A program that runs in a sandbox.

    Signals go to the program itself, not to the process that enters the sandbox. The program is
    killed when the caller's side ends.

    Args:
        argv: Command line that enters the sandbox, see :meth:`Sandbox.make_command`.
        start_timeout_s: Time after which a program that has not begun counts as ended, in seconds.
        options: Options of subprocess.Popen.
    """

    def __init__(
        self, argv: Sequence[str], *, start_timeout_s: float = 10.0, **options: Any
    ) -> None:
        self._start_timeout_s = start_timeout_s
        super().__init__(argv, **options)

    @property
    def inner_pid(self) -> int:
        """Return its process id as seen from outside; 0 if it has not begun or has ended."""
        deadline = time.monotonic() + self._start_timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            children = _list_children(self.pid)
            if children:
                return children[0]
            time.sleep(0.005)
        return 0

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program inside; do nothing if it has ended."""
        pid = self.inner_pid
        if not pid:
            # It has ended; or it has not begun, and the entering process would still start it.
            super().send_signal(sig)
            return
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            return  # it ended in between


def _list_children(pid: int) -> list[int]:
    """List the child processes of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


class Sandbox:
    """A throwaway Slurm cluster.

    As a context manager, or without ``detached``, it lives no longer than the process that brought
    it up, however that ends. Create one with :meth:`up` or :meth:`load`.
    """

    def __init__(self, plan: SandboxPlan, keeper: subprocess.Popen[bytes] | None = None) -> None:
        self.plan = plan
        self._keeper = keeper

    @classmethod
    def up(
        cls,
        spec: SandboxSpec | None = None,
        *,
        detached: bool = False,
        report: Callable[[str], None] = _ignore_line,
    ) -> Self:
        """Bring up a cluster, and wait until it is ready for jobs.

        Args:
            spec: The cluster's properties; without a directory it uses a new temporary one.
            detached: Whether it lives on when the caller ends, until :meth:`down`.
            report: Called with progress lines of long work.

        Raises:
            SlurmNotInstalled: This Slurm is not available.
            SandboxError: The directory is in use, or a daemon does not come up.
        """
        plan, port_sockets = layout.prepare_directory(spec or SandboxSpec(), report)
        try:
            keeper = keeper_client.launch_keeper(plan, port_sockets, detached=detached)
        except BaseException:
            # If interrupted here, a keeper that was started sees its pipe close.
            with contextlib.suppress(SandboxError):
                layout.remove_directory(plan.directory)
            raise
        sandbox = cls(plan, None if detached else keeper)
        try:
            failure = read_report(keeper)
        except BaseException:
            keeper_client.abandon_keeper(keeper, plan.directory)
            raise
        if keeper.stdout is not None:
            keeper.stdout.close()
        if detached:
            detach_keeper(keeper)
        if failure:
            sandbox.down(keep=True)
            raise SandboxError(
                f"cannot start the sandbox: {failure} (logs: {plan.directory}/log)", plan
            )
        return sandbox

    @classmethod
    def load(cls, directory: str) -> Self:
        """Open a sandbox that another process brought up.

        Raises:
            SandboxError: The directory holds no sandbox.
        """
        return cls(layout.read_plan(directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def directory(self) -> str:
        """Return the sandbox's directory."""
        return self.plan.directory

    @property
    def slurm_conf(self) -> str:
        """Return the path of slurm.conf."""
        return self.plan.slurm_conf

    @property
    def spool(self) -> str:
        """Return slurmctld's StateSaveLocation, the same path inside and outside."""
        return self.plan.spool

    @property
    def users(self) -> dict[str, SandboxUser]:
        """Return the users who can submit, by name; only the calling user without root."""
        return {user.name: user for user in self.plan.users}

    @property
    def slurm_prefix(self) -> tuple[str, ...]:
        """Return the words that start Slurm's programs in their root directory, as root, inside."""
        return ("chroot", self.plan.root) if self.plan.root else ()

    def make_cluster_settings(self) -> ClusterSettings:
        """Return the [cluster.NAME] settings for a Steward that runs inside."""
        return ClusterSettings(
            spool=self.spool,
            slurm_conf=self.slurm_conf,
            slurm_bin=self.plan.slurm_bin,
            snapshot_interval_s=1.0,
        )

    def is_up(self) -> bool:
        """Return True if its keeper and init are alive."""
        processes = keeper_client.read_keepers(self.directory)
        return processes is not None and is_alive(processes.init)

    def make_environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of programs inside: the caller's, this cluster's, and ``env``."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIXES)}
        search_path = [
            os.path.join(sys.prefix, "bin"),
            *environment.get("PATH", os.defpath).split(":"),
        ]
        # Commands of another Slurm version precede the machine's; the machine's own come last.
        search_path.insert(0 if self.plan.root else len(search_path), self.plan.slurm_bin)
        environment["PATH"] = ":".join(dict.fromkeys([*search_path, "/usr/sbin", "/sbin"]))
        environment["SLURM_CONF"] = self.slurm_conf
        environment["STEWARD_SANDBOX"] = self.directory
        return environment | dict(env or {})

    def make_command(self, argv: Sequence[str], *, user: str = "", cwd: str = "") -> list[str]:
        """Return a command line for the host that runs ``argv`` in the sandbox.

        Args:
            argv: The program, looked up in PATH, and its arguments.
            user: User who runs it; if empty, the calling one.
            cwd: Working directory. If empty, the caller's; if that cannot be entered, the user's
                home.

        Raises:
            SandboxError: The sandbox is not up, or has no such user.
        """
        if user and user not in self.users and user not in ("root", self.plan.spec.slurm_user):
            names = ", ".join(self.users)
            raise SandboxError(f"unknown user {user!r}: the users of the sandbox are {names}", user)
        processes = keeper_client.read_keepers(self.directory)
        if processes is None or not is_alive(processes.init):
            raise SandboxError(
                f"no sandbox is up in {self.directory}: start it with `steward sandbox up`",
                self.directory,
            )
        init_pid = processes.init.pid if self.plan.contained else 0
        directory = cwd or (self.users[user].home if user in self.users else os.getcwd())
        python_command = [sys.executable, "-I", "-S", namespaces.__file__]
        return [*python_command, str(init_pid), user, directory, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> SandboxProcess:
        """Start a program inside; ``options`` are those of subprocess.Popen.

        Raises:
            SandboxError: The sandbox is not up, or has no such user.
        """
        command = self.make_command(argv, user=user, cwd=cwd)
        return SandboxProcess(command, env=self.make_environment(env), **options)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "",
        input: str | bytes | None = None,  # noqa: A002 - subprocess.run calls it so
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        check: bool = True,
        text: bool = True,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program inside and wait for it.

        Args:
            argv: The program and its arguments.
            user: User who runs it; if empty, the calling one.
            input: Data for its standard input.
            timeout_s: Time after which it is killed, in seconds.
            env: Additional environment variables.
            cwd: Working directory, see :meth:`make_command`.
            check: Whether an exit code other than 0 is an error.
            text: Whether output is str; otherwise bytes.

        Raises:
            SandboxError: The sandbox is not up, the program failed or took too long.
        """
        stdin: IO[bytes] | int = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.popen(
            argv,
            user=user,
            cwd=cwd,
            env=env,
            text=text,
            errors="surrogateescape" if text else None,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                stdout, stderr = process.communicate(input, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
                raise SandboxError(
                    f"{shlex.join(argv)} did not end within {timeout_s:g} s", argv
                ) from None
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            output = stderr if text else stderr.decode(errors="replace")
            raise SandboxError(
                f"{shlex.join(argv)} ended with {process.returncode}: {output.strip()}", argv
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def get_status(self) -> dict[str, int]:
        """Return the services by name with their process id inside; 0 for an ended one.

        Raises:
            SandboxError: The sandbox is not up.
        """
        return self._send_order(InitOrder(do="status")).running

    def stop_service(self, name: str, signal_number: int = signal.SIGTERM) -> None:
        """Send a signal to a service; after SIGTERM or SIGKILL, wait for its end.

        Args:
            name: ``slurmctld``, ``munged`` or ``slurmd.NODE``.
            signal_number: The signal.

        Raises:
            SandboxError: It is not running.
        """
        self._send_order(InitOrder(do="signal", service=name, number=signal_number))

    def start_service(self, name: str, *arguments: str) -> None:
        """Start a service again, with additional arguments.

        Raises:
            SandboxError: It is running, or has an unknown name.
        """
        self._send_order(InitOrder(do="start", service=name, arguments=arguments))

    def restart_service(self, name: str, *arguments: str) -> None:
        """Stop a service, if it runs, and start it; it may need a moment to answer.

        Args:
            name: ``slurmctld``, ``munged`` or ``slurmd.NODE``.
            arguments: Additional arguments.

        Raises:
            SandboxError: The name is unknown, or the service does not end.
        """
        if self.get_status().get(name):
            self.stop_service(name)
        self.start_service(name, *arguments)

    def configure(self, *lines: str) -> None:
        """Change slurm.conf; daemons apply it when they are started or reconfigured.

        Args:
            lines: Each replaces the lines that begin with the same word and ``=``, or is appended:
                ``MinJobAge=2``, ``NodeName=node1 …`` for that of all nodes.

        Raises:
            SandboxError: A line contains a line break.
        """
        layout.change_slurm_conf(self.plan, lines)

    def upgrade(self, version: str, *, report: Callable[[str], None] = _ignore_line) -> None:
        """Switch to another version of Slurm, for commands and for daemons started from now on.

        Running daemons keep the old version until they are restarted, in the caller's order. Jobs
        and all other state stay, as far as the new version can read them.

        Args:
            version: ``24.11`` or ``26.05``.
            report: Called with progress lines of long work.

        Raises:
            SlurmNotInstalled: This Slurm is not available.
            SandboxError: Root and namespaces are required, or the sandbox is not up.
        """
        self.plan = layout.upgrade_slurm(self.plan, version, report)
        self._send_order(InitOrder(do="plan"))

    def kill_controller(self) -> None:
        """Kill slurmctld with SIGKILL, as a crash would."""
        self.stop_service(CONTROLLER, signal.SIGKILL)

    def take_over(self, *, timeout_s: float = 30.0) -> None:
        """Let the backup controller take over, and wait until it answers.

        Args:
            timeout_s: Time-out, in seconds.

        Raises:
            SandboxError: There is no second controller, or it does not answer.
        """
        if not self.plan.spec.backup:
            raise SandboxError("this sandbox has no second controller", self.directory)
        self.run(["scontrol", "takeover"], check=False, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        # A standby controller rejects queries.
        while self.run(["squeue", "-h"], check=False, timeout_s=timeout_s).returncode:
            if time.monotonic() > deadline:
                raise SandboxError("the second slurmctld does not answer", self.directory)
            time.sleep(0.05)

    def restart_controller(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> None:
        """Stop slurmctld, if it runs, start it, and wait until it answers.

        Args:
            arguments: Additional arguments; ``-c`` discards every job and all other state.
            timeout_s: Time-out, in seconds.

        Raises:
            SandboxError: It does not answer.
        """
        self.restart_service(CONTROLLER, *arguments)
        deadline = time.monotonic() + timeout_s
        while self.run(["scontrol", "ping"], check=False).returncode:
            if time.monotonic() > deadline:
                raise SandboxError("slurmctld does not answer after its restart", self.directory)
            time.sleep(0.05)

    def down(self, *, keep: bool = False) -> None:
        """End everything and remove the directory; harmless if it has ended already.

        Args:
            keep: Whether to keep the directory with its logs.

        Raises:
            SandboxError: Something does not end.
        """
        processes = keeper_client.read_keepers(self.directory)
        if self._keeper is not None:
            keeper_client.end_keeper(self._keeper, keep=keep)
        elif processes is not None and is_alive(processes.keeper):
            keeper_client.signal_process(processes.keeper, signal.SIGTERM)
        if processes is not None:
            wait_for_end(processes)
        if not keep:
            layout.remove_directory(self.directory)

    def _send_order(self, order: InitOrder) -> InitReply:
        """Send an order to the init; return its reply."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(60)
                sock.connect(self.plan.control_socket)
                sock.sendall(msgspec.json.encode(order) + b"\n")
                with sock.makefile("rb") as stream:
                    reply = msgspec.json.decode(stream.readline(), type=InitReply)
        except (OSError, msgspec.MsgspecError) as error:
            raise SandboxError(f"the sandbox does not answer: {error}", self.directory) from error
        if reply.error:
            raise SandboxError(reply.error, order)
        return reply
