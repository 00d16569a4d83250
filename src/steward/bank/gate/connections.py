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
from steward.core.waits import Backoff

if TYPE_CHECKING:
    import ssl

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
        longest: Maximum length of a line that it may send, in bytes.
        within_s: Seconds within which it must send a whole line, or read its answer.
        stays: Whether the peer may send further lines after an answer.
    """

    def __init__(
        self, connection: socket.socket, *, longest: int, within_s: float, stays: bool = False
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fd = connection.fileno()
        self.stays = stays
        self.is_over = False
        self.out = bytearray()
        self._within_s = within_s
        self._longest = longest
        self._in = bytearray()
        self.until = time.monotonic() + within_s

    def take(self) -> list[bytes]:
        """Read and return the complete lines received; end the connection at EOF or a long line."""
        lines: list[bytes] = []
        while not self.is_over:
            data = self._receive()
            if data is None:
                break
            if not data:
                self.is_over = True
                break
            self._in += data
            if b"\n" in data:
                *whole, rest = bytes(self._in).split(b"\n")
                self._in = bytearray(rest)
                lines += whole
                self.until = time.monotonic() + self._within_s
                if not self.stays:
                    break
            if len(self._in) > self._longest:
                log.warning("a peer of the gate sent a line that is too long")
                self.is_over = True
        return lines

    def send(self, data: bytes) -> None:
        """Send as much as the peer accepts now; keep the rest in ``out``."""
        self.out += data
        while self.out and not self.is_over:
            sent = self._send()
            if sent is None:
                break
            del self.out[:sent]
        if len(self.out) > _MOST_WAITING:
            self.is_over = True
        if not self.out and not self.stays:
            self.is_over = True

    def close(self) -> None:
        """Close the connection."""
        self.is_over = True
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
            self.is_over = True  # the peer is gone: nobody to report to
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
            fresh = f"{os.path.basename(path)}.{os.getpid()}"
            made = os.path.join(directory, fresh)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
            listener.bind(f"/proc/self/fd/{fd}/{fresh}")
            restrict_socket(made, uids)
            listener.listen(1024)
            if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise GateUnavailable(f"{path} is there and is no socket: remove it", path)
            os.replace(made, path)
        finally:
            os.close(fd)
    except OSError as error:
        listener.close()
        raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error
    listener.setblocking(False)
    own = os.lstat(path).st_ino
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if os.lstat(path).st_ino == own:
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
        poll: The epoll that waits for its socket.
        answered: Called with each reply line; with None if none came in time.
    """

    def __init__(self, settings: GateSettings, poll: select.epoll, answered: ReplyCallback) -> None:
        self._settings = settings
        self._poll = poll
        self._answered = answered
        self._context: ssl.SSLContext | None = None
        self._peer: TlsPeer | None = None
        self._is_up = False
        self._number = 0
        self._waiting: dict[int, tuple[GatePeer, PluginRequest, float]] = {}
        self._backoff = Backoff(0.2, 5.0)
        self._try_at = 0.0

    def pass_on(self, peer: GatePeer, ask: PluginRequest) -> None:
        """Forward a plugin's request to the other gate."""
        if self._peer is None or not self._is_up:
            self._answered(peer, ask, None)
            return
        self._number += 1
        until = time.monotonic() + self._settings.timeout_ms / 1000 * _TIMEOUT_SHARE
        self._waiting[self._number] = (peer, ask, until)
        numbered = msgspec.structs.replace(ask, id=self._number)
        self._peer.send(_encode_request(numbered) + b"\n")
        self._watch()

    def wait_s(self) -> float:
        """Return the seconds until the next time-out or connection attempt."""
        if self._waiting:
            # Requests are in order and share one time-out, so the first expires first.
            first = next(iter(self._waiting.values()))
            return max(0.0, first[2] - time.monotonic())
        if self._peer is None:
            return max(0.0, self._try_at - time.monotonic())
        return _WAIT_S

    def turn(self) -> None:
        """Answer overdue requests with None; reconnect if the connection is lost."""
        now = time.monotonic()
        for number, (peer, ask, until) in list(self._waiting.items()):
            if until > now:
                break
            del self._waiting[number]
            self._answered(peer, ask, None)
        if self._peer is not None and (
            self._peer.is_over or (not self._is_up and self._peer.until < now)
        ):
            self._lost()
        if self._peer is None and now >= self._try_at:
            self._connect()

    def served(self, mask: int) -> None:
        """Handle readable or writable events of the connection."""
        if self._peer is None:
            return
        if not self._is_up:
            self._shake()
            return
        if mask & select.EPOLLOUT:
            self._peer.send(b"")
        for line in self._peer.take():
            self._heard(line)
        self._watch()

    def _heard(self, line: bytes) -> None:
        """Match a reply line with its request, and pass it on."""
        try:
            number = _decode_header(line)
        except msgspec.MsgspecError as error:
            log.warning("the gate at %s answers rubbish: %s", self._settings.ask, error)
            number = _ReplyHeader(v=0, id=0)
        if number.v != VERSION:
            if self._peer is not None:
                self._peer.is_over = True
            return
        waiting = self._waiting.pop(number.id, None)
        if waiting is not None:
            self._answered(waiting[0], waiting[1], line + b"\n")

    def _connect(self) -> None:
        """Open a TCP connection to the other gate, and start the TLS handshake."""
        from steward.bank.gate.tls import TlsPeer, make_tls_context

        self._try_at = time.monotonic() + self._backoff.next_s()
        host, port = split_address(self._settings.ask)
        try:
            if self._context is None:
                self._context = make_tls_context(self._settings, serves=False)
            # An address or a name in /etc/hosts. Slow name resolution delays only requests that
            # could not be forwarded anyway.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            connection = socket.socket(found[0][0], socket.SOCK_STREAM)
            connection.settimeout(self._settings.timeout_ms / 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(found[0][4])
            connection.setblocking(False)
            secure = self._context.wrap_socket(
                connection, server_hostname=host, do_handshake_on_connect=False
            )
        except (OSError, GateUnavailable) as error:
            log.warning("the gate at %s cannot be asked: %s", self._settings.ask, error)
            return
        self._peer = TlsPeer(secure, longest=LONGEST_REQUEST, within_s=_CONNECT_S, stays=True)
        self._poll.register(self._peer.fd, select.EPOLLIN | select.EPOLLOUT)
        self._shake()

    def _shake(self) -> None:
        """Continue the TLS handshake."""
        import ssl

        assert self._peer is not None
        try:
            self._peer.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._poll.modify(self._peer.fd, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._poll.modify(self._peer.fd, select.EPOLLIN | select.EPOLLOUT)
        except OSError as error:
            log.warning("the gate at %s is not to be trusted: %s", self._settings.ask, error)
            self._lost()
        else:
            self._is_up = True
            self._backoff.reset()
            self._watch()
            log.info("asking the gate at %s", self._settings.ask)

    def _watch(self) -> None:
        if self._peer is not None and not self._peer.is_over:
            waits = select.EPOLLOUT if self._peer.out else 0
            self._poll.modify(self._peer.fd, select.EPOLLIN | waits)

    def _lost(self) -> None:
        """Close the connection, and answer all waiting requests with None."""
        if self._peer is None:
            return
        if self._is_up:
            log.warning("the connection to the gate at %s is gone", self._settings.ask)
        self._poll.unregister(self._peer.fd)
        self._peer.close()
        self._peer = None
        self._is_up = False
        self._try_at = max(self._try_at, time.monotonic() + self._backoff.next_s())
        waiting, self._waiting = self._waiting, {}
        for peer, ask, _ in waiting.values():
            self._answered(peer, ask, None)
