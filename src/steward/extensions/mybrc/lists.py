"""The lists of users and partitions of the myBRC API."""

import re
from datetime import datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.errors import NoRate
from steward.bank.ledger import NO_ACCOUNT
from steward.bank.money import MICRO, plain
from steward.bank.prices import rate_for
from steward.bank.records import Rate
from steward.extensions.mybrc.errors import ApiError
from steward.extensions.mybrc.shapes import Partition, PartitionPage, User, UserPage
from steward.extensions.mybrc.telling import PAGE
from steward.slurm.picture import Picture

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger, Transaction

_USERNAME: Final = re.compile(r"[a-zA-Z]{3,150}")
"""What the API's own schema allows."""
_NO_DOMAIN: Final = "localhost"


def users(ledger: "Ledger", domain: str, number: int) -> UserPage:
    """One page of the users that the bank knows; its links are for the caller to make.

    Raises:
        ApiError: There is no such page.
    """
    with ledger.reading() as t:
        accounts = [one.name for one in t.accounts.all(unknown=True) if one.name != NO_ACCOUNT]
        names = sorted({member.user for name in accounts for member in t.accounts.users(name)})
    begin = _begin(number, len(names))
    shown = (
        # The schema has no room for names with digits or dashes in them: the address tells them.
        User(
            username=name if _USERNAME.fullmatch(name) else None,
            email=name if "@" in name else f"{name}@{domain or _NO_DOMAIN}",
        )
        for name in names[begin : begin + PAGE]
    )
    return UserPage(count=len(names), results=tuple(shown))


def partitions(ledger: "Ledger", cluster: str, now: datetime, number: int) -> PartitionPage:
    """One page of the partitions that Slurm has or that have a rate.

    Raises:
        ApiError: There is no such page.
    """
    with ledger.reading() as t:
        rates = t.rates.all()
        picture = _pictured(t, cluster)
    names = {rate.partition for rate in rates if rate.cluster in ("", cluster)} - {"*"}
    every = sorted(names | set(picture.partitions))
    begin = _begin(number, len(every))
    shown = (
        _partition(name, picture, _core_hour(rates, cluster, name, now))
        for name in every[begin : begin + PAGE]
    )
    return PartitionPage(count=len(every), results=tuple(shown))


def _begin(number: int, count: int) -> int:
    begin = (number - 1) * PAGE
    if number < 1 or (number > 1 and begin >= count):
        raise ApiError(404, "Invalid page.")
    return begin


def _pictured(t: "Transaction", cluster: str) -> Picture:
    text = t.mark(f"picture:{cluster}")
    try:
        return msgspec.json.decode(text, type=Picture) if text else Picture(cluster=cluster)
    except msgspec.DecodeError:
        # An older Steward's, until a new one is taken: names and rates are known.
        return Picture(cluster=cluster)


def _partition(name: str, picture: Picture, su: str | None) -> Partition:
    of = picture.partitions.get(name)
    if of is None:
        return Partition(name=name, su_per_core_hour=su)
    cores = sum(count * picture.shapes[shape].cores for shape, count in of.shapes)
    return Partition(
        name=name,
        shared=not of.exclusive,
        num_nodes=of.nodes,
        num_cores=cores,
        su_per_core_hour=su,
    )


def _core_hour(rates: list[Rate], cluster: str, partition: str, now: datetime) -> str | None:
    """What an hour of a core costs, by its CPUs alone; None where there is no rate."""
    try:
        rate = rate_for(rates, cluster, partition, "", now)
    except NoRate:
        return None
    weight = 0 if rate.free else rate.weights.get("cpu", 0)
    text = plain(weight)
    places = 2 if Fraction(weight, MICRO // 100).denominator == 1 else 6
    return text[: text.index(".") + 1 + places]
