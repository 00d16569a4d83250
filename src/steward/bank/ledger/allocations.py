"""Allocations: service units granted to an account for a period, spent earliest end first.

:func:`divide_payment` and :func:`divide_repayment` divide a payment or repayment among allocations;
:class:`Allocations` creates, changes and queries them; :func:`expire_allocations` empties those
that have ended, into the next allocation (rollover "next") or into the pot of expired money.

Each account also has one open-ended allocation, which never ends and alone may go below
zero. Amounts are micro-SU.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, func, insert, or_, select, update

from steward.bank.errors import BankUsage, NotInBank
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.postings import (
    LedgerSession,
    TransferWriter,
    encode_ledger_request,
    sanitize_text,
    validate_amount,
)
from steward.bank.ledger.records import Account, Allocation, Authorship, Rollover, Transfer
from steward.bank.ledger.tables import EXPIRED, ISSUED, pot
from steward.bank.records import AllocationShare
from steward.core.timestamps import moment, to_micros

_NEVER: Final = 2**63
"""End of an open-ended allocation for sorting, after any time."""


def sort_by_end(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Sort allocations in spending order: by end, the open-ended one last."""
    return sorted(allocations, key=_end_sort_key)


def _end_sort_key(allocation: Allocation) -> tuple[float, int]:
    """Return the sort key: end, then number."""
    end = allocation.end
    return (_NEVER if end is None else end.timestamp(), allocation.number)


