"""What can go wrong in automation."""

from steward.errors import Refused, StewardError, UsageError


class AutomationError(StewardError):
    """An operation could not be done."""


class UnknownOperation(UsageError):
    """There is no operation of this name."""


class WrongParameters(UsageError):
    """An operation's parameters are not what it takes."""


class NotYours(Refused):
    """The asker may not do this, or a reason or a drain is somebody else's."""


class RuleError(UsageError):
    """A rule that cannot be read, or says what makes no sense."""
