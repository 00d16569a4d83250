"""What use costs under a rate: an exact fraction, rounded once, with the way to it in lines.

A charge and an estimate differ in one thing only. A charge knows when it was, how
it ended and what was used; an estimate takes the dearest of each that it does not know.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo
from fractions import Fraction
from typing import Final

from steward.bank.errors import NoRate
from steward.bank.factors import WHOLE, dearest, split
from steward.bank.money import rounded, show
from steward.bank.records import Price, PriceLine, Rate, Use
from steward.core.timestamps import micros
from steward.slurm.tres import is_size

HOUR_S: Final = 3600
ANY: Final = "*"
"""The partition of rates that hold where none is named."""

_GIB: Final = 1024
_SECOND_US: Final = 1_000_000
_NONE: Final = Fraction(0)


def rate_for(
    rates: Iterable[Rate], cluster: str, partition: str, qos: str, first_submit: datetime
) -> Rate:
    """The rate that holds for a job all its life.

    A rate of the partition goes before one of all partitions, then one of the QOS before one
    of all, then one of the cluster before one of all, then the one that holds from latest on,
    then the one with the highest number. What was created after the job's first submission
    counts only where nothing held by then, whatever time it was said to hold from.

    Args:
        rates: Every rate there is.
        cluster: The job's cluster.
        partition: Its partition, as Slurm writes it.
        qos: Its QOS.
        first_submit: When it was first submitted.

    Raises:
        NoRate: None holds, and none says that it is free.
    """
    best: Rate | None = None
    rank: tuple[bool, bool, bool, bool, float, int] | None = None
    submit_us = micros(first_submit)
    for rate in rates:
        if rate.partition not in (partition, ANY) or rate.qos not in (qos, ""):
            continue
        if rate.cluster not in (cluster, ""):
            continue
        # Slurm tells times of submission in whole seconds.
        since = rate.valid_from.replace(microsecond=0) if rate.valid_from else None
        if since is not None and since > first_submit:
            continue
        place = (
            rate.created_us // _SECOND_US * _SECOND_US <= submit_us,
            rate.partition != ANY,
            bool(rate.qos),
            bool(rate.cluster),
            since.timestamp() if since else float("-inf"),
            rate.number,
        )
        if rank is None or place > rank:
            best, rank = rate, place
    if best is None or not (best.free or best.weights):
        raise NoRate(
            f"partition {partition} of cluster {cluster} has no rate, and is not said to be "
            f"free: 'steward bank rate create {partition}' gives it one",
            partition,
        )
    return best


def per_hour(tres: Mapping[str, int], rate: Rate) -> Fraction:
    """What an hour of these TRES costs before any factor, in micro-SU."""
    parts = [amount for _, _, amount in weighted(tres, rate)]
    if not parts:
        return Fraction(0)
    return max(parts) if rate.combine == "max" else sum(parts, Fraction(0))


def weighted(tres: Mapping[str, int], rate: Rate) -> list[tuple[str, int, Fraction]]:
    """The TRES that a rate weighs: name, amount, and what an hour of it costs in micro-SU.

    What has a type (``gres/gpu:a100``) and a weight of that type is not counted once more
    under its name alone.
    """
    found: list[tuple[str, int, Fraction]] = []
    for name, weight in rate.weights.items():
        amount = tres.get(name, 0)
        if not amount and ":" not in name:
            # Some versions show types alone.
            amount = sum(many for of, many in tres.items() if of.startswith(f"{name}:"))
        if ":" not in name and name.startswith("gres/"):
            typed = f"{name}:"
            amount -= sum(tres.get(of, 0) for of in rate.weights if of.startswith(typed))
        if amount > 0:
            per = Fraction(weight * amount, _GIB if is_size(name) else 1)
            found.append((name, amount, per))
    return found


def price(use: Use, rate: Rate, zone: tzinfo) -> Price:
    """What use cost.

    Args:
        use: What is charged for; a time of day matters only where it has a start.
        rate: What it is charged by.
        zone: The cluster's zone, for factors by time of day.
    """
    if rate.free:
        return _free(rate)
    if use.start is None:
        parts = {dearest(rate.factors): use.seconds}
    else:
        parts = split(rate.factors, use.start, use.seconds, zone)
    end = rate.ends_permille.get(use.state, WHOLE) if use.state else dearest_end(rate)
    return _price(use, rate, parts, end)


def dearest_price(use: Use, rate: Rate) -> Price:
    """What use may cost at the most, whenever it is and however it ends."""
    if rate.free:
        return _free(rate)
    return _price(use, rate, {dearest(rate.factors): use.seconds}, dearest_end(rate))


def amount_per_second(tres: Mapping[str, int], rate: Rate, qos: str) -> Fraction:
    """What a second costs at the most before the end's factor, in micro-SU."""
    if rate.free:
        return Fraction(0)
    factor = Fraction(dearest(rate.factors) * rate.qos_permille.get(qos, WHOLE), WHOLE * WHOLE)
    return per_hour(tres, rate) * factor / HOUR_S


