"""Settles what runs in a sandbox: every daemon with its command line, and who there is."""

import os
import stat
import sys
from collections.abc import Iterator

from steward.sandbox import database, slurmconf, users
from steward.sandbox.programs import Slurm
from steward.sandbox.spec import BACKUP, CONTROLLER, Plan, SandboxError, SandboxSpec, Service


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
        SandboxError: There is to be a second controller where none can be.
        SlurmMissing: A program that is asked for is not installed.
    """
    as_root = os.geteuid() == 0
    own = as_root and contained
    if spec.backup and not own:
        raise SandboxError("a second slurmctld takes root and namespaces: run this as root", spec)
    caller = users.caller()
    slurm_user = users.slurm_user(spec.slurm_user).name if own else caller.name
    host = spec.cluster if contained else os.uname().nodename.partition(".")[0] or "localhost"
    return Plan(
        directory=directory,
        contained=contained,
        host=host,
        slurm_version=slurm.version,
        root=slurm.root,
        slurm_bin=f"{directory}/bin" if slurm.root else slurm.commands,
        users=users.choose(spec.user_names, f"{directory}/home") if own else (caller,),
        slurm_user=slurm_user,
        services=tuple(_services(spec, slurm, directory, host, slurm_user)),
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
    spec: SandboxSpec, slurm: Slurm, directory: str, host: str, slurm_user: str
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
    yield from _controllers(spec, slurm, directory, host)
    for node in slurmconf.node_names(spec):
        yield Service(
            name=f"slurmd.{node}",
            argv=slurm.argv("slurmd", "-D", "-N", node),
            log=f"{log}/slurmd.{node}.out",
        )


def _controllers(spec: SandboxSpec, slurm: Slurm, directory: str, host: str) -> Iterator[Service]:
    log = f"{directory}/log"
    env = {
        key: value.replace("{directory}", directory) for key, value in spec.controller_env.items()
    }
    argv = slurm.argv("slurmctld", "-D")
    yield Service(name=CONTROLLER, argv=argv, log=f"{log}/slurmctld.out", env=env)
    if spec.backup:
        # A controller knows which one it is by its host's name, and ends the process that its
        # PID file names; both controllers read the same slurm.conf, and so name the same file.
        name, pid = slurmconf.backup_host(host), f"{directory}/pid"
        script = (
            f"echo {name} > /proc/sys/kernel/hostname && "
            f'mount --bind {pid}.backup {slurm.root}{pid} && exec "$@"'
        )
        words = ("/usr/bin/unshare", "--uts", "--mount", "/bin/sh", "-c", script, "sh")
        argv = (*words, *argv, "-L", f"{log}/{BACKUP}.log")
        yield Service(name=BACKUP, argv=argv, log=f"{log}/{BACKUP}.out", env=env)


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
