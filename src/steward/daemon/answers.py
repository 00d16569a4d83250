"""Answers what comes over one connection of the daemon's socket, in a process of its own.

A peer asks once; the pages' process, which asks for many people, may ask again on
the same connection, each time with the secret of whoever asks. What is asked
never takes longer, nor more memory, than it may: the process is ended.
"""

import logging
import os
import pwd
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import msgspec

from steward.admin.credentials.errors import NotKnown
from steward.core.access import Asker, check_scope
from steward.core.actions import Action, ActionError, Registry
from steward.core.errors import Failed, Refused, StewardError, UsageError
from steward.daemon.idempotency import Repeats
from steward.daemon.requests import (
    LONGEST_REQUEST,
    VERSION,
    Ask,
    answer_line,
    error_line,
    item_line,
)

log = logging.getLogger(__name__)

Knows = Callable[[str], Asker]
"""Tells who brings a secret; raises NotKnown where it is nobody's."""

Kept = Callable[[], Repeats]
"""What was asked for under keys, opened when it is first needed."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer may cost.

    Attributes:
        connections: How many are served at once, of all users together.
        per_user: How many of one user other than root and Steward's own.
        per_second: How many requests of such a user are served a second, on average …
        burst: … and how many at once.
        waiting: How many connections may not have sent their request yet, of all users together.
        waiting_bytes: How many bytes of such requests are held, of all users together.
        request_s: Seconds within which the request must have come.
        silence_s: Seconds an action may run without giving anything to send.
        send_s: Seconds a peer may take to read one line of the answer.
        memory_bytes: How much memory an answer may take, beyond what the daemon had.
        kept: How many connections of the pages' process are served, and …
        kept_requests: … how many requests each of them may ask, and …
        kept_s: … for how many seconds.
    """

    connections: int = 64
    per_user: int = 8
    per_second: float = 20.0
    burst: int = 40
    waiting: int = 512
    waiting_bytes: int = 64 << 20
    request_s: float = 10.0
    silence_s: float = 300.0
    send_s: float = 300.0
    memory_bytes: int = 2 << 30
    kept: int = 32
    kept_requests: int = 2000
    kept_s: float = 300.0


