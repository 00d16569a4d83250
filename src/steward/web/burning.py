"""How long an account's money lasts: its course so far, and what follows from it."""

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from typing import Final

import msgspec

from steward.bank.ledger import Allocation, CourseDay
from steward.bank.money import MICRO
from steward.web.filters import zone_of
from steward.web.rendering import Plot

DAYS: Final = 28
"""So many days' mean is taken for what comes."""
_FARTHEST: Final = timedelta(days=3650)


class BurnDown(msgspec.Struct, frozen=True, kw_only=True):
    """How long an account's money lasts.

    Attributes:
        plot: What was there day by day, and what will be if it goes on so.
        per_day: What was spent a day of late, micro-SU.
        until: The end of the allocation that is looked at; None where there is none.
        left: What will be left then, micro-SU; negative for what will be missing.
        used_up: When it will be used up; None where that is after the end, or never.
    """

    plot: Plot
    per_day: int
    until: datetime | None
    left: int
    used_up: datetime | None


def burn_down(
    days: Sequence[CourseDay],
    allocations: Sequence[Allocation],
    now: datetime,
    zone: str,
    unit: str,
) -> BurnDown | None:
    """What a course leads to; None where there is none.

    Args:
        days: The course, to this day.
        allocations: What can be drawn on, in that order.
        now: The present moment.
        zone: IANA name of the zone of its days.
        unit: Name of the bank's unit.
    """
    if not days:
        return None
    whole = [one.spent for one in days[-DAYS - 1 : -1]]
    per_day = round(sum(whole) / len(whole)) if whole else days[-1].spent
    ends = [one.end for one in allocations if one.end is not None and one.active(now)]
    until = min(ends, default=None)
    balance = days[-1].balance
    used_up = _used_up(balance, per_day, now)
    left = balance if until is None else round(balance - per_day * _days(until - now))
    if until is not None and used_up is not None and used_up > until:
        used_up = None
    return BurnDown(
        plot=_plot(days, balance, per_day, now, until or used_up, zone, unit),
        per_day=per_day,
        until=until,
        left=left,
        used_up=used_up,
    )


def _used_up(balance: int, per_day: int, now: datetime) -> datetime | None:
    if per_day <= 0 or balance <= 0:
        return None
    after = timedelta(days=balance / per_day) if balance / per_day < _FARTHEST.days else _FARTHEST
    return now + after if after < _FARTHEST else None


def _plot(
    days: Sequence[CourseDay],
    balance: int,
    per_day: int,
    now: datetime,
    until: datetime | None,
    zone: str,
    unit: str,
) -> Plot:
    x = [_end_of(one.day, zone) for one in days[:-1]] + [now.timestamp()]
    so_far: list[float | None] = [one.balance / MICRO for one in days]
    to_come: list[float | None] = [None] * (len(days) - 1) + [balance / MICRO]
    if until is not None and until > now:
        x.append(until.timestamp())
        so_far.append(None)
        to_come.append((balance - per_day * _days(until - now)) / MICRO)
    return Plot(
        title="What was left at the end of each day",
        x=x,
        series=[("left", so_far), ("if it goes on so", to_come)],
        unit=unit,
        zone=zone,
    )


def _end_of(day: str, zone: str) -> float:
    morrow = date.fromisoformat(day) + timedelta(days=1)
    return datetime.combine(morrow, time(), zone_of(zone)).timestamp()


def _days(span: timedelta) -> float:
    return span / timedelta(days=1)
