"""Errors of ``steward web``; ``application.status_of`` maps each to an HTTP status."""

from steward.core.errors import PermissionRefused, StewardError, UsageError


class WebError(StewardError):
    """Error: the web server cannot start, or a reply is unusable."""


class LoginRequired(PermissionRefused):
    """Error: login required, because there is no session or it expired."""


class CsrfError(PermissionRefused):
    """Error: CSRF check failed, a change came without the token of a page of the session."""


class RateLimitExceeded(PermissionRefused):
    """Error: rate limit exceeded.

    Args:
        message: Message in one line.
        wait_s: Seconds until the next attempt, for Retry-After.
    """

    def __init__(self, message: str, wait_s: float = 1.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class PageNotFound(UsageError):
    """Error: no page at this address."""


class MalformedRequest(UsageError):
    """Error: malformed API request."""


class RequestTooLarge(UsageError):
    """Error: the request is larger than the daemon accepts."""


class UnsupportedMediaType(UsageError):
    """Error: unsupported media type of a request's body."""
