"""HTTP client of the gate on another host that decides: forwards requests of submit plugins.

With [gate] ``ask``, a gate forwards what its submit plugin asks: a thread of `RemoteGate` posts the
requests that wait together, over one TLS connection; `http_server.py` answers there. An empty list
every 2 s keeps the connection open and shows that the other gate decides.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate.requests import (
    DECIDE_PATH,
    LONGEST_BATCH,
    LONGEST_REQUEST,
    MAX_REQUESTS,
    VERSION,
    PluginReply,
    PluginRequest,
)
from steward.bank.gate.server import set_real_time_priority
from steward.bank.settings import GateSettings
from steward.core.errors import StewardError
from steward.core.section import TlsSettings
from steward.core.tls import make_client_context
from steward.core.waits import Backoff

if TYPE_CHECKING:
    from http.client import HTTPResponse, HTTPSConnection

    from steward.bank.gate.connections import GatePeer

log = logging.getLogger(__name__)

_TIMEOUT_SHARE: Final = 0.7
"""Part of the plugin's time-out granted to the other gate; the rest covers the way there and
back."""
_CONNECT_S: Final = 5.0
"""Time-out of connection, handshake and first answer, in seconds."""
_PING_S: Final = 2.0
"""Interval of empty lists, in seconds: shorter than the server's time-out of idle connections."""
_CHUNK: Final = 1 << 16
_OK: Final = 200
"""Status of success."""
_WAIT_S: Final = 1.0
"""Longest wait of the gate without pending requests, in seconds."""

ReplyCallback = Callable[["GatePeer", PluginRequest, PluginReply | None], None]
"""Callback for a reply: the plugin's connection, its request, and the reply or None."""
_Batch = Sequence[tuple[int, PluginRequest]]

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[PluginReply]).decode


