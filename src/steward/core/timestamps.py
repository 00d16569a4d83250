"""Times as databases keep them: whole microseconds since the epoch, in UTC."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def micros(moment: datetime) -> int:
    """Microseconds since the epoch."""
    return (moment - _EPOCH) // _MICROSECOND


def micros_or_0(moment: datetime | None) -> int:
    """Microseconds since the epoch; 0 for a time that is not known."""
    return 0 if moment is None else micros(moment)


def moment(us: int) -> datetime:
    """The UTC time that is so many microseconds after the epoch."""
    return _EPOCH + timedelta(microseconds=us)
