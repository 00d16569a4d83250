"""HTTP server: runs an ASGI application in uvicorn, with limits on slow and many clients.

``open_http_listener`` and ``serve_http`` run a server from its :class:`ServerConfig`; every
TCP listener of Steward that speaks HTTP uses them. :class:`TimeLimitedProtocol` and
``limit_body_time`` drop a client that exceeds one of the :class:`Timeouts`; the application alone
decides how long an answer takes. ``limit_concurrency`` answers requests above the limit with 503,
``reject_two_lengths`` ambiguous ones with 400, ``answer_head`` answers HEAD. A ``ConnectionLimit``
limits the open connections of one address that have sent no whole request, have not finished the
TLS handshake, or do not read their answer.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from steward.core.errors import StewardError
from steward.core.listeners import ConnectionLimit, ReportingListener, open_tcp_listener
from steward.core.section import TlsReference
from steward.core.tls import TlsUnavailable, make_server_context, read_peer_names
from steward.core.waits import Stop

log = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 5
"""Time an idle connection stays open, in seconds."""
_GRACE_S: Final = 3
"""Time to finish requests after a stop, in seconds."""
_MAX_CONCURRENT_REQUESTS: Final = 512
"""Most concurrent requests; others are answered with 503."""
_MAX_IDLE_CONNECTIONS: Final = 256
"""Most connections without a whole request, of all clients together."""
_MAX_IDLE_OF_ADDRESS: Final = 32
"""Most connections without a whole request from one address."""
_BACKLOG: Final = 1024
"""Connections that the kernel queues."""
_MAX_READ_PAUSE_S: Final = 60.0
"""Longest pause of a client while it reads an answer, in seconds."""
_MAX_HEAD_BYTES: Final = 16 << 10
"""Largest head of a request, in bytes."""

Receive = Callable[[], Any]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of clients, in seconds.

    Attributes:
        head_s: Longest time until the head of a request is complete.
        request_s: Longest time from then until the body is complete.
    """

    head_s: float = 10.0
    request_s: float = 30.0


class TimeLimitedProtocol(H11Protocol):
    """HTTP/1.1 protocol of uvicorn, with time limits on request heads and on reading answers."""

    connection_limit: ConnectionLimit
    timeouts: Timeouts
    _number: int = 0
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Count a new connection and start the timer of its first request."""
        super().connection_made(transport)
        self._number = self.connection_limit.get_number(transport.get_extra_info("socket").fileno())
        # The state of each request's scope: with client_ca_file, who the client is.
        names = read_peer_names(transport.get_extra_info("ssl_object"))
        self.app_state = {**self.app_state, "peer_names": names}
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes on, unless the connection was already dropped."""
        if not self.connection_limit.has(self._number):
            # Data that the client sent before the shutdown can still arrive.
            self.transport.abort()
            return
        super().data_received(data)
        self._update_head_timer()
        self._update_count()

    def on_response_complete(self) -> None:
        """Update the connection's count after a complete answer."""
        super().on_response_complete()
        self._update_count()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the count and stop its timers."""
        super().connection_lost(exc)
        self.connection_limit.remove(self._number)
        self._stop_head_timer()
        self._stop_read_timer()

    def pause_writing(self) -> None:
        """Start the read timer: the client does not read its answer."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(_MAX_READ_PAUSE_S, self._abort_slow)
        self._update_count()

    def resume_writing(self) -> None:
        """Stop the read timer: the client reads again."""
        super().resume_writing()
        self._stop_read_timer()
        self._update_count()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _update_count(self) -> None:
        """Count the connection in the limit only while the server waits for the client."""
        cycle: RequestResponseCycle | None = self.cycle
        is_whole = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_whole and self._read_timer is None:
            self.connection_limit.mark_busy(self._number)
        else:
            self.connection_limit.mark_idle(self._number)

    def _update_head_timer(self) -> None:
        """Run the timer exactly while a request's head is incomplete."""
        # uvicorn's type says that there always is a cycle, but it starts with None.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeouts.head_s, self._abort_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _abort_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    """A uvicorn server that a Stop ends and that reports a heartbeat."""

    def __init__(
        self, config: uvicorn.Config, stop: Stop, send_heartbeat: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._send_heartbeat = send_heartbeat

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process stops by its Stop."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Report a heartbeat ten times a second; return whether to stop."""
        self._send_heartbeat()
        return await super().on_tick(counter) or self._stop.is_set()


def limit_body_time(app: Any, request_s: float) -> Any:
    """Wrap an application so that it abandons request bodies that take more than ``request_s``."""

    async def within(scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        until = asyncio.get_running_loop().time() + request_s
        has_all = False

        async def receive_in_time() -> Any:
            nonlocal has_all
            if has_all:
                # The body is complete; the application now waits for the client to disconnect.
                return await receive()
            async with asyncio.timeout_at(until):
                message = await receive()
            has_all = not message.get("more_body", False)
            return message

        await app(scope, receive_in_time, send)

    return within


def limit_concurrency(app: Any) -> Any:
    """Wrap an application so that it answers 503 above a number of concurrent requests.

    uvicorn's own limit counts connections: those that ``ConnectionLimit`` has just shut down count
    for a moment longer, so it rejected requests of other clients.
    """
    running = 0

    async def answered(scope: Any, receive: Receive, send: Any) -> None:
        nonlocal running
        if scope["type"] == "http" and running >= _MAX_CONCURRENT_REQUESTS:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b"too many requests at once"})
            return
        running += 1
        try:
            await app(scope, receive, send)
        finally:
            running -= 1

    return answered