class RemoteGate:
    """Client of the gate on another host that decides: forwards plugin requests.

    If a reply is late, the outage policy answers: slurmctld waits no longer. The gate's loop waits
    for ``fd`` and calls the methods; a thread sends and receives.

    Args:
        settings: The section [gate].
        on_reply: Called with each reply; with None if none came in time.
    """

    def __init__(self, settings: GateSettings, on_reply: ReplyCallback) -> None:
        self._settings = settings
        self._on_reply = on_reply
        self._timeout_s = settings.timeout_ms / 1000 * _TIMEOUT_SHARE
        self._pending: dict[int, tuple[GatePeer, PluginRequest, float]] = {}
        self._last_number = 0
        self._requests: SimpleQueue[tuple[int, PluginRequest, float]] = SimpleQueue()
        self._replies: SimpleQueue[tuple[_Batch, list[PluginReply] | None]] = SimpleQueue()
        self._connection: HTTPSConnection | None = None
        self._is_connected = False
        self._stopping = threading.Event()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor that is readable when replies have come."""
        threading.Thread(target=self._run, name="remote gate", daemon=True).start()

    def forward(self, peer: "GatePeer", request: PluginRequest) -> None:
        """Forward a plugin's request to the other gate."""
        if not self._is_connected:
            self._on_reply(peer, request, None)
            return
        self._last_number += 1
        deadline = time.monotonic() + self._timeout_s
        self._pending[self._last_number] = (peer, request, deadline)
        self._requests.put((self._last_number, request, deadline))

    def get_wait_s(self) -> float:
        """Return the seconds until the next time-out."""
        if not self._pending:
            return _WAIT_S
        # Requests are in order and share one time-out, so the first expires first.
        oldest = next(iter(self._pending.values()))
        return max(0.0, oldest[2] - time.monotonic())

    def deliver_replies(self) -> None:
        """Pass on the replies that have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with suppress(Empty):
            while True:
                batch, replies = self._replies.get_nowait()
                for index, (number, _) in enumerate(batch):
                    pending = self._pending.pop(number, None)
                    if pending is not None:
                        reply = replies[index] if replies is not None else None
                        self._on_reply(pending[0], pending[1], reply)

    def answer_overdue(self) -> None:
        """Answer the requests with None whose time is over."""
        now = time.monotonic()
        for number, (peer, request, deadline) in list(self._pending.items()):
            if deadline > now:
                break
            del self._pending[number]
            self._on_reply(peer, request, None)

    def close(self) -> None:
        """Let the thread end, which closes connection and descriptor."""
        self._stopping.set()

    # The thread

    def _run(self) -> None:
        """Send what waits, and connect again after a failure, until the gate ends."""
        set_real_time_priority()  # slurmctld waits for this thread, too
        backoff = Backoff(0.2, 5.0)
        logged = ""
        while not self._stopping.is_set():
            batch = self._take_batch() if self._is_connected else []
            try:
                replies = self._ask([request for _, request in batch])
            except Exception as error:
                if str(error) != logged:
                    logged = str(error)
                    is_foreseen = isinstance(error, StewardError)
                    log.warning("%s", error, exc_info=None if is_foreseen else error)
                self._disconnect()
                self._put_replies([*batch, *self._take_waiting()], None)
                self._stopping.wait(backoff.next_s())
            else:
                if not self._is_connected:
                    log.info("asking the gate at %s", self._settings.ask)
                self._is_connected = True
                logged = ""
                backoff.reset()
                self._put_replies(batch, replies)
        self._disconnect()
        os.close(self.fd)

    def _take_batch(self) -> _Batch:
        """Wait for requests, and take those that wait; take none if none comes for a while."""
        try:
            first = self._requests.get(timeout=_PING_S)
        except Empty:
            return []
        return self._take_waiting(first)

    def _take_waiting(self, *taken: tuple[int, PluginRequest, float]) -> _Batch:
        """Take the requests that wait, without those whose time is over."""
        items = list(taken)
        size = sum(len(_encode(request)) for _, request, _ in items)
        with suppress(Empty):
            while len(items) < MAX_REQUESTS and size < LONGEST_REQUEST:
                items.append(self._requests.get_nowait())
                size += len(_encode(items[-1][1]))
        now = time.monotonic()
        return [(number, request) for number, request, deadline in items if deadline > now]

    def _put_replies(self, batch: _Batch, replies: list[PluginReply] | None) -> None:
        if batch:
            self._replies.put((batch, replies))
            os.eventfd_write(self.fd, 1)

    def _ask(self, requests: list[PluginRequest]) -> list[PluginReply]:
        """Post a list of requests; return the replies.

        Raises:
            GateUnavailable: The gate does not decide, or cannot be reached.
            TlsUnavailable: A certificate cannot be used.
        """
        from http.client import HTTPException

        to = self._settings.ask
        timeout_s = self._timeout_s if requests else _CONNECT_S
        deadline = time.monotonic() + timeout_s
        try:
            connection = self._connect(timeout_s)
            connection.request("POST", DECIDE_PATH, _encode(requests))
            with closing(connection.getresponse()) as response:
                body = _read_body(response, deadline, to)
        except (OSError, HTTPException) as error:
            raise GateUnavailable(f"the gate at {to} cannot be asked: {error!r}", to) from error
        if response.status != _OK:
            text = body[:500].decode(errors="replace").strip()
            raise GateUnavailable(
                f"the gate at {to} answers with status {response.status}: {text}", to
            )
        try:
            replies = _decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise GateUnavailable(
                f"the gate at {to} sent a reply that cannot be read: {error}", to
            ) from error
        if len(replies) != len(requests) or any(reply.v != VERSION for reply in replies):
            raise GateUnavailable(
                f"the gate at {to} answers in another version: install the same Steward there", to
            )
        return replies

    def _connect(self, timeout_s: float) -> "HTTPSConnection":
        """Return the connection with this time-out for each wait; open one where there is none."""
        if self._connection is None:
            from http.client import HTTPSConnection

            self._connection = HTTPSConnection(
                self._settings.ask,
                context=make_client_context(self._settings.tls or TlsSettings()),
                timeout=timeout_s,
            )
            self._connection.connect()
        self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _disconnect(self) -> None:
        """Close the connection; the next request opens one, with the certificates of then."""
        self._is_connected = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _read_body(response: "HTTPResponse", deadline: float, to: str) -> bytes:
    """Read the body of an answer.

    Raises:
        GateUnavailable: It is too large, or does not end in time.
        OSError: It did not come.
    """
    body = bytearray()
    while chunk := response.read1(_CHUNK):
        body += chunk
        if len(body) > LONGEST_BATCH or time.monotonic() > deadline:
            raise GateUnavailable(f"the gate at {to} answers too slowly, or too much", to)
    return bytes(body)
