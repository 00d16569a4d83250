"""Settles what runs in a sandbox: every daemon with its command line, and who there is."""

import os
import stat
import sys
from collections.abc import Iterator

from steward.sandbox import database, slurmconf, users
from steward.sandbox.programs import Slurm
from steward.sandbox.spec import Plan, SandboxSpec, Service


def make(
    spec: SandboxSpec, slurm: Slurm, directory: str, *, contained: bool, ports: tuple[int, ...]
) -> Plan:
    """The plan of a sandbox.

    Args:
        spec: What is asked for.
        slurm: The Slurm that runs.
        directory: The sandbox's directory, absolute.
        contained: Whether it has namespaces of its own.
        ports: As many as :func:`ports_of` says.

    Raises:
        SlurmMissing: A program that is asked for is not installed.
    """
    as_root = os.geteuid() == 0
    own = as_root and contained
    caller = users.caller()
    slurm_user = users.slurm_user(spec.slurm_user).name if own else caller.name
    return Plan(
        directory=directory,
        contained=contained,
        host=spec.cluster if contained else os.uname().nodename.partition(".")[0] or "localhost",
        slurm_version=slurm.version,
        root=slurm.root,
        slurm_bin=f"{directory}/bin" if slurm.root else slurm.commands,
        users=users.choose(spec.user_names, f"{directory}/home") if own else (caller,),
        slurm_user=slurm_user,
        services=tuple(_services(spec, slurm, directory, slurm_user)),
        opened=_closed_to_others(directory) if own else (),
        ports=ports,
        spec=spec,
    )


def ports_of(spec: SandboxSpec) -> int:
    """How many TCP ports a sandbox takes."""
    return spec.nodes + 1 + int(spec.accounting)


def at_least(version: str, wanted: tuple[int, int]) -> bool:
    """Whether a version of Slurm, ``24.11.5``, is this series or a later one."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= wanted


def _services(
    spec: SandboxSpec, slurm: Slurm, directory: str, slurm_user: str
) -> Iterator[Service]:
    log = f"{directory}/log"
    munged = slurm.argv(
        "munged",
        *("--foreground", "--force", "--num-threads=2"),
        f"--key-file={directory}/etc/munge.key",
        f"--socket={directory}/run/munge.socket",
        f"--pid-file={directory}/run/munged.pid",
        f"--seed-file={directory}/run/munged.seed",
    )
    yield Service(name="munged", argv=munged, log=f"{log}/munged.log")
    if spec.accounting:
        yield database.service(directory, slurm_user)
        yield Service(
            name="slurmdbd",
            argv=slurm.argv("slurmdbd", "-D"),
            log=f"{log}/slurmdbd.out",
            env=database.environment(directory),
        )
    yield Service(name="slurmctld", argv=slurm.argv("slurmctld", "-D"), log=f"{log}/slurmctld.out")
    for node in slurmconf.node_names(spec):
        yield Service(
            name=f"slurmd.{node}",
            argv=slurm.argv("slurmd", "-D", "-N", node),
            log=f"{log}/slurmd.{node}.out",
        )


def _closed_to_others(directory: str) -> tuple[str, ...]:
    """Directories that keep ordinary users from this Python, from Steward and from the sandbox."""
    needed = {directory, sys.prefix, sys.base_prefix, os.path.dirname(__file__)}
    found: set[str] = set()
    for path in needed | {os.path.realpath(path) for path in needed}:
        above = os.path.dirname(path)
        while above != "/":
            if not os.stat(above).st_mode & stat.S_IXOTH:
                found.add(os.path.realpath(above))
            above = os.path.dirname(above)
    return tuple(sorted(found, key=len))
