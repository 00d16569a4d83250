"""The root of every error that Steward raises on purpose.

Each room derives its own family from :class:`StewardError` and carries the
offending object in it. The command line prints ``str(error)`` as its one line
and exits with ``error.exit_code``; nothing else in Steward catches the root.
"""


class StewardError(Exception):
    """Something went wrong that a person can do something about.

    Args:
        what: One line: what happened, and what to do about it.
        offender: The object that it happened to (a path, an event, a name).
    """

    exit_code = 1

    def __init__(self, what: str, offender: object = None) -> None:
        super().__init__(what)
        self.offender = offender


class UsageError(StewardError):
    """The caller asked for something that cannot be asked for."""

    exit_code = 2


class Unavailable(StewardError):
    """A thing we depend on is away (disk full, mount gone, server down): try again later."""


class Refused(StewardError):
    """The one who asks may not have this."""


class Missing(StewardError):
    """What is asked for is not there, or not for the one who asks."""


class Conflict(StewardError):
    """It cannot be done as things stand: it is being done, or was done otherwise."""


class Failed(StewardError):
    """Steward itself has failed; its log says why."""
