"""Reload of the daemon's configuration: the supervisor's listener and the client's request.

The supervisor listens on a Unix socket beside the daemon's own, ``SOCKET.reload``
(`ReloadListener`). Each connection is a request (`request_reload`). The reply is one line of JSON
(`ReloadReply`), sent when the workers of the new configuration run, or when it is rejected.
"""

import contextlib
import logging
import os
import socket
from typing import Final

import msgspec

from steward.core.errors import StewardError, Unavailable
from steward.core.rpc import make_socket_directory, shorten_socket_path

log = logging.getLogger(__name__)

_BACKLOG: Final = 8
_SEND_S: Final = 1.0
_LONGEST: Final = 1 << 20


class ReloadError(StewardError):
    """The new configuration was rejected; the daemon keeps the present one."""


class ReloadUnavailable(Unavailable):
    """No daemon answers."""


class ReloadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a reload request.

    Attributes:
        error: Why the new configuration was rejected; "" if it was applied.
        waiting: Workers of the new configuration that did not become ready in time.
    """

    error: str = ""
    waiting: tuple[str, ...] = ()


class ReloadListener:
    """Listener of the supervisor: collects reload requests until it answers them together."""

    def __init__(self) -> None:
        self._path = ""
        self._listener: socket.socket | None = None
        self._clients: list[socket.socket] = []

    @property
    def fds(self) -> tuple[int, ...]:
        """Return descriptors that become readable when a request arrives."""
        return () if self._listener is None else (self._listener.fileno(),)

    def open(self, path: str) -> None:
        """Listen beside a daemon's socket; if that fails, only SIGHUP reloads.

        Args:
            path: The daemon's socket; "" for none.
        """
        if path == self._path:
            return
        self._close_listener()
        if not path:
            return
        socket_path = f"{path}.reload"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            make_socket_directory(os.path.dirname(socket_path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket_path)
            umask = os.umask(0o177)
            try:
                with shorten_socket_path(socket_path) as name:
                    listener.bind(name)
            finally:
                os.umask(umask)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            log.warning(
                "cannot listen on %s, so 'steward reload' fails: %s", socket_path, error.strerror
            )
            return
        listener.setblocking(False)
        self._path, self._listener = path, listener

    def accept(self) -> bool:
        """Accept pending requests; return True if there were any."""
        if self._listener is None:
            return False
        count = len(self._clients)
        with contextlib.suppress(BlockingIOError):
            while len(self._clients) < _BACKLOG:
                self._clients.append(self._listener.accept()[0])
        return len(self._clients) > count

    def answer(self, reply: ReloadReply) -> None:
        """Answer all accepted requests."""
        for connection in self._clients:
            with connection, contextlib.suppress(OSError):  # the client may have gone
                connection.settimeout(_SEND_S)
                connection.sendall(msgspec.json.encode(reply) + b"\n")
        self._clients.clear()

    def close_in_child(self) -> None:
        """Close the supervisor's connections in a forked process."""
        for connection in self._clients:
            connection.close()
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        """Stop listening; drop unanswered requests."""
        for connection in self._clients:
            connection.close()
        self._clients.clear()
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}.reload")
        self._path, self._listener = "", None


def request_reload(path: str, timeout_s: float) -> ReloadReply:
    """Ask a daemon to reload its configuration, and return its reply.

    Args:
        path: The daemon's socket.
        timeout_s: Longest time to wait for the answer, in seconds.

    Raises:
        ReloadError: The daemon rejected the configuration and keeps the present one.
        ReloadUnavailable: No daemon answers.
    """
    socket_path = f"{path}.reload"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(timeout_s)
        try:
            with shorten_socket_path(socket_path) as name:
                connection.connect(name)
            with connection.makefile("rb") as file:
                line = file.readline(_LONGEST)
        except TimeoutError as error:
            raise ReloadUnavailable(
                f"the daemon at {socket_path} did not answer in {timeout_s:g} s: see its log",
                socket_path,
            ) from error
        except OSError as error:
            raise ReloadUnavailable(
                f"cannot reach a daemon at {socket_path}: {error.strerror}. Does it run, and "
                "are you "
                "root or its user? Another daemon's socket is named by --socket",
                socket_path,
            ) from error
    if not line.endswith(b"\n"):
        raise ReloadUnavailable(f"the daemon at {socket_path} ended without an answer", socket_path)
    try:
        reply = msgspec.json.decode(line, type=ReloadReply)
    except msgspec.MsgspecError as error:
        raise ReloadUnavailable(
            f"the answer of {socket_path} cannot be read: {error}", socket_path
        ) from error
    if reply.error:
        raise ReloadError(f"{reply.error}; the daemon keeps its present configuration", path)
    return reply
