"""How rates are typed: ``cpu=1``, ``lowprio=0.5``, ``sat-sun/0-24=0.5``."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
import typer

from steward.bank import money
from steward.bank.rate_validation import DAYS, check_names
from steward.bank.records import Factor
from steward.cli import options
from steward.cli.bank_text import ClusterOption, Reason
from steward.cli.options import split
from steward.core.errors import UsageError

_FACTOR: Final = re.compile(r"([a-z,-]+)/([\d:]+)-([\d:]+)=([\d.]+)")
_PERMILLE: Final = 1000


Partition = Annotated[
    str, typer.Argument(metavar="PARTITION", help="The partition; '*' for those without a rate.")
]
Qos = Annotated[
    str,
    typer.Option("--qos", "-q", metavar="NAME", help="Only for it.", callback=options.not_empty),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        "-w",
        metavar="TRES=AMOUNT,…",
        help="For an hour of a TRES: cpu=1,gres/gpu=20; of mem and bb/NAME for a GiB.",
        callback=options.not_empty,
    ),
]
Dearest = Annotated[
    bool | None,
    typer.Option("--max/--sum", help="Let the dearest of the weighted TRES count, or their sum."),
]
Minimum = Annotated[
    str, typer.Option("--minimum", metavar="AMOUNT", help="What a run costs at the least.")
]
WholeNodes = Annotated[
    bool | None, typer.Option("--whole-nodes/--parts", help="Charge nodes whole, or what was used.")
]
Times = Annotated[
    list[str] | None,
    typer.Option(
        "--factor",
        metavar="DAYS/TIME-TIME=NUMBER",
        help="At some times: sat-sun/0-24=0.5, mon-fri/08:00-18:00=1.5.",
        callback=options.not_empty,
    ),
]
QosFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--qos-factor", metavar="QOS=NUMBER,…", help="Under a QOS.", callback=options.not_empty
    ),
]
EndFactors = Annotated[
    list[str] | None,
    typer.Option(
        "--end-factor",
        metavar="STATE=NUMBER,…",
        help="By final state: NODE_FAIL=0,PREEMPTED=0.5.",
        callback=options.not_empty,
    ),
]
Free = Annotated[bool, typer.Option("--free", help="It costs nothing.")]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Why it is so.")]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="TIME",
        help="For jobs submitted since; from now on if not given.",
        callback=options.not_empty,
    ),
]


class RateSaid(msgspec.Struct, frozen=True):
    """What was typed of a rate.

    Attributes:
        partition: Of which partition.
        qos: Only under this QOS.
        cluster: Of which cluster.
        given: Fields of the rate, as far as they were typed.
        valid_from: From when on, as people type times.
        reason: Why, for the books.
    """

    partition: str
    qos: str
    cluster: str
    given: dict[str, Any]
    valid_from: str
    reason: str


def rate_said(
    partition: Partition,
    qos: Qos = "",
    weight: Weights = None,
    dearest: Dearest = None,
    minimum: Minimum = "",
    whole_nodes: WholeNodes = None,
    factor: Times = None,
    qos_factor: QosFactors = None,
    end_factor: EndFactors = None,
    free: Free = False,
    note: Note = "",
    valid_from: From = "",
    cluster: ClusterOption = "",
    reason: Reason = "",
) -> RateSaid:
    """The options by which a rate is typed.

    Raises:
        UsageError: One of them cannot be understood.
    """
    fields: dict[str, Any] = {
        "weights": weights(weight) if weight else None,
        "combine": None if dearest is None else "max" if dearest else "sum",
        "minimum": money.parse(minimum) if minimum else None,
        "whole_nodes": whole_nodes,
        "factors": times(factor) if factor else None,
        "qos_permille": factors_of(qos_factor, "--qos-factor lowprio=0.5") or None,
        "ends_permille": factors_of(end_factor, "--end-factor NODE_FAIL=0") or None,
        "free": free or None,
        "note": note or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return RateSaid(partition, qos, cluster, given, valid_from, reason)


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


def _days(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise UsageError(f"{part!r} is no day: {', '.join(DAYS)}", part)
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % len(DAYS) if dash else 0
        found |= {(begin + step) % len(DAYS) for step in range(count + 1)}
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
