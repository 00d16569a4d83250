"""Upgrades of Slurm under a running Steward, twice, by the steps of docs/operate.md."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounting_cluster import BookedSite, spec_of
from job_submission import state_of, wait_until
from sandboxes import passable_directory

from steward.admin.plugins.build import SlurmVersion
from steward.admin.plugins.spank import check_shim
from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="other versions of Slurm take root"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

BATCH = "#!/bin/sh\n#SBATCH -n2\nsrun true\nsrun -n2 sh -c 'exit 3'\nexit 5\n"


@pytest.fixture
def site(slurm_version: str) -> Iterator[BookedSite]:
    if slurm_version:
        pytest.skip("begins with the installed Slurm")
    # slurmdbd reads the tables of two or three releases before its own, and has no -i.
    options = {"accounting": False, "nodes": 2, "min_job_age_s": 20}
    with (
        passable_directory() as path,
        Sandbox.up(spec_of(str(path), "", **options), report=print) as cluster,
    ):
        site = BookedSite(cluster)
        try:
            site.start()
            yield site
        finally:
            site.close()


def submit_quietly(site: BookedSite, script: str = BATCH) -> int:
    """Submit a job, and fail if sbatch or srun prints a warning."""
    words = ["sbatch", "--parsable", "--output=/dev/null"]
    done = site.cluster.run(words, user=site.user, input=script)
    assert done.stderr == ""
    quiet = site.cluster.run(["srun", "-Q", "true"], user=site.user)
    assert (quiet.stdout, quiet.stderr) == ("", "")
    return int(done.stdout.strip().partition(";")[0])


def rows(site: BookedSite) -> list[str]:
    """Return Steward's sacct rows of ended jobs."""
    words = ("-a", "-D", "-n", "-P", "-S", "now-1hour", "-o", "JobID,Submit,State,ExitCode,NTasks")
    return [row for row in site.ours(*words).splitlines() if "RUNNING" not in row]


def wait_for_books(site: BookedSite, job: int, since: float) -> None:
    """Wait until the job has a record with its batch step and two more."""
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since - 1))
    words = ("-n", "-P", "-S", begin, "-o", "JobID,State,ExitCode")
    wanted = {
        f"{job}|FAILED|5:0",
        f"{job}.batch|FAILED|5:0",
        f"{job}.0|COMPLETED|0:0",
        f"{job}.1|FAILED|3:0",
    }
    wait_until(lambda: wanted <= set(site.ours(*words).splitlines()), 60)


def looked_over(site: BookedSite, check: str) -> tuple[str, str]:
    """Return the doctor's finding about one object."""
    told = site.daemon.ask("doctor", "--json", "--only", check, check=False).stdout
    (finding,) = json.loads(told)["findings"]
    return finding["status"], finding["finding"]


def upgrade(site: BookedSite, version: str, *ctld: str) -> None:
    """Upgrade by the documented steps: slurmctld, then each node without the plugin's line."""
    cluster = site.cluster
    conf = Path(cluster.directory) / "etc/plugstack.conf.d/steward.conf"
    nodes = sorted(name for name in cluster.get_status() if name.startswith("slurmd."))
    for node in nodes:
        cluster.stop_service(node)
    conf.unlink()
    cluster.upgrade(version)
    cluster.restart_controller(*ctld)
    # Steward was not restarted: doctor and daemon use the new commands.
    assert looked_over(site, "slurm") == ("ok", f"slurmctld {cluster.plan.slurm_version} answers")
    site.install_plugin()
    assert looked_over(site, "spank")[0] == "ok"
    check = check_shim(
        SlurmVersion.parse(cluster.plan.slurm_version),
        libdir=f"{cluster.directory}/lib",
        plugstack=f"{cluster.directory}/etc/plugstack.conf",
    )
    assert check == []
    for node in nodes:
        cluster.start_service(node)
    words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%t"]
    wait_until(lambda: not {"down", "unk", "down*"} & set(cluster.run(words).stdout.split()), 60)


def test_nothing_is_lost_from_release_to_release(site: BookedSite) -> None:
    since = time.time()
    first = submit_quietly(site)
    wait_for_books(site, first, since)
    before = rows(site)

    # Too far for slurmctld's state: no job runs or is pending, and job ids start over.
    site.until_idle()
    upgrade(site, "24.11", "-i")
    assert "24.11" in site.cluster.run(["sbatch", "--version"]).stdout
    since = time.time()
    second = submit_quietly(site)
    wait_for_books(site, second, since)
    after = rows(site)
    assert set(before) <= set(after)

    # From here one job runs during the upgrade, and another is pending.
    running = submit_quietly(site, "#!/bin/sh\nsrun sleep 15\nexit 6\n")
    waiting = int(
        site.submit(BATCH, dependency=f"afterany:{running}"),
    )
    wait_until(lambda: state_of(site.cluster, running) == "RUNNING", 60)
    upgrade(site, "26.05")
    assert "26.05" in site.cluster.run(["sbatch", "--version"]).stdout
    third = submit_quietly(site)
    wait_for_books(site, third, since)
    wait_for_books(site, waiting, since)
    wait_until(lambda: any(row.startswith(f"{running}|") for row in rows(site)), 60)
    told = {row.partition("|")[0]: row.split("|")[2:] for row in rows(site)}
    assert told[str(running)][:2] == ["FAILED", "6:0"]
    wait_until(
        lambda: any(row.startswith(f"{running}.0|") and "COMPLETED" in row for row in rows(site)),
        60,
    )
    assert set(after) <= set(rows(site))
    gaps = site.daemon.ask("accounting", "gaps").stdout
    print(gaps)
    for name in ("slurmctld", "sbatch"):
        log = Path(site.cluster.directory) / f"log/{name}.log"
        assert not log.exists() or "spank_steward" not in log.read_text()
