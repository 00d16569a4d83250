"""How values look on pages: times in the cluster's zone, durations, sizes, amounts."""

from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from markupsafe import Markup, escape

from steward.bank import money
from steward.bank.money import Unit
from steward.core.printable import safe
from steward.web.nodes import node_state

_NONE: Final = "\N{EN DASH}"
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@lru_cache(maxsize=32)
def zone_of(name: str) -> tzinfo | None:
    """The zone of that IANA name; None, for this host's, where there is none."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def when(moment: datetime | None, zone: str = "", form: str = "%Y-%m-%d %H:%M:%S") -> Markup | str:
    """A time, in a zone; machines find it in UTC."""
    if moment is None:
        return _NONE
    try:
        here = moment.astimezone(zone_of(zone))
    except (OverflowError, ValueError):
        # At the ends of the calendar there is no such moment in every zone.
        here = moment
    exact = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        exact, here.strftime("%Y-%m-%d %H:%M:%S %Z"), here.strftime(form)
    )


def duration(seconds: float | timedelta | None) -> str:
    """A duration as Slurm writes it: ``1-02:03:04``."""
    if seconds is None:
        return _NONE
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    sign, whole = "-" if seconds < 0 else "", abs(round(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{sign}{days}-{clock}" if days else f"{sign}{clock}"


def size(count: float | None) -> str:
    """A size: ``1.2 GiB``."""
    if count is None:
        return _NONE
    amount = float(count)
    for unit in _SIZES:
        if abs(amount) < 1000 or unit == _SIZES[-1]:
            return f"{count:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("the loop ends at its last unit")


def number(value: float | None, decimals: int = 0) -> str:
    """A number with thin spaces between its thousands."""
    if value is None:
        return _NONE
    return f"{value:,.{decimals}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """A part as a percentage."""
    if part is None or not whole:
        return _NONE
    return f"{100 * part / whole:.0f}\N{NARROW NO-BREAK SPACE}%"


def amount(value: int | None, unit: str = "", decimals: int = 2) -> str:
    """Micro-SU as an amount, with the unit's name where it is given."""
    return _NONE if value is None else money.show(value, Unit(unit, decimals)).strip()


def state(word: str) -> Markup:
    """A job's or node's state, in its colour; its words say the same."""
    base = word.split(" ", maxsplit=1)[0].split("+", maxsplit=1)[0].upper()
    return Markup('<span class="state state-{}">{}</span>').format(
        "".join(letter for letter in base.lower() if letter.isalnum()), escape(word)
    )


FILTERS: Final = {
    "when": when,
    "duration": duration,
    "size": size,
    "number": number,
    "percent": percent,
    "amount": amount,
    "state": state,
    "node_state": node_state,
    "printable": safe,
}
"""By the names that templates know them under."""
