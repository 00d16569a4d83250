"""The times that a report is about: what is asked for, cut at the zone's midnights."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final

from steward.core.errors import UsageError
from steward.reports.shapes import By, Period
from steward.slurm.times import parse_time

_MOST: Final = 1500
"""Periods of one report: four years of days."""


def asked(since: str, until: str, now: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    """Where the time that is asked for begins and ends, UTC; yesterday where none is.

    Args:
        since: What was typed; "" for the midnight before the last one, as sreport(1) has it.
        until: What was typed; "" for last midnight, or for now where the time begins later.
        now: The present moment; what lies ahead is left out.
        zone: Where times are typed.

    Raises:
        UsageError: It has no whole second that is over, or cannot be understood.
    """
    today = now.astimezone(zone).date()
    begin = parse_time(since, now, zone) if since else _midnight(today - timedelta(days=1), zone)
    midnight = _midnight(today, zone)
    end = parse_time(until, now, zone) if until else (midnight if begin < midnight else now)
    # Slurm's times are whole seconds: so no share of one is lost between two periods.
    begin, end = (at.astimezone(UTC).replace(microsecond=0) for at in (begin, min(end, now)))
    if end <= begin:
        raise UsageError(
            "the requested time is shorter than a second, ends before it begins, or is in the "
            "future: change since or until"
        )
    return begin, end


def cut(begin: datetime, end: datetime, by: By, zone: tzinfo) -> tuple[Period, ...]:
    """A time in periods, the first and the last of them as short as the time makes them.

    Args:
        begin: Where it begins.
        end: Where it ends.
        by: What each is of; "" for one period.
        zone: Whose midnights part them.

    Raises:
        UsageError: There would be too many.
    """
    if not by:
        return (Period(since=begin, until=end),)
    found: list[Period] = []
    day = _first(begin.astimezone(zone).date(), by)
    for following in _firsts(day, by):
        since, until = max(begin, _midnight(day, zone)), min(end, _midnight(following, zone))
        if since < until:
            found.append(Period(label=_label(day, by), since=since, until=until))
        if until >= end:
            return tuple(found)
        if len(found) > _MOST:
            break
        day = following
    raise UsageError(f"that would be more than {_MOST} periods: ask for weeks or months", by)


def _midnight(day: date, zone: tzinfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _first(day: date, by: By) -> date:
    """The first day of the month or week that a day is in."""
    if by == "month":
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if by == "week" else day


def _firsts(day: date, by: By) -> Iterator[date]:
    """The first days of all that follow."""
    while True:
        if by == "month":
            day = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
        else:
            day += timedelta(days=7 if by == "week" else 1)
        yield day


def _label(day: date, by: By) -> str:
    if by == "month":
        return f"{day:%Y-%m}"
    if by == "week":
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02}"
    return day.isoformat()
