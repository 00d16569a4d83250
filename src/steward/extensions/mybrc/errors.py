"""What an answer of the API can be, other than what was asked for."""

from steward.core.errors import StewardError, Unavailable


class ApiError(StewardError):
    """The request is answered with a status other than success.

    Args:
        status: HTTP's status.
        what: What the client is told.
        wait_s: Seconds after which it may try again; 0 to say nothing of that.
    """

    def __init__(self, status: int, what: str, wait_s: int = 0) -> None:
        super().__init__(what)
        self.status = status
        self.wait_s = wait_s


class RemoteUnavailable(Unavailable):
    """The myBRC server elsewhere does not take anything now."""


class RemoteRejected(StewardError):
    """The myBRC server elsewhere does not take this one thing."""


class RemoteFailed(StewardError):
    """The myBRC server elsewhere fails over this one thing, for all that is known."""
