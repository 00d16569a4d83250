"""Token buckets: how often each of many may do something."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_MOST: Final = 20_000
"""Buckets that are kept; the one used longest ago goes first."""


class Buckets:
    """A bucket for each, which fills with time and of which each request takes one.

    Args:
        per_s: How fast a bucket fills.
        most: How much it holds: so many requests may come at once.
        now: Tells seconds.
    """

    def __init__(
        self, per_s: float, most: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._most = max(1.0, most)
        self._now = now
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, who: Hashable) -> bool:
        """Take one out of somebody's bucket; False if it is empty."""
        now = self._now()
        level = self._level(who, now)
        is_enough = level >= 1
        self._buckets[who] = (level - 1 if is_enough else level, now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        return is_enough

    def wait_s(self, who: Hashable) -> float:
        """Seconds until there is one in somebody's bucket; 0 if there is."""
        return max(0.0, (1 - self._level(who, self._now())) / self._per_s)

    def _level(self, who: Hashable, now: float) -> float:
        level, at = self._buckets.get(who, (self._most, now))
        return min(self._most, level + (now - at) * self._per_s)
