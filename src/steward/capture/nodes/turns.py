"""Whose turn it is: a node is heard on one connection at a time, and nodes one after another.

What a batch costs is paid by its node alone. However many connections one of them
has, and however fast it sends, every other waits for one batch of it at the most.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from steward.core.errors import Unavailable


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
