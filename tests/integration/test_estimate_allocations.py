"""Estimates against real Slurm: no allocation costs more than the estimate at submit."""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from allocation_requests import RATES, request, spec
from job_submission import wait_until

from steward.bank.billing import derive_use
from steward.bank.estimate import UNLIMITED_S, Estimator, parse_options
from steward.bank.prices import compute_price
from steward.bank.records import Rate
from steward.bank.settings import BankSettings
from steward.core.records import JobRecord
from steward.sandbox import Sandbox
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.tres import count_requested_kinds

# A thousand allocations are some fifteen times 120 of sbatch, each a process on a busy host.
pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(2400)]

INSIDE = str(Path(__file__).parent / "slurm_calls.py")
SETTINGS = BankSettings(over_limit="charge")
_BATCH = 120
"""Number of jobs that fill the cluster's nodes in part, so that later jobs get the rest."""


def chance_of(seed: int) -> random.Random:
    """Return a random generator with a fixed seed, or that of STEWARD_ESTIMATE_SEED."""
    seed = int(os.environ.get("STEWARD_ESTIMATE_SEED", "0")) or seed
    print(f"STEWARD_ESTIMATE_SEED={seed}")
    return random.Random(seed)


class Allocating:
    """Cluster that allocates jobs and returns their allocations."""

    def __init__(self, cluster: Sandbox) -> None:
        self._cluster = cluster
        self._user = next(iter(cluster.users))
        self._settings = msgspec.json.encode(cluster.make_cluster_settings()).decode()
        self.picture = msgspec.convert(self._ask("picture"), ClusterModel, strict=False)
        now = datetime.now(UTC)
        self._now = now
        self._estimators = [(rate, Estimator(self.picture, [rate], SETTINGS)) for rate in RATES]

    def _ask(self, question: str) -> object:
        words = [sys.executable, INSIDE, self._settings, question]
        return msgspec.json.decode(self._cluster.run(words, text=False).stdout)

    def allocate(self, requests: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], JobRecord]]:
        """Submit these jobs; return those that Slurm accepted and placed, with records."""
        script = "".join(
            f"sbatch --parsable --output=/dev/null {' '.join(words)} --wrap=true 2>/dev/null || "
            "echo refused\n"
            for words in requests
        )
        said = self._cluster.run(["bash"], user=self._user, input=script, timeout_s=200).stdout
        ids = [int(word) if word.isdigit() else 0 for word in said.split()]
        assert len(ids) == len(requests)
        # The scheduler starts over after each submit: it has considered all jobs when none is left
        # without a pending reason.
        wait_until(self._is_settled)
        answer = msgspec.convert(self._ask("queue"), list[JobRecord])
        records = {record.job_id: record for record in answer}
        self._cluster.run(["scancel", "--user", self._user])
        wait_until(lambda: not self._states())
        found = [(words, records.get(job)) for words, job in zip(requests, ids, strict=True)]
        return [(words, record) for words, record in found if record and record.tres_allocated]

    def _is_settled(self) -> bool:
        shown = self._cluster.run(["squeue", "-h", "-a", "-o", "%i %t %r"]).stdout.splitlines()
        waiting = [line for line in shown if " PD None" in line]
        return not waiting

    def _states(self) -> str:
        return str(self._cluster.run(["squeue", "-h", "-a", "-o", "%t"]).stdout).strip()

    def faults(self, words: Sequence[str], record: JobRecord) -> Iterator[str]:
        """Yield the costs of a job above its estimate."""
        job = parse_options(words, uid=record.uid or 0)
        for rate, estimator in self._estimators:
            quote = estimator.quote(job, self._now)
            charged = self._charge(record, rate)
            if charged > quote.amount:
                yield (
                    f"{' '.join(words)}: rate {rate.number}: charged {charged:,} of "
                    f"{quote.amount:,}; has {record.tres_allocated}, estimated {quote.tres}, "
                    f"on {record.nodelist}"
                )

    def looseness(self, words: Sequence[str], record: JobRecord) -> float:
        """Return the ratio of estimate to cost, by CPUs."""
        rate, estimator = self._estimators[0]
        job = parse_options(words, uid=record.uid or 0)
        return estimator.quote(job, self._now).amount / max(1, self._charge(record, rate))

    def _charge(self, record: JobRecord, rate: Rate) -> int:
        """Return the cost of a run up to its time limit and the next poll."""
        assert record.start is not None
        # Slurm gives a year to jobs without a limit; the estimate assumes a day.
        limit_s = min(record.time_limit_s or UNLIMITED_S, UNLIMITED_S)
        end = record.start + timedelta(seconds=limit_s + 60)
        use = derive_use(record, rate, self.picture, SETTINGS, end=end)
        return compute_price(use, rate, UTC).amount


def run(cluster: Sandbox, wanted: int, seed: int, median: float = 1.5) -> None:
    chance = chance_of(seed)
    allocating = Allocating(cluster)
    allocated, asked = 0, 0
    faults: list[str] = []
    loose: list[float] = []
    while allocated < wanted:
        requests = [request(chance) for _ in range(_BATCH)]
        asked += len(requests)
        for words, record in allocating.allocate(requests):
            allocated += 1
            if any(word.startswith(("--gpus", "--gres")) for word in words):
                # Without slurmdbd, only this shows a job's GPUs.
                assert count_requested_kinds(record), words
            faults += allocating.faults(words, record)
            loose.append(allocating.looseness(words, record))
        assert asked < 30 * wanted, "hardly any request is allocated"
    loose.sort()
    print(
        f"{allocated} of {asked} requests allocated; estimated CPUs over allocated: "
        f"median {loose[len(loose) // 2]:.2f}, 90 % below {loose[len(loose) * 9 // 10]:.2f}, "
        f"most {loose[-1]:.1f}"
    )
    assert not faults, "\n".join([f"{len(faults)} were estimated too low:", *faults[:20]])
    assert loose[len(loose) // 2] < median, "the estimate is of no use if it is far too high"


@pytest.mark.parametrize("selects", ["CR_Core_Memory", "CR_CPU"])
def test_some_requests(slurm_version: str, selects: str) -> None:
    with Sandbox.up(spec(slurm_version, selects, accounting=False), report=print) as cluster:
        run(cluster, 100, 1)


@pytest.mark.long
@pytest.mark.database
@pytest.mark.parametrize(
    ("selects", "wanted", "seed"),
    [
        ("CR_Core_Memory", 1000, 3364740818),
        ("CR_Core_Memory,CR_ONE_TASK_PER_CORE", 250, 409106364),
        ("CR_CPU_Memory", 250, 4186454290),
        ("CR_Socket_Memory", 250, 563708695),
        ("CR_Core", 250, 271992331),
    ],
)
def test_many_requests(slurm_version: str, selects: str, wanted: int, seed: int) -> None:
    with Sandbox.up(spec(slurm_version, selects, accounting=True), report=print) as cluster:
        # With whole sockets allocated, the number of sockets with tasks is unknown.
        run(cluster, wanted, seed, 6.0 if "Socket" in selects else 1.5)
