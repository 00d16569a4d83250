"""Faults that the checks of plugins report, and errors of building and installing plugins."""

import msgspec

from steward.core.errors import StewardError, UsageError


class PluginFault(msgspec.Struct, frozen=True):
    """A fault of something that Slurm loads, with its repair.

    Attributes:
        problem: The object and its fault.
        fix: Commands to type, or lines to set, that repair it; empty if ``problem`` names them.
    """

    problem: str
    fix: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return both in one line."""
        return ": ".join(text for text in (self.problem, "; ".join(self.fix)) if text)


class PluginInstallError(StewardError):
    """A plugin cannot be built, installed or checked."""


class InvalidVersion(PluginInstallError, UsageError):
    """The given text is no version of Slurm."""


class HeadersMissing(PluginInstallError):
    """Slurm's headers are not in the given directory."""


class BuildFailed(PluginInstallError):
    """The compiler is missing, or rejected the plugin's sources."""
