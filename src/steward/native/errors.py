"""What can go wrong with the plugins that Slurm loads."""

from steward.errors import StewardError


class NativeError(StewardError):
    """A plugin cannot be built, put into its place, or looked at."""


class HeadersMissing(NativeError):
    """Slurm's headers are not where they were looked for."""


class BuildFailed(NativeError):
    """The compiler is missing, or did not take the plugin."""
