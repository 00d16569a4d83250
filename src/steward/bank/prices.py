"""What use costs under a rate: an exact fraction, rounded once, with the way to it in lines.

A charge and an estimate differ in one thing only. A charge knows when it was, how
it ended and what was used; an estimate takes the dearest of each that it does not know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from fractions import Fraction
from itertools import pairwise
from typing import Final

from steward.bank.errors import NoRate
from steward.bank.money import rounded, show
from steward.bank.records import Factor, Price, PriceLine, Rate, Use
from steward.core.timestamps import micros
from steward.slurm.tres import is_size

WHOLE: Final = 1000
"""The factor that changes nothing, in thousandths."""

_DAY_MIN: Final = 1440
_SECOND: Final = timedelta(seconds=1)


def permille_at(factors: Sequence[Factor], weekday: int, minute: int) -> int:
    """What holds in a minute of the week: the first factor that names it, or ``WHOLE``."""
    for factor in factors:
        if weekday in factor.days and factor.begin_min <= minute < factor.end_min:
            return factor.permille
    return WHOLE


def dearest(factors: Sequence[Factor]) -> int:
    """The highest that holds in any minute of the week, in thousandths."""
    if not factors:
        return WHOLE
    # Only where one begins or ends can what holds change.
    edges = {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    return max(
        permille_at(factors, weekday, minute)
        for weekday in range(7)
        for minute in edges
        if minute < _DAY_MIN
    )


def split(factors: Sequence[Factor], start: datetime, seconds: int, zone: tzinfo) -> dict[int, int]:
    """How many seconds of a time are under which factor.

    Args:
        factors: The first that names a moment holds in it.
        start: When the time begins, aware.
        seconds: How long it is.
        zone: What the factors' days and minutes are of.

    Returns:
        Seconds by thousandths; together they are ``seconds``.
    """
    if not factors or seconds <= 0:
        return {WHOLE: seconds} if seconds > 0 else {}
    begin = start.astimezone(UTC)
    end = begin + timedelta(seconds=seconds)
    found: dict[int, int] = {}
    edges = sorted({begin, end, *(at for at in _edges(factors, begin, end, zone))})
    done = 0
    for at, until in pairwise(edges):
        clock = at.astimezone(zone)
        permille = permille_at(factors, clock.weekday(), clock.hour * 60 + clock.minute)
        # Cut off from the start on, so that parts of a second are not lost one by one.
        passed = int((until - begin).total_seconds())
        found[permille] = found.get(permille, 0) + passed - done
        done = passed
    return {permille: part for permille, part in found.items() if part}


def _edges(
    factors: Sequence[Factor], begin: datetime, end: datetime, zone: tzinfo
) -> Iterator[datetime]:
    """Every moment between two at which what holds may change, and perhaps others."""
    minutes = sorted(
        {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    )
    day = begin.astimezone(zone).date() - timedelta(days=1)
    last = end.astimezone(zone).date()
    while day <= last:
        for minute in minutes:
            for at in _moments(day, minute, zone):
                if begin < at < end:
                    yield at
        change = _change(day, zone)
        if change is not None and begin < change < end:
            yield change
        day += timedelta(days=1)


def _moments(day: date, minute: int, zone: tzinfo) -> Iterator[datetime]:
    """The moments at which the clock shows this minute of this day: none, one, or two."""
    days, of_day = divmod(minute, _DAY_MIN)
    clock = time(of_day // 60, of_day % 60)
    for fold in (0, 1):
        shown = datetime.combine(day + timedelta(days=days), clock, zone).replace(fold=fold)
        yield shown.astimezone(UTC)


def _change(day: date, zone: tzinfo) -> datetime | None:
    """When the clock is changed in a day; None if it is not."""
    low = datetime.combine(day, time(0), zone).astimezone(UTC)
    high = low + timedelta(days=1)
    before = low.astimezone(zone).utcoffset()
    if high.astimezone(zone).utcoffset() == before:
        return None
    while high - low > _SECOND:
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


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
