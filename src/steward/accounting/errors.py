"""The family of accounting's errors."""

from steward.core.errors import StewardError, Unavailable, UsageError


class AccountingError(StewardError):
    """The books cannot be used as they are."""


class AccountingUnavailable(Unavailable):
    """The books cannot be read or written now."""


class AccountingUsage(UsageError):
    """The books cannot be asked so."""
