"""Bank accounts and their users: create, change, close and look up, within a transaction.

:class:`Accounts` is the table access that every other part of the ledger uses. Accounts are
closed, never deleted. An account may have a parent, which may pay for it: then the nearest
account above that has money of its own pays (:meth:`Accounts.find_payer`). Amounts are micro-SU.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import func, select, update

from steward.bank.errors import BankUsage, NotInBank
from steward.bank.ledger.postings import LedgerSession, encode_ledger_request
from steward.bank.ledger.records import Account, Authorship, Member
from steward.bank.ledger.tables import StoredAccount, StoredAllocation, account, allocation, member
from steward.bank.money import MAX_AMOUNT, format_money
from steward.core.sqlalchemy_tables import sanitize_text
from steward.core.timestamps import from_micros

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
        self._cache: dict[str, Account | None] = {}

    def create(self, new: Account, author: Authorship) -> Account:
        """Create an account with its open-ended allocation, or adopt an unknown one.

        An unknown account exists because something was charged to it before anyone created it.

        Raises:
            BankUsage: The name is taken or invalid, or the parent does not exist.
        """
        session = self._session
        new = _validate_account(new)
        request = encode_ledger_request("account.create", new)
        if session.find_repeat(author, request) is not None:
            return self.require(new.name)
        existing = self.get(new.name)
        if existing is not None and existing.known:
            raise BankUsage(
                f"account {new.name} exists already: 'steward bank account change' changes it",
                new.name,
            )
        self._check_parent(new.name, new.parent, new.parent_pays)
        created = session.now(author) if existing is None else existing.created
        new = msgspec.structs.replace(new, known=True, created=created)
        if existing is None:
            self.insert_account(new, author)
        elif new.parent_pays:
            self._require_no_money(new.name)
        session.add_transaction("account.create", author, request=request, account=new.name)
        if existing is not None:
            self._update_account(new)
        return new

    def insert_account(self, new: Account, author: Authorship) -> None:
        """Insert an account and its open-ended allocation, without checks."""
        session = self._session
        created = new.created or session.now(author)
        self._cache.clear()
        values = msgspec.structs.asdict(new) | {"created": created, "seq": session.seq}
        session.insert(account, StoredAccount(**values))
        number = (
            session.fetch_value(
                select(func.max(allocation.c.number)).where(allocation.c.number > 0)
            )
            or 0
        ) + 1
        open_ended = StoredAllocation(
            number=number, account=new.name, begin=from_micros(0), made_by=0
        )
        session.insert(allocation, open_ended)

    def change(
        self,
        name: str,
        author: Authorship,
        *,
        parent: str | None = None,
        owners: Sequence[str] | None = None,
        credit_limit: int | None = None,
        parent_pays: bool | None = None,
        only_listed: bool | None = None,
        closed: bool | None = None,
        note: str | None = None,
    ) -> Account:
        """Change the given properties of an account; None leaves a property unchanged.

        Raises:
            BankUsage: The account does not exist, or the parents would form a cycle.
        """
        session = self._session
        properties = {
            "parent": parent,
            "owners": None if owners is None else tuple(owners),
            "credit_limit": credit_limit,
            "parent_pays": parent_pays,
            "only_listed": only_listed,
            "closed": closed,
            "note": note,
        }
        changes = {key: value for key, value in properties.items() if value is not None}
        name = name.lower()
        request = encode_ledger_request("account.change", name, changes)
        before = self.require(name)
        if session.find_repeat(author, request) is not None:
            return before
        after = _validate_account(msgspec.structs.replace(before, **changes))
        if after == before:
            return before
        is_moved = (before.parent, before.parent_pays) != (after.parent, after.parent_pays)
        if is_moved:
            self._check_parent(name, after.parent, after.parent_pays)
        if after.parent_pays and not before.parent_pays:
            self._require_no_money(name)
        session.add_transaction("account.change", author, request=request, account=name)
        self._update_account(after)
        if is_moved:
            session.touch_all()
        return after

    def get(self, name: str) -> Account | None:
        """Return the account of a name, or None; also one that only charges created."""
        name = sanitize_text(name.lower())
        if name not in self._cache:
            query = select(account).where(account.c.name == name)
            self._cache[name] = self._session.find(Account, query)
        return self._cache[name]

    def require(self, name: str) -> Account:
        """Return the account of this name.

        Raises:
            BankUsage: The account does not exist.
        """
        account = self.get(name)
        if account is None or not account.known:
            raise NotInBank(
                f"unknown account {name!r}: create it with 'steward bank account create'", name
            )
        return account

    def list_all(self, unknown: bool = False) -> list[Account]:
        """List all accounts by name; with ``unknown`` also those that nobody created."""
        query = select(account).order_by(account.c.name)
        if not unknown:
            query = query.where(account.c.known == 1)
        return self._session.fetch(Account, query)

    def list_changed(self, after_seq: int) -> list[Account]:
        """List accounts changed after a sequence number, by name; all, unknown ones too, for 0."""
        query = select(account).order_by(account.c.name)
        if after_seq:
            query = query.where(account.c.seq > after_seq)
        return self._session.fetch(Account, query)

    def list_children(self, name: str) -> list[Account]:
        """List the direct children of an account."""
        query = select(account).where(account.c.parent == name.lower())
        return self._session.fetch(Account, query.order_by(account.c.name))

    def list_led_by(self, user: str, coordinated: frozenset[str]) -> frozenset[str]:
        """Return the accounts that a user owns or coordinates, with all accounts below them."""
        accounts = self.list_all(unknown=True)
        below: dict[str, list[str]] = {}
        for child in accounts:
            below.setdefault(child.parent, []).append(child.name)
        led: set[str] = set()
        pending = [*coordinated, *(child.name for child in accounts if user in child.owners)]
        while pending:
            name = pending.pop()
            if name not in led:
                led.add(name)
                pending += below.get(name, ())
        return frozenset(led)

    def find_payer(self, name: str) -> str:
        """Return the account that pays for this one: itself, or the nearest with own money.

        Raises:
            BankUsage: The account does not exist, or its parents form a cycle.
        """
        account = self.get(name)
        if account is None:
            return self.require(name).name
        for _ in range(_MAX_DEPTH):
            parent = self.get(account.parent) if account.parent_pays else None
            if parent is None:
                return account.name
            account = parent
        raise BankUsage(f"account {name} is its own ancestor: change its parent", name)

    def set_user(
        self, name: str, user: str, author: Authorship, *, limit: int | None, listed: bool = True
    ) -> Member:
        """Add a user to an account, or change the limit of a user who is in it.

        Raises:
            BankUsage: The account does not exist, or the limit or user name is invalid.
        """
        session = self._session
        account = self.require(name)
        user = sanitize_text(user)
        if not _NAME.fullmatch(user):
            raise BankUsage(
                f"invalid user name {user!r}: give up to 100 characters without spaces and commas",
                user,
            )
        if limit is not None and not 0 <= limit <= MAX_AMOUNT:
            raise BankUsage(
                f"invalid spending limit of user {user}: give 0 to {format_money(MAX_AMOUNT)} SU",
                limit,
            )
        request = encode_ledger_request("user.set", account.name, user, limit, listed)
        if session.find_repeat(author, request) is None:
            session.add_transaction(
                "user.set", author, request=request, account=account.name, user=user
            )
            self._store_member(account.name, user, limit=limit, listed=listed)
        return next(member for member in self.list_users(account.name) if member.user == user)

    def add_spent(self, name: str, user: str, amount: int) -> None:
        """Add to the amount a user has spent of an account; negative for a refund."""
        if not user or not amount:
            return
        conditions = (member.c.account == name, member.c.user == user)
        if not self._session.execute(
            update(member).where(*conditions).values(spent=member.c.spent + amount)
        ):
            self._store_member(name, user, limit=None, listed=False, spent=amount)

    def list_users(self, name: str) -> list[Member]:
        """List the users who are in an account or have spent of it."""
        return self._list_members(member.c.account == name.lower())

    def list_of_user(self, user: str) -> list[Member]:
        """List the accounts that a user is in or has spent of."""
        return self._list_members(member.c.user == user)

    def _list_members(self, condition: Any) -> list[Member]:
        query = select(member).where(condition).order_by(member.c.account, member.c.user)
        return self._session.fetch(Member, query)

    def _store_member(self, name: str, user: str, **values: Any) -> None:
        """Update the row of a user in an account, or insert it."""
        conditions = (member.c.account == name, member.c.user == user)
        if not self._session.execute(update(member).where(*conditions).values(**values)):
            self._session.insert(member, Member(account=name, user=user, **values))

    def _update_account(self, changed: Account) -> None:
        """Update the row of an account."""
        self._cache.clear()
        values = msgspec.structs.asdict(changed)
        self._session.execute(update(account).where(account.c.name == changed.name).values(values))

    def _check_parent(self, name: str, parent: str, parent_pays: bool) -> None:
        """Reject a parent that does not exist or would form a cycle."""
        if not parent:
            if parent_pays:
                raise BankUsage(f"account {name} has no parent that can pay for it: give one", name)
            return
        ancestor: Account | None = self.require(parent)
        for _ in range(_MAX_DEPTH):
            if ancestor is None:
                return
            if ancestor.name == name:
                break
            ancestor = self.get(ancestor.parent) if ancestor.parent else None
        raise BankUsage(
            f"account {parent} cannot be the parent of {name}: it is a descendant of {name}", parent
        )

    def _require_no_money(self, name: str) -> None:
        """Reject drawing on the parent while the account has balances of its own."""
        count = self._session.fetch_value(
            select(func.count()).where(allocation.c.account == name, allocation.c.balance != 0)
        )
        if count:
            raise BankUsage(
                f"account {name} has a balance: transfer it before its parent can pay for it",
                name,
            )


def _validate_account(account: Account) -> Account:
    """Check the fields of an account and return it normalized."""
    name = sanitize_text(account.name.lower())
    if not _NAME.fullmatch(name):
        raise BankUsage(
            f"invalid account name {account.name!r}: give up to 100 characters without spaces and "
            "commas",
            account.name,
        )
    if not 0 <= account.credit_limit <= MAX_AMOUNT:
        raise BankUsage(
            f"invalid credit limit of account {name}: give 0 to {format_money(MAX_AMOUNT)} SU",
            account.credit_limit,
        )
    return msgspec.structs.replace(
        account,
        name=name,
        parent=sanitize_text(account.parent.lower()),
        owners=tuple(dict.fromkeys(map(sanitize_text, account.owners))),
        note=sanitize_text(account.note),
    )
