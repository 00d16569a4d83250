"""How often one may ask: a bucket for each that fills with time, and a bound on the buckets."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from steward.web.errors import TooMany

_MOST: Final = 20_000
_BURST_S: Final = 10.0
"""So much of a time's requests may come at once."""


class Rate:
    """Lets only so many requests of each pass.

    Args:
        per_minute: How many of one.
        now: Tells seconds.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, self._per_s * _BURST_S)
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> None:
        """Let a request pass.

        Args:
            who: Whom it is from.

        Raises:
            TooMany: It is one too many.
        """
        now = self._now()
        level, at = self._buckets.pop(who, (self._most, now))
        level = min(self._most, level + (now - at) * self._per_s)
        is_enough = level >= 1
        self._buckets[who] = (level - 1 if is_enough else level, now)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        if not is_enough:
            wait_s = (1 - level) / self._per_s
            raise TooMany("that was too much in a short time: wait a few seconds", wait_s)

    def give_back(self, who: str) -> None:
        """Not count a request that was let pass: it counts for somebody else."""
        if who in self._buckets:
            level, at = self._buckets[who]
            self._buckets[who] = (min(self._most, level + 1), at)
