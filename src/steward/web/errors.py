"""What can go wrong between a browser and the daemon."""

from steward.core.errors import Refused, StewardError, UsageError


class WebError(StewardError):
    """The pages cannot be served."""


class LoginNeeded(Refused):
    """Nobody is logged in, or not any more."""


class Forged(Refused):
    """A request that changes something came without the token of the page that it claims."""


class TooMany(Refused):
    """Too much was asked in a short time.

    Args:
        what: One line.
        wait_s: After how many seconds it may be asked again.
    """

    def __init__(self, what: str, wait_s: float = 1.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class NoSuchPage(UsageError):
    """There is nothing at this address."""


class WrongRequest(UsageError):
    """A request to the API is not of its shape."""


class TooLarge(UsageError):
    """A request holds more than the daemon takes."""


class WrongMedia(UsageError):
    """A request's body is of a kind that is not read."""
