"""Error classes: the root of all of Steward's deliberate errors and its general subclasses.

Each package derives its own errors from :class:`StewardError` and passes the offending
object. The command line prints ``str(error)`` as one line and exits with
``error.exit_code``; nothing else in Steward catches the root.
"""


class StewardError(Exception):
    """An error that a person can do something about.

    Args:
        message: One line: what failed and what to do about it.
        offender: Object that it concerns (a path, an event, a name).
    """

    exit_code = 1

    def __init__(self, message: str, offender: object = None) -> None:
        super().__init__(message)
        self.offender = offender


class UsageError(StewardError):
    """Invalid usage: the caller asked for something that does not exist or does not fit."""

    exit_code = 2


class Unavailable(StewardError):
    """A dependency is unavailable (disk full, mount missing, server down): try again later."""


class PermissionRefused(StewardError):
    """Permission denied: the caller may not do or see this."""


class UnknownCredential(PermissionRefused):
    """A credential is wrong, expired or revoked; the message does not say which."""


class NotFound(StewardError):
    """The requested object does not exist, or not for this caller."""


class Conflict(StewardError):
    """Conflict with the present state: in progress already, or done differently before."""


class InternalFailure(StewardError):
    """Internal failure of Steward; its log has the reason."""
