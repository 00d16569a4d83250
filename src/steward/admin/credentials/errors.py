"""What can go wrong with credentials."""

from steward.core.errors import Missing, Refused, StewardError, Unavailable


class CredentialsError(StewardError):
    """The database of credentials cannot be used."""


class CredentialsUnavailable(Unavailable):
    """The database of credentials cannot be used now."""


class NotKnown(Refused):
    """A credential that is wrong, over or taken back. Which, is nobody's business."""


class NotLetIn(NotKnown):
    """Somebody whom MUNGE names, and who is not let in with this credential.

    Args:
        what: One line.
        uid: Whom it names.
    """

    def __init__(self, what: str, uid: int) -> None:
        super().__init__(what, uid)
        self.uid = uid


class NoSuchCredential(Missing):
    """There is no credential of that number, or it is somebody else's."""
