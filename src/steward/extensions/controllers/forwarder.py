"""Forwarder: sends a controller's events to the ``steward serve`` that archives them.

It runs in ``steward controller`` on a slurmctld host. :class:`ReceiverLink` posts batches over
HTTP, signs them, and verifies the answers. :class:`EventForwarder` is the consumer: it
reads events from the local journal, cuts them into batches, adds the script and environment bytes
from the local stores, and moves its cursor (``forward-CLUSTER.db``) once the receiver answers that
they are durable. While the receiver is away, journal and stores keep them. ``wire`` defines the
messages, ``receiver`` is the other end.
"""

import http.client
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer, Rejected
from steward.core.databases import FORWARD
from steward.core.errors import PermissionRefused, Unavailable
from steward.core.events import Event, IncomingFile, JobScript, encode_event
from steward.core.listeners import split_host_port
from steward.core.munge import Munge
from steward.core.script_stores import IncomingStores, StoreError
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
_PIECE_BYTES: Final = 256 << 10
_MAX_REPLY_BYTES: Final = 4 << 20
"""Largest answer, in bytes: a reason for each event of a batch."""


class ReceiverUnavailable(Unavailable):
    """Receiver unavailable: ``steward serve`` is unreachable or cannot store events now."""


class StreamEnded(Unavailable):
    """The receiver does not know the stream, or another number is due there."""


