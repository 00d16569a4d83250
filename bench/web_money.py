"""The money of a made-up cluster: accounts with an allocation each, and what its jobs cost.

The ledger is filled as the bank fills it, a charge for each run by the bank's own reckoning,
but each at the time at which its run ended, so that the ledger's days are those of the jobs.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from steward.bank.billing import compute_charge
from steward.bank.gate_sync import load_pricing
from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Rate
from steward.core.config import Settings
from steward.core.records import JobRecord
from steward.core.usage import RunEvent

ACCOUNTS: Final = 12
_GIVEN: Final = 50_000_000 * MICRO
_MORE: Final = 50_000 * MICRO
_MORE_EVERY: Final = timedelta(days=7)
_LIMIT: Final = 20_000_000 * MICRO
_AT_ONCE: Final = 1000


def account(number: int) -> str:
    """An account's name; numbers beyond the last begin anew."""
    return f"account{number % ACCOUNTS:02}"


def fill(
    settings: Settings,
    cluster: str,
    records: Iterable[JobRecord],
    *,
    owner: str,
    begin: datetime,
    end: datetime,
) -> int:
    """Open the accounts, and charge every run that is over; how many were.

    Args:
        settings: The daemon's.
        cluster: The cluster's name.
        records: Its jobs.
        owner: Who looks after all accounts.
        begin: When the allocations begin.
        end: When they end.
    """
    over = [one for one in records if one.start is not None and one.end is not None]
    over.sort(key=lambda one: (_end(one), one.job_id))
    _open(settings, cluster, over, owner=owner, begin=begin, end=end)
    ledger = open_ledger(settings)
    pricing = load_pricing(settings, ledger, cluster)
    more_at = begin + _MORE_EVERY
    for first in range(0, len(over), _AT_ONCE):
        with ledger.transaction() as t:
            for record in over[first : first + _AT_ONCE]:
                at = _end(record)
                while more_at <= at:
                    for number in range(ACCOUNTS):
                        by = Authorship(who="root", why="the week's share", at=more_at)
                        t.transfers.deposit(account(number), _MORE, by)
                    more_at += _MORE_EVERY
                assert record.submit is not None
                fact = RunEvent(
                    job_id=record.job_id, first_submit=record.submit, restarts=0, record=record
                )
                charge = compute_charge(cluster, fact, pricing)
                if charge is not None:
                    t.charges.post(charge, Authorship(who="bank", why=charge.why, at=at))
    ledger.close()
    return len(over)


def _open(
    settings: Settings,
    cluster: str,
    records: Iterable[JobRecord],
    *,
    owner: str,
    begin: datetime,
    end: datetime,
) -> None:
    by = Authorship(who="root", why="the year's call", at=begin)
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        weights = {"cpu": MICRO, "mem": MICRO // 10}
        t.rates.add(Rate(cluster=cluster, weights=weights, valid_from=begin), by)
        for number in range(ACCOUNTS):
            t.accounts.create(Account(name=account(number), owners=(owner,)), by)
            t.allocations.create(account(number), _GIVEN, by, begin=begin, end=end)
        for name, user in sorted({(one.account, one.user) for one in records}):
            t.accounts.set_user(name, user, by, limit=_LIMIT)
    ledger.close()


def _end(record: JobRecord) -> datetime:
    assert record.end is not None
    return record.end
