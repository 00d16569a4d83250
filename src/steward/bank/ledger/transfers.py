"""Manual transfers in the ledger: deposit, withdraw, transfer, refund, adjust, expire.

Each records author and reason, and may carry an idempotency key: a repeat returns the first
transfer and moves nothing. Called by ``steward.bank.actions.money`` and by imports; scheduled
work calls :meth:`Transfers.expire`. Amounts are micro-SU.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from steward.bank.errors import BankRefused
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import (
    Allocations,
    expire_allocations,
    require_payable,
    sort_by_end,
)
from steward.bank.ledger.charges import Charges
from steward.bank.ledger.postings import (
    LedgerSession,
    TransferWriter,
    encode_ledger_request,
    sanitize_text,
    validate_amount,
)
from steward.bank.ledger.records import Account, Authorship, Transfer
from steward.bank.ledger.tables import ADJUSTED, ISSUED, USAGE

_NO_AMOUNTS: Final[Mapping[int, int]] = MappingProxyType({})


class Transfers(TransferWriter):
    """Manual transfers: move money on behalf of people, and expire ended allocations.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
        allocations: The allocations of the same transaction.
        charges: The charges of the same transaction.
    """

    def __init__(
        self, session: LedgerSession, accounts: Accounts, allocations: Allocations, charges: Charges
    ) -> None:
        super().__init__(session)
        self._accounts = accounts
        self._allocations = allocations
        self._charges = charges

    def deposit(
        self, account: str, amount: int, by: Authorship, *, allocation: int = 0
    ) -> Transfer:
        """Deposit new money in one of an account's allocations; the open-ended one for 0.

        Raises:
            BankUsage: The account or allocation does not exist or takes no money, or the amount is
                invalid.
        """
        whose = self._accounts.need(account)
        validate_amount(amount)
        asked = encode_ledger_request("deposit", whose.name, amount, allocation)
        return self.once(by, asked) or self.move(
            "deposit",
            by,
            {ISSUED: -amount, self._target(whose, allocation): amount},
            asked=asked,
            about=whose.name,
        )

    def withdraw(
        self, account: str, amount: int, by: Authorship, *, allocation: int = 0
    ) -> Transfer:
        """Withdraw money from an account.

        It comes from the given allocation; for 0 from the open-ended one as far as its balance
        goes, then from the others, latest end first.

        Raises:
            BankRefused: The balance is too low.
            BankUsage: The account or allocation does not exist, or the amount is invalid.
        """
        whose = self._accounts.need(account)
        validate_amount(amount)
        asked = encode_ledger_request("withdraw", whose.name, amount, allocation)
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
        by: Authorship,
        *,
        source_allocation: int = 0,
        target_allocation: int = 0,
    ) -> Transfer:
        """Transfer money between accounts, or between allocations of one account.

        Raises:
            BankRefused: The source's balance is too low.
            BankUsage: An account or allocation does not exist, both are the same, the target takes
                no money, or the amount is invalid.
        """
        giver, taker = self._accounts.need(source), self._accounts.need(target)
        validate_amount(amount)
        allocations = (source_allocation, target_allocation)
        asked = encode_ledger_request("transfer", giver.name, taker.name, amount, *allocations)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        where = self._target(taker, target_allocation)
        taken = self._taken(giver.name, amount, source_allocation, but=where)
        return self.move("transfer", by, taken | {where: amount}, asked=asked, about=giver.name)

    def refund(
        self, account: str, amount: int, by: Authorship, *, user: str = "", allocation: int = 0
    ) -> Transfer:
        """Refund usage that belongs to no particular charge.

        Raises:
            BankUsage: The account or allocation does not exist or takes no money, or the amount is
                invalid.
        """
        whose = self._accounts.need(account)
        validate_amount(amount)
        user = sanitize_text(user)
        asked = encode_ledger_request("refund", whose.name, amount, user, allocation)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        moves = {USAGE: -amount, self._target(whose, allocation): amount}
        made = self.move("refund", by, moves, asked=asked, about=whose.name, user=user)
        self._accounts.spend(whose.name, user, -amount)
        return made

    def adjust(self, account: str, amount: int, by: Authorship, *, allocation: int = 0) -> Transfer:
        """Adjust a balance for reasons outside the bank; a negative amount takes away.

        Raises:
            BankRefused: An allocation with an end would go below zero.
            BankUsage: The account or allocation does not exist, or the amount is invalid.
        """
        whose = self._accounts.need(account)
        validate_amount(abs(amount))
        asked = encode_ledger_request("adjust", whose.name, amount, allocation)
        earlier = self.once(by, asked)
        if earlier is not None:
            return earlier
        where = self._allocations.of_account(whose.name, allocation)
        if where.end is not None and where.balance + amount < 0:
            raise BankRefused(f"there is less than that in allocation {where.number}", allocation)
        return self.move(
            "adjust", by, {ADJUSTED: -amount, where.number: amount}, asked=asked, about=whose.name
        )

    def refund_charge(self, key: str, by: Authorship, *, amount: int | None = None) -> Transfer:
        """Refund part or all of a charge; see ``Charges.refund``.

        Raises:
            BankRefused: The amount is more than the charge.
            BankUsage: The charge does not exist, nothing is left to refund, or the amount is
                invalid.
        """
        return self._charges.refund(key, by, amount)

    def expire(self, by: Authorship, *, kept: Mapping[int, int] = _NO_AMOUNTS) -> list[Transfer]:
        """Empty the allocations that have ended; see ``steward.bank.ledger.allocations``.

        Args:
            by: Author; ``by.at`` is the present.
            kept: By allocation number, the amount that jobs started on it may still need.
        """
        return expire_allocations(self._session, self._allocations, self, by, kept)

    def _target(self, account: Account, allocation: int) -> int:
        return self._allocations.of_account(require_payable(account).name, allocation).number

    def _taken(self, account: str, amount: int, allocation: int, but: int = 0) -> dict[int, int]:
        """Divide a withdrawal among allocations: negative amounts by allocation number."""
        if allocation:
            chosen = [self._allocations.of_account(account, allocation)]
        else:
            chosen = list(reversed(sort_by_end(self._allocations.of(account))))
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
