"""Node listener: the network-facing process for agents, under a separate uid.

It accepts connections, terminates TLS and parses HTTP. It forwards head, credential and body of
each request unchanged over a Unix socket. The daemon, which runs as SlurmUser, decodes MUNGE and
decides. The listener also passes the connected socket, so that the daemon asks the kernel for the
peer's address. A compromised listener can withhold and delay reports, but not forge them.

With client certificates (client_ca_file of its [tls.NAME]) the daemon listens itself, because the
process that terminates TLS decides which node speaks.

:class:`ListenerEndpoint` and :class:`ForwardedPeer` are the daemon's side, :class:`NodeListener`
and ``run_listener`` the listener's; shared functions follow.
"""

import contextlib
import logging
import os
import pwd
import signal
import socket
import struct
import time
from typing import Any, Final, TypeVar

import msgspec

from steward.capture.nodes.http import (
    BACKLOG,
    MAX_BATCH_BYTES,
    AgentConnection,
    AgentConnections,
    AgentPeer,
    AgentRequest,
    PeerGone,
    RequestError,
)
from steward.capture.settings import LISTENER_SOCKET, NodesSettings
from steward.core.config import Settings
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.listeners import ListenUnavailable, open_tcp_listener, open_unix_listener
from steward.core.processes import refuse_core_dumps
from steward.core.tls import Context, make_server_context
from steward.core.waits import Backoff, Stop

log = logging.getLogger(__name__)

IDENTIFY_TIMEOUT_S: Final = 10.0
"""Maximum time until a connection has identified its node, in seconds."""
IDLE_TIMEOUT_S: Final = 5.0
"""Maximum idle time of a connection between requests, in seconds."""
BODY_TIMEOUT_S: Final = 30.0
"""Maximum time for a request's body, in seconds."""
SEND_TIMEOUT_S: Final = 10.0
"""Maximum time for sending a reply, in seconds."""
LINGER_S: Final = 2.0
"""Maximum time until a client has read the last reply, in seconds."""
_DAEMON_TIMEOUT_S: Final = 60.0
"""Maximum time for the daemon's reply, in seconds; it waits for turns and for the journal."""
_PEERCRED: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_LENGTH: Final = struct.Struct(">I")
"""Length prefix of a message."""
_MAX_MESSAGE_SIZE: Final = 64 << 10
"""Maximum size of a message, in bytes."""
_CONNECTION: Final = b"c"
"""First byte of a connection that passes a node's socket."""
_SETTINGS: Final = b"s"
"""First byte of a connection that asks for the settings."""
_NO_ROOM: Final = b"too many nodes are heard just now\n"
"""Body of the reply when the limit of connections is reached."""
_FORWARDED_HEADERS: Final = (b"steward-batch", b"steward-credential", b"connection")
"""Headers that the daemon uses."""

Kind = TypeVar("Kind")


class _ForwardedHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a request.

    Attributes:
        path: Requested path.
        headers: Headers by lower-case name.
        length: Length of the body, in bytes.
    """

    path: str
    headers: dict[str, bytes]
    length: int


class _DaemonReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the daemon.

    Attributes:
        status: HTTP status; 0 asks for the body.
        body: Body of the reply.
        headers: Headers of the reply.
    """

    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class _SettingsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Settings from the daemon; the format differs from :class:`_DaemonReply`.

    Attributes:
        nodes: Section [nodes].
    """

    nodes: NodesSettings


def listener_socket_path(settings: Settings) -> str:
    """Return the path of the daemon's socket for the listener."""
    return os.path.join(os.path.dirname(settings.socket), LISTENER_SOCKET)


# The daemon's side


