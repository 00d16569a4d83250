"""Node receiver: takes batches from agents, appends their events to the journal, then replies.

Each batch is acknowledged only when it is durable, with a signed reply, because the agent then
deletes it. Thousands of nodes report within a minute, so batches are grouped into common commits,
because a commit for each would flush the disk as often. For each request the receiver reads a head
of a few kilobytes, identifies the node, begins its turn, and only then reads the body.

- :class:`GroupAppender` groups waiting batches of many threads into one append.
- :class:`NodeTurns` allows one connection per node, and processes one batch at a time, first come,
  first served: however fast a node sends, every other waits for at most one batch of it.
- :class:`NodeReceiver` accepts connections itself, or through
  :mod:`steward.capture.nodes.listener`, and is run by a worker of the daemon.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final, Protocol

from steward.agent.agent import PATH, digest_of
from steward.capture.nodes.aggregation import GAP_LOST, GAP_REBOOT, aggregate_lines, make_gap_event
from steward.capture.nodes.http import (
    BACKLOG,
    AgentConnection,
    AgentConnections,
    AgentPeer,
    AgentRequest,
    RequestError,
)
from steward.capture.nodes.listener import (
    BODY_TIMEOUT_S,
    IDENTIFY_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    LINGER_S,
    SEND_TIMEOUT_S,
    ForwardedPeer,
    ListenerEndpoint,
    reject_connection,
    secure_connection,
)
from steward.capture.nodes.node_reports import AgentRefusals, NodeReport, NodeReportsWriter
from steward.capture.nodes.senders import (
    AuthenticatedSender,
    BatchHeader,
    SenderAuthenticator,
    parse_batch_header,
)
from steward.core.config import Settings
from steward.core.databases import NODES
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.events import Event, utc_now
from steward.core.journal.client import FRAME_BYTES
from steward.core.journal.store import EncodedEvent, encode_rows
from steward.core.listeners import open_tcp_listener
from steward.core.redaction import make_redactor
from steward.core.tls import Context, make_server_context, read_peer_names
from steward.core.usage import NodeGap
from steward.core.waits import Stop

log = logging.getLogger(__name__)

_APPEND_TIMEOUT_S: Final = 40.0
"""Longer than the journal client waits for a reply, in seconds."""
_APPENDER_CLOSE_S: Final = 2.0
"""Time for waiting rows at a stop, in seconds."""
_MAX_WAITING_BATCHES: Final = 4096
"""Maximum number of waiting batches."""


# Grouped appends


class AppendUnavailable(Unavailable):
    """Error: the journal does not accept events now."""


class _WaitingBatch:
    """Batch whose thread waits for the append."""

    def __init__(self, rows: Sequence[EncodedEvent]) -> None:
        self.rows = rows
        self.size = sum(len(row[3]) for row in rows)
        self.finished = threading.Event()
        self.error: StewardError | None = None


class GroupAppender:
    """Appender of rows of many threads, grouped, in a single thread.

    Args:
        append: Appends rows durably, once; raises StewardError on failure.
    """

    def __init__(self, append: Callable[[Sequence[EncodedEvent]], object]) -> None:
        self._append = append
        self._queue: queue.Queue[_WaitingBatch | None] = queue.Queue(_MAX_WAITING_BATCHES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, rows: Sequence[EncodedEvent]) -> None:
        """Append rows and return when they are durable.

        Raises:
            AppendUnavailable: They are not durable, as far as known.
        """
        if not rows:
            return
        batch = _WaitingBatch(rows)
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            raise AppendUnavailable("too many batches wait for the journal") from None
        if not batch.finished.wait(_APPEND_TIMEOUT_S):
            raise AppendUnavailable("the journal takes too long")
        if batch.error is not None:
            raise AppendUnavailable(str(batch.error)) from batch.error

    def close(self) -> None:
        """Append waiting rows and stop the thread."""
        self._queue.put(None)
        self._thread.join(_APPENDER_CLOSE_S)

    def _run(self) -> None:
        """Append waiting batches, as many at once as fit into one frame."""
        while True:
            first_batch = self._queue.get()
            if first_batch is None:
                return
            group, size = [first_batch], first_batch.size
            while size < FRAME_BYTES:
                try:
                    next_batch = self._queue.get_nowait()
                except queue.Empty:
                    break
                if next_batch is None:
                    self._queue.put(None)
                    break
                group.append(next_batch)
                size += next_batch.size
            self._append_group(group)

    def _append_group(self, group: Sequence[_WaitingBatch]) -> None:
        """Append a group of batches and wake their threads."""
        error: StewardError | None = None
        try:
            self._append([row for batch in group for row in batch.rows])
        except StewardError as caught:
            error = caught
        except Exception as caught:
            # A programming error must not end the thread; the agents send the batch again.
            log.exception("what nodes sent could not be appended")
            error = AppendUnavailable(f"unexpected: {type(caught).__name__}: {caught}")
        for batch in group:
            batch.error = error
            batch.finished.set()


# Turns


class TurnUnavailable(Unavailable):
    """Error: the node or the receiver is busy; the agent must retry later."""


class ClosableConnection(Protocol):
    """Connection that can be shut down."""

    def shut_down(self) -> None:
        """Shut it down."""


class NodeTurns:
    """Turns of nodes: one connection per node, one batch at a time; thread-safe.

    Args:
        patience_s: Maximum wait for a turn, in seconds. Less than an agent's wait for a reply.
    """

    def __init__(self, *, patience_s: float = 25.0) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, str], ClosableConnection] = {}
        self._busy: set[ClosableConnection] = set()
        self._queue: deque[threading.Event] = deque()

    def begin(self, node: tuple[str, str], connection: ClosableConnection) -> None:
        """Make a connection the current one of a node, until ``remove`` or a newer connection.

        An idle previous connection of the node is shut down: its agent may be long gone.

        Args:
            node: Cluster and NodeName.
            connection: Connection.

        Raises:
            TurnUnavailable: Another connection is sending a batch of this node.
        """
        with self._lock:
            previous = self._holders.get(node)
            if previous is not None and previous is not connection:
                if previous in self._busy:
                    raise TurnUnavailable(f"a batch of node {node[1]} is under way already")
                previous.shut_down()
            self._remove(connection)
            self._holders[node] = connection
            self._busy.add(connection)

    def finish_batch(self, connection: ClosableConnection) -> None:
        """Mark a connection's batch as finished."""
        with self._lock:
            self._busy.discard(connection)

    def remove(self, connection: ClosableConnection) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._remove(connection)

    def _remove(self, connection: ClosableConnection) -> None:
        """Remove a connection from all tables."""
        self._busy.discard(connection)
        for node in [node for node, current in self._holders.items() if current is connection]:
            del self._holders[node]

    @contextmanager
    def wait_turn(self) -> Iterator[None]:
        """Wait for exclusive processing, first come, first served.

        Raises:
            TurnUnavailable: The wait took too long.
        """
        turn = threading.Event()
        with self._lock:
            self._queue.append(turn)
            self._wake_first()
        has_turn = turn.wait(self._patience_s)
        try:
            if not has_turn:
                raise TurnUnavailable("too many nodes report just now")
            yield
        finally:
            with self._lock:
                self._queue.remove(turn)
                self._wake_first()

    def _wake_first(self) -> None:
        """Wake the first in the queue."""
        if self._queue:
            self._queue[0].set()


