"""What the gate needs to know of accounts: those that have changed, or all of them."""

from collections import defaultdict
from typing import Any

import msgspec
from sqlalchemy import Row, or_, select

from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.records import Account
from steward.bank.ledger.session import Session
from steward.bank.ledger.tables import member, pot
from steward.bank.records import AccountBooks, AllocationBooks, Books, UserBooks
from steward.core.timestamps import micros

_AT_ONCE = 500


def books(session: Session, accounts: Accounts, after_seq: int) -> Books:
    """The accounts that have changed after a position; all of them for 0.

    All of them also where the position is ahead of the ledger, which then is an older
    one that was put back.
    """
    session.show_touched()
    whole = after_seq <= 0 or after_seq > session.seq
    known = {each.name: each for each in accounts.changed(0 if whole else after_seq)}
    wanted = [each for each in known.values() if each.known]
    _add_payers(known, accounts)
    made = Books(
        seq=session.seq,
        accounts=tuple(_with_money(session, wanted, known)),
        whole=whole,
    )
    return made if whole else msgspec.structs.replace(made, after=after_seq)


def _add_payers(known: dict[str, Account], accounts: Accounts) -> None:
    """Add the accounts that others draw on, as far up as money is drawn."""
    missing = list(known.values())
    while missing:
        each = missing.pop()
        if each.draws_on_parent and each.parent not in known:
            above = accounts.get(each.parent)
            if above is not None:
                known[above.name] = above
                missing.append(above)


def _with_money(
    session: Session, wanted: list[Account], known: dict[str, Account]
) -> list[AccountBooks]:
    allocations: dict[str, list[AllocationBooks]] = defaultdict(list)
    users: dict[str, list[UserBooks]] = defaultdict(list)
    now_us = micros(session.now())
    for start in range(0, len(wanted), _AT_ONCE):
        names = [each.name for each in wanted[start : start + _AT_ONCE]]
        # Of those that have ended only what is not emptied yet: started jobs may draw on it.
        live = or_(pot.c.end_us.is_(None), pot.c.end_us > now_us, pot.c.balance != 0)
        pots = select(pot).where(pot.c.account.in_(names), live)
        for row in session.rows(pots.order_by(pot.c.end_us.is_(None), pot.c.end_us, pot.c.number)):
            allocations[row.account].append(_allocation(row))
        members = select(member).where(member.c.account.in_(names))
        for row in session.rows(members.order_by(member.c.name)):
            if row.listed or not known[row.account].only_listed:
                users[row.account].append(
                    UserBooks(name=row.name, limit=row.limit_amount, spent=row.spent)
                )
    return [
        AccountBooks(
            name=each.name,
            payer=_payer(each, known),
            credit=each.credit,
            closed=each.closed,
            allocations=tuple(allocations[each.name]),
            users=tuple(users[each.name]),
            only_listed=each.only_listed,
            owners=tuple(each.owners),
        )
        for each in wanted
    ]


def _allocation(row: "Row[Any]") -> AllocationBooks:
    return AllocationBooks(
        number=row.number,
        balance=row.balance,
        begin_us=row.begin_us,
        end_us=row.end_us or 0,
        total=row.given,
    )


def _payer(each: Account, known: dict[str, Account]) -> str:
    passed = set()
    while each.draws_on_parent and each.parent in known and each.name not in passed:
        passed.add(each.name)
        each = known[each.parent]
    return each.name
