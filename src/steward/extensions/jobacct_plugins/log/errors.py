"""The errors of the job log."""

from steward.accounting.errors import AccountingError, AccountingUnavailable


class LogError(AccountingError):
    """A job log cannot be used as it is; ``offender`` is its path."""


class LogUnavailable(AccountingUnavailable):
    """A job log cannot be read or written now; ``offender`` is its path."""
