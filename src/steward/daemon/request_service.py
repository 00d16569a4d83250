"""Answers to requests on the daemon's socket, in one forked process per connection.

`RequestService.serve` decodes a request, finds the caller's identity, runs the action and streams
the reply. `PeerLimits` bounds the cost of a peer: SIGALRM kills a process that takes too long,
and an action that needs too much memory fails. Most peers send one request; the web server's
process, which acts for many users, may send more on a connection, each with the secret of its user.
`_PeerWatcher` ends the process when its peer disconnects. `socket.py` accepts the connections and
forks.
"""

import contextlib
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

from steward.core.access import Caller, check_scope
from steward.core.actions import Action, ActionError, Registry
from steward.core.errors import (
    InternalFailure,
    NotFound,
    PermissionRefused,
    StewardError,
    UnknownCredential,
    UsageError,
)
from steward.core.rpc import (
    LONGEST_REQUEST,
    ActionRequest,
    RawRequest,
    decode_request,
    encode_answer_line,
    encode_error_line,
    encode_item_line,
)
from steward.daemon.idempotency import IdempotencyStore

log = logging.getLogger(__name__)

IdentifySecret = Callable[[str], Caller]
"""Function that identifies the owner of a secret; raises UnknownCredential if there is none."""

OpenIdempotencyStore = Callable[[], IdempotencyStore]
"""Function that opens the store of idempotency keys when first needed."""


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on connections, requests, time and memory of peers.

    Attributes:
        connections: Maximum number of connections served at once, of all users.
        per_user: Maximum number for one user other than root and Steward's own.
        per_second: Average number of requests per second of such a user.
        burst: Maximum number of such requests at once.
        waiting: Maximum number of connections without a complete request, of all users.
        incomplete_bytes: Maximum size of incomplete requests, of all users, in bytes.
        request_s: Time-out for a complete request, in seconds.
        silence_s: Longest time that an action may run without output, in seconds.
        send_s: Longest time for a peer to read one line of the reply, in seconds.
        memory_bytes: Memory that a reply may take beyond what the daemon had, in bytes.
        web_connections: Maximum number of connections of the web server's process.
        web_requests: Maximum number of requests on each of them.
        web_connection_s: Longest life of each of them, in seconds.
    """

    connections: int = 64
    per_user: int = 8
    per_second: float = 20.0
    burst: int = 40
    waiting: int = 512
    incomplete_bytes: int = 64 << 20
    request_s: float = 10.0
    silence_s: float = 300.0
    send_s: float = 300.0
    memory_bytes: int = 2 << 30
    web_connections: int = 32
    web_requests: int = 2000
    web_connection_s: float = 300.0


class RequestService:
    """Answers the requests of one connection.

    Args:
        registry: The actions. Their contexts are made in the processes that answer.
        limits: Limits on peers. Defaults if None.
        identify: Identifies the owner of a session or token; None accepts no secrets.
        open_store: Store of idempotency keys; None rejects keys.
        state_dir: State directory of the daemon; "" rejects requests that name one.
    """

    def __init__(
        self,
        registry: Registry,
        limits: PeerLimits | None = None,
        identify: IdentifySecret | None = None,
        open_store: OpenIdempotencyStore | None = None,
        state_dir: str = "",
    ) -> None:
        self.limits = limits or PeerLimits()
        self._registry = registry
        self._identify = identify
        self._open_store = open_store
        self._state_dir = state_dir

    def preload(self, line: bytes) -> None:
        """Import the module of a request's action, so that forked processes share it."""
        # The process that serves the request reports every error.
        with contextlib.suppress(Exception):
            self._registry.get(decode_request(line, RawRequest).action)

    def serve(
        self, connection: socket.socket, uid: int, line: bytes, *, keep_open: bool = False
    ) -> None:
        """Answer the request, or requests, of a connection.

        Args:
            connection: The peer's connection.
            uid: The peer's uid, from the kernel.
            line: Its first request.
            keep_open: Whether the peer may send more requests.

        Raises:
            OSError: The peer is gone, or too slow.
        """
        peer = _PeerWatcher(connection)
        deadline = time.monotonic() + self.limits.web_connection_s
        for _ in range(self.limits.web_requests):
            _set_time_limit(self.limits.silence_s)
            is_last = True
            try:
                message = decode_request(line)
                is_last = not (keep_open and message.keep)
                replies = self._answer(message, uid, peer)
            except StewardError as error:
                replies = iter([encode_error_line(error)])
            for reply in replies:
                _send_line(connection, reply, self.limits)
            remaining_s = deadline - time.monotonic()
            if is_last or remaining_s <= 0:
                return
            _set_time_limit(remaining_s + 5)
            try:
                line = _read_line(connection, remaining_s)
            except StewardError:
                return  # a kept connection may be idle
            if not line:
                return

    def _check_state_dir(self, expected: str) -> None:
        """Reject a request for the daemon of another state directory."""
        if expected not in ("", self._state_dir):
            raise NotFound(
                f"the daemon on this socket does not have the state directory {expected}: name its "
                "own configuration with --config",
                expected,
            )

    def _answer(self, message: ActionRequest, uid: int, peer: "_PeerWatcher") -> Iterator[bytes]:
        """Yield the lines that answer a request; an error is the last line."""
        try:
            self._check_state_dir(message.state_dir)
            action = self._registry.get(message.action)
            asker = self._identify_caller(action, message.auth, uid)
            request = self._registry.decode(message.action, message.args)
            log.debug("uid %d requests %s", asker.uid, action.name)
            if action.only_reads:
                peer.exit_on_disconnect()
                yield from self._run(action, asker, request)
                return
            with peer.defer_exit():
                if message.key and not action.keeps_rights_to_read:
                    yield self._run_once(message.key, action, asker, request)
                else:
                    yield from self._run(action, asker, request)
        except StewardError as error:
            yield encode_error_line(error)
        except MemoryError:
            log.warning("a request of uid %d exceeded the memory limit", uid)
            yield encode_error_line(
                PermissionRefused(
                    "the reply needs too much memory: request less, with a limit or a "
                    "shorter period"
                )
            )
        except Exception:
            log.exception("a request of uid %d failed", uid)
            yield encode_error_line(
                InternalFailure("the daemon failed on this request: see its log")
            )

    def _identify_caller(self, action: Action, secret: str, uid: int) -> Caller:
        """Return the caller: the peer, or the owner of the secret that it sends."""
        if not secret:
            return Caller(uid=uid, user=_get_user_name(uid), how="socket")
        if self._identify is None:
            raise UnknownCredential("this socket accepts no tokens")
        asker = self._identify(secret)
        # Check before decoding the request: an insufficient token learns nothing about its format.
        check_scope(asker, action.name, action.scope)
        return asker

    def _run_once(self, key: str, action: Action, asker: Caller, request: object) -> bytes:
        """Run the action once for an idempotency key; return its reply line."""
        if self._open_store is None:
            raise UsageError("this socket accepts no idempotency keys", key)
        return self._open_store().run_once(
            key,
            asker,
            action,
            request,
            lambda: self._registry.call(action.name, asker, request),
        )

    def _run(self, action: Action, asker: Caller, request: object) -> Iterator[bytes]:
        """Run the action; yield its reply lines."""
        result = self._registry.call(action.name, asker, request)
        if not action.stream:
            yield encode_answer_line(result)
            return
        for item in result:
            yield (
                encode_answer_line(item)
                if isinstance(item, action.answer)
                else encode_item_line(item)
            )


