"""HTTP client of the gate on another host that decides: forwards requests of submit plugins.

With [gate] ``ask``, a gate forwards requests of its submit plugin: `RemoteGate` posts the requests
that wait together, over one TLS connection; `http_server.py` answers there. A thread opens the
connection; the gate's own loop sends and receives, so that no request waits for another thread. An
empty list every 2 s keeps the connection open and shows that the other gate decides.
"""

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import h11
import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate.requests import (
    DECIDE_PATH,
    DECISION_SHARE,
    LONGEST_BATCH,
    LONGEST_REQUEST,
    MAX_REQUESTS,
    TIMEOUT_SHARE,
    VERSION,
    ForwardedList,
    ForwardedRequest,
    PluginReply,
    PluginRequest,
    UnusedReply,
)
from steward.bank.gate.server import set_real_time_priority
from steward.bank.settings import GateSettings
from steward.core.errors import StewardError
from steward.core.listeners import split_host_port
from steward.core.section import TlsSettings
from steward.core.tls import make_client_context
from steward.core.waits import Backoff

if TYPE_CHECKING:
    from steward.bank.gate.connections import GatePeer

log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
"""Time-out of connection and handshake, in seconds each."""
_TIMEOUTS_TO_BROKEN: Final = 10
"""Number of time-outs without an answer after which the connection counts as broken: a late answer
fails its own requests only."""
_FAILURES_TO_UNREACHABLE: Final = 3
"""Number of lists in a row without a reply in time after which requests wait for none."""
_STABLE_S: Final = 1.0
"""Age from which on a connection that is closed is replaced at once, in seconds."""
_PING_S: Final = 2.0
"""Interval of empty lists, in seconds: shorter than the server's time-out of idle connections."""
_LOG_AGAIN_S: Final = 60.0
"""Time between two log messages about the same failure, in seconds."""
_MAX_LOGGED: Final = 20
"""Maximum number of failures that are logged in that time: another host writes their texts."""
_CHUNK: Final = 1 << 16
_MAX_HEAD_BYTES: Final = 16 << 10
"""Largest head of an answer, in bytes."""
_OK: Final = 200
"""Status of success."""