def reject_two_lengths(app: Any) -> Any:
    """Wrap an application so that it answers 400 to a body with two lengths, and disconnects.

    A proxy in front may go by the other length: it would forward one request, which is two here,
    and the second could name any user in the proxy's header (request smuggling, RFC 9112, 6.3).
    """

    async def answered(scope: Any, receive: Receive, send: Any) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            message = b"a body has Content-Length or Transfer-Encoding, not both"
            await send({"type": "http.response.body", "body": message})
            return
        await app(scope, receive, send)

    return answered


def answer_head(app: Any) -> Any:
    """Wrap an application so that it answers HEAD like GET, without the body."""

    async def answered(scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"

        async def send_head(message: Any) -> None:
            begins = message["type"] == "http.response.start"
            if begins:
                message["headers"] = [_allow_head(*header) for header in message.get("headers", ())]
            if begins or not is_head:
                await send(message)
            if begins and is_head:
                # Ends the answer: a streaming answer then sees a disconnected client.
                await send({"type": "http.response.body", "body": b""})

        # The server's own scope keeps HEAD, by which the server knows that no body follows.
        await app({**scope, "method": "GET"} if is_head else scope, receive, send_head)

    return answered


def _allow_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Add HEAD to an Allow header that lists GET; return other headers unchanged."""
    if name.lower() != b"allow":
        return name, value
    methods = {method.strip() for method in value.split(b",")}
    if b"GET" in methods:
        methods.add(b"HEAD")
    return name, b", ".join(sorted(methods))


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one HTTP server.

    Attributes:
        name: Name for people: ``the myBRC API``.
        section: Section of the configuration file, for people: ``[mybrc]``.
        listen: Address and port.
        tls: Certificate and key; without them, no encryption.
        shared: Networks whose addresses many share, see
            :class:`steward.core.listeners.ConnectionLimit`.
        timeouts: Timeouts of clients.
    """

    name: str
    section: str
    listen: str
    tls: TlsReference = None
    shared: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()


class ServingError(StewardError):
    """The server cannot run as configured."""


def open_http_listener(server_config: ServerConfig) -> socket.socket:
    """Open the listening socket of a server.

    Raises:
        ListenUnavailable: The address cannot be listened at.
    """
    return open_tcp_listener(server_config.listen, _BACKLOG)


def serve_http(
    server_config: ServerConfig,
    app: Any,
    listener: socket.socket,
    stop: Stop,
    send_heartbeat: Callable[[], None],
) -> None:
    """Serve requests until the Stop is set.

    Args:
        server_config: Configuration of the server.
        app: The ASGI application. The state of a request's scope has ``peer_names``, the names in
            the client's certificate.
        listener: The listening socket; closed at the end.
        stop: Ends the server.
        send_heartbeat: Heartbeat, called several times a second.

    Raises:
        ServingError: The certificate cannot be used.
    """
    limit = ConnectionLimit(_MAX_IDLE_OF_ADDRESS, _MAX_IDLE_CONNECTIONS, server_config.shared)

    class Protocol(TimeLimitedProtocol):
        connection_limit = limit
        timeouts = server_config.timeouts

    tls = server_config.tls
    limited_app = limit_concurrency(limit_body_time(app, server_config.timeouts.request_s))
    config = uvicorn.Config(
        reject_two_lengths(answer_head(limited_app)),
        http=Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        ssl_context_factory=(lambda *_: make_server_context(tls)) if tls else None,
    )
    try:
        config.load()
    except TlsUnavailable as error:
        raise ServingError(f"{server_config.section} tls: {error}", error.offender) from error
    log.info(
        "%s is at %s port %d, %s",
        server_config.name,
        *listener.getsockname()[:2],
        "with TLS" if tls else "without TLS: what clients send can be read on its way",
    )
    # The line above replaces uvicorn's own messages at start and end.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with ReportingListener(listener, limit.add) as reporting:
        _Server(config, stop, send_heartbeat).run(sockets=[reporting])
