"""Prices: find the rate of a job, and compute the price of resource use exactly.

- :func:`get_permille`, :func:`get_highest_permille`, :func:`split_by_factor`: factors by time of
  day and week, as the clock on the cluster's wall shows it.
- :func:`find_rate`: the rate that applies to a job for its whole life.
- :func:`compute_price`: the price of past use (a charge).
- :func:`compute_highest_price`: the highest price of future use (an estimate), with the most
  expensive value for everything still unknown.

Amounts are exact fractions of micro-SU and rounded once, at the end. Each price lists its
steps, for people.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from fractions import Fraction
from itertools import pairwise
from typing import Final

from steward.bank.errors import NoRate
from steward.bank.money import format_money, round_half_up
from steward.bank.records import Price, PriceLine, Rate, ResourceUse, TimeFactor
from steward.core.timestamps import to_micros
from steward.slurm.tres import is_size

UNCHANGED_PERMILLE: Final = 1000
"""Factor that changes nothing (1.0), in thousandths."""

_DAY_MIN: Final = 1440
_SECOND: Final = timedelta(seconds=1)


def get_permille(factors: Sequence[TimeFactor], weekday: int, minute: int) -> int:
    """Return the factor of a minute of the week: the first that covers it, else no change."""
    for factor in factors:
        if weekday in factor.days and factor.begin_min <= minute < factor.end_min:
            return factor.permille
    return UNCHANGED_PERMILLE


def get_highest_permille(factors: Sequence[TimeFactor]) -> int:
    """Return the highest factor in any minute of the week, in thousandths."""
    if not factors:
        return UNCHANGED_PERMILLE
    # The factor changes only where one begins or ends.
    edges = {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    return max(
        get_permille(factors, weekday, minute)
        for weekday in range(7)
        for minute in edges
        if minute < _DAY_MIN
    )


def split_by_factor(
    factors: Sequence[TimeFactor], start: datetime, seconds: int, zone: tzinfo
) -> dict[int, int]:
    """Divide a period of time by the factor that applies.

    An hour that a change to summer time skips costs nothing, and one that comes twice is charged
    twice, because jobs run for exactly that long.

    Args:
        factors: The factors; the first that covers a moment applies.
        start: Start of the period, aware.
        seconds: Length of the period.
        zone: Time zone of the factors' days and minutes.

    Returns:
        Seconds by factor in thousandths; they sum to ``seconds``.
    """
    if not factors or seconds <= 0:
        return {UNCHANGED_PERMILLE: seconds} if seconds > 0 else {}
    begin = start.astimezone(UTC)
    end = begin + timedelta(seconds=seconds)
    seconds_by_permille: dict[int, int] = {}
    edges = sorted({begin, end, *(at for at in _list_change_times(factors, begin, end, zone))})
    counted_s = 0
    for at, next_at in pairwise(edges):
        clock = at.astimezone(zone)
        permille = get_permille(factors, clock.weekday(), clock.hour * 60 + clock.minute)
        # Truncate from the start of the period, so that fractions of seconds do not add up.
        passed_s = int((next_at - begin).total_seconds())
        seconds_by_permille[permille] = seconds_by_permille.get(permille, 0) + passed_s - counted_s
        counted_s = passed_s
    return {permille: part_s for permille, part_s in seconds_by_permille.items() if part_s}


def _list_change_times(
    factors: Sequence[TimeFactor], begin: datetime, end: datetime, zone: tzinfo
) -> Iterator[datetime]:
    """List the moments between two times at which the factor may change."""
    minutes = sorted(
        {0} | {edge for factor in factors for edge in (factor.begin_min, factor.end_min)}
    )
    day = begin.astimezone(zone).date() - timedelta(days=1)
    last = end.astimezone(zone).date()
    while day <= last:
        for minute in minutes:
            for at in _list_moments(day, minute, zone):
                if begin < at < end:
                    yield at
        change = _find_offset_change(day, zone)
        if change is not None and begin < change < end:
            yield change
        day += timedelta(days=1)


def _list_moments(day: date, minute: int, zone: tzinfo) -> Iterator[datetime]:
    """List the moments at which the local clock shows this minute: with DST none, one or two."""
    days, minute_of_day = divmod(minute, _DAY_MIN)
    clock = time(minute_of_day // 60, minute_of_day % 60)
    for fold in (0, 1):
        local_time = datetime.combine(day + timedelta(days=days), clock, zone).replace(fold=fold)
        yield local_time.astimezone(UTC)


def _find_offset_change(day: date, zone: tzinfo) -> datetime | None:
    """Return when the UTC offset changes in a day (DST); None if it does not."""
    low = datetime.combine(day, time(0), zone).astimezone(UTC)
    high = low + timedelta(days=1)
    first_offset = low.astimezone(zone).utcoffset()
    if high.astimezone(zone).utcoffset() == first_offset:
        return None
    while high - low > _SECOND:
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == first_offset:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


HOUR_S: Final = 3600
"""Seconds in an hour."""
EVERY_PARTITION: Final = "*"
"""Partition of rates that apply to every partition without its own rate."""

_GIB: Final = 1024
"""MiB in a GiB: weights of sizes are per GiB, amounts in MiB."""
_SECOND_US: Final = 1_000_000
_NONE: Final = Fraction(0)


def find_rate(
    rates: Iterable[Rate], cluster: str, partition: str, qos: str, first_submit: datetime
) -> Rate:
    """Return the rate that applies to a job for its whole life.

    The order of preference is: a rate of the partition, of the QOS, of the cluster; then the
    latest start of validity; then the highest number. A rate created after the job's first
    submission counts only if no other applies, whatever its start of validity.

    Args:
        rates: All rates.
        cluster: The job's cluster.
        partition: Its partition, as Slurm writes it.
        qos: Its QOS.
        first_submit: Its first submit time.

    Raises:
        NoRate: No rate applies, and none marks the partition as free.
    """
    best: Rate | None = None
    best_rank: tuple[bool, bool, bool, bool, float, int] | None = None
    submit_us = to_micros(first_submit)
    for rate in rates:
        if rate.partition not in (partition, EVERY_PARTITION) or rate.qos not in (qos, ""):
            continue
        if rate.cluster not in (cluster, ""):
            continue
        # Slurm reports submit times in whole seconds.
        valid_from = rate.valid_from.replace(microsecond=0) if rate.valid_from else None
        if valid_from is not None and valid_from > first_submit:
            continue
        rank = (
            rate.created_us // _SECOND_US * _SECOND_US <= submit_us,
            rate.partition != EVERY_PARTITION,
            bool(rate.qos),
            bool(rate.cluster),
            valid_from.timestamp() if valid_from else float("-inf"),
            rate.number,
        )
        if best_rank is None or rank > best_rank:
            best, best_rank = rate, rank
    if best is None or not (best.free or best.weights):
        raise NoRate(
            f"partition {partition} of cluster {cluster} has no rate: create one with "
            f"'steward bank rate create {partition}'",
            partition,
        )
    return best


def compute_hourly_price(tres: Mapping[str, int], rate: Rate) -> Fraction:
    """Return the price of an hour of these TRES before any factor, in micro-SU."""
    prices = [amount for _, _, amount in list_weighted_tres(tres, rate)]
    if not prices:
        return Fraction(0)
    return max(prices) if rate.combine == "max" else sum(prices, Fraction(0))


def list_weighted_tres(tres: Mapping[str, int], rate: Rate) -> list[tuple[str, int, Fraction]]:
    """List the TRES that a rate weighs: name, amount, and price per hour in micro-SU.

    A typed GRES (``gres/gpu:a100``) with its own weight is not counted again under its
    untyped name.
    """
    weighted: list[tuple[str, int, Fraction]] = []
    for name, weight in rate.weights.items():
        amount = tres.get(name, 0)
        if not amount and ":" not in name:
            # Some versions of Slurm show only the typed names.
            amount = sum(
                typed_amount
                for tres_name, typed_amount in tres.items()
                if tres_name.startswith(f"{name}:")
            )
        if ":" not in name and name.startswith("gres/"):
            typed_prefix = f"{name}:"
            amount -= sum(
                tres.get(tres_name, 0)
                for tres_name in rate.weights
                if tres_name.startswith(typed_prefix)
            )
        if amount > 0:
            hourly_price = Fraction(weight * amount, _GIB if is_size(name) else 1)
            weighted.append((name, amount, hourly_price))
    return weighted


def compute_price(use: ResourceUse, rate: Rate, zone: tzinfo) -> Price:
    """Compute the price of past use.

    Args:
        use: The use; factors by time of day apply only if it has a start.
        rate: Its rate.
        zone: The cluster's time zone, for factors by time of day.
    """
    if rate.free:
        return _make_free_price(rate)
    if use.start is None:
        seconds_by_permille = {get_highest_permille(rate.factors): use.seconds}
    else:
        seconds_by_permille = split_by_factor(rate.factors, use.start, use.seconds, zone)
    end_permille = (
        rate.ends_permille.get(use.state, UNCHANGED_PERMILLE)
        if use.state
        else get_highest_end_permille(rate)
    )
    return _make_price(use, rate, seconds_by_permille, end_permille)


def compute_highest_price(use: ResourceUse, rate: Rate) -> Price:
    """Compute the highest price of use, whenever it happens and however it ends."""
    if rate.free:
        return _make_free_price(rate)
    return _make_price(
        use, rate, {get_highest_permille(rate.factors): use.seconds}, get_highest_end_permille(rate)
    )


def compute_highest_price_per_second(tres: Mapping[str, int], rate: Rate, qos: str) -> Fraction:
    """Return the highest price of a second before the end factor, in micro-SU."""
    if rate.free:
        return Fraction(0)
    factor = Fraction(
        get_highest_permille(rate.factors) * rate.qos_permille.get(qos, UNCHANGED_PERMILLE),
        UNCHANGED_PERMILLE * UNCHANGED_PERMILLE,
    )
    return compute_hourly_price(tres, rate) * factor / HOUR_S


def apply_minimum_and_end(
    exact: Fraction, rate: Rate, end_permille: int = UNCHANGED_PERMILLE, least: int | None = None
) -> int:
    """Compute the final amount: at least the minimum, times the end factor, rounded.

    Args:
        exact: The amount before, in micro-SU.
        rate: The rate.
        end_permille: Factor of the job's end state, in thousandths.
        least: The minimum; None for the rate's.
    """
    if rate.free:
        return 0
    minimum = rate.minimum if least is None else least
    return round_half_up(max(exact, Fraction(minimum)) * end_permille / UNCHANGED_PERMILLE)


def get_highest_end_permille(rate: Rate) -> int:
    """Return the highest end factor of a rate, in thousandths."""
    return (
        max(UNCHANGED_PERMILLE, *rate.ends_permille.values())
        if rate.ends_permille
        else UNCHANGED_PERMILLE
    )


def _make_free_price(rate: Rate) -> Price:
    """Return the price of zero of a free rate."""
    note_text = f" ({rate.note})" if rate.note else ""
    return Price(
        amount=0,
        rate=rate.number,
        lines=(PriceLine(description=f"free by rate {rate.number}{note_text}"),),
    )


def _make_price(
    use: ResourceUse, rate: Rate, seconds_by_permille: Mapping[int, int], end_permille: int
) -> Price:
    """Compute a price from seconds by factor and the end factor, with its steps."""
    hourly = compute_hourly_price(use.tres, rate)
    weighted_s = sum(
        (
            Fraction(seconds * permille, UNCHANGED_PERMILLE)
            for permille, seconds in seconds_by_permille.items()
        ),
        _NONE,
    )
    qos_permille = rate.qos_permille.get(use.qos, UNCHANGED_PERMILLE)
    exact = hourly * weighted_s * qos_permille / UNCHANGED_PERMILLE / HOUR_S
    minimum = rate.minimum if use.least is None else use.least
    amount = apply_minimum_and_end(exact, rate, end_permille, minimum)
    lines = [*_list_tres_lines(use, rate, hourly), *_list_time_lines(seconds_by_permille)]
    if qos_permille != UNCHANGED_PERMILLE:
        lines.append(PriceLine(description=f"QOS {use.qos}: x {_format_factor(qos_permille)}"))
    lines.append(PriceLine(description="price for this time", amount=round_half_up(exact)))
    if exact < minimum:
        lines.append(PriceLine(description="minimum", amount=minimum))
    if end_permille != UNCHANGED_PERMILLE:
        state = use.state or "in its most expensive state"
        lines.append(PriceLine(description=f"ended {state}: x {_format_factor(end_permille)}"))
    lines.append(PriceLine(description="sum", amount=amount))
    return Price(amount=amount, rate=rate.number, lines=tuple(lines))


def _list_tres_lines(use: ResourceUse, rate: Rate, hourly: Fraction) -> list[PriceLine]:
    """List the steps that compute the hourly price."""
    lines = [
        PriceLine(
            description=(
                f"{_format_tres_amount(name, amount)} x {format_money(rate.weights[name])} an hour"
            ),
            amount=round_half_up(cost),
        )
        for name, amount, cost in list_weighted_tres(use.tres, rate)
    ]
    combination = "most expensive" if rate.combine == "max" else "sum"
    lines.append(PriceLine(description=f"{combination} per hour", amount=round_half_up(hourly)))
    return lines


def _list_time_lines(seconds_by_permille: Mapping[int, int]) -> list[PriceLine]:
    """List the durations with their factors."""
    return [
        PriceLine(
            description=_format_duration(seconds)
            + (f" at x {_format_factor(permille)}" if permille != UNCHANGED_PERMILLE else "")
        )
        for permille, seconds in seconds_by_permille.items()
    ]


def _format_tres_amount(name: str, amount: int) -> str:
    """Format an amount of a TRES."""
    if not is_size(name):
        return f"{amount:,} {name}"
    whole, rest = divmod(amount, _GIB)
    return f"{whole:,} GiB {name}" if not rest else f"{amount / _GIB:,.2f} GiB {name}"


def _format_factor(permille: int) -> str:
    return f"{permille / UNCHANGED_PERMILLE:g}"


def _format_duration(seconds: int) -> str:
    days, rest_s = divmod(seconds, 86400)
    text = f"{rest_s // 3600:02}:{rest_s // 60 % 60:02}:{rest_s % 60:02}"
    return f"{days}-{text}" if days else text
