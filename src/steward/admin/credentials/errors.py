"""Errors of credentials: the database, unknown credentials, and rejected users."""

from steward.core.errors import Missing, Refused, StewardError, Unavailable


class CredentialsError(StewardError):
    """The credentials database cannot be used."""


class CredentialsUnavailable(Unavailable):
    """The credentials database cannot be used now."""


class NotKnown(Refused):
    """A credential is wrong, expired or revoked; the message does not say which."""


class NotLetIn(NotKnown):
    """A user whom MUNGE identifies is not admitted with this credential.

    Args:
        what: One line.
        uid: Uid that MUNGE reports.
    """

    def __init__(self, what: str, uid: int) -> None:
        super().__init__(what, uid)
        self.uid = uid


class NoSuchCredential(Missing):
    """There is no credential of that number, or it belongs to another user."""
