"""How rates are typed, and shown: ``cpu=1``, ``lowprio=0.5``, ``sat-sun/0-24=0.5``."""

import re
from collections.abc import Iterable
from typing import Final

from steward.bank import money
from steward.bank.records import Factor, Rate
from steward.bank.weighing import check_names
from steward.cli.options import split
from steward.errors import UsageError

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FACTOR: Final = re.compile(r"([a-z,-]+)/([\d:]+)-([\d:]+)=([\d.]+)")
_PERMILLE: Final = 1000


def weights(values: Iterable[str] | None) -> dict[str, int]:
    """micro-SU by TRES, from ``cpu=1,mem=0.1``.

    Raises:
        UsageError: It is none, or names no TRES.
    """
    found: dict[str, int] = {}
    for name, value in _pairs(values, "--weight cpu=1"):
        found[name] = money.parse(value)
    check_names(found)
    return found


def factors_of(values: Iterable[str] | None, what: str) -> dict[str, int]:
    """Thousandths by name, from ``lowprio=0.5``.

    Raises:
        UsageError: It is none.
    """
    return {name: permille(value) for name, value in _pairs(values, what)}


def permille(text: str) -> int:
    """Thousandths, from ``0.5``.

    Raises:
        UsageError: It is below zero, or has more than three decimals.
    """
    whole, rest = divmod(money.parse(text) * _PERMILLE, money.MICRO)
    if whole < 0 or rest:
        raise UsageError(f"{text} is no factor: it is not below 0, with three decimals", text)
    return whole


def times(values: Iterable[str] | None) -> tuple[Factor, ...]:
    """Factors by time of the week, from ``sat-sun/0-24=0.5`` or ``mon-fri/08:00-18:30=1.5``.

    Raises:
        UsageError: It is none.
    """
    found = []
    for value in values or ():
        match = _FACTOR.fullmatch(value.lower())
        if not match:
            raise UsageError(f"{value!r} is no factor by time: write sat-sun/0-24=0.5", value)
        days, begin, end, factor = match.groups()
        found.append(
            Factor(
                days=_days(days), begin_min=_minute(begin), end_min=_minute(end),
                permille=permille(factor),
            )
        )  # fmt: skip
    return tuple(found)


def shown(rate: Rate) -> str:
    """A rate as it would be typed, for people."""
    if rate.free:
        return "free"
    said = [f"{name}={_number(amount)}" for name, amount in rate.weights.items()]
    parts = [", ".join(said)]
    parts += ["the dearest counts"] if rate.combine == "max" and len(rate.weights) > 1 else []
    parts += [f"at least {_number(rate.minimum)}"] if rate.minimum else []
    parts += ["whole nodes"] if rate.whole_nodes else []
    parts += [f"{name}: x{_share(value)}" for name, value in rate.qos_permille.items()]
    parts += [f"{_when(one)}: x{_share(one.permille)}" for one in rate.factors]
    parts += [f"{name}: x{_share(value)}" for name, value in rate.ends_permille.items()]
    return "; ".join(part for part in parts if part)


def _number(amount: int) -> str:
    return money.plain(amount).rstrip("0").rstrip(".")


def _share(value: int) -> str:
    return f"{value / _PERMILLE:.3f}".rstrip("0").rstrip(".")


def _when(factor: Factor) -> str:
    days = ",".join(_DAYS[day] for day in factor.days)
    begin, end = divmod(factor.begin_min, 60), divmod(factor.end_min, 60)
    return f"{days}/{begin[0]:02}:{begin[1]:02}-{end[0]:02}:{end[1]:02}"


def _days(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in _DAYS or (dash and last not in _DAYS):
            raise UsageError(f"{part!r} is no day: {', '.join(_DAYS)}", part)
        begin = _DAYS.index(first)
        count = (_DAYS.index(last) - begin) % len(_DAYS) if dash else 0
        found |= {(begin + step) % len(_DAYS) for step in range(count + 1)}
    return tuple(sorted(found))


def _minute(text: str) -> int:
    hour, _, minute = text.partition(":")
    if hour.isdecimal() and (minute or "0").isdecimal() and len(hour) <= 2 and len(minute) <= 2:
        found = int(hour) * 60 + int(minute or 0)
        if found <= 24 * 60 and int(minute or 0) < 60:
            return found
    raise UsageError(f"{text!r} is no time of day: 8, 08:00 or 24", text)


def _pairs(values: Iterable[str] | None, what: str) -> Iterable[tuple[str, str]]:
    for one in split(values):
        name, equals, value = one.rpartition("=")
        if not equals or not name:
            raise UsageError(f"{one!r} is not understood: write {what}", one)
        yield name, value
