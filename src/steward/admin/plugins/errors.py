"""Faults that the checks of plugins report, and errors of building and installing plugins."""

import msgspec

from steward.core.errors import StewardError, UsageError


class PluginFault(msgspec.Struct, frozen=True):
    """A fault of something that Slurm loads, with its repair.

    Attributes:
        what: The object and what is wrong with it.
        mend: Commands to type, or lines to set, that repair it; empty if ``what`` says it all.
    """

    what: str
    mend: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return both in one line."""
        return ": ".join(text for text in (self.what, "; ".join(self.mend)) if text)


class PluginInstallError(StewardError):
    """A plugin cannot be built, installed or checked."""


class InvalidVersion(PluginInstallError, UsageError):
    """The given text is no version of Slurm."""


class HeadersMissing(PluginInstallError):
    """Slurm's headers are not in the given directory."""


class BuildFailed(PluginInstallError):
    """The compiler is missing, or rejected the plugin's sources."""
