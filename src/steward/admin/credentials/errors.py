"""Errors of credentials: the database, unknown credentials, and rejected users."""

from steward.core.errors import NotFound, StewardError, Unavailable, UnknownCredential


class CredentialsError(StewardError):
    """The credentials database cannot be used."""


class CredentialsUnavailable(Unavailable):
    """The credentials database cannot be used now."""


class MungeUserRejected(UnknownCredential):
    """A user whom MUNGE identifies is not admitted with this credential.

    Args:
        message: One line.
        uid: Uid that MUNGE reports.
    """

    def __init__(self, message: str, uid: int) -> None:
        super().__init__(message, uid)
        self.uid = uid


class CredentialMissing(NotFound):
    """There is no credential of that number, or it belongs to another user."""
