"""Connections of many nodes at once: a thread for each, of which there are few.

Nodes that come meanwhile wait in the kernel. Where there is no room, whoever is slow to show
which node it is makes some.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from steward.core.listening import host_of, is_within
from steward.core.waiting import Stop

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
_PATIENCE_S: Final = 1.0
"""Where there is no room, whoever has not said in this time who it is makes some."""
_TURN_S: Final = 0.5
_LAST_WORDS_S: Final = 1.0


class Connection:
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


class Connections:
    """Takes connections, as many as there is room for.

    Args:
        listener: Where they come in.
        most: How many there may be at once.
        shared_from: Networks whose addresses many nodes share.
        serve: Talks to one, in a thread of its own, until it ends; raises nothing.
        send_away: Tells one that there is no room.
    """

    def __init__(
        self,
        listener: socket.socket,
        most: int,
        shared_from: tuple[str, ...],
        serve: Callable[[Connection], None],
        send_away: Callable[[socket.socket], None],
    ) -> None:
        self._listener = listener
        self._shared_from = shared_from
        self._serve = serve
        self._send_away = send_away
        self._slots = threading.Semaphore(most)
        self._ended = threading.Condition()
        self._connections: set[Connection] = set()

    def take(self, stop: Stop) -> None:
        """Wait a moment for a connection, and begin to serve it."""
        if stop.wait(_TURN_S, self._listener.fileno()):
            self._accept(stop)

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

    def _all(self) -> list[Connection]:
        with self._ended:
            return list(self._connections)

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
        connection = Connection(plain, str(address[0]) if address else "")
        with self._ended:
            self._connections.add(connection)
        threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _make_room(self) -> None:
        """End those who are slow to show who they are, of the address that has most of them."""
        before = time.monotonic() - _PATIENCE_S
        slow = [one for one in self._all() if not one.is_known and one.since < before]
        # Nodes that share an address would be taken for one that opens many.
        hosts = [
            "" if is_within(one.address, self._shared_from) else host_of(one.address)
            for one in slow
        ]
        by_host = Counter(hosts)
        busiest = max(by_host, key=lambda host: (bool(host), by_host[host]), default="")
        for one, host in zip(slow, hosts, strict=True):
            if host == busiest:
                one.shut()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        finally:
            connection.plain.close()
            self._slots.release()
            with self._ended:
                self._connections.discard(connection)
                self._ended.notify_all()
