"""What can go wrong in the bank."""

from steward.core.errors import Conflict, Missing, Refused, StewardError, Unavailable, UsageError


class BankError(StewardError):
    """Something in the bank cannot be done; ``offender`` is what it is about."""


class BankUsage(UsageError):
    """A request of the bank is wrong: an unknown account, an amount that is none."""


class NotInBank(BankUsage, Missing):
    """There is no such account, allocation or charge."""


class BankRefused(Refused):
    """The asker may not, or the account cannot pay."""


class LedgerUnavailable(Unavailable):
    """The ledger's database cannot be used now."""


class GateUnavailable(Unavailable):
    """The gate does not answer now."""


class NoRate(BankError, Conflict):
    """Nothing says what a partition costs, nor that it is free; ``offender`` is its name."""


class NoEstimate(BankError, Conflict):
    """What a job may cost cannot be told: its partition is unknown, an array has no tasks."""
