"""What can go wrong between a browser and the daemon."""

from steward.errors import Refused, StewardError, UsageError


class WebError(StewardError):
    """The pages cannot be served."""


class LoginNeeded(Refused):
    """Nobody is logged in, or not any more."""


class Forged(Refused):
    """A request that changes something came without the token of the page that it claims."""


class TooMany(Refused):
    """Too much was asked in a short time."""


class NoSuchPage(UsageError):
    """There is nothing at this address."""
