"""Amounts spread over time: so much from here to there, summed up by the hour."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

HOUR_S = 3600


def hours(bounds_s: Iterable[int], since_s: int) -> list[int]:
    """The bounds with every full hour since some time, in order.

    Args:
        bounds_s: Seconds since the epoch.
        since_s: Where the full hours begin.
    """
    bounds = sorted(set(bounds_s))
    first = -(-max(since_s, bounds[0]) // HOUR_S) * HOUR_S
    return sorted({*bounds, *range(first, bounds[-1], HOUR_S)})


class Hours:
    """Sums of amounts times seconds, one for each bucket of time.

    To add takes as long for a month as for a minute.

    Args:
        bounds_s: Where each bucket begins, and where the last ends; seconds since the epoch.
    """

    def __init__(self, bounds_s: Sequence[int]) -> None:
        self._bounds = bounds_s
        self._begin_s, self._end_s = bounds_s[0], bounds_s[-1]
        self._full = [0] * len(bounds_s)
        self._part = [0] * (len(bounds_s) - 1)

    def add(self, begin_s: int, end_s: int, amount: int) -> None:
        """Add an amount from one time to another, as far as there are buckets."""
        bounds = self._bounds
        # Thousands are added: to compare takes a fraction of the time that min and max do.
        if begin_s < self._begin_s:
            begin_s = self._begin_s
        if end_s > self._end_s:
            end_s = self._end_s
        if not amount or begin_s >= end_s:
            return
        first = bisect_right(bounds, begin_s)
        following_s = bounds[first]
        part = self._part
        if end_s <= following_s:
            part[first - 1] += amount * (end_s - begin_s)
            return
        last = bisect_left(bounds, end_s, first) - 1
        part[first - 1] += amount * (following_s - begin_s)
        part[last] += amount * (end_s - bounds[last])
        self._full[first] += amount
        self._full[last] -= amount

    def sums(self) -> list[int]:
        """The sum of each bucket."""
        whole = accumulate(self._full)
        return [
            part + amount * (until - begin)
            for part, amount, (begin, until) in zip(
                self._part, whole, pairwise(self._bounds), strict=False
            )
        ]
