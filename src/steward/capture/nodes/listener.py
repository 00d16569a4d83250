"""Node listener: the network-facing process for agents, under a separate uid.

It accepts connections, terminates TLS and parses HTTP. It forwards head, credential and body of
each request unchanged, as HTTP over a Unix socket. The daemon, which runs as SlurmUser, decodes
MUNGE and decides. The listener also passes the connected socket, so that the daemon asks the kernel
for the peer's address. A compromised listener can withhold and delay reports, but not forge them.

With client certificates (client_ca_file of its [tls.NAME]) the daemon listens itself, because the
process that terminates TLS decides which node speaks.

:class:`ListenerEndpoint` is the daemon's side, :class:`NodeListener` and ``run_listener`` the
listener's. Both check requests with ``parse_length``.
"""

import asyncio
import contextlib
import logging
import os
import pwd
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any, Final

import h11
import msgspec

from steward.capture.settings import LISTENER_SOCKET, NodesSettings
from steward.core.config import Settings
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.http_server import (
    ClientConnection,
    Receive,
    ServerConfig,
    open_http_listener,
    send_text,
    serve_http,
)
from steward.core.listeners import ListenUnavailable, open_unix_listener
from steward.core.processes import refuse_core_dumps
from steward.core.rpc_server import get_peer_uid
from steward.core.waits import Backoff, Stop

log = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = (1 << 20) + (64 << 10)
"""Maximum size of a batch, in bytes; agents send a megabyte at most."""
_BACKLOG: Final = 1024
"""Backlog of the daemon's socket."""
_PASS_TIMEOUT_S: Final = 1.0
"""Maximum time until the listener has passed a node's socket, in seconds."""
_SETTINGS_TIMEOUT_S: Final = 10.0
"""Maximum time for the daemon's settings, in seconds."""
_DAEMON_TIMEOUT_S: Final = 90.0
"""Maximum time for the daemon's reply, in seconds; it waits for turns and for the journal."""
_CONNECTION: Final = b"c"
"""First byte of a connection for a request: it passes a node's socket, and HTTP follows."""
_SETTINGS: Final = b"s"
"""First byte of a connection that asks for the settings."""
_LENGTH: Final = re.compile(rb"[0-9]{1,10}")
_FORWARDED_HEADERS: Final = (b"steward-batch", b"steward-credential", b"content-length")
"""Headers of a request that the daemon uses."""
_RETURNED_HEADERS: Final = ("connection", "retry-after", "steward-credential")
"""Headers of a reply that agents use."""


class RequestError(StewardError):
    """Error: a request is invalid or not supported.

    Args:
        status: HTTP status of the reply.
        message: Reason, as text.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_length(scope: Any) -> int:
    """Return the length of a batch from the head of its request.

    Raises:
        RequestError: It is no request of an agent.
    """
    if scope["method"] != "POST" or scope["http_version"] != "1.1":
        raise RequestError(400, "only HTTP/1.1 POST is accepted")
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if b"transfer-encoding" in headers or not _LENGTH.fullmatch(length):
        raise RequestError(
            411,
            "the batch lacks a valid Content-Length: install the agent of Steward's version",
        )
    if int(length) > MAX_BATCH_BYTES:
        raise RequestError(413, f"the batch is larger than {MAX_BATCH_BYTES} bytes, the maximum")
    return int(length)


async def read_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Read the body of a request, piece by piece.

    Raises:
        RequestError: The client disconnected, or is too slow.
    """
    more_body = True
    while more_body:
        try:
            message = await receive()
        except TimeoutError:
            raise RequestError(408, "the node sends its batch too slowly") from None
        if message["type"] == "http.disconnect":
            raise RequestError(400, "the node disconnected in the middle of a batch")
        yield message["body"]
        more_body = message["more_body"]


def make_server_config(nodes: NodesSettings) -> ServerConfig:
    """Return the configuration of the HTTP server for agents."""
    return ServerConfig(
        name="nodes",
        section="[nodes]",
        listen=nodes.listen,
        tls=nodes.tls,
        shared=nodes.behind_nat,
        identifies=True,
    )


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
            self.listener = open_unix_listener(path, _BACKLOG, self._uids)
        except KeyError:
            raise ListenUnavailable(
                f"unknown user {self._settings.listener!r}: correct 'listener' in [nodes]", path
            ) from None
        except OSError as error:
            raise ListenUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error

    async def find_address(self, connection: socket.socket) -> str:
        """Return the address of the node whose socket the listener passes.

        Raises:
            PermissionRefused: It is not the listener, passes no node's connection, or only asked
                for the settings, which it has now.
            Unavailable: The listener disconnected or is too slow.
        """
        uid = get_peer_uid(connection)
        if uid not in self._uids:
            raise PermissionRefused(
                f"uid {uid} is not the listener's user: correct 'listener' in [nodes]"
            )
        is_readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, is_readable.set)
        try:
            async with asyncio.timeout(_PASS_TIMEOUT_S):
                await is_readable.wait()
            first_byte, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise Unavailable(f"no data from the listener: {error}") from error
        finally:
            loop.remove_reader(connection)
        try:
            if first_byte == _SETTINGS:
                connection.send(msgspec.msgpack.encode(self._settings))
                raise PermissionRefused(
                    "the listener sent a request for its settings, not a node's connection"
                )
            if first_byte != _CONNECTION or len(fds) != 1:
                raise PermissionRefused("the listener sent a message without a connection")
            return _read_peer_address(fds[0])
        finally:
            for fd in fds:
                os.close(fd)


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
            f"the socket from the listener is not connected: {error.strerror}"
        ) from error
    raise PermissionRefused("the socket from the listener is not an IP connection")


