"""Unix socket server of the daemon: accepts requests of commands, one forked process for each.

SO_PEERCRED identifies each peer, so the socket is open to all users. `SocketServer` reads a request
until it is complete, so a silent peer costs only a descriptor; then it forks a process that serves
the connection (`request_service.py`), so a request that crashes or hangs costs only that process.
Connections, request rates and the memory of each process are limited per user, connections also in
total. Clients retry for some seconds when turned away.
"""

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator

from steward.core.actions import ActionError
from steward.core.errors import StewardError
from steward.core.processes import adopt_orphans, exit_with_parent, kill_descendants
from steward.core.rate_limits import TokenBuckets
from steward.core.rpc import (
    DaemonBusy,
    make_socket_directory,
    shorten_socket_path,
)
from steward.core.rpc_server import IncompleteRequest, get_peer_uid, send_error
from steward.core.waits import Stop
from steward.daemon.request_service import RequestService

log = logging.getLogger(__name__)

_BACKLOG = 1024
_IDLE_S = 10.0
"""Longest wait without connections, in seconds."""
_BUSY_S = 0.5
"""Longest wait with connections, in seconds."""
_ACCEPT_AT_ONCE = 256
_LOG_AGAIN_S = 60.0


class SocketError(StewardError):
    """The socket cannot be made."""


