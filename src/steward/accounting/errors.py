"""Accounting errors: base classes for failure, unavailability and wrong usage."""

from steward.core.errors import StewardError, Unavailable, UsageError


class AccountingError(StewardError):
    """Accounting data cannot be used as they are."""


class AccountingUnavailable(Unavailable):
    """Accounting data cannot be read or written now. Retry later."""


class AccountingUsage(UsageError):
    """Invalid request to accounting."""
