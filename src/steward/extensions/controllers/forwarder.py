"""Forwarder: sends a controller's events to the ``steward serve`` that archives them.

It runs in ``steward controller`` on a slurmctld host. :class:`ReceiverLink` holds the connection:
TLS or MUNGE authentication, hello, batches, answers. :class:`EventForwarder` is the consumer: it
reads events from the local journal, cuts them into batches, adds the script and environment bytes
from the local stores, and moves its cursor (``forward-CLUSTER.db``) once the receiver answers that
they are durable. While the receiver is away, journal and stores keep them. ``wire`` defines the
messages, ``receiver`` is the other end.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer, Rejected
from steward.core.databases import FORWARD
from steward.core.errors import PermissionRefused, Unavailable
from steward.core.events import Event, IncomingFile, JobScript, encode_event
from steward.core.incoming import IncomingStores, StoreError
from steward.core.listeners import split_host_port
from steward.core.munge import Munge
from steward.core.sqlite import Database
from steward.core.storage import CURSOR
from steward.core.tls import make_client_context
from steward.extensions.controllers import wire
from steward.extensions.controllers.admission import (
    FORWARDED_KINDS,
    MungeAuthenticator,
    TlsAuthenticator,
    peer_uids,
)
from steward.extensions.controllers.settings import ForwardSettings

log = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 60.0
"""Longest time to wait for an answer of the server, in seconds."""


class ReceiverUnavailable(Unavailable):
    """Receiver unavailable: ``steward serve`` is unreachable or cannot store events now."""


class ReceiverLink:
    """Connection to the receiver for one cluster; connects when the first batch is sent.

    Args:
        settings: The [forward] section: address, TLS and credentials.
        cluster: Cluster whose events this host reports.
        munge_socket: Socket of the cluster's munged; MUNGE's default if empty.
    """

    def __init__(self, settings: ForwardSettings, cluster: str, munge_socket: str) -> None:
        self._settings = settings
        self._cluster = cluster
        self._munge = Munge(munge_socket)
        self._connection: socket.socket | None = None
        self._stream: wire.FrameStream | None = None
        self._authenticator: MungeAuthenticator | TlsAuthenticator = TlsAuthenticator()
        self._nonces = b""
        self._batch_number = 0

    def send_batch(self, rows: list[wire.ForwardedEvent]) -> wire.ReceiverReply:
        """Send a batch and return the answer. After an error, call :meth:`close`.

        Raises:
            Unavailable: The receiver or munged is unavailable.
            PermissionRefused: The receiver does not accept this host, or its own identity is wrong.
            WireError: The answer is malformed.
        """
        if self._stream is not None:
            try:
                return self._exchange(self._stream, rows)
            except wire.WireUnavailable as error:
                # The receiver may have restarted, or closed a connection that was idle for long.
                log.debug("connecting anew: %s", error)
                self.close()
        return self._exchange(self._connect(), rows)

    def close(self) -> None:
        """Close the connection; the next batch opens a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._stream = None

    def _exchange(
        self, stream: wire.FrameStream, rows: list[wire.ForwardedEvent]
    ) -> wire.ReceiverReply:
        """Sign and send one batch; return the answer."""
        self._batch_number += 1
        body = wire.encode_message(wire.EventBatch(self._batch_number, rows))
        credential = self._authenticator.sign(self._nonces, self._batch_number, body)
        stream.send(wire.build_frame(body, credential), _ANSWER_S)
        return self._receive_reply(stream)

    def _receive_reply(self, stream: wire.FrameStream) -> wire.ReceiverReply:
        """Receive, verify and return one answer."""
        frame = stream.receive(wire.MAX_WIRE_FRAME_BYTES, _ANSWER_S)
        reply: wire.ReceiverReply = wire.expect_message(
            frame, wire.ReceiverReply, self._settings.to
        )
        if reply.verdict == "refused":
            raise PermissionRefused(
                f"this host may not report for cluster {self._cluster}: {reply.detail}"
            )
        if reply.verdict != "durable" or frame is None:
            raise ReceiverUnavailable(
                f"{self._settings.to} cannot take anything now: {reply.detail}", self._settings.to
            )
        self._authenticator.check(self._nonces, self._batch_number, frame)
        if reply.number != self._batch_number:
            raise wire.WireError(
                f"an answer to batch {reply.number} instead of {self._batch_number}"
            )
        return reply

    def _connect(self) -> wire.FrameStream:
        """Open a connection and authenticate both sides."""
        address = split_host_port(self._settings.to)
        if address is None:
            raise ReceiverUnavailable(f"{self._settings.to!r} is no address: set [forward] to")
        try:
            self._connection = socket.create_connection(address, _CONNECT_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._settings.tls
            if tls:
                context = make_client_context(tls)
                self._connection = context.wrap_socket(self._connection, server_hostname=address[0])
        except OSError as error:
            raise ReceiverUnavailable(
                f"{self._settings.to} cannot be reached: "
                f"{getattr(error, 'verify_message', '') or error.strerror or error}",
                self._settings.to,
            ) from error
        stream = wire.FrameStream(self._connection, self._settings.to)
        frame = stream.receive(wire.MAX_FIRST_FRAME_BYTES, _ANSWER_S)
        greeting: wire.ReceiverGreeting = wire.expect_message(
            frame, wire.ReceiverGreeting, self._settings.to
        )
        if len(greeting.nonce) != wire.NONCE_BYTES:
            raise wire.WireError(f"a nonce of {len(greeting.nonce)} bytes")
        own_nonce = os.urandom(wire.NONCE_BYTES)
        self._nonces = greeting.nonce + own_nonce
        self._batch_number = 0
        if not (tls and tls.certificate_file):
            uids = peer_uids(self._settings.munge_users)
            self._authenticator = MungeAuthenticator(self._munge, wire.FROM_CONTROLLER, uids)
        body = wire.encode_message(wire.ControllerHello(wire.VERSION, self._cluster, own_nonce))
        credential = self._authenticator.sign(self._nonces, 0, body)
        stream.send(wire.build_frame(body, credential), _ANSWER_S)
        self._receive_reply(stream)
        log.info("reporting to %s for cluster %s", self._settings.to, self._cluster)
        self._stream = stream
        return stream


_BATCH_BYTES: Final = 4 << 20
"""Size at which a batch is sent, in bytes."""
_MAX_EVENT_BYTES: Final = wire.MAX_WIRE_FRAME_BYTES - (1 << 20)
"""Largest event that can be forwarded, in bytes."""


class EventForwarder(DatabaseConsumer):
    """Consumer that forwards one cluster's events; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The configuration; the database is ``forward-CLUSTER.db`` in its state_dir.
        cluster: Cluster whose events are forwarded.
        stores: Stores that hold script and environment bytes until they are forwarded.

    Raises:
        SqliteError: The database is unusable.
        SqliteUnavailable: The database is temporarily unusable.
    """

    kinds = FORWARDED_KINDS
    batch_events = 256

    def __init__(self, settings: Settings, cluster: str, stores: IncomingStores) -> None:
        self.name = f"forward.{cluster}"
        self._receiver = settings.forward.to
        self._link = ReceiverLink(settings.forward, cluster, settings.cluster[cluster].munge_socket)
        self._cluster = cluster
        self._stores = stores
        path = FORWARD.locate(settings.state_dir, cluster)
        super().__init__(Database(path, (CURSOR.schema,)))
        # State of the current batch: ids that are durable at the receiver, and ids it will never
        # accept.
        self._durable: set[int] = set()
        self._rejected: dict[int, str] = {}

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Send events, and move the cursor once they are durable at the receiver.

        Raises:
            Unavailable: The receiver is away, cannot write, or does not recognize this host.
            Rejected: The receiver will never accept an event, or the event's bytes are gone.
        """
        pending = [e for e in events if e.cluster == self._cluster and e.id not in self._durable]
        for event in pending:
            if event.id in self._rejected:
                raise Rejected(self._rejected[event.id], event)
        for batch, rows in self._build_batches(pending):
            reply = self._send_batch(rows)
            rejected = dict(reply.refused)
            for index, event in enumerate(batch):
                if index in rejected:
                    self._rejected[event.id] = f"{self._receiver}: {rejected[index]}"
                else:
                    self._durable.add(event.id)
        for event in pending:
            if event.id in self._rejected:
                raise Rejected(self._rejected[event.id], event)
        super().apply(events, upto, append)
        self._durable.clear()
        self._rejected.clear()

    def close(self) -> None:
        """Close the connection and the database."""
        self._link.close()
        super().close()

    def _build_batches(
        self, events: Sequence[Event]
    ) -> Iterator[tuple[list[Event], list[wire.ForwardedEvent]]]:
        """Cut events into batches below the size limit, each with its wire rows."""
        batch: list[Event] = []
        rows: list[wire.ForwardedEvent] = []
        size = 0
        for event in events:
            row = self._build_row(event)
            row_bytes = len(row.data) + len(row.script or b"") + len(row.environment or b"")
            if row_bytes > _MAX_EVENT_BYTES:
                raise Rejected(f"{row_bytes} bytes are more than can be forwarded", event)
            if batch and size + row_bytes > _BATCH_BYTES:
                yield batch, rows
                batch, rows, size = [], [], 0
            batch.append(event)
            rows.append(row)
            size += row_bytes
        if batch:
            yield batch, rows

    def _build_row(self, event: Event) -> wire.ForwardedEvent:
        """Convert an event to a wire row, with its script and environment bytes."""
        script = environment = None
        body = event.body
        if isinstance(body, JobScript):
            script = self._read_bytes(event, body, body.script)
            environment = self._read_bytes(event, body, body.environment)
        return wire.ForwardedEvent(
            event.kind, event.cluster, event.key, encode_event(event), script, environment
        )

    def _read_bytes(self, event: Event, body: JobScript, file: IncomingFile | None) -> bytes | None:
        """Read stored bytes of a script event; None where none are archived."""
        if file is None:
            return None
        try:
            return self._stores.read(body, file)
        except (FileNotFoundError, StoreError) as error:
            raise Rejected(f"the bytes of job {body.job_id} are gone: {error}", event) from error

    def _send_batch(self, rows: list[wire.ForwardedEvent]) -> wire.ReceiverReply:
        """Send a batch and return the answer; close the connection on failure.

        Raises:
            Unavailable: There is no answer, or its verdict is not ``durable``.
        """
        try:
            return self._link.send_batch(rows)
        except (wire.WireError, PermissionRefused) as error:
            self._link.close()
            raise ReceiverUnavailable(f"{self._receiver}: {error}", self._receiver) from error
        except Unavailable:
            self._link.close()
            raise
