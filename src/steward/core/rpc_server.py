"""RPC server: the listener of a process's own Unix socket, without threads or child processes.

:class:`RpcListener` belongs to a process's loop: ``fd`` is readable when ``receive`` has work, and
neither that nor a reply waits for a peer. It identifies peers by SO_PEERCRED and bounds their
number, the size of a request and the time for it. :class:`IncompleteRequest` reads a request as it
arrives; the daemon's socket, which forks a process for each request, uses it too.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from steward.core.actions import ActionError
from steward.core.errors import PermissionRefused, StewardError
from steward.core.listeners import open_unix_listener
from steward.core.rpc import (
    LONGEST_REQUEST,
    ActionRequest,
    ErrorTypes,
    decode_request,
    encode_answer_line,
    encode_error_line,
)

log = logging.getLogger(__name__)

_PEERCRED: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_BACKLOG: Final = 1024
_MAX_INCOMPLETE: Final = 32
"""Maximum number of connections without a complete request; beyond it the oldest is closed."""
REQUEST_TIMEOUT_S: Final = 5.0
"""Time limit for a complete request, in seconds."""
REPLY_TIMEOUT_S: Final = 5.0
"""Time limit for a peer to read its reply, in seconds."""
_READ_BYTES: Final = 1 << 18
_LOG_INTERVAL_S: Final = 60.0
"""Minimum interval of log messages about rejected peers, in seconds."""


def get_peer_uid(connection: socket.socket) -> int:
    """Return the uid of a Unix socket's peer, from SO_PEERCRED."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    uid: int = _PEERCRED.unpack(raw)[1]
    return uid


def send_error(connection: socket.socket, error: StewardError) -> None:
    """Send a peer an error and close its connection, even if it does not read."""
    with connection, contextlib.suppress(OSError):
        connection.send(encode_error_line(error))


class IncompleteRequest:
    """Connection whose request is incomplete.

    Args:
        connection: The peer's, non-blocking.
        uid: The peer's uid.
        max_bytes: Maximum size of the request, in bytes.
    """

    def __init__(
        self, connection: socket.socket, uid: int, max_bytes: int = LONGEST_REQUEST
    ) -> None:
        self.connection = connection
        self.uid = uid
        self.since = time.monotonic()
        self.line = bytearray()
        self._max_bytes = max_bytes

    def read(self) -> bool:
        """Read available bytes; return True if the request is complete.

        Raises:
            EOFError: The peer disconnected without a request.
            ActionError: The request is too long.
        """
        while True:
            try:
                piece = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                raise EOFError from error
            if not piece:
                raise EOFError
            head, newline, _ = piece.partition(b"\n")
            self.line += head + newline
            if len(self.line) > self._max_bytes:
                raise ActionError(
                    f"the request is longer than {self._max_bytes} bytes, the maximum"
                )
            if newline:
                return True


class _UnsentReply:
    """Reply that its peer has not read completely."""

    def __init__(self, connection: socket.socket, line: bytes) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self._rest = memoryview(line)

    def send(self) -> bool:
        """Send as much as the peer accepts now; return True when it has all, or has gone."""
        try:
            while self._rest:
                self._rest = self._rest[self.connection.send(self._rest) :]
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


class RpcCall:
    """Request that waits for its reply; both ways to reply close the connection.

    Attributes:
        message: The request.
    """

    def __init__(
        self, listener: "RpcListener", connection: socket.socket, message: ActionRequest
    ) -> None:
        self._listener = listener
        self._connection = connection
        self.message = message

    def reply(self, answer: Any) -> None:
        """Send the answer; a peer that has gone gets none."""
        self._listener.send(self._connection, encode_answer_line(answer))

    def reject(self, error: StewardError) -> None:
        """Send an error."""
        self._listener.send(self._connection, encode_error_line(error, self._listener.own))

    def close(self) -> None:
        """Close the connection without a reply."""
        self._connection.close()


