"""Times as users type them for sacct's -S and -E: ``now-1day``, ``today``, ``08:00``, dates.

:func:`parse_time` accepts what sacct(1) lists under "Valid time formats", what its parser takes
beyond that (blanks in ``now - 1 day``, ``tomorrow``, ``uts`` with seconds since the epoch), and
ISO 8601 with a zone, as Steward prints times. As with sacct, a time without a date is today's, and
a date without a year is never in a later month than the present one.

:func:`load_zone` loads a time zone; :func:`choose_relative_format` chooses the format of
``SLURM_TIME_FORMAT=relative``.
"""

import os
import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from steward.core.errors import UsageError


class TimeError(UsageError):
    """Time that cannot be parsed."""


_FIXED: Final = {
    "midnight": time(0),
    "noon": time(12),
    "fika": time(15),
    "teatime": time(16),
}
_UNIT_S: Final = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}

_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Earliest time: Slurm has none before it, so a period may be subtracted from any time."""
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
def load_zone(name: str) -> tzinfo:
    """Return the time zone of an IANA name; for "" this host's: TZ or else /etc/localtime.

    Raises:
        TimeError: The zone does not exist.
    """
    zone_name = name or os.environ.get("TZ", "").lstrip(":")
    if zone_name:
        try:
            return ZoneInfo(zone_name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            if name:
                raise TimeError(
                    f"time zone {name!r} is unknown: use an IANA name such as Europe/Paris", name
                ) from error
    try:
        with open("/etc/localtime", "rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        # As the C library does when no zone is configured.
        return UTC


def parse_time(text: str, now: datetime, zone: tzinfo) -> datetime:
    """Parse a time into an aware datetime in UTC.

    Args:
        text: What the user typed.
        now: The present time, aware.
        zone: Time zone of times that name none.

    Returns:
        The moment, aware, in UTC; 1970 for an earlier one.

    Raises:
        TimeError: The text matches none of Slurm's forms, or the time does not exist.
    """
    text = text.strip()
    local_now = now.astimezone(zone)
    try:
        moment = (
            _parse_relative(text, now)
            or _parse_word(text, local_now, zone)
            or _parse_date(text, local_now, zone)
            or _parse_iso(text)
        )
        if moment is not None:
            return max(moment.astimezone(UTC), _EARLIEST)
    except (ValueError, OverflowError) as error:
        raise TimeError(f"invalid time {text!r}: {error}", text) from error
    raise TimeError(
        f"invalid time {text!r}: write 2026-11-21, 2026-11-21T08:00, 08:00, today or now-1day", text
    )


def _parse_relative(text: str, now: datetime) -> datetime | None:
    """Parse ``now``, ``now-1day`` and ``uts1700000000``."""
    if match := _NOW.fullmatch(text):
        sign, count, unit = match.groups()
        if count is None:
            return now
        shift = timedelta(seconds=int(count) * _UNIT_S[(unit or "").lower()])
        return now - shift if sign == "-" else now + shift
    if match := _EPOCH.fullmatch(text):
        return datetime.fromtimestamp(int(match[1]), UTC)
    return None


def _parse_word(text: str, local_now: datetime, zone: tzinfo) -> datetime | None:
    """Parse ``today``, ``tomorrow``, ``noon`` and the like."""
    word = text.lower()
    day = local_now.date()
    if word == "today":
        return datetime.combine(day, time(0), zone)
    if word == "tomorrow":
        return datetime.combine(day + timedelta(days=1), time(0), zone)
    clock = _FIXED.get(word)
    return None if clock is None else datetime.combine(day, clock, zone)


def _parse_date(text: str, local_now: datetime, zone: tzinfo) -> datetime | None:
    """Parse a date, a time of day, or both."""
    match = _WHEN.fullmatch(text)
    if not text or match is None:
        return None
    fields = match.groupdict()
    month = fields["ym"] or fields["m"] or fields["sm"]
    day = fields["yd"] or fields["d"] or fields["sd"]
    if month is None or day is None:
        return datetime.combine(local_now.date(), _parse_clock(fields), zone)
    short_year = fields["y"] or fields["sy"]
    if fields["year"]:
        year = int(fields["year"])
    elif short_year:
        year = 2000 + int(short_year)
    else:
        year = local_now.year - 1 if int(month) > local_now.month else local_now.year
    return datetime.combine(
        datetime(year, int(month), int(day), tzinfo=zone), _parse_clock(fields), zone
    )


def _parse_clock(fields: dict[str, str | None]) -> time:
    """Return the time of day in a match; midnight if it has none."""
    hour = int(fields["hour"] or 0)
    if fields["half"]:
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} is not an hour of AM or PM: use 1 to 12")
        hour = hour % 12 + (12 if fields["half"] in "Pp" else 0)
    return time(hour, int(fields["minute"] or 0), int(fields["second"] or 0))


def _parse_iso(text: str) -> datetime | None:
    """Parse ISO 8601 with a zone; None without one: such a text matches no form of Slurm's."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def choose_relative_format(moment: datetime, now: datetime) -> str:
    """Return the strftime(3) format that Slurm's commands choose by distance in days.

    This is ``SLURM_TIME_FORMAT=relative``, see squeue(1).

    Args:
        moment: The time, in the zone used for output.
        now: The present time, in the same zone.
    """
    days = (moment.date() - now.date()).days
    if days in (-1, 0, 1):
        return {-1: "Ystday %H:%M", 0: "%H:%M:%S", 1: "Tomorr %H:%M"}[days]
    if abs(days) > 365:
        return "%-d %b %Y"
    return "%a %H:%M" if 1 < days <= 6 else "%-d %b %H:%M"