# The listener's side


class NodeListener:
    """Listener process: serves nodes and forwards their requests to the daemon.

    Args:
        settings: Section [nodes], as received from the daemon.
        path: The daemon's socket.
        check_interval_s: Interval of checks for changed settings, in seconds.

    Raises:
        ListenUnavailable: The address cannot be bound.
    """

    def __init__(
        self, settings: NodesSettings, path: str, *, check_interval_s: float = 10.0
    ) -> None:
        self._settings = settings
        self._path = path
        self._check_interval_s = check_interval_s
        self._last_problem = ""
        self._config = make_server_config(settings)
        self._listener = open_http_listener(self._config)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def run(self, stop: Stop) -> None:
        """Serve until ``stop`` is set or the daemon reports changed settings of [nodes].

        Raises:
            ServingError: The certificate cannot be used.
        """
        ended = Stop()
        threading.Thread(target=self._watch_settings, args=(stop, ended), daemon=True).start()
        serve_http(self._config, self._answer, self._listener, ended, lambda: None)

    def _watch_settings(self, stop: Stop, ended: Stop) -> None:
        """Set ``ended`` when ``stop`` is set, or the daemon's settings differ from those in use."""
        has_changed = False
        while not (stop.is_set() or has_changed):
            try:
                has_changed = _request_settings(self._path) != self._settings
            except Unavailable as error:
                self._log_problem(str(error))
            if has_changed:
                log.info("reloading [nodes]")
            else:
                stop.wait(self._check_interval_s)
        ended.set()

    def _log_problem(self, message: str) -> None:
        """Log a problem with the daemon, once while it stays the same."""
        if message and message != self._last_problem:
            log.warning("%s", message)
        self._last_problem = message

    async def _answer(self, scope: Any, receive: Receive, send: Any) -> None:
        """Answer a request of a node with the daemon's reply."""
        try:
            parse_length(scope)
            reply = await self._forward_request(scope, receive)
        except RequestError as error:
            await send_text(send, error.status, f"{error}\n".encode(), {"Connection": "close"})
        except (OSError, h11.ProtocolError) as error:
            self._log_problem(f"{self._path}: {getattr(error, 'strerror', '') or error}")
            headers = {"Connection": "close", "Retry-After": "15"}
            await send_text(send, 503, b"the daemon is away\n", headers)
        else:
            self._log_problem("")
            await send_text(send, *reply)

    async def _forward_request(
        self, scope: Any, receive: Receive
    ) -> tuple[int, bytes, dict[str, str]]:
        """Forward a request; return status, body and headers of the daemon's reply.

        Raises:
            OSError: The daemon is away, or too slow.
            h11.ProtocolError: The daemon is stopping.
            RequestError: The node disconnected, or is too slow.
        """
        connection: ClientConnection = scope["state"]["connection"]
        headers = [(b"host", b"steward"), (b"expect", b"100-continue")]
        headers += [item for item in scope["headers"] if item[0] in _FORWARDED_HEADERS]
        async with _connect_daemon(self._path, connection.fileno()) as daemon:
            await daemon.send(h11.Request(method="POST", target=scope["raw_path"], headers=headers))
            event = await daemon.receive()
            if isinstance(event, h11.InformationalResponse):
                # The daemon knows the node, and wants the body.
                connection.identify()
                async for chunk in read_chunks(receive):
                    await daemon.send(h11.Data(data=chunk))
                await daemon.send(h11.EndOfMessage())
                event = await daemon.receive()
            if not isinstance(event, h11.Response):
                raise h11.RemoteProtocolError("the daemon is stopping")
            body = b""
            while isinstance(data := await daemon.receive(), h11.Data):
                body += data.data
        returned = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        return (
            event.status_code,
            body,
            {name: returned[name] for name in _RETURNED_HEADERS if name in returned},
        )


class _DaemonStream:
    """Connection to the daemon for one request of a node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, event: h11.Event) -> None:
        """Send a part of the request."""
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def receive(self) -> Any:
        """Receive the next part of the reply."""
        async with asyncio.timeout(_DAEMON_TIMEOUT_S):
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(1 << 16))
        return event


@contextlib.asynccontextmanager
async def _connect_daemon(path: str, node_fd: int) -> AsyncIterator[_DaemonStream]:
    """Connect to the daemon, and pass it a node's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.setblocking(False)
        daemon.connect(path)
        socket.send_fds(daemon, [_CONNECTION], [node_fd])
        reader, writer = await asyncio.open_unix_connection(sock=daemon)
        try:
            yield _DaemonStream(reader, writer)
        finally:
            writer.close()


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
        daemon.settimeout(_SETTINGS_TIMEOUT_S)
        try:
            daemon.connect(path)
            daemon.sendall(_SETTINGS)
            data = daemon.makefile("rb").read()
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror or error}", path) from error
    if not data:
        raise Unavailable(
            f"{path}: the daemon does not accept uid {os.geteuid()} as listener: correct "
            "'listener' in [nodes]",
            path,
        )
    return msgspec.msgpack.decode(data, type=NodesSettings)
