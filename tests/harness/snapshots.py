"""A Slurm whose answers the test writes, what looks at it, and what it tells."""

from collections.abc import Mapping

import pytest

from harness.events import NOON
from harness.site import Clock
from steward.capture.snapshots import Snapshots
from steward.core.events import (
    CONTROLLER_STATE,
    Event,
)
from steward.core.records import JobRecord
from steward.slurm import Queue, Slurm, SlurmDown, SlurmUnavailable
from steward.slurm.settings import ClusterSettings


def record(job_id: int, **fields: object) -> JobRecord:
    values = {"name": f"job{job_id}", "uid": 1000, "state": "PENDING", "submit": NOON, **fields}
    return JobRecord(job_id=job_id, **values)  # type: ignore[arg-type] # fields of every type


class Scripted(Slurm):
    """A Slurm whose answers the test writes: what matters here is what is made of them."""

    def __init__(self) -> None:
        super().__init__("c1", ClusterSettings())
        self.jobs: dict[int, JobRecord] = {}
        self.told: list[JobRecord] | None = None
        self.away = False
        self.down = False
        self.cost_s = 0.0
        self.asked: list[int] = []
        self.looks = 0
        self.passed_over = 0

    def queue(self, previous: Mapping[int, int] | None = None) -> Queue:
        self.looks += 1
        if self.down:
            raise SlurmDown("cluster c1: 'squeue' failed: connect failure")
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        rows = {job_id: hash(str(job)) for job_id, job in self.jobs.items()}
        new = tuple(job for i, job in self.jobs.items() if (previous or {}).get(i) != rows[i])
        return Queue(
            records=new,
            rows=rows,
            taken_at=NOON,
            cost_s=self.cost_s,
            passed_over=self.passed_over,
        )

    def job(self, job_id: int, *, apart: bool = False) -> list[JobRecord]:
        self.asked.append(job_id)
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        return [self.jobs[job_id]] if job_id in self.jobs else []

    def has_accounting(self) -> bool:
        return self.told is not None

    def accounted_end(self, job_id: int) -> list[JobRecord]:
        return self.accounted(job_id)

    def accounted(self, job_id: int) -> list[JobRecord]:
        assert self.told is not None
        return [job for job in self.told if job.job_id == job_id]


@pytest.fixture
def slurm() -> Scripted:
    return Scripted()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def snapshots(slurm: Scripted, clock: Clock) -> Snapshots:
    return Snapshots("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, clock=clock)


@pytest.fixture
def journal() -> list[Event]:
    return []


def kinds(journal: list[Event]) -> list[str]:
    return [event.kind for event in journal if event.kind != CONTROLLER_STATE]
