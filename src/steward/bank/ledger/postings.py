"""One transaction on the ledger, as its parts share it: acts, entries, and the numbers of both.

It is the only place where entries are written and balances change.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Executable, Row, insert, select, update

from steward.bank.errors import BankError, BankUsage
from steward.bank.ledger.records import By, Entry, Kind, Transfer
from steward.bank.ledger.tables import COUNTERS, account, act, charge, entry, pot, state
from steward.bank.money import MOST
from steward.core.timestamps import micros, moment

_GIVEN: Final = frozenset({"deposit", "withdraw", "transfer", "adjust"})

SPENDING: Final = ("charge", "correction", "refund")
"""Kinds of transfers that are about what was used."""


class Session:
    """A transaction that is open.

    Args:
        connection: The connection that it is open on.
        now: The clock.
        writing: Whether it may write; then all other writers wait until it ends.
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
        """Write down the numbers that were used."""
        self.show_touched()
        numbers = (self.seq, self.rules_seq, self.settlement)
        if numbers != self._stored:
            names = ("seq", "rules_seq", "settlement")
            self.run(update(state).values(dict(zip(names, numbers, strict=True))))
            self._stored = numbers

    def rows(self, statement: Executable) -> "list[Row[Any]]":
        """All rows that a statement gives."""
        return list(self.connection.execute(statement))

    def row(self, statement: Executable) -> "Row[Any] | None":
        """The first row that a statement gives."""
        return self.connection.execute(statement).first()

    def value(self, statement: Executable) -> Any:
        """The first column of the first row; None if there is none."""
        return self.connection.execute(statement).scalar()

    def run(self, statement: Executable) -> int:
        """Carry out a statement that changes something; returns how many rows it touched.

        Raises:
            BankError: This is only a look at the ledger.
        """
        if not self._writes:
            raise BankError("nothing is changed in a look at the ledger: open a transaction")
        return int(self.connection.execute(statement).rowcount)

    def now(self, by: By | None = None) -> datetime:
        """When something is done."""
        return by.at if by is not None and by.at is not None else self._now()

    def done(self, by: By, asked: str) -> int | None:
        """Number of the act that was done under a caller's key before; None if there is none.

        Raises:
            BankUsage: The key was used for something else.
        """
        if not by.key:
            return None
        found = self.row(select(act.c.number, act.c.asked).where(act.c.client_key == clean(by.key)))
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
        by: By,
        *,
        asked: str = "",
        why: str = "",
        about: str = "",
        user: str = "",
        charge: int | None = None,
        amount: int = 0,
    ) -> int:
        """Enter an act, and return its number.

        Args:
            kind: What it is.
            by: Who does it.
            asked: All that the caller asked for; a repeat of the key has to ask for the same.
            why: In place of ``by.why``.
            about: The account.
            user: The user whom it is about.
            charge: Number of the charge that it belongs to.
            amount: How much it moves.
        """
        self.seq += 1
        self.run(
            insert(act).values(
                number=self.seq,
                at_us=micros(self.now(by)),
                kind=kind,
                who=clean(by.who),
                why=clean(why or by.why),
                client_key=clean(by.key) if by.key and asked else None,
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
        """Enter what an act moves, by pot; returns the entries.

        Raises:
            BankUsage: A balance would be beyond all measure.
            BankError: It does not sum to zero, or a balance is not what it was.
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
            if abs(after) > MOST:
                raise BankUsage("that is larger than any balance can be", amount)
            given = before.given + (_given(kind, amount) if where > 0 else 0)
            changed = self.run(
                update(pot)
                .where(pot.c.number == where, pot.c.balance == before.balance)
                .values(balance=after, given=given)
            )
            if changed != 1:
                raise BankError(f"the balance of {where} has changed: run steward bank check")
            made.append(entry_of(where, amount, after, before.account))
            self.run(insert(entry).values(act=number, pot=where, amount=amount, balance=after))
        self.touch(*{each.account for each in made if each.account})
        return made

    def touch(self, *names: str) -> None:
        """Note that accounts have changed, so that the next books show them."""
        self._touched.update(names)

    def show_touched(self) -> None:
        """Write down which accounts have changed, all at once since most change repeatedly."""
        if self._touched:
            where = account.c.name.in_(sorted(self._touched))
            self.run(update(account).where(where).values(seq=self.seq))
            self._touched.clear()

    def touch_all(self) -> None:
        """Note that any account may have changed."""
        self.run(update(account).values(seq=self.seq))


def entry_of(where: int, amount: int, balance: int, whose: str | None) -> Entry:
    """What was entered in a pot, as it is shown."""
    return Entry(
        pot=COUNTERS.get(where) or f"allocation:{where}",
        amount=amount,
        balance=balance,
        account=whose or "",
        allocation=max(where, 0),
    )


def _given(kind: str, amount: int) -> int:
    if kind in _GIVEN:
        return amount
    return max(amount, 0) if kind == "rollover" else 0


def asking(kind: str, *what: object) -> str:
    """All that a caller asks for, as one line that compares equal only to the same."""
    return msgspec.json.encode([kind, *what]).decode()


def clean(text: str) -> str:
    """Text that every database takes: without NUL and half characters."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def checked_amount(amount: int) -> int:
    """An amount that can be moved.

    Raises:
        BankUsage: It is not above zero, or beyond all measure.
    """
    if not 0 < amount <= MOST:
        raise BankUsage("the amount must be above zero, and not beyond all measure", amount)
    return amount


class Moves:
    """Enters transfers, and shows those that were entered.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, number: int) -> Transfer | None:
        """The transfer of a number; None if there is none, or if it moved nothing."""
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
        """The transfer that was made under a caller's key."""
        chosen = select(act.c.number).where(act.c.client_key == clean(key))
        number = self._session.value(chosen)
        return None if number is None else self.get(number)

    def keyed(self, prefix: str) -> list[Transfer]:
        """The transfers whose callers' keys begin so, in order."""
        begins = act.c.client_key.startswith(clean(prefix), autoescape=True)
        rows = self._session.rows(select(act.c.number).where(begins).order_by(act.c.number))
        found = [self.get(row.number) for row in rows]
        # SQLite compares without case; and not every act moves something.
        return [one for one in found if one is not None and one.key.startswith(prefix)]

    def move(
        self,
        kind: Kind,
        by: By,
        moves: Mapping[int, int],
        *,
        asked: str = "",
        why: str = "",
        about: str = "",
        user: str = "",
        charge: int | None = None,
        charge_key: str = "",
    ) -> Transfer:
        """Enter a transfer, whatever it means; see ``Session.act`` for what is not said here.

        Args:
            kind: What it is.
            by: Who does it.
            moves: What comes into each pot, or goes out.
            asked: All that the caller asked for.
            why: In place of ``by.why``.
            about: The account.
            user: The user whom it is about.
            charge: Number of the charge that it belongs to.
            charge_key: The key of that.
        """
        amount = sum(part for part in moves.values() if part > 0)
        if amount > MOST:
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
            at=moment(micros(self._session.now(by))),
            kind=kind,
            who=clean(by.who),
            why=clean(why or by.why),
            key=clean(by.key) if asked else "",
            account=about,
            user=user,
            charge=charge_key,
            amount=amount,
            entries=tuple(entries),
        )

    def once(self, by: By, asked: str) -> Transfer | None:
        """The transfer that was made when the same was asked for before, under the same key.

        Raises:
            BankUsage: The key was used for something else.
        """
        number = self._session.done(by, asked)
        return None if number is None else self.get(number)

    def _entries(self, number: int) -> tuple[Entry, ...]:
        columns = (entry.c.pot, entry.c.amount, entry.c.balance, pot.c.account)
        chosen = select(*columns).join(pot, pot.c.number == entry.c.pot)
        rows = self._session.rows(chosen.where(entry.c.act == number).order_by(entry.c.pot))
        return tuple(entry_of(row.pot, row.amount, row.balance, row.account) for row in rows)
