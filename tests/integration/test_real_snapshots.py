"""Queue polls of a real Slurm: jobs from submit to end, and outages of slurmctld."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import PATIENCE, state_of, submit_to, wait_until
from sandboxes import passable_directory

from steward.core.events import CONTROLLER_STATE, JOB_END, JOB_SEEN, JOB_STATE, JobFacts
from steward.sandbox import Sandbox, SandboxSpec

# Above what a test waits for at most.
pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(1200)]

INSIDE = str(Path(__file__).parent / "slurm_calls.py")


class Line(msgspec.Struct):
    """Event as the process inside prints it."""

    kind: str
    key: str
    body: msgspec.Raw

    def facts(self) -> JobFacts:
        return msgspec.json.decode(self.body, type=JobFacts)


class Watched:
    """Cluster for the test, and the events of its polls."""

    def __init__(self, cluster: Sandbox, out: Path) -> None:
        self.cluster = cluster
        self.user = next(iter(cluster.users))
        self._out = out
        self._settings = msgspec.json.encode(cluster.make_cluster_settings()).decode()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, INSIDE, self._settings, "snapshots", "3600"]
        with open(self._out, "ab") as out:
            self._process = self.cluster.popen(words, stdout=out)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE * 10)

    def lines(self) -> list[Line]:
        whole = self._out.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]

    def of(self, job: int) -> list[tuple[str, str]]:
        """Return kind and state of each event about a job."""
        mine = (line for line in self.lines() if line.kind.startswith("job."))
        told = [(line.kind, line.facts().record) for line in mine]
        return [(kind, record.state) for kind, record in told if record.job_id == job]

    def submit(self, script: str, **options: Any) -> int:
        return submit_to(self.cluster, script, user=self.user, output="/dev/null", **options)

    def until(self, ready: Callable[[], bool]) -> None:
        wait_until(ready, 60)


@pytest.fixture
def watched(slurm_version: str) -> Iterator[Watched]:
    spec = SandboxSpec(nodes=1, slurm=slurm_version, min_job_age_s=2)
    with passable_directory() as path, Sandbox.up(spec) as cluster:
        watched = Watched(cluster, path / "events")
        watched.start()
        try:
            yield watched
        finally:
            watched.stop()


def test_lives_of_jobs(watched: Watched) -> None:
    # As long as it takes: the slower a look at the queue is, the later comes the next one.
    go = Path(watched.cluster.directory) / "go"
    script = f"#!/bin/sh\nuntil [ -e {go} ]; do sleep 0.1; done\nexit 2\n"
    job = watched.submit(script, job_name="life")
    watched.until(lambda: (JOB_STATE, "RUNNING") in watched.of(job))
    go.touch()
    watched.until(lambda: (JOB_END, "FAILED") in watched.of(job))
    told = watched.of(job)
    assert told[0][0] == JOB_SEEN
    assert told.index((JOB_STATE, "RUNNING")) < told.index((JOB_END, "FAILED"))
    whole = [
        line.facts()
        for line in watched.lines()
        if line.kind == JOB_SEEN and line.facts().whole and line.facts().record.job_id == job
    ]
    assert [facts.record.name for facts in whole] == ["life"]
    keys = [line.key for line in watched.lines()]
    assert len(keys) == len(set(keys))
    # slurmctld forgets it (MinJobAge): that is no further news, but for its whole record,
    # which may have come meanwhile.
    watched.until(lambda: state_of(watched.cluster, job) == "")
    other = watched.submit("#!/bin/sh\n")
    watched.until(lambda: (JOB_END, "COMPLETED") in watched.of(other))
    assert dict.fromkeys(watched.of(job)) == dict.fromkeys(told)


def test_a_restarted_source_repeats_the_same_keys(watched: Watched) -> None:
    job = watched.submit("#!/bin/sh\n", hold=True)
    watched.until(lambda: len(watched.of(job)) == 2)
    first = {line.key for line in watched.lines() if line.kind != CONTROLLER_STATE}
    watched.stop()
    watched.start()
    watched.until(lambda: len(watched.of(job)) == 4)
    assert {line.key for line in watched.lines() if line.kind != CONTROLLER_STATE} == first


def test_slurmctld_goes_and_comes_back(watched: Watched) -> None:
    watched.until(lambda: [line.kind for line in watched.lines()] == [CONTROLLER_STATE])
    watched.cluster.kill_controller()
    watched.until(lambda: len(watched.lines()) == 2)
    watched.cluster.restart_controller()
    watched.until(lambda: len(watched.lines()) == 3)
    ups = [msgspec.json.decode(line.body)["up"] for line in watched.lines()]
    assert ups == [True, False, True]
    job = watched.submit("#!/bin/sh\n")
    watched.until(lambda: (JOB_END, "COMPLETED") in watched.of(job))


def test_a_job_that_goes_without_an_end(watched: Watched) -> None:
    job = watched.submit("#!/bin/sh\n", hold=True)
    watched.until(lambda: bool(watched.of(job)))
    watched.cluster.restart_controller("-c")
    watched.until(lambda: (JOB_END, "UNKNOWN") in watched.of(job))


def test_a_requeued_task_is_not_lost_in_its_array(watched: Watched) -> None:
    array = watched.submit("#!/bin/sh\nsleep 600\n", array="1-9%2")
    running = (JOB_STATE, "RUNNING")

    def task() -> int:
        """Return the raw id of the array's first task; 0 before it has one."""
        for line in watched.lines():
            record = line.facts().record if line.kind.startswith("job.") else None
            if record and record.array_job_id == array and record.array_task == "1":
                return record.job_id
        return 0

    watched.until(lambda: running in watched.of(task()))
    watched.cluster.run(["scontrol", "requeuehold", f"{array}_1"])
    watched.until(lambda: watched.of(task())[-1] == (JOB_STATE, "PENDING"))
    # It is folded into the array's row as soon as the next task runs in its place.
    folded = ["PENDING", "RUNNING", "RUNNING"]
    watched.until(lambda: state_of(watched.cluster, array).split() == folded)
    other = watched.submit("#!/bin/sh\n", hold=True)
    watched.until(lambda: bool(watched.of(other)))
    assert watched.of(task())[-1] == (JOB_STATE, "PENDING")
    watched.cluster.run(["scancel", str(array)])
