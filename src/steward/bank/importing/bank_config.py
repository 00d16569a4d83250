"""Prices from the ``bank-config.toml`` of slurm-banking-plugins.

It has a price of a CPU hour for each partition, and multipliers for QOSes
(``PartitionPrice`` and ``QosMultiplier``); both may be written as text. There a
QOS that is not named counts once, and a partition that is not named is refused:
so it is here.
"""

import tomllib
from decimal import Decimal
from typing import Any, Final

from steward.bank import money
from steward.bank.errors import BankUsage
from steward.bank.importing.plan import Plan, named
from steward.bank.records import Rate

_PERMILLE: Final = 1000
_DIGITS: Final = 30
_SHOWN: Final = 200
_KNOWN: Final = frozenset({"Enable", "PartitionPrice", "QosMultiplier", "API"})


def read(text: str, cluster: str) -> Plan:
    """The plan that a file makes: a rate for each partition.

    Args:
        text: The file.
        cluster: Whose partitions these are.

    Raises:
        BankUsage: It is no such file, or a price is none.
    """
    try:
        found = tomllib.loads(text, parse_float=Decimal)
    except RecursionError as error:
        raise BankUsage("that is no TOML: it is nested too deeply", text[:_SHOWN]) from error
    except ValueError as error:
        # Of TOML's own kind; or of Python, where a number has thousands of digits.
        raise BankUsage(f"that is no TOML: {error}", text[:_SHOWN]) from error
    prices = _table(found, "PartitionPrice")
    if not prices:
        raise BankUsage("the file has no [PartitionPrice]: is it a bank-config.toml?")
    qos = {
        named(name, "a QOS"): _permille(name, value)
        for name, value in _table(found, "QosMultiplier").items()
    }
    plan = Plan()
    for partition, value in prices.items():
        plan.rates.append(_rate(cluster, named(partition, "a partition"), value, qos))
    if "Enable" in found:
        switches = ", ".join(f"{name} = {value}" for name, value in _table(found, "Enable").items())
        plan.remarks.append(
            f"[Enable] is not taken over ({switches[:_SHOWN]}): 'steward bank enforce' says "
            "whether jobs are refused, and charges are on where [bank] enabled is"
        )
    if "API" in found:
        plan.remarks.append(
            "[API] is not taken over: [bank.remote] passes charges on to a myBRC server"
        )
    plan.remarks += [f"[{name}] is not known, and left out" for name in found if name not in _KNOWN]
    return plan


def _rate(cluster: str, partition: str, value: Any, qos: dict[str, int]) -> Rate:
    amount = _amount(partition, value)
    return Rate(
        cluster=cluster,
        partition=partition,
        weights={"cpu": amount} if amount else {},
        # Written down as free, where it stood there with a price of nothing.
        free=not amount,
        qos_permille={name: factor for name, factor in qos.items() if factor != _PERMILLE}
        if amount
        else {},
        note="from bank-config.toml",
    )


def _table(found: dict[str, Any], name: str) -> dict[str, Any]:
    table = found.get(name, {})
    if not isinstance(table, dict):
        raise BankUsage(f"{name} is no table", name)
    return table


def _amount(partition: str, value: Any) -> int:
    amount = money.parse(_text(partition, value))
    if amount < 0:
        raise BankUsage(f"{partition} costs less than nothing", value)
    return amount


def _permille(qos: str, value: Any) -> int:
    amount = money.parse(_text(qos, value))
    factor, rest = divmod(amount * _PERMILLE, money.MICRO)
    if amount < 0 or rest:
        raise BankUsage(f"the multiplier of {qos} has more than three decimals", value)
    return factor


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        raise BankUsage(f"{name} is no number: {value!r}", value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise BankUsage(f"{name} is no number: {value}", value)
        if max(abs(value.adjusted()), len(value.as_tuple().digits)) > _DIGITS:
            # Written out it would be as long as its exponent is large.
            raise BankUsage(f"{name} is beyond any amount: {value:.3e}", str(value)[:_SHOWN])
        return f"{value:f}"
    return str(value)
