"""HTTP server: runs an ASGI application in uvicorn, with limits on slow and many clients.

``open_http_listener`` and ``serve_http`` run a server from its :class:`ServerConfig`; every
TCP listener of Steward that speaks HTTP uses them. :class:`ClientConnection` and ``limit_body``
drop a client that exceeds one of the :class:`Timeouts`; the application alone decides how long an
answer takes. ``limit_concurrency`` answers requests above the limit with 503,
``reject_two_lengths`` ambiguous ones with 400, ``answer_head`` answers HEAD. A ``ConnectionLimit``
limits the open connections of one address that have sent no whole request, have not finished the
TLS handshake, or do not read their answer. Applications find the :class:`ClientConnection` of a
request in ``scope["state"]["connection"]``; ``send_text`` sends a short answer.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from steward.core.errors import StewardError
from steward.core.listeners import ConnectionLimit, CountedConnection, open_tcp_listener
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
_LINGER_S: Final = 2.0
"""Longest time for which the rest of a body is discarded after an early answer, in seconds."""
_ROOM_CHECK_S: Final = 0.02
"""Interval of checks for room for another connection, in seconds."""

Receive = Callable[[], Any]
FindAddress = Callable[[socket.socket], Awaitable[str]]
"""Finds the address of an accepted connection's client; raises StewardError to reject it."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of clients, in seconds.

    Attributes:
        head_s: Longest time until the head of a request is complete.
        request_s: Longest time from then until the body is complete.
    """

    head_s: float = 10.0
    request_s: float = 30.0


class ClientConnection(H11Protocol):
    """Connection of a client: uvicorn's HTTP/1.1, with time limits on heads and reading answers.

    Args:
        server: The server that accepted it.
        counted: The connection in the server's limit.
        address: The client's address.
    """

    def __init__(self, server: "_Server", counted: CountedConnection, address: str) -> None:
        super().__init__(server.config, server.server_state, {"connection": self})
        self.address = address
        self._limit = server.limit
        self._counted = counted
        self._server_config = server.server_config
        self._is_identified = False
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @cached_property
    def certificate_names(self) -> frozenset[str]:
        """Host names and addresses in the client's certificate, read once for each connection."""
        return read_peer_names(self.transport.get_extra_info("ssl_object"))

    @property
    def is_open(self) -> bool:
        """Whether the connection is neither closing nor dropped."""
        return not (self._counted.is_dropped or self.transport.is_closing())

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return int(self.transport.get_extra_info("socket").fileno())

    def identify(self) -> None:
        """Exempt the connection from the limit until its request is answered."""
        self._is_identified = True
        self._update_count()

    def shut_down(self) -> None:
        """Close the connection, which is idle."""
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Start the timer of the first request."""
        super().connection_made(transport)
        self.client = (self.address, self.client[1] if self.client else 0)
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes on, unless the connection was already dropped."""
        if self._counted.is_dropped:
            # Data that the client sent before the shutdown can still arrive.
            self.transport.abort()
        if self._is_refused or self._counted.is_dropped:
            return
        super().data_received(data)
        self._update_head_timer()
        self._update_count()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that cannot be parsed, and discard what follows for a moment."""
        text = f"{msg}\n".encode("ascii")
        # uvicorn calls this where it handles the parser's error.
        status = getattr(sys.exception(), "error_status_hint", 400)
        headers = {"Content-Length": str(len(text)), "Connection": "close"}
        head = h11.Response(status_code=status, headers=list(headers.items()))
        for event in (head, h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        self.loop.call_later(_LINGER_S, self._abort_slow)

    def on_response_complete(self) -> None:
        """Update the connection's count after a complete answer."""
        self._is_identified = False
        super().on_response_complete()
        self._update_count()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the count and stop its timers."""
        super().connection_lost(exc)
        self._limit.remove(self._counted)
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
        is_busy = False
        if cycle is not None and not cycle.response_complete and self._read_timer is None:
            is_whole = not cycle.more_body and not self._server_config.identifies
            is_busy = is_whole or self._is_identified
        self._counted.count(not is_busy)

    def _update_head_timer(self) -> None:
        """Run the timer exactly while a request's head is incomplete."""
        # uvicorn's type says that there always is a cycle, but it starts with None.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self._server_config.timeouts.head_s, self._abort_slow
            )

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _abort_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    """A uvicorn server that a Stop ends and that reports a heartbeat.

    It accepts connections itself: uvicorn would accept all that come at once, and for each of them
    shut down another that came just before.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_config: "ServerConfig",
        listener: socket.socket,
        find_address: FindAddress | None,
        stop: Stop,
        send_heartbeat: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.server_config = server_config
        self.limit = ConnectionLimit(
            _MAX_IDLE_OF_ADDRESS, _MAX_IDLE_CONNECTIONS, server_config.shared
        )
        self.servers = []
        self._listener = listener
        self._find_address = find_address
        self._stop = stop
        self._send_heartbeat = send_heartbeat

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process stops by its Stop."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Report a heartbeat ten times a second; return whether to stop."""
        self._send_heartbeat()
        if self._accepting.done():
            self._accepting.result()
        return await super().on_tick(counter) or self._stop.is_set()

    async def startup(self, sockets: object = None) -> None:  # noqa: ARG002 - as uvicorn has it
        """Start accepting connections."""
        self._accepting = asyncio.create_task(self._accept_connections())
        self.started = True

    async def shutdown(self, sockets: object = None) -> None:  # noqa: ARG002 - as uvicorn has it
        """Stop accepting connections, and finish requests."""
        self._accepting.cancel()
        await super().shutdown([self._listener])

    async def _accept_connections(self) -> None:
        """Accept connections one after the other, as long as there is room."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self.limit.find_wait()
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, _ROOM_CHECK_S))
                continue
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                log.debug("%s: cannot accept a connection: %s", self.server_config.name, error)
                await asyncio.sleep(_ROOM_CHECK_S)  # perhaps no descriptor is free
                continue
            try:
                find_address = self._find_address
                address = await find_address(connection) if find_address else str(peer[0])
            except StewardError as error:
                log.debug("%s: %s", self.server_config.name, error)
                connection.close()
                continue
            # Counted at once: this task may go on before the next one begins.
            counted = self.limit.add(connection, address)
            task = loop.create_task(self._open_connection(connection, counted, address))
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)

    async def _open_connection(
        self, connection: socket.socket, counted: CountedConnection, address: str
    ) -> None:
        """Perform the TLS handshake, and start serving a connection."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: ClientConnection(self, counted, address),
                connection,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self.server_config.timeouts.head_s
                if self.config.ssl
                else None,
            )
        except OSError as error:
            # Anybody on the network can cause this.
            log.debug("%s: %s: %s", self.server_config.name, address, error)
            self.limit.remove(counted)


