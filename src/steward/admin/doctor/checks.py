"""Every check there is, by name, in the order in which they are told."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from steward.admin.doctor import bank, books, controllers, host, plugins, running, slurmconf, spool
from steward.admin.doctor.findings import Finding
from steward.admin.doctor.ground import Ground


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes:
        name: As it is chosen by.
        help: What it sees to.
        run: Looks, and says what it found.
        asks_slurm: Whether it wants to know what Slurm shows.
    """

    name: str
    help: str
    run: Callable[[Ground], Iterable[Finding]]
    asks_slurm: bool = False


def _of_slurm(name: str, help_: str, run: Callable[[Ground], Iterable[Finding]]) -> Check:
    return Check(name=name, help=help_, run=run, asks_slurm=True)


CHECKS: Final = (
    Check(name="settings", help="what the settings name is there", run=host.configuration),
    Check(name="secrets", help="keys and passwords are nobody else's", run=host.secrets),
    Check(name="library", help="SQLite is one that loses nothing", run=host.library),
    Check(name="state", help="the state directory is local, and Steward's alone", run=host.state),
    Check(name="disks", help="there is room for what is to be kept", run=host.disks),
    Check(name="daemon", help="the daemon runs, and answers", run=running.daemon),
    Check(name="parts", help="each of its parts runs, and stays up", run=running.parts),
    Check(name="web", help="the pages can be reached", run=running.web),
    Check(name="munge", help="MUNGE says who asks from other hosts", run=running.munge),
    _of_slurm("slurm", "Slurm's commands are there, and slurmctld answers", controllers.answers),
    _of_slurm("controllers", "every slurmctld's jobs are seen", controllers.hosts),
    _of_slurm("clocks", "clocks agree", controllers.clocks),
    _of_slurm("spool", "the spool is readable, and all in it was taken", spool.spool),
    _of_slurm("snapshots", "a look at the queue costs little", controllers.cost),
    _of_slurm("memory", "slurmctld remembers jobs for long enough", controllers.memory),
    _of_slurm("usage", "what jobs use can be known", slurmconf.usage),
    _of_slurm("jobcomp", "slurmctld tells of jobs that end", plugins.jobcomp),
    _of_slurm("spank", "the SPANK plugin is built for this Slurm, and loaded", plugins.spank),
    Check(name="nodes", help="the agents of nodes are heard", run=books.nodes),
    _of_slurm("submit", "slurmctld asks the bank, behind other plugins", plugins.submit),
    _of_slurm("triggers", "slurmctld wakes the sensor", plugins.triggers),
    Check(name="journal", help="every consumer keeps up", run=books.journal),
    Check(name="sinks", help="each sink is reached, and keeps up", run=books.sinks),
    Check(name="owners", help="owners are let in to their files", run=books.owners),
    Check(name="gaps", help="nothing is missing in the books", run=books.gaps),
    Check(name="rules", help="every rule can be read", run=books.rules),
    _of_slurm("prices", "every partition has a rate", bank.prices),
    Check(name="ledger", help="the ledger's proof holds", run=bank.ledger),
    Check(name="gate", help="the gate decides", run=bank.gate),
    Check(name="remote", help="a myBRC server elsewhere can be told", run=bank.remote),
)
