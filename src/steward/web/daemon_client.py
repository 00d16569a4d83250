"""Places for what may be under way at once: whoever finds none waits a little, and is told so."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Literal, TypeVar
from weakref import WeakValueDictionary

import msgspec

from steward.core.access import READS, scope_of
from steward.core.actions import Action
from steward.core.errors import Unavailable
from steward.daemon.contexts import ACTIONS
from steward.daemon.requests import LONGEST_REQUEST, Reply, address, ask_line, error_of, read_reply
from steward.web.errors import TooLarge, WebError

_PLACE_S: Final = 15.0
"""How long anything waits for its turn."""
_TOO_MUCH: Final = "too much is asked at once: try again in a moment"


class Crowded(Unavailable):
    """Too much is under way."""


class Places(asyncio.Semaphore):
    """So many places, and so many who wait for one: others need not, they are told at once.

    Whoever waits has one of the requests that are served at once; one address or bearer that
    asks for more than it gets would have all of them.
    """

    _MOST_WAITING: Final = 64

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._waiting = 0

    async def acquire(self) -> Literal[True]:
        """Wait for a place.

        Raises:
            Crowded: Too many wait already.
        """
        if self.locked() and self._waiting >= self._MOST_WAITING:
            raise Crowded(_TOO_MUCH)
        self._waiting += 1
        try:
            return await super().acquire()
        finally:
            self._waiting -= 1


class PlacesOfEach:
    """So many places for each, which are there while somebody has or wants one.

    Args:
        most: How many of one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: WeakValueDictionary[str, Places] = WeakValueDictionary()

    def of(self, who: str) -> Places:
        """Somebody's."""
        return self._of.setdefault(who, Places(self._most))


async def take(until: contextlib.AsyncExitStack, place: asyncio.Semaphore) -> None:
    """Wait for a place, and have it until something has ended.

    Raises:
        Crowded: None came free in time, or too many wait.
    """
    try:
        async with asyncio.timeout(_PLACE_S):
            await place.acquire()
    except TimeoutError:
        raise Crowded(_TOO_MUCH) from None
    until.callback(place.release)


_CONNECT_S: Final = 5.0
_QUEUE_S: Final = 0.005
_SILENCE_S: Final = 60.0
_LONGEST_S: Final = 310.0
"""A little longer than the daemon lets an action be silent: for what is not a page's."""
_AT_ONCE: Final = 12
"""Connections at once, each a process of the daemon's; it takes a few more than that."""
_LONG_AT_ONCE: Final = 8
"""Streams at once, and beside them what changes something; and of one user:"""
_LONG_OF_ONE: Final = 4
_READS_OF_ONE: Final = 8
"""Of the connections for pages so many for one user …"""
_VOUCHING: Final = 4
"""… and for questions about MUNGE, which may not answer."""
_KEEP_S: Final = 240.0
_LONGEST_LINE: Final = 64 << 20
Decoded = TypeVar("Decoded")

VOUCH: Final = "credentials.vouch"


class DaemonAway(Unavailable):
    """The daemon does not answer."""


class TooSlow(DaemonAway):
    """The daemon does not come to an end with a question: to ask it again would make it worse."""


