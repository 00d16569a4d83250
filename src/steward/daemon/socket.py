"""The Unix socket that commands ask the daemon through.

Whoever connects is known by SO_PEERCRED, so the socket is open to all. Each
connection is served by a process of its own: a peer that is slow, silent or
mad, a request that crashes or never ends costs that one process, and the
number of processes is bounded, in all and for each user; so is the memory of each.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator

from steward.daemon.answering import Service
from steward.daemon.protocol import address, error_line
from steward.ending import adopt_orphans, end_below, end_with
from steward.errors import StewardError, Unavailable
from steward.waiting import Stop

log = logging.getLogger(__name__)

_PEERCRED = struct.Struct("3i")
_BACKLOG = 128
_IDLE_S = 10.0
_BUSY_S = 0.5
_ACCEPT_AT_ONCE = 64
_SAY_AGAIN_S = 60.0


class SocketError(StewardError):
    """The socket cannot be made."""


class SocketUnavailable(Unavailable):
    """Too much is asked at once."""


class SocketServer:
    """Has a service answer whoever connects.

    Args:
        path: Where the socket is made.
        service: Answers, in a process for each connection.
        is_kept: Whether a uid may ask several things on a connection: the pages' process.
    """

    def __init__(
        self, path: str, service: Service, is_kept: Callable[[int], bool] = lambda _: False
    ) -> None:
        self._path = path
        self._service = service
        self._limits = service.limits
        self._is_kept = is_kept
        self._serving: dict[int, int] = {}
        self._said: dict[int, float] = {}

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until the Stop is raised; requests that are being answered then are ended.

        Raises:
            SocketError: The socket cannot be made.
        """
        adopt_orphans()
        with listening(self._path) as listener:
            log.info("listening on %s", self._path)
            try:
                while not stop.is_set():
                    beat()
                    self._reap()
                    timeout_s = _BUSY_S if self._serving else _IDLE_S
                    if stop.wait(timeout_s, listener.fileno()):
                        self._accept(listener)
            finally:
                self._end_all()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # The peer may have gone already; where we are short of descriptors, a
                # pause lets the serving processes end.
                log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)
                return
            with connection:
                self._take(connection, listener)

    def _take(self, connection: socket.socket, listener: socket.socket) -> None:
        uid = _peer_uid(connection)
        self._reap()
        busy = self._busy(uid)
        if busy:
            self._say_turned_away(uid, busy)
            connection.setblocking(False)
            # Whoever does not read this is turned away all the same.
            with contextlib.suppress(OSError):
                connection.send(error_line(SocketUnavailable(busy)))
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            log.error("cannot start a process to serve uid %d: %s", uid, error)
            return
        if pid == 0:
            os._exit(self._be_server(connection, listener, uid, parent))
        self._serving[pid] = uid

    def _busy(self, uid: int) -> str:
        """Why a user cannot be served now; "" if nothing speaks against it."""
        if uid in (0, os.geteuid()):
            return ""
        mine = sum(1 for owner in self._serving.values() if owner == uid)
        if self._is_kept(uid):
            return "" if mine < self._limits.kept else "too many pages are asked for at once"
        if len(self._serving) >= self._limits.connections:
            return "the daemon is busy: try again in a moment"
        if mine >= self._limits.per_user:
            return "too many requests of yours are running: try again when one has ended"
        return ""

    def _say_turned_away(self, uid: int, why: str) -> None:
        """Log it once in a while: whoever is turned away may come thousands of times a second."""
        now = time.monotonic()
        if uid not in self._said or now - self._said[uid] >= _SAY_AGAIN_S:
            self._said[uid] = now
            log.warning("turned away uid %d: %s", uid, why)

    def _reap(self) -> None:
        is_broken_off = False
        while self._serving:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            uid = self._serving.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if uid is None:
                continue  # it was started by one that was broken off
            is_broken_off = is_broken_off or code != 0
            if code < 0:
                log.warning("the process that served uid %d ended by signal %d", uid, -code)
        if is_broken_off:
            # Slurm's commands wait for a slurmctld that hangs, and nobody is left to time them out.
            end_below(os.getpid(), self._serving)

    def _end_all(self) -> None:
        end_below(os.getpid())
        for pid in self._serving:
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 1.0
        while self._serving and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)

    def _be_server(
        self, connection: socket.socket, listener: socket.socket, uid: int, parent: int
    ) -> int:
        """In the new process: serve one connection; the exit code."""
        try:
            _become_expendable(parent)
            listener.close()
            _bound_memory(self._limits.memory_bytes)
            self._service.serve(connection, uid, keeps=self._is_kept(uid))
        except OSError as error:
            log.debug("the connection of uid %d ended: %s", uid, error)
        except BaseException:
            log.exception("serving uid %d failed", uid)
            return 1
        return 0


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    uid: int = _PEERCRED.unpack(raw)[1]
    return uid


def _become_expendable(parent: int) -> None:
    """End with the process that accepts connections, and by the plain effect of any signal."""
    end_with(parent)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def _bound_memory(most: int) -> None:
    """Let this process take so many bytes more than it has; its own data, not mapped files."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[5])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + most
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@contextlib.contextmanager
def listening(path: str) -> Iterator[socket.socket]:
    """A listening socket that everybody may connect to; removed at the end.

    Raises:
        SocketError: Another daemon listens there, or the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with listener:
        try:
            _make_way(path)
            umask = os.umask(0o111)
            try:
                with address(path) as name:
                    listener.bind(name)
            finally:
                os.umask(umask)
            listener.listen(_BACKLOG)
            own = os.stat(path)
        except OSError as error:
            raise SocketError(
                f"cannot listen on {path}: {error.strerror or error}", path
            ) from error
        listener.setblocking(False)
        try:
            yield listener
        finally:
            _remove_own(path, own)


def _make_way(path: str) -> None:
    """Make the socket's directory, and remove what a daemon that was killed left there."""
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - all users connect to what is in it
    if not os.stat(directory).st_mode & stat.S_IXOTH:
        log.warning("%s is closed to others: ordinary users cannot ask the daemon", directory)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketError(f"{path} is there and is no socket: remove it, or set 'socket'", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            with address(path) as name:
                probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # nobody listens: it is a left-over
        else:
            raise SocketError(f"another daemon listens on {path}: stop it first", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_own(path: str, own: os.stat_result) -> None:
    """Remove the socket, unless another daemon has put its own there meanwhile."""
    try:
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
            os.unlink(path)
    except OSError as error:
        log.debug("cannot remove %s: %s", path, error)
