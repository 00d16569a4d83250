"""Receiver of forwarded events: the process of ``steward serve`` that controllers connect to.

:class:`ControllerReceiver` is the ASGI application that ``core/http_server.py`` serves at the
address of [receive]. Only a request's head is read before ``admission`` has authenticated the
controller. The event loop never waits for anything else than connections: munged is asked in
threads of the cluster, and one thread checks, writes and appends the batches of all controllers.

A hello opens a :class:`_Stream`, which numbers the batches of one controller. A cluster has few
streams, and few bodies in memory at once, so no cluster takes the places of another.

The receiver answers a batch once its bytes and its events are durable here, because the controller
deletes them on that answer. A batch that is sent again, by the same controller or by the other one
of a failover pair, has the same keys and is skipped.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from steward.core.config import Settings
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.http_server import ServerConfig, Timeouts, open_http_listener, serve_http
from steward.core.journal import JournalLink
from steward.core.script_stores import IncomingStore, IncomingStores, StoreUnavailable
from steward.core.tls import make_server_context
from steward.core.waits import Stop
from steward.extensions.controllers import wire
from steward.extensions.controllers.admission import (
    ControllerPeers,
    EventAdmission,
    MungeAuthenticator,
    TlsAuthenticator,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_TIMEOUTS: Final = Timeouts(request_s=60.0)
_MAX_BODIES: Final = 2
"""Most bodies of one cluster in memory at once; a failover pair has two controllers."""
_MAX_HELLOS: Final = 4
"""Most hellos for a cluster of one address that are authenticated at once."""
_THREADS: Final = 2
"""Threads of a cluster that ask its munged for its streams, and as many for its hellos."""
_MAX_PROBLEMS: Final = 64
"""Most peers whose last problem is remembered."""
_MAX_PROBLEM: Final = 500
"""Longest problem in the log, in characters: it may quote the request."""
_RETRY_STORE_S: Final = 5.0
"""Time for which a store that failed is skipped, in seconds."""
_OK: Final = 200


class TooManyHellos(Unavailable):
    """Too many hellos of one address at once."""


class OutOfStep(StewardError):
    """The stream is unknown, or another number is due: the controller has to open a stream."""


class _PeerLeft(Exception):
    """The controller disconnected before its body was complete."""


class _Stream:
    """Stream of one controller, with the number and the digest of its last durable batch."""

    def __init__(
        self,
        names: frozenset[str],
        authenticator: MungeAuthenticator | TlsAuthenticator,
        admission: EventAdmission,
    ) -> None:
        self.names = names
        """Names in the certificate of the hello's connection."""
        self.authenticator = authenticator
        self.admission = admission
        self.number = 0
        self.digest = ""
        self.lock = asyncio.Lock()
        """Held for one batch at a time: a repeated one waits for the first attempt."""


