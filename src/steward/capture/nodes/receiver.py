"""Many batches at once into the journal: what waits is appended together, as one commit.

Each batch is answered only when it is durable. Thousands of nodes report within
a minute, and a commit for each would have the disk flush as often.
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
from steward.capture.nodes.aggregation import LOST, REBOOT, fold, gap_event
from steward.capture.nodes.http import BACKLOG, Connection, Connections, Peer, Request, RequestError
from steward.capture.nodes.last_seen import Hearing, NodeHeard, Refusals
from steward.capture.nodes.listener import (
    BODY_S,
    FIRST_S,
    LINGER_S,
    NEXT_S,
    SEND_S,
    Front,
    FrontedPeer,
    secured,
    send_away,
)
from steward.capture.nodes.senders import Head, Sender, Senders, read_head
from steward.core.config import Settings
from steward.core.errors import Refused, StewardError, Unavailable
from steward.core.events import Event, utc_now
from steward.core.journal.client import FRAME_BYTES
from steward.core.journal.store import Row, rows_of
from steward.core.listeners import listener_at
from steward.core.redaction import redactor_of
from steward.core.tls import Context, names_of, server_context
from steward.core.usage import NodeGap
from steward.core.waits import Stop

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 40.0
"""Longer than the journal's link waits for an answer."""
_LAST_WORDS_S: Final = 2.0
_MOST_WAITING: Final = 4096


class AppendUnavailable(Unavailable):
    """The journal does not take anything now."""


class _Waiting:
    """One batch that somebody waits for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.size = sum(len(row[3]) for row in rows)
        self.done = threading.Event()
        self.error: StewardError | None = None


class Appender:
    """Appends for many threads by one.

    Args:
        append: Appends rows durably, once; raises StewardError where it cannot.
    """

    def __init__(self, append: Callable[[Sequence[Row]], object]) -> None:
        self._append = append
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows; returns when they are durable.

        Raises:
            AppendUnavailable: They are not, as far as is known.
        """
        if not rows:
            return
        waiting = _Waiting(rows)
        try:
            self._queue.put_nowait(waiting)
        except queue.Full:
            raise AppendUnavailable("too many batches wait for the journal") from None
        if not waiting.done.wait(_PATIENCE_S):
            raise AppendUnavailable("the journal takes too long")
        if waiting.error is not None:
            raise AppendUnavailable(str(waiting.error)) from waiting.error

    def close(self) -> None:
        """Append what waits, and end."""
        self._queue.put(None)
        self._thread.join(_LAST_WORDS_S)

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            if first is None:
                return
            batch, size = [first], first.size
            while size < FRAME_BYTES:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._queue.put(None)
                    break
                batch.append(more)
                size += more.size
            self._try(batch)

    def _try(self, batch: Sequence[_Waiting]) -> None:
        error: StewardError | None = None
        try:
            self._append([row for one in batch for row in one.rows])
        except StewardError as caught:
            error = caught
        except Exception as caught:
            # A fault of ours must not end the thread: the batch comes again meanwhile.
            log.exception("what nodes sent could not be appended")
            error = AppendUnavailable(f"unexpected: {type(caught).__name__}: {caught}")
        for one in batch:
            one.error = error
            one.done.set()


class TurnUnavailable(Unavailable):
    """It is not this one's turn, and will not be soon."""


class Holder(Protocol):
    """A connection."""

    def shut(self) -> None:
        """End it."""


