"""Sandbox: a throwaway Slurm cluster with real daemons on one host, to try and test Steward.

`Sandbox.up` (`cluster.py`) turns a `SandboxSpec` into a `SandboxPlan` (`plan.py`, with the Slurm
that `slurm_install.py` finds), creates the directory (`layout.py`, `configuration.py`) and starts
the keeper (`keeper_client.py`, `keeper.py`). The keeper forks the init (`init_process.py`) in its
own Linux namespaces (`namespaces.py`), where permitted; the init starts munged, slurmdbd, slurmctld
and the slurmds. `Sandbox.run` enters the namespaces to run a program.
"""

from steward.sandbox.cluster import Sandbox, SandboxProcess
from steward.sandbox.spec import (
    SandboxError,
    SandboxSpec,
    SandboxUser,
    SlurmNotInstalled,
    get_default_directory,
)

__all__ = [
    "Sandbox",
    "SandboxError",
    "SandboxProcess",
    "SandboxSpec",
    "SandboxUser",
    "SlurmNotInstalled",
    "get_default_directory",
]
