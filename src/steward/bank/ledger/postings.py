"""Postings: write ledger transactions with their entries, and update balances.

:class:`LedgerSession` wraps one open database transaction and numbers what is written in it. It is
the only place where entries are written and balances change. :class:`TransferWriter` writes and
reads complete transfers on top of it; accounts, allocations, charges and rates share it.

A row of table ``act`` is one ledger transaction (number, author, reason, idempotency key); its
rows in ``entry`` are the postings, which sum to zero. Amounts are micro-SU.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Executable, Row, insert, select, update

from steward.bank.errors import BankError, BankUsage
from steward.bank.ledger.records import Authorship, Entry, Transfer, TransferKind
from steward.bank.ledger.tables import BANK_POTS, account, act, charge, entry, pot, state
from steward.bank.money import MAX_AMOUNT
from steward.core.timestamps import moment, to_micros

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
        self._writes = writing
        chosen = select(state.c.seq, state.c.rules_seq, state.c.settlement)
        found = self.row(chosen.with_for_update() if writing else chosen)
        if found is None:
            raise BankError("the ledger has no row in its table state: restore a backup")
        self._touched: set[str] = set()
        self._stored = self.seq, self.rules_seq, self.settlement = tuple(map(int, found))

    def flush(self) -> None:
        """Store the sequence numbers used and the accounts touched."""
        self.show_touched()
        numbers = (self.seq, self.rules_seq, self.settlement)
        if numbers != self._stored:
            names = ("seq", "rules_seq", "settlement")
            self.run(update(state).values(dict(zip(names, numbers, strict=True))))
            self._stored = numbers

    def rows(self, statement: Executable) -> "list[Row[Any]]":
        """Return all rows of a statement."""
        return list(self.connection.execute(statement))

    def row(self, statement: Executable) -> "Row[Any] | None":
        """Return the first row of a statement, or None."""
        return self.connection.execute(statement).first()

    def value(self, statement: Executable) -> Any:
        """Return the first column of the first row, or None."""
        return self.connection.execute(statement).scalar()

    def run(self, statement: Executable) -> int:
        """Execute a statement that writes; return the number of rows affected.

        Raises:
            BankError: The transaction is read-only.
        """
        if not self._writes:
            raise BankError("nothing is changed in a look at the ledger: open a transaction")
        return int(self.connection.execute(statement).rowcount)

    def now(self, by: Authorship | None = None) -> datetime:
        """Return the time of an action: ``by.at``, or the clock."""
        return by.at if by is not None and by.at is not None else self._now()

    def done(self, by: Authorship, asked: str) -> int | None:
        """Return the number of the ledger transaction made under this key, or None.

        Raises:
            BankUsage: The key was used for a different request.
        """
        if not by.key:
            return None
        found = self.row(
            select(act.c.number, act.c.asked).where(act.c.client_key == sanitize_text(by.key))
        )
        if found is None:
            return None
        if found.asked != asked:
            raise BankUsage(
                f"the key {by.key!r} was used for another request: take another key",
                by.key,
            )
        return int(found.number)

    def act(
        self,
        kind: str,
        by: Authorship,
        *,
        asked: str = "",
        why: str = "",
        about: str = "",
        user: str = "",
        charge: int | None = None,
        amount: int = 0,
    ) -> int:
        """Insert a ledger transaction without entries; return its number.

        Args:
            kind: Kind of transaction.
            by: Author, reason and key.
            asked: The whole request as text; a repeat of the key must match it.
            why: Reason that replaces ``by.why``.
            about: The account concerned.
            user: The user concerned.
            charge: Number of the charge it belongs to.
            amount: Amount moved, in micro-SU.
        """
        self.seq += 1
        self.run(
            insert(act).values(
                number=self.seq,
                at_us=to_micros(self.now(by)),
                kind=kind,
                who=sanitize_text(by.who),
                why=sanitize_text(why or by.why),
                client_key=sanitize_text(by.key) if by.key and asked else None,
                asked=asked,
                account=about,
                user_name=user,
                charge=charge,
                amount=amount,
            )
        )
        if about:
            self.touch(about)
        return self.seq

    def post(self, number: int, kind: str, moves: Mapping[int, int]) -> list[Entry]:
        """Write the entries of a ledger transaction, by pot, and update the balances.

        Raises:
            BankUsage: A balance would be too large.
            BankError: The entries do not sum to zero, or a balance changed unexpectedly.
        """
        if sum(moves.values()):
            raise BankError(f"a {kind} of {dict(moves)} does not sum to zero")
        columns = (pot.c.number, pot.c.account, pot.c.balance, pot.c.given)
        held = {
            row.number: row for row in self.rows(select(*columns).where(pot.c.number.in_(moves)))
        }
        made: list[Entry] = []
        for where, amount in sorted(moves.items()):
            if not amount:
                continue
            before = held[where]
            after = before.balance + amount
            if abs(after) > MAX_AMOUNT:
                raise BankUsage("that is larger than any balance can be", amount)
            given = before.given + (_granted_amount(kind, amount) if where > 0 else 0)
            changed = self.run(
                update(pot)
                .where(pot.c.number == where, pot.c.balance == before.balance)
                .values(balance=after, given=given)
            )
            if changed != 1:
                raise BankError(f"the balance of {where} has changed: run steward bank check")
            made.append(build_entry(where, amount, after, before.account))
            self.run(insert(entry).values(act=number, pot=where, amount=amount, balance=after))
        self.touch(*{each.account for each in made if each.account})
        return made

    def touch(self, *names: str) -> None:
        """Mark accounts as changed, so that the gate's next update includes them."""
        self._touched.update(names)

    def show_touched(self) -> None:
        """Store which accounts changed; batched, since most change repeatedly."""
        if self._touched:
            where = account.c.name.in_(sorted(self._touched))
            self.run(update(account).where(where).values(seq=self.seq))
            self._touched.clear()

    def touch_all(self) -> None:
        """Mark all accounts as changed."""
        self.run(update(account).values(seq=self.seq))


