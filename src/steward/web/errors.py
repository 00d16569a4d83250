"""Errors of ``steward web``; ``application.status_of`` maps each to an HTTP status."""

from steward.core.errors import PermissionRefused, StewardError, UsageError


class WebError(StewardError):
    """The web server cannot start, or a reply is unusable."""


class LoginRequired(PermissionRefused):
    """Login required: no session, or an expired one."""


class CsrfError(PermissionRefused):
    """CSRF check failed: a change came without the token of a page of the session."""


class RateLimitExceeded(PermissionRefused):
    """Rate limit exceeded.

    Args:
        what: Message in one line.
        wait_s: Seconds until the next attempt, for Retry-After.
    """

    def __init__(self, what: str, wait_s: float = 1.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class PageNotFound(UsageError):
    """No page at this address."""


class MalformedRequest(UsageError):
    """Malformed API request."""


class RequestTooLarge(UsageError):
    """Request larger than the daemon accepts."""


class UnsupportedMediaType(UsageError):
    """Unsupported media type of a request's body."""
