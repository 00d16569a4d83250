"""Users' names from their uids, without ever waiting long for a directory service.

The gate must not stand still because LDAP does: a thread asks, and a decision
waits for it only a moment. A name that comes later is there for the next job.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from steward.slurm.users import People

_KNOWN_S: Final = 600.0
_UNKNOWN_S: Final = 5.0
"""A directory service that is away for a moment is no reason to refuse somebody for long."""
_MOST: Final = 100_000


class Names:
    """User names by uid, resolved by a thread beside the deciding thread.

    Args:
        wait_s: Longest time that a decision waits for a name, in seconds.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, *, wait_s: float = 0.02, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._known: dict[int, tuple[str, float]] = {}
        self._wanted: queue.SimpleQueue[tuple[int, threading.Event]] = queue.SimpleQueue()
        self._asked: dict[int, threading.Event] = {}
        self._thread: threading.Thread | None = None

    def user(self, uid: int) -> str:
        """The user's name; "" where it does not resolve, or not soon enough."""
        known = self._known.get(uid)
        if known is not None and self._clock() < known[1]:
            return known[0]
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="names", daemon=True)
            self._thread.start()
        event = self._asked.get(uid)
        if event is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            event = self._asked[uid] = threading.Event()
            self._wanted.put((uid, event))
            event.wait(self._wait_s)
        found = self._known.get(uid)
        return found[0] if found is not None else ""

    def _ask(self) -> None:
        people = People()
        while True:
            uid, event = self._wanted.get()
            name = people.user(uid)
            people.forget()
            lasts_s = _KNOWN_S if name else _UNKNOWN_S
            known = self._known.get(uid)
            if not name and known is not None:
                name = known[0]  # nobody loses a name for as long as Steward runs
            self._known[uid] = (name, self._clock() + lasts_s)
            self._asked.pop(uid, None)
            event.set()
