"""Which allocations pay: pure arithmetic over what is in them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from steward.bank.ledger.records import Allocation
from steward.bank.records import Share

_NEVER: Final = 2**63


def in_order_of_end(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Allocations as they are drawn on: those that end first go first, the open-ended one last."""
    return sorted(allocations, key=_order)


def _order(allocation: Allocation) -> tuple[float, int]:
    end = allocation.end
    return (_NEVER if end is None else end.timestamp(), allocation.number)


def drawn(
    amount: int,
    allocations: Sequence[Allocation],
    shares: Sequence[Share] = (),
    already: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """What each allocation pays of an amount.

    First those named in ``shares``, as far as they are held for it and there is something in
    them; then the others in the order of their end; what is still missing takes the open-ended
    one below zero.

    Args:
        amount: To be paid.
        allocations: All that may pay, the open-ended one among them.
        shares: Which are to pay first, and how much.
        already: What each has paid of its share before.
    """
    ordered = in_order_of_end(allocations)
    left = {each.number: max(each.balance, 0) for each in ordered}
    taken: dict[int, int] = {}

    def take(number: int, most: int) -> None:
        nonlocal amount
        part = min(amount, most, left.get(number, 0))
        if part > 0:
            taken[number] = taken.get(number, 0) + part
            left[number] -= part
            amount -= part

    for share in shares:
        take(share.allocation, share.amount - (already or {}).get(share.allocation, 0))
    for each in ordered:
        take(each.number, amount)
    if amount:
        open_ended = ordered[-1].number
        taken[open_ended] = taken.get(open_ended, 0) + amount
    return taken


def returned(
    amount: int, paid: Mapping[int, int], allocations: Sequence[Allocation]
) -> dict[int, int]:
    """What each allocation gets back of an amount that it paid: the last that was drawn first.

    Args:
        amount: To be given back; no more than was paid.
        paid: What each has paid.
        allocations: At least those that have.
    """
    given: dict[int, int] = {}
    for each in reversed(in_order_of_end(allocations)):
        part = min(amount, paid.get(each.number, 0))
        if part > 0:
            given[each.number] = part
            amount -= part
    return given


def beyond(balance: int, credit: int) -> int:
    """How far an open-ended allocation is below what its account may owe."""
    return max(0, -balance - credit)
