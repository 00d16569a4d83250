"""Ledger for tests, with a clock that only the test moves.

A module that imports the fixtures defines a fixture `place`, which returns the settings to open the
ledger with.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from steward.bank.ledger import Account, Allocation, Authorship, open_ledger
from steward.bank.ledger.ledger import Ledger, Transaction
from steward.bank.records import AllocationShare, Charge, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.config import Settings

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
BY = Authorship(who="root", why="a test")
DAY = timedelta(days=1)


class Clock:
    """Clock of the ledger."""

    def __init__(self) -> None:
        self.at = NOON

    def __call__(self) -> datetime:
        return self.at

    def go(self, **passed: float) -> datetime:
        """Advance the clock: ``go(hours=3)``."""
        self.at += timedelta(**passed)
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(place: Settings, clock: Clock) -> Iterator[Ledger]:
    """Open an empty ledger; run its proof at the end unless the test did so."""
    opened = open_ledger(place, clock)
    yield opened
    found = opened.check()
    opened.close()
    assert not found


def settings_for(state_dir: str, database: str = "") -> Settings:
    """Return settings of a bank whose ledger is in a directory, or in a database."""
    return Settings(state_dir=state_dir, bank=BankSettings(enabled=True, database=database))


def keyed(key: str) -> Authorship:
    """Return an author with an idempotency key."""
    return msgspec.structs.replace(BY, key=key)


def account(t: Transaction, name: str, money: int = 0, **options: object) -> None:
    """Create an account with this amount in its open-ended allocation."""
    t.accounts.create(Account(name=name, **options), BY)  # type: ignore[arg-type]
    if money:
        t.transfers.deposit(name, money, BY)


def allocation(
    t: Transaction,
    name: str,
    amount: int,
    *,
    begin: datetime = NOON - DAY,
    end: datetime = NOON + DAY,
    rollover: str = "none",
) -> Allocation:
    """Create an allocation of an account."""
    return t.allocations.create(
        name,
        amount,
        BY,
        begin=begin,
        end=end,
        rollover=rollover,  # type: ignore[arg-type]
    )


def charge(
    amount: int,
    name: str = "phys",
    *,
    job_id: int = 1,
    user: str = "ann",
    start: datetime = NOON,
    shares: tuple[AllocationShare, ...] = (),
    **options: object,
) -> Charge:
    """Return the charge of a job of ann's that started at noon."""
    return Charge(
        cluster="tux",
        job_id=job_id,
        first_submit=NOON,
        account=name,
        user=user,
        partition="cpu",
        amount=amount,
        use=ResourceUse(tres={"cpu": 1}, start=start, seconds=60),
        shares=shares,
        **options,  # type: ignore[arg-type]
    )


def balances(t: Transaction, name: str) -> dict[int, int]:
    """Return the balance of each allocation of an account."""
    return {each.number: each.balance for each in t.allocations.list_own(name, with_ended=True)}
