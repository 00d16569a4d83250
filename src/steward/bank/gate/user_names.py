"""User names by uid, resolved in a thread so that the gate never waits for the name service."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from steward.slurm.users import NameResolver

_KEEP_NAME_S: Final = 600.0
"""Time for which a resolved name is kept, in seconds."""
_RETRY_NAME_S: Final = 5.0
"""Time for which an unresolved name is kept, in seconds. Short: a directory service that is briefly
unavailable must not cause long rejections."""
_MOST_CACHED_NAMES: Final = 100_000
"""Maximum number of cached names."""


class UserNameCache:
    """User names by uid, resolved in a thread beside the deciding one.

    A slow directory service (LDAP) must not stop the gate: a decision waits for the thread only
    briefly, and a name that arrives later serves the next job.

    Args:
        wait_s: Longest time that a decision waits for a name, in seconds.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, *, wait_s: float = 0.02, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._names: dict[int, tuple[str, float]] = {}
        self._queue: queue.SimpleQueue[tuple[int, threading.Event]] = queue.SimpleQueue()
        self._pending: dict[int, threading.Event] = {}
        self._thread: threading.Thread | None = None

    def find_user(self, uid: int) -> str:
        """Return a user's name; "" if it does not resolve, or not soon enough."""
        cached = self._names.get(uid)
        if cached is not None and self._clock() < cached[1]:
            return cached[0]
        if self._thread is None:
            self._thread = threading.Thread(target=self._resolve_names, name="names", daemon=True)
            self._thread.start()
        event = self._pending.get(uid)
        if event is None:
            if len(self._names) >= _MOST_CACHED_NAMES:
                self._names.clear()
            event = self._pending[uid] = threading.Event()
            self._queue.put((uid, event))
            event.wait(self._wait_s)
        resolved = self._names.get(uid)
        return resolved[0] if resolved is not None else ""

    def _resolve_names(self) -> None:
        """Resolve requested uids, in the thread."""
        resolver = NameResolver()
        while True:
            uid, event = self._queue.get()
            name = resolver.user(uid)
            resolver.clear()
            lasts_s = _KEEP_NAME_S if name else _RETRY_NAME_S
            cached = self._names.get(uid)
            if not name and cached is not None:
                name = cached[0]  # a known name is kept as long as Steward runs
            self._names[uid] = (name, self._clock() + lasts_s)
            self._pending.pop(uid, None)
            event.set()
