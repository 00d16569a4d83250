"""Async client of the daemon's socket for ``steward web``, with limits on concurrent requests.

:class:`RequestSlots` and :class:`SlotsByUser` limit what runs at once, in total and for each user;
a request that gets no slot within 15 s fails with :class:`ServerBusy`. :class:`DaemonClient` sends
requests, reuses connections for reads, and yields the items of streams. Every connection is a
process of the daemon. Reads, streams, changes and checks of MUNGE credentials have separate slots,
so that slow requests do not block pages.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Literal, TypeVar
from weakref import WeakValueDictionary

import msgspec

from steward.core.actions import Action
from steward.core.errors import Unavailable
from steward.core.rpc import (
    LONGEST_REQUEST,
    ReplyLine,
    decode_reply_line,
    encode_request_line,
    make_error,
    shorten_socket_path,
)
from steward.daemon.registry import ACTIONS
from steward.web.errors import RequestTooLarge, WebError

_SLOT_WAIT_S: Final = 15.0
"""Longest wait for a slot, in seconds."""
_BUSY_MESSAGE: Final = "too many requests at once: try again in a moment"
"""Message of :class:`ServerBusy`."""


class ServerBusy(Unavailable):
    """Error: too many requests run at once."""


class RequestSlots(asyncio.Semaphore):
    """Semaphore with a bounded queue: beyond 64 waiters it rejects at once.

    Each waiter occupies one of the requests served at once; a single address or user with too many
    waiters would occupy all of them.
    """

    _MOST_WAITING: Final = 64

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._waiting = 0

    async def acquire(self) -> Literal[True]:
        """Wait for a slot.

        Raises:
            ServerBusy: Too many requests wait already.
        """
        if self.locked() and self._waiting >= self._MOST_WAITING:
            raise ServerBusy(_BUSY_MESSAGE)
        self._waiting += 1
        try:
            return await super().acquire()
        finally:
            self._waiting -= 1


class SlotsByUser:
    """Separate :class:`RequestSlots` for each user or address, kept only while in use.

    Args:
        limit: Number of slots of each.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: WeakValueDictionary[str, RequestSlots] = WeakValueDictionary()

    def get_slots(self, user: str) -> RequestSlots:
        """Return the slots of one user or address."""
        return self._slots.setdefault(user, RequestSlots(self._limit))


async def acquire_slot(exit_stack: contextlib.AsyncExitStack, slots: asyncio.Semaphore) -> None:
    """Wait for a slot, and release it when the exit stack closes.

    Raises:
        ServerBusy: No slot became free in time, or too many requests wait.
    """
    try:
        async with asyncio.timeout(_SLOT_WAIT_S):
            await slots.acquire()
    except TimeoutError:
        raise ServerBusy(_BUSY_MESSAGE) from None
    exit_stack.callback(slots.release)


_CONNECT_S: Final = 5.0
_QUEUE_RETRY_S: Final = 0.005
"""Pause before another attempt to connect to a full queue, in seconds."""
_READ_TIMEOUT_S: Final = 60.0
"""Longest wait for the reply of a read, in seconds."""
_STREAM_TIMEOUT_S: Final = 310.0
"""Time-out of streams and changes: slightly longer than an action may be silent in the daemon."""
_CONNECTIONS: Final = 12
"""Concurrent connections for reads, each a process of the daemon, which accepts a few more."""
_STREAMS: Final = 8
"""Concurrent streams, and as many changes."""
_STREAMS_PER_USER: Final = 4
"""Concurrent streams and changes of one user, together."""
_READS_PER_USER: Final = 8
"""Concurrent reads of one user, out of ``_CONNECTIONS``."""
_MUNGE_CHECKS: Final = 4
"""Concurrent checks of MUNGE credentials, because munged may not answer."""
_CONNECTION_LIFETIME_S: Final = 240.0
"""Lifetime of a reused connection, in seconds."""
_LONGEST_LINE: Final = 64 << 20
"""Longest line of a reply, in bytes."""
Decoded = TypeVar("Decoded")

TICKET_ACTION: Final = "credentials.ticket"
"""Action that checks a MUNGE credential."""


class DaemonUnavailable(Unavailable):
    """Error: the daemon does not answer."""


class DaemonTimeout(DaemonUnavailable):
    """Error: the daemon did not finish in time; a repeated request would add load."""


