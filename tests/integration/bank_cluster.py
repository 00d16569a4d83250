"""A cluster with the submit plugin, the bank and its gate: all parts, as on a real site."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
from job_submission import submit_to, wait_until
from sandbox_daemon import Daemon as InSandbox
from sandboxes import build_plugins

from steward import native
from steward.bank.errors import GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Charge, Hold, Mode, ModeRule, Rate
from steward.bank.settings import BankSettings, GateSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import utc_now
from steward.core.records import JobRecord
from steward.jobs import Jobs, database_path
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.slurm_install import find_slurm

JOBCOMP: Final = Path(native.__file__).parent / "jobcomp.lua"
CLUSTER: Final = "sandbox"
ACCOUNTS: Final = ("physics", "chemistry")
SHELL: Final = "#!/bin/sh\n"
CPU: Final = 7 * MICRO
"""Price of a CPU hour in these tests, in micro-SU: no multiple of 3600."""
TIMEOUT_MS: Final = 1000
"""The longest time-out: after one late answer the plugin admits all jobs for a while."""
RATE: Final = Rate(
    weights={"cpu": CPU},
    ends_permille={"NODE_FAIL": 0, "PREEMPTED": 500},
    note="as the tests have it",
)


def spec_of(directory: str, slurm: str, **options: Any) -> SandboxSpec:
    """Return the spec of a cluster that asks the gate, in ``directory``.

    Args:
        directory: Directory of the cluster.
        slurm: Version of Slurm; the installed one if empty.
        options: Options of SandboxSpec that differ.
    """
    own = f"steward_jobcomp_file = '{directory}/log/jobcomp.jsonl'\n"
    env = {"STEWARD_GATE_CONF": f"{directory}-gate/gate.conf"}
    env |= options.pop("controller_env", {})
    return SandboxSpec(
        **{
            "directory": directory,
            "slurm": slurm,
            "cpus": 8,
            "jobcomp_lua": own + JOBCOMP.read_text(),
            "job_submit": ("steward",),
            "controller_env": env,
            "accounts": ACCOUNTS,
            **options,
        }
    )


class BankSite:
    """Cluster whose jobs are charged, and the daemon.

    Args:
        cluster: Cluster of :func:`spec_of`.
        bank: Settings of the bank that differ.
        gate: Settings of the gate that differ.
        name: Steward's name of the cluster; its ClusterName.
        snapshot_s: Seconds between two polls of the queue.
    """

    def __init__(
        self,
        cluster: Sandbox,
        *,
        bank: dict[str, Any] | None = None,
        gate: dict[str, Any] | None = None,
        name: str = CLUSTER,
        snapshot_s: float = 0.5,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.user = next(iter(cluster.users))
        self.run_dir = Path(f"{cluster.directory}-gate")
        self.daemon = InSandbox(cluster, Path(cluster.directory) / "steward")
        settings = self.daemon.settings
        of_cluster = msgspec.structs.replace(
            settings.cluster["box"],
            munge_socket=cluster.plan.munge_socket,
            jobcomp_lines=f"{cluster.directory}/log/jobcomp.jsonl",
            snapshot_interval_s=snapshot_s,
            slurm_bin=f"{cluster.directory}/bin",
        )
        self.settings = msgspec.structs.replace(
            settings,
            cluster={name: of_cluster},
            bank=BankSettings(**{"enabled": True, "reconcile_s": 5.0, **(bank or {})}),
            run_dir=str(self.run_dir),
            gate=GateSettings(**{"timeout_ms": TIMEOUT_MS, **(gate or {})}),
        )
        self.daemon.settings = self.settings
        self.daemon.config.write_text(render_config(LoadedConfig(self.settings)))

    def open(
        self,
        deposits: dict[str, int],
        *,
        mode: Mode = "enforce",
        rates: Sequence[Rate] = (RATE,),
    ) -> None:
        """Create accounts with deposits, and set rates and modes.

        Args:
            deposits: micro-SU by account.
            mode: Mode of the bank on the cluster.
            rates: Rates, the same on each cluster.
        """
        self.daemon.state.mkdir(mode=0o700, exist_ok=True)
        by = Authorship(who="root", why="the tests' own")
        ledger = open_ledger(self.settings)
        try:
            with ledger.transaction() as t:
                for name in self.settings.cluster:
                    for rate in rates:
                        t.rates.add(msgspec.structs.replace(rate, cluster=name), by)
                t.modes.set(ModeRule(mode=mode), by)
                for account, amount in deposits.items():
                    t.accounts.create(Account(name=account), by)
                    if amount:
                        t.transfers.deposit(account, amount, by)
        finally:
            ledger.close()

    def start(self) -> None:
        """Start the daemon, and wait until the gate has the ledger's state."""
        self.daemon.start()
        self.until_gate()

    def restart(self) -> None:
        """Kill the daemon and all its workers with SIGKILL, and start it again."""
        self.kill_daemon()
        wait_until(lambda: not self.processes("gate") and not self.processes("journal"), 20)
        self.daemon.start()
        wait_until(lambda: bool(self.processes("gate")), 30)

    def until_gate(self) -> None:
        """Wait until the gate has balances, rates and modes, and the cluster's model."""
        wait_until(self._is_ready, 60)

    def _is_ready(self) -> bool:
        try:
            state = self.link.get_status()
        except GateUnavailable:
            return False  # it is not there yet
        return state.deciding and state.rules > 0 and self.name in state.pictures

    @property
    def link(self) -> GateClient:
        """Return the client by which Steward's own processes ask the gate."""
        return GateClient(self.settings.state_dir)

    def submit(self, script: str, *, user: str = "", **options: Any) -> int:
        """Submit a batch script; return the job's id."""
        options.setdefault("output", "/dev/null")
        options.setdefault("account", ACCOUNTS[0])
        return submit_to(self.cluster, script, user=user or self.user, **options)

    def tries(self, script: str, *words: str, user: str = "") -> "subprocess.CompletedProcess[str]":
        """Submit a job that may be rejected; return the result of sbatch."""
        argv = ["sbatch", "--parsable", "--output=/dev/null", f"--account={ACCOUNTS[0]}", *words]
        return self.cluster.run(argv, user=user or self.user, input=script, check=False)

    def storm(self, count: int, script: str, *words: str, at_once: int = 64) -> list[int]:
        """Submit ``count`` jobs, many at a time; return the ids of the admitted ones."""
        path = Path(self.cluster.directory) / "storm.sh"
        path.write_text(script)
        path.chmod(0o755)
        one = ["sbatch", "--parsable", "--output=/dev/null", f"--account={ACCOUNTS[0]}", *words]
        argv = ["xargs", "-P", str(at_once), "-I{}", *one, "--job-name=s{}", str(path)]
        numbers = "".join(f"{number}\n" for number in range(count))
        found = self.cluster.run(argv, user=self.user, input=numbers, check=False, timeout_s=600)
        return [int(word) for word in re.findall(r"^\d+$", found.stdout, re.MULTILINE)]

    def as_root(self, *words: str) -> bool:
        """Run one of Slurm's commands as root; return whether it succeeded."""
        return self.cluster.run(list(words), check=False).returncode == 0

    def as_user(self, *words: str, user: str = "") -> bool:
        """Run one of Slurm's commands as a user; return whether it succeeded."""
        found = self.cluster.run(list(words), user=user or self.user, check=False)
        return found.returncode == 0

    def bank(self, *words: str, user: str = "", check: bool = True) -> str:
        """Return the output of a ``steward bank`` command."""
        return str(self.daemon.ask("bank", *words, user=user, check=check).stdout)

    def balance(self, account: str = ACCOUNTS[0]) -> int:
        """Return the ledger's balance of an account, in micro-SU."""
        ledger = open_ledger(self.settings)
        try:
            with ledger.reading() as t:
                return t.queries.get_balance(account)
        finally:
            ledger.close()

    def charges(self) -> list[Charge]:
        """Return all charges."""
        ledger = open_ledger(self.settings)
        try:
            with ledger.reading() as t:
                rows = t.charges.list_since(utc_now() - timedelta(days=30), limit=1_000_000)
        finally:
            ledger.close()
        return [row.charge for row in rows]

    def charged(self) -> dict[int, int]:
        """Return the total charge of each job, in micro-SU by raw job id."""
        found: dict[int, int] = {}
        for charge in self.charges():
            found[charge.job_id] = found.get(charge.job_id, 0) + charge.amount
        return found

    def held(self) -> int:
        """Return the sum of the gate's SU holds, in micro-SU."""
        return sum(hold.remaining for hold in self.holds())

    def holds(self) -> list[Hold]:
        """Return the gate's open holds."""
        found: list[Hold] = []
        while page := self.link.list_holds(after=found[-1].id if found else "", limit=1000):
            found += page
        return found

    def unfinished(self) -> list[JobRecord]:
        """Return the jobs that Steward considers unfinished."""
        jobs = Jobs(database_path(self.settings.state_dir))
        try:
            return jobs.list_unfinished_records(self.name)
        finally:
            jobs.close()

    def findings(self) -> list[Any]:
        """Return the findings of the ledger's proof."""
        ledger = open_ledger(self.settings)
        try:
            return list(ledger.check())
        finally:
            ledger.close()

    def until_idle(self, timeout_s: float = 120) -> None:
        """Wait until no job is pending or running."""
        words = ["squeue", "-h", "-t", "PD,R,S,CG,CF"]
        wait_until(lambda: not self.cluster.run(words, check=False).stdout.strip(), timeout_s)

    def until_charged(self, jobs: Iterable[int], timeout_s: float = 60) -> None:
        """Wait until each of these jobs has a charge and no SU hold is left."""
        wanted = set(jobs)
        wait_until(lambda: wanted <= set(self.charged()) and not self.held(), timeout_s)

    def processes(self, part: str) -> list[int]:
        """Return the process ids of a worker of the daemon, outside the sandbox."""
        here = f"STEWARD_SANDBOX={self.cluster.directory}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended
                # The kernel keeps fifteen bytes of a name.
                name = (entry / "comm").read_text().strip()
                variables = (entry / "environ").read_bytes().split(b"\0")
                if name == f"steward {part}"[:15] and here in variables:
                    found.append(int(entry.name))
        return found

    def signal_part(self, part: str, number: int) -> None:
        """Send a signal to a worker of the daemon."""
        wait_until(lambda: bool(self.processes(part)), 20)
        for pid in self.processes(part):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

    def kill_daemon(self) -> None:
        """Kill the daemon and all its workers with SIGKILL."""
        self.daemon.close()

    def close(self) -> None:
        """End the processes that the test started."""
        self.daemon.close()


