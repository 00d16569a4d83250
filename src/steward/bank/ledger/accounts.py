"""Bank accounts and their users: create, change, close and look up, within a transaction.

:class:`Accounts` is the table access that every other part of the ledger uses. Accounts are
closed, never deleted. An account may have a parent, and may draw on it: then the nearest
account above that has money of its own pays (:meth:`Accounts.payer`). Amounts are micro-SU.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Row, func, insert, select, update

from steward.bank.errors import BankUsage, NotInBank
from steward.bank.ledger.postings import LedgerSession, encode_ledger_request, sanitize_text
from steward.bank.ledger.records import Account, Authorship, Member
from steward.bank.ledger.tables import account, member, pot
from steward.bank.money import MAX_AMOUNT
from steward.core.timestamps import moment, to_micros

_NAME: Final = re.compile(r"[^\s,\x00-\x1f\x7f]{1,100}")
"""Valid names of accounts and users."""
_MAX_DEPTH: Final = 100
"""Maximum depth of the account tree."""


class Accounts:
    """Bank accounts and their users: create, change and query them.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session
        # Cache by name: nobody else can change accounts during this transaction.
        self._known: dict[str, Account | None] = {}

    def create(self, new: Account, by: Authorship) -> Account:
        """Create an account with its open-ended allocation, or adopt an unknown one.

        An unknown account exists because something was charged to it before anyone created it.

        Raises:
            BankUsage: The name is taken or invalid, or the parent does not exist.
        """
        session = self._session
        new = _validate_account(new)
        asked = encode_ledger_request("account.create", new)
        if session.done(by, asked) is not None:
            return self.need(new.name)
        earlier = self.get(new.name)
        if earlier is not None and earlier.known:
            raise BankUsage(
                f"there is an account {new.name} already: change it by 'account change'", new.name
            )
        self._check_parent(new.name, new.parent, new.draws_on_parent)
        if earlier is None:
            self.make(new, by)
        elif new.draws_on_parent:
            self._refuse_money(new.name)
        created = moment(to_micros(session.now(by))) if earlier is None else earlier.created
        session.act("account.create", by, asked=asked, about=new.name)
        self._known.clear()
        values = _account_columns(msgspec.structs.replace(new, known=True))
        session.run(update(account).where(account.c.name == new.name).values(values))
        session.touch(new.name)
        return msgspec.structs.replace(new, known=True, created=created)

    def make(self, new: Account, by: Authorship) -> None:
        """Insert an account and its open-ended allocation, without checks."""
        session = self._session
        now_us = to_micros(session.now(by))
        columns = _account_columns(new)
        self._known.clear()
        session.run(insert(account).values(**columns, created_us=now_us, seq=session.seq))
        number = (session.value(select(func.max(pot.c.number)).where(pot.c.number > 0)) or 0) + 1
        session.run(
            insert(pot).values(
                number=number,
                account=new.name,
                begin_us=0,
                end_us=None,
                rollover="none",
                note="",
                balance=0,
                given=0,
                made_by=0,
            )
        )

    def change(
        self,
        name: str,
        by: Authorship,
        *,
        parent: str | None = None,
        owners: Sequence[str] | None = None,
        credit: int | None = None,
        draws_on_parent: bool | None = None,
        only_listed: bool | None = None,
        closed: bool | None = None,
        note: str | None = None,
    ) -> Account:
        """Change the given properties of an account; None leaves a property unchanged.

        Raises:
            BankUsage: The account does not exist, or the parents would form a cycle.
        """
        session = self._session
        given = {
            "parent": parent,
            "owners": None if owners is None else tuple(owners),
            "credit": credit,
            "draws_on_parent": draws_on_parent,
            "only_listed": only_listed,
            "closed": closed,
            "note": note,
        }
        wanted = {key: value for key, value in given.items() if value is not None}
        name = name.lower()
        asked = encode_ledger_request("account.change", name, wanted)
        before = self.need(name)
        if session.done(by, asked) is not None:
            return before
        after = _validate_account(msgspec.structs.replace(before, **wanted))
        if after == before:
            return before
        moved = (before.parent, before.draws_on_parent) != (after.parent, after.draws_on_parent)
        if moved:
            self._check_parent(name, after.parent, after.draws_on_parent)
        if after.draws_on_parent and not before.draws_on_parent:
            self._refuse_money(name)
        self._known.clear()
        session.act("account.change", by, asked=asked, about=name)
        session.run(update(account).where(account.c.name == name).values(_account_columns(after)))
        if moved:
            session.touch_all()
        return after

    def get(self, name: str) -> Account | None:
        """Return the account of this name, or None; unknown accounts included."""
        name = sanitize_text(name.lower())
        if name not in self._known:
            found = self._session.row(select(account).where(account.c.name == name))
            self._known[name] = None if found is None else _account_from_row(found)
        return self._known[name]

    def need(self, name: str) -> Account:
        """Return the account of this name.

        Raises:
            BankUsage: The account does not exist.
        """
        found = self.get(name)
        if found is None or not found.known:
            raise NotInBank(
                f"there is no account {name!r}: create it with steward bank account create", name
            )
        return found

    def all(self, unknown: bool = False) -> list[Account]:
        """List all accounts by name; with ``unknown`` also those that nobody created."""
        chosen = select(account).order_by(account.c.name)
        if not unknown:
            chosen = chosen.where(account.c.known == 1)
        return [_account_from_row(row) for row in self._session.rows(chosen)]

    def changed(self, after_seq: int) -> list[Account]:
        """List accounts changed after a sequence number, by name; all, unknown ones too, for 0."""
        chosen = select(account).order_by(account.c.name)
        if after_seq:
            chosen = chosen.where(account.c.seq > after_seq)
        return [_account_from_row(row) for row in self._session.rows(chosen)]

    def children(self, name: str) -> list[Account]:
        """List the direct children of an account."""
        chosen = select(account).where(account.c.parent == sanitize_text(name.lower()))
        return [
            _account_from_row(row) for row in self._session.rows(chosen.order_by(account.c.name))
        ]

    def led_by(self, user: str, coordinated: frozenset[str]) -> frozenset[str]:
        """Return the accounts that a user owns or coordinates, with all accounts below them."""
        accounts = self.all(unknown=True)
        below: dict[str, list[str]] = {}
        for each in accounts:
            below.setdefault(each.parent, []).append(each.name)
        led: set[str] = set()
        waiting = [*coordinated, *(each.name for each in accounts if user in each.owners)]
        while waiting:
            name = waiting.pop()
            if name not in led:
                led.add(name)
                waiting += below.get(name, ())
        return frozenset(led)

    def payer(self, name: str) -> str:
        """Return the account that pays for this one: itself, or the nearest with own money.

        Raises:
            BankUsage: The account does not exist, or its parents form a cycle.
        """
        found = self.get(name)
        if found is None:
            return self.need(name).name
        for _ in range(_MAX_DEPTH):
            above = self.get(found.parent) if found.draws_on_parent else None
            if above is None:
                return found.name
            found = above
        raise BankUsage(f"the parents of {name} go round in a circle", name)

    def set_user(
        self, name: str, user: str, by: Authorship, *, limit: int | None, listed: bool = True
    ) -> Member:
        """Add a user to an account, or change the limit of a user who is in it.

        Raises:
            BankUsage: The account does not exist, or the limit or user name is invalid.
        """
        session = self._session
        found = self.need(name)
        user = sanitize_text(user)
        if not _NAME.fullmatch(user):
            raise BankUsage(f"{user!r} is no user's name", user)
        if limit is not None and not 0 <= limit <= MAX_AMOUNT:
            raise BankUsage("a limit is not below zero, and not beyond all measure", limit)
        asked = encode_ledger_request("user.set", found.name, user, limit, listed)
        if session.done(by, asked) is None:
            session.act("user.set", by, asked=asked, about=found.name, user=user)
            self._put_member(found.name, user, limit_amount=limit, listed=int(listed))
        return next(each for each in self.users(found.name) if each.user == user)

    def drop_user(self, name: str, user: str, by: Authorship) -> None:
        """Remove a user from an account; the amount spent stays on record.

        Raises:
            BankUsage: The account does not exist, or the user is not in it.
        """
        session = self._session
        found = self.need(name)
        asked = encode_ledger_request("user.drop", found.name, user)
        if session.done(by, asked) is not None:
            return
        if user not in {each.user for each in self.users(found.name) if each.listed}:
            raise BankUsage(f"{user} is not in the account {found.name}", user)
        session.act("user.drop", by, asked=asked, about=found.name, user=user)
        self._put_member(found.name, user, limit_amount=None, listed=0)

    def spend(self, name: str, user: str, amount: int) -> None:
        """Add to the amount a user has spent of an account; negative for a refund."""
        if not user or not amount:
            return
        where = (member.c.account == name, member.c.name == user)
        if not self._session.run(
            update(member).where(*where).values(spent=member.c.spent + amount)
        ):
            self._put_member(name, user, limit_amount=None, listed=0, spent=amount)

    def users(self, name: str) -> list[Member]:
        """List the users who are in an account or have spent of it."""
        return self._members(member.c.account == sanitize_text(name.lower()))

    def of_user(self, user: str) -> list[Member]:
        """List the accounts that a user is in or has spent of."""
        return self._members(member.c.name == sanitize_text(user))

    def _members(self, condition: Any) -> list[Member]:
        chosen = select(member).where(condition).order_by(member.c.account, member.c.name)
        return [_member_from_row(row) for row in self._session.rows(chosen)]

    def _put_member(self, name: str, user: str, **values: int | None) -> None:
        """Update the row of a user in an account, or insert it."""
        where = (member.c.account == name, member.c.name == user)
        if not self._session.run(update(member).where(*where).values(**values)):
            new: dict[str, int | None] = {"limit_amount": None, "spent": 0, "listed": 0}
            self._session.run(insert(member).values(account=name, name=user, **(new | values)))

    def _check_parent(self, name: str, parent: str, draws: bool) -> None:
        """Reject a parent that does not exist or would form a cycle."""
        if not parent:
            if draws:
                raise BankUsage(f"{name} has no parent to draw on: name one", name)
            return
        above: Account | None = self.need(parent)
        for _ in range(_MAX_DEPTH):
            if above is None:
                return
            if above.name == name:
                break
            above = self.get(above.parent) if above.parent else None
        raise BankUsage(f"{parent} cannot be above {name}, since it is below it", parent)

    def _refuse_money(self, name: str) -> None:
        """Reject drawing on the parent while the account has balances of its own."""
        held = self._session.value(
            select(func.count()).where(pot.c.account == name, pot.c.balance != 0)
        )
        if held:
            raise BankUsage(
                f"{name} has money or debts of its own: move them before it draws on its parent",
                name,
            )