class _ClusterStreams:
    """Streams of one cluster, with the threads and the memory that they may use."""

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}
        """Streams by id, the least recently used one first."""
        self.bodies = asyncio.Semaphore(_MAX_BODIES)
        self.hellos: Counter[str] = Counter()
        """Hellos that are being authenticated, by address."""
        # Hellos, which anybody can send, keep no stream waiting.
        self.hello_threads = ThreadPoolExecutor(_THREADS)
        self._threads = ThreadPoolExecutor(_THREADS)

    def find_stream(self, stream_id: str) -> _Stream:
        """Return a stream, which is the most recently used one then.

        Raises:
            OutOfStep: There is none of this id.
        """
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            raise OutOfStep("unknown stream: the receiver restarted, or other streams replaced it")
        self.streams[stream_id] = stream
        return stream

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function that asks munged, for a stream."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """End the threads that have nothing to do."""
        self.hello_threads.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


class ControllerReceiver:
    """Server that accepts controllers' requests and appends their events to the journal.

    Args:
        settings: The configuration.
        stores: Stores for script and environment bytes, the preferred one first.
        is_known: Tells whether an event of this cluster and key was ever appended; called by one
            thread.
        link: Connection to the journal's writer.
        max_per_cluster: Most streams of one cluster.
        timeouts: Timeouts of clients.

    Raises:
        ListenUnavailable: The address cannot be bound.
        TlsUnavailable: A certificate or key is unusable.
        PermissionRefused: A user of munge_users does not exist.
    """

    def __init__(
        self,
        settings: Settings,
        stores: IncomingStores,
        is_known: Callable[[str, str], bool],
        link: JournalLink,
        *,
        max_per_cluster: int = 8,
        timeouts: Timeouts = _TIMEOUTS,
    ) -> None:
        self._peers = ControllerPeers(settings)
        self._max_per_cluster = max_per_cluster
        self._stores = list(stores)
        self._is_known = is_known
        self._link = link
        self._clusters = {name: _ClusterStreams() for name in self._peers.list_clusters()}
        self._batch_thread = ThreadPoolExecutor(1)
        self._logged_problems: dict[str, str] = {}
        self._failed_until: dict[str, float] = {}
        self._config = ServerConfig(
            name="controllers",
            section="[receive]",
            listen=settings.receive.listen,
            tls=settings.receive.tls,
            timeouts=timeouts,
        )
        if self._config.tls:
            # A certificate that is just being renewed is waited for before the server starts.
            make_server_context(self._config.tls)
        self._listener = open_http_listener(self._config)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve controllers until ``stop`` is raised; call ``beat`` as the heartbeat."""
        try:
            serve_http(self._config, self, self._listener, stop, beat)
        finally:
            self._batch_thread.shutdown(wait=False, cancel_futures=True)
            for cluster in self._clusters.values():
                cluster.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request (ASGI)."""
        peer = str((scope["client"] or ("unknown",))[0])
        credential = ""
        try:
            body, credential = await self._handle(scope, receive, peer)
            status = _OK
        except _PeerLeft:
            return
        except (StewardError, TimeoutError) as error:
            # Unsigned: it makes the controller delete nothing, so a forged one only costs time.
            status, verdict = _map_error(error)
            detail = str(error) or "the body was not complete in time"
            name = dict(scope["headers"]).get(b"steward-cluster", b"").decode("latin-1")
            if verdict != wire.RESTART:
                self._log_problem(peer, f"cannot report for cluster {name!r}: {detail}")
            body = wire.encode_message(wire.ReceiverReply(verdict=verdict, detail=detail))
        headers = [(b"content-length", b"%d" % len(body))]
        if credential:
            headers.append((wire.REPLY_CREDENTIAL.encode(), credential.encode()))
        if status != _OK:
            # What is left of a body that is not accepted is not read either.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _handle(self, scope: Any, receive: Any, peer: str) -> tuple[bytes, str]:
        """Handle a request; return body and credential of the answer."""
        method, path = scope["method"], scope["path"]
        if method != "POST" or path not in (wire.HELLO, wire.EVENTS):
            raise wire.WireError(f"unknown request {method} {path!r}")
        head, credential = wire.parse_head(path, scope["headers"])
        cluster = self._clusters.get(head.cluster)
        if cluster is None:
            raise PermissionRefused("no host may report for this cluster: set its 'controllers'")
        names: frozenset[str] = scope["state"]["connection"].certificate_names
        if path == wire.HELLO:
            stream = await self._authenticate(cluster, head, credential, names, peer)
            head.check_body(await _read_body(receive))
            stream_id = secrets.token_hex(32)
            while len(cluster.streams) >= self._max_per_cluster:
                del cluster.streams[next(iter(cluster.streams))]
            cluster.streams[stream_id] = stream
            reply = wire.ReceiverReply(verdict=wire.DURABLE, stream=stream_id)
            log.info("%s reports for cluster %s", peer, head.cluster)
        else:
            stream = cluster.find_stream(head.stream)
            if stream.names != names:
                raise PermissionRefused("the certificate differs from that of the stream's hello")
            await cluster.run(stream.authenticator.check, head.build_statement(), credential)
            reply = await self._receive_batch(cluster, stream, head, receive)
            for index, reason in reply.refused:
                log.warning("%s: rejected event %d of a batch: %s", peer, index, reason)
        self._log_problem(peer, "")
        content = wire.encode_message(reply)
        statement = head.build_reply_statement(reply.verdict, content)
        return content, await cluster.run(stream.authenticator.sign, statement)

    async def _authenticate(
        self,
        cluster: "_ClusterStreams",
        head: wire.RequestHead,
        credential: str,
        names: frozenset[str],
        peer: str,
    ) -> _Stream:
        """Authenticate a hello; return its stream."""

        def check() -> MungeAuthenticator | TlsAuthenticator:
            authenticator = self._peers.get_authenticator(head.cluster, names, peer)
            authenticator.check(head.build_statement(), credential)
            return authenticator

        if cluster.hellos[peer] >= _MAX_HELLOS:
            raise TooManyHellos(
                f"{_MAX_HELLOS} new connections of {peer} already wait for munged: try again later"
            )
        cluster.hellos[peer] += 1
        try:
            loop = asyncio.get_running_loop()
            authenticator = await loop.run_in_executor(cluster.hello_threads, check)
        finally:
            cluster.hellos[peer] -= 1
            cluster.hellos += Counter()  # drops the addresses that have none
        return _Stream(names, authenticator, EventAdmission(head.cluster, self._is_known))

    async def _receive_batch(
        self,
        cluster: "_ClusterStreams",
        stream: _Stream,
        head: wire.RequestHead,
        receive: Any,
    ) -> wire.ReceiverReply:
        """Read a batch and make it durable."""
        async with stream.lock, cluster.bodies:
            is_repeated = (head.number, head.digest) == (stream.number, stream.digest)
            if head.number != stream.number + 1 and not is_repeated:
                raise OutOfStep(f"batch {head.number} received, but {stream.number + 1} is next")
            body = await _read_body(receive)
            reply = await asyncio.get_running_loop().run_in_executor(
                self._batch_thread, self._persist_batch, stream.admission, head, body
            )
            stream.number, stream.digest = head.number, head.digest
        return reply

    def _persist_batch(
        self, admission: EventAdmission, head: wire.RequestHead, body: bytearray
    ) -> wire.ReceiverReply:
        """Make a batch durable and return the answer to it."""
        head.check_body(body)
        batch_stores: dict[str, IncomingStore] = {}
        try:
            rows, rejected = admission.admit_events(
                wire.decode_rows(body), lambda: self._select_store(batch_stores)
            )
            for store in batch_stores.values():
                store.sync()
            if rows:
                self._link.append_once(rows)
        except StoreUnavailable:
            # The controller sends the batch again soon, and then another store may work.
            self._failed_until.update(
                dict.fromkeys(batch_stores, time.monotonic() + _RETRY_STORE_S)
            )
            raise
        return wire.ReceiverReply(verdict=wire.DURABLE, refused=rejected)

    def _select_store(self, batch_stores: dict[str, IncomingStore]) -> IncomingStore:
        """Return the first usable store, the same one for the whole batch."""
        for store in batch_stores.values():
            return store
        reasons = []
        now = time.monotonic()
        for store in self._stores:
            if self._failed_until.get(store.name, 0.0) > now:
                reasons.append(f"cannot use {store.directory}")
                continue
            try:
                store.check()
            except StewardError as error:
                reasons.append(str(error))
                continue
            batch_stores[store.name] = store
            return store
        raise StoreUnavailable("; ".join(reasons))

    def _log_problem(self, peer: str, problem: str) -> None:
        """Log a peer's problem once, until the problem changes."""
        problem = problem[:_MAX_PROBLEM]
        if not problem:
            self._logged_problems.pop(peer, None)
        elif self._logged_problems.get(peer) != problem:
            if len(self._logged_problems) >= _MAX_PROBLEMS:
                self._logged_problems.clear()
            self._logged_problems[peer] = problem
            log.warning("%s: %s", peer, problem)


def _map_error(error: Exception) -> tuple[int, str]:
    """Return the status and the verdict of the answer to a request that failed."""
    if isinstance(error, OutOfStep):
        return 409, wire.RESTART
    if isinstance(error, PermissionRefused):
        return 403, wire.REFUSED
    if isinstance(error, wire.WireError):
        return 400, wire.REFUSED
    return (408 if isinstance(error, TimeoutError) else 503), wire.LATER


async def _read_body(receive: Any) -> bytearray:
    """Read a request's body; the server's limits end one that does not come."""
    body = bytearray()
    more_body = True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _PeerLeft
        body += message["body"]
        more_body = message.get("more_body", False)
    return body