def divide_payment(
    amount: int,
    allocations: Sequence[Allocation],
    shares: Sequence[AllocationShare] = (),
    already: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Divide a payment among allocations.

    Allocations named in ``shares`` pay first, up to their share and their balance; then the
    others in the order of their end. The open-ended one pays the rest and may go below zero.

    Args:
        amount: Amount to pay, in micro-SU.
        allocations: All that may pay, including the open-ended one.
        shares: Allocations that pay first, and up to how much.
        already: Amount of its share that each has already paid.
    """
    ordered = sort_by_end(allocations)
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


def divide_repayment(
    amount: int, paid: Mapping[int, int], allocations: Sequence[Allocation]
) -> dict[int, int]:
    """Divide a repayment among the allocations that paid, latest end first.

    Args:
        amount: Amount to return, in micro-SU; at most the amount paid.
        paid: Amount that each allocation paid.
        allocations: At least all those that paid.
    """
    given: dict[int, int] = {}
    for each in reversed(sort_by_end(allocations)):
        part = min(amount, paid.get(each.number, 0))
        if part > 0:
            given[each.number] = part
            amount -= part
    return given


def excess_over_credit(balance: int, credit: int) -> int:
    """Return how far an open-ended balance is below the account's credit limit; 0 if not."""
    return max(0, -balance - credit)


class Allocations:
    """Allocations of accounts: create, change and query them.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
    """

    def __init__(self, session: LedgerSession, accounts: Accounts) -> None:
        self._session = session
        self._accounts = accounts

    def create(
        self,
        account: str,
        amount: int,
        by: Authorship,
        *,
        end: datetime,
        begin: datetime | None = None,
        rollover: Rollover = "none",
        note: str = "",
    ) -> Allocation:
        """Create an allocation and deposit an amount in it.

        Args:
            account: Name of the account.
            amount: Deposit, in micro-SU; 0 for none.
            by: Author, reason and idempotency key.
            end: End of the allocation.
            begin: Begin of the allocation; None for now. A later repeat with None is the same
                request.
            rollover: Use of the balance that is left at the end.
            note: Free text.

        Raises:
            BankUsage: The account does not exist, or the times or the amount are invalid.
        """
        session = self._session
        whose = require_payable(self._accounts.need(account))
        if amount:
            validate_amount(amount)
        times = (None if begin is None else to_micros(begin), to_micros(end))
        asked = encode_ledger_request("allocation.create", whose.name, amount, *times, rollover)
        done = session.done(by, asked)
        if done is not None:
            return self._made_by(done)
        begin_us = to_micros(begin or session.now(by))
        if begin_us >= to_micros(end):
            raise BankUsage("an allocation ends after it begins", account)
        number = session.value(select(func.max(pot.c.number))) + 1
        made = session.act(
            "deposit" if amount else "allocation.create",
            by,
            asked=asked,
            about=whose.name,
            amount=amount,
        )
        session.run(
            insert(pot).values(
                number=number,
                account=whose.name,
                begin_us=begin_us,
                end_us=to_micros(end),
                rollover=rollover,
                note=sanitize_text(note),
                balance=0,
                given=0,
                made_by=made,
            )
        )
        if amount:
            session.post(made, "deposit", {ISSUED: -amount, number: amount})
        return self._need(number)

    def change(
        self,
        number: int,
        by: Authorship,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
        rollover: Rollover | None = None,
        note: str | None = None,
    ) -> Allocation:
        """Change the given properties of an allocation; None leaves a property unchanged.

        Raises:
            BankUsage: The allocation does not exist, is the open-ended one, or would end before it
                begins.
        """
        session = self._session
        before = self._need(number)
        if before.end is None:
            raise BankUsage(f"allocation {number} is {before.account}'s open-ended one", number)
        given = {"begin": begin, "end": end, "rollover": rollover, "note": note}
        wanted = {key: value for key, value in given.items() if value is not None}
        asked = encode_ledger_request("allocation.change", number, wanted)
        if session.done(by, asked) is not None:
            return before
        after = msgspec.structs.replace(before, **wanted)
        if after.end is None or after.begin >= after.end:
            raise BankUsage("an allocation ends after it begins", number)
        if after != before:
            session.act("allocation.change", by, asked=asked, about=before.account)
            values = {
                "begin_us": to_micros(after.begin),
                "end_us": to_micros(after.end),
                "rollover": after.rollover,
                "note": sanitize_text(after.note),
            }
            session.run(update(pot).where(pot.c.number == number).values(values))
        return self._need(number)

    def get(self, number: int) -> Allocation | None:
        """Return the allocation of this number, or None."""
        found = self._session.row(select(pot).where(pot.c.number == number, pot.c.number > 0))
        return None if found is None else _allocation_from_row(found)

    def of(self, account: str, ended: bool = False) -> list[Allocation]:
        """List an account's own allocations, earliest end first.

        Args:
            account: The account's name.
            ended: Whether to include allocations that have ended.
        """
        chosen = select(pot).where(pot.c.account == sanitize_text(account.lower()))
        if not ended:
            now_us = to_micros(self._session.now())
            chosen = chosen.where(or_(pot.c.end_us.is_(None), pot.c.end_us > now_us))
        return self.chosen(chosen)

    def open_ended(self, account: str) -> Allocation:
        """Return the open-ended allocation of an account.

        Raises:
            BankUsage: The account does not exist.
        """
        chosen = select(pot).where(
            pot.c.account == sanitize_text(account.lower()), pot.c.end_us.is_(None)
        )
        found = self.chosen(chosen)
        if not found:
            raise NotInBank(f"there is no account {account!r}", account)
        return found[0]

    def chosen(self, statement: Any) -> list[Allocation]:
        """List the allocations that a SELECT on the table ``pot`` returns, earliest end first."""
        ordered = statement.order_by(pot.c.end_us.is_(None), pot.c.end_us, pot.c.number)
        return [_allocation_from_row(row) for row in self._session.rows(ordered)]

    def of_account(self, account: str, number: int) -> Allocation:
        """Return an allocation of this account by number; its open-ended one for 0.

        Raises:
            BankUsage: The allocation does not exist or belongs to another account.
        """
        if not number:
            return self.open_ended(account)
        found = self._need(number)
        if found.account != account.lower():
            raise BankUsage(f"allocation {number} is {found.account}'s, not {account}'s", number)
        return found

    def needed(self, numbers: Sequence[int]) -> list[Allocation]:
        """List allocations by number, earliest end first."""
        return self.chosen(select(pot).where(pot.c.number.in_(numbers), pot.c.number > 0))

    def _need(self, number: int) -> Allocation:
        """Return an allocation by number, or raise NotInBank."""
        found = self.get(number)
        if found is None:
            raise NotInBank(f"there is no allocation {number}", number)
        return found

    def _made_by(self, made: int) -> Allocation:
        """Return the allocation that a ledger transaction created."""
        (found,) = self.chosen(select(pot).where(pot.c.made_by == made))
        return found


def require_payable(account: Account) -> Account:
    """Return the account if it can receive money.

    Raises:
        BankUsage: The account is closed, or draws on its parent.
    """
    if account.closed:
        raise BankUsage(f"the account {account.name} is closed", account.name)
    if account.draws_on_parent:
        raise BankUsage(
            f"{account.name} draws on {account.parent}: give the money to that one", account.name
        )
    return account


def _allocation_from_row(row: "Row[Any]") -> Allocation:
    return Allocation(
        number=row.number,
        account=row.account,
        begin=moment(row.begin_us),
        end=None if row.end_us is None else moment(row.end_us),
        rollover=row.rollover,
        note=row.note,
        balance=row.balance,
        given=row.given,
    )


def expire_allocations(
    session: LedgerSession,
    allocations: Allocations,
    moves: TransferWriter,
    by: Authorship,
    kept: Mapping[int, int],
) -> list[Transfer]:
    """Empty the allocations that have ended: the balance expires or rolls over.

    Args:
        session: The transaction.
        allocations: The allocations of the same transaction.
        moves: Makes the transfers.
        by: Author; ``by.at`` is the present.
        kept: By allocation number, the amount that jobs which started on it may still need. It
            stays until those jobs have ended.
    """
    now_us = to_micros(session.now(by))
    ended = select(pot.c.number).where(pot.c.end_us <= now_us, pot.c.balance > 0)
    made: list[Transfer] = []
    # A rollover into an allocation that has ended too rolls on with that one's balance.
    waiting = {row.number for row in session.rows(ended)}
    while waiting:
        each = allocations.needed(list(waiting))[0]
        waiting.remove(each.number)
        amount = each.balance - max(0, kept.get(each.number, 0))
        if amount <= 0:
            continue
        target = _rollover_target(each, allocations.of(each.account, ended=True))
        made.append(_empty_allocation(moves, by, each, amount, target))
        if target is not None and target.end is not None and to_micros(target.end) <= now_us:
            waiting.add(target.number)
    return made


def _empty_allocation(
    moves: TransferWriter, by: Authorship, ended: Allocation, amount: int, target: Allocation | None
) -> Transfer:
    """Move the balance of an ended allocation to its rollover target, or let it expire."""
    why, where = f"allocation {ended.number} has ended", EXPIRED
    if target is not None:
        why, where = f"{why}: on to {target.number}", target.number
    return moves.move(
        "expire" if target is None else "rollover",
        Authorship(who=by.who, at=by.at),
        {ended.number: -amount, where: amount},
        why=f"{by.why}: {why}" if by.why else why,
        about=ended.account,
    )


def _rollover_target(ended: Allocation, others: Sequence[Allocation]) -> Allocation | None:
    """Return the rollover target: of the allocations that end later, the one that begins next."""
    if ended.rollover != "next" or ended.end is None:
        return None
    later = [each for each in others if each.end is not None and each.end > ended.end]
    if later:
        return min(later, key=lambda each: (each.begin, each.number))
    # No later allocation exists yet: the open-ended one keeps the balance meanwhile.
    return next((each for each in others if each.end is None), None)
