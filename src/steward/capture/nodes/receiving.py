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
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from steward.agent.agent import PATH, digest_of
from steward.capture.nodes.appending import Appender
from steward.capture.nodes.connections import BACKLOG, Connection, Connections
from steward.capture.nodes.folding import LOST, REBOOT, fold, gap_event
from steward.capture.nodes.front import (
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
from steward.capture.nodes.heard import Hearing, NodeHeard, Refusals
from steward.capture.nodes.requests import Peer, Request, RequestError
from steward.capture.nodes.senders import Head, Sender, Senders, read_head
from steward.capture.nodes.turns import Turns, TurnUnavailable
from steward.core.config import Settings
from steward.core.errors import Refused, StewardError, Unavailable
from steward.core.events import Event, utc_now
from steward.core.journal.store import Row, rows_of
from steward.core.listening import listener_at
from steward.core.redaction import redactor_of
from steward.core.tls import Context, names_of, server_context
from steward.core.usage import NodeGap
from steward.core.waiting import Stop

log = logging.getLogger(__name__)

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