class ListenerEndpoint:
    """Daemon's end of the socket to the listener process.

    Args:
        settings: The configuration.

    Raises:
        ListenUnavailable: The socket cannot be created, or the listener's user does not exist.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.nodes
        path = listener_socket_path(settings)
        try:
            self._uids = {os.geteuid(), pwd.getpwnam(self._settings.listener).pw_uid}
            self.listener = open_unix_listener(path, BACKLOG, self._uids)
        except KeyError:
            raise ListenUnavailable(
                f"there is no user {self._settings.listener!r}: see [nodes] listener", path
            ) from None
        except OSError as error:
            raise ListenUnavailable(f"cannot listen at {path}: {error.strerror}", path) from error

    def reject(self, sock: socket.socket) -> None:
        """Tell the listener that the limit of connections is reached."""
        with sock, contextlib.suppress(OSError, PeerGone):
            sock.settimeout(0.1)
            sock.recv(1)  # unread input would reset the connection and lose the reply
            _send_message(
                sock, _DaemonReply(status=503, body=_NO_ROOM, headers={"Retry-After": "5"})
            )

    def authenticate(self, connection: AgentConnection) -> "ForwardedPeer | None":
        """Authenticate a connection from the listener; None if it only asked for the settings.

        Raises:
            PermissionRefused: It is not the listener, or passes no node's connection.
            PeerGone: The listener disconnected or is too slow.
        """
        sock = connection.sock
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        _, uid, _ = _PEERCRED.unpack(credentials)
        if uid not in self._uids:
            raise PermissionRefused(f"uid {uid} is not the listener: see [nodes] listener")
        sock.settimeout(IDENTIFY_TIMEOUT_S)
        try:
            first_byte, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except OSError as error:
            raise PeerGone(f"the listener: {error.strerror or error}") from error
        try:
            if first_byte == _SETTINGS:
                _send_message(sock, _SettingsReply(nodes=self._settings))
                return None
            if first_byte != _CONNECTION or len(fds) != 1:
                raise PermissionRefused("the listener passes no connection")
            connection.address = _read_peer_address(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        return ForwardedPeer(sock)


def _read_peer_address(fd: int) -> str:
    """Return the peer address of a passed socket, as the kernel reports it.

    Raises:
        PermissionRefused: It is not an IP connection.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as passed:
            if passed.family in (socket.AF_INET, socket.AF_INET6):
                return str(passed.getpeername()[0])
    except OSError as error:
        raise PermissionRefused(
            f"what the listener passes is no connection: {error.strerror}"
        ) from error
    raise PermissionRefused("what the listener passes is no connection of IP")


