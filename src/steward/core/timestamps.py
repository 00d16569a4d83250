"""Timestamps for databases: UTC times as integer microseconds since the epoch, and back."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """Return a time as microseconds since the epoch."""
    return (moment - _EPOCH) // _MICROSECOND


def to_micros_or_zero(moment: datetime | None) -> int:
    """Return a time as microseconds since the epoch; 0 for None (unknown)."""
    return 0 if moment is None else to_micros(moment)


def from_micros(us: int) -> datetime:
    """Return the UTC time of ``us`` microseconds since the epoch."""
    return _EPOCH + timedelta(microseconds=us)
