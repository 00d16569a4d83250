"""What can go wrong when Steward is set up."""

from steward.core.errors import StewardError


class SetupError(StewardError):
    """Something cannot be set up, or is there already."""
