"""sacct of real jobs: as root, as their owner through the daemon, and under Slurm's own name."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounting_cluster import BIN, BookedSite, spec_of
from job_submission import wait_until
from sandbox_daemon import STEWARD
from sandboxes import passable_directory

from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    # Above what a test waits for at most.
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="nodes and users of their own take root"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the plugin is compiled"),
]

WAIT_S = 120
COLUMNS = "jobid,jobname,user,state,exitcode,alloccpus,nodelist"
SCRIPT = "#!/bin/sh\nsrun --job-name=inner true\nexit 3\n"


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BookedSite]:
    with (
        passable_directory() as path,
        Sandbox.up(spec_of(str(path), slurm_version, accounting=False), report=print) as cluster,
    ):
        site = BookedSite(cluster)
        try:
            site.start()
            yield site
        finally:
            site.close()


@pytest.fixture(scope="module")
def job(site: BookedSite) -> int:
    """Run a job with a step, and wait until both are recorded."""
    job = site.submit(SCRIPT, job_name="outer")
    wait_until(lambda: len(steps(site, job)) == 3, WAIT_S)
    return job


def steps(site: BookedSite, job: int) -> list[str]:
    """Return the lines of a job whose steps have all ended."""
    rows = site.ours("-n", "-P", "-j", str(job), "-o", "jobid,end").split()
    return [row for row in rows if not row.endswith("Unknown")]


def by_daemon(site: BookedSite, *words: str, user: str = "") -> str:
    env = {"STEWARD_SOCKET": site.daemon.settings.socket, "TZ": "UTC"}
    command = [STEWARD, "sacct", *words]
    return str(site.cluster.run(command, user=user or site.user, env=env, timeout_s=120).stdout)


def test_a_job_and_its_steps(site: BookedSite, job: int) -> None:
    rows = [
        row.split("|") for row in site.ours("-n", "-P", "-j", str(job), "-o", COLUMNS).splitlines()
    ]
    # slurmd's reports of extern steps depend on the cluster; here there are none.
    assert [row[0] for row in rows] == [str(job), f"{job}.batch", f"{job}.0"]
    assert [row[2] for row in rows] == [site.user, "", ""]
    assert rows[0][1] == "outer"
    assert rows[0][3:5] == ["FAILED", "3:0"]
    assert rows[1][3:5] == ["FAILED", "3:0"]
    assert rows[2][3:5] == ["COMPLETED", "0:0"]


def test_owner_and_root_are_told_the_same(site: BookedSite, job: int) -> None:
    for words in (
        ("-j", str(job)),
        ("-j", f"{job}.0", "-l"),
        ("-a", "-X", "-S", "now-1hour", "-p", "-o", "all"),
        ("-j", str(job), "--json"),
    ):
        ours, theirs = site.ours(*words), by_daemon(site, *words)
        assert ours.replace("--config", "--socket") == theirs
    mine = by_daemon(site, "-n", "-X", "-P", "-o", "user", "-S", "now-1hour").split()
    assert set(mine) == {site.user}
    other = next(name for name in site.cluster.users if name != site.user)
    assert by_daemon(site, "-n", "-X", "-S", "now-1hour", user=other) == ""
    # Without PrivateData everybody's jobs may be seen by everybody, if they ask.
    assert (
        by_daemon(site, "-n", "-X", "-P", "-o", "jobid", "-j", str(job), user=other) == f"{job}\n"
    )


def test_under_slurms_own_name(site: BookedSite, job: int) -> None:
    env = {"STEWARD": str(STEWARD), "STEWARD_CONFIG": str(site.daemon.config), "TZ": "UTC"}
    words = ["-n", "-X", "-P", "-j", str(job), "-o", "jobid,state"]
    out = site.cluster.run([str(BIN / "sacct"), *words], env=env, timeout_s=120).stdout
    assert out == f"{job}|FAILED\n"


def test_script_and_environment_come_from_the_archive(site: BookedSite, job: int) -> None:
    wait_until(lambda: SCRIPT in by_daemon(site, "-B", "-j", str(job)), WAIT_S)
    assert by_daemon(site, "-B", "-j", str(job)).startswith(f"Batch Script for {job}\n---")
    assert "SLURM_" in by_daemon(site, "--env-vars", "-j", str(job))


def test_a_run_that_is_requeued_and_held_is_pending_everywhere(site: BookedSite) -> None:
    job = str(site.submit("#!/bin/sh\nsleep 600\n", requeue=True))
    wait_until(lambda: squeue(site, job).startswith("RUNNING"), WAIT_S)
    site.cluster.run(["scontrol", "requeuehold", job])
    wait_until(lambda: squeue(site, job) == "PENDING|job requeued in held state", WAIT_S)
    words = ("-n", "-X", "-P", "-o", "jobid,state,restarts")
    waiting = f"{job}|PENDING|1\n"
    wait_until(lambda: site.ours(*words, "-j", job) == waiting, WAIT_S)
    assert site.ours(*words, "-j", job, "-s", "PD") == waiting
    # Slurm has the run wait for two minutes: until then it is not eligible, and not listed by now.
    window = ("-S", "now-1hour", "-E", "now+1hour")
    assert waiting in site.ours(*words, "-a", "-s", "PD", *window)
    assert site.ours(*words, "-D", "-j", job) == f"{job}|REQUEUED|0\n{waiting}"
    page = site.cluster.run(
        [STEWARD, "job", job],
        user=site.user,
        env={"STEWARD_SOCKET": site.daemon.settings.socket, "TZ": "UTC"},
        timeout_s=120,
    ).stdout
    assert "PENDING" in page
    assert "held" in page
    site.cluster.run(["scancel", job])


def squeue(site: BookedSite, job: str) -> str:
    command = ["squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T|%r"]
    return str(site.cluster.run(command, check=False).stdout).strip()


def test_a_parquet_file_is_asked_as_the_books_are(site: BookedSite, job: int) -> None:
    path = Path(site.cluster.directory) / "jobs.parquet"
    site.ours("-a", "-S", "now-1hour", "--parquet", str(path))
    words = ("-P", "-j", str(job), "-o", f"{COLUMNS},start,end,elapsed,totalcpu,maxrss")
    assert site.ours("-f", str(path), *words) == site.ours(*words)
    document = json.loads(site.ours("-f", str(path), "-j", str(job), "--json"))
    assert document["meta"]["version"] == 1
    (found,) = document["jobs"]
    assert found["exit_code"]["return_code"] == 3
    assert [step["step"]["id"] for step in found["steps"]] == ["batch", "0"]
