"""Times as people type them for Slurm's commands (-S and -E of sacct).

A person who knows sacct should not have to learn another way to say yesterday.
What is accepted is what sacct(1) lists under "Valid time formats", and what
its parser takes beside that (blanks in ``now - 1 day``, ``tomorrow``, ``uts``
with seconds since the epoch), plus ISO 8601 with a zone, as our own answers
print times. As with sacct, a time that lacks its date is one of today, and a
date that lacks its year is not in a later month than this one.
"""

import os
import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from steward.core.errors import UsageError


class TimeError(UsageError):
    """A time that cannot be understood."""


_FIXED: Final = {
    "midnight": time(0),
    "noon": time(12),
    "fika": time(15),
    "teatime": time(16),
}
_UNIT_S: Final = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}

_NOW = re.compile(
    r"now\s*(?:([+-])\s*(\d{1,9})\s*(second|minute|hour|day|week)?s?)?", re.IGNORECASE
)
_EPOCH = re.compile(r"uts(\d{1,11})", re.IGNORECASE)
_DATE = (
    r"(?:(?P<year>\d{4})-(?P<ym>\d{2})-(?P<yd>\d{2})"
    r"|(?P<m>\d{2})(?P<d>\d{2})(?P<y>\d{2})?"
    r"|(?P<sm>\d{1,2})[/.](?P<sd>\d{1,2})(?:[/.](?P<sy>\d{2}))?)"
)
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?(?:\s*(?P<half>[AaPp])[Mm])?"
_WHEN = re.compile(rf"(?:{_DATE})?(?:(?:(?<=\d)(?:[Tt-]|\s+)|^){_CLOCK})?")


@lru_cache(maxsize=64)
def zone_called(name: str) -> tzinfo:
    """The zone of an IANA name; for "" this host's own, by TZ or else by /etc/localtime.

    Raises:
        TimeError: There is no such zone.
    """
    wanted = name or os.environ.get("TZ", "").lstrip(":")
    if wanted:
        try:
            return ZoneInfo(wanted)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            if name:
                raise TimeError(
                    f"time zone {name!r} is unknown: use an IANA name such as Europe/Paris", name
                ) from error
    try:
        with open("/etc/localtime", "rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        # As the C library does where nothing is said of a zone.
        return UTC


def parse_time(text: str, now: datetime, zone: tzinfo) -> datetime:
    """The moment that a text means.

    Args:
        text: What somebody typed.
        now: The present moment, aware.
        zone: The zone of times that do not name one.

    Returns:
        The moment, aware, in UTC.

    Raises:
        TimeError: The text is none of Slurm's forms, or no such moment exists.
    """
    text = text.strip()
    here = now.astimezone(zone)
    try:
        moment = (
            _relative(text, now)
            or _named(text, here, zone)
            or _written(text, here, zone)
            or _iso(text)
        )
        if moment is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise TimeError(f"{text!r} is no time: {error}", text) from error
    raise TimeError(
        f"{text!r} is no time; try 2026-11-21, 2026-11-21T08:00, 08:00, today or now-1day", text
    )


def _relative(text: str, now: datetime) -> datetime | None:
    if match := _NOW.fullmatch(text):
        sign, count, unit = match.groups()
        if count is None:
            return now
        shift = timedelta(seconds=int(count) * _UNIT_S[(unit or "").lower()])
        return now - shift if sign == "-" else now + shift
    if match := _EPOCH.fullmatch(text):
        return datetime.fromtimestamp(int(match[1]), UTC)
    return None


def _named(text: str, here: datetime, zone: tzinfo) -> datetime | None:
    word = text.lower()
    day = here.date()
    if word == "today":
        return datetime.combine(day, time(0), zone)
    if word == "tomorrow":
        return datetime.combine(day + timedelta(days=1), time(0), zone)
    clock = _FIXED.get(word)
    return None if clock is None else datetime.combine(day, clock, zone)


def _written(text: str, here: datetime, zone: tzinfo) -> datetime | None:
    match = _WHEN.fullmatch(text)
    if not text or match is None:
        return None
    part = match.groupdict()
    month = part["ym"] or part["m"] or part["sm"]
    day = part["yd"] or part["d"] or part["sd"]
    if month is None or day is None:
        return datetime.combine(here.date(), _clock(part), zone)
    short = part["y"] or part["sy"]
    if part["year"]:
        year = int(part["year"])
    elif short:
        year = 2000 + int(short)
    else:
        year = here.year - 1 if int(month) > here.month else here.year
    return datetime.combine(datetime(year, int(month), int(day), tzinfo=zone), _clock(part), zone)


def _clock(part: dict[str, str | None]) -> time:
    """The time of day that a match holds; midnight where it holds none."""
    hour = int(part["hour"] or 0)
    if part["half"]:
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} o'clock is neither AM nor PM")
        hour = hour % 12 + (12 if part["half"] in "Pp" else 0)
    return time(hour, int(part["minute"] or 0), int(part["second"] or 0))


def _iso(text: str) -> datetime | None:
    """ISO 8601 with a zone; without one it was not Slurm's form and is not guessed at."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def relative_form(here: datetime, now: datetime) -> str:
    """The form that Slurm's commands choose by distance in days, for strftime(3).

    That is what ``SLURM_TIME_FORMAT=relative`` means, see squeue(1).

    Args:
        here: The time, in the zone that it is shown in.
        now: The present moment, in the same zone.
    """
    days = (here.date() - now.date()).days
    if days in (-1, 0, 1):
        return {-1: "Ystday %H:%M", 0: "%H:%M:%S", 1: "Tomorr %H:%M"}[days]
    if abs(days) > 365:
        return "%-d %b %Y"
    return "%a %H:%M" if 1 < days <= 6 else "%-d %b %H:%M"
