"""How often one may ask."""

import time
from collections.abc import Callable
from typing import Final

from steward.core.ratelimit import Buckets
from steward.web.errors import TooMany

_BURST_S: Final = 10.0
"""So much of a time's requests may come at once."""


class Rate:
    """Lets only so many requests of each pass.

    Args:
        per_minute: How many of one.
        now: Tells seconds.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(per_minute / 60, per_minute / 60 * _BURST_S, now)

    def take(self, who: str) -> None:
        """Let a request pass.

        Args:
            who: Whom it is from.

        Raises:
            TooMany: It is one too many.
        """
        if not self._buckets.take(who):
            raise self._too_many(who)

    def look(self, who: str) -> None:
        """Whether a request would pass now, without counting it; raises as :meth:`take`."""
        if self._buckets.wait_s(who) > 0:
            raise self._too_many(who)

    def _too_many(self, who: str) -> TooMany:
        what = "that was too much in a short time: wait a few seconds"
        return TooMany(what, self._buckets.wait_s(who))
