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
    validate_amount,
)
from steward.bank.ledger.records import Account, Authorship, Transfer
from steward.bank.ledger.tables import ADJUSTED, ISSUED, USAGE
from steward.bank.money import format_money
from steward.core.sqlalchemy_tables import sanitize_text

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
        self, account: str, amount: int, author: Authorship, *, allocation: int = 0
    ) -> Transfer:
        """Deposit new money in one of an account's allocations; the open-ended one for 0.

        Raises:
            BankUsage: The account or allocation does not exist or takes no money, or the amount is
                invalid.
        """
        bank_account = self._accounts.require(account)
        validate_amount(amount)
        request = encode_ledger_request("deposit", bank_account.name, amount, allocation)
        return self.find_repeat(author, request) or self.write_transfer(
            "deposit",
            author,
            {ISSUED: -amount, self._find_target(bank_account, allocation): amount},
            request=request,
            account=bank_account.name,
        )

    def withdraw(
        self, account: str, amount: int, author: Authorship, *, allocation: int = 0
    ) -> Transfer:
        """Withdraw money from an account.

        It comes from the given allocation; for 0 from the open-ended one as far as its balance
        goes, then from the others, latest end first.

        Raises:
            BankRefused: The balance is too low.
            BankUsage: The account or allocation does not exist, or the amount is invalid.
        """
        bank_account = self._accounts.require(account)
        validate_amount(amount)
        request = encode_ledger_request("withdraw", bank_account.name, amount, allocation)
        earlier = self.find_repeat(author, request)
        if earlier is not None:
            return earlier
        withdrawn = self._divide_withdrawal(bank_account.name, amount, allocation)
        return self.write_transfer(
            "withdraw",
            author,
            withdrawn | {ISSUED: amount},
            request=request,
            account=bank_account.name,
        )

    def transfer(
        self,
        source: str,
        target: str,
        amount: int,
        author: Authorship,
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
        source_account, target_account = (
            self._accounts.require(source),
            self._accounts.require(target),
        )
        validate_amount(amount)
        allocations = (source_allocation, target_allocation)
        request = encode_ledger_request(
            "transfer", source_account.name, target_account.name, amount, *allocations
        )
        earlier = self.find_repeat(author, request)
        if earlier is not None:
            return earlier
        target_pot = self._find_target(target_account, target_allocation)
        withdrawn = self._divide_withdrawal(
            source_account.name, amount, source_allocation, excluded=target_pot
        )
        return self.write_transfer(
            "transfer",
            author,
            withdrawn | {target_pot: amount},
            request=request,
            account=source_account.name,
        )

    def refund(
        self, account: str, amount: int, author: Authorship, *, user: str = "", allocation: int = 0
    ) -> Transfer:
        """Refund usage that belongs to no particular charge.

        Raises:
            BankUsage: The account or allocation does not exist or takes no money, or the amount is
                invalid.
        """
        bank_account = self._accounts.require(account)
        validate_amount(amount)
        user = sanitize_text(user)
        request = encode_ledger_request("refund", bank_account.name, amount, user, allocation)
        earlier = self.find_repeat(author, request)
        if earlier is not None:
            return earlier
        amounts = {USAGE: -amount, self._find_target(bank_account, allocation): amount}
        transfer = self.write_transfer(
            "refund", author, amounts, request=request, account=bank_account.name, user=user
        )
        self._accounts.add_spent(bank_account.name, user, -amount)
        return transfer

    def adjust(
        self, account: str, amount: int, author: Authorship, *, allocation: int = 0
    ) -> Transfer:
        """Adjust a balance for reasons outside the bank; a negative amount takes away.

        Raises:
            BankRefused: An allocation with an end would go below zero.
            BankUsage: The account or allocation does not exist, or the amount is invalid.
        """
        bank_account = self._accounts.require(account)
        validate_amount(abs(amount))
        request = encode_ledger_request("adjust", bank_account.name, amount, allocation)
        earlier = self.find_repeat(author, request)
        if earlier is not None:
            return earlier
        target = self._allocations.require_own(bank_account.name, allocation)
        if target.end is not None and target.balance + amount < 0:
            raise BankRefused(
                f"insufficient funds in allocation {target.number} of account {bank_account.name}",
                allocation,
            )
        return self.write_transfer(
            "adjust",
            author,
            {ADJUSTED: -amount, target.number: amount},
            request=request,
            account=bank_account.name,
        )

    def refund_charge(self, key: str, author: Authorship, *, amount: int | None = None) -> Transfer:
        """Refund part or all of a charge; see ``Charges.refund``.

        Raises:
            BankRefused: The amount is more than the charge.
            BankUsage: The charge does not exist, nothing is left to refund, or the amount is
                invalid.
        """
        return self._charges.refund(key, author, amount)

    def expire(
        self, author: Authorship, *, reserved: Mapping[int, int] = _NO_AMOUNTS
    ) -> list[Transfer]:
        """Empty the allocations that have ended; see ``steward.bank.ledger.allocations``.

        Args:
            author: Author; ``author.at`` is the present.
            reserved: By allocation number, the amount that jobs started on it may still need.
        """
        return expire_allocations(self._session, self._allocations, self, author, reserved)

    def _find_target(self, account: Account, allocation: int) -> int:
        return self._allocations.require_own(require_payable(account).name, allocation).number

    def _divide_withdrawal(
        self, account: str, amount: int, allocation: int, excluded: int = 0
    ) -> dict[int, int]:
        """Divide a withdrawal among allocations: negative amounts by allocation number."""
        if allocation:
            candidates = [self._allocations.require_own(account, allocation)]
        else:
            candidates = list(reversed(sort_by_end(self._allocations.list_own(account))))
        amounts: dict[int, int] = {}
        missing = amount
        for candidate in candidates:
            if candidate.number == excluded:
                continue
            share = min(missing, max(candidate.balance, 0))
            if share:
                amounts[candidate.number] = -share
                missing -= share
        if missing:
            raise BankRefused(
                f"insufficient funds: account {account} lacks {format_money(missing)} SU", account
            )
        return amounts
