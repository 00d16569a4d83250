"""Node receiver: takes batches from agents, appends their events to the journal, then replies.

Each batch is acknowledged only when it is durable, with a signed reply, because the agent then
deletes it. Thousands of nodes report within a minute, so batches are grouped into common commits,
because a commit for each would flush the disk as often. For each request the receiver reads a head
of a few kilobytes, identifies the node, begins its turn, and only then reads the body. Its event
loop never blocks: threads decode credentials and process batches.

- :class:`GroupAppender` groups waiting batches of many threads into one append.
- :class:`NodeTurns` allows one connection per node, and processes one batch at a time, first come,
  first served: however fast a node sends, every other waits for at most one batch of it.
- :class:`NodeReceiver` is the application of the HTTP server, which accepts connections itself, or
  through :mod:`steward.capture.nodes.listener`; a worker of the daemon runs it.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import msgspec

from steward.agent.agent import PATH, digest_of
from steward.capture.nodes.aggregation import GAP_LOST, GAP_REBOOT, aggregate_lines, make_gap_event
from steward.capture.nodes.listener import (
    ListenerEndpoint,
    RequestError,
    make_server_config,
    parse_length,
    read_chunks,
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
from steward.core.http_server import (
    ClientConnection,
    Receive,
    open_http_listener,
    send_text,
    serve_http,
)
from steward.core.journal.client import FRAME_BYTES
from steward.core.journal.store import EncodedEvent, encode_rows
from steward.core.redaction import make_redactor
from steward.core.tls import make_server_context
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
            raise AppendUnavailable("too many batches wait for the journal: retry later") from None
        if not batch.finished.wait(_APPEND_TIMEOUT_S):
            raise AppendUnavailable("the journal did not store the batch in time: retry later")
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
            log.exception("cannot append events from nodes to the journal")
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
        # Connections leave by their end, which nobody reports.
        self._holders = WeakValueDictionary[tuple[str, str], ClosableConnection]()
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
                    raise TurnUnavailable(f"another batch of node {node[1]} is in progress")
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
                raise TurnUnavailable("too many nodes report at the moment: retry later")
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

_AUTHENTICATION_THREADS: Final = 8
"""Threads that authenticate senders: munged may be slow, and so may DNS and Slurm."""
MAX_BATCHES: Final = 64
"""Most batches read at once: each takes a thread, and may hold a megabyte."""
_PLACE_PATIENCE_S: Final = 25.0
"""Maximum wait of an authenticated node until its batch is read, in seconds."""
_WRITE_S: Final = 1.0
"""Interval of writes to nodes.db, in seconds."""
_RETRY_S: Final = "15"
"""Value of Retry-After when nothing can be accepted, in seconds."""
_MAX_LOGGED_PEERS: Final = 256
"""Maximum number of peers whose last problem is remembered."""


class NodeReceiver:
    """Receiver of agents' batches.

    Args:
        settings: The configuration.
        append: Appends rows to the journal durably, once.
        max_batches: Most batches read at once; further nodes wait, or are asked to retry.

    Raises:
        ListenUnavailable: The address cannot be bound.
        TlsUnavailable: A certificate cannot be used.
        SqliteUnavailable: nodes.db cannot be opened now.
    """

    def __init__(
        self,
        settings: Settings,
        append: Callable[[Sequence[EncodedEvent]], object],
        max_batches: int = MAX_BATCHES,
    ) -> None:
        nodes = settings.nodes
        self._senders = SenderAuthenticator(settings)
        self._redact_name = make_redactor(settings).name
        self._reports = NodeReportsWriter(settings.state_dir)
        self._appender = GroupAppender(append)
        self._config = make_server_config(nodes)
        self._endpoint = ListenerEndpoint(settings) if nodes.listener else None
        if nodes.tls and self._endpoint is None:
            make_server_context(nodes.tls)  # so that the caller waits while it is being renewed
        self._lock = threading.Lock()
        self._turns = NodeTurns()
        self._last_problems: dict[str, str] = {}
        self._refusals = AgentRefusals(settings.state_dir)
        self._listener = (
            self._endpoint.listener if self._endpoint else open_http_listener(self._config)
        )
        # Only the listener process knows its own address.
        self.address = ("", 0) if self._endpoint else self._listener.getsockname()[:2]
        self._places = asyncio.Semaphore(max_batches)
        self._authentication_threads = ThreadPoolExecutor(_AUTHENTICATION_THREADS)
        self._batch_threads = ThreadPoolExecutor(max_batches)

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until ``stop`` is set."""
        find_address, config = None, self._config
        if self._endpoint:
            find_address = self._endpoint.find_address
            config = msgspec.structs.replace(config, tls=None)
        writer = threading.Thread(target=self._write_until, args=(stop,), daemon=True)
        writer.start()
        serve_http(config, self._answer, self._listener, stop, beat, find_address)
        for threads in (self._authentication_threads, self._batch_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._appender.close()
        writer.join()
        self._write_reports()
        self._reports.close()

    def _write_until(self, stop: Stop) -> None:
        """Write reports and refusals to disk once a second."""
        while not stop.is_set():
            stop.wait(_WRITE_S)
            self._write_reports()

    def _write_reports(self) -> None:
        """Write reports and refusals to disk."""
        try:
            self._reports.write()
            self._refusals.write()
        except StewardError as error:
            self._log_problem(NODES.name, str(error))
        else:
            self._log_problem(NODES.name, "")

    async def _answer(self, scope: Any, receive: Receive, send: Any) -> None:
        """Answer a request of a node."""
        connection: ClientConnection = scope["state"]["connection"]
        try:
            reply, credential = await self._process_batch(scope, receive, connection)
        except TurnUnavailable as error:
            # Retry soon, without a log entry: it may be one of very many nodes.
            await self._refuse(connection, send, 503, error)
        except (RequestError, PermissionRefused, Unavailable) as error:
            # Refusals are unsigned: a forged one moves no data and costs only time.
            self._log_problem(connection.address, str(error))
            status = 503
            if isinstance(error, RequestError):
                status = error.status
            elif isinstance(error, PermissionRefused):
                status = 403
                self._refusals.add(connection.address, str(error))
            await self._refuse(connection, send, status, error)
        else:
            self._log_problem(connection.address, "")
            self._refusals.drop(connection.address)
            await send_text(send, 200, reply, {"Steward-Credential": credential})

    async def _refuse(
        self, connection: ClientConnection, send: Any, status: int, error: StewardError
    ) -> None:
        """Send an error reply and forget the connection's node."""
        self._turns.remove(connection)
        headers = {"Connection": "close", **({"Retry-After": _RETRY_S} if status == 503 else {})}
        await send_text(send, status, str(error).encode("utf-8", "replace")[:500] + b"\n", headers)

    async def _process_batch(
        self, scope: Any, receive: Receive, connection: ClientConnection
    ) -> tuple[bytes, str]:
        """Make the batch of a request durable; return the reply and its credential.

        Raises:
            RequestError: It is no request of an agent, or comes too slowly.
            PermissionRefused: The sender is not the node it claims to be.
            Unavailable: The batch is not durable, for now.
        """
        loop = asyncio.get_running_loop()
        parse_length(scope)
        if scope["path"] != PATH:
            raise RequestError(
                404,
                f"unknown path; nodes report to {PATH}: install the agent of Steward's version",
            )
        headers = dict(scope["headers"])
        header = headers.get(b"steward-batch", b"")
        head = parse_batch_header(header)
        credential = headers.get(b"steward-credential", b"")
        sender = await loop.run_in_executor(
            self._authentication_threads,
            self._authenticate,
            *(head, credential, connection.certificate_names, connection),
        )
        self._turns.begin((sender.cluster, head.node), connection)
        try:
            connection.identify()
            try:
                async with asyncio.timeout(_PLACE_PATIENCE_S):
                    await self._places.acquire()
            except TimeoutError:
                raise TurnUnavailable("too many nodes report at the moment: retry later") from None
            try:
                body = b"".join([chunk async for chunk in read_chunks(receive)])
                return await loop.run_in_executor(
                    self._batch_threads, self._store_batch, sender, header, body
                )
            finally:
                self._places.release()
        finally:
            # Before the reply: after it the agent may connect again at once.
            self._turns.finish_batch(connection)

    def _authenticate(
        self,
        head: BatchHeader,
        credential: bytes,
        certificate_names: frozenset[str],
        connection: ClientConnection,
    ) -> AuthenticatedSender:
        """Identify the sender of a request."""
        if not connection.is_open:
            # Clients that come and go must not keep threads busy.
            raise RequestError(400, "the client disconnected")
        return self._senders.authenticate(head, credential, certificate_names, connection.address)

    def _store_batch(
        self, sender: AuthenticatedSender, header: bytes, body: bytes
    ) -> tuple[bytes, str]:
        """Make a batch durable; return the reply and its credential.

        Raises:
            PermissionRefused: The credential is for another batch.
            Unavailable: The batch is not durable, for now.
        """
        digest = digest_of(header, body)
        sender.check_digest(digest)
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
        reply = f"durable {digest}\n".encode()
        return reply, sender.sign_reply(digest, reply)

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
