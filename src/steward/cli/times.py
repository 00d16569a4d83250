"""Times as Slurm's commands print them: in the cluster's zone, TZ and SLURM_TIME_FORMAT obeyed."""

import os
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from steward.slurm.times import relative_form

_STANDARD = "%Y-%m-%dT%H:%M:%S"


@lru_cache(maxsize=32)
def _zone(name: str) -> tzinfo | None:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # A zone that this host does not know: its own is the next best.
        return None


def local(moment: datetime, zone: str = "") -> datetime:
    """A moment in the zone that it is to be shown in.

    Args:
        moment: Aware.
        zone: IANA name of the cluster's zone, "" for the system's; TZ comes before it.
    """
    try:
        if zone and "TZ" not in os.environ:
            return moment.astimezone(_zone(zone))
        return moment.astimezone()
    except (OverflowError, OSError, ValueError):
        # At the ends of the calendar there is no such moment in every zone.
        return moment


def show(moment: datetime | None, zone: str = "", now: datetime | None = None) -> str:
    """A time as text; "" for None.

    Args:
        moment: Aware.
        zone: As for :func:`local`.
        now: The present moment, for ``SLURM_TIME_FORMAT=relative``.
    """
    if moment is None:
        return ""
    here = local(moment, zone)
    form = os.environ.get("SLURM_TIME_FORMAT", "")
    if form == "relative":
        form = relative_form(here, local(now or datetime.now(UTC), zone))
    elif form in ("", "standard"):
        form = _STANDARD
    return here.strftime(form)


def zone_to_ask_in() -> str:
    """The IANA zone that typed times are meant in, by TZ; "" for the cluster's."""
    name = os.environ.get("TZ", "").removeprefix(":")
    return name if name and _zone(name) is not None else ""
