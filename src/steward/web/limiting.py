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
        level = self._level(who, now)
        is_enough = level >= 1
        self._buckets[who] = (level - 1 if is_enough else level, now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        if not is_enough:
            raise self._too_many(level)

    def look(self, who: str) -> None:
        """Whether a request would pass now, without counting it; raises as :meth:`take`."""
        level = self._level(who, self._now())
        if level < 1:
            raise self._too_many(level)

    def _level(self, who: str, now: float) -> float:
        """How much a bucket holds by now."""
        level, at = self._buckets.get(who, (self._most, now))
        return min(self._most, level + (now - at) * self._per_s)

    def _too_many(self, level: float) -> TooMany:
        wait_s = (1 - level) / self._per_s
        return TooMany("that was too much in a short time: wait a few seconds", wait_s)
