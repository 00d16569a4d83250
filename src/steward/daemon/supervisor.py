"""Supervisor of the daemon: forks one process per worker, restarts it, and reports to systemd.

`SystemdNotifier` implements sd_notify(3): datagrams of ``NAME=value`` lines to the socket in
``NOTIFY_SOCKET``; without that variable it does nothing.

`WorkerSpec` describes a worker: its name, main function and heartbeat time-out. `Supervisor.run`
starts the workers in order, restarts one that ends or hangs with a back-off, reloads the
configuration on SIGHUP or request (all workers restart), reports each worker's status
(`WorkerLine`), and ends all at SIGTERM. Workers are forked without exec, to share the memory of
loaded modules; heartbeats and last errors are in shared memory, too. A worker that cannot even be
killed (stuck on a dead mount) is left behind at shutdown. If the supervisor is killed, the kernel
ends its workers.
"""

import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NoReturn

import msgspec

from steward.admin.status.workers import WorkerLine
from steward.core import logs
from steward.core.errors import StewardError
from steward.core.files import StatusWriteError
from steward.core.processes import adopt_orphans, exit_with_parent, kill_descendants
from steward.core.waits import Backoff, Stop
from steward.daemon.reload import ReloadListener, ReloadReply

log = logging.getLogger(__name__)

JOURNAL = "journal"
"""Name of the worker that writes the journal; others start after it."""


class SystemdNotifier:
    """Sends READY, RELOADING, STOPPING and WATCHDOG to systemd, if it listens."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(microseconds) / 2e6 if microseconds.isdigit() else 0.0
        self._watchdog_due_at = 0.0

    def send(self, *lines: str) -> None:
        """Send lines to systemd; log a failure and go on."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(1.0)
                out.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self._address, error)

    def send_ready(self) -> None:
        """Report that all workers run."""
        self.send("READY=1", f"STATUS=running, process {os.getpid()}")

    def send_reloading(self) -> None:
        """Report that the configuration is being reloaded; :meth:`send_ready` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def send_stopping(self) -> None:
        """Report that the daemon is stopping."""
        self.send("STOPPING=1")

    def send_watchdog(self) -> None:
        """Send the watchdog's keep-alive when it is due."""
        now = time.monotonic()
        if self._watchdog_s and now >= self._watchdog_due_at:
            self._watchdog_due_at = now + self._watchdog_s
            self.send("WATCHDOG=1")


_PR_SET_NAME = 15
_HEARTBEAT_STAMP = struct.Struct("=d")
_LAST_ERROR = struct.Struct("=H510s")
"""A worker's last error: its length, and the text."""
_BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_STABLE_S = 30.0
"""Time of running after which a worker's back-off is reset, in seconds."""
_STOP_LAST_S = 0.7
"""Longest time for the ``last`` workers to end, in seconds."""
_HEAP_END_BYTES = 100_000
"""Size of an allocation at the end of the heap, in bytes; malloc maps larger ones elsewhere."""
_LARGEST_CHUNK_BYTES = 4096
"""Size of the largest free chunks to fill, in bytes: a page."""
_CHUNK_STEP_BYTES = 16
"""Difference between the sizes of chunks, in bytes."""
_MAX_FILLED_BYTES = 8 * 2**20
"""Maximum size of all chunks to fill, in bytes."""
_READY_S = 20.0
"""Longest time before the daemon reports readiness, in seconds."""

SendHeartbeat = Callable[[], None]
"""Heartbeat: the worker calls it regularly to show that it is alive."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: the work of one process.

    Attributes:
        name: Its name in logs and in ps.
        run: Works until the Stop is raised; sends a heartbeat at least every ``hang_s`` / 2.
        after: Workers that should have sent a heartbeat before this one starts.
        last: Whether it is stopped only after all others have ended.
        hang_s: Seconds without a heartbeat after which it counts as hung.
    """

    name: str
    run: Callable[[Stop, SendHeartbeat], None]
    after: tuple[str, ...] = ()
    last: bool = False
    hang_s: float = 60.0


class SupervisorTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting times of a supervisor, in seconds.

    Attributes:
        tick_s: Longest time between two checks of the workers.
        after_s: Longest time that a worker waits for the workers that it starts after.
        stop_s: Longest time that workers may take to end before the supervisor kills them.
    """

    tick_s: float = 1.0
    after_s: float = 2.0
    stop_s: float = 4.0


class _WorkerState:
    """State of one worker in the supervisor."""

    def __init__(self, spec: WorkerSpec, slot: int) -> None:
        self.spec = spec
        self.slot = slot
        self.pid = 0
        self.started = 0.0
        self.restart_at = 0.0
        self.backoff = Backoff(0.1, 10.0)
        self.is_killed = False
        self.since: datetime | None = None
        self.restarts = 0
        self.error = ""
        self.error_at: datetime | None = None

    def make_status_line(self) -> WorkerLine:
        """Return the worker's status."""
        return WorkerLine(
            name=self.spec.name,
            pid=self.pid,
            since=self.since if self.pid else None,
            restarts=self.restarts,
            error=self.error,
            error_at=self.error_at,
        )


ReportStatus = Callable[[Sequence[WorkerLine]], None]
"""Callback that publishes the status of all workers."""


class Supervisor:
    """Runs workers until SIGTERM, and restarts those that end or hang.

    Args:
        workers: The workers, in the order in which to start them.
        reload: Called on SIGHUP and on request; returns the workers of the new configuration, or
            raises StewardError to keep the present ones.
        report_status: Called with the workers' status whenever it changes.
        listener: Accepts requests for a reload.
        timing: Waiting times. Defaults if None.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        reload: Callable[[], Sequence[WorkerSpec]] | None = None,
        report_status: ReportStatus = lambda _: None,
        listener: ReloadListener | None = None,
        *,
        timing: SupervisorTiming | None = None,
    ) -> None:
        self._listener = listener or ReloadListener()
        self._reload = reload
        self._report_status = report_status
        self._timing = timing or SupervisorTiming()
        self._reported: list[WorkerLine] = []
        self._unreported: list[WorkerLine] = []
        self._stop = Stop()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_reload_due = False
        self._notifier = SystemdNotifier()
        self._children: list[_WorkerState] = []
        self._is_ready = False
        self._started_at = time.monotonic()
        self._set_workers(workers)

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT; return the exit code."""
        self._install_signal_handlers()
        adopt_orphans()
        # A garbage collection would touch, and so copy, every page shared with the workers.
        gc.collect()
        _fill_free_chunks()
        gc.freeze()
        while not self._stop.is_set():
            self._reap()
            self._start_due()
            self._kill_hung()
            # Write the status before announcing readiness: a client may read it at once.
            self._report_changes()
            self._report_ready()
            self._notifier.send_watchdog()
            if self._is_reload_due:
                self._is_reload_due = False
                self._reload_workers()
            fds = self._listener.fds if self._is_ready else ()
            wait_s = self._timing.tick_s if self._is_ready else 0.05
            if self._stop.wait(wait_s, self._wake_read, *fds):
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 512)
                # A reload request that arrives while workers start waits until they are ready.
                if fds and self._listener.accept():
                    self._is_reload_due = True
        self._notifier.send_stopping()
        self._listener.close()
        unkillable = self._end_all()
        self._report_changes()
        if unkillable:
            log.error("cannot kill these processes: %s", ", ".join(unkillable))
        return 0

    def _set_workers(self, workers: Sequence[WorkerSpec]) -> None:
        """Replace the list of workers, keeping restart counts and errors of those that stay.

        A worker that could not be ended keeps its process, and starts again when that ends.
        """
        # New heartbeats: a worker of the former configuration may still run and beat.
        heartbeats = mmap.mmap(-1, max(1, len(workers)) * _HEARTBEAT_STAMP.size)
        last_errors = mmap.mmap(-1, max(1, len(workers)) * _LAST_ERROR.size)
        self._heartbeats, self._last_errors = heartbeats, last_errors
        old_by_name = {child.spec.name: child for child in self._children}
        self._children = [_WorkerState(spec, slot) for slot, spec in enumerate(workers)]
        for child in self._children:
            if child.spec.name in old_by_name:
                old = old_by_name[child.spec.name]
                child.restarts = old.restarts
                child.error, child.error_at = old.error, old.error_at
                child.pid, child.started, child.since = old.pid, old.started, old.since
                child.is_killed = bool(old.pid)

    def _install_signal_handlers(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        signal.signal(signal.SIGHUP, self._on_hangup)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_hangup(self, *_: object) -> None:
        self._is_reload_due = True

    def _get_heartbeat(self, child: _WorkerState) -> float:
        return float(
            _HEARTBEAT_STAMP.unpack_from(self._heartbeats, child.slot * _HEARTBEAT_STAMP.size)[0]
        )

    def _start_due(self) -> None:
        """Start workers that do not run and whose wait is over."""
        now = time.monotonic()
        alive = {child.spec.name for child in self._children if self._get_heartbeat(child)}
        for child in self._children:
            if child.pid or now < child.restart_at:
                continue
            missing = set(child.spec.after) - alive
            if missing and now - self._started_at < self._timing.after_s:
                continue
            self._start(child)

    def _start(self, child: _WorkerState) -> None:
        """Fork a worker's process."""
        _HEARTBEAT_STAMP.pack_into(self._heartbeats, child.slot * _HEARTBEAT_STAMP.size, 0.0)
        _LAST_ERROR.pack_into(self._last_errors, child.slot * _LAST_ERROR.size, 0, b"")
        child.started = time.monotonic()
        child.since = datetime.now(UTC)
        child.is_killed = False
        supervisor = os.getpid()
        # A signal between fork and the worker's own handlers would raise the supervisor's flag.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            _flush_output()
            pid = os.fork()
            if pid == 0:
                self._run_child(child, supervisor, old_mask)
        except Exception as error:
            # A process limit, no memory, a failing hook: the other workers go on.
            cause = error.strerror if isinstance(error, OSError) else repr(error)
            self._schedule_restart(child, f"could not be started: {cause}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        child.pid = pid
        log.debug("%s runs as process %d", child.spec.name, pid)

    def _run_child(
        self, child: _WorkerState, supervisor: int, mask: set[signal.Signals | int]
    ) -> NoReturn:
        """In the new process: run the worker, then exit, whatever happens."""
        code = 1
        try:
            code = self._run_worker(child, supervisor, mask)
        except BaseException:
            # The child must not go on as a second supervisor.
            log.exception("%s failed to start or stop", child.spec.name)
        finally:
            os._exit(code)

    def _run_worker(
        self, child: _WorkerState, supervisor: int, mask: set[signal.Signals | int]
    ) -> int:
        """In the new process: run the worker; return the exit code."""
        exit_with_parent(supervisor)
        self._listener.close_in_child()
        name = f"steward {child.spec.name}".encode()[:15]
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
        logs.set_log_worker(child.spec.name)
        stop = Stop()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        # A terminal's Ctrl-C reaches every process of the group; only the supervisor decides.
        # SIGIO comes when a writer meets a lease that is being dropped anyway.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGIO):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        heartbeats, heartbeat_offset = self._heartbeats, child.slot * _HEARTBEAT_STAMP.size
        last_errors, error_offset = self._last_errors, child.slot * _LAST_ERROR.size

        def say(text: str) -> int:
            data = text.encode("utf-8", "replace")[: _LAST_ERROR.size - 2]
            _LAST_ERROR.pack_into(last_errors, error_offset, len(data), data)
            return 1

        def beat() -> None:
            _HEARTBEAT_STAMP.pack_into(heartbeats, heartbeat_offset, time.monotonic())

        try:
            child.spec.run(stop, beat)
        except StewardError as error:
            if stop.is_set():
                log.debug("%s ended with: %s", child.spec.name, error)
                return 0
            log.error("%s: %s", child.spec.name, error)
            return say(str(error))
        except BaseException as error:
            log.exception("%s failed", child.spec.name)
            return say(f"{type(error).__name__}: {error}")
        finally:
            _flush_output()
        return 0

    def _reap(self) -> None:
        """Reap ended processes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self._children:
                if child.pid == pid:
                    self._handle_exit(child, status)

    def _handle_exit(self, child: _WorkerState, status: int) -> None:
        """Handle the end of a worker: schedule its restart, and end its children."""
        child.pid = 0
        _HEARTBEAT_STAMP.pack_into(self._heartbeats, child.slot * _HEARTBEAT_STAMP.size, 0.0)
        if self._stop.is_set():
            return
        if time.monotonic() - child.started > _STABLE_S:
            child.backoff.reset()
        code = os.waitstatus_to_exitcode(status)
        cause = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        length, text = _LAST_ERROR.unpack_from(self._last_errors, child.slot * _LAST_ERROR.size)
        hang_message = "it hung and was ended" if child.is_killed else ""
        self._schedule_restart(
            child, cause, text[:length].decode("utf-8", "replace") or hang_message
        )
        child.restarts += 1
        # Nothing else waits for the processes that it had started, or times them out.
        kill_descendants(os.getpid(), {other.pid for other in self._children})

    def _schedule_restart(self, child: _WorkerState, cause: str, error: str = "") -> None:
        """Restart a worker after its back-off.

        Args:
            child: The worker.
            cause: How it ended, for the log.
            error: Its own error message; "" for ``cause``.
        """
        wait_s = child.backoff.next_s()
        child.restart_at = time.monotonic() + wait_s
        child.error = error or cause
        child.error_at = datetime.now(UTC)
        log.warning("worker %s %s; restarting it in %.1f s", child.spec.name, cause, wait_s)

    def _report_changes(self) -> None:
        """Report the workers' status if it changed."""
        lines = [child.make_status_line() for child in self._children]
        if lines == self._reported:
            return
        try:
            self._report_status(lines)
        except StatusWriteError as error:
            # Retried at the next turn, and logged once.
            if lines != self._unreported:
                log.warning("cannot write the status file of the workers, retrying: %s", error)
            self._unreported = lines
        else:
            self._reported = lines

    def _kill_hung(self) -> None:
        """Kill workers without a recent heartbeat."""
        now = time.monotonic()
        for child in self._children:
            since = self._get_heartbeat(child) or child.started
            if child.pid and not child.is_killed and now - since > child.spec.hang_s:
                child.is_killed = True
                log.error(
                    "worker %s sent no heartbeat for %.0f s; ending process %d",
                    child.spec.name,
                    now - since,
                    child.pid,
                )
                os.kill(child.pid, signal.SIGKILL)

    def _report_ready(self) -> None:
        """Tell systemd once that all workers are ready."""
        if self._is_ready:
            return
        waiting = tuple(one.spec.name for one in self._children if not self._get_heartbeat(one))
        if not waiting or time.monotonic() - self._started_at > _READY_S:
            self._is_ready = True
            self._notifier.send_ready()
            self._listener.answer(ReloadReply(waiting=waiting))
            log.info("ready: %s", ", ".join(child.spec.name for child in self._children))

    def _reload_workers(self) -> None:
        """Reload the configuration and restart all workers; keep the present one on errors."""
        if self._reload is None:
            self._listener.reject("this daemon has no configuration file")
            return
        try:
            workers = self._reload()
        except Exception as error:
            self._reject_reload(error)
            return
        self._notifier.send_reloading()
        log.info("reloading")
        try:
            self._end_all()
            self._set_workers(workers)
        except Exception as error:
            # Workers of the present configuration go on; those that have ended start again.
            self._reject_reload(error)
        self._started_at = time.monotonic()
        self._is_ready = False

    def _reject_reload(self, error: Exception) -> None:
        """Log and reply the reason why a reload fails, such as lack of memory or threads."""
        reason = str(error) if isinstance(error, StewardError) else repr(error)
        log.error("cannot apply the new configuration, keeping the present one: %s", reason)
        self._listener.reject(reason)

    def _end_all(self) -> list[str]:
        """End all workers, the ``last`` ones last; return the names of those that do not end."""
        early = [child for child in self._children if not child.spec.last]
        late = [child for child in self._children if child.spec.last]
        self._end(early, self._timing.stop_s)
        self._end(late, _STOP_LAST_S)
        kill_descendants(os.getpid())
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGKILL)
        self._wait_for_exit(self._children, 0.2)
        return [child.spec.name for child in self._children if child.pid]

    def _end(self, children: Sequence[_WorkerState], timeout_s: float) -> None:
        for child in children:
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)
        self._wait_for_exit(children, timeout_s)

    def _wait_for_exit(self, children: Sequence[_WorkerState], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(child.pid for child in children) and time.monotonic() < deadline:
            for child in children:
                if child.pid and os.waitpid(child.pid, os.WNOHANG)[0]:
                    child.pid = 0
            time.sleep(0.005)


def _fill_free_chunks() -> None:
    """Allocate the free chunks between those in use on malloc's heap, and never free them.

    A worker would place its own small data there, and so copy a shared page for every few bytes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return  # not the GNU C library
    libc.malloc_trim(0)
    malloc, free = libc.malloc, libc.free
    malloc.argtypes, malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    end = malloc(_HEAP_END_BYTES)
    left = _MAX_FILLED_BYTES
    for size in range(_LARGEST_CHUNK_BYTES, 0, -_CHUNK_STEP_BYTES):
        chunk = malloc(size)
        while chunk and end and chunk < end and left > 0:
            left -= size
            chunk = malloc(size)
        free(chunk)
    free(end)


def _flush_output() -> None:
    """Flush standard output and error: a forked process would write their buffers again."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a closed pipe: workers run anyway
            stream.flush()
