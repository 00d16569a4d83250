"""List of all health checks (``CHECKS``) by name, in the order of the report.

The functions are in ``host_checks.py``, ``slurm_checks.py`` and ``data_checks.py``; each takes a
``CheckContext`` and yields findings.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar, Final

import msgspec

from steward.admin.doctor import data_checks, host_checks, slurm_checks
from steward.admin.doctor.context import CheckContext
from steward.admin.doctor.findings import CheckFinding
from steward.core.layouts import Column, Layout


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one health check.

    Attributes:
        name: Name to select it by.
        help: What it checks, for people.
        run: Function that yields its findings.
        asks_slurm: Whether it needs the output of Slurm's commands.
    """

    name: str
    help: str
    run: Callable[[CheckContext], Iterable[CheckFinding]]
    asks_slurm: bool = False
    layout: ClassVar[Layout] = (Column("Check", "name"), Column("Description", "help"))


def _make_slurm_check(
    name: str, help_: str, run: Callable[[CheckContext], Iterable[CheckFinding]]
) -> HealthCheck:
    return HealthCheck(name=name, help=help_, run=run, asks_slurm=True)


CHECKS: Final = (
    HealthCheck(
        name="settings",
        help="files and users named in the configuration exist",
        run=host_checks.check_settings_resources,
    ),
    HealthCheck(
        name="secrets",
        help="only Steward's user can read keys and passwords",
        run=host_checks.check_secret_files,
    ),
    HealthCheck(
        name="library",
        help="the SQLite library has no bug that corrupts databases",
        run=host_checks.check_sqlite_library,
    ),
    HealthCheck(
        name="state",
        help="the state directory is on a local disk and private",
        run=host_checks.check_state_directory,
    ),
    HealthCheck(name="disks", help="disks have free space", run=host_checks.check_disks),
    HealthCheck(name="daemon", help="the daemon answers", run=host_checks.check_daemon),
    HealthCheck(
        name="workers", help="every worker of the daemon runs", run=host_checks.check_workers
    ),
    HealthCheck(name="web", help="the web pages answer", run=host_checks.check_web_server),
    HealthCheck(
        name="munge",
        help="MUNGE authenticates requests of other hosts",
        run=host_checks.check_munge,
    ),
    _make_slurm_check(
        "slurm", "Slurm's commands work and slurmctld answers", slurm_checks.check_slurmctld
    ),
    _make_slurm_check(
        "controllers", "Steward captures from every slurmctld", slurm_checks.check_controllers
    ),
    _make_slurm_check("clocks", "clocks agree", slurm_checks.check_clocks),
    _make_slurm_check("spool", "the spool is readable and captured", slurm_checks.check_spools),
    _make_slurm_check("snapshots", "a poll of the queue is cheap", slurm_checks.check_poll_cost),
    _make_slurm_check(
        "memory", "slurmctld keeps ended jobs long enough", slurm_checks.check_job_memory
    ),
    _make_slurm_check("usage", "Slurm measures what jobs use", slurm_checks.check_usage_sources),
    _make_slurm_check("jobcomp", "slurmctld reports job ends", slurm_checks.check_jobcomp_plugin),
    _make_slurm_check(
        "spank",
        "the SPANK plugin is installed for this Slurm",
        slurm_checks.check_spank_plugin,
    ),
    HealthCheck(name="nodes", help="node agents report", run=data_checks.check_agents),
    _make_slurm_check(
        "submit", "slurmctld asks the gate, after other plugins", slurm_checks.check_submit_plugin
    ),
    _make_slurm_check("triggers", "slurmctld wakes the sensor", slurm_checks.check_sensor_triggers),
    HealthCheck(name="journal", help="every consumer keeps up", run=data_checks.check_journal),
    HealthCheck(
        name="sinks", help="every sink is available and keeps up", run=data_checks.check_sinks
    ),
    HealthCheck(
        name="owners", help="owners can read their archived files", run=data_checks.check_acls
    ),
    HealthCheck(name="gaps", help="job records have no gaps", run=data_checks.check_gaps),
    HealthCheck(name="rules", help="every rule file is valid", run=data_checks.check_rule_files),
    _make_slurm_check("prices", "every partition has a rate", data_checks.check_prices),
    HealthCheck(name="ledger", help="the ledger is consistent", run=data_checks.check_ledger),
    HealthCheck(name="gate", help="the gate decides", run=data_checks.check_gate),
    HealthCheck(
        name="remote",
        help="the remote myBRC server answers",
        run=data_checks.check_remote_bank,
    ),
)
