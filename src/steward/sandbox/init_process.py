"""Init process of a sandbox: mounts files, starts and reaps the services, and executes orders.

`InitProcess` is the first process of the sandbox's PID namespace. `InitOrder` and `InitReply` are
the JSON lines on its control socket, exchanged with `Sandbox` in `cluster.py`: status, signal,
start, or a new plan. `EtcFiles` bind-mounts the sandbox's passwd, group and hosts files over the
machine's; the functions at the end mount Slurm's root directory and open closed directories.
"""

import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from typing import Final

import msgspec

from steward.sandbox import configuration, layout, namespaces
from steward.sandbox.configuration import MARIADB, SLURMDBD, get_mariadb_socket, list_node_names
from steward.sandbox.namespaces import MS_BIND, MS_REC, mount
from steward.sandbox.spec import (
    BACKUP_ADDRESS,
    BACKUP_CONTROLLER,
    CONTROLLER,
    SandboxError,
    SandboxPlan,
    SandboxService,
)

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02
_RETRY_MS: Final = 200
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class InitOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the init, one JSON line on its socket.

    Attributes:
        do: ``status``, ``signal``, ``start``, or ``plan`` to read the plan again.
        service: The service's name.
        number: The signal; the reply comes when the service has ended.
        arguments: Additional arguments of the service.
    """

    do: str
    service: str = ""
    number: int = 0
    arguments: tuple[str, ...] = ()


class InitReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the init.

    Attributes:
        error: Why the order failed; "" if it succeeded.
        running: The services by name, with their process id inside; 0 for one that has ended.
    """

    error: str = ""
    running: dict[str, int] = {}


