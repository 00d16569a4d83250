"""Job ends from polls and sacct if JobCompType is another plugin's or Lua is missing."""

from typing import Any

import msgspec
import pytest
from job_submission import state_of, submit_to, wait_until
from sandbox_daemon import Daemon
from sandboxes import passable_directory
from spool_daemon import ask

from steward.core.records import JobRecord
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(1200)]

JOBS = 100
MANY = f"""
for number in $(seq {JOBS}); do
    printf '#!/bin/sh\\nexit %d\\n' $((number % 7)) |
        sbatch --parsable -J "short$number" -o /dev/null
done
"""


def test_a_hundred_short_jobs_end_with_all_that_is_to_be_known(slurm_version: str) -> None:
    spec = SandboxSpec(nodes=2, cpus=8, slurm=slurm_version)
    with passable_directory() as path, Sandbox.up(spec) as cluster:
        user = next(iter(cluster.users))
        daemon = Daemon(cluster, path / "steward")
        daemon.start()
        try:
            out = cluster.run(["sh", "-c", MANY], user=user, timeout_s=180).stdout
            jobs = [int(line) for line in out.split()]
            assert len(jobs) == JOBS
            wait_until(lambda: len(ended(daemon, jobs)) == JOBS, 120)
            found = ended(daemon, jobs)
            for number, job in enumerate(jobs, 1):
                state, start, end, code, signal = found[job]
                assert (code, signal) == (number % 7, 0)
                assert state == ("FAILED" if number % 7 else "COMPLETED")
                assert 0 < start <= end
        finally:
            daemon.close()


def ended(daemon: Daemon, jobs: list[int]) -> dict[int, tuple[Any, ...]]:
    """Return the ends of these jobs in jobs.db."""
    rows = ask(
        daemon.settings,
        "jobs.db",
        "SELECT job_id, state, start, end_time, exit_code, exit_signal FROM run "
        "WHERE end_time IS NOT NULL AND end_time > 0",
    )
    return {job: tuple(rest) for job, *rest in rows if job in jobs}


@pytest.mark.database
def test_slurmdbd_tells_who_cancelled(booked_sandbox: Sandbox) -> None:
    user = next(iter(booked_sandbox.users))
    with passable_directory() as path:
        daemon = Daemon(booked_sandbox, path / "steward")
        daemon.start()
        try:
            job = submit_to(booked_sandbox, "#!/bin/sh\nsleep 90\n", user=user, output="/dev/null")
            wait_until(lambda: state_of(booked_sandbox, job) == "RUNNING", 40)
            booked_sandbox.run(["scancel", str(job)], user=user)
            wait_until(lambda: job in cancellers(daemon), 60)
            assert cancellers(daemon)[job] == booked_sandbox.users[user].uid
        finally:
            daemon.close()


def cancellers(daemon: Daemon) -> dict[int, int]:
    """Return who cancelled each job, from sacct's events."""
    rows = ask(daemon.settings, "journal.db", "SELECT data FROM event WHERE kind = 'job.end'")
    records = [
        msgspec.convert(msgspec.json.decode(data)["body"]["record"], JobRecord) for (data,) in rows
    ]
    return {one.job_id: one.cancelled_by for one in records if one.cancelled_by is not None}
