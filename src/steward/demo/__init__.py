"""The demo: Steward on a real Slurm cluster, watched by a person, and every word of it checked."""

from steward.demo.play import play
from steward.demo.site import DemoError, Site

__all__ = ["DemoError", "Site", "play"]