class ReceiverLink:
    """Stream of batches to the receiver for one cluster; the first batch opens it.

    Args:
        settings: The [forward] section: address, TLS and credentials.
        cluster: Cluster whose events this host reports.
        munge_socket: Socket of the cluster's munged; MUNGE's default if empty.
        munge_users: Users that the receiver may run as, beside root and this process's.
    """

    def __init__(
        self,
        settings: ForwardSettings,
        cluster: str,
        munge_socket: str,
        munge_users: tuple[str, ...] = (),
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._munge = Munge(munge_socket)
        self._munge_users = munge_users
        self._connection: http.client.HTTPConnection | None = None
        self._authenticator: MungeAuthenticator | TlsAuthenticator = TlsAuthenticator()
        self._stream = ""
        self._number = 0

    def send_batch(self, rows: list[wire.ForwardedEvent]) -> wire.ReceiverReply:
        """Send a batch and return the answer, which says ``durable``.

        Raises:
            Unavailable: The receiver or munged is unavailable.
            PermissionRefused: The receiver does not accept this host, or its own identity is wrong.
            WireError: The answer is malformed.
        """
        body = wire.encode_message(rows)
        try:
            reply = self._post_batch(body)
        except StreamEnded as error:
            # The receiver restarted, or has a batch whose answer was lost.
            log.debug("opening another stream: %s", error)
            self._stream = ""
            reply = self._post_batch(body)
        self._number += 1
        return reply

    def close(self) -> None:
        """Close the connection and the stream; the next batch opens new ones."""
        self._stream = ""
        self._close_connection()

    def _post_batch(self, body: bytes) -> wire.ReceiverReply:
        """Send the next batch, in a new stream if there is none."""
        if not self._stream:
            self._open_stream()
        try:
            return self._post(wire.EVENTS, body)
        except wire.WireUnavailable as error:
            # A connection that was idle for long. The receiver may have the batch.
            log.debug("sending batch %d again: %s", self._number, error)
            return self._post(wire.EVENTS, body)

    def _open_stream(self) -> None:
        """Open a stream; both sides are authenticated then."""
        tls = self._settings.tls
        if not (tls and tls.certificate_file):
            self._authenticator = MungeAuthenticator(self._munge, peer_uids(self._munge_users))
        self._number = 0
        self._stream = self._post(wire.HELLO, os.urandom(wire.NONCE_BYTES)).stream
        self._number = 1
        log.info("reporting to %s for cluster %s", self._settings.to, self._cluster)

    def _post(self, path: str, body: bytes) -> wire.ReceiverReply:
        """Sign and send one request; return the verified answer."""
        to = self._settings.to
        head = wire.RequestHead(
            path=path,
            origin=to,
            cluster=self._cluster,
            stream=self._stream,
            number=self._number,
            digest=wire.hash_body(body),
        )
        headers = {**head.build_headers(), "host": to, "content-length": str(len(body))}
        credential = self._authenticator.sign(head.build_statement())
        if credential:
            headers["authorization"] = credential
        connection = self._connect()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # an answer may explain it
                # In pieces: the time-out is one of each piece, however slow the link.
                pieces = (body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES))
                connection.request("POST", path, pieces, headers)
            response = connection.getresponse()
            content = _read_body(response)
        except TimeoutError as error:
            self._close_connection()
            raise ReceiverUnavailable(
                f"{to} does not answer within {_ANSWER_S:.0f} s", to
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._close_connection()
            raise wire.WireUnavailable(f"{to}: {error}", to) from error
        try:
            reply = wire.decode_reply(content)
        except wire.WireError as error:
            raise wire.WireError(f"{to} replied with status {response.status}: {error}") from error
        if reply.verdict == wire.RESTART:
            raise StreamEnded(f"{to}: {reply.detail}", to)
        if reply.verdict == wire.REFUSED:
            raise PermissionRefused(
                f"the receiver does not accept this host for cluster {self._cluster}: "
                f"{reply.detail}"
            )
        if reply.verdict != wire.DURABLE:
            raise ReceiverUnavailable(f"{to} is not ready: {reply.detail}", to)
        self._authenticator.check(
            head.build_reply_statement(reply.verdict, content),
            response.headers.get(wire.REPLY_CREDENTIAL, ""),
        )
        return reply

    def _connect(self) -> http.client.HTTPConnection:
        """Return the connection; open one where there is none, with the certificates of then."""
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        to, tls = self._settings.to, self._settings.tls
        address = split_host_port(to)
        if address is None:
            raise ReceiverUnavailable(f"invalid address {to!r}: correct 'to' in [forward]")
        self._connection = (
            http.client.HTTPSConnection(
                *address, timeout=_CONNECT_S, context=make_client_context(tls)
            )
            if tls
            else http.client.HTTPConnection(*address, timeout=_CONNECT_S)
        )
        try:
            self._connection.connect()
        except OSError as error:
            self._close_connection()
            raise ReceiverUnavailable(f"cannot reach {to}: {error}", to) from error
        self._connection.sock.settimeout(_ANSWER_S)
        return self._connection

    def _close_connection(self) -> None:
        """Close the connection; the next request opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _read_body(response: http.client.HTTPResponse) -> bytes:
    """Read the body of an answer.

    Raises:
        WireError: It is too large, or does not end.
        HTTPException: It is not complete.
        OSError: It did not come.
    """
    deadline = time.monotonic() + _ANSWER_S
    body = bytearray()
    with response:
        while chunk := response.read1():
            body += chunk
            if len(body) > _MAX_REPLY_BYTES or time.monotonic() > deadline:
                raise wire.WireError(
                    f"the reply is larger than {_MAX_REPLY_BYTES} bytes, or took longer than "
                    f"{_ANSWER_S:.0f} s"
                )
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


_BATCH_BYTES: Final = 4 << 20
"""Size at which a batch is sent, in bytes."""
_MAX_EVENT_BYTES: Final = wire.MAX_BODY_BYTES - (1 << 20)
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
        munge_socket = settings.cluster[cluster].munge_socket
        self._link = ReceiverLink(
            settings.forward, cluster, munge_socket, settings.access.munge_users
        )
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
                raise Rejected(
                    f"the event has {row_bytes} bytes: at most {_MAX_EVENT_BYTES} can be forwarded",
                    event,
                )
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
            raise Rejected(f"the script of job {body.job_id} is missing: {error}", event) from error

    def _send_batch(self, rows: list[wire.ForwardedEvent]) -> wire.ReceiverReply:
        """Send a batch and return the answer; close the stream if one side is not accepted.

        Raises:
            Unavailable: There is no answer, or its verdict is not ``durable``.
        """
        try:
            return self._link.send_batch(rows)
        except (wire.WireError, PermissionRefused) as error:
            self._link.close()
            raise ReceiverUnavailable(f"{self._receiver}: {error}", self._receiver) from error