class _DaemonConnection:
    """One connection to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.expires_at = time.monotonic() + _CONNECTION_LIFETIME_S
        self.timeout_s = _STREAM_TIMEOUT_S

    def is_usable(self) -> bool:
        is_open = not self.reader.at_eof() and not self.writer.is_closing()
        return is_open and time.monotonic() < self.expires_at

    def close(self) -> None:
        self.writer.close()


class DaemonClient:
    """Client of the daemon's socket that calls actions.

    Args:
        path: Path of the daemon's socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle_connections: list[_DaemonConnection] = []
        self._read_slots = asyncio.Semaphore(_CONNECTIONS)
        self._stream_slots = asyncio.Semaphore(_STREAMS)
        self._change_slots = asyncio.Semaphore(_STREAMS)
        self._munge_slots = asyncio.Semaphore(_MUNGE_CHECKS)
        self._long_user_slots = SlotsByUser(_STREAMS_PER_USER)
        self._read_user_slots = SlotsByUser(_READS_PER_USER)

    async def call_action(
        self, name: str, request: Any, secret: str = "", *, key: str = "", user: str = ""
    ) -> Any:
        """Call an action and return its reply.

        Args:
            name: Name of the action.
            request: A value of the action's request type.
            secret: Secret of a session or token; "" for the web process itself.
            key: Idempotency key; "" for none.
            user: User that limits count; "" for the bearer of ``secret``.

        Raises:
            DaemonUnavailable: The daemon does not answer.
            ServerBusy: Too many requests run at once.
            StewardError: The action failed or rejected the request.
        """
        action = ACTIONS[name]
        reply = None
        async with contextlib.aclosing(
            self.stream(name, request, secret, key=key, user=user)
        ) as items:
            async for item in items:
                reply = item
        assert isinstance(reply, action.answer)
        return reply

    async def stream(
        self, name: str, request: Any, secret: str = "", *, key: str = "", user: str = ""
    ) -> AsyncGenerator[Any, None]:
        """Yield the items of a stream and finally its reply; raise as :meth:`call_action`."""
        action = ACTIONS[name]
        can_reuse = action.keeps_rights_to_read and not action.stream
        async with contextlib.AsyncExitStack() as exit_stack:
            for slots in self._choose_slots(action, can_reuse, user or secret):
                await acquire_slot(exit_stack, slots)
            connection, reply = await self._send_request(action, request, secret, can_reuse, key)
            is_complete = False
            try:
                items = msgspec.json.Decoder(_join_types(action.items))
                while not reply.error and not reply.ok:
                    yield _decode_reply(items.decode, reply.item)
                    reply = await self._read_reply_line(connection)
                is_complete = True
            finally:
                # An abandoned stream still has data to come: close its connection.
                if is_complete and can_reuse and connection.is_usable():
                    self._idle_connections.append(connection)
                else:
                    connection.close()
            if reply.error:
                raise make_error(reply)
            yield _decode_reply(msgspec.json.Decoder(action.answer).decode, reply.answer)

    def _choose_slots(self, action: Action, can_reuse: bool, user: str) -> list[asyncio.Semaphore]:
        """Return the slots a request needs: slow requests block neither pages nor other users."""
        if action.name == TICKET_ACTION:
            return [self._munge_slots, self._read_slots]
        if can_reuse:
            return [self._read_user_slots.get_slots(user), self._read_slots]
        slots = self._stream_slots if action.stream else self._change_slots
        if not user:
            return [slots]
        return [self._long_user_slots.get_slots(user), slots]

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle_connections:
            connection.close()
        self._idle_connections.clear()

    async def _send_request(
        self, action: Action, request: Any, secret: str, can_reuse: bool, key: str
    ) -> tuple[_DaemonConnection, ReplyLine]:
        """Send a request, over an idle connection if one is open, and read the first line."""
        request_line = encode_request_line(
            action.name, request, auth=secret, keep=can_reuse, key=key
        )
        if len(request_line) > LONGEST_REQUEST:
            raise RequestTooLarge(
                f"the request is larger than {LONGEST_REQUEST} bytes, the maximum of the daemon"
            )
        while can_reuse and self._idle_connections:
            connection = self._idle_connections.pop()
            if not connection.is_usable():
                connection.close()
                continue
            try:
                return connection, await self._send_line(connection, request_line)
            except BaseException as error:
                # Its reply is still to come, so nobody else may use this connection.
                connection.close()
                # The daemon closes idle connections after a while, perhaps just now.
                if isinstance(error, DaemonTimeout) or not isinstance(error, DaemonUnavailable):
                    raise
        connection = await self._connect()
        connection.timeout_s = _READ_TIMEOUT_S if can_reuse else _STREAM_TIMEOUT_S
        try:
            return connection, await self._send_line(connection, request_line)
        except BaseException:
            connection.close()
            raise

    async def _send_line(self, connection: _DaemonConnection, request_line: bytes) -> ReplyLine:
        try:
            connection.writer.write(request_line)
            await connection.writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            # The daemon rejected the connection unread; the reply read next says why.
            pass
        return await self._read_reply_line(connection)

    async def _connect(self) -> _DaemonConnection:
        try:
            with shorten_socket_path(self._path) as short_path:
                async with asyncio.timeout(_CONNECT_S):
                    sock = await _connect_unix(short_path)
                    reader, writer = await asyncio.open_unix_connection(
                        sock=sock, limit=_LONGEST_LINE
                    )
        except (OSError, TimeoutError) as error:
            raise DaemonUnavailable(
                f"Steward's daemon does not answer ({error}): try again in a moment", self._path
            ) from error
        return _DaemonConnection(reader, writer)

    async def _read_reply_line(self, connection: _DaemonConnection) -> ReplyLine:
        try:
            async with asyncio.timeout(connection.timeout_s):
                data = await connection.reader.readuntil(b"\n")
        except TimeoutError as error:
            raise DaemonTimeout(
                "Steward's daemon did not answer in time: try again in a moment", self._path
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise DaemonUnavailable(
                "Steward's daemon closed the connection: try again in a moment", self._path
            ) from error
        except asyncio.LimitOverrunError as error:
            raise WebError(
                "the reply is too large for a page: request less, with a filter or a shorter period"
            ) from error
        return _decode_reply(decode_reply_line, data)


async def _connect_unix(socket_path: str) -> socket.socket:
    """Connect to a Unix socket, retrying while its queue is full.

    asyncio mistakes a full queue for a connection in progress.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(socket_path)
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_RETRY_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _decode_reply(decode: Callable[[Any], Decoded], data: Any) -> Decoded:
    """Decode a reply; fail if the daemon is of another release."""
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise WebError(
            f"cannot decode the daemon's reply: {error}. Does the daemon run another release?"
        ) from error


def _join_types(types: tuple[type[msgspec.Struct], ...]) -> Any:
    """Join types to a union."""
    union: Any = Any
    for index, member in enumerate(types):
        union = member if index == 0 else union | member
    return union