class ForwardedPeer:
    """Node behind the listener; same interface as :class:`steward.capture.nodes.http.AgentPeer`.

    Args:
        connection: Connection to the listener.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read_request(self, first_byte_s: float, timeout_s: float) -> AgentRequest | None:
        """Read the head of the next request; None if the connection ends before it.

        Raises:
            RequestError: The request is invalid.
            PeerGone: The listener disconnected in the middle, or is too slow.
        """
        # The listener waits for the node as long as AgentPeer would; data may be under way.
        head = _receive_message(
            self._connection, _ForwardedHead, first_byte_s + timeout_s + LINGER_S
        )
        if head is None:
            return None
        if not 0 <= head.length <= MAX_BATCH_BYTES:
            raise RequestError(413, f"a batch has {MAX_BATCH_BYTES} bytes at the most")
        headers = {name.encode(): value for name, value in head.headers.items()}
        return AgentRequest(head.path, headers, head.length)

    def read_body(self, length: int, timeout_s: float) -> bytes:
        """Ask for the body of a request and read it.

        Raises:
            PeerGone: The listener disconnected in the middle, or is too slow.
        """
        _send_message(self._connection, _DaemonReply())
        return (
            _receive_exactly(self._connection, length, time.monotonic() + timeout_s + LINGER_S)
            or b""
        )

    def send_reply(
        self, status: int, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> None:
        """Send a reply.

        Raises:
            PeerGone: The listener does not accept it.
        """
        self._connection.settimeout(timeout_s)
        _send_message(self._connection, _DaemonReply(status=status, body=body, headers=headers))

    def linger(self, timeout_s: float) -> None:
        """Do nothing: the listener waits until the node has read the reply."""


# The listener's side


class NodeListener:
    """Listener process: serves nodes and forwards their requests to the daemon.

    Args:
        settings: Section [nodes], as received from the daemon.
        path: The daemon's socket.
        check_interval_s: Interval of checks for changed settings, in seconds.

    Raises:
        ListenUnavailable: The address cannot be bound.
        TlsUnavailable: A certificate cannot be used.
    """

    def __init__(
        self, settings: NodesSettings, path: str, *, check_interval_s: float = 10.0
    ) -> None:
        self._settings = settings
        self._path = path
        self._check_interval_s = check_interval_s
        self._last_problem = ""
        self._context: Context | None = None
        if settings.tls:
            self._context = make_server_context(settings.tls)
        listener = open_tcp_listener(settings.listen, BACKLOG)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._connections = AgentConnections(
            listener, settings.most_connections, settings.shared_from, self._serve, self._reject
        )

    def run(self, stop: Stop) -> None:
        """Serve until ``stop`` is set or the daemon reports changed settings of [nodes]."""
        log.info(
            "listening for nodes at %s port %d, %s",
            *self.address,
            "with TLS" if self._context else "without TLS: what they send can be read on its way",
        )
        checked_at = time.monotonic()
        while not stop.is_set():
            self._connections.serve_next(stop)
            if time.monotonic() - checked_at >= self._check_interval_s:
                checked_at = time.monotonic()
                if self._has_new_settings():
                    log.info("[nodes] has changed")
                    break
        self._connections.close()

    def _has_new_settings(self) -> bool:
        """Return whether the daemon's settings differ from those in use."""
        try:
            return _request_settings(self._path) != self._settings
        except Unavailable as error:
            self._log_problem(str(error))
            return False

    def _log_problem(self, message: str) -> None:
        """Log a problem with the daemon, once while it stays the same."""
        if message and message != self._last_problem:
            log.warning("%s", message)
        self._last_problem = message

    def _reject(self, sock: socket.socket) -> None:
        """Reject a node because the limit of connections is reached."""
        reject_connection(sock, is_secured=self._context is not None)

    def _serve(self, connection: AgentConnection) -> None:
        """Serve one node: connect to the daemon, pass the socket, forward requests."""
        try:
            peer = AgentPeer(secure_connection(connection, self._context))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
                try:
                    daemon.settimeout(SEND_TIMEOUT_S)
                    daemon.connect(self._path)
                    socket.send_fds(daemon, [_CONNECTION], [connection.sock.fileno()])
                except OSError as error:
                    self._log_problem(f"{self._path}: {error.strerror or error}")
                    peer.send_reply(
                        503, b"the daemon is away\n", {"Retry-After": "15"}, SEND_TIMEOUT_S
                    )
                    peer.linger(LINGER_S)
                    return
                self._log_problem("")
                while self._forward_request(connection, peer, daemon):
                    pass
        except (StewardError, OSError) as error:
            # Anybody on the network can cause this, so it is not a warning.
            log.debug("%s: %s", connection.address, error)
        except Exception:
            # A programming error must end this connection only.
            log.exception("the connection from %s failed", connection.address)

    def _forward_request(
        self, connection: AgentConnection, peer: AgentPeer, daemon: socket.socket
    ) -> bool:
        """Forward one request and its reply; return whether another may follow."""
        try:
            request = peer.read_request(
                IDLE_TIMEOUT_S if connection.is_known else IDENTIFY_TIMEOUT_S, IDENTIFY_TIMEOUT_S
            )
        except RequestError as error:
            peer.send_reply(
                error.status, f"{error}\n".encode(), {"Connection": "close"}, SEND_TIMEOUT_S
            )
            peer.linger(LINGER_S)
            return False
        if request is None:
            return False
        headers = {
            name.decode(): request.headers[name]
            for name in _FORWARDED_HEADERS
            if name in request.headers
        }
        # At its connection limit the daemon has replied already and reads no more.
        with contextlib.suppress(PeerGone):
            _send_message(
                daemon, _ForwardedHead(path=request.path, headers=headers, length=request.length)
            )
        reply = _receive_message(daemon, _DaemonReply, _DAEMON_TIMEOUT_S)
        if reply is not None and not reply.status:
            connection.is_known = True
            body = peer.read_body(request.length, BODY_TIMEOUT_S)
            daemon.settimeout(BODY_TIMEOUT_S)
            daemon.sendall(body)
            del body
            reply = _receive_message(daemon, _DaemonReply, _DAEMON_TIMEOUT_S)
        if reply is None:
            return False  # the node has opened another connection, or the daemon is stopping
        peer.send_reply(reply.status or 503, reply.body, reply.headers, SEND_TIMEOUT_S)
        if reply.status != 200:
            connection.is_known = False
            peer.linger(LINGER_S)
            return False
        return not request.closes_connection