# Receiver

_BUSY_LINGER_S: Final = 0.1
"""Time until a busy client has read the reply, in seconds."""
_WRITE_S: Final = 1.0
"""Interval of writes to nodes.db, in seconds."""
_RETRY_S: Final = 15
"""Value of Retry-After when nothing can be accepted, in seconds."""
_MAX_LOGGED_PEERS: Final = 256
"""Maximum number of peers whose last problem is remembered."""


class NodeReceiver:
    """Receiver of agents' batches.

    Args:
        settings: The configuration.
        append: Appends rows to the journal durably, once.

    Raises:
        ListenUnavailable: The address cannot be bound.
        TlsUnavailable: A certificate cannot be used.
        SqliteUnavailable: nodes.db cannot be opened now.
    """

    def __init__(
        self, settings: Settings, append: Callable[[Sequence[EncodedEvent]], object]
    ) -> None:
        nodes = settings.nodes
        self._senders = SenderAuthenticator(settings)
        self._redact_name = make_redactor(settings).name
        self._reports = NodeReportsWriter(settings.state_dir)
        self._appender = GroupAppender(append)
        self._endpoint = ListenerEndpoint(settings) if nodes.listener else None
        self._context: Context | None = None
        if nodes.tls and self._endpoint is None:
            self._context = make_server_context(nodes.tls)
        self._lock = threading.Lock()
        self._turns = NodeTurns()
        self._last_problems: dict[str, str] = {}
        self._refusals = AgentRefusals(settings.state_dir)
        listener = (
            self._endpoint.listener if self._endpoint else open_tcp_listener(nodes.listen, BACKLOG)
        )
        # Only the listener process knows its own address.
        self.address = ("", 0) if self._endpoint else listener.getsockname()[:2]
        self._connections = AgentConnections(
            listener, nodes.most_connections, nodes.shared_from, self._serve, self._reject
        )

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until ``stop`` is set."""
        if self._endpoint is None:
            log.info(
                "listening for nodes at %s port %d, %s",
                *self.address,
                "with TLS" if self._context else "without TLS: what they send can be read",
            )
        written_at = time.monotonic()
        while not stop.is_set():
            beat()
            self._connections.serve_next(stop)
            if time.monotonic() - written_at >= _WRITE_S:
                written_at = time.monotonic()
                self._write_reports()
        self.close()

    def close(self) -> None:
        """Close all connections; requests in progress get a moment to finish."""
        self._connections.close()
        self._appender.close()
        self._write_reports()
        self._reports.close()

    def _write_reports(self) -> None:
        """Write reports and refusals to disk."""
        try:
            self._reports.write()
            self._refusals.write()
        except StewardError as error:
            self._log_problem(NODES.name, str(error))
        else:
            self._log_problem(NODES.name, "")

    def _reject(self, sock: socket.socket) -> None:
        """Reject a connection because the limit is reached."""
        if self._endpoint is not None:
            self._endpoint.reject(sock)
        else:
            reject_connection(sock, is_secured=self._context is not None)

    def _serve(self, connection: AgentConnection) -> None:
        """Serve one connection in its thread."""
        try:
            if self._endpoint is None:
                sock = secure_connection(connection, self._context)
                self._serve_requests(connection, AgentPeer(sock), read_peer_names(sock))
            else:
                peer = self._endpoint.authenticate(connection)
                if peer is not None:
                    self._serve_requests(connection, peer, frozenset())
        except (StewardError, OSError) as error:
            self._log_problem(connection.address or "the listener", str(error))
        except Exception:
            # A programming error must end this connection only.
            log.exception("the connection from %s failed", connection.address)
        finally:
            self._turns.remove(connection)

    def _serve_requests(
        self,
        connection: AgentConnection,
        peer: AgentPeer | ForwardedPeer,
        certificate_names: frozenset[str],
    ) -> None:
        """Process batches of one connection until it ends."""
        while True:
            try:
                request = peer.read_request(
                    IDLE_TIMEOUT_S if connection.is_known else IDENTIFY_TIMEOUT_S,
                    IDENTIFY_TIMEOUT_S,
                )
                if request is None:
                    return
                header, sender = self._authenticate(request, certificate_names, connection.address)
                self._turns.begin((sender.cluster, sender.head.node), connection)
                connection.is_known = True
                body = peer.read_body(request.length, BODY_TIMEOUT_S)
                digest = digest_of(header, body)
                sender.check_digest(digest)
                self._store_batch(sender, body)
                reply = f"durable {digest}\n".encode()
                credential = sender.sign_reply(digest, reply)
                # Before the reply: after it the agent may connect again at once.
                self._turns.finish_batch(connection)
            except (RequestError, PermissionRefused) as error:
                # Refusals are unsigned: a forged one moves no data and costs only time.
                status = error.status if isinstance(error, RequestError) else 403
                self._log_problem(connection.address, str(error))
                if isinstance(error, PermissionRefused):
                    self._refusals.add(connection.address, str(error))
                self._send_refusal(connection, peer, status, str(error))
                return
            except TurnUnavailable as error:
                # Retry soon, without a log entry: it may be one of very many nodes.
                self._send_refusal(connection, peer, 503, str(error), _BUSY_LINGER_S)
                return
            except Unavailable as error:
                self._log_problem(connection.address, str(error))
                self._send_refusal(connection, peer, 503, str(error))
                return
            peer.send_reply(200, reply, {"Steward-Credential": credential}, SEND_TIMEOUT_S)
            self._log_problem(connection.address, "")
            self._refusals.drop(connection.address)
            del body
            if request.closes_connection:
                return

    def _authenticate(
        self, request: AgentRequest, certificate_names: frozenset[str], address: str
    ) -> tuple[bytes, AuthenticatedSender]:
        """Identify the sender of a request."""
        if request.path != PATH:
            raise RequestError(404, f"nodes report to {PATH}: is the agent of Steward's version?")
        header = request.headers.get(b"steward-batch", b"")
        head = parse_batch_header(header)
        credential = request.headers.get(b"steward-credential", b"")
        return header, self._senders.authenticate(head, credential, certificate_names, address)

    def _send_refusal(
        self,
        connection: AgentConnection,
        peer: AgentPeer | ForwardedPeer,
        status: int,
        message: str,
        linger_s: float = LINGER_S,
    ) -> None:
        """Send an error reply and forget the connection's node."""
        self._turns.remove(connection)
        connection.is_known = False
        headers = {
            "Connection": "close",
            **(_retry_after_header(_RETRY_S) if status == 503 else {}),
        }
        peer.send_reply(
            status, message.encode("utf-8", "replace")[:500] + b"\n", headers, SEND_TIMEOUT_S
        )
        peer.linger(linger_s)

    def _store_batch(self, sender: AuthenticatedSender, body: bytes) -> None:
        """Make a batch durable.

        Raises:
            AppendUnavailable: It is not durable, for now.
        """
        head, cluster, now = sender.head, sender.cluster, utc_now()
        with self._turns.wait_turn():  # one at a time: parsed lines need much memory
            aggregated = aggregate_lines(cluster, head.node, body, now, self._redact_name)
            last_report = self._reports.get_last(cluster, head.node)
            rows = encode_rows([*aggregated.events, *_make_gaps(cluster, head, last_report, now)])
            lost_lines = aggregated.lost + head.dropped
            del aggregated
        self._appender.append(rows)
        self._reports.record(
            NodeReport(
                cluster=cluster,
                node=head.node,
                heard_at=now,
                sequence=head.sequence,
                boot_id=head.boot,
                place=head.place,
                lost=lost_lines,
            )
        )

    def _log_problem(self, peer_name: str, message: str) -> None:
        """Log a problem with a peer, once while it stays the same."""
        with self._lock:
            if message == self._last_problems.get(peer_name, ""):
                return
            if len(self._last_problems) >= _MAX_LOGGED_PEERS:
                self._last_problems.clear()
            self._last_problems[peer_name] = message
        if message:
            log.warning("%s: %s", peer_name, message)


def _make_gaps(
    cluster: str, head: BatchHeader, last_report: NodeReport | None, now: datetime
) -> list[Event]:
    """Build gap events from a batch's head."""
    gaps = []
    if last_report is not None and last_report.place != head.place:
        # The agent's state file is gone, and with it lines that may not have been sent.
        reason = GAP_REBOOT if last_report.boot_id != head.boot else GAP_LOST
        gap = NodeGap(node=head.node, why=reason, since=last_report.heard_at)
        gaps.append(make_gap_event(cluster, gap, f"place.{head.place}", now))
    if head.dropped:
        gap = NodeGap(node=head.node, why=GAP_LOST, lines=head.dropped)
        gaps.append(make_gap_event(cluster, gap, f"{head.place}.{head.dropped_ever}", now))
    return gaps


def _retry_after_header(seconds: int) -> dict[str, str]:
    """Return the header Retry-After."""
    return {"Retry-After": str(seconds)}
