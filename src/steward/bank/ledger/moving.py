"""Transfers as they are entered and shown, whatever they mean."""

from collections.abc import Mapping

from sqlalchemy import select

from steward.bank.errors import BankUsage
from steward.bank.ledger.records import By, Entry, Kind, Transfer
from steward.bank.ledger.session import Session, clean, entry_of
from steward.bank.ledger.tables import act, charge, entry, pot
from steward.bank.money import MOST
from steward.core.timestamps import micros, moment


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