def run_listener(path: str) -> None:
    """Run the listener until SIGTERM or SIGINT.

    Args:
        path: The daemon's socket for the listener.

    Raises:
        StewardError: The daemon rejects this user, or the address is in use.
    """
    refuse_core_dumps()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    backoff = Backoff(0.2, 5.0)
    has_warned = False
    while not stop.is_set():
        try:
            settings = _request_settings(path)
        except Unavailable as error:
            if not has_warned:
                log.warning("waiting for the daemon: %s", error)
                has_warned = True
            stop.wait(backoff.next_s())
        else:
            NodeListener(settings, path).run(stop)


def _request_settings(path: str) -> NodesSettings:
    """Ask the daemon for the settings of [nodes].

    Raises:
        Unavailable: It does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.settimeout(SEND_TIMEOUT_S)
        try:
            daemon.connect(path)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror or error}", path) from error
        with contextlib.suppress(OSError, PeerGone):
            daemon.sendall(_SETTINGS)
            try:
                reply = _receive_message(daemon, _SettingsReply, SEND_TIMEOUT_S)
            except RequestError:
                raise Unavailable(
                    f"{path}: the daemon hears no more nodes just now", path
                ) from None
            if reply is not None:
                return reply.nodes
    raise Unavailable(f"{path}: the daemon does not let uid {os.geteuid()} listen", path)


# Shared by both sides


def secure_connection(connection: AgentConnection, context: Context | None) -> socket.socket:
    """Prepare an accepted connection, with TLS if there is a context.

    Raises:
        OSError: The client disconnected, or does not speak TLS.
    """
    connection.sock.settimeout(IDENTIFY_TIMEOUT_S)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        secured = context.wrap_socket(
            connection.sock, server_side=True, do_handshake_on_connect=False
        )
        connection.sock = secured
        secured.do_handshake()
    return connection.sock


def reject_connection(sock: socket.socket, *, is_secured: bool) -> None:
    """Reject a connection because the limit is reached."""
    with sock:
        if is_secured:
            return  # a TLS handshake would take too long
        try:
            AgentPeer(sock).send_reply(503, _NO_ROOM, {"Retry-After": "5"}, 0.1)
        except StewardError as error:
            log.debug("%s", error)


def _send_message(connection: socket.socket, message: Any) -> None:
    """Send one message with its length prefix."""
    data = msgspec.msgpack.encode(message)
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise PeerGone(f"it takes nothing: {error.strerror or error}") from error


def _receive_message(
    connection: socket.socket, message_type: type[Kind], timeout_s: float
) -> Kind | None:
    """Receive one message; None if the connection ended before it.

    Raises:
        RequestError: The message is invalid.
        PeerGone: The other side disconnected in the middle, or is too slow.
    """
    deadline = time.monotonic() + timeout_s
    length = _receive_exactly(connection, _LENGTH.size, deadline, may_end=True)
    if length is None:
        return None
    (size,) = _LENGTH.unpack(length)
    if size > _MAX_MESSAGE_SIZE:
        raise RequestError(431, f"what is said has more than {_MAX_MESSAGE_SIZE} bytes")
    data = _receive_exactly(connection, size, deadline)
    try:
        return msgspec.msgpack.decode(data or b"", type=message_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"what is said cannot be read: {error}") from error


def _receive_exactly(
    connection: socket.socket, size: int, deadline: float, *, may_end: bool = False
) -> bytes | None:
    """Read an exact number of bytes; None at the end of the stream if ``may_end``."""
    data = bytearray()
    while len(data) < size:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise PeerGone("it is too slow")
        try:
            connection.settimeout(remaining_s)
            chunk = connection.recv(min(size - len(data), 1 << 16))
        except TimeoutError:
            raise PeerGone("it is too slow") from None
        except OSError as error:
            raise PeerGone(str(error.strerror or error)) from error
        if not chunk:
            if may_end and not data:
                return None
            raise PeerGone("it went away in the middle")
        data += chunk
    return bytes(data)
