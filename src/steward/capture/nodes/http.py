"""HTTP/1.1 server for node agents: requests with bounded lengths and times, and connections.

It replaces the standard library's servers, whose time-outs apply to single bytes, so that a client
sending one byte a minute could hold a thread for days. :class:`AgentPeer` reads requests and writes
replies on one connection. :class:`AgentConnections` accepts connections and runs a thread for each,
up to a limit; when it is reached, clients that have not identified themselves are disconnected.
"""

import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from steward.core.errors import StewardError, Unavailable
from steward.core.listeners import get_limit_key, is_within
from steward.core.waits import Stop

MAX_HEAD_BYTES: Final = 16 << 10
"""Maximum size of a request's head, in bytes."""
MAX_BATCH_BYTES: Final = (1 << 20) + (64 << 10)
"""Maximum size of a batch, in bytes; agents send a megabyte at most."""
_MAX_READ_BYTES: Final = 1 << 16
"""Maximum number of bytes per read."""
_REQUEST: Final = re.compile(rb"([A-Z]{3,16}) (/[!-~]{0,1000}) HTTP/1\.1")
_HEADER: Final = re.compile(rb"([!-9;-~]{1,64}):([\t -~]*)")
_LENGTH: Final = re.compile(rb"[0-9]{1,10}")
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
"""Reason phrases of the statuses in use."""


# Requests and replies


class RequestError(StewardError):
    """Error: a request is invalid or not supported.

    Args:
        status: HTTP status of the reply.
        message: Reason, as text.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PeerGone(Unavailable):
    """Error: the client disconnected or is too slow."""


class AgentRequest(msgspec.Struct, frozen=True):
    """Head of a request; the body is read only after the sender is known.

    Attributes:
        path: Requested path.
        headers: Headers by lower-case name.
        length: Length of the body, in bytes.
    """

    path: str
    headers: Mapping[bytes, bytes]
    length: int

    @property
    def closes_connection(self) -> bool:
        """Whether the client sends no further request on this connection."""
        return self.headers.get(b"connection", b"").lower() == b"close"


class AgentPeer:
    """Connection to a client, with HTTP on top.

    Args:
        connection: A connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def read_request(self, first_byte_s: float, timeout_s: float) -> AgentRequest | None:
        """Read the head of the next request; None if the connection ends before it.

        Args:
            first_byte_s: Maximum wait for the first byte, in seconds.
            timeout_s: Maximum time for the rest of the head, in seconds.

        Raises:
            RequestError: The request is invalid or too large.
            PeerGone: The client disconnected in the middle, or is too slow.
        """
        deadline = time.monotonic() + first_byte_s
        has_begun = bool(self._buffer)
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise RequestError(431, f"the head has more than {MAX_HEAD_BYTES} bytes")
            if not has_begun and self._buffer:
                has_begun, deadline = True, time.monotonic() + timeout_s
            if not self._receive(deadline, MAX_HEAD_BYTES):
                if has_begun:
                    raise PeerGone("it went away in the middle of a head")
                return None
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return _parse_request_head(head)

    def read_body(self, length: int, timeout_s: float) -> bytes:
        """Read the body of a request.

        Raises:
            PeerGone: The client disconnected in the middle, or is too slow.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._buffer) < length:
            if not self._receive(deadline, length - len(self._buffer)):
                raise PeerGone("it went away in the middle of a batch")
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def linger(self, timeout_s: float) -> None:
        """Shut down writing, and discard input until the client closes.

        An immediate close would reset the connection, and the client would lose the last reply.
        """
        deadline = time.monotonic() + timeout_s
        remaining = MAX_BATCH_BYTES + MAX_HEAD_BYTES
        try:
            # Not with SSLSocket.shutdown, which would end encryption of the remaining data.
            socket.socket.shutdown(self._connection, socket.SHUT_WR)
            while remaining > 0 and self._receive(deadline, _MAX_READ_BYTES):
                remaining -= len(self._buffer)
                self._buffer.clear()
        except (PeerGone, OSError):
            return

    def send_reply(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Send a reply.

        Raises:
            PeerGone: The client does not accept it.
        """
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: text/plain; charset=utf-8"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(data)
        except OSError as error:
            raise PeerGone(f"it takes no answer: {error.strerror or error}") from error

    def _receive(self, deadline: float, max_bytes: int) -> bool:
        """Read more data until a deadline; return False at the end of the stream."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise PeerGone("it is too slow")
        try:
            self._connection.settimeout(remaining_s)
            chunk = self._connection.recv(min(_MAX_READ_BYTES, max(max_bytes, 1)))
        except TimeoutError:
            raise PeerGone("it is too slow") from None
        except OSError as error:
            raise PeerGone(str(error.strerror or error)) from error
        self._buffer += chunk
        return bool(chunk)


def _parse_request_head(head: bytes) -> AgentRequest:
    """Parse the head of a POST request."""
    first, *rest = head.split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None or request[1] != b"POST":
        raise RequestError(400, "only POST of HTTP/1.1 is answered here")
    headers: dict[bytes, bytes] = {}
    for line in rest:
        header = _HEADER.fullmatch(line)
        if header is None or header[1].lower() in headers:
            raise RequestError(400, "a line of the head is no header, or comes twice")
        headers[header[1].lower()] = header[2].strip()
    length = headers.get(b"content-length", b"")
    if b"transfer-encoding" in headers or not _LENGTH.fullmatch(length):
        raise RequestError(411, "a batch comes with its length")
    if int(length) > MAX_BATCH_BYTES:
        raise RequestError(413, f"a batch has {MAX_BATCH_BYTES} bytes at the most")
    return AgentRequest(request[2].decode("ascii"), headers, int(length))


# Connections

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
"""Backlog of the listening socket."""
_UNIDENTIFIED_TIMEOUT_S: Final = 1.0
"""When all slots are taken, clients that have not identified themselves within this time are
disconnected, in seconds.
"""
_CONNECTION_WAIT_S: Final = 0.5
"""Time for which ``serve_next`` waits for a connection, in seconds."""
_CONNECTIONS_CLOSE_S: Final = 1.0
"""Time for requests in progress at a stop, in seconds."""


class AgentConnection:
    """Connection of a node, or of a client not identified yet."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.since = time.monotonic()
        self.is_known = False

    def shut_down(self) -> None:
        """Shut down the connection; its thread notices."""
        try:
            # Not with SSLSocket.shutdown, which another thread may be using.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already


