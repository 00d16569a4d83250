"""Rate limits: one token bucket for each user or address."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_MAX_BUCKETS: Final = 20_000
"""Most buckets in memory; the least recently used is dropped first."""


class TokenBuckets:
    """Token buckets by key: each fills with time, and each request takes one token.

    Args:
        per_s: Tokens added to a bucket per second.
        most: Capacity of a bucket: the largest burst of requests.
        now: Clock, in seconds.
    """

    def __init__(
        self, per_s: float, most: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._most = max(1.0, most)
        self._now = now
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, who: Hashable) -> bool:
        """Take a token from a key's bucket; return False if it is empty."""
        now = self._now()
        level = self._level(who, now)
        is_enough = level >= 1
        self._buckets[who] = (level - 1 if is_enough else level, now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return is_enough

    def wait_s(self, who: Hashable) -> float:
        """Return the seconds until a key's bucket has a token; 0 if it has one now."""
        return max(0.0, (1 - self._level(who, self._now())) / self._per_s)

    def _level(self, who: Hashable, now: float) -> float:
        level, at = self._buckets.get(who, (self._most, now))
        return min(self._most, level + (now - at) * self._per_s)