@contextlib.contextmanager
def bank_site(
    slurm: str,
    *,
    bank: dict[str, Any] | None = None,
    gate: dict[str, Any] | None = None,
    snapshot_s: float = 0.5,
    **options: Any,
) -> Iterator[BankSite]:
    """Bring up a cluster that asks the gate, with a daemon that has not started yet.

    Args:
        slurm: Version of Slurm; the installed one if empty.
        bank: Settings of the bank that differ.
        gate: Settings of the gate that differ.
        snapshot_s: Seconds between two polls of the queue.
        options: Options of SandboxSpec.
    """
    directory = tempfile.mkdtemp(prefix="steward-bank-", dir="/tmp")
    os.chmod(directory, 0o755)
    path = f"{directory}/box"
    os.mkdir(f"{path}-gate", 0o755)
    try:
        # The headers of another version are in its root directory, which this brings about.
        built = build_plugins(f"{find_slurm(slurm, print).root}/usr/include", f"{path}-lib")
        spec = spec_of(path, slurm, plugin_dirs=(os.path.dirname(built.path),), **options)
        with Sandbox.up(spec, report=print) as cluster:
            site = BankSite(cluster, bank=bank, gate=gate, name=spec.cluster, snapshot_s=snapshot_s)
            try:
                yield site
            except BaseException:
                print(site.daemon.log()[-5000:])  # it is gone with the cluster
                raise
            finally:
                site.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