class Service:
    """Answers what a peer asks.

    Args:
        registry: What can be asked for. Its rooms are made in the processes that answer.
        limits: What the peer may cost.
        knows: Who brings the secret of a session or token; without it nobody is known by one.
        repeats: What was asked for under keys; without it keys are refused.
    """

    def __init__(
        self,
        registry: Registry,
        limits: Limits | None = None,
        knows: Knows | None = None,
        repeats: Kept | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._registry = registry
        self._knows = knows
        self._repeats = repeats

    def serve(
        self, connection: socket.socket, uid: int, line: bytes, *, keeps: bool = False
    ) -> None:
        """Answer a connection's request, or requests.

        Args:
            connection: The peer's.
            uid: The peer, as the kernel says.
            line: Its first request.
            keeps: Whether it may ask more than once.

        Raises:
            OSError: The peer is gone, or too slow.
        """
        peer = _Peer(connection)
        until = time.monotonic() + self.limits.kept_s
        for _ in range(self.limits.kept_requests):
            _allow(self.limits.silence_s)
            is_last = True
            try:
                ask = _decode(line)
                is_last = not (keeps and ask.keep)
                replies = self._replies(ask, uid, peer)
            except StewardError as error:
                replies = iter([error_line(error)])
            for reply in replies:
                _send(connection, reply, self.limits)
            left_s = until - time.monotonic()
            if is_last or left_s <= 0:
                return
            _allow(left_s + 5)
            try:
                line = _read_line(connection, left_s)
            except StewardError:
                return  # whoever keeps a connection may well have nothing to ask
            if not line:
                return

    def _replies(self, ask: Ask, uid: int, peer: "_Peer") -> Iterator[bytes]:
        """The lines that answer a request; its errors are the last of them."""
        try:
            action = self._registry.get(ask.action)
            asker = self._asker(ask, uid)
            request = self._registry.decode(ask.action, ask.args)
            log.debug("uid %d asks for %s", asker.uid, action.name)
            if action.only_reads:
                peer.end_with_it()
                yield from self._run(action, asker, request)
                return
            with peer.outlived():
                if ask.key:
                    yield self._once(ask.key, action, asker, request)
                else:
                    yield from self._run(action, asker, request)
        except StewardError as error:
            yield error_line(error)
        except MemoryError:
            log.warning("a request of uid %d took more memory than one may", uid)
            yield error_line(Refused("the answer takes more memory than one may: ask for less"))
        except Exception:
            log.exception("a request of uid %d failed", uid)
            yield error_line(Failed("the daemon failed on this request: its log says why"))

    def _asker(self, ask: Ask, uid: int) -> Asker:
        """Who asks: the peer, or whoever's secret it brings."""
        if not ask.auth:
            return Asker(uid=uid, user=_user_name(uid), how="socket")
        if self._knows is None:
            raise NotKnown("nobody is known here by a token")
        asker = self._knows(ask.auth)
        # Before the request is read: what a token is not good for tells nothing of its shape.
        check_scope(asker, ask.action)
        return asker

    def _once(self, key: str, action: Action, asker: Asker, request: object) -> bytes:
        if self._repeats is None:
            raise UsageError("nothing is done here under a key", key)
        return self._repeats().once(
            key,
            asker,
            action,
            request,
            lambda: self._registry.call(action.name, asker, request),
        )

    def _run(self, action: Action, asker: Asker, request: object) -> Iterator[bytes]:
        result = self._registry.call(action.name, asker, request)
        if not action.stream:
            yield answer_line(result)
            return
        for item in result:
            yield answer_line(item) if isinstance(item, action.answer) else item_line(item)


def _decode(line: bytes) -> Ask:
    try:
        ask = msgspec.json.decode(line, type=Ask)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ActionError(f"the request cannot be read: {error}") from error
    if ask.v != VERSION:
        raise ActionError(
            f"this daemon speaks version {VERSION} of the protocol, not {ask.v}: "
            "use the steward command of the same release"
        )
    return ask


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


class _Peer:
    """Ends this process when the peer has gone: nobody waits for what is read for it then.

    What changes something is brought to its end all the same.

    Args:
        connection: The peer's.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._may_end = threading.Lock()
        self._is_watched = False

    def end_with_it(self) -> None:
        """From now on this process ends when the peer goes."""
        if self._is_watched:
            return
        self._is_watched = True
        gone = select.poll()
        gone.register(self._connection, 0)

        def watch() -> None:
            gone.poll()
            with self._may_end:
                # As one that was broken off: whoever reaps it ends what it has started.
                os._exit(1)

        threading.Thread(target=watch, daemon=True).start()

    def outlived(self) -> AbstractContextManager[object]:
        """What is done in this context is brought to its end without the peer."""
        return self._may_end


def _allow(seconds: float) -> None:
    """Let this process live so much longer: SIGALRM ends even a call that never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _read_line(connection: socket.socket, timeout_s: float) -> bytes:
    """The request line; b"" where the peer sent none.

    Raises:
        ActionError: The line is too long, or did not come in time.
    """
    until = time.monotonic() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise ActionError(f"no whole request came within {timeout_s:.0f} s")
        connection.settimeout(left_s)
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            continue
        if not piece:
            return b""
        head, newline, _ = piece.partition(b"\n")
        line += head + newline
        if len(line) > LONGEST_REQUEST:
            raise ActionError(f"the request is longer than {LONGEST_REQUEST} bytes")
    return bytes(line)


def _send(connection: socket.socket, line: bytes, limits: Limits) -> None:
    # The socket's own time-out is the one that counts while the peer reads.
    _allow(limits.send_s + 5)
    connection.settimeout(limits.send_s)
    connection.sendall(line)
    _allow(limits.silence_s)
