"""Times of the week at which prices are others: how much of a time lies in each.

Times are what a clock on the cluster's wall shows. An hour that a change to
summer time leaves out is paid by nobody, and one that comes twice is paid twice,
for that is how long jobs run.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import pairwise
from typing import Final

from steward.bank.records import Factor

WHOLE: Final = 1000
"""The factor that changes nothing, in thousandths."""

_DAY_MIN: Final = 1440
_SECOND: Final = timedelta(seconds=1)


def permille_at(factors: Sequence[Factor], weekday: int, minute: int) -> int:
    """What holds in a minute of the week: the first factor that names it, or ``WHOLE``."""
    for factor in factors:
        if weekday in factor.days and factor.begin_min <= minute < factor.end_min:
            return factor.permille
    return WHOLE


def dearest(factors: Sequence[Factor]) -> int:
    """The highest that holds in any minute of the week, in thousandths."""
    if not factors:
        return WHOLE
    # Only where one begins or ends can what holds change.
    edges = {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    return max(
        permille_at(factors, weekday, minute)
        for weekday in range(7)
        for minute in edges
        if minute < _DAY_MIN
    )


def split(factors: Sequence[Factor], start: datetime, seconds: int, zone: tzinfo) -> dict[int, int]:
    """How many seconds of a time are under which factor.

    Args:
        factors: The first that names a moment holds in it.
        start: When the time begins, aware.
        seconds: How long it is.
        zone: What the factors' days and minutes are of.

    Returns:
        Seconds by thousandths; together they are ``seconds``.
    """
    if not factors or seconds <= 0:
        return {WHOLE: seconds} if seconds > 0 else {}
    begin = start.astimezone(UTC)
    end = begin + timedelta(seconds=seconds)
    found: dict[int, int] = {}
    edges = sorted({begin, end, *(at for at in _edges(factors, begin, end, zone))})
    done = 0
    for at, until in pairwise(edges):
        clock = at.astimezone(zone)
        permille = permille_at(factors, clock.weekday(), clock.hour * 60 + clock.minute)
        # Cut off from the start on, so that parts of a second are not lost one by one.
        passed = int((until - begin).total_seconds())
        found[permille] = found.get(permille, 0) + passed - done
        done = passed
    return {permille: part for permille, part in found.items() if part}


def _edges(
    factors: Sequence[Factor], begin: datetime, end: datetime, zone: tzinfo
) -> Iterator[datetime]:
    """Every moment between two at which what holds may change, and perhaps others."""
    minutes = sorted(
        {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    )
    day = begin.astimezone(zone).date() - timedelta(days=1)
    last = end.astimezone(zone).date()
    while day <= last:
        for minute in minutes:
            for at in _moments(day, minute, zone):
                if begin < at < end:
                    yield at
        change = _change(day, zone)
        if change is not None and begin < change < end:
            yield change
        day += timedelta(days=1)


def _moments(day: date, minute: int, zone: tzinfo) -> Iterator[datetime]:
    """The moments at which the clock shows this minute of this day: none, one, or two."""
    days, of_day = divmod(minute, _DAY_MIN)
    clock = time(of_day // 60, of_day % 60)
    for fold in (0, 1):
        shown = datetime.combine(day + timedelta(days=days), clock, zone).replace(fold=fold)
        yield shown.astimezone(UTC)


def _change(day: date, zone: tzinfo) -> datetime | None:
    """When the clock is changed in a day; None if it is not."""
    low = datetime.combine(day, time(0), zone).astimezone(UTC)
    high = low + timedelta(days=1)
    before = low.astimezone(zone).utcoffset()
    if high.astimezone(zone).utcoffset() == before:
        return None
    while high - low > _SECOND:
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)