class Turns:
    """The turns of all nodes; safe for many threads.

    Args:
        patience_s: Longest wait for a turn, in seconds. Less than an agent's wait for a reply.
    """

    def __init__(self, *, patience_s: float = 25.0) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, str], Holder] = {}
        self._busy: set[Holder] = set()
        self._queue: deque[threading.Event] = deque()

    def begin(self, node: tuple[str, str], holder: Holder) -> None:
        """Have a connection be the one of a node, until ``leave`` or another node's.

        One that says nothing just now is ended for it: its agent may be long gone.

        Args:
            node: Cluster and NodeName.
            holder: The connection.

        Raises:
            TurnUnavailable: A batch of this node is under way on another connection.
        """
        with self._lock:
            before = self._holders.get(node)
            if before is not None and before is not holder:
                if before in self._busy:
                    raise TurnUnavailable(f"a batch of node {node[1]} is under way already")
                before.shut()
            self._forget(holder)
            self._holders[node] = holder
            self._busy.add(holder)

    def rest(self, holder: Holder) -> None:
        """Note that a connection's batch is done."""
        with self._lock:
            self._busy.discard(holder)

    def leave(self, holder: Holder) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._forget(holder)

    def _forget(self, holder: Holder) -> None:
        self._busy.discard(holder)
        for node in [node for node, one in self._holders.items() if one is holder]:
            del self._holders[node]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only one, in the order of asking.

        Raises:
            TurnUnavailable: Those before take too long.
        """
        mine = threading.Event()
        with self._lock:
            self._queue.append(mine)
            self._call()
        has_come = mine.wait(self._patience_s)
        try:
            if not has_come:
                raise TurnUnavailable("too many nodes report just now")
            yield
        finally:
            with self._lock:
                self._queue.remove(mine)
                self._call()

    def _call(self) -> None:
        if self._queue:
            self._queue[0].set()


_BRIEFLY_S: Final = 0.1
_WRITE_S: Final = 1.0
_RETRY_S: Final = 15
"""What Retry-After says where nothing can be taken."""
_MOST_SAID: Final = 256


class NodeReceiver:
    """Listens for agents.

    Args:
        settings: The configuration.
        append: Appends rows to the journal durably, once.

    Raises:
        ListenUnavailable: The address cannot be listened at.
        TlsUnavailable: A certificate cannot be used.
        SqliteUnavailable: nodes.db cannot be opened now.
    """

    def __init__(self, settings: Settings, append: Callable[[Sequence[Row]], object]) -> None:
        nodes = settings.nodes
        self._senders = Senders(settings)
        self._redact_name = redactor_of(settings).name
        self._hearing = Hearing(settings.state_dir)
        self._appender = Appender(append)
        self._front = Front(settings) if nodes.listener else None
        is_secured = bool(nodes.certificate_file) and self._front is None
        self._context: Context | None = None
        if is_secured:
            self._context = server_context(
                nodes.certificate_file, nodes.key_file, nodes.client_ca_file
            )
        self._lock = threading.Lock()
        self._turns = Turns()
        self._said: dict[str, str] = {}
        self._refusals = Refusals(settings.state_dir)
        listener = self._front.listener if self._front else listener_at(nodes.listen, BACKLOG)
        # Of the one that the listener has, only the listener knows.
        self.address = ("", 0) if self._front else listener.getsockname()[:2]
        self._connections = Connections(
            listener, nodes.most_connections, nodes.shared_from, self._serve, self._send_away
        )

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until the Stop is raised."""
        if self._front is None:
            log.info(
                "listening for nodes at %s port %d, %s",
                *self.address,
                "with TLS" if self._context else "without TLS: what they send can be read",
            )
        written = time.monotonic()
        while not stop.is_set():
            beat()
            self._connections.take(stop)
            if time.monotonic() - written >= _WRITE_S:
                written = time.monotonic()
                self._write()
        self.close()

    def close(self) -> None:
        """Let go of all; what is under way is finished first, if it does not take long."""
        self._connections.close()
        self._appender.close()
        self._write()
        self._hearing.close()

    def _write(self) -> None:
        try:
            self._hearing.write()
            self._refusals.write()
        except StewardError as error:
            self._say("nodes.db", str(error))
        else:
            self._say("nodes.db", "")

    def _send_away(self, plain: socket.socket) -> None:
        if self._front is not None:
            self._front.send_away(plain)
        else:
            send_away(plain, is_secured=self._context is not None)

    def _serve(self, connection: Connection) -> None:
        try:
            if self._front is None:
                peer = secured(connection, self._context)
                self._talk(connection, Peer(peer), names_of(peer))
            else:
                fronted = self._front.welcome(connection)
                if fronted is not None:
                    self._talk(connection, fronted, frozenset())
        except (StewardError, OSError) as error:
            self._say(connection.address or "the listener", str(error))
        except Exception:
            # A fault of ours must end this connection alone.
            log.exception("the connection from %s failed", connection.address)
        finally:
            self._turns.leave(connection)

    def _talk(
        self, connection: Connection, peer: Peer | FrontedPeer, names: frozenset[str]
    ) -> None:
        """Take batch after batch."""
        while True:
            try:
                request = peer.request(NEXT_S if connection.is_known else FIRST_S, FIRST_S)
                if request is None:
                    return
                text, sender = self._known(request, names, connection.address)
                self._turns.begin((sender.cluster, sender.head.node), connection)
                connection.is_known = True
                body = peer.body(request.length, BODY_S)
                digest = digest_of(text, body)
                sender.check(digest)
                self._take(sender, body)
                answer = f"durable {digest}\n".encode()
                credential = sender.signed(digest, answer)
                # Before the answer: whoever has it may come again at once.
                self._turns.rest(connection)
            except (RequestError, Refused) as error:
                # Not signed: it moves nothing, so whoever made it up would only cost time.
                status = error.status if isinstance(error, RequestError) else 403
                self._say(connection.address, str(error))
                if isinstance(error, Refused):
                    self._refusals.add(connection.address, str(error))
                self._refuse(connection, peer, status, str(error))
                return
            except TurnUnavailable as error:
                # Soon, and without a word in the log: it may be one of very many.
                self._refuse(connection, peer, 503, str(error), _BRIEFLY_S)
                return
            except Unavailable as error:
                self._say(connection.address, str(error))
                self._refuse(connection, peer, 503, str(error))
                return
            peer.answer(200, answer, {"Steward-Credential": credential}, SEND_S)
            self._say(connection.address, "")
            self._refusals.drop(connection.address)
            del body
            if request.closes:
                return

    def _known(self, request: Request, names: frozenset[str], address: str) -> tuple[bytes, Sender]:
        """Which node sends this."""
        if request.path != PATH:
            raise RequestError(404, f"nodes report to {PATH}: is the agent of Steward's version?")
        text = request.headers.get(b"steward-batch", b"")
        head = read_head(text)
        credential = request.headers.get(b"steward-credential", b"")
        return text, self._senders.sender(head, credential, names, address)

    def _refuse(
        self,
        connection: Connection,
        peer: Peer | FrontedPeer,
        status: int,
        what: str,
        linger_s: float = LINGER_S,
    ) -> None:
        self._turns.leave(connection)
        connection.is_known = False
        headers = {"Connection": "close", **(_after(_RETRY_S) if status == 503 else {})}
        peer.answer(status, what.encode("utf-8", "replace")[:500] + b"\n", headers, SEND_S)
        peer.linger(linger_s)

    def _take(self, sender: Sender, body: bytes) -> None:
        """Make a batch durable.

        Raises:
            AppendUnavailable: It is not, for now.
        """
        head, cluster, now = sender.head, sender.cluster, utc_now()
        with self._turns.turn():  # one at a time: a megabyte of lines is many in memory
            folded = fold(cluster, head.node, body, now, self._redact_name)
            last = self._hearing.last(cluster, head.node)
            rows = rows_of([*folded.events, *_gaps_of(cluster, head, last, now)])
            lost = folded.lost + head.dropped
            del folded
        self._appender.append(rows)
        self._hearing.hear(
            NodeHeard(
                cluster=cluster,
                node=head.node,
                heard_at=now,
                sequence=head.sequence,
                boot_id=head.boot,
                place=head.place,
                lost=lost,
            )
        )

    def _say(self, who: str, what: str) -> None:
        """Log what is wrong with somebody, once as long as it is the same."""
        with self._lock:
            if what == self._said.get(who, ""):
                return
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said[who] = what
        if what:
            log.warning("%s: %s", who, what)


def _gaps_of(cluster: str, head: Head, last: NodeHeard | None, now: datetime) -> list[Event]:
    """What a batch's head says is missing."""
    gaps = []
    if last is not None and last.place != head.place:
        # The agent's own file is gone, and the lines beside it, sent or not.
        why = REBOOT if last.boot_id != head.boot else LOST
        gap = NodeGap(node=head.node, why=why, since=last.heard_at)
        gaps.append(gap_event(cluster, gap, f"place.{head.place}", now))
    if head.dropped:
        gap = NodeGap(node=head.node, why=LOST, lines=head.dropped)
        gaps.append(gap_event(cluster, gap, f"{head.place}.{head.dropped_ever}", now))
    return gaps


def _after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}
