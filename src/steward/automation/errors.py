"""Errors of automation: failed operations, wrong parameters, missing permission, bad rules."""

from typing import Any

from steward.core.errors import NotFound, PermissionRefused, StewardError, Unavailable, UsageError


class AutomationError(StewardError):
    """An operation failed."""


class PartialFailure(AutomationError):
    """An operation succeeded for some targets and failed for others.

    Args:
        message: Error message, one line.
        result: Outcome per target.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message, result)
        self.result = result


class OperationTimeout(AutomationError):
    """An operation exceeded its time limit ([actions] timeout_s); finished parts are not undone."""


class AuditUnavailable(Unavailable):
    """The audit log cannot be read or written now."""


class UnknownOperation(UsageError, NotFound):
    """No operation has this name."""


class InvalidParameters(UsageError):
    """An operation got unknown, missing or invalid parameters."""


class OperationForbidden(PermissionRefused):
    """The caller lacks permission, or a reason or drain belongs to somebody else."""


class RuleError(UsageError):
    """A rule cannot be parsed or is inconsistent."""