def build_entry(where: int, amount: int, balance: int, whose: str | None) -> Entry:
    """Build an entry as users see it: pots by name instead of number."""
    return Entry(
        pot=BANK_POTS.get(where) or f"allocation:{where}",
        amount=amount,
        balance=balance,
        account=whose or "",
        allocation=max(where, 0),
    )


def _granted_amount(kind: str, amount: int) -> int:
    """Return the part of an amount that counts as granted to an allocation."""
    if kind in _GRANT_KINDS:
        return amount
    return max(amount, 0) if kind == "rollover" else 0


def encode_ledger_request(kind: str, *what: object) -> str:
    """Encode a request as one line of text that equals only the same request's."""
    return msgspec.json.encode([kind, *what]).decode()


def sanitize_text(text: str) -> str:
    """Replace NUL and lone surrogates, which databases reject, in a text."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def validate_amount(amount: int) -> int:
    """Return the amount if it can be moved.

    Raises:
        BankUsage: The amount is not above zero, or too large.
    """
    if not 0 < amount <= MAX_AMOUNT:
        raise BankUsage("the amount must be above zero, and not beyond all measure", amount)
    return amount


class TransferWriter:
    """Writer of transfers, which also looks them up.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def get(self, number: int) -> Transfer | None:
        """Return the transfer of this number, or None if absent or without entries."""
        columns = (act, charge.c.key.label("charge_key"))
        found = self._session.row(
            select(*columns)
            .outerjoin(charge, charge.c.number == act.c.charge)
            .where(act.c.number == number)
        )
        entries = self._entries(number)
        if found is None or not entries:
            return None
        return Transfer(
            number=number,
            at=moment(found.at_us),
            kind=found.kind,
            who=found.who,
            why=found.why,
            key=found.client_key or "",
            account=found.account,
            user=found.user_name,
            charge=found.charge_key or "",
            amount=found.amount,
            entries=entries,
        )

    def by_key(self, key: str) -> Transfer | None:
        """Return the transfer made under an idempotency key, or None."""
        chosen = select(act.c.number).where(act.c.client_key == sanitize_text(key))
        number = self._session.value(chosen)
        return None if number is None else self.get(number)

    def keyed(self, prefix: str) -> list[Transfer]:
        """List the transfers whose idempotency key starts with a prefix, in order."""
        begins = act.c.client_key.startswith(sanitize_text(prefix), autoescape=True)
        rows = self._session.rows(select(act.c.number).where(begins).order_by(act.c.number))
        found = [self.get(row.number) for row in rows]
        # SQLite's LIKE ignores case, and some ledger transactions move nothing.
        return [one for one in found if one is not None and one.key.startswith(prefix)]

    def move(
        self,
        kind: TransferKind,
        by: Authorship,
        moves: Mapping[int, int],
        *,
        asked: str = "",
        why: str = "",
        about: str = "",
        user: str = "",
        charge: int | None = None,
        charge_key: str = "",
    ) -> Transfer:
        """Write a transfer with its entries; the arguments are those of ``LedgerSession.act``.

        Args:
            kind: Kind of transfer.
            by: Author, reason and key.
            moves: Amount by pot number: positive goes in, negative goes out; the sum is zero.
            asked: The whole request as text.
            why: Reason that replaces ``by.why``.
            about: The account concerned.
            user: The user concerned.
            charge: Number of the charge it belongs to.
            charge_key: Key of that charge.
        """
        amount = sum(part for part in moves.values() if part > 0)
        if amount > MAX_AMOUNT:
            raise BankUsage("that is larger than any amount can be", amount)
        number = self._session.act(
            kind,
            by,
            asked=asked,
            why=why,
            about=about,
            user=user,
            charge=charge,
            amount=amount,
        )
        entries = self._session.post(number, kind, moves)
        return Transfer(
            number=number,
            at=moment(to_micros(self._session.now(by))),
            kind=kind,
            who=sanitize_text(by.who),
            why=sanitize_text(why or by.why),
            key=sanitize_text(by.key) if asked else "",
            account=about,
            user=user,
            charge=charge_key,
            amount=amount,
            entries=tuple(entries),
        )

    def once(self, by: Authorship, asked: str) -> Transfer | None:
        """Return the transfer already made for the same request and key, or None.

        Raises:
            BankUsage: The key was used for a different request.
        """
        number = self._session.done(by, asked)
        return None if number is None else self.get(number)

    def _entries(self, number: int) -> tuple[Entry, ...]:
        """Read the entries of a ledger transaction."""
        columns = (entry.c.pot, entry.c.amount, entry.c.balance, pot.c.account)
        chosen = select(*columns).join(pot, pot.c.number == entry.c.pot)
        rows = self._session.rows(chosen.where(entry.c.act == number).order_by(entry.c.pot))
        return tuple(build_entry(row.pot, row.amount, row.balance, row.account) for row in rows)