class AgentConnections:
    """Connections of agents up to a limit, each served in a thread.

    Args:
        listener: Listening socket.
        max_connections: Maximum number of connections.
        shared_from: Networks whose addresses several nodes share (NAT).
        serve: Serves one connection in its own thread until it ends; must not raise.
        reject: Rejects one connection because the limit is reached.
    """

    def __init__(
        self,
        listener: socket.socket,
        max_connections: int,
        shared_from: tuple[str, ...],
        serve: Callable[[AgentConnection], None],
        reject: Callable[[socket.socket], None],
    ) -> None:
        self._listener = listener
        self._shared_from = shared_from
        self._serve = serve
        self._reject = reject
        self._slots = threading.Semaphore(max_connections)
        self._ended = threading.Condition()
        self._connections: set[AgentConnection] = set()

    def serve_next(self, stop: Stop) -> None:
        """Wait up to half a second for a connection, and start serving it."""
        if stop.wait(_CONNECTION_WAIT_S, self._listener.fileno()):
            self._accept(stop)

    def close(self) -> None:
        """Close all connections; requests in progress get one second to finish."""
        self._listener.close()
        for connection in self._list_connections():
            if not connection.is_known:
                connection.shut_down()
        with self._ended:
            self._ended.wait_for(lambda: not self._connections, _CONNECTIONS_CLOSE_S)
        for connection in self._list_connections():
            connection.shut_down()

    def _list_connections(self) -> list[AgentConnection]:
        """Return the present connections."""
        with self._ended:
            return list(self._connections)

    def _accept(self, stop: Stop) -> None:
        """Accept a connection, or reject it if the limit is reached."""
        has_slot = self._slots.acquire(timeout=_UNIDENTIFIED_TIMEOUT_S)
        if not has_slot and not stop.is_set():
            self._drop_unidentified()
            has_slot = self._slots.acquire(timeout=_CONNECTION_WAIT_S)
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            # The client has left, or no descriptor is free; the next call may succeed.
            log.debug("a connection could not be taken: %s", error)
            if has_slot:
                self._slots.release()
            return
        if not has_slot:
            self._reject(sock)
            return
        connection = AgentConnection(sock, str(address[0]) if address else "")
        with self._ended:
            self._connections.add(connection)
        threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _drop_unidentified(self) -> None:
        """Disconnect slow unidentified clients of the address that has most of them."""
        accepted_before = time.monotonic() - _UNIDENTIFIED_TIMEOUT_S
        slow_connections = [
            connection
            for connection in self._list_connections()
            if not connection.is_known and connection.since < accepted_before
        ]
        # Nodes that share an address must not count as one client with many connections.
        hosts = [
            ""
            if is_within(connection.address, self._shared_from)
            else get_limit_key(connection.address)
            for connection in slow_connections
        ]
        by_host = Counter(hosts)
        busiest = max(by_host, key=lambda host: (bool(host), by_host[host]), default="")
        for connection, host in zip(slow_connections, hosts, strict=True):
            if host == busiest:
                connection.shut_down()

    def _run(self, connection: AgentConnection) -> None:
        """Serve a connection in its thread, then free its slot."""
        try:
            self._serve(connection)
        finally:
            connection.sock.close()
            self._slots.release()
            with self._ended:
                self._connections.discard(connection)
                self._ended.notify_all()
