"""Rate limits: one token bucket for each user or address, or one in all."""

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
        capacity: Capacity of a bucket: the largest burst of requests.
        now: Clock, in seconds.
    """

    def __init__(
        self, per_s: float, capacity: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._capacity = max(1.0, capacity)
        self._now = now
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable = None, *, reserve: float = 0.0) -> bool:
        """Take a token from a key's bucket if more than ``reserve`` remain; return whether."""
        now = self._now()
        level = self._get_level(key, now)
        is_enough = level >= 1 + reserve
        self._buckets[key] = (level - 1 if is_enough else level, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return is_enough

    def get_wait_s(self, key: Hashable) -> float:
        """Return the seconds until a key's bucket has a token; 0 if it has one now."""
        return max(0.0, (1 - self._get_level(key, self._now())) / self._per_s)

    def _get_level(self, key: Hashable, now: float) -> float:
        level, updated_at = self._buckets.get(key, (self._capacity, now))
        return min(self._capacity, level + (now - updated_at) * self._per_s)
