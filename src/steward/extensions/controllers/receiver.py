"""Receiver of forwarded events: the process of ``steward serve`` that controllers connect to.

:class:`ControllerReceiver` listens on the address of [receive]. Each connection has a thread that
waits for the controller and for munged; work that costs CPU or touches the stores runs under one
lock, so only one thread does it at a time. ``admission`` authenticates the controller and checks
every event.

``run`` accepts connections. A connection's thread runs ``_serve`` (TLS handshake), ``_run_session``
(greeting, hello, authentication) and ``_receive_batches``, where ``_persist_batch`` makes each
batch durable.

The receiver answers a batch once its bytes and its events are durable here, because the controller
deletes them on that answer. A batch that is sent again, by the same controller or by the other one
of a failover pair, has the same keys and is skipped.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from steward.core.config import Settings
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.incoming import IncomingStore, IncomingStores, StoreUnavailable
from steward.core.journal import JournalLink
from steward.core.listeners import open_tcp_listener
from steward.core.tls import Context, make_server_context, read_peer_names
from steward.core.waits import Stop
from steward.extensions.controllers import wire
from steward.extensions.controllers.admission import (
    ControllerPeers,
    EventAdmission,
    MungeAuthenticator,
    TlsAuthenticator,
)

log = logging.getLogger(__name__)

_BACKLOG: Final = 64
"""Length of the listen queue."""
_CLOSE_WAIT_S: Final = 0.5
"""Longest wait for a closed connection's thread to end, in seconds."""
_HELLO_TIMEOUT_S: Final = 10.0
"""Time limit for the handshake and the hello, in seconds; the connection is dropped after it."""
_FIRST_BATCH_TIMEOUT_S: Final = 60.0
"""Time limit for the first batch after the hello, in seconds."""
_IDLE_TIMEOUT_S: Final = 900.0
"""Time limit for each later batch, in seconds."""
_SEND_TIMEOUT_S: Final = 30.0
"""Time limit for sending an answer, in seconds."""
_ACCEPT_WAIT_S: Final = 1.0
"""Longest wait for a connection before the next heartbeat, in seconds."""
_RETRY_STORE_S: Final = 5.0
"""Time for which a store that failed is skipped, in seconds."""
_DRAIN_S: Final = 3.0
"""Longest wait for the batch in progress at the end, in seconds."""


class TooManyControllers(Unavailable):
    """Too many connections for one cluster."""


class _ControllerConnection:
    """One connection: a controller, or a peer that has not identified itself yet."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.since = time.monotonic()
        """Monotonic time of the connection's start, or of its last message."""
        self.cluster = ""
        """Cluster that the controller reports for; empty until it is authenticated."""
        self.is_shut = False
        self.ended = threading.Event()

    def shut_down(self) -> None:
        """Shut the socket down; the connection's thread notices and ends."""
        self.is_shut = True
        try:
            # Bypass SSLSocket's own shutdown: it is unsafe while another thread uses the object.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            return  # already closed


