"""Balance history of an account: each day shows its own transfers, in every zone."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from harness.empty_ledger import empty, place
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.ledger.ledger import Ledger
from steward.bank.ledger.records import Account
from steward.bank.money import MICRO
from steward.bank.records import Charge
from steward.core.config import Settings

__all__ = ["empty", "place"]

_HOUR = timedelta(hours=1)


@pytest.fixture
def ledger(place: Settings) -> Iterator[Ledger]:
    made = open_ledger(place)
    yield made
    made.close()


# Clocks go forward and back at midnight in Cuba, by half an hour on Lord Howe.
@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("UTC", datetime(2026, 3, 1, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 3, 29, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 10, 25, tzinfo=UTC)),
        ("America/Havana", datetime(2026, 3, 8, tzinfo=UTC)),
        ("America/Havana", datetime(2026, 11, 1, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2026, 4, 5, tzinfo=UTC)),
        ("Asia/Kathmandu", datetime(2026, 5, 1, tzinfo=UTC)),
    ],
)
def test_each_day_has_what_moved_in_it(ledger: Ledger, name: str, about: datetime) -> None:
    zone = ZoneInfo(name)
    begin = about - timedelta(days=3)
    wanted: dict[str, int] = {}
    with ledger.transaction() as t:
        by = Authorship(who="root", why="test", at=begin - timedelta(days=5))
        t.accounts.create(Account(name="physics"), by)
        made = t.allocations.create(
            "physics",
            10**6 * MICRO,
            by,
            begin=begin - timedelta(days=5),
            end=begin + 99 * 24 * _HOUR,
        )
        for hour in range(6 * 24):
            at = begin + hour * _HOUR + timedelta(minutes=15 * (hour % 4), microseconds=1)
            cost = (hour + 1) * MICRO
            charge = Charge(
                cluster="c", job_id=hour + 1, first_submit=at, account="physics", amount=cost
            )
            t.charges.post(charge, Authorship(who="bank", why="end", at=at))
            day = at.astimezone(zone).date().isoformat()
            wanted[day] = wanted.get(day, 0) + cost
    end = begin + 6 * 24 * _HOUR
    with ledger.reading() as t:
        numbers = [one.number for one in t.allocations.list_own("physics", with_ended=True)]
        assert made.number in numbers
        days = t.balance_history.list_days(numbers, begin, end, zone)
    assert {one.day: one.spent for one in days if one.spent} == wanted
    assert [one.day for one in days] == sorted(one.day for one in days)
    left = 10**6 * MICRO
    for one in days:
        left -= wanted.get(one.day, 0)
        assert one.balance == left, one.day
