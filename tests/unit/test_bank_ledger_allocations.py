"""Choice of the allocations that pay, for any balances and amounts."""

from datetime import timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ledger.fixtures import NOON
from steward.bank.ledger.allocations import (
    divide_payment,
    divide_repayment,
    excess_over_credit,
    sort_by_end,
)
from steward.bank.ledger.records import Allocation
from steward.bank.records import AllocationShare

AMOUNTS = st.integers(0, 1000)


@st.composite
def purses(draw: st.DrawFn) -> list[Allocation]:
    """Generate allocations of an account in any order, with the open-ended one among them."""
    balances = draw(st.lists(AMOUNTS, max_size=5))
    days = draw(st.lists(st.integers(1, 3), min_size=len(balances), max_size=len(balances)))
    made = [
        Allocation(
            number=number + 2,
            account="phys",
            begin=NOON,
            end=NOON + timedelta(days=day),
            balance=balance,
        )
        for number, (balance, day) in enumerate(zip(balances, days, strict=True))
    ]
    made.append(
        Allocation(number=1, account="phys", begin=NOON, balance=draw(st.integers(-50, 1000)))
    )
    return draw(st.permutations(made))


SHARES = st.lists(
    st.builds(AllocationShare, allocation=st.integers(1, 8), amount=AMOUNTS), max_size=4
)


@given(AMOUNTS, purses(), SHARES)
def test_all_of_it_is_paid_and_only_the_open_ended_one_owes(
    amount: int, purse: list[Allocation], shares: list[AllocationShare]
) -> None:
    taken = divide_payment(amount, purse, shares)
    assert sum(taken.values()) == amount
    assert all(part > 0 for part in taken.values())
    left = {each.number: each.balance - taken.get(each.number, 0) for each in purse}
    assert all(left[number] >= 0 for number in left if number != 1)
    if left[1] < min(0, next(each.balance for each in purse if each.number == 1)):
        assert all(left[number] == 0 for number in left if number != 1)


@given(AMOUNTS, purses())
def test_nothing_is_taken_while_an_earlier_end_has_some(
    amount: int, purse: list[Allocation]
) -> None:
    taken = divide_payment(amount, purse)
    ordered = sort_by_end(purse)
    assert ordered[-1].number == 1
    for before, after in pairwise(ordered):
        if taken.get(after.number):
            assert taken.get(before.number, 0) == before.balance


@given(AMOUNTS, purses(), SHARES)
def test_a_share_is_used_before_all_else(
    amount: int, purse: list[Allocation], shares: list[AllocationShare]
) -> None:
    first = [share for share in shares if any(e.number == share.allocation for e in purse)][:1]
    taken = divide_payment(amount, purse, first)
    for share in first:
        balance = next(e.balance for e in purse if e.number == share.allocation)
        assert taken.get(share.allocation, 0) >= min(amount, share.amount, max(balance, 0))


@given(AMOUNTS, st.integers(0, 100), purses())
def test_what_comes_back_was_paid(amount: int, percent: int, purse: list[Allocation]) -> None:
    paid = divide_payment(amount, purse)
    wanted = amount * percent // 100
    back = divide_repayment(wanted, paid, purse)
    assert sum(back.values()) == wanted
    assert all(part <= paid[number] for number, part in back.items())
    rest = {number: part - back.get(number, 0) for number, part in paid.items()}
    assert {n: p for n, p in rest.items() if p} == divide_payment(amount - wanted, purse)


def test_what_is_owed_beyond_the_credit() -> None:
    assert [excess_over_credit(balance, 10) for balance in (5, -5, -10, -11)] == [0, 0, 0, 1]
