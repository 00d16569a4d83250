"""What can go wrong when Steward is asked."""

from steward.core.errors import StewardError, Unavailable


class ClientError(StewardError):
    """An answer cannot be understood."""


class DaemonAway(Unavailable):
    """No daemon answers."""