def amount_of(
    exact: Fraction, rate: Rate, end_permille: int = WHOLE, least: int | None = None
) -> int:
    """The sum: at least the minimum, changed by how it ended, rounded.

    Args:
        exact: The amount before, micro-SU.
        rate: The rate.
        end_permille: By how it ended, in thousandths.
        least: The minimum; the rate's if None.
    """
    if rate.free:
        return 0
    minimum = rate.minimum if least is None else least
    return rounded(max(exact, Fraction(minimum)) * end_permille / WHOLE)


def dearest_end(rate: Rate) -> int:
    """The highest factor that an end may bring, in thousandths."""
    return max(WHOLE, *rate.ends_permille.values()) if rate.ends_permille else WHOLE


def _free(rate: Rate) -> Price:
    why = f" ({rate.note})" if rate.note else ""
    return Price(
        amount=0, rate=rate.number, lines=(PriceLine(what=f"free by rate {rate.number}{why}"),)
    )


def _price(use: Use, rate: Rate, parts: Mapping[int, int], end: int) -> Price:
    hourly = per_hour(use.tres, rate)
    time = sum((Fraction(seconds * permille, WHOLE) for permille, seconds in parts.items()), _NONE)
    of_qos = rate.qos_permille.get(use.qos, WHOLE)
    exact = hourly * time * of_qos / WHOLE / HOUR_S
    least = rate.minimum if use.least is None else use.least
    amount = amount_of(exact, rate, end, least)
    lines = [*_tres_lines(use, rate, hourly), *_time_lines(parts)]
    if of_qos != WHOLE:
        lines.append(PriceLine(what=f"QOS {use.qos}: x {_times(of_qos)}"))
    lines.append(PriceLine(what="for that time", amount=rounded(exact)))
    if exact < least:
        lines.append(PriceLine(what="at the least", amount=least))
    if end != WHOLE:
        lines.append(PriceLine(what=f"ended {use.state or 'at its dearest'}: x {_times(end)}"))
    lines.append(PriceLine(what="sum", amount=amount))
    return Price(amount=amount, rate=rate.number, lines=tuple(lines))


def _tres_lines(use: Use, rate: Rate, hourly: Fraction) -> list[PriceLine]:
    lines = [
        PriceLine(
            what=f"{_amount(name, amount)} x {show(rate.weights[name])} an hour",
            amount=rounded(cost),
        )
        for name, amount, cost in weighted(use.tres, rate)
    ]
    which = "the dearest of these" if rate.combine == "max" else "together"
    lines.append(PriceLine(what=f"{which}, an hour", amount=rounded(hourly)))
    return lines


def _time_lines(parts: Mapping[int, int]) -> list[PriceLine]:
    return [
        PriceLine(what=_clock(seconds) + (f" at x {_times(permille)}" if permille != WHOLE else ""))
        for permille, seconds in parts.items()
    ]


def _amount(name: str, amount: int) -> str:
    if not is_size(name):
        return f"{amount:,} {name}"
    whole, rest = divmod(amount, _GIB)
    return f"{whole:,} GiB {name}" if not rest else f"{amount / _GIB:,.2f} GiB {name}"


def _times(permille: int) -> str:
    return f"{permille / WHOLE:g}"


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
