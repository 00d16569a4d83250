"""Socket connections of the gate: submit plugins, Steward's own processes, and other gates.

`GatePeer` is one non-blocking connection with a line buffer and a time-out, so that a slow, silent
or faulty peer costs one descriptor for a second. `get_socket_uid` identifies a local peer, and
`unix_listener` makes a socket file with access control. `RemoteGate` keeps the connection to the
gate on another host that decides, and forwards plugin requests to it over TLS (`tls.py`).

Nothing here blocks: `server.py` waits for all descriptors with one epoll. A plugin sends one line
and gets one back; another gate keeps its connection and sends many.
"""

import contextlib
import logging
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate.requests import LONGEST_REQUEST, VERSION, PluginRequest
from steward.bank.settings import GateSettings
from steward.core.listeners import restrict_socket
from steward.core.section import TlsSettings
from steward.core.tls import Context, TlsUnavailable, make_client_context
from steward.core.waits import Backoff

if TYPE_CHECKING:
    from steward.bank.gate.tls import TlsPeer


log = logging.getLogger(__name__)

_PEERCRED: Final = struct.Struct("3i")
CHUNK: Final = 1 << 18
"""Maximum number of bytes per read."""
_MOST_WAITING: Final = 32 << 20
"""Maximum number of unsent bytes of one peer; beyond it the connection is dropped."""


class GatePeer:
    """One non-blocking connection of the gate, with its line buffers and time-out.

    Args:
        connection: Its socket; set to non-blocking.
        max_line: Maximum length of a line that it may send, in bytes.
        timeout_s: Seconds within which it must send a whole line, or read its answer.
        keeps_open: Whether the peer may send further lines after an answer.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        max_line: int,
        timeout_s: float,
        keeps_open: bool = False,
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fd = connection.fileno()
        self.keeps_open = keeps_open
        self.is_ended = False
        self.out = bytearray()
        self._timeout_s = timeout_s
        self._max_line = max_line
        self._received = bytearray()
        self.deadline = time.monotonic() + timeout_s

    def read_lines(self) -> list[bytes]:
        """Read and return the complete lines received; end the connection at EOF or a long line."""
        lines: list[bytes] = []
        while not self.is_ended:
            data = self._receive()
            if data is None:
                break
            if not data:
                self.is_ended = True
                break
            self._received += data
            if b"\n" in data:
                *complete, rest = bytes(self._received).split(b"\n")
                self._received = bytearray(rest)
                lines += complete
                self.deadline = time.monotonic() + self._timeout_s
                if not self.keeps_open:
                    break
            if len(self._received) > self._max_line:
                log.warning("a peer of the gate sent a line that is too long")
                self.is_ended = True
        return lines

    def send(self, data: bytes) -> None:
        """Send as much as the peer accepts now; keep the rest in ``out``."""
        self.out += data
        while self.out and not self.is_ended:
            sent = self._send()
            if sent is None:
                break
            del self.out[:sent]
        if len(self.out) > _MOST_WAITING:
            self.is_ended = True
        if not self.out and not self.keeps_open:
            self.is_ended = True

    def close(self) -> None:
        """Close the connection."""
        self.is_ended = True
        self.socket.close()

    def _receive(self) -> bytes | None:
        """Read available bytes: b"" at the end, None if there are none yet."""
        try:
            return self.socket.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # the peer is gone: nobody to report to

    def _send(self) -> int | None:
        """Send buffered bytes; return their number, None if the peer accepts none now."""
        try:
            return self.socket.send(self.out)
        except BlockingIOError:
            return None
        except OSError:
            self.is_ended = True  # the peer is gone: nobody to report to
            return None


def get_socket_uid(connection: socket.socket) -> int:
    """Return the uid of a Unix socket's peer, from SO_PEERCRED."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return int(_PEERCRED.unpack(data)[1])


@contextlib.contextmanager
def unix_listener(path: str, uids: Iterable[int] = ()) -> Iterator[socket.socket]:
    """Listen on a Unix socket path, replacing the socket of a former process.

    Args:
        path: Path of the socket file.
        uids: Users who may connect, besides Steward's user and root.

    Raises:
        GateUnavailable: The socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o755, exist_ok=True)
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Long paths exceed sun_path; the link in /proc does not. The socket is bound under
            # another name and renamed, so its path never exists without a listener.
            temporary_name = f"{os.path.basename(path)}.{os.getpid()}"
            temporary_path = os.path.join(directory, temporary_name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary_path)
            listener.bind(f"/proc/self/fd/{fd}/{temporary_name}")
            restrict_socket(temporary_path, uids)
            listener.listen(1024)
            if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise GateUnavailable(f"{path} is there and is no socket: remove it", path)
            os.replace(temporary_path, path)
        finally:
            os.close(fd)
    except OSError as error:
        listener.close()
        raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error
    listener.setblocking(False)
    inode = os.lstat(path).st_ino
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if os.lstat(path).st_ino == inode:
                os.unlink(path)


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_TIMEOUT_SHARE: Final = 0.7
"""Part of the plugin's time-out granted to the other gate; the rest covers the way there and
back."""
_CONNECT_S: Final = 5.0
"""Time-out of connection and handshake, in seconds."""
_WAIT_S: Final = 1.0
"""Longest wait of an idle connection, in seconds."""

ReplyCallback = Callable[[GatePeer, PluginRequest, bytes | None], None]
"""Callback for a reply: the plugin's connection, its request, and the line or None."""


class _ReplyHeader(msgspec.Struct):
    """Header of a reply: protocol version and request id."""

    v: int
    id: int


_decode_header = msgspec.json.Decoder(_ReplyHeader).decode
_encode_request = msgspec.json.Encoder().encode


