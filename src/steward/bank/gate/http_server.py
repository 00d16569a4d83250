"""HTTP server for gates on other hosts, which ask the gate of this one over TLS.

`GateApplication` runs in a process of its own, so that TLS and HTTP take no time of the gate: it
calls the gate's ``decide`` for each list of requests that `http_client.py` posts on another host.
A request is not decided if the gate that asks waits no longer: nobody would
use its hold. The certificate of the gate that asks must name one of the ``controllers`` of each
cluster that it asks for: the server answers another cluster's requests with the reason, and reads
no body from a host that is in none.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import (
    DECIDE_PATH,
    LONGEST_BATCH,
    ForwardedList,
)
from steward.bank.settings import GateSettings
from steward.core.errors import StewardError
from steward.core.http_server import ClientConnection, ServerConfig, send_text
from steward.core.listeners import is_any_host
from steward.core.logs import LogLimit
from steward.slurm.settings import ClusterSettings

log = logging.getLogger(__name__)

_CLOSE: Final = {"Connection": "close"}
_MAX_CALLS: Final = 4
"""Maximum number of concurrent calls to the gate, which answers one after the other."""
_MAX_LISTS_OF_HOST: Final = 8
"""Maximum number of concurrent lists from one host, which sends one after the other."""
_WINDOW_S: Final = 10.0
"""Time for which a difference of two hosts' clocks counts at least, in seconds: clocks drift."""
_MAX_WAIT_S: Final = 10.0
"""Longest time that a gate waits for replies, in seconds."""
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ForwardedList).decode


def make_server_config(settings: GateSettings) -> ServerConfig:
    """Return the configuration of the server for gates on other hosts.

    Raises:
        GateUnavailable: Clients would not have to show a certificate.
    """
    if settings.tls is None or not settings.tls.client_ca_file:
        # The configuration's checks reject this; a gate that anybody can ask must not listen.
        raise GateUnavailable("[gate] listen needs a [tls.NAME] with client_ca_file")
    return ServerConfig(
        name="gates on other hosts", section="[gate]", listen=settings.listen, tls=settings.tls
    )


class _ClockOffset:
    """Difference between this host's clock and that of the host that asks over a connection.

    It is the smallest that lists of the last seconds had when they were read, so that the time for
    which a list waits in buffers counts as waiting. Clocks of two hosts are not compared otherwise.
    """

    def __init__(self) -> None:
        self._former_s = self._current_s = math.inf
        self._since = 0.0

    def add(self, sent_s: float, received_s: float) -> float:
        """Record when a list was sent and received; return the offset in seconds."""
        if received_s - self._since > _WINDOW_S:
            self._former_s, self._current_s = self._current_s, math.inf
            self._since = received_s
        self._current_s = min(self._current_s, received_s - sent_s)
        return min(self._former_s, self._current_s)


class GateApplication:
    """ASGI application that passes requests of other hosts' gates to the gate of this host.

    Args:
        gate: Client of the gate.
        clusters: The clusters, by name.
    """

    def __init__(self, gate: GateClient, clusters: Mapping[str, ClusterSettings]) -> None:
        self._gate = gate
        self._clusters = clusters
        self._only_cluster = next(iter(clusters)) if len(clusters) == 1 else ""
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._list_counts: Counter[frozenset[str]] = Counter()
        """Number of lists that are read or decided, by the names in the certificate."""
        self._log_limit = LogLimit()
        self._offsets: WeakKeyDictionary[ClientConnection, _ClockOffset] = WeakKeyDictionary()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if (scope["method"], scope["path"]) != ("POST", DECIDE_PATH):
            await send_text(send, 404, b"this server answers POST /decide only\n")
            return
        connection: ClientConnection = scope["state"]["connection"]
        names = connection.certificate_names
        permitted = frozenset(
            name
            for name, cluster in self._clusters.items()
            if is_any_host(names, cluster.controllers)
        )
        if not permitted:
            log.log(
                self._log_limit.choose_level(logging.WARNING, names),
                "the gate rejects a host: %s",
                _describe_denial(names, self._clusters),
            )
            # A host outside the clusters does not learn their names.
            text = f"{_describe_names(names)}, which is in no 'controllers': see the gate's log\n"
            await send_text(send, 403, text.encode(), _CLOSE)
            return
        if self._list_counts[names] >= _MAX_LISTS_OF_HOST:
            text = f"more than {_MAX_LISTS_OF_HOST} lists of requests of this host at once\n"
            await send_text(send, 503, text.encode(), _CLOSE)
            return
        self._list_counts[names] += 1
        try:
            await self._answer_list(scope, receive, send, permitted)
        finally:
            self._list_counts[names] -= 1
            if not self._list_counts[names]:
                del self._list_counts[names]

    async def _answer_list(
        self, scope: Any, receive: Any, send: Any, permitted: frozenset[str]
    ) -> None:
        """Read a list of requests, and answer it."""
        received_at = time.monotonic()
        body = bytearray()
        has_more = True
        while has_more:
            try:
                message = await receive()
            except TimeoutError:
                await send_text(send, 408, b"the body did not come in time\n", _CLOSE)
                return
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > LONGEST_BATCH:
                await send_text(send, 413, b"the body is too large\n", _CLOSE)
                return
        async with self._calls:
            status, reply = await self._decide(
                bytes(body), received_at, scope["state"]["connection"], permitted
            )
        await send_text(send, status, reply)

    async def _decide(
        self,
        body: bytes,
        received_at: float,
        connection: ClientConnection,
        permitted: frozenset[str],
    ) -> tuple[int, bytes]:
        """Return status and body of the answer to a list of requests."""
        for _ in range(2):
            await asyncio.sleep(0)  # the loop reads the end of the connection behind the body
        if not connection.is_open:
            return 503, b"the connection was closed\n"
        try:
            forwarded = _decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return 400, f"the requests cannot be read: {error}\n".encode()
        offset = self._offsets.setdefault(connection, _ClockOffset())
        offset_s = offset.add(forwarded.sent_us / 1e6, received_at)
        reasons: list[str] = []
        timed = []
        for one in forwarded.requests:
            cluster = one.request.cluster or self._only_cluster
            if cluster in permitted:
                reasons.append("")
                timed.append((one.request, _get_deadline(one.due_us, forwarded, offset_s)))
            else:
                reasons.append(_describe_denial(connection.certificate_names, (cluster,)))
        deadline = _get_deadline(forwarded.due_us, forwarded, offset_s)
        unused = [reply for reply in forwarded.unused if reply.cluster in permitted]
        try:
            replies = iter(await self._gate.decide(timed, deadline, unused))
        except StewardError as error:
            return 503, f"{error}\n".encode()
        return 200, _encode([reason or next(replies) for reason in reasons])


def _get_deadline(due_us: int, forwarded: ForwardedList, offset_s: float) -> float:
    """Return a time of the asking host by this host's monotonic clock, in seconds."""
    return offset_s + min(due_us / 1e6, forwarded.sent_us / 1e6 + _MAX_WAIT_S)


def _describe_names(names: frozenset[str]) -> str:
    return f"the certificate is for {', '.join(sorted(names)) or 'no host'}"


def _describe_denial(names: frozenset[str], clusters: Iterable[str]) -> str:
    """Return why a certificate's host may not ask for clusters."""
    return (
        f"{_describe_names(names)}, which is none of "
        f"the 'controllers' of cluster {', '.join(map(repr, sorted(clusters)))}"
    )
