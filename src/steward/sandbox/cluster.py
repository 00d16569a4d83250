"""A sandbox as its users hold it: up, run something inside, order its daemons about, down."""

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
from steward.sandbox.init_process import Answer, Order
from steward.sandbox.keeper_client import let_stay, report_of, wait_for_end
from steward.sandbox.spec import (
    CONTROLLER,
    Plan,
    SandboxError,
    SandboxSpec,
    User,
    is_alive,
)
from steward.slurm.settings import ClusterSettings

UP_TIMEOUT_S: Final = 120.0
DOWN_TIMEOUT_S: Final = 20.0
# What a caller has set for another Slurm must not reach this one's commands.
_FOREIGN: Final = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SALLOC_")


def _silent(_line: str) -> None:
    pass


class Inside(subprocess.Popen[Any]):
    """A program that runs in a sandbox.

    Signals go to the program itself, not to what stands between, and it ends
    by SIGKILL when the caller's side of it does.

    Args:
        argv: Command line that enters the sandbox, see :meth:`Sandbox.command`.
        begins_within_s: Time after which a program that has not begun counts as ended, in seconds.
        options: Options of subprocess.Popen.
    """

    def __init__(
        self, argv: Sequence[str], *, begins_within_s: float = 10.0, **options: Any
    ) -> None:
        self._begins_within_s = begins_within_s
        super().__init__(argv, **options)

    @property
    def inner_pid(self) -> int:
        """Its process id as the caller's side sees it; 0 if it has not begun or has ended."""
        deadline = time.monotonic() + self._begins_within_s
        while self.poll() is None and time.monotonic() < deadline:
            children = _children(self.pid)
            if children:
                return children[0]
            time.sleep(0.005)
        return 0

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program inside; nothing happens if it has ended."""
        pid = self.inner_pid
        if not pid:
            # It has ended; or it has not begun, and what stands between would begin it yet.
            super().send_signal(sig)
            return
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            return  # it ended in between


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


class Sandbox:
    """A throwaway Slurm cluster.

    As a context manager, or without ``detached``, it lives no longer than the
    process that brought it up, however that ends. Take one from :meth:`up` or
    :meth:`load`.
    """

    def __init__(self, plan: Plan, keeper: subprocess.Popen[bytes] | None = None) -> None:
        self.plan = plan
        self._keeper = keeper

    @classmethod
    def up(
        cls,
        spec: SandboxSpec | None = None,
        *,
        detached: bool = False,
        say: Callable[[str], None] = _silent,
    ) -> Self:
        """Bring a cluster up; it is ready for jobs when this returns.

        Args:
            spec: What is asked for; in a new temporary directory if it names none.
            detached: Whether it lives on when the caller ends, until :meth:`down`.
            say: Is told, a line at a time, about work that takes long.

        Raises:
            SlurmMissing: There is no such Slurm.
            SandboxError: The directory is in use, or a daemon does not come up.
        """
        plan, ports = layout.prepare(spec or SandboxSpec(), say)
        try:
            keeper = keeper_client.launch(plan, ports, detached=detached)
        except BaseException:
            # Interrupted in here: a keeper that was started all the same sees its pipe close.
            with contextlib.suppress(SandboxError):
                layout.remove(plan.directory)
            raise
        sandbox = cls(plan, None if detached else keeper)
        try:
            error = report_of(keeper)
        except BaseException:
            keeper_client.abandon(keeper, plan.directory)
            raise
        if keeper.stdout is not None:
            keeper.stdout.close()
        if detached:
            let_stay(keeper)
        if error:
            sandbox.down(keep=True)
            raise SandboxError(
                f"the sandbox did not come up: {error} (logs are in {plan.directory}/log)", plan
            )
        return sandbox

    @classmethod
    def load(cls, directory: str) -> Self:
        """A sandbox that was brought up before, by another process.

        Raises:
            SandboxError: There is none in the directory.
        """
        return cls(layout.read(directory))

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
        """Where everything is."""
        return self.plan.directory

    @property
    def slurm_conf(self) -> str:
        """Path of slurm.conf."""
        return self.plan.slurm_conf

    @property
    def spool(self) -> str:
        """StateSaveLocation of slurmctld, the same path inside and outside."""
        return self.plan.spool

    @property
    def users(self) -> dict[str, User]:
        """Who can submit, by name; the calling user alone where it could have no others."""
        return {user.name: user for user in self.plan.users}

    @property
    def slurm_prefix(self) -> tuple[str, ...]:
        """Words that start Slurm's programs in their root directory, as root, inside."""
        return ("chroot", self.plan.root) if self.plan.root else ()

    def cluster_settings(self) -> ClusterSettings:
        """The [cluster.NAME] with which Steward, run inside, keeps this cluster's books."""
        return ClusterSettings(
            spool=self.spool,
            slurm_conf=self.slurm_conf,
            slurm_bin=self.plan.slurm_bin,
            snapshot_interval_s=1.0,
        )

    def is_up(self) -> bool:
        """Whether its keeper and init live."""
        keepers = keeper_client.keepers(self.directory)
        return keepers is not None and is_alive(keepers.init)

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a program inside is given: the caller's own, this cluster's, and ``env``."""
        base = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        path = [os.path.join(sys.prefix, "bin"), *base.get("PATH", os.defpath).split(":")]
        # Another version's commands go before the machine's; the machine's own come last.
        path.insert(0 if self.plan.root else len(path), self.plan.slurm_bin)
        base["PATH"] = ":".join(dict.fromkeys([*path, "/usr/sbin", "/sbin"]))
        base["SLURM_CONF"] = self.slurm_conf
        base["STEWARD_SANDBOX"] = self.directory
        return base | dict(env or {})

    def command(self, argv: Sequence[str], *, user: str = "", cwd: str = "") -> list[str]:
        """The command line, to be run outside, that runs ``argv`` inside.

        Args:
            argv: The program, looked up in PATH, and its arguments.
            user: Who runs it; the calling user if empty.
            cwd: Working directory; the caller's if empty, or the user's home if that
                cannot be entered.

        Raises:
            SandboxError: The sandbox is not up, or has no such user.
        """
        if user and user not in self.users and user not in ("root", self.plan.spec.slurm_user):
            known = ", ".join(self.users)
            raise SandboxError(f"the sandbox has no user {user!r}, only {known}", user)
        keepers = keeper_client.keepers(self.directory)
        if keepers is None or not is_alive(keepers.init):
            raise SandboxError(f"no sandbox is up in {self.directory}", self.directory)
        init = keepers.init.pid if self.plan.contained else 0
        where = cwd or (self.users[user].home if user in self.users else os.getcwd())
        enter = [sys.executable, "-I", "-S", namespaces.__file__]
        return [*enter, str(init), user, where, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Inside:
        """Start a program inside; ``options`` are those of subprocess.Popen.

        Raises:
            SandboxError: The sandbox is not up, or has no such user.
        """
        command = self.command(argv, user=user, cwd=cwd)
        return Inside(command, env=self.environment(env), **options)

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
            user: Who runs it; the calling user if empty.
            input: Given to its standard input.
            timeout_s: After so many seconds it is killed.
            env: Variables beside the environment's.
            cwd: Working directory, see :meth:`command`.
            check: Whether an exit code other than 0 is an error.
            text: Whether output is str; bytes if not.

        Raises:
            SandboxError: The sandbox is not up, the program failed or took too long.
        """
        pipe: IO[bytes] | int = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.popen(
            argv,
            user=user,
            cwd=cwd,
            env=env,
            text=text,
            errors="surrogateescape" if text else None,
            stdin=pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                out, err = process.communicate(input, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise SandboxError(
                    f"{shlex.join(argv)} did not end within {timeout_s:g} s", argv
                ) from None
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            said = err if text else err.decode(errors="replace")
            raise SandboxError(
                f"{shlex.join(argv)} ended with {process.returncode}: {said.strip()}", argv
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def status(self) -> dict[str, int]:
        """The services by name, with their process id inside; 0 for one that has ended.

        Raises:
            SandboxError: The sandbox is not up.
        """
        return self._order(Order(do="status")).running

    def stop_service(self, name: str, number: int = signal.SIGTERM) -> None:
        """Send a service a signal; with SIGTERM or SIGKILL, return when it has ended.

        Args:
            name: ``slurmctld``, ``munged`` or ``slurmd.NODE``.
            number: The signal.

        Raises:
            SandboxError: It is not running.
        """
        self._order(Order(do="signal", service=name, number=number))

    def start_service(self, name: str, *arguments: str) -> None:
        """Start a service again, with further arguments.

        Raises:
            SandboxError: It is running, or there is none of that name.
        """
        self._order(Order(do="start", service=name, arguments=arguments))

    def restart_service(self, name: str, *arguments: str) -> None:
        """Stop a service, if it runs, and start it; it may take a moment to answer.

        Args:
            name: ``slurmctld``, ``munged`` or ``slurmd.NODE``.
            arguments: Beside the usual ones.

        Raises:
            SandboxError: There is none of that name, or it does not end.
        """
        if self.status().get(name):
            self.stop_service(name)
        self.start_service(name, *arguments)

    def configure(self, *lines: str) -> None:
        """Change slurm.conf; daemons that are started or reconfigured from now on follow it.

        Args:
            lines: Each is put in the place of those that begin with the same word and ``=``, or
                behind all others: ``MinJobAge=2``, ``NodeName=node1 …`` for that of all nodes.

        Raises:
            SandboxError: One that would break out of its line.
        """
        layout.change(self.plan, lines)

    def upgrade(self, version: str, *, say: Callable[[str], None] = _silent) -> None:
        """Have another version of Slurm from now on: its commands, and each daemon that is started.

        Daemons that run are of the old one until they are restarted, in an order that is the
        caller's. Jobs and all other state stay, as far as the new version can read them.

        Args:
            version: ``24.11`` or ``26.05``.
            say: Is told, a line at a time, about work that takes long.

        Raises:
            SlurmMissing: There is no such Slurm.
            SandboxError: It takes root and namespaces, or the sandbox is not up.
        """
        self.plan = layout.upgrade(self.plan, version, say)
        self._order(Order(do="plan"))

    def kill_controller(self) -> None:
        """End slurmctld by SIGKILL, as a crash would."""
        self.stop_service(CONTROLLER, signal.SIGKILL)

    def take_over(self, *, timeout_s: float = 30.0) -> None:
        """Have the second controller, which stands by, be the one; it answers when this returns.

        Args:
            timeout_s: How long it may take, in seconds.

        Raises:
            SandboxError: There is no second controller, or it does not answer.
        """
        if not self.plan.spec.backup:
            raise SandboxError("this sandbox has no second controller", self.directory)
        self.run(["scontrol", "takeover"], check=False, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        # Who only stands by refuses to say.
        while self.run(["squeue", "-h"], check=False, timeout_s=timeout_s).returncode:
            if time.monotonic() > deadline:
                raise SandboxError("the second slurmctld does not answer", self.directory)
            time.sleep(0.05)

    def restart_controller(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> None:
        """Stop slurmctld, if it runs, and start it; it answers when this returns.

        Args:
            arguments: Beside the usual ones; ``-c`` forgets every job and all other state.
            timeout_s: How long it may take, in seconds.

        Raises:
            SandboxError: It does not answer.
        """
        self.restart_service(CONTROLLER, *arguments)
        deadline = time.monotonic() + timeout_s
        while self.run(["scontrol", "ping"], check=False).returncode:
            if time.monotonic() > deadline:
                raise SandboxError("slurmctld does not answer again", self.directory)
            time.sleep(0.05)

    def down(self, *, keep: bool = False) -> None:
        """End everything and remove the directory; harmless when it has ended already.

        Args:
            keep: Whether the directory, with its logs, stays.

        Raises:
            SandboxError: Something does not end.
        """
        keepers = keeper_client.keepers(self.directory)
        if self._keeper is not None:
            keeper_client.end(self._keeper, keep=keep)
        elif keepers is not None and is_alive(keepers.keeper):
            keeper_client.send(keepers.keeper, signal.SIGTERM)
        if keepers is not None:
            wait_for_end(keepers)
        if not keep:
            layout.remove(self.directory)

    def _order(self, order: Order) -> Answer:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(60)
                sock.connect(self.plan.control_socket)
                sock.sendall(msgspec.json.encode(order) + b"\n")
                with sock.makefile("rb") as stream:
                    answer = msgspec.json.decode(stream.readline(), type=Answer)
        except (OSError, msgspec.MsgspecError) as error:
            raise SandboxError(f"the sandbox does not answer: {error}", self.directory) from error
        if answer.error:
            raise SandboxError(answer.error, order)
        return answer