ReplyCallback = Callable[["GatePeer", PluginRequest, PluginReply | None], None]
"""Callback for a reply: the plugin's connection, its request, and the reply or None."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[PluginReply | str]).decode


class _Waiting:
    """A request without a reply.

    Args:
        peer: The plugin's connection.
        request: The request.
        deadline: Monotonic time at which the outage policy answers, in seconds.
    """

    def __init__(self, peer: "GatePeer", request: PluginRequest, deadline: float) -> None:
        self.peer = peer
        self.request = request
        self.deadline = deadline
        self.is_answered = False


class _Connection:
    """One TLS connection: a request, then its answer, in turn.

    Args:
        connection: The socket, after the handshake, non-blocking.
        host: Value of the header Host.
    """

    def __init__(self, connection: ssl.SSLSocket, host: str) -> None:
        self.socket = connection
        self.out = bytearray()
        self.is_asking = False
        self._host = host
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._status = 0
        self._body = bytearray()

    def post(self, body: bytes) -> None:
        """Post a body; the former request has its answer.

        Raises:
            OSError: The connection is broken.
        """
        headers = [("Host", self._host), ("Content-Length", str(len(body)))]
        events = (
            h11.Request(method="POST", target=DECIDE_PATH, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self._body, self.is_asking = bytearray(), True
        for event in events:
            self.out += self._http.send(event) or b""
        self.send()

    def send(self) -> None:
        """Send as much as the other side accepts now; the rest stays in ``out``.

        Raises:
            OSError: The connection is broken.
        """
        with suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while self.out:
                del self.out[: self.socket.send(self.out)]

    def receive(self) -> tuple[int, bytes] | None:
        """Read; return status and body of the answer when it is complete.

        Raises:
            OSError: The connection is broken, or out of step.
            h11.RemoteProtocolError: The other side does not speak HTTP.
        """
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while True:
                self._http.receive_data(self.socket.recv(_CHUNK))
                if self._read_events():
                    return self._status, bytes(self._body)
        return None

    def _read_events(self) -> bool:
        """Read the events that have come; return True at the end of an answer."""
        while (event := self._http.next_event()) is not h11.NEED_DATA:
            if not self.is_asking or isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the gate closed the connection, or sent data unasked")
            if isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > LONGEST_BATCH:
                    raise ConnectionAbortedError(
                        f"the reply is larger than {LONGEST_BATCH} bytes, the maximum"
                    )
            elif isinstance(event, h11.EndOfMessage):
                self.is_asking = False
                return True
        return False

    def start_next(self) -> bool:
        """Prepare for the next request; return False if the connection cannot take one."""
        is_done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if is_done and not self.out and not self._http.trailing_data[0]:
            self._http.start_next_cycle()
            return True
        return False


class RemoteGate:
    """Client of the gate on another host that decides: forwards plugin requests.

    If a reply is late, the outage policy answers: slurmctld waits no longer. The late reply is read
    and dropped when it comes, so other requests keep the connection. After three lists in a row
    without a reply in time, the outage policy answers at once, until one comes in time. The gate's
    loop waits for ``fd`` and calls the methods.

    Args:
        settings: The section [gate].
        on_reply: Called with each reply; with None if none came in time.
    """

    def __init__(self, settings: GateSettings, on_reply: ReplyCallback) -> None:
        self._settings = settings
        self._on_reply = on_reply
        self._timeout_s = settings.timeout_ms / 1000 * TIMEOUT_SHARE
        self._way_back_us = int(settings.timeout_ms * 1000 * (TIMEOUT_SHARE - DECISION_SHARE))
        self._broken_s = self._timeout_s * _TIMEOUTS_TO_BROKEN
        self._waiting: list[_Waiting] = []
        """Requests that are not sent yet, in the order in which they came."""
        self._sent: list[_Waiting] = []
        """Requests that are sent; a late reply's are answered by the policy."""
        self._unused: list[UnusedReply] = []
        """Late replies whose holds the other gate is to release."""
        self._asked_at = self._due = 0.0
        """When the last list was posted, and until when a request in it waits."""
        self._is_failed = False
        """Whether the last list counts as failed."""
        self._failures = 0
        """Number of failed lists since the last one with requests that had its replies in time."""
        self._connection: _Connection | None = None
        self._opened_at = 0.0
        """Monotonic time at which the connection was opened."""
        self._opened: SimpleQueue[_Connection | Exception] = SimpleQueue()
        self._is_reachable = self._has_answered = False
        self._backoff = Backoff(0.2, 5.0)
        self._logged_at: dict[str, float] = {}
        """Monotonic time at which each failure was last logged."""
        self._is_failure_logged = False
        """Whether a failure was logged since the last success."""
        self._stopping = threading.Event()
        self._epoll = select.epoll()
        self._opened_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._opened_fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()
        """Descriptor that is readable when `receive` has work."""
        self._open_in_thread(0.0)

    def forward(self, peer: "GatePeer", request: PluginRequest) -> None:
        """Accept a plugin's request, which the next `send` sends."""
        if not self._is_reachable:
            self._on_reply(peer, request, None)
            return
        self._waiting.append(_Waiting(peer, request, time.monotonic() + self._timeout_s))

    def get_wait_s(self) -> float:
        """Return the seconds until `send` has work."""
        # Requests are in order and share one time-out, so the first expires first.
        first = next((one for one in (*self._sent, *self._waiting) if not one.is_answered), None)
        now = time.monotonic()
        end = now + _PING_S if first is None else first.deadline
        if self._connection is not None:
            is_asking = self._connection.is_asking
            end = min(end, self._asked_at + (self._broken_s if is_asking else _PING_S))
            if is_asking and not self._is_failed:
                end = min(end, self._due)
        return max(0.0, end - now)

    def receive(self) -> None:
        """Adopt a connection that was opened, and pass on the replies that have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._opened_fd)
        with suppress(Empty):
            self._adopt(self._opened.get_nowait())
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send()
            self._watch(connection)
            answer = connection.receive()
            if answer is None:
                return
            self._take_answer(*answer)
            if not connection.start_next():
                raise ConnectionResetError("the gate closed the connection after its reply")
        except (OSError, h11.RemoteProtocolError) as error:
            self._disconnect(self._describe(error), is_reachable=self._has_answered)
        except GateUnavailable as error:
            self._disconnect(error, is_reachable=False)

    def send(self) -> None:
        """Answer the requests whose time is over, and send the others, or an empty list."""
        now = time.monotonic()
        for one in (*self._sent, *self._waiting):
            if one.deadline <= now:
                self._answer(one, None)
        if self._connection is None and any(one.is_answered for one in self._waiting):
            self._is_reachable = False  # a new connection takes too long
        self._waiting = [one for one in self._waiting if not (one.is_answered or one.peer.is_ended)]
        if self._connection is None:
            return
        if self._connection.is_asking:
            if now >= self._due:
                self._count_failure()
            if now - self._asked_at > self._broken_s:
                to = self._settings.ask
                late = f"the gate at {to} does not answer within {self._broken_s:g} s"
                self._disconnect(GateUnavailable(late, to), is_reachable=False)
        elif self._waiting or self._unused or now - self._asked_at >= _PING_S:
            self._post(self._connection, now)

    def close(self) -> None:
        """Close the connection, and let a thread that opens one end."""
        self._stopping.set()
        if self._connection is not None:
            self._connection.socket.close()
        self._epoll.close()

    def __del__(self) -> None:
        os.close(self._opened_fd)  # not before the thread has ended

    def _post(self, connection: _Connection, now: float) -> None:
        """Post the requests that wait; first an empty list, which shows how long the way is."""
        size = count = 0
        while (
            self._has_answered
            and count < min(len(self._waiting), MAX_REQUESTS)
            and size < LONGEST_REQUEST
        ):
            size += len(_encode(self._waiting[count].request))
            count += 1
        self._sent, self._waiting = self._waiting[:count], self._waiting[count:]
        self._asked_at, self._is_failed = now, False
        self._due = self._sent[-1].deadline if self._sent else now + self._timeout_s
        requests = tuple(
            ForwardedRequest(
                request=one.request, due_us=int(one.deadline * 1e6) - self._way_back_us
            )
            for one in self._sent
        )
        forwarded = ForwardedList(
            sent_us=int(now * 1e6),
            due_us=int(self._due * 1e6) - self._way_back_us,
            requests=requests,
            unused=tuple(self._unused),
        )
        self._unused = []
        try:
            connection.post(_encode(forwarded))
            self._watch(connection)
        except OSError as error:
            self._disconnect(self._describe(error), is_reachable=self._has_answered)

    def _watch(self, connection: _Connection) -> None:
        """Wait for the socket, to be writable as well if something is unsent."""
        self._epoll.modify(
            connection.socket, select.EPOLLIN | (select.EPOLLOUT if connection.out else 0)
        )

    def _take_answer(self, status: int, body: bytes) -> None:
        """Pass on the replies in an answer.

        Raises:
            GateUnavailable: They are not the replies to the requests.
        """
        sent, self._sent = self._sent, []
        to = self._settings.ask
        try:
            if status != _OK or time.monotonic() >= self._due:
                self._count_failure()
            if status != _OK:
                text = ascii(body[:500].decode(errors="replace").strip())
                self._log(GateUnavailable(f"the gate at {to} answers with status {status}: {text}"))
                return
            try:
                replies = _decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise GateUnavailable(
                    f"cannot decode the reply of the gate at {to}: {error}", to
                ) from error
            if len(replies) != len(sent) or any(
                isinstance(reply, PluginReply) and reply.v != VERSION for reply in replies
            ):
                raise GateUnavailable(
                    f"the gate at {to} uses another protocol version: install the same Steward "
                    "there",
                    to,
                )
            if not self._is_failed:
                self._record_success(has_requests=bool(sent))
            for one, reply in zip(sent, replies, strict=True):
                if isinstance(reply, PluginReply):
                    is_unused = one.is_answered or one.peer.is_ended
                    request, comment = one.request, reply.admin_comment
                    if is_unused and request.op == "submit" and comment:
                        unused = UnusedReply(request.cluster, request.job.uid, comment)
                        self._unused.append(unused)
                    self._answer(one, reply)
                else:
                    text = f"the gate at {to} does not decide a request: {reply[:500]!a}"
                    self._log(GateUnavailable(text))
        finally:
            for one in sent:
                self._answer(one, None)

    def _record_success(self, *, has_requests: bool) -> None:
        """Record that a list was answered in time."""
        is_recovered = has_requests and self._failures >= _FAILURES_TO_UNREACHABLE
        if self._is_failure_logged or not self._has_answered or is_recovered:
            log.info("the gate at %s answers", self._settings.ask)
        self._is_reachable = self._has_answered = True
        self._is_failure_logged = False
        if has_requests:
            self._failures = 0

    def _count_failure(self) -> None:
        """Count the last list as failed, once; after some in a row let the policy answer."""
        if self._is_failed:
            return
        self._is_failed = True
        self._failures += 1
        if self._failures < _FAILURES_TO_UNREACHABLE:
            return
        if self._failures == _FAILURES_TO_UNREACHABLE:
            log.warning(
                "the gate at %s did not reply %d times in a row: the outage policy applies until "
                "it does. Is that gate running, and is its host overloaded?",
                self._settings.ask,
                self._failures,
            )
        self._is_reachable = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._answer(one, None)

    def _answer(self, one: _Waiting, reply: PluginReply | None) -> None:
        if not one.is_answered:
            one.is_answered = True
            self._on_reply(one.peer, one.request, reply)

    def _disconnect(self, error: StewardError, *, is_reachable: bool) -> None:
        """Close a connection that is broken or out of step, and open another.

        Args:
            error: The reason.
            is_reachable: Whether requests that are not sent yet wait for the new connection.
        """
        self._log(error)
        is_stable = False
        if self._connection is not None:
            is_stable = time.monotonic() - self._opened_at >= _STABLE_S
            self._epoll.unregister(self._connection.socket)
            self._connection.socket.close()
        self._connection = None
        self._is_reachable, self._has_answered = is_reachable, False
        failed, self._sent = self._sent, []
        if not is_reachable:
            failed, self._waiting = [*failed, *self._waiting], []
        for one in failed:
            self._answer(one, None)
        if is_stable:
            self._backoff.reset()
        self._open_in_thread(0.0 if is_stable and is_reachable else self._backoff.next_s())

    def _describe(self, error: Exception) -> GateUnavailable:
        to = self._settings.ask
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return GateUnavailable(f"cannot reach the gate at {to}: {reason}", to)

    def _log(self, error: Exception) -> None:
        """Log a failure, at most once a minute for each text, and only some texts a minute."""
        now = time.monotonic()
        self._logged_at = {
            text: at for text, at in self._logged_at.items() if now - at < _LOG_AGAIN_S
        }
        if str(error) not in self._logged_at and len(self._logged_at) < _MAX_LOGGED:
            self._logged_at[str(error)] = now
            self._is_failure_logged = True
            is_foreseen = isinstance(error, StewardError)
            log.warning("%s", error, exc_info=None if is_foreseen else error)

    # Connections

    def _adopt(self, opened: _Connection | Exception) -> None:
        """Use a connection that was opened; try again if that failed."""
        if isinstance(opened, Exception):
            error = opened if isinstance(opened, StewardError) else self._describe(opened)
            self._disconnect(error, is_reachable=False)
            return
        self._connection = opened
        self._epoll.register(opened.socket, select.EPOLLIN)
        self._opened_at, self._asked_at = time.monotonic(), 0.0

    def _open_in_thread(self, delay_s: float) -> None:
        """Open a connection in a thread, with the certificates of then, after a delay."""
        threading.Thread(
            target=self._open, args=(delay_s,), name="remote gate", daemon=True
        ).start()

    def _open(self, delay_s: float) -> None:
        # The deciding thread waits while this one holds the interpreter lock.
        set_real_time_priority()
        if self._stopping.wait(delay_s):
            return
        to = self._settings.ask
        try:
            host, port = split_host_port(to) or ("", 0)
            context = make_client_context(self._settings.tls or TlsSettings())
            with socket.create_connection((host, port), _CONNECT_S) as plain:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = context.wrap_socket(plain, server_hostname=host)
            connection.setblocking(False)
            self._opened.put(_Connection(connection, to))
        except Exception as error:  # the gate's loop logs it
            self._opened.put(error)
        os.eventfd_write(self._opened_fd, 1)
