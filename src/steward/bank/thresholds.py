"""Which allocations run low or end soon, told once each, and told anew after money came in."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from steward.bank.records import AccountBooks, AllocationBooks
from steward.bank.settings import BankSettings
from steward.core.events import BankThreshold
from steward.core.timestamps import micros, moment

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction

_DAY_US: Final = 86_400_000_000


def crossed(
    account: AccountBooks, settings: BankSettings, now: datetime
) -> Iterator[tuple[BankThreshold, bool]]:
    """Every threshold of an account's allocations, and whether it is crossed."""
    now_us = micros(now)
    for one in account.allocations:
        if one.end_us and one.end_us <= now_us:
            continue
        if one.total > 0 and one.begin_us <= now_us:
            used = (one.total - one.balance) * 100 // one.total
            for percent in settings.warn_percent:
                yield _threshold(account, one, "used", percent), used >= percent
        if one.end_us and one.balance > 0:
            soon_us = settings.warn_days * _DAY_US
            days = max(0, (one.end_us - now_us) // _DAY_US)
            is_soon = one.end_us - now_us <= soon_us
            yield _threshold(account, one, "ends", settings.warn_days, days=days), is_soon


def tell(
    t: "Transaction", accounts: Iterable[AccountBooks], settings: BankSettings, now: datetime
) -> list[BankThreshold]:
    """The thresholds that were crossed since they were looked at last.

    Of several shares of one allocation all are told; whoever sends notices sends the last.

    Args:
        t: A transaction of the ledger, which remembers what was told.
        accounts: The accounts to look at.
        settings: Which shares and days are told.
        now: The present moment.
    """
    news: list[BankThreshold] = []
    for account in accounts:
        by_matter: dict[tuple[int, str], list[tuple[BankThreshold, bool]]] = {}
        for one, is_crossed in crossed(account, settings, now):
            by_matter.setdefault((one.allocation, one.kind), []).append((one, is_crossed))
        for matter, found in by_matter.items():
            is_less = t.thresholds.told(*matter) > sum(is_crossed for _, is_crossed in found)
            if is_less:
                # Money came in: what is crossed still was told, the rest is news once more.
                t.thresholds.forget(*matter)
            for one, is_crossed in found:
                value = settings.warn_days if one.kind == "ends" else one.value
                if is_crossed and t.thresholds.tell(*matter, value) and not is_less:
                    news.append(one)
    return news


def worst(told: Iterable[BankThreshold]) -> list[BankThreshold]:
    """Of each allocation the last threshold of a kind: one notice is enough."""
    found: dict[tuple[int, str], BankThreshold] = {}
    for one in told:
        key = (one.allocation, one.kind)
        before = found.get(key)
        if before is None or one.value > before.value:
            found[key] = one
    return list(found.values())


def _threshold(
    account: AccountBooks, one: AllocationBooks, kind: str, value: int, *, days: int | None = None
) -> BankThreshold:
    return BankThreshold(
        account=account.name,
        allocation=one.number,
        kind="used" if kind == "used" else "ends",
        value=value if days is None else days,
        balance=one.balance,
        total=one.total,
        end=moment(one.end_us) if one.end_us else None,
    )
