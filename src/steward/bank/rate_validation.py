"""Rate validation: check weights, factors and minimum of a rate before it is stored.

:func:`check_rate` rejects a rate that is invalid anywhere; :func:`list_rate_warnings` warns about
parts that this cluster does not have; :func:`format_rate` formats a rate for people, as they type
the parts that :func:`parse_weights`, :func:`parse_factors` and :func:`parse_time_factors` read.

A rate for a TRES that no job can be allocated would silently charge nothing. Hence the check
rejects such names.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from steward.bank.errors import BankUsage
from steward.bank.money import MICRO, parse_money
from steward.bank.records import TimeFactor
from steward.core.layouts import format_exact_money

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction
    from steward.bank.records import Rate
    from steward.slurm.cluster_model import ClusterModel


_PLAIN_TRES: Final = ("cpu", "mem", "node", "billing")
"""TRES without a name after a slash."""
_NAMED_TRES: Final = re.compile(r"gres/[\w.-]+(?::[\w.+-]+)?|(?:license|bb)/[\w.@+-]+", re.ASCII)
"""TRES with a name, and for GRES an optional type."""
_MEASURED_TRES: Final = re.compile(r"energy|vmem|pages|(?:fs|ic)/.*")
"""TRES that Slurm measures and does not allocate to jobs."""
_SUGGESTIONS: Final = {
    "core": "cpu",
    "cores": "cpu",
    "ram": "mem",
    "gpu": "gres/gpu",
    "gpus": "gres/gpu",
    "gres": "gres/gpu",
    "gres/gpus": "gres/gpu",
    "lic": "license/NAME",
    "licence": "license/NAME",
    "license": "license/NAME",
    "licenses": "license/NAME",
}
"""Frequent mistakes and the TRES that was meant."""
_ANY_PARTITION: Final = "*"
"""Partition of rates that apply to every partition without its own rate."""
_KINDS: Final = ("gres", "license", "bb")
"""Kinds of TRES that have a name."""
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
"""Names of weekdays in rates, Monday first."""
_TIME_FACTOR: Final = re.compile(r"([a-z,-]+)/([\d:]+)-([\d:]+)=([\d.]+)")
"""A factor by time: days/begin-end=factor."""
_PERMILLE: Final = 1000
"""Factors are integers in thousandths."""
_VALID_NAMES: Final = "cpu, mem, node, billing, gres/NAME, gres/NAME:TYPE, license/NAME, bb/NAME"
"""Valid TRES names, for error messages."""


def check_rate(rate: "Rate") -> None:
    """Reject an invalid rate.

    Raises:
        BankUsage: It has neither a price nor the mark "free", or both; a price or factor is
            negative; it weighs an unknown TRES; a factor covers no time.
    """
    if not rate.free and not rate.weights:
        raise BankUsage("the rate has no price: give `weights`, or `free`")
    if rate.free and (rate.weights or rate.minimum):
        raise BankUsage("a free rate cannot have weights or a minimum: remove them, or `free`")
    if rate.minimum < 0 or any(amount < 0 for amount in rate.weights.values()):
        raise BankUsage("invalid rate: a weight or the minimum is negative. Give 0 or more")
    for name, permille in (*rate.qos_permille.items(), *rate.ends_permille.items()):
        if permille < 0:
            raise BankUsage(f"the factor of {name} is negative: give 0 or more", permille)
    check_tres_names(rate.weights)
    for factor in rate.factors:
        _check_factor(factor)


def list_rate_warnings(t: "Transaction", rate: "Rate") -> tuple[str, ...]:
    """Return warnings about a rate, by the last model of its cluster.

    Args:
        t: Transaction of the ledger, which stores cluster models.
        rate: The rate.
    """
    model = t.read_model(rate.cluster)
    if model is None:
        return ()
    return (*list_weight_warnings(rate.weights, model), *_list_partition_warnings(rate, model))


def check_tres_names(names: Iterable[str]) -> None:
    """Reject TRES names that Slurm would show of no job.

    Valid names are those of AccountingStorageTRES in slurm.conf(5) that jobs are allocated.

    Raises:
        BankUsage: A name is invalid; the message suggests the nearest valid one.
    """
    for name in names:
        if _MEASURED_TRES.fullmatch(name):
            raise BankUsage(
                f"{name} is a measurement, not an allocated TRES: use one of {_VALID_NAMES}", name
            )
        if name not in _PLAIN_TRES and (name in _SUGGESTIONS or not _NAMED_TRES.fullmatch(name)):
            suggestion = _suggest_tres_name(name)
            raise BankUsage(
                f"unknown TRES {name!r}: use {suggestion or f'one of {_VALID_NAMES}'}",
                name,
            )


def list_weight_warnings(names: Iterable[str], model: "ClusterModel") -> tuple[str, ...]:
    """Return warnings about weights of TRES that no node of a cluster has."""
    available = {name for shape in model.shapes for name in shape.tres}
    available |= {name.partition(":")[0] for name in available}
    warnings = []
    for name in names:
        if name.startswith("gres/") and name not in available:
            hint = f"; the cluster has {', '.join(sorted(available))}" if available else ""
            warnings.append(f"no node of cluster {model.cluster} has {name} now{hint}")
        if name.startswith("bb/"):
            warnings.append(f"SU holds include {name} only after the next poll, not at submit")
    return tuple(warnings)


def _list_partition_warnings(rate: "Rate", model: "ClusterModel") -> tuple[str, ...]:
    """Return a warning if the cluster lacks the rate's partition."""
    if rate.partition == _ANY_PARTITION or rate.partition in model.partitions:
        return ()
    partitions = ", ".join(sorted(model.partitions))
    hint = f"it has {partitions}" if partitions else "it has none"
    return (f"cluster {model.cluster} has no partition {rate.partition} now; {hint}",)


