"""Allocations: service units granted to an account for a period, spent earliest end first.

:func:`divide_payment` and :func:`divide_repayment` divide a payment or repayment among allocations;
:class:`Allocations` creates, changes and queries them; :func:`expire_allocations` empties those
that have ended, into the next allocation (rollover "next") or into the bank's own row "expired".

Each account also has one open-ended allocation, which never ends and alone may go below
zero. Amounts are micro-SU.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import func, or_, select, update

from steward.bank.errors import BankUsage, NotInBank
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.postings import (
    LedgerSession,
    TransferWriter,
    encode_ledger_request,
    validate_amount,
)
from steward.bank.ledger.records import Account, Allocation, Authorship, Rollover, Transfer
from steward.bank.ledger.tables import EXPIRED, ISSUED, StoredAllocation, allocation
from steward.bank.records import AllocationShare
from steward.core.timestamps import to_micros

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
    already_paid: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Divide a payment among allocations.

    Allocations named in ``shares`` pay first, up to their share and their balance; then the
    others in the order of their end. The open-ended one pays the rest and may go below zero.

    Args:
        amount: Amount to pay, in micro-SU.
        allocations: All that may pay, including the open-ended one.
        shares: Allocations that pay first, and up to how much.
        already_paid: Amount of its share that each has already paid.
    """
    ordered = sort_by_end(allocations)
    remaining = {allocation.number: max(allocation.balance, 0) for allocation in ordered}
    payments: dict[int, int] = {}

    def take(number: int, limit: int) -> None:
        nonlocal amount
        payment = min(amount, limit, remaining.get(number, 0))
        if payment > 0:
            payments[number] = payments.get(number, 0) + payment
            remaining[number] -= payment
            amount -= payment

    for share in shares:
        take(share.allocation, share.amount - (already_paid or {}).get(share.allocation, 0))
    for payer in ordered:
        take(payer.number, amount)
    if amount:
        open_ended = ordered[-1].number
        payments[open_ended] = payments.get(open_ended, 0) + amount
    return payments


