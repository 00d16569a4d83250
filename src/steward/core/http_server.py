"""Serves HTTP: uvicorn, with an end to everything that a client may draw out.

A client that exceeds one of the :class:`Timeouts` loses its connection. How long
an answer takes is the application's business. Only so many are served at once, the
others are told to come again; and of one address only so many are open that have not
asked, are not encrypted yet, or do not read.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from steward.core.errors import StewardError
from steward.core.listeners import Crowd, CrowdedListener, listener_at
from steward.core.waits import Stop

log = logging.getLogger(__name__)

_KEEP_S: Final = 5
_GRACE_S: Final = 3
_AT_ONCE: Final = 512
_OPEN: Final = 256
"""Connections of these that may be without a whole request …"""
_OPEN_OF_ONE: Final = 32
"""… and of one address."""
_BACKLOG: Final = 1024
_READ_S: Final = 60.0
"""Longest pause of a client in reading an answer."""
_LONGEST_HEAD: Final = 16 << 10

Receive = Callable[[], Any]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of clients, in seconds.

    Attributes:
        head_s: Longest time until the head of a request is complete.
        request_s: Longest time from then until the body is complete.
    """

    head_s: float = 10.0
    request_s: float = 30.0


class TimedProtocol(H11Protocol):
    """HTTP/1.1, but the head of a request has to be there in time, and answers are to be read."""

    crowd: Crowd
    timeouts: Timeouts
    _number: int = 0
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """A client is there."""
        super().connection_made(transport)
        self._number = self.crowd.number_of(transport.get_extra_info("socket").fileno())
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A client says something."""
        if not self.crowd.has(self._number):
            # What it had sent before it was shut down can still be read.
            self.transport.abort()
            return
        super().data_received(data)
        self._watch()
        self._count()

    def on_response_complete(self) -> None:
        """A client has its answer."""
        super().on_response_complete()
        self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        super().connection_lost(exc)
        self.crowd.leave(self._number)
        self._unwatch()
        self._is_read()

    def pause_writing(self) -> None:
        """A client reads no more of what it asked for."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(_READ_S, self._too_slow)
        self._count()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._is_read()
        self._count()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _count(self) -> None:
        """Tell the crowd whether the client waits for us, or we for the client."""
        cycle: RequestResponseCycle | None = self.cycle
        is_whole = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_whole and self._unread is None:
            self.crowd.ask(self._number)
        else:
            self.crowd.rest(self._number)

    def _watch(self) -> None:
        """Have the timer run exactly while the head of a request is under way."""
        # uvicorn says that there always is one, and begins with none.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._unwatch()
        elif self._head is None:
            self._head = self.loop.call_later(self.timeouts.head_s, self._too_slow)

    def _unwatch(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    """A server that is stopped by a Stop, and that beats."""

    def __init__(self, config: uvicorn.Config, stop: Stop, beat: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop
        self._beat = beat

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process has its own way to be stopped."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop."""
        self._beat()
        return await super().on_tick(counter) or self._stop.is_set()


def timed(app: Any, request_s: float) -> Any:
    """Wrap an application so that it abandons bodies that take longer than ``request_s``."""

    async def within(scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        until = asyncio.get_running_loop().time() + request_s
        has_all = False

        async def receive_in_time() -> Any:
            nonlocal has_all
            if has_all:
                # What is waited for now is that the client goes away.
                return await receive()
            async with asyncio.timeout_at(until):
                message = await receive()
            has_all = not message.get("more_body", False)
            return message

        await app(scope, receive_in_time, send)

    return within


def limited(app: Any) -> Any:
    """An application that answers so many whole requests at once, and others with 503.

    uvicorn's own limit counts connections, too: those that :class:`Crowd` has just ended are
    among them for a moment, and somebody else's request was refused for them.
    """
    at_once = 0

    async def answered(scope: Any, receive: Receive, send: Any) -> None:
        nonlocal at_once
        if scope["type"] == "http" and at_once >= _AT_ONCE:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b"too many requests at once"})
            return
        at_once += 1
        try:
            await app(scope, receive, send)
        finally:
            at_once -= 1

    return answered


def headed(app: Any) -> Any:
    """An application that answers HEAD wherever it answers GET, and as that, without the body."""

    async def answered(scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"

        async def send_head(message: Any) -> None:
            begins = message["type"] == "http.response.start"
            if begins:
                message["headers"] = [_with_head(*header) for header in message.get("headers", ())]
            if begins or not is_head:
                await send(message)
            if begins and is_head:
                # With this it is answered: an answer without an end hears that nobody is there.
                await send({"type": "http.response.body", "body": b""})

        # The server's own scope stays as it is: by it, it knows that no body is to come.
        await app({**scope, "method": "GET"} if is_head else scope, receive, send_head)

    return answered


def _with_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header; where it tells which methods there are, HEAD is among them."""
    if name.lower() != b"allow":
        return name, value
    methods = {method.strip() for method in value.split(b",")}
    if b"GET" in methods:
        methods.add(b"HEAD")
    return name, b", ".join(sorted(methods))


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and how.

    Attributes:
        name: What it is, for people: ``the myBRC API``.
        section: The section of the configuration that it is from, for people: ``[mybrc]``.
        listen: Address and port.
        certificate_file: Its certificate; without one, no encryption.
        key_file: The key of that certificate.
        shared: Networks whose addresses many share, see :class:`steward.core.listeners.Crowd`.
        timeouts: Timeouts of clients.
    """

    name: str
    section: str
    listen: str
    certificate_file: str = ""
    key_file: str = ""
    shared: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()


class ServingError(StewardError):
    """It cannot be served as it is configured."""


def listen(served: Served) -> socket.socket:
    """The socket that clients come to.

    Raises:
        ListenUnavailable: The address cannot be listened at.
    """
    return listener_at(served.listen, _BACKLOG)


def serve(
    served: Served,
    app: Any,
    listener: socket.socket,
    stop: Stop,
    beat: Callable[[], None],
) -> None:
    """Serve until the Stop is raised.

    Args:
        served: How.
        app: The ASGI application.
        listener: Where clients come; closed at the end.
        stop: Ends it.
        beat: Called some times a second.

    Raises:
        ServingError: The certificate cannot be used.
    """
    bounds = Crowd(_OPEN_OF_ONE, _OPEN, served.shared)

    class Protocol(TimedProtocol):
        crowd = bounds
        timeouts = served.timeouts

    config = uvicorn.Config(
        headed(limited(timed(app, served.timeouts.request_s))),
        http=Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        ssl_certfile=served.certificate_file or None,
        ssl_keyfile=served.key_file or None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ServingError(
            f"{served.section} certificate_file or key_file cannot be used: {error}",
            served.certificate_file,
        ) from error
    log.info(
        "%s is at %s port %d, %s",
        served.name,
        *listener.getsockname()[:2],
        "with TLS" if served.certificate_file else "without TLS: tokens can be read on their way",
    )
    # What it says of itself at its start and end we have said.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with CrowdedListener(listener, bounds.come) as bounded:
        _Server(config, stop, beat).run(sockets=[bounded])
