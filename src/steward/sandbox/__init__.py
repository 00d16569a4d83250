"""Sandbox: a throwaway Slurm cluster with real daemons on one host, to try and test Steward."""

from steward.sandbox.cluster import Sandbox, SandboxProcess
from steward.sandbox.spec import (
    SandboxError,
    SandboxSpec,
    SandboxUser,
    SlurmMissing,
    get_default_directory,
)

__all__ = [
    "Sandbox",
    "SandboxError",
    "SandboxProcess",
    "SandboxSpec",
    "SandboxUser",
    "SlurmMissing",
    "get_default_directory",
]