def _check_factor(factor: TimeFactor) -> None:
    """Reject a factor that covers no time or is negative."""
    are_days_valid = all(0 <= day <= 6 for day in factor.days) and factor.days
    if (
        not are_days_valid
        or not 0 <= factor.begin_min < factor.end_min <= 1440
        or factor.permille < 0
    ):
        raise BankUsage(
            "invalid factor by time: give days, a period of the day and a number of 0 or more"
        )


def _suggest_tres_name(name: str) -> str:
    """Guess the TRES name that was meant; "" if unclear."""
    lower_name = name.lower()
    if lower_name in _SUGGESTIONS:
        return _SUGGESTIONS[lower_name]
    kind, separator, rest = lower_name.partition("/")
    if not separator:
        return next(iter(get_close_matches(lower_name, _PLAIN_TRES)), "")
    kind_meant = next(iter(get_close_matches(kind, _KINDS)), "")
    suggestion = f"{kind_meant}/{name.partition('/')[2]}" if kind_meant and rest else ""
    return _SUGGESTIONS.get(suggestion, suggestion) if _NAMED_TRES.fullmatch(suggestion) else ""


def format_rate(rate: "Rate") -> str:
    """Format a rate for people, as it would be typed."""
    if rate.free:
        return "free"
    weights = [f"{name}={_format_number(amount)}" for name, amount in rate.weights.items()]
    parts = [", ".join(weights)]
    parts += ["most expensive TRES"] if rate.combine == "max" and len(rate.weights) > 1 else []
    parts += [f"at least {_format_number(rate.minimum)}"] if rate.minimum else []
    parts += ["whole nodes"] if rate.whole_nodes else []
    parts += [f"{name}: x{_format_permille(value)}" for name, value in rate.qos_permille.items()]
    parts += [
        f"{_format_factor_time(factor)}: x{_format_permille(factor.permille)}"
        for factor in rate.factors
    ]
    parts += [f"{name}: x{_format_permille(value)}" for name, value in rate.ends_permille.items()]
    return "; ".join(part for part in parts if part)


