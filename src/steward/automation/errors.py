"""What can go wrong in automation."""

from typing import Any

from steward.core.errors import Missing, Refused, StewardError, Unavailable, UsageError


class AutomationError(StewardError):
    """An operation could not be done."""


class DoneInPart(AutomationError):
    """Some of it was done and some was not.

    Args:
        what: One line.
        result: What became of each.
    """

    def __init__(self, what: str, result: Any) -> None:
        super().__init__(what, result)
        self.result = result


class OutOfTime(AutomationError):
    """It took longer than it may ([actions] timeout_s); what was begun is not undone."""


class AuditUnavailable(Unavailable):
    """The audit log cannot be written or read now."""


class UnknownOperation(UsageError, Missing):
    """There is no operation of this name."""


class WrongParameters(UsageError):
    """An operation's parameters are not what it takes."""


class NotYours(Refused):
    """The asker may not do this, or a reason or a drain is somebody else's."""


class RuleError(UsageError):
    """A rule that cannot be read, or says what makes no sense."""
