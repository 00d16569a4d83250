"""Postings: write ledger transactions with their postings, and update balances.

:class:`LedgerSession` wraps one open database transaction and numbers what is written in it. It is
the only place where postings are written and balances change. :class:`TransferWriter` writes and
reads complete transfers on top of it; accounts, allocations, charges and rates share it.

A row of table ``ledger_transaction`` has number, author, reason and idempotency key; its rows in
``posting`` are the postings, which sum to zero. Amounts are micro-SU.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Executable, Row, Table, insert, select, update

from steward.bank.errors import BankError, BankUsage
from steward.bank.ledger.records import Authorship, Posting, Transfer, TransferKind
from steward.bank.ledger.tables import (
    COUNTERPARTS,
    StoredPosting,
    StoredTransaction,
    account,
    allocation,
    charge,
    posting,
    state,
    transaction,
)
from steward.bank.money import MAX_AMOUNT, format_money
from steward.core.principals import PRINCIPALS
from steward.core.sqlalchemy_tables import Record, decode_row, sanitize_text
from steward.core.timestamps import from_micros, to_micros

_GRANT_KINDS: Final = frozenset({"deposit", "withdraw", "transfer", "adjust"})
"""Kinds of transfers that change how much an allocation was given."""

USAGE_KINDS: Final = ("charge", "correction", "refund")
"""Kinds of transfers that record usage of jobs."""


class LedgerSession:
    """Open database transaction, with the ledger's sequence numbers.

    Args:
        connection: The connection with the open transaction.
        now: The clock.
        writing: Whether it may write; all other writers then wait until it ends.
    """

    def __init__(
        self, connection: Connection, now: Callable[[], datetime], *, writing: bool
    ) -> None:
        self.connection = connection
        self._now = now
        self._may_write = writing
        query = select(state.c.seq, state.c.rules_seq, state.c.settlement)
        row = self.fetch_row(query.with_for_update() if writing else query)
        if row is None:
            raise BankError(
                "ledger damaged: its table 'state' is empty. Restore the ledger from its last "
                "backup"
            )
        self._touched: set[str] = set()
        self._stored_numbers = self.seq, self.rules_seq, self.settlement = tuple(map(int, row))

    def flush(self) -> None:
        """Store the sequence numbers used and the accounts touched."""
        self.store_touched()
        numbers = (self.seq, self.rules_seq, self.settlement)
        if numbers != self._stored_numbers:
            names = ("seq", "rules_seq", "settlement")
            self.execute(update(state).values(dict(zip(names, numbers, strict=True))))
            self._stored_numbers = numbers

    def fetch_rows(self, statement: Executable) -> "list[Row[*tuple[Any, ...]]]":
        """Return all rows of a statement."""
        return list(self.connection.execute(statement))

    def fetch_row(self, statement: Executable) -> "Row[*tuple[Any, ...]] | None":
        """Return the first row of a statement, or None."""
        return self.connection.execute(statement).first()

    def fetch_value(self, statement: Executable) -> Any:
        """Return the first column of the first row, or None."""
        return self.connection.execute(statement).scalar()

    def fetch(self, record: type[Record], query: Executable) -> list[Record]:
        """Return the records of a query whose first columns are their fields."""
        return [decode_row(record, row) for row in self.connection.execute(query)]

    def find(self, record: type[Record], query: Executable) -> Record | None:
        """Return the first record of a query, or None."""
        row = self.fetch_row(query)
        return None if row is None else decode_row(record, row)

    def insert(self, table: Table, record: msgspec.Struct) -> None:
        """Insert a record."""
        self.execute(insert(table), msgspec.structs.asdict(record))

    def execute(self, statement: Executable, values: Mapping[str, Any] | None = None) -> int:
        """Execute a statement that writes; return the number of rows affected.

        Raises:
            BankError: The transaction is read-only.
        """
        if not self._may_write:
            raise BankError("read-only transaction: open a transaction to change the ledger")
        return int(self.connection.execute(statement, values).rowcount)

    def now(self, author: Authorship | None = None) -> datetime:
        """Return the time of an action, in UTC: ``author.at``, or the clock."""
        at = author.at if author is not None and author.at is not None else self._now()
        return from_micros(to_micros(at))

    def find_repeat(self, author: Authorship, request: str) -> int | None:
        """Return the number of the ledger transaction made under this key, or None.

        Raises:
            BankUsage: The key was used for a different request.
        """
        if not author.key:
            return None
        row = self.fetch_row(
            select(transaction.c.number, transaction.c.asked).where(transaction.c.key == author.key)
        )
        if row is None:
            return None
        if row.asked != request:
            raise BankUsage(
                f"the idempotency key {author.key!r} was used for another request: use another key",
                author.key,
            )
        return int(row.number)

    def add_transaction(
        self,
        kind: str,
        author: Authorship,
        *,
        request: str = "",
        why: str = "",
        account: str = "",
        user: str = "",
        charge: int | None = None,
        amount: int = 0,
    ) -> StoredTransaction:
        """Insert a ledger transaction without postings; return it.

        Args:
            kind: Kind of transaction.
            author: Author, reason and key.
            request: The whole request as text; a repeat of the key must match it.
            why: Reason that replaces ``author.why``.
            account: The account concerned.
            user: The user concerned.
            charge: Number of the charge it belongs to.
            amount: Amount moved, in micro-SU.

        Raises:
            PermissionRefused: The author is a service principal without a permission for it.
        """
        if author.who in PRINCIPALS:
            PRINCIPALS[author.who].require(f"ledger.{kind}")
        self.seq += 1
        stored = StoredTransaction(
            number=self.seq,
            at=self.now(author),
            kind=kind,
            posted_by=sanitize_text(author.who),
            reason=sanitize_text(why or author.why),
            key=sanitize_text(author.key) if request else "",
            asked=request,
            account=account,
            user=user,
            charge=charge,
            amount=amount,
        )
        self.insert(transaction, stored)
        if account:
            self.touch(account)
        return stored

    def write_postings(self, number: int, kind: str, amounts: Mapping[int, int]) -> list[Posting]:
        """Write the postings of a ledger transaction, by allocation, and update the balances.

        Raises:
            BankUsage: A balance would be too large.
            BankError: The postings do not sum to zero, or a balance changed unexpectedly.
        """
        if sum(amounts.values()):
            raise BankError(f"the postings of a {kind} do not sum to zero: {dict(amounts)}")
        columns = (
            allocation.c.number,
            allocation.c.account,
            allocation.c.balance,
            allocation.c.granted,
        )
        allocations = {
            row.number: row
            for row in self.fetch_rows(select(*columns).where(allocation.c.number.in_(amounts)))
        }
        postings: list[Posting] = []
        for row_number, amount in sorted(amounts.items()):
            if not amount:
                continue
            before = allocations[row_number]
            after = before.balance + amount
            if abs(after) > MAX_AMOUNT:
                raise BankUsage(
                    f"{format_money(amount)} SU would take a balance beyond the limit of "
                    f"{format_money(MAX_AMOUNT)}: give less",
                    amount,
                )
            granted = before.granted + (_get_granted_amount(kind, amount) if row_number > 0 else 0)
            changed = self.execute(
                update(allocation)
                .where(allocation.c.number == row_number, allocation.c.balance == before.balance)
                .values(balance=after, granted=granted)
            )
            if changed != 1:
                raise BankError(
                    f"the balance of allocation {row_number} changed unexpectedly: run "
                    "'steward bank check'"
                )
            postings.append(build_posting(row_number, amount, after, before.account))
            self.insert(
                posting,
                StoredPosting(
                    transaction=number, allocation=row_number, amount=amount, balance=after
                ),
            )
        self.touch(*{item.account for item in postings if item.account})
        return postings

    def touch(self, *names: str) -> None:
        """Mark accounts as changed, so that the gate's next update includes them."""
        self._touched.update(names)

    def store_touched(self) -> None:
        """Store which accounts changed; batched, since most change repeatedly."""
        if self._touched:
            condition = account.c.name.in_(sorted(self._touched))
            self.execute(update(account).where(condition).values(seq=self.seq))
            self._touched.clear()

    def touch_all(self) -> None:
        """Mark all accounts as changed."""
        self.execute(update(account).values(seq=self.seq))


