"""Holds of jobs that no look at the queue has shown yet: reasons to look soon.

The bank holds money for whatever slurmctld asks, also for jobs that never come to be
(``sbatch --test-only``). Only a look at the whole queue tells those apart.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from steward.core.events import (
    HOLD_CONFIRMED,
    HOLD_PLACED,
    HOLD_RELEASED,
    HOLD_SETTLED,
    Event,
    utc_now,
)

KINDS: Final = frozenset({HOLD_PLACED, HOLD_CONFIRMED, HOLD_SETTLED, HOLD_RELEASED})

_SHOWN_S: Final = 6.0
"""A look that begins so long after a hold was placed tells of its job; for less the gate waits."""
_OLD_S: Final = 60.0


class Unshown:
    """When the queue is to be looked at for them.

    Args:
        cluster: Whose queue.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._due: dict[str, float] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Note what was placed, and what is known or gone by now."""
        now = utc_now()
        for event in events:
            if event.cluster != self._cluster or event.kind not in KINDS:
                continue
            if event.kind != HOLD_PLACED:
                self._due.pop(event.body.hold, None)
                continue
            age_s = (now - event.at).total_seconds()
            # What is old was looked for long ago: events come again after a start.
            if not event.body.job_id and 0 <= age_s < _OLD_S:
                self._due[event.body.hold] = self._clock() + max(0.0, _SHOWN_S - age_s)

    def looked(self, began: float) -> None:
        """The queue was seen whole: what was placed long enough before needs no further look.

        Args:
            began: When it began to be looked at, by the clock that never goes back.
        """
        self._due = {hold: due for hold, due in self._due.items() if due > began}

    def due(self) -> float:
        """When the next look is wanted; beyond all times where none is."""
        return min(self._due.values(), default=float("inf"))