def _validate_account(wanted: Account) -> Account:
    """Check the fields of an account and return it normalized."""
    name = sanitize_text(wanted.name.lower())
    if not _NAME.fullmatch(name):
        raise BankUsage(f"{wanted.name!r} cannot be an account's name", wanted.name)
    if not 0 <= wanted.credit <= MAX_AMOUNT:
        raise BankUsage("a credit is not below zero, and not beyond all measure", wanted.credit)
    return msgspec.structs.replace(
        wanted,
        name=name,
        parent=sanitize_text(wanted.parent.lower()),
        owners=tuple(dict.fromkeys(map(sanitize_text, wanted.owners))),
        note=sanitize_text(wanted.note),
    )


def _account_columns(known: Account) -> dict[str, Any]:
    """Return the column values of an account's row."""
    return {
        "name": known.name,
        "parent": known.parent,
        "owners": msgspec.json.encode(known.owners).decode(),
        "credit": known.credit,
        "draws_on_parent": int(known.draws_on_parent),
        "only_listed": int(known.only_listed),
        "closed": int(known.closed),
        "note": known.note,
        "known": int(known.known),
    }


def _account_from_row(row: "Row[Any]") -> Account:
    return Account(
        name=row.name,
        parent=row.parent,
        owners=msgspec.json.decode(row.owners, type=tuple[str, ...]),
        credit=row.credit,
        draws_on_parent=bool(row.draws_on_parent),
        only_listed=bool(row.only_listed),
        closed=bool(row.closed),
        note=row.note,
        known=bool(row.known),
        created=moment(row.created_us),
    )


def _member_from_row(row: "Row[Any]") -> Member:
    return Member(
        account=row.account,
        user=row.name,
        limit=row.limit_amount,
        spent=row.spent,
        listed=bool(row.listed),
    )