def divide_repayment(
    amount: int, paid: Mapping[int, int], allocations: Sequence[Allocation]
) -> dict[int, int]:
    """Divide a repayment among the allocations that paid, latest end first.

    Args:
        amount: Amount to return, in micro-SU; at most the amount paid.
        paid: Amount that each allocation paid.
        allocations: At least all those that paid.
    """
    repayments: dict[int, int] = {}
    for payer in reversed(sort_by_end(allocations)):
        repayment = min(amount, paid.get(payer.number, 0))
        if repayment > 0:
            repayments[payer.number] = repayment
            amount -= repayment
    return repayments


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
        author: Authorship,
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
            author: Author, reason and idempotency key.
            end: End of the allocation.
            begin: Begin of the allocation; None for now. A later repeat with None is the same
                request.
            rollover: Use of the balance that is left at the end.
            note: Free text.

        Raises:
            BankUsage: The account does not exist, or the times or the amount are invalid.
        """
        session = self._session
        bank_account = require_payable(self._accounts.require(account))
        if amount:
            validate_amount(amount)
        times = (None if begin is None else to_micros(begin), to_micros(end))
        request = encode_ledger_request(
            "allocation.create", bank_account.name, amount, *times, rollover
        )
        earlier = session.find_repeat(author, request)
        if earlier is not None:
            return self._find_by_transaction(earlier)
        begin = begin or session.now(author)
        if begin >= end:
            raise BankUsage("invalid period: the allocation must end after it begins", account)
        number = session.fetch_value(select(func.max(allocation.c.number))) + 1
        transaction = session.add_transaction(
            "deposit" if amount else "allocation.create",
            author,
            request=request,
            account=bank_account.name,
            amount=amount,
        ).number
        session.insert(
            allocation,
            StoredAllocation(
                number=number,
                account=bank_account.name,
                begin=begin,
                end=end,
                rollover=rollover,
                note=note,
                made_by=transaction,
            ),
        )
        if amount:
            session.write_postings(transaction, "deposit", {ISSUED: -amount, number: amount})
        return self._require(number)

    def change(
        self,
        number: int,
        author: Authorship,
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
        before = self._require(number)
        if before.end is None:
            raise BankUsage(
                f"allocation {number} of account {before.account} has no end, so it cannot be "
                "changed",
                number,
            )
        properties = {"begin": begin, "end": end, "rollover": rollover, "note": note}
        changes = {key: value for key, value in properties.items() if value is not None}
        request = encode_ledger_request("allocation.change", number, changes)
        if session.find_repeat(author, request) is not None:
            return before
        after = msgspec.structs.replace(before, **changes)
        if after.end is None or after.begin >= after.end:
            raise BankUsage("invalid period: the allocation must end after it begins", number)
        if after != before:
            session.add_transaction(
                "allocation.change", author, request=request, account=before.account
            )
            session.execute(update(allocation).where(allocation.c.number == number).values(changes))
        return self._require(number)

    def get(self, number: int) -> Allocation | None:
        """Return the allocation of this number, or None."""
        query = select(allocation).where(allocation.c.number == number, allocation.c.number > 0)
        return self._session.find(Allocation, query)

    def list_own(self, account: str, with_ended: bool = False) -> list[Allocation]:
        """List an account's own allocations, earliest end first.

        Args:
            account: The account's name.
            with_ended: Whether to include allocations that have ended.
        """
        query = select(allocation).where(allocation.c.account == account.lower())
        if not with_ended:
            query = query.where(
                or_(allocation.c.end.is_(None), allocation.c.end > self._session.now())
            )
        return self.fetch(query)

    def get_open_ended(self, account: str) -> Allocation:
        """Return the open-ended allocation of an account.

        Raises:
            BankUsage: The account does not exist.
        """
        query = select(allocation).where(
            allocation.c.account == account.lower(), allocation.c.end.is_(None)
        )
        allocations = self.fetch(query)
        if not allocations:
            raise NotInBank(f"unknown account {account!r}", account)
        return allocations[0]

    def fetch(self, statement: Any) -> list[Allocation]:
        """List the allocations that a SELECT on their table returns, earliest end first."""
        ordered = statement.order_by(
            allocation.c.end.is_(None), allocation.c.end, allocation.c.number
        )
        return self._session.fetch(Allocation, ordered)

    def require_own(self, account: str, number: int) -> Allocation:
        """Return an allocation of this account by number; its open-ended one for 0.

        Raises:
            BankUsage: The allocation does not exist or belongs to another account.
        """
        if not number:
            return self.get_open_ended(account)
        allocation = self._require(number)
        if allocation.account != account.lower():
            raise BankUsage(
                f"allocation {number} belongs to account {allocation.account}, not {account}",
                number,
            )
        return allocation

    def list_by_number(self, numbers: Sequence[int]) -> list[Allocation]:
        """List allocations by number, earliest end first."""
        return self.fetch(
            select(allocation).where(allocation.c.number.in_(numbers), allocation.c.number > 0)
        )

    def _require(self, number: int) -> Allocation:
        """Return an allocation by number, or raise NotInBank."""
        allocation = self.get(number)
        if allocation is None:
            raise NotInBank(
                f"unknown allocation {number}: 'steward bank allocation show' lists them", number
            )
        return allocation

    def _find_by_transaction(self, transaction: int) -> Allocation:
        """Return the allocation that a ledger transaction created."""
        return self.fetch(select(allocation).where(allocation.c.made_by == transaction))[0]


def require_payable(account: Account) -> Account:
    """Return the account if it can receive money.

    Raises:
        BankUsage: The account is closed, or its parent pays.
    """
    if account.closed:
        raise BankUsage(
            f"account {account.name} is closed: reopen it with 'steward bank account change "
            f"{account.name} --reopen'",
            account.name,
        )
    if account.parent_pays:
        raise BankUsage(
            f"account {account.parent} pays for account {account.name}: grant the service "
            f"units to {account.parent}",
            account.name,
        )
    return account


def expire_allocations(
    session: LedgerSession,
    allocations: Allocations,
    writer: TransferWriter,
    author: Authorship,
    reserved: Mapping[int, int],
) -> list[Transfer]:
    """Empty the allocations that have ended: the balance expires or rolls over.

    Args:
        session: The transaction.
        allocations: The allocations of the same transaction.
        writer: Makes the transfers.
        author: Author; ``author.at`` is the present.
        reserved: By allocation number, the amount that jobs which started on it may still need. It
            stays until those jobs have ended.
    """
    now = session.now(author)
    ended = select(allocation.c.number).where(allocation.c.end <= now, allocation.c.balance > 0)
    transfers: list[Transfer] = []
    # A rollover into an allocation that has ended too rolls on with that one's balance.
    pending = {row.number for row in session.fetch_rows(ended)}
    while pending:
        source = allocations.list_by_number(list(pending))[0]
        pending.remove(source.number)
        amount = source.balance - max(0, reserved.get(source.number, 0))
        if amount <= 0:
            continue
        target = _rollover_target(source, allocations.list_own(source.account, with_ended=True))
        transfers.append(_empty_allocation(writer, author, source, amount, target))
        if target is not None and target.end is not None and target.end <= now:
            pending.add(target.number)
    return transfers


def _empty_allocation(
    writer: TransferWriter,
    author: Authorship,
    ended: Allocation,
    amount: int,
    target: Allocation | None,
) -> Transfer:
    """Move the balance of an ended allocation to its rollover target, or let it expire."""
    why, target_number = f"allocation {ended.number} has ended", EXPIRED
    if target is not None:
        why, target_number = f"{why}: moved to {target.number}", target.number
    return writer.write_transfer(
        "expire" if target is None else "rollover",
        Authorship(who=author.who, at=author.at),
        {ended.number: -amount, target_number: amount},
        why=f"{author.why}: {why}" if author.why else why,
        account=ended.account,
    )


def _rollover_target(ended: Allocation, others: Sequence[Allocation]) -> Allocation | None:
    """Return the rollover target: of the allocations that end later, the one that begins next."""
    if ended.rollover != "next" or ended.end is None:
        return None
    later = [
        allocation
        for allocation in others
        if allocation.end is not None and allocation.end > ended.end
    ]
    if later:
        return min(later, key=lambda allocation: (allocation.begin, allocation.number))
    # No later allocation exists yet: the open-ended one keeps the balance meanwhile.
    return next((allocation for allocation in others if allocation.end is None), None)