class ControllerReceiver:
    """Server that accepts controllers' connections and appends their events to the journal.

    Args:
        settings: The configuration.
        stores: Stores for script and environment bytes, the preferred one first.
        is_known: Tells whether an event of this cluster and key was ever appended; called by one
            thread at a time.
        link: Connection to the journal's writer.
        max_unidentified: Most connections that have not identified themselves. Bounds the threads
            that a flood of connections can take.
        max_per_cluster: Most connections that report for one cluster, so that its hosts cannot
            take the connections of other clusters.

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
        max_unidentified: int = 64,
        max_per_cluster: int = 8,
    ) -> None:
        self._peers = ControllerPeers(settings)
        self._max_unidentified = max_unidentified
        self._max_per_cluster = max_per_cluster
        self._stores = list(stores)
        self._is_known = is_known
        self._link = link
        self._context: Context | None = None
        if settings.receive.tls:
            self._context = make_server_context(settings.receive.tls)
        self._batch_lock = threading.Lock()
        self._connections: set[_ControllerConnection] = set()
        self._limit_lock = threading.Lock()
        self._logged_problems: dict[str, str] = {}
        self._failed_until: dict[str, float] = {}
        self._listener = open_tcp_listener(settings.receive.listen, _BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Accept connections until ``stop`` is raised; call ``beat`` as the heartbeat."""
        log.info(
            "listening for controllers at %s port %d, %s",
            *self.address,
            "with TLS" if self._context else "without TLS: what they send can be read on its way",
        )
        while not stop.is_set():
            beat()
            if stop.wait(_ACCEPT_WAIT_S, self._listener.fileno()):
                self._accept()
            self._drop_unidentified()
        self.close()

    def close(self) -> None:
        """Close all connections, after the batch in progress."""
        self._listener.close()
        if self._batch_lock.acquire(timeout=_DRAIN_S):
            self._batch_lock.release()
        for connection in list(self._connections):
            connection.shut_down()

    def _accept(self) -> None:
        """Accept one connection and start its thread."""
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            # The peer left before the accept, or no descriptor is free; the next turn may succeed.
            log.debug("a connection could not be taken: %s", error)
            return
        connection = _ControllerConnection(sock, str(address[0]))
        if not self._ensure_capacity("", self._max_unidentified):
            sock.close()
            return
        self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _ensure_capacity(self, cluster: str, limit: int) -> bool:
        """Return True if one more connection fits the limit, closing an old one where needed.

        Among unidentified peers it closes one of the address with the most connections, so that a
        flood ends itself; then the one that has been silent for longest.
        """
        candidates = [
            connection for connection in list(self._connections) if connection.cluster == cluster
        ]
        if len(candidates) < limit:
            return True
        candidates = [connection for connection in candidates if not connection.is_shut]
        if not candidates:
            return False
        if not cluster:
            counts = Counter(connection.address for connection in candidates)
            (address, _), *_ = counts.most_common(1)
            candidates = [connection for connection in candidates if connection.address == address]
        oldest = min(candidates, key=lambda connection: connection.since)
        oldest.shut_down()
        return oldest.ended.wait(_CLOSE_WAIT_S)

    def _drop_unidentified(self) -> None:
        """Close connections that have not identified themselves in time."""
        before = time.monotonic() - 2 * _HELLO_TIMEOUT_S
        for connection in list(self._connections):
            if not connection.cluster and connection.since < before:
                connection.shut_down()

    def _serve(self, connection: _ControllerConnection) -> None:
        """Run one connection from the TLS handshake to its end."""
        peer = connection.address
        sock = connection.sock
        try:
            connection.sock.settimeout(_HELLO_TIMEOUT_S)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    connection.sock, server_side=True, do_handshake_on_connect=False
                )
                connection.sock = sock
                sock.do_handshake()
            self._run_session(connection, wire.FrameStream(sock, peer), read_peer_names(sock))
        except (StewardError, OSError) as error:
            self._log_problem(peer, str(error))
        except Exception:
            # A bug in Steward must end this connection alone.
            log.exception("the connection from %s failed", peer)
        finally:
            self._connections.discard(connection)
            sock.close()
            connection.ended.set()

    def _run_session(
        self,
        connection: _ControllerConnection,
        stream: wire.FrameStream,
        certificate_names: frozenset[str],
    ) -> None:
        """Authenticate the controller, then receive batches until it disconnects."""
        peer = connection.address
        nonce = os.urandom(wire.NONCE_BYTES)
        greeting = wire.ReceiverGreeting(wire.VERSION, nonce)
        stream.send(wire.build_frame(wire.encode_message(greeting)), _HELLO_TIMEOUT_S)
        frame = stream.receive(wire.MAX_FIRST_FRAME_BYTES, _HELLO_TIMEOUT_S)
        if frame is None:
            return
        hello: wire.ControllerHello = wire.expect_message(frame, wire.ControllerHello, peer)
        if len(hello.nonce) != wire.NONCE_BYTES:
            raise wire.WireError(f"{peer} has a nonce of {len(hello.nonce)} bytes")
        nonces = nonce + hello.nonce
        try:
            authenticator = self._authenticate(
                hello, certificate_names, nonces, frame, connection.address
            )
            self._join_cluster(connection, hello.cluster)
        except (PermissionRefused, Unavailable) as error:
            # This answer is unsigned: it changes nothing, so a forged one only costs time.
            self._log_problem(peer, f"cannot report for cluster {hello.cluster!r}: {error}")
            verdict = "refused" if isinstance(error, PermissionRefused) else "later"
            rejection = wire.ReceiverReply(number=0, verdict=verdict, detail=str(error))
            stream.send(wire.build_frame(wire.encode_message(rejection)), _HELLO_TIMEOUT_S)
            return
        body = wire.encode_message(wire.ReceiverReply(number=0, verdict="durable"))
        stream.send(wire.build_frame(body, authenticator.sign(nonces, 0, body)), _SEND_TIMEOUT_S)
        self._log_problem(peer, "")
        log.info("%s reports for cluster %s", peer, hello.cluster)
        self._receive_batches(stream, connection, authenticator, nonces)

    def _join_cluster(self, connection: _ControllerConnection, cluster: str) -> None:
        """Count a connection toward its cluster's limit.

        Raises:
            TooManyControllers: The cluster has too many connections, and none of them ends.
        """
        with self._limit_lock:
            limit = self._max_per_cluster
            if not self._ensure_capacity(cluster, limit):
                raise TooManyControllers(f"{limit} others report for cluster {cluster!r} just now")
            connection.since = time.monotonic()
            connection.cluster = cluster

    def _authenticate(
        self,
        hello: wire.ControllerHello,
        certificate_names: frozenset[str],
        nonces: bytes,
        frame: wire.Frame,
        address: str,
    ) -> MungeAuthenticator | TlsAuthenticator:
        """Check the hello and return what signs and checks this controller's messages."""
        if hello.version != wire.VERSION:
            raise PermissionRefused(f"it speaks version {hello.version}, we speak {wire.VERSION}")
        authenticator = self._peers.get_authenticator(hello.cluster, certificate_names, address)
        authenticator.check(nonces, 0, frame)
        return authenticator

    def _receive_batches(
        self,
        stream: wire.FrameStream,
        connection: _ControllerConnection,
        authenticator: MungeAuthenticator | TlsAuthenticator,
        nonces: bytes,
    ) -> None:
        """Receive, check, store and answer batches until the controller disconnects."""
        peer = connection.address
        admission = EventAdmission(connection.cluster, self._is_known)
        number = 0
        while True:
            frame = stream.receive(
                wire.MAX_WIRE_FRAME_BYTES, _IDLE_TIMEOUT_S if number else _FIRST_BATCH_TIMEOUT_S
            )
            if frame is None:
                return
            number += 1
            authenticator.check(nonces, number, frame)
            connection.since = time.monotonic()
            with self._batch_lock:
                batch: wire.EventBatch = wire.expect_message(frame, wire.EventBatch, peer)
                if batch.number != number or len(batch.rows) > wire.MAX_BATCH_ROWS:
                    raise wire.WireError(
                        f"{peer} sends batch {batch.number} of {len(batch.rows)} events "
                        f"where {number} is due"
                    )
                reply = self._persist_batch(admission, batch)
                del frame, batch
            for index, reason in reply.refused:
                log.warning("%s: event %d of a batch is refused: %s", peer, index, reason)
            body = wire.encode_message(reply)
            stream.send(
                wire.build_frame(body, authenticator.sign(nonces, number, body)), _SEND_TIMEOUT_S
            )

    def _persist_batch(
        self, admission: EventAdmission, batch: wire.EventBatch
    ) -> wire.ReceiverReply:
        """Make a batch durable and return the answer to it."""
        batch_stores: dict[str, IncomingStore] = {}
        try:
            rows, rejected = admission.admit_events(
                batch.rows, lambda: self._select_store(batch_stores)
            )
            for store in batch_stores.values():
                store.sync()
            if rows:
                self._link.send_command("append", *rows)
        except Unavailable as error:
            if isinstance(error, StoreUnavailable):
                # The controller sends the batch again soon, and then another store may work.
                self._failed_until.update(
                    dict.fromkeys(batch_stores, time.monotonic() + _RETRY_STORE_S)
                )
            self._log_problem("here", str(error))
            return wire.ReceiverReply(number=batch.number, verdict="later", detail=str(error))
        self._log_problem("here", "")
        return wire.ReceiverReply(number=batch.number, verdict="durable", refused=rejected)

    def _select_store(self, batch_stores: dict[str, IncomingStore]) -> IncomingStore:
        """Return the first usable store, the same one for the whole batch."""
        for store in batch_stores.values():
            return store
        reasons = []
        now = time.monotonic()
        for store in self._stores:
            if self._failed_until.get(store.name, 0.0) > now:
                reasons.append(f"{store.directory} could not be used")
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
        if problem and self._logged_problems.get(peer) != problem:
            log.warning("%s: %s", peer, problem)
        if problem:
            if len(self._logged_problems) >= self._max_unidentified:
                self._logged_problems.clear()
            self._logged_problems[peer] = problem
        else:
            self._logged_problems.pop(peer, None)