class RemoteGate:
    """Client connection to the gate on another host that decides: forwards plugin requests.

    Each forwarded request has a number, so that many share the one connection. If a reply is late,
    the outage policy answers: slurmctld waits no longer.

    Args:
        settings: The section [gate].
        epoll: The epoll that waits for its socket.
        on_reply: Called with each reply line; with None if none came in time.
    """

    def __init__(
        self, settings: GateSettings, epoll: select.epoll, on_reply: ReplyCallback
    ) -> None:
        self._settings = settings
        self._epoll = epoll
        self._on_reply = on_reply
        self._tls_context: Context | None = None
        self._peer: TlsPeer | None = None
        self._is_connected = False
        self._last_id = 0
        self._pending: dict[int, tuple[GatePeer, PluginRequest, float]] = {}
        self._backoff = Backoff(0.2, 5.0)
        self._retry_at = 0.0

    def forward(self, peer: GatePeer, request: PluginRequest) -> None:
        """Forward a plugin's request to the other gate."""
        if self._peer is None or not self._is_connected:
            self._on_reply(peer, request, None)
            return
        self._last_id += 1
        deadline = time.monotonic() + self._settings.timeout_ms / 1000 * _TIMEOUT_SHARE
        self._pending[self._last_id] = (peer, request, deadline)
        numbered = msgspec.structs.replace(request, id=self._last_id)
        self._peer.send(_encode_request(numbered) + b"\n")
        self._update_epoll()

    def get_wait_s(self) -> float:
        """Return the seconds until the next time-out or connection attempt."""
        if self._pending:
            # Requests are in order and share one time-out, so the first expires first.
            oldest = next(iter(self._pending.values()))
            return max(0.0, oldest[2] - time.monotonic())
        if self._peer is None:
            return max(0.0, self._retry_at - time.monotonic())
        return _WAIT_S

    def maintain(self) -> None:
        """Answer overdue requests with None; reconnect if the connection is lost."""
        now = time.monotonic()
        for request_id, (peer, request, deadline) in list(self._pending.items()):
            if deadline > now:
                break
            del self._pending[request_id]
            self._on_reply(peer, request, None)
        if self._peer is not None and (
            self._peer.is_ended or (not self._is_connected and self._peer.deadline < now)
        ):
            self._disconnect()
        if self._peer is None and now >= self._retry_at:
            self._connect()

    def handle_events(self, mask: int) -> None:
        """Handle readable or writable events of the connection."""
        if self._peer is None:
            return
        if not self._is_connected:
            self._continue_handshake()
            return
        if mask & select.EPOLLOUT:
            self._peer.send(b"")
        for line in self._peer.read_lines():
            self._handle_reply(line)
        self._update_epoll()

    def _handle_reply(self, line: bytes) -> None:
        """Match a reply line with its request, and pass it on."""
        try:
            header = _decode_header(line)
        except msgspec.MsgspecError as error:
            log.warning("the gate at %s answers rubbish: %s", self._settings.ask, error)
            header = _ReplyHeader(v=0, id=0)
        if header.v != VERSION:
            if self._peer is not None:
                self._peer.is_ended = True
            return
        pending = self._pending.pop(header.id, None)
        if pending is not None:
            self._on_reply(pending[0], pending[1], line + b"\n")

    def _connect(self) -> None:
        """Open a TCP connection to the other gate, and start the TLS handshake."""
        from steward.bank.gate.tls import TlsPeer

        self._retry_at = time.monotonic() + self._backoff.next_s()
        host, port = split_address(self._settings.ask)
        try:
            if self._tls_context is None:
                self._tls_context = make_client_context(self._settings.tls or TlsSettings())
            # An address or a name in /etc/hosts. Slow name resolution delays only requests that
            # could not be forwarded anyway.
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            connection = socket.socket(addresses[0][0], socket.SOCK_STREAM)
            connection.settimeout(self._settings.timeout_ms / 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(addresses[0][4])
            connection.setblocking(False)
            tls_socket = self._tls_context.wrap_socket(
                connection, server_hostname=host, do_handshake_on_connect=False
            )
        except (OSError, TlsUnavailable) as error:
            log.warning("the gate at %s cannot be asked: %s", self._settings.ask, error)
            return
        self._peer = TlsPeer(
            tls_socket, max_line=LONGEST_REQUEST, timeout_s=_CONNECT_S, keeps_open=True
        )
        self._epoll.register(self._peer.fd, select.EPOLLIN | select.EPOLLOUT)
        self._continue_handshake()

    def _continue_handshake(self) -> None:
        """Continue the TLS handshake."""
        import ssl

        assert self._peer is not None
        try:
            self._peer.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(self._peer.fd, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(self._peer.fd, select.EPOLLIN | select.EPOLLOUT)
        except OSError as error:
            log.warning("the gate at %s is not to be trusted: %s", self._settings.ask, error)
            self._disconnect()
        else:
            self._is_connected = True
            self._backoff.reset()
            self._update_epoll()
            log.info("asking the gate at %s", self._settings.ask)

    def _update_epoll(self) -> None:
        if self._peer is not None and not self._peer.is_ended:
            waits = select.EPOLLOUT if self._peer.out else 0
            self._epoll.modify(self._peer.fd, select.EPOLLIN | waits)

    def _disconnect(self) -> None:
        """Close the connection, and answer all waiting requests with None."""
        if self._peer is None:
            return
        if self._is_connected:
            log.warning("the connection to the gate at %s is gone", self._settings.ask)
        self._epoll.unregister(self._peer.fd)
        self._peer.close()
        self._peer = None
        self._is_connected = False
        self._retry_at = max(self._retry_at, time.monotonic() + self._backoff.next_s())
        pending, self._pending = self._pending, {}
        for peer, request, _ in pending.values():
            self._on_reply(peer, request, None)