class SocketServer:
    """Server that forks a process to answer each connection.

    Args:
        path: Path of the socket.
        service: Answers requests, in a process for each connection.
        is_web_server: Whether a uid, the web server's, may send several requests on a connection.
        preload_pages: Imports the modules that web pages need; called at their first request.
        get_uid: Returns the uid of a connection's peer.
    """

    def __init__(
        self,
        path: str,
        service: RequestService,
        is_web_server: Callable[[int], bool] = lambda _: False,
        preload_pages: Callable[[], None] = lambda: None,
        *,
        get_uid: Callable[[socket.socket], int] = get_peer_uid,
    ) -> None:
        self._path = path
        self._service = service
        self._limits = service.limits
        self._is_web_server = is_web_server
        self._preload_pages = preload_pages
        self._get_uid = get_uid
        self._uids_by_pid: dict[int, int] = {}
        self._incomplete: dict[int, IncompleteRequest] = {}
        self._epoll = select.epoll()
        self._rate_limits = TokenBuckets(self._limits.per_second, self._limits.burst)
        self._logged_at: dict[int, float] = {}

    def run(self, stop: Stop, send_heartbeat: Callable[[], None]) -> None:
        """Serve until the Stop is raised; requests in progress are then aborted.

        Raises:
            SocketError: The socket cannot be made.
        """
        adopt_orphans()
        with open_listener(self._path) as listener, self._epoll:
            log.info("listening on %s", self._path)
            self._epoll.register(listener, select.EPOLLIN)
            try:
                while not stop.is_set():
                    send_heartbeat()
                    self._reap()
                    self._reject_slow()
                    is_idle = not (self._uids_by_pid or self._incomplete)
                    if stop.wait(_IDLE_S if is_idle else _BUSY_S, self._epoll.fileno()):
                        self._poll_connections(listener)
            finally:
                for request in self._incomplete.values():
                    request.connection.close()
                self._end_all()

    def _poll_connections(self, listener: socket.socket) -> None:
        """Read from connections that have data, then accept new ones."""
        for fd, _ in self._epoll.poll(0):
            request = self._incomplete.get(fd)
            if request is not None:
                self._read(request, listener)
            elif fd == listener.fileno():
                self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept pending connections."""
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # The peer may have gone already; if descriptors are short, a pause lets serving
                # processes end.
                log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)
                return
            self._admit(connection, listener)

    def _admit(self, connection: socket.socket, listener: socket.socket) -> None:
        """Accept a new connection and read what its request has so far."""
        connection.setblocking(False)
        uid = self._get_uid(connection)
        reason = self._get_busy_reason(uid)
        if reason:
            self._reject(connection, uid, reason)
            return
        request = IncompleteRequest(connection, uid)
        self._evict_oldest()
        self._incomplete[connection.fileno()] = request
        self._epoll.register(connection, select.EPOLLIN)
        self._read(request, listener)

    def _evict_oldest(self) -> None:
        """Drop the oldest connection of the user with most of them, while too many wait."""
        while self._incomplete and (
            len(self._incomplete) >= self._limits.waiting
            or sum(len(request.line) for request in self._incomplete.values())
            > self._limits.incomplete_bytes
        ):
            ((uid, _),) = Counter(request.uid for request in self._incomplete.values()).most_common(
                1
            )
            oldest = next(request for request in self._incomplete.values() if request.uid == uid)
            self._remove_incomplete(oldest)
            self._reject(oldest.connection, uid, "the daemon is busy: try again in a moment")

    def _read(self, request: IncompleteRequest, listener: socket.socket) -> None:
        """Read from a connection; serve it once its request is complete."""
        try:
            if not request.read():
                return
        except EOFError:
            self._remove_incomplete(request)
            request.connection.close()
            return
        except ActionError as error:
            self._remove_incomplete(request)
            send_error(request.connection, error)
            return
        self._remove_incomplete(request)
        if not self._is_unlimited(request.uid) and not self._rate_limits.take(request.uid):
            reason = "too many requests of this user in a short time: try again in a moment"
            self._reject(request.connection, request.uid, reason)
            return
        # Here and not in the forked process: each later one shares the modules.
        self._service.preload(bytes(request.line))
        if self._is_web_server(request.uid):
            # The process that serves the request reports every error.
            with contextlib.suppress(Exception):
                self._preload_pages()
        with request.connection as connection:
            self._fork_server(connection, listener, request.uid, bytes(request.line))

    def _remove_incomplete(self, request: IncompleteRequest) -> None:
        del self._incomplete[request.connection.fileno()]
        self._epoll.unregister(request.connection)

    def _reject_slow(self) -> None:
        """Drop connections whose request did not come in time."""
        oldest_start = time.monotonic() - self._limits.request_s
        for request in [
            entry for entry in self._incomplete.values() if entry.since <= oldest_start
        ]:
            self._remove_incomplete(request)
            message = f"the request was not complete within {self._limits.request_s:.0f} s"
            send_error(request.connection, ActionError(message))

    def _fork_server(
        self, connection: socket.socket, listener: socket.socket, uid: int, line: bytes
    ) -> None:
        """Fork a process that serves a connection with a complete request."""
        connection.setblocking(True)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            log.error("cannot start a process to serve uid %d: %s", uid, error)
            send_error(
                connection, DaemonBusy("the daemon cannot start a process: try again in a moment")
            )
            return
        if pid == 0:
            os._exit(self._serve_in_child(connection, listener, uid, line, parent))
        self._uids_by_pid[pid] = uid

    def _reject(self, connection: socket.socket, uid: int, reason: str) -> None:
        self._log_rejection(uid, reason)
        send_error(connection, DaemonBusy(reason))

    def _is_unlimited(self, uid: int) -> bool:
        """Return True for users without a rate limit: root, Steward's own, the web server's."""
        return uid in (0, os.geteuid()) or self._is_web_server(uid)

    def _get_busy_reason(self, uid: int) -> str:
        """Return why a user cannot be served now; "" if they can."""
        if uid in (0, os.geteuid()):
            return ""
        count = sum(1 for served_uid in self._uids_by_pid.values() if served_uid == uid)
        count += sum(1 for request in self._incomplete.values() if request.uid == uid)
        if self._is_web_server(uid):
            return "" if count < self._limits.web_connections else "too many page requests at once"
        if len(self._uids_by_pid) >= self._limits.connections:
            return "the daemon is busy: try again in a moment"
        if count >= self._limits.per_user:
            return "too many requests of this user are running: try again when one has ended"
        return ""

    def _log_rejection(self, uid: int, reason: str) -> None:
        """Log a rejected connection, at most once in a while per user."""
        now = time.monotonic()
        if uid not in self._logged_at or now - self._logged_at[uid] >= _LOG_AGAIN_S:
            self._logged_at[uid] = now
            log.warning("rejected a connection of uid %d: %s", uid, reason)

    def _reap(self) -> None:
        """Reap ended processes, and end what aborted ones had started."""
        has_failed = False
        while self._uids_by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            uid = self._uids_by_pid.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if uid is None:
                continue  # a child of an aborted process
            has_failed = has_failed or code != 0
            if code < 0:
                log.warning("the process that served uid %d ended by signal %d", uid, -code)
        if has_failed:
            # End Slurm commands that wait for a hung slurmctld: nothing else would time them out.
            kill_descendants(os.getpid(), self._uids_by_pid)

    def _end_all(self) -> None:
        """End all serving processes."""
        kill_descendants(os.getpid())
        for pid in self._uids_by_pid:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 1.0
        while self._uids_by_pid and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)

    def _serve_in_child(
        self,
        connection: socket.socket,
        listener: socket.socket,
        uid: int,
        line: bytes,
        parent: int,
    ) -> int:
        """Serve one connection in the forked process; return the exit code."""
        try:
            _reset_signals(parent)
            listener.close()
            self._epoll.close()
            for request in self._incomplete.values():
                request.connection.close()
            _limit_memory(self._limits.memory_bytes)
            self._service.serve(connection, uid, line, keep_open=self._is_web_server(uid))
        except OSError as error:
            log.debug("the connection of uid %d ended: %s", uid, error)
        except BaseException:
            log.exception("serving uid %d failed", uid)
            return 1
        return 0


def _reset_signals(parent: int) -> None:
    """Let this process end with its parent, and by the default effect of signals."""
    exit_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process's private data to this many bytes more than it has now."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[5])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + max_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@contextlib.contextmanager
def open_listener(path: str) -> Iterator[socket.socket]:
    """Listen on a socket that all users may connect to; remove it at the end.

    Raises:
        SocketError: Another daemon listens there, or the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with listener:
        try:
            _remove_stale_socket(path)
            umask = os.umask(0o111)
            try:
                with shorten_socket_path(path) as name:
                    listener.bind(name)
            finally:
                os.umask(umask)
            listener.listen(_BACKLOG)
            own_stat = os.stat(path)
        except OSError as error:
            raise SocketError(
                f"cannot listen on {path}: {error.strerror or error}", path
            ) from error
        listener.setblocking(False)
        try:
            yield listener
        finally:
            _remove_socket(path, own_stat)


def _remove_stale_socket(path: str) -> None:
    """Make the socket's directory, and remove the socket of a killed daemon."""
    directory = os.path.dirname(path)
    make_socket_directory(directory)
    if not os.stat(directory).st_mode & stat.S_IXOTH:
        log.warning(
            "%s is closed to other users: they cannot send requests to the daemon", directory
        )
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise SocketError(
            f"cannot listen on {path}: it exists and is not a socket. Remove it, or set 'run_dir' "
            "to another directory",
            path,
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            with shorten_socket_path(path) as name:
                probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # nobody listens: a stale socket
        else:
            raise SocketError(f"another daemon listens on {path}: stop it first", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_socket(path: str, own_stat: os.stat_result) -> None:
    """Remove the socket, unless another daemon has replaced it."""
    try:
        info = os.lstat(path)
        if (info.st_dev, info.st_ino) == (own_stat.st_dev, own_stat.st_ino):
            os.unlink(path)
    except OSError as error:
        log.debug("cannot remove %s: %s", path, error)
