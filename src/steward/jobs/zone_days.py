"""Days and months of a cluster's zone, which sums are cut into, and the digest of a zone's rules.

Times are µs since the epoch.
"""

import hashlib
import os
from datetime import UTC, date, datetime, time, tzinfo
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from steward.core.timestamps import to_micros
from steward.slurm.times import TimeError, load_zone

_US: Final = 1_000_000
_RULES_S: Final = range(631_152_000, 2_840_140_800, 86_400)
"""Days of which a zone's rules are compared: 1990 to 2060."""


class ZoneDay(NamedTuple):
    """Day of a zone: its midnights, and when its month begins."""

    begin_us: int
    end_us: int
    month_us: int


def cut_days(start_us: int, end_us: int, zone: tzinfo) -> list[ZoneDay]:
    """Return the days between two times; one if they are equal, none outside the years of dates."""
    try:
        ordinal = datetime.fromtimestamp(start_us // _US, zone).toordinal()
        # Where midnight does not exist or comes twice, its date is not the day that holds it.
        while _find_midnight(ordinal, zone) > start_us:
            ordinal -= 1
        days: list[ZoneDay] = []
        begin_us = _find_midnight(ordinal, zone)
        while begin_us < end_us or not days:
            month_us = _find_month(ordinal, zone)
            ordinal += 1
            day_end_us = _find_midnight(ordinal, zone)
            if day_end_us > start_us and day_end_us > begin_us:
                days.append(ZoneDay(begin_us, day_end_us, month_us))
            begin_us = day_end_us
    except (ValueError, OverflowError, OSError):
        return []
    return days


@lru_cache(maxsize=4096)
def _find_midnight(ordinal: int, zone: tzinfo) -> int:
    """Return when a day begins in a zone, µs since the epoch."""
    return to_micros(datetime.combine(date.fromordinal(ordinal), time(), zone).astimezone(UTC))


@lru_cache(maxsize=4096)
def _find_month(ordinal: int, zone: tzinfo) -> int:
    """Return when the month of a day begins in a zone, µs since the epoch."""
    return _find_midnight(date.fromordinal(ordinal).replace(day=1).toordinal(), zone)


@lru_cache(maxsize=64)
def describe_zone(zone: str) -> tuple[str, str]:
    """Return the IANA name of a zone and the digest of its rules, for this process's lifetime."""
    name = _resolve_zone_name(zone)
    return name, _digest_rules(load_zone(name))


def _digest_rules(zone: tzinfo) -> str:
    """Return the digest of a zone's offsets, and of the times when they change."""
    changes: list[tuple[int, float]] = []

    def read_offset(at_s: int) -> float:
        offset = datetime.fromtimestamp(at_s, zone).utcoffset()
        return offset.total_seconds() if offset is not None else 0.0

    last = read_offset(_RULES_S[0])
    for day_s in _RULES_S:
        if read_offset(day_s + _RULES_S.step) == last:
            continue
        for at_s in range(day_s, day_s + _RULES_S.step + 1, 900):
            offset = read_offset(at_s)
            if offset != last:
                changes.append((at_s, offset))
                last = offset
    return hashlib.sha256(msgspec.json.encode([read_offset(_RULES_S[0]), changes])).hexdigest()[:16]


def _resolve_zone_name(name: str) -> str:
    """Return the IANA name of a zone, also for this host's; "" if that has none."""
    _, _, host_name = os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")
    for candidate in (name, os.environ.get("TZ", "").lstrip(":"), host_name):
        if candidate:
            try:
                load_zone(candidate)
            except TimeError:
                continue
            return candidate
    return ""
