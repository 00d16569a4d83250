"""Money moved by people: deposits, withdrawals, transfers, refunds and adjustments.

Each names who and why, and can carry a key of the caller's: its repeat returns the
first, and moves nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from steward.bank.errors import BankRefused
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations, expire, in_order_of_end, takes_money
from steward.bank.ledger.charges import Charges
from steward.bank.ledger.postings import Moves, Session, asking, checked_amount, clean
from steward.bank.ledger.records import Account, By, Transfer
from steward.bank.ledger.tables import ADJUSTED, ISSUED, USAGE

_NOTHING: Final[Mapping[int, int]] = MappingProxyType({})


class Transfers(Moves):
    """What can be asked of and done to money.

    Args:
        session: The transaction.
        accounts: The accounts in it.
        allocations: The allocations in it.
        charges: The charges in it.
    """

    def __init__(
        self, session: Session, accounts: Accounts, allocations: Allocations, charges: Charges
    ) -> None:
        super().__init__(session)
        self._accounts = accounts
        self._allocations = allocations
        self._charges = charges

    def deposit(self, account: str, amount: int, by: By, *, allocation: int = 0) -> Transfer:
        """Issue money to an account: into one of its allocations, the open-ended one for 0.

        Raises:
            BankUsage: There is no such account or allocation, it takes no money, or the
                amount is none.
        """
        whose = self._accounts.need(account)
        checked_amount(amount)
        asked = asking("deposit", whose.name, amount, allocation)
        return self.once(by, asked) or self.move(
            "deposit",
            by,
            {ISSUED: -amount, self._target(whose, allocation): amount},
            asked=asked,
            about=whose.name,
        )

    def withdraw(self, account: str, amount: int, by: By, *, allocation: int = 0) -> Transfer:
        """Take money back from an account.

        From one of its allocations, or for 0 from the open-ended one as far as there is
        something in it, and then from the others, those that end last first.

        Raises:
            BankRefused: There is not so much.
            BankUsage: There is no such account or allocation, or the amount is none.
        """
        whose = self._accounts.need(account)
        checked_amount(amount)
        asked = asking("withdraw", whose.name, amount, allocation)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        taken = self._taken(whose.name, amount, allocation)
        return self.move("withdraw", by, taken | {ISSUED: amount}, asked=asked, about=whose.name)

    def transfer(
        self,
        source: str,
        target: str,
        amount: int,
        by: By,
        *,
        source_allocation: int = 0,
        target_allocation: int = 0,
    ) -> Transfer:
        """Move money between accounts, or between allocations of one.

        Raises:
            BankRefused: There is not so much.
            BankUsage: There is no such account or allocation, they are the same, the target
                takes no money, or the amount is none.
        """
        giver, taker = self._accounts.need(source), self._accounts.need(target)
        checked_amount(amount)
        allocations = (source_allocation, target_allocation)
        asked = asking("transfer", giver.name, taker.name, amount, *allocations)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        where = self._target(taker, target_allocation)
        taken = self._taken(giver.name, amount, source_allocation, but=where)
        return self.move("transfer", by, taken | {where: amount}, asked=asked, about=giver.name)

    def refund(
        self, account: str, amount: int, by: By, *, user: str = "", allocation: int = 0
    ) -> Transfer:
        """Give back what was used, for no charge in particular.

        Raises:
            BankUsage: There is no such account or allocation, it takes no money, or the
                amount is none.
        """
        whose = self._accounts.need(account)
        checked_amount(amount)
        user = clean(user)
        asked = asking("refund", whose.name, amount, user, allocation)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        moves = {USAGE: -amount, self._target(whose, allocation): amount}
        made = self.move("refund", by, moves, asked=asked, about=whose.name, user=user)
        self._accounts.spend(whose.name, user, -amount)
        return made

    def adjust(self, account: str, amount: int, by: By, *, allocation: int = 0) -> Transfer:
        """Put right what is wrong for reasons outside; below zero to take away.

        Raises:
            BankRefused: An allocation that ends would be below zero.
            BankUsage: There is no such account or allocation, or the amount is none.
        """
        whose = self._accounts.need(account)
        checked_amount(abs(amount))
        asked = asking("adjust", whose.name, amount, allocation)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        where = self._allocations.of_account(whose.name, allocation)
        if where.end is not None and where.balance + amount < 0:
            raise BankRefused(f"there is less than that in allocation {where.number}", allocation)
        return self.move(
            "adjust", by, {ADJUSTED: -amount, where.number: amount}, asked=asked, about=whose.name
        )

    def refund_charge(self, key: str, by: By, *, amount: int | None = None) -> Transfer:
        """Give back a part of a charge, or all of it; see ``Charges.refund``.

        Raises:
            BankRefused: It did not come to so much.
            BankUsage: There is no such charge, nothing to give back, or the amount is none.
        """
        return self._charges.refund(key, by, amount)

    def expire(self, by: By, *, kept: Mapping[int, int] = _NOTHING) -> list[Transfer]:
        """Empty the allocations that have ended; see ``steward.bank.ledger.allocations``.

        Args:
            by: Who does it; ``by.at`` is the present.
            kept: By allocation, what jobs that started on it may still need.
        """
        return expire(self._session, self._allocations, self, by, kept)

    def _target(self, account: Account, allocation: int) -> int:
        return self._allocations.of_account(takes_money(account).name, allocation).number

    def _taken(self, account: str, amount: int, allocation: int, but: int = 0) -> dict[int, int]:
        """What goes out of each allocation, as numbers below zero."""
        if allocation:
            chosen = [self._allocations.of_account(account, allocation)]
        else:
            chosen = list(reversed(in_order_of_end(self._allocations.of(account))))
        taken: dict[int, int] = {}
        missing = amount
        for each in chosen:
            if each.number == but:
                continue
            part = min(missing, max(each.balance, 0))
            if part:
                taken[each.number] = -part
                missing -= part
        if missing:
            raise BankRefused(
                f"{account} has not so much to give: {missing} micro-SU are missing", account
            )
        return taken
