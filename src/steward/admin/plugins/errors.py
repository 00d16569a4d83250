"""What can go wrong with the plugins that Slurm loads."""

from steward.core.errors import StewardError, UsageError


class NativeError(StewardError):
    """A plugin cannot be built, put into its place, or looked at."""


class NoVersion(NativeError, UsageError):
    """What is named is no version of Slurm."""


class HeadersMissing(NativeError):
    """Slurm's headers are not where they were looked for."""


class BuildFailed(NativeError):
    """The compiler is missing, or did not take the plugin."""