def limit_body(app: Any, request_s: float) -> Any:
    """Wrap an application so that it abandons request bodies that take more than ``request_s``.

    After an answer that comes before the end of the body, the rest is discarded for a moment: an
    immediate close would reset the connection, and the client would lose the answer.
    """

    async def within(scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        until = 0.0
        names = {name for name, _ in scope["headers"]}
        has_all = names.isdisjoint({b"content-length", b"transfer-encoding"})

        async def receive_in_time() -> Any:
            nonlocal has_all, until
            if has_all:
                # The body is complete; the application now waits for the client to disconnect.
                return await receive()
            # The application may have other work to do before it reads the body.
            until = until or asyncio.get_running_loop().time() + request_s
            async with asyncio.timeout_at(until):
                message = await receive()
            has_all = not message.get("more_body", False)
            return message

        async def send_before_rest(message: Any) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and not has_all:
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LINGER_S):
                        while not has_all:
                            await receive_in_time()
            await send(message)

        await app(scope, receive_in_time, send_before_rest)

    return within


async def send_text(send: Any, status: int, text: bytes, headers: Mapping[str, str] = {}) -> None:
    """Send an answer of plain text."""
    items = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(text)),
        **headers,
    }
    raw_headers = [
        (name.lower().encode(), value.encode("latin-1")) for name, value in items.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw_headers})
    await send({"type": "http.response.body", "body": text})


def limit_concurrency(app: Any) -> Any:
    """Wrap an application so that it answers 503 above a number of concurrent requests.

    uvicorn's own limit counts connections: those that ``ConnectionLimit`` has just shut down count
    for a moment longer, so it rejected requests of other clients.
    """
    running = 0

    async def handle(scope: Any, receive: Receive, send: Any) -> None:
        nonlocal running
        if scope["type"] == "http" and running >= _MAX_CONCURRENT_REQUESTS:
            headers = {"Connection": "close", "Retry-After": "5"}
            await send_text(send, 503, b"too many requests at once\n", headers)
            return
        running += 1
        try:
            await app(scope, receive, send)
        finally:
            running -= 1

    return handle


def reject_two_lengths(app: Any) -> Any:
    """Wrap an application so that it answers 400 to a body with two lengths, and disconnects.

    A proxy in front may go by the other length: it would forward one request, which is two here,
    and the second could name any user in the proxy's header (request smuggling, RFC 9112, 6.3).
    """

    async def handle(scope: Any, receive: Receive, send: Any) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            message = b"a body has Content-Length or Transfer-Encoding, not both"
            await send({"type": "http.response.body", "body": message})
            return
        await app(scope, receive, send)

    return handle


def answer_head(app: Any) -> Any:
    """Wrap an application so that it answers HEAD like GET, without the body."""

    async def handle(scope: Any, receive: Receive, send: Any) -> None:
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

    return handle


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
        name: The clients, for the log: ``nodes``.
        section: Section of the configuration file, for people: ``[mybrc]``.
        listen: Address and port.
        tls: Certificate and key; without them, no encryption.
        shared: Networks whose addresses many share, see
            :class:`steward.core.listeners.ConnectionLimit`.
        timeouts: Timeouts of clients.
        identifies: Whether the application calls :meth:`ClientConnection.identify`; until then it
            counts a connection in the limit, even if its request is whole.
    """

    name: str
    section: str
    listen: str
    tls: TlsReference = None
    shared: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()
    identifies: bool = False


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
    find_address: FindAddress | None = None,
) -> None:
    """Serve requests until the Stop is set.

    Args:
        server_config: Configuration of the server.
        app: The ASGI application.
        listener: The listening socket; closed at the end.
        stop: Ends the server.
        send_heartbeat: Heartbeat, called several times a second.
        find_address: Finds the addresses of clients, if the listener's peers are not the clients.

    Raises:
        ServingError: The certificate cannot be used.
    """
    tls = server_config.tls
    config = uvicorn.Config(
        reject_two_lengths(
            answer_head(limit_body(limit_concurrency(app), server_config.timeouts.request_s))
        ),
        http=ClientConnection,
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
    address = listener.getsockname()
    log.info(
        "listening for %s %s, %s",
        server_config.name,
        address if isinstance(address, str) else "at {} port {}".format(*address[:2]),
        "with TLS" if tls else "without TLS: others on the network can read the traffic",
    )
    # The line above replaces uvicorn's own messages at start and end; anybody on the network can
    # cause its warnings.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    _Server(config, server_config, listener, find_address, stop, send_heartbeat).run()