class InitProcess:
    """The init process: every process of the sandbox descends from it."""

    def __init__(self, plan: SandboxPlan) -> None:
        self.plan = plan
        self.running: dict[str, int] = {}
        self.ended: dict[int, int] = {}
        self.mounted_roots: set[str] = set()
        self.is_end_requested = False
        self._listener: socket.socket | None = None
        self._etc_files: EtcFiles | None = None

    def start(self) -> None:
        """Start all services, and wait until the nodes are idle.

        Raises:
            SandboxError: A service ended at once, or the nodes do not come up.
            OSError: Something cannot be mounted.
        """
        self._wake_fd, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._request_end)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        if self.plan.contained:
            namespaces.set_up_namespace(self.plan.host)
            self._etc_files = _mount_all(self.plan)
            self.mounted_roots.add(self.plan.root)
        else:
            namespaces.adopt_orphans()
        for service in self.plan.services:
            self._start_service(service)
        self._wait_until(self.plan.services[-1].name, self._are_nodes_idle)
        self._listener = self._open_control_socket()

    def _start_service(self, service: SandboxService) -> None:
        """Start a service, and wait until the next ones may start."""
        if service.name == MARIADB:
            self._run_command(
                configuration.make_install_command(self.plan.directory, self.plan.slurm_user)
            )
        self._spawn(service)
        if service.name == "munged":
            self._wait_until(service.name, lambda: os.path.exists(self.plan.munge_socket))
        elif service.name == MARIADB:
            socket_path = get_mariadb_socket(self.plan.directory)
            self._wait_until(service.name, lambda: os.path.exists(socket_path))
        elif service.name == SLURMDBD:
            self._wait_until(service.name, lambda: _is_listening(self.plan.slurmdbd_port))
            for words in configuration.list_sacctmgr_commands(self.plan):
                self._run_command((f"{self.plan.slurm_bin}/sacctmgr", "-i", *words))
        elif service.name == CONTROLLER:
            self._wait_until(service.name, lambda: _is_listening(self.plan.ports[0]))
        elif service.name == BACKUP_CONTROLLER:
            self._wait_until(
                service.name, lambda: _is_listening(self.plan.ports[0], BACKUP_ADDRESS)
            )

    def _run_command(self, argv: tuple[str, ...]) -> str:
        """Run a command to its end; return its output.

        Raises:
            SandboxError: It failed, or took too long.
        """
        # Run one command at a time: reaping in parallel would take the result from subprocess.
        try:
            result = subprocess.run(
                argv,
                env={"SLURM_CONF": self.plan.slurm_conf, "LC_ALL": "C", "PATH": _PATH},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=START_TIMEOUT_S,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            output = (error.stdout + error.stderr).strip().splitlines() or ["no output"]
            raise SandboxError(f"{' '.join(argv)} failed: {output[-1]}", argv) from None
        except subprocess.TimeoutExpired:
            raise SandboxError(
                f"{' '.join(argv)} did not end within {START_TIMEOUT_S:.0f} s", argv
            ) from None
        return result.stdout

    def serve(self) -> None:
        """Reap services and execute orders until asked to end."""
        if self._listener is None:
            raise SandboxError("the sandbox was not started", self.plan)
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        if self._etc_files is not None:
            poller.register(self._etc_files.changes, select.POLLPRI)
        while not self.is_end_requested:
            are_all_bound = self._etc_files is None or self._etc_files.restore_binds()
            ready_fds = {fd for fd, _ in poller.poll(None if are_all_bound else _RETRY_MS)}
            if self._wake_fd in ready_fds:
                os.read(self._wake_fd, 512)
            self._reap()
            if self._listener.fileno() in ready_fds:
                self._handle_order(self._listener)
        self._stop_services()

    def _request_end(self, _number: int, _frame: object) -> None:
        self.is_end_requested = True

    def _spawn(self, service: SandboxService, extra_arguments: tuple[str, ...] = ()) -> None:
        """Start a service's process with its log."""
        argv = [*service.argv, *extra_arguments]
        env = {
            "PATH": _PATH,
            "SLURM_CONF": self.plan.slurm_conf,
            "HOME": "/",
            "LC_ALL": "C",
        } | service.env
        log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.running[service.name] = os.posix_spawn(
            argv[0],
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, service.log, log_flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=namespaces.IGNORED_BY_PYTHON,
        )

    def _reap(self) -> None:
        """Reap ended processes, and record ended services."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, service_pid in self.running.items():
                if service_pid == pid:
                    self.running[name] = 0
                    self.ended[pid] = os.waitstatus_to_exitcode(status)

    def _wait_until(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Wait until a service is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            self._reap()
            if self.is_end_requested:
                raise SandboxError("the sandbox was stopped before it was up", self.plan)
            ended_services = [
                service_name for service_name, pid in self.running.items() if pid == 0
            ]
            if ended_services:
                raise SandboxError(
                    f"{ended_services[0]} has ended: {self._get_last_error(ended_services[0])}",
                    self.plan,
                )
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"{name} is not ready after {START_TIMEOUT_S:.0f} s: "
                    f"{self._get_last_error(name)}",
                    self.plan,
                )
            time.sleep(_POLL_S)

    def _get_last_error(self, name: str) -> str:
        """Return the last error line in a service's log."""
        log_path = f"{self.plan.directory}/log/{name}"
        for path in (f"{log_path}.log", f"{log_path}.out"):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    lines = [line.strip() for line in file if line.strip()]
            except FileNotFoundError:
                continue
            if lines:
                errors = [line for line in lines if "error" in line or "fatal" in line]
                return f"{(errors or lines)[-1]} (see {path})"
        return "no output"

    def _are_nodes_idle(self) -> bool:
        # Only nodes with a slurmd: a spec may add others without one.
        names = ",".join(list_node_names(self.plan.spec))
        command = f"{self.plan.slurm_bin}/sinfo"
        argv = (command, "-h", "-N", "-p", "main", "-n", names, "-o", "%T")
        try:
            return self._run_command(argv).split() == ["idle"] * self.plan.spec.nodes
        except SandboxError:
            return False  # slurmctld is not ready

    def _open_control_socket(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.plan.control_socket)
        listener.listen(16)
        return listener

    def _handle_order(self, listener: socket.socket) -> None:
        """Read an order from the control socket, execute it and reply."""
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            connection.settimeout(STOP_TIMEOUT_S)
            try:
                order = msgspec.json.decode(stream.readline(), type=InitOrder)
                error = self._execute_order(order)
                reply = InitReply(error=error, running=self.running)
                stream.write(msgspec.json.encode(reply) + b"\n")
                stream.flush()
            except (OSError, msgspec.MsgspecError):
                return  # the client has gone or sent nonsense: no reply

    def _execute_order(self, order: InitOrder) -> str:
        """Execute an order; return the error, or ""."""
        if order.do == "status":
            return ""
        if order.do == "plan":
            return self._reload_plan()
        service = next(
            (candidate for candidate in self.plan.services if candidate.name == order.service), None
        )
        if service is None:
            return f"unknown service {order.service!r}"
        if order.do == "start":
            if self.running.get(service.name):
                return f"{service.name} is running"
            self._spawn(service, order.arguments)
            return ""
        if order.do == "signal":
            return self._signal_service(service.name, order.number)
        return f"unknown order {order.do!r}"

    def _reload_plan(self) -> str:
        """Read the plan again; running daemons stay as they are."""
        try:
            plan = layout.read_plan(self.plan.directory)
            if self._etc_files is not None and plan.root and plan.root not in self.mounted_roots:
                _enter_root(plan, self._etc_files)
                self.mounted_roots.add(plan.root)
        except (SandboxError, OSError) as error:
            return str(error)
        self.plan = plan
        return ""

    def _signal_service(self, name: str, signal_number: int) -> str:
        """Send a service a signal, and wait for its end; return the error, or ""."""
        pid = self.running.get(name, 0)
        if not pid:
            return f"{name} is not running"
        os.kill(pid, signal_number)
        deadline = time.monotonic() + 30
        while self.running[name] and signal_number in (signal.SIGTERM, signal.SIGKILL):
            if time.monotonic() > deadline:
                return f"{name} does not end"
            time.sleep(_POLL_S)
            self._reap()
        return ""

    def _stop_services(self) -> None:
        # slurmctld first, with time to save its state; the others need no care.
        for name in sorted(
            self.running, key=lambda name: name not in (CONTROLLER, BACKUP_CONTROLLER)
        ):
            if self.running.get(name):
                os.kill(self.running[name], signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(self.running.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._reap()


def _is_listening(port: int, address: str = "127.0.0.1") -> bool:
    """Return True if a TCP port accepts connections."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


class EtcFiles:
    """The sandbox's passwd, group and hosts files, bind-mounted over the machine's.

    A program that replaces /etc/passwd on the machine removes the bind mount in every mount
    namespace. So the files are bound again whenever mounts change, except where another /etc was
    mounted in the sandbox.

    Args:
        directory: Directory of the sandbox's own files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._binds: list[tuple[str, str, os.stat_result]] = []
        # Readable by priority when mounts of this namespace change, see proc_pid_mountinfo(5).
        self.changes = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)

    def bind_below(self, root: str) -> None:
        """Bind the files below a root directory; "" for the machine's.

        Raises:
            OSError: It is not permitted.
        """
        for name in ("passwd", "group", "hosts"):
            etc_stat = os.stat(f"{root}/etc")
            self._binds.append((f"{self._directory}/{name}", f"{root}/etc/{name}", etc_stat))
        self.restore_binds()

    def restore_binds(self) -> bool:
        """Bind each file that is not bound; return True if all are bound now.

        Raises:
            OSError: It is not permitted.
        """
        are_all_bound = True
        for source, target, etc_stat in self._binds:
            try:
                if not os.path.samestat(os.stat(os.path.dirname(target)), etc_stat):
                    continue
                if os.path.exists(source) and not os.path.samefile(source, target):
                    mount(source, target, flags=MS_BIND)
            except FileNotFoundError:
                are_all_bound = False  # being replaced right now
        return are_all_bound


def _mount_all(plan: SandboxPlan) -> EtcFiles:
    """Mount the sandbox's files over the machine's."""
    etc_files = EtcFiles(f"{plan.directory}/etc")
    etc_files.bind_below("")
    # The machine's nscd would answer for its own users before the sandbox's files are read.
    if os.path.isdir("/run/nscd") and os.geteuid() == 0:
        mount("tmpfs", "/run/nscd", "tmpfs", data="mode=755")
    # First, so that directories bound into another root are open there, too.
    for directory in plan.opened_directories:
        _open_to_all(directory)
    if plan.root:
        _enter_root(plan, etc_files)
    return etc_files


def _enter_root(plan: SandboxPlan, etc_files: EtcFiles) -> None:
    """Mount the sandbox's users, directories and devices in another root directory."""
    etc_files.bind_below(plan.root)
    for name in ("dev", "sys"):
        mount(f"/{name}", f"{plan.root}/{name}", flags=MS_BIND | MS_REC)
    mount("proc", f"{plan.root}/proc", "proc")
    mount("/tmp", f"{plan.root}/tmp", flags=MS_BIND | MS_REC)  # noqa: S108 - jobs expect the same
    for directory in plan.opened_directories:
        path = plan.root + directory
        if os.path.isdir(path) and not os.stat(path).st_mode & stat.S_IXOTH:
            _open_to_all(path)
    target = plan.root + plan.directory
    os.makedirs(target, exist_ok=True)
    mount(plan.directory, target, flags=MS_BIND)


def _open_to_all(directory: str) -> None:
    """Let all users pass through a directory, without changing it for the machine.

    An empty directory that can be passed but not listed is mounted over it, and each of its entries
    is bind-mounted there under its name.
    """
    # By descriptor: the path, perhaps the sandbox's too, is about to be covered.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount("tmpfs", directory, "tmpfs", data="mode=711,size=1m")
        for entry in os.scandir(fd):
            source, target = f"/proc/self/fd/{fd}/{entry.name}", f"{directory}/{entry.name}"
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(source), target)
                continue
            if stat.S_ISDIR(mode):
                os.mkdir(target, 0o700)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            mount(source, target, flags=MS_BIND | MS_REC)
    finally:
        os.close(fd)
