from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.ledger.ledger import Ledger, Transaction
from steward.bank.money import MICRO
from steward.bank.notices import keep_highest_thresholds, queue_threshold_notices
from steward.bank.records import Charge
from steward.bank.settings import BankSettings
from steward.core.config import Settings

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BY = Authorship(who="root")
SETTINGS = BankSettings(enabled=True)
SPENT: tuple[tuple[int, list[int]], ...] = ((50, []), (30, [75]), (5, []), (20, [90, 100]), (0, []))


def spend(t: Transaction, job_id: int, amount: int) -> None:
    charge = Charge(
        cluster="c1", job_id=job_id, first_submit=NOW, account="physics", amount=amount * MICRO
    )
    t.charges.post(charge, BY)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(Settings(state_dir=str(tmp_path), bank=SETTINGS), lambda: NOW)
    yield ledger
    ledger.close()


def test_each_share_is_told_once_and_again_after_a_deposit(ledger: Ledger) -> None:
    with ledger.transaction() as t:
        t.accounts.create(Account(name="physics"), BY)
        t.transfers.deposit("physics", 100 * MICRO, BY)
    for job_id, (amount, said) in enumerate(SPENT, start=1):
        with ledger.transaction() as t:
            spend(t, job_id, amount)
            told = queue_threshold_notices(t, t.export_books().accounts, SETTINGS, NOW)
        assert [one.value for one in told if one.kind == "used"] == said
    with ledger.transaction() as t:
        t.transfers.deposit("physics", 1000 * MICRO, BY)
        assert queue_threshold_notices(t, t.export_books().accounts, SETTINGS, NOW) == []
        spend(t, 99, 900)
        told = queue_threshold_notices(t, t.export_books().accounts, SETTINGS, NOW)
    assert [one.value for one in told] == [75, 90]
    assert [one.value for one in keep_highest_thresholds(told)] == [90]


def test_the_end_is_told_when_it_is_near(ledger: Ledger) -> None:
    with ledger.transaction() as t:
        t.accounts.create(Account(name="physics"), BY)
        t.allocations.create("physics", MICRO, BY, begin=NOW, end=NOW + timedelta(days=40))
        assert queue_threshold_notices(t, t.export_books().accounts, SETTINGS, NOW) == []
        (told,) = queue_threshold_notices(
            t, t.export_books().accounts, SETTINGS, NOW + timedelta(days=11)
        )
        assert (told.kind, told.value, told.balance) == ("ends", 29, MICRO)
        assert (
            queue_threshold_notices(
                t, t.export_books().accounts, SETTINGS, NOW + timedelta(days=12)
            )
            == []
        )