def _format_number(amount: int) -> str:
    return format_exact_money(amount).rstrip("0").rstrip(".")


def _format_permille(value: int) -> str:
    return f"{value / _PERMILLE:.3f}".rstrip("0").rstrip(".")


def _format_factor_time(factor: TimeFactor) -> str:
    days = ",".join(DAYS[day] for day in factor.days)
    begin, end = divmod(factor.begin_min, 60), divmod(factor.end_min, 60)
    return f"{days}/{begin[0]:02}:{begin[1]:02}-{end[0]:02}:{end[1]:02}"


def parse_weights(values: Iterable[str]) -> dict[str, int]:
    """Parse TRES weights such as ``cpu=1,mem=0.1`` into micro-SU by TRES.

    Raises:
        BankUsage: A part is malformed or names no TRES.
    """
    weights = {name: parse_money(value) for name, value in _split_pairs(values, "cpu=1")}
    check_tres_names(weights)
    return weights


def parse_factors(values: Iterable[str]) -> dict[str, int]:
    """Parse factors such as ``lowprio=0.5`` into thousandths by name.

    Raises:
        BankUsage: A part is malformed.
    """
    return {name: parse_permille(value) for name, value in _split_pairs(values, "NODE_FAIL=0.5")}


def parse_permille(text: str) -> int:
    """Parse a factor such as ``0.5`` into thousandths.

    Raises:
        BankUsage: It is negative, or has more than three decimals.
    """
    permille, remainder = divmod(parse_money(text) * _PERMILLE, MICRO)
    if permille < 0 or remainder:
        raise BankUsage(f"invalid factor {text}: give 0 or more, with up to three decimals", text)
    return permille


def parse_time_factors(values: Iterable[str]) -> tuple[TimeFactor, ...]:
    """Parse factors by time, such as ``sat-sun/0-24=0.5`` or ``mon-fri/08:00-18:30=1.5``.

    Raises:
        BankUsage: A part is malformed.
    """
    factors = []
    for value in values:
        match = _TIME_FACTOR.fullmatch(value.lower())
        if not match:
            raise BankUsage(f"invalid factor by time {value!r}: write sat-sun/0-24=0.5", value)
        days, begin, end, factor = match.groups()
        factors.append(
            TimeFactor(
                days=_parse_days(days), begin_min=_parse_minute(begin), end_min=_parse_minute(end),
                permille=parse_permille(factor),
            )
        )  # fmt: skip
    return tuple(factors)


def _parse_days(text: str) -> tuple[int, ...]:
    """Parse days such as ``mon-fri,sun`` into numbers, Monday 0."""
    days: set[int] = set()
    for day_range in text.split(","):
        first, dash, last = day_range.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise BankUsage(f"invalid day {day_range!r}: write {', '.join(DAYS)}", day_range)
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % len(DAYS) if dash else 0
        days |= {(begin + step) % len(DAYS) for step in range(count + 1)}
    return tuple(sorted(days))


def _parse_minute(text: str) -> int:
    """Parse a time of day such as ``8`` or ``18:30`` into minutes after midnight."""
    hour, _, minute = text.partition(":")
    if hour.isdecimal() and (minute or "0").isdecimal() and len(hour) <= 2 and len(minute) <= 2:
        minutes = int(hour) * 60 + int(minute or 0)
        if minutes <= 24 * 60 and int(minute or 0) < 60:
            return minutes
    raise BankUsage(f"invalid time of day {text!r}: write 8, 08:00 or 24", text)


def _split_pairs(values: Iterable[str], example: str) -> Iterable[tuple[str, str]]:
    """Split comma-separated NAME=VALUE pairs."""
    for pair in filter(None, ",".join(values).split(",")):
        name, separator, value = pair.rpartition("=")
        if not separator or not name:
            raise BankUsage(f"cannot parse {pair!r}: write {example}", pair)
        yield name, value