def build_posting(number: int, amount: int, balance: int, account: str) -> Posting:
    """Build a posting as users see it: the bank's own counterparts by name instead of number."""
    return Posting(
        name=COUNTERPARTS.get(number) or f"allocation:{number}",
        amount=amount,
        balance=balance,
        account=account,
        allocation=max(number, 0),
    )


def _get_granted_amount(kind: str, amount: int) -> int:
    """Return the part of an amount that counts as granted to an allocation."""
    if kind in _GRANT_KINDS:
        return amount
    return max(amount, 0) if kind == "rollover" else 0


def encode_ledger_request(kind: str, *arguments: object) -> str:
    """Encode a request as one line of text that equals only the same request's."""
    return msgspec.json.encode([kind, *arguments]).decode()


def validate_amount(amount: int) -> int:
    """Return the amount if it can be moved.

    Raises:
        BankUsage: The amount is not above zero, or too large.
    """
    if not 0 < amount <= MAX_AMOUNT:
        raise BankUsage(f"invalid amount: give 0.000001 to {format_money(MAX_AMOUNT)} SU", amount)
    return amount


class TransferWriter:
    """Writer of transfers, which also looks them up.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def get(self, number: int) -> Transfer | None:
        """Return the transfer of this number, or None if absent or without postings."""
        row = self._session.fetch_row(
            select(transaction, charge.c.key)
            .outerjoin(charge, charge.c.number == transaction.c.charge)
            .where(transaction.c.number == number)
        )
        postings = self._read_postings(number)
        if row is None or not postings:
            return None
        return _build_transfer(decode_row(StoredTransaction, row), row[-1] or "", postings)

    def find_by_key(self, key: str) -> Transfer | None:
        """Return the transfer made under an idempotency key, or None."""
        query = select(transaction.c.number).where(transaction.c.key == key)
        number = self._session.fetch_value(query)
        return None if number is None else self.get(number)

    def list_by_key_prefix(self, prefix: str) -> list[Transfer]:
        """List the transfers whose idempotency key starts with a prefix, in order."""
        condition = transaction.c.key.startswith(sanitize_text(prefix), autoescape=True)
        rows = self._session.fetch_rows(
            select(transaction.c.number).where(condition).order_by(transaction.c.number)
        )
        transfers = [self.get(row.number) for row in rows]
        # SQLite's LIKE ignores case, and some ledger transactions move nothing.
        return [
            transfer
            for transfer in transfers
            if transfer is not None and transfer.key.startswith(prefix)
        ]

    def write_transfer(
        self,
        kind: TransferKind,
        author: Authorship,
        amounts: Mapping[int, int],
        *,
        request: str = "",
        why: str = "",
        account: str = "",
        user: str = "",
        charge: int | None = None,
        charge_key: str = "",
    ) -> Transfer:
        """Write a transfer with its postings, as ``LedgerSession.add_transaction``.

        Args:
            kind: Kind of transfer.
            author: Author, reason and key.
            amounts: Amount by allocation number, positive if it goes in; the sum is zero.
            request: The whole request as text.
            why: Reason that replaces ``author.why``.
            account: The account concerned.
            user: The user concerned.
            charge: Number of the charge it belongs to.
            charge_key: Key of that charge.
        """
        amount = sum(value for value in amounts.values() if value > 0)
        if amount > MAX_AMOUNT:
            raise BankUsage(
                f"the amount of {format_money(amount)} SU is too large: the limit is "
                f"{format_money(MAX_AMOUNT)}",
                amount,
            )
        transaction = self._session.add_transaction(
            kind,
            author,
            request=request,
            why=why,
            account=account,
            user=user,
            charge=charge,
            amount=amount,
        )
        postings = self._session.write_postings(transaction.number, kind, amounts)
        return _build_transfer(transaction, charge_key, postings)

    def find_repeat(self, author: Authorship, request: str) -> Transfer | None:
        """Return the transfer already made for the same request and key, or None.

        Raises:
            BankUsage: The key was used for a different request.
        """
        number = self._session.find_repeat(author, request)
        return None if number is None else self.get(number)

    def _read_postings(self, number: int) -> list[Posting]:
        """Read the postings of a ledger transaction."""
        columns = (posting.c.allocation, posting.c.amount, posting.c.balance, allocation.c.account)
        query = select(*columns).join(allocation, allocation.c.number == posting.c.allocation)
        rows = self._session.fetch_rows(
            query.where(posting.c.transaction == number).order_by(posting.c.allocation)
        )
        return [build_posting(row.allocation, row.amount, row.balance, row.account) for row in rows]


def _build_transfer(
    transaction: StoredTransaction, charge_key: str, postings: Sequence[Posting]
) -> Transfer:
    """Build a transfer as users see it: with the key of its charge, without its request."""
    values = msgspec.structs.asdict(transaction)
    del values["asked"]
    return Transfer(**values | {"charge": charge_key, "postings": tuple(postings)})
