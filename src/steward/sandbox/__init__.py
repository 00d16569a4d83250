"""Sandbox: a throwaway Slurm cluster with real daemons on one host, to try and test Steward."""

from steward.sandbox.cluster import Inside, Sandbox
from steward.sandbox.spec import SandboxError, SandboxSpec, SlurmMissing, User, default_directory

__all__ = [
    "Inside",
    "Sandbox",
    "SandboxError",
    "SandboxSpec",
    "SlurmMissing",
    "User",
    "default_directory",
]
