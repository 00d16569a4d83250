"""Days as every database can sum them up: by quarters of an hour, of which each is of one day."""

from datetime import date, tzinfo
from typing import Any, Final

from steward.core.timestamps import moment

_QUARTER_US: Final = 900_000_000
"""No zone's days begin within a quarter of an hour."""


def quarter_of(at_us: Any) -> Any:
    """The quarter of an hour that a column's moments are in, to group by: its number."""
    return at_us // _QUARTER_US


def day_of(quarter: int, zone: tzinfo) -> date:
    """The day that a quarter of an hour is of, in a zone."""
    return moment(quarter * _QUARTER_US).astimezone(zone).date()