class RpcListener:
    """Listener of a Unix socket for the loop of one process.

    Args:
        path: Path of the socket.
        list_uids: Returns the users who may connect besides root and Steward's own.
        max_bytes: Maximum size of a request, in bytes.
        request_type: Type of the requests: :class:`RawRequest` if the service decodes arguments.
        own: The service's own errors.

    Raises:
        OSError: The socket cannot be created.
    """

    def __init__(
        self,
        path: str,
        list_uids: Callable[[], Collection[int]] = tuple,
        max_bytes: int = LONGEST_REQUEST,
        *,
        request_type: type[ActionRequest] = ActionRequest,
        own: ErrorTypes = (),
    ) -> None:
        self.own = own
        self._path = path
        self._request_type = request_type
        self._unsent: dict[int, _UnsentReply] = {}
        self._list_uids = list_uids
        self._max_bytes = max_bytes
        self._incomplete: dict[int, IncompleteRequest] = {}
        self._logged_at: float | None = None
        self._listener = open_unix_listener(path, _BACKLOG, list_uids())
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def receive(self) -> list[RpcCall]:
        """Accept connections, read from them, go on with replies; return the complete requests."""
        calls = []
        for fd, _ in self._epoll.poll(0):
            if fd in self._unsent:
                if self._unsent[fd].send():
                    self._end_reply(self._unsent[fd])
                continue
            request = self._incomplete.get(fd) or self._accept()
            if request is None:
                continue
            try:
                if request.read():
                    message = decode_request(bytes(request.line), self._request_type)
                    self._remove(request)
                    calls.append(RpcCall(self, request.connection, message))
            except EOFError:
                self._drop(request)
            except ActionError as error:
                self._remove(request)
                self.log_rejection(f"uid {request.uid}: {error}")
                send_error(request.connection, error)
        oldest_start = time.monotonic() - REQUEST_TIMEOUT_S
        for request in [item for item in self._incomplete.values() if item.since < oldest_start]:
            self._drop(request)
        oldest_start = time.monotonic() - REPLY_TIMEOUT_S
        for reply in [item for item in self._unsent.values() if item.since < oldest_start]:
            self._end_reply(reply)
        return calls

    def send(self, connection: socket.socket, line: bytes) -> None:
        """Send a reply and close its connection, at once or when the peer has read it."""
        reply = _UnsentReply(connection, line)
        if reply.send():
            connection.close()
            return
        self._unsent[connection.fileno()] = reply
        self._epoll.register(connection, select.EPOLLOUT)

    def log_rejection(self, reason: str) -> None:
        """Log a rejected request, at most once a minute."""
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("rejected a request on %s: %s", self._path, reason)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self.close_in_child()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close_in_child(self) -> None:
        """Close the descriptors only, in a forked process."""
        for request in self._incomplete.values():
            request.connection.close()
        for reply in self._unsent.values():
            reply.connection.close()
        self._incomplete.clear()
        self._unsent.clear()
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> IncompleteRequest | None:
        """Accept a connection, and return its request if its user may connect."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None  # the peer left before it was accepted
        except OSError as error:
            log.warning("cannot accept a connection on %s: %s", self._path, error)
            time.sleep(0.01)  # until a descriptor is free
            return None
        connection.setblocking(False)
        uid = get_peer_uid(connection)
        if uid not in {0, os.geteuid(), *self._list_uids()}:
            self.log_rejection(f"permission denied to uid {uid}")
            send_error(
                connection,
                PermissionRefused(f"permission denied: uid {uid} may not use this socket"),
            )
            return None
        if len(self._incomplete) >= _MAX_INCOMPLETE:
            self._drop(next(iter(self._incomplete.values())))
        request = IncompleteRequest(connection, uid, self._max_bytes)
        self._incomplete[connection.fileno()] = request
        self._epoll.register(connection, select.EPOLLIN)
        return request

    def _end_reply(self, reply: _UnsentReply) -> None:
        del self._unsent[reply.connection.fileno()]
        self._epoll.unregister(reply.connection)
        reply.connection.close()

    def _drop(self, request: IncompleteRequest) -> None:
        self._remove(request)
        request.connection.close()

    def _remove(self, request: IncompleteRequest) -> None:
        """Stop watching a connection, before anything closes it: a child may still hold it."""
        del self._incomplete[request.connection.fileno()]
        self._epoll.unregister(request.connection)
