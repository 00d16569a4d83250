"""A throwaway real Slurm cluster, to try Steward with and to test it on."""

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