def _get_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


class _PeerWatcher:
    """Watcher that ends this process when its peer disconnects.

    An action that changes something is completed first.

    Args:
        connection: The peer's.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._exit_lock = threading.Lock()
        self._is_watching = False

    def exit_on_disconnect(self) -> None:
        """End this process when the peer disconnects, from now on."""
        if self._is_watching:
            return
        self._is_watching = True
        poller = select.poll()
        poller.register(self._connection, 0)

        def watch() -> None:
            poller.poll()
            with self._exit_lock:
                # Exit as an aborted process: its parent then ends what it has started.
                os._exit(1)

        threading.Thread(target=watch, daemon=True).start()

    def defer_exit(self) -> AbstractContextManager[object]:
        """Return a context whose work is completed even if the peer disconnects."""
        return self._exit_lock


def _set_time_limit(seconds: float) -> None:
    """Restart the process's time limit: SIGALRM ends even a call that never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _read_line(connection: socket.socket, timeout_s: float) -> bytes:
    """Read the request line; b"" if the peer sent none.

    Raises:
        ActionError: The line is too long, or did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise ActionError(f"the request was not complete within {timeout_s:.0f} s")
        connection.settimeout(remaining_s)
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            continue
        if not piece:
            return b""
        head, newline, _ = piece.partition(b"\n")
        line += head + newline
        if len(line) > LONGEST_REQUEST:
            raise ActionError(f"the request is longer than {LONGEST_REQUEST} bytes, the maximum")
    return bytes(line)


def _send_line(connection: socket.socket, line: bytes, limits: PeerLimits) -> None:
    """Send a line within the peer's time limit."""
    # While the peer reads, the socket's own time-out applies.
    _set_time_limit(limits.send_s + 5)
    connection.settimeout(limits.send_s)
    connection.sendall(line)
    _set_time_limit(limits.silence_s)
