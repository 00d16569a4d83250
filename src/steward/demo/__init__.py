"""The demo: Steward on a real Slurm cluster in a sandbox, with every claim checked."""

from steward.demo.presentation import run_demo
from steward.demo.site import DemoError, DemoSite

__all__ = ["DemoError", "DemoSite", "run_demo"]