class _Line:
    """One connection to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.until = time.monotonic() + _KEEP_S
        self.patience_s = _LONGEST_S

    def is_good(self) -> bool:
        is_open = not self.reader.at_eof() and not self.writer.is_closing()
        return is_open and time.monotonic() < self.until

    def close(self) -> None:
        self.writer.close()


class Desk:
    """Has actions done by the daemon.

    Args:
        path: The daemon's socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: list[_Line] = []
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._streams = asyncio.Semaphore(_LONG_AT_ONCE)
        self._changes = asyncio.Semaphore(_LONG_AT_ONCE)
        self._vouching = asyncio.Semaphore(_VOUCHING)
        self._long_of_one = PlacesOfEach(_LONG_OF_ONE)
        self._reads_of_one = PlacesOfEach(_READS_OF_ONE)

    async def ask(
        self, name: str, request: Any, auth: str = "", *, key: str = "", who: str = ""
    ) -> Any:
        """The answer to a request.

        Args:
            name: The action's.
            request: A value of its request type.
            auth: Secret of a session or token; "" for the process itself.
            key: Under which it is done once; "" for none.
            who: Whom it counts for; "" for the bearer of ``auth``.

        Raises:
            DaemonAway: It does not answer.
            Crowded: Too much is asked at once.
            StewardError: Whatever the action refuses or cannot do.
        """
        action = ACTIONS[name]
        answer = None
        async with contextlib.aclosing(self.stream(name, request, auth, key=key, who=who)) as items:
            async for item in items:
                answer = item
        assert isinstance(answer, action.answer)
        return answer

    async def stream(
        self, name: str, request: Any, auth: str = "", *, key: str = "", who: str = ""
    ) -> AsyncGenerator[Any, None]:
        """The items of a stream and at last its answer; raises as :meth:`ask`."""
        action = ACTIONS[name]
        keeps = (action.only_reads or scope_of(name) in READS) and not action.stream
        async with contextlib.AsyncExitStack() as places:
            for place in self._places(action, keeps, who or auth):
                await take(places, place)
            line, reply = await self._begin(action, request, auth, keeps, key)
            is_whole = False
            try:
                items = msgspec.json.Decoder(_union(action.items))
                while not reply.error and not reply.ok:
                    yield _decoded(items.decode, reply.item)
                    reply = await self._reply(line)
                is_whole = True
            finally:
                # Of one that is left in the middle the rest is still to come.
                if is_whole and keeps and line.is_good():
                    self._kept.append(line)
                else:
                    line.close()
            if reply.error:
                raise error_of(reply)
            yield _decoded(msgspec.json.Decoder(action.answer).decode, reply.answer)

    def _places(self, action: Action, keeps: bool, who: str) -> list[asyncio.Semaphore]:
        """What has to be had: what may take minutes keeps no page waiting, no user all others."""
        if action.name == VOUCH:
            return [self._vouching, self._free]
        if keeps:
            return [self._reads_of_one.of(who), self._free]
        several = self._streams if action.stream else self._changes
        if not who:
            return [several]
        return [self._long_of_one.of(who), several]

    def close(self) -> None:
        """Let go of the connections."""
        for line in self._kept:
            line.close()
        self._kept.clear()

    async def _begin(
        self, action: Action, request: Any, auth: str, keeps: bool, key: str
    ) -> tuple[_Line, Reply]:
        """Ask, over a kept connection where one is still good; the first line of the answer."""
        words = ask_line(action.name, request, auth=auth, keep=keeps, key=key)
        if len(words) > LONGEST_REQUEST:
            raise TooLarge(f"a request has at most {LONGEST_REQUEST} bytes as the daemon reads it")
        while keeps and self._kept:
            line = self._kept.pop()
            if not line.is_good():
                line.close()
                continue
            try:
                return line, await self._said(line, words)
            except BaseException as error:
                # Its answer is still to come: for whoever asks next it is not good any more.
                line.close()
                # The daemon ends kept connections after a while, perhaps just now.
                if isinstance(error, TooSlow) or not isinstance(error, DaemonAway):
                    raise
        line = await self._connect()
        line.patience_s = _SILENCE_S if keeps else _LONGEST_S
        try:
            return line, await self._said(line, words)
        except BaseException:
            line.close()
            raise

    async def _said(self, line: _Line, words: bytes) -> Reply:
        try:
            line.writer.write(words)
            await line.writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            # Who is turned away is not listened to; why is what is read next.
            pass
        return await self._reply(line)

    async def _connect(self) -> _Line:
        try:
            with address(self._path) as name:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await _connected(name)
                    reader, writer = await asyncio.open_unix_connection(
                        sock=connection, limit=_LONGEST_LINE
                    )
        except (OSError, TimeoutError) as error:
            raise DaemonAway(
                f"Steward's daemon does not answer ({error}): try again in a moment", self._path
            ) from error
        return _Line(reader, writer)

    async def _reply(self, line: _Line) -> Reply:
        try:
            async with asyncio.timeout(line.patience_s):
                read = await line.reader.readuntil(b"\n")
        except TimeoutError as error:
            raise TooSlow("Steward's daemon takes too long to answer", self._path) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise DaemonAway("Steward's daemon ended the connection", self._path) from error
        except asyncio.LimitOverrunError as error:
            raise WebError("the answer is longer than a page may be: ask for less") from error
        return _decoded(read_reply, read)


async def _connected(name: str) -> socket.socket:
    """A connection to a Unix socket, as soon as its queue has a place.

    asyncio's own takes a full queue for a connection that is on its way.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        while True:
            try:
                connection.connect(name)
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def _decoded(decode: Callable[[Any], Decoded], data: Any) -> Decoded:
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise WebError(
            f"the daemon's answer cannot be understood: is it of another release? ({error})"
        ) from error


def _union(types: tuple[type[msgspec.Struct], ...]) -> Any:
    union: Any = Any
    for index, kind in enumerate(types):
        union = kind if index == 0 else union | kind
    return union
