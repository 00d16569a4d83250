"""The demo: Steward on a real Slurm cluster in a sandbox, with every claim checked."""

from steward.demo.play import play
from steward.demo.site import DemoError, Site

__all__ = ["DemoError", "Site", "play"]
