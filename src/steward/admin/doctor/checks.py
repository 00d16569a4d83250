"""List of all health checks by name, in the order of the report."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from steward.admin.doctor import data_checks, host_checks, slurm_checks
from steward.admin.doctor.context import Ground
from steward.admin.doctor.findings import Finding


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one health check.

    Attributes:
        name: Name to select it by.
        help: What it checks, for people.
        run: Function that yields its findings.
        asks_slurm: Whether it needs the output of Slurm's commands.
    """

    name: str
    help: str
    run: Callable[[Ground], Iterable[Finding]]
    asks_slurm: bool = False


def _of_slurm(name: str, help_: str, run: Callable[[Ground], Iterable[Finding]]) -> Check:
    return Check(name=name, help=help_, run=run, asks_slurm=True)


CHECKS: Final = (
    Check(name="settings", help="what the settings name is there", run=host_checks.configuration),
    Check(name="secrets", help="keys and passwords are nobody else's", run=host_checks.secrets),
    Check(name="library", help="SQLite is one that loses nothing", run=host_checks.library),
    Check(
        name="state",
        help="the state directory is local, and Steward's alone",
        run=host_checks.state,
    ),
    Check(name="disks", help="there is room for what is to be kept", run=host_checks.disks),
    Check(name="daemon", help="the daemon runs, and answers", run=host_checks.daemon),
    Check(name="parts", help="each of its parts runs, and stays up", run=host_checks.parts),
    Check(name="web", help="the pages can be reached", run=host_checks.web),
    Check(name="munge", help="MUNGE says who asks from other hosts", run=host_checks.munge),
    _of_slurm("slurm", "Slurm's commands are there, and slurmctld answers", slurm_checks.answers),
    _of_slurm("controllers", "every slurmctld's jobs are seen", slurm_checks.hosts),
    _of_slurm("clocks", "clocks agree", slurm_checks.clocks),
    _of_slurm("spool", "the spool is readable, and all in it was taken", slurm_checks.spool),
    _of_slurm("snapshots", "a look at the queue costs little", slurm_checks.cost),
    _of_slurm("memory", "slurmctld remembers jobs for long enough", slurm_checks.memory),
    _of_slurm("usage", "what jobs use can be known", slurm_checks.usage),
    _of_slurm("jobcomp", "slurmctld tells of jobs that end", slurm_checks.jobcomp),
    _of_slurm("spank", "the SPANK plugin is built for this Slurm, and loaded", slurm_checks.spank),
    Check(name="nodes", help="the agents of nodes are heard", run=data_checks.nodes),
    _of_slurm("submit", "slurmctld asks the bank, behind other plugins", slurm_checks.submit),
    _of_slurm("triggers", "slurmctld wakes the sensor", slurm_checks.triggers),
    Check(name="journal", help="every consumer keeps up", run=data_checks.journal),
    Check(name="sinks", help="each sink is reached, and keeps up", run=data_checks.sinks),
    Check(name="owners", help="owners are let in to their files", run=data_checks.owners),
    Check(name="gaps", help="nothing is missing in the books", run=data_checks.gaps),
    Check(name="rules", help="every rule can be read", run=data_checks.rules),
    _of_slurm("prices", "every partition has a rate", data_checks.prices),
    Check(name="ledger", help="the ledger's proof holds", run=data_checks.ledger),
    Check(name="gate", help="the gate decides", run=data_checks.gate),
    Check(name="remote", help="a myBRC server elsewhere can be told", run=data_checks.remote),
)
