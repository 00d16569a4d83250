"""Exceptions of the bank: wrong requests, rejections, unavailable services, missing rates."""

from steward.core.errors import (
    Conflict,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UsageError,
)


class BankError(StewardError):
    """Error: a bank operation cannot be done; ``offender`` is the object concerned."""


class BankUsage(UsageError):
    """Error: a request to the bank is invalid, such as an unknown account or a wrong amount."""


class NotInBank(BankUsage, NotFound):
    """Error: the account, allocation or charge does not exist."""


class BankRefused(PermissionRefused):
    """Error: the caller lacks the right, or the account has insufficient funds."""


class LedgerUnavailable(Unavailable):
    """Error: the ledger's database cannot be used now."""


class GateUnavailable(Unavailable):
    """Error: the gate does not answer now."""


class NoRate(BankError, Conflict):
    """Error: a partition has no rate and is not marked free; ``offender`` is its name."""


class NoEstimate(BankError, Conflict):
    """Error: no estimate is possible, as for an unknown partition or an array without tasks."""
