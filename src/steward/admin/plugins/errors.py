"""What can go wrong with the plugins that Slurm loads."""

import msgspec

from steward.core.errors import StewardError, UsageError


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with something that Slurm loads, and what mends it.

    Attributes:
        what: The object and what is wrong with it.
        mend: Commands to type, or lines to set, that mend it; none where ``what`` says all.
    """

    what: str
    mend: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return both in one line."""
        return ": ".join(part for part in (self.what, "; ".join(self.mend)) if part)


class NativeError(StewardError):
    """A plugin cannot be built, put into its place, or looked at."""


class NoVersion(NativeError, UsageError):
    """What is named is no version of Slurm."""


class HeadersMissing(NativeError):
    """Slurm's headers are not where they were looked for."""


class BuildFailed(NativeError):
    """The compiler is missing, or did not take the plugin."""
