"""The process that takes in what ``steward agent`` sends from compute nodes.

A thread for each connection, of which there are few: nodes that come meanwhile
wait in the kernel. Until it is known which node speaks, only a head of a few
kilobytes is taken. A batch is answered when its events are durable here, so
that the node may let go of its lines.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from steward.agent.agent import PATH, digest_of
from steward.capture.forwarded.tls import Context, names_of, server_context
from steward.capture.nodes.appending import Appender
from steward.capture.nodes.folding import LOST, REBOOT, fold, gap_event
from steward.capture.nodes.heard import Hearing, NodeHeard
from steward.capture.nodes.requests import Peer, Request, RequestError
from steward.capture.nodes.senders import Head, Sender, Senders, read_head
from steward.capture.nodes.turns import Turns, TurnUnavailable
from steward.config import Settings
from steward.errors import Refused, StewardError, Unavailable
from steward.events import Event, utc_now
from steward.journal.store import Row, rows_of
from steward.listening import listener_at
from steward.usage import NodeGap
from steward.waiting import Stop

log = logging.getLogger(__name__)

_BACKLOG: Final = 4096
_FIRST_S: Final = 10.0
"""Within this time a connection has said which node it is."""
_NEXT_S: Final = 5.0
"""A connection that says nothing more for so long is ended."""
_BODY_S: Final = 30.0
_SEND_S: Final = 10.0
_LINGER_S: Final = 2.0
_BRIEFLY_S: Final = 0.1
_TURN_S: Final = 0.5
_PATIENCE_S: Final = 1.0
"""Where there is no room, whoever has not said in this time who it is makes some."""
_WRITE_S: Final = 1.0
_RETRY_S: Final = 15
"""What Retry-After says where nothing can be taken."""
_CROWDED_S: Final = 5
_MOST_SAID: Final = 256
_LAST_WORDS_S: Final = 1.0


class _Connection:
    """One node, or somebody who has not shown yet that it is one."""

    def __init__(self, plain: socket.socket, address: str) -> None:
        self.plain = plain
        self.address = address
        self.since = time.monotonic()
        self.is_known = False

    def shut(self) -> None:
        """End it; its thread notices."""
        try:
            # Not by an SSLSocket's own method, which another thread may be in the middle of.
            socket.socket.shutdown(self.plain, socket.SHUT_RDWR)
        except OSError:
            return  # it has ended by itself


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
        self._hearing = Hearing(settings.state_dir)
        self._appender = Appender(append)
        self._context: Context | None = server_context(nodes) if nodes.certificate_file else None
        self._slots = threading.Semaphore(nodes.most_connections)
        self._lock = threading.Lock()
        self._turns = Turns()
        self._ended = threading.Condition(self._lock)
        self._connections: set[_Connection] = set()
        self._said: dict[str, str] = {}
        self._listener = listener_at(nodes.listen, _BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until the Stop is raised."""
        log.info(
            "listening for nodes at %s port %d, %s",
            *self.address,
            "with TLS" if self._context else "without TLS: what they send can be read on its way",
        )
        written = time.monotonic()
        while not stop.is_set():
            beat()
            if stop.wait(_TURN_S, self._listener.fileno()):
                self._accept(stop)
            if time.monotonic() - written >= _WRITE_S:
                written = time.monotonic()
                self._write()
        self.close()

    def close(self) -> None:
        """Let go of all; what is under way is finished first, if it does not take long."""
        self._listener.close()
        for connection in self._all():
            if not connection.is_known:
                connection.shut()
        with self._ended:
            self._ended.wait_for(lambda: not self._connections, _LAST_WORDS_S)
        for connection in self._all():
            connection.shut()
        self._appender.close()
        self._write()
        self._hearing.close()

    def _all(self) -> list[_Connection]:
        with self._lock:
            return list(self._connections)

    def _write(self) -> None:
        try:
            self._hearing.write()
        except StewardError as error:
            self._say("nodes.db", str(error))
        else:
            self._say("nodes.db", "")

    def _accept(self, stop: Stop) -> None:
        has_slot = self._slots.acquire(timeout=_PATIENCE_S)
        if not has_slot and not stop.is_set():
            self._make_room()
            has_slot = self._slots.acquire(timeout=_TURN_S)
        try:
            plain, address = self._listener.accept()
        except OSError as error:
            # It went before we came, or no descriptor is left: then the next turn may have one.
            log.debug("a connection could not be taken: %s", error)
            if has_slot:
                self._slots.release()
            return
        if not has_slot:
            self._send_away(plain)
            return
        connection = _Connection(plain, str(address[0]))
        with self._lock:
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _make_room(self) -> None:
        """End those who are slow to show who they are, of the address that has most of them."""
        before = time.monotonic() - _PATIENCE_S
        slow = [one for one in self._all() if not one.is_known and one.since < before]
        if slow:
            ((address, _),) = Counter(one.address for one in slow).most_common(1)
            for one in slow:
                if one.address == address:
                    one.shut()

    def _send_away(self, plain: socket.socket) -> None:
        with plain:
            if self._context is not None:
                return  # a handshake would take longer than there is time
            try:
                what = b"too many nodes are heard just now\n"
                Peer(plain).answer(503, what, _after(_CROWDED_S), 0.1)
            except StewardError as error:
                log.debug("%s", error)

    def _serve(self, connection: _Connection) -> None:
        secured = connection.plain
        try:
            connection.plain.settimeout(_FIRST_S)
            connection.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                secured = self._context.wrap_socket(
                    connection.plain, server_side=True, do_handshake_on_connect=False
                )
                connection.plain = secured
                secured.do_handshake()
            self._talk(connection, Peer(secured), names_of(secured))
        except (StewardError, OSError) as error:
            self._say(connection.address, str(error))
        except Exception:
            # A fault of ours must end this connection alone.
            log.exception("the connection from %s failed", connection.address)
        finally:
            self._turns.leave(connection)
            secured.close()
            self._slots.release()
            with self._ended:
                self._connections.discard(connection)
                self._ended.notify_all()

    def _talk(self, connection: _Connection, peer: Peer, names: frozenset[str]) -> None:
        """Take batch after batch."""
        while True:
            try:
                request = peer.request(_NEXT_S if connection.is_known else _FIRST_S, _FIRST_S)
                if request is None:
                    return
                text, sender = self._known(request, names, connection.address)
                self._turns.begin((sender.cluster, sender.head.node), connection)
                connection.is_known = True
                body = peer.body(request.length, _BODY_S)
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
            peer.answer(200, answer, {"Steward-Credential": credential}, _SEND_S)
            self._say(connection.address, "")
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
        connection: _Connection,
        peer: Peer,
        status: int,
        what: str,
        linger_s: float = _LINGER_S,
    ) -> None:
        self._turns.leave(connection)
        connection.is_known = False
        headers = {"Connection": "close", **(_after(_RETRY_S) if status == 503 else {})}
        peer.answer(status, what.encode("utf-8", "replace")[:500] + b"\n", headers, _SEND_S)
        peer.linger(linger_s)

    def _take(self, sender: Sender, body: bytes) -> None:
        """Make a batch durable.

        Raises:
            AppendUnavailable: It is not, for now.
        """
        head, cluster, now = sender.head, sender.cluster, utc_now()
        with self._turns.turn():  # one at a time: a megabyte of lines is many in memory
            folded = fold(cluster, head.node, body, now)
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
