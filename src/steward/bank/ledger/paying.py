"""Takes what a charge comes to from the allocations that pay it, and gives back to them."""

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import func, select

from steward.bank.errors import BankRefused
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.drawing import beyond, drawn, returned
from steward.bank.ledger.moving import Moves
from steward.bank.ledger.records import Allocation, By, Transfer
from steward.bank.ledger.session import Session
from steward.bank.ledger.tables import USAGE, act, entry
from steward.bank.records import Charge


@dataclass
class Standing:
    """How a charge stands while it is posted.

    Attributes:
        number: Its number.
        key: Its key.
        account: Which account it is charged to.
        user: Whose it is.
        payer: The account that pays.
        overdraw: The part of it that went beyond the payer's means.
        paid: What each allocation has paid.
    """

    number: int
    key: str
    account: str
    user: str
    payer: str
    overdraw: int = 0
    paid: dict[int, int] = field(default_factory=dict)

    @property
    def due(self) -> int:
        """What was paid altogether."""
        return sum(self.paid.values())


class Paying:
    """Moves money for charges.

    Args:
        session: The transaction.
        accounts: The accounts in it.
        allocations: The allocations in it.
        moves: The transfers in it.
    """

    def __init__(
        self, session: Session, accounts: Accounts, allocations: Allocations, moves: Moves
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations
        self._moves = moves

    def take(
        self, stands: Standing, new: Charge, amount: int, by: By, why: str, is_first: bool
    ) -> Transfer:
        """Take what is missing from the allocations that were there when the run began."""
        there = self._there(stands.payer, began(new) or self._session.now(by))
        taken = drawn(amount, there, new.shares, stands.paid)
        open_ended = there[-1]
        below = open_ended.balance - taken.get(open_ended.number, 0)
        made = self._moves.move(
            "charge" if is_first else "correction",
            By(who=by.who, at=by.at),
            {where: -part for where, part in taken.items()} | {USAGE: amount},
            why=why,
            about=stands.account,
            user=stands.user,
            charge=stands.number,
            charge_key=stands.key,
        )
        self._accounts.spend(stands.account, stands.user, amount)
        credit = self._credit(stands.payer)
        stands.overdraw += beyond(below, credit) - beyond(open_ended.balance, credit)
        for where, part in taken.items():
            stands.paid[where] = stands.paid.get(where, 0) + part
        return made

    def give_back(
        self, stands: Standing, amount: int, by: By, why: str, *, refund_asked: str = ""
    ) -> Transfer:
        """Give back a part, to the allocations that were drawn on last before the others.

        Args:
            stands: The charge.
            amount: How much; no more than was paid.
            by: Who does it.
            why: The reason.
            refund_asked: What a caller asked for who wants it back by hand.
        """
        those = self._allocations.needed(list(stands.paid))
        back = returned(amount, stands.paid, those)
        made = self._moves.move(
            "refund" if refund_asked else "correction",
            by if refund_asked else By(who=by.who, at=by.at),
            back | {USAGE: -amount},
            asked=refund_asked,
            why=why,
            about=stands.account,
            user=stands.user,
            charge=stands.number,
            charge_key=stands.key,
        )
        self._accounts.spend(stands.account, stands.user, -amount)
        for where, part in back.items():
            stands.paid[where] -= part
        unended = {each.number for each in those if each.end is None}
        to_unended = sum(part for where, part in back.items() if where in unended)
        stands.overdraw = max(0, stands.overdraw - to_unended)
        return made

    def refuse_beyond(self, new: Charge, payer: str, amount: int) -> None:
        """Refuse what would take an account further below its means.

        Raises:
            BankRefused: It would.
        """
        if amount <= 0:
            return
        *dated, open_ended = self._there(payer, began(new) or self._session.now())
        means = open_ended.balance + sum(max(each.balance, 0) for each in dated)
        if amount > means + self._credit(payer):
            raise BankRefused(f"{payer} cannot pay {amount} micro-SU", payer)

    def paid(self, number: int) -> dict[int, int]:
        """What each allocation has paid of a charge until now."""
        chosen = (
            select(entry.c.pot, func.sum(entry.c.amount).label("amount"))
            .join(act, act.c.number == entry.c.act)
            .where(act.c.charge == number, entry.c.pot > 0)
            .group_by(entry.c.pot)
        )
        return {row.pot: -int(row.amount) for row in self._session.rows(chosen) if row.amount}

    def _there(self, payer: str, at: datetime) -> list[Allocation]:
        """The allocations that can pay for a run of a time, the open-ended one last."""
        return [each for each in self._allocations.of(payer, ended=True) if each.active(at)]

    def _credit(self, payer: str) -> int:
        found = self._accounts.get(payer)
        return 0 if found is None else found.credit


def began(new: Charge) -> datetime | None:
    """When the run that is charged began; None where that is not told."""
    return new.use.start if new.use is not None else None
