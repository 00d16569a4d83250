"""Job pages of real jobs on a real cluster, their pending reasons, and their mails."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounting_cluster import BookedSite, spec_of
from job_submission import state_of, wait_until
from sandbox_daemon import STEWARD
from sandboxes import passable_directory

from steward.sandbox import Sandbox
from steward.slurm import PendingJobs

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="nodes and users of their own take root"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the plugin is compiled"),
]

WAIT_S = 120
MIB = 1024**2
TASK_USAGE_SOURCE = Path(__file__).parents[1] / "native" / "task_usage.c"
"""Source of a program that uses given resources; static, to run on any version of Debian."""


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BookedSite]:
    with (
        passable_directory() as path,
        Sandbox.up(spec_of(str(path), slurm_version, accounting=False), report=print) as cluster,
    ):
        mail = path / "etc" / "mail"
        options = [f"MailProg={mail}", "SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=512"]
        site = BookedSite(cluster)
        try:
            _make_mailers(site, mail)
            words = ["cc", "-O1", "-static", "-o", program_of(site), str(TASK_USAGE_SOURCE)]
            subprocess.run(words, check=True, timeout=100)
            cluster.configure(*options)
            cluster.restart_controller()
            site.start()
            yield site
        finally:
            site.close()


@pytest.fixture
def mailed(site: BookedSite) -> BookedSite:
    """Return the cluster, whose slurmctld can run ``steward mail``."""
    if site.cluster.plan.root:
        pytest.skip("slurmctld sees the files of another Debian alone")
    return site


def _make_mailers(site: BookedSite, mail: Path) -> None:
    """Write Steward's mailer, as MailProg, and behind it one that stores its input."""
    kept = Path(site.cluster.directory) / "log" / "mails"
    kept.mkdir()
    shutil.chown(kept, site.cluster.plan.spec.slurm_user)
    mailer = mail.with_name("mailer")
    mailer.write_text(
        f'#!/bin/sh\n{{ printf "%s\\n" "$2" "$3"; cat; }} > {kept}/.$$\nmv {kept}/.$$ {kept}/$$\n'
    )
    mail.write_text(
        "#!/bin/sh\n"
        f"export STEWARD_SOCKET={site.daemon.settings.socket}\n"
        f'exec {STEWARD} mail --program {mailer} "$@"\n'
    )
    for path in (mail, mailer):
        path.chmod(0o755)


def program_of(site: BookedSite) -> str:
    """Return a program that uses the given resources."""
    return f"{site.cluster.directory}/etc/used"


def mails(site: BookedSite) -> list[str]:
    kept = Path(site.cluster.directory) / "log" / "mails"
    return [path.read_text() for path in sorted(kept.iterdir()) if not path.name.startswith(".")]


def page(site: BookedSite, job: object, *more: str, user: str = "") -> Any:
    return site.daemon.ask_json("job", str(job), *more, user=user or site.user)


def whole(site: BookedSite, job: int) -> Any:
    """Return the page once the nodes have sent all reports."""

    def is_whole() -> bool:
        found = site.daemon.ask("job", str(job), "--json", user=site.user, check=False)
        if found.returncode:
            return False
        runs = json.loads(found.stdout)["runs"]
        return bool(runs and runs[-1]["steps"]) and not runs[-1]["efficiency"]["at_least"]

    wait_until(is_whole, WAIT_S)
    return page(site, job)


def test_a_job_of_two_tasks(site: BookedSite) -> None:
    said = f"{site.cluster.users[site.user].home}/used"
    busy = (
        "#!/bin/sh\nsrun -n2 sh -c '"
        f"[ $SLURM_PROCID = 0 ] && exec {program_of(site)} {said} 200 200 0; "
        f"exec {program_of(site)} {said} 1000 200 -10'\nexit 3\n"
    )
    job = site.submit(busy, ntasks=2, time="00:10:00")
    answer = whole(site, job)
    (run,) = answer["runs"]
    steps = {step["line"]["step"]: step for step in run["steps"]}
    step = steps["0"]
    assert step["signals"] == {"10": 1}
    assert {task["task"]: task.get("signal", 0) for task in step["tasks"]} == {0: 0, 1: 10}
    first, second = (task["cpu_s"] for task in step["tasks"])
    assert first >= 0.2
    assert second >= 1.0
    assert step["balance"]["busiest"] == 1
    peak = max(task.get("max_rss_bytes", 0) for task in step["tasks"])
    assert 200 * MIB < peak < 260 * MIB
    used = run["efficiency"]
    assert used["cpu_used_s"] == pytest.approx(
        sum(task["cpu_s"] for one in run["steps"] for task in one["tasks"]), rel=1e-3
    )
    given_s = (run["line"]["end_us"] - run["line"]["start_us"]) / 1e6 * run["line"]["cpus"]
    assert used["cpu"] == pytest.approx(used["cpu_used_s"] / given_s)
    assert used["memory_used_bytes"] >= peak
    assert used["memory_allocated_bytes"] == run["line"]["cpus"] * 512 * MIB
    assert used["limit_s"] == 600
    text = site.daemon.ask("job", str(job), user=site.user).stdout
    assert "FAILED, exit code 3" in text
    assert "SIGUSR1 ended 1 task." in text
    assert text.isascii()


def has_steps(site: BookedSite, job: int, runs: int) -> bool:
    """Return whether a job has this many runs, with a reported step of the last."""
    found = site.daemon.ask("job", str(job), "--json", user=site.user, check=False)
    told = json.loads(found.stdout)["runs"] if not found.returncode else []
    return len(told) == runs and bool(told[-1]["steps"])


def test_a_job_that_was_requeued_has_two_runs(site: BookedSite) -> None:
    job = site.submit("#!/bin/sh\n#SBATCH --requeue\nsleep 300\n")
    wait_until(lambda: has_steps(site, job, 1), WAIT_S)
    site.cluster.run(["scontrol", "requeue", str(job)])
    # Slurm waits two minutes for good reason: a node rejects a job in the second in which it was
    # told to end its former run.
    wait_until(lambda: state_of(site.cluster, job) == "PENDING", WAIT_S)
    site.cluster.run(["scontrol", "update", f"jobid={job}", "starttime=now+3"])
    wait_until(lambda: has_steps(site, job, 2), WAIT_S)
    site.cluster.run(["scancel", str(job)])
    wait_until(lambda: page(site, job)["record"]["state"] == "CANCELLED", WAIT_S)
    text = site.daemon.ask("job", str(job), user=site.user).stdout
    assert "Run 1 of 2" in text


def test_an_array_is_summed_up(site: BookedSite) -> None:
    script = "#!/bin/sh\nexit $((SLURM_ARRAY_TASK_ID == 2))\n"
    job = site.submit(script, array="1-4")

    def states() -> dict[str, int]:
        found = site.daemon.ask("job", str(job), "--array", "--json", user=site.user, check=False)
        return dict(json.loads(found.stdout)["array"]["states"]) if not found.returncode else {}

    wait_until(lambda: states() == {"COMPLETED": 3, "FAILED": 1}, WAIT_S)
    worst = page(site, job, "--array")["array"]["worst"]
    assert worst[0]["job"] == f"{job}_2"
    assert worst[0]["reason"].startswith("exit code 1")


def waiting(site: BookedSite, job: int, reason: str) -> Any:
    def says() -> Any:
        found = site.daemon.ask("job", str(job), "--json", user=site.user, check=False)
        return json.loads(found.stdout)["waiting"] if not found.returncode else None

    wait_until(lambda: (says() or {}).get("reason") == reason, WAIT_S)
    return says()


def test_a_waiting_job_says_why(site: BookedSite) -> None:
    first = site.submit("#!/bin/sh\n#SBATCH --hold\nsleep 60\n")
    held = waiting(site, first, "JobHeldUser")
    assert held["explanation"].startswith("The job's owner holds it")
    assert held["queried"]
    second = site.submit("#!/bin/sh\ntrue\n", dependency=f"afterok:{first}")
    depends = waiting(site, second, "Dependency")
    assert depends["details"] == [f"until job {first} has completed (it is PENDING)"]
    third = site.submit("#!/bin/sh\ntrue\n", begin="now+1hour")
    begins = waiting(site, third, "BeginTime")
    assert begins["expected_start"] is not None
    site.cluster.configure("PartitionName=main Nodes=ALL Default=YES MaxTime=30 State=UP")
    site.cluster.run(["scontrol", "update", "partitionname=main", "maxtime=30"])
    fourth = site.submit("#!/bin/sh\ntrue\n", time="02:00:00")
    limited = waiting(site, fourth, "PartitionTimeLimit")
    assert limited["details"] == ["partition main: MaxTime=00:30:00"]
    text = site.daemon.ask("job", str(fourth), user=site.user).stdout
    assert "The time limit of the job exceeds that of the partition. (PartitionTimeLimit)" in text
    site.cluster.run(["scancel", *(str(job) for job in (first, second, third, fourth))])


def test_a_job_that_has_just_started_is_not_told_to_wait(site: BookedSite) -> None:
    job = site.submit("#!/bin/sh\n#SBATCH --hold\nsleep 60\n")
    waiting(site, job, "JobHeldUser")
    site.cluster.run(["scontrol", "release", str(job)])
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING", WAIT_S)
    # Polls show the start some seconds later: the page shows Slurm's own answer.
    found = page(site, job)
    text = site.daemon.ask("job", str(job), user=site.user).stdout
    (settings,) = site.daemon.settings.cluster.values()
    pending = PendingJobs(site.cluster.plan.spec.cluster, settings)
    now, never = pending.query_status(job), pending.query_status(999_999)
    site.cluster.run(["scancel", str(job)])
    assert now is not None
    assert (now.state, never) == ("RUNNING", None)
    assert now.expected_start is not None
    assert now.expected_nodes.startswith("node")
    assert (found["record"]["state"], found["waiting"]) == ("RUNNING", None)
    assert "Pending reason" not in text
    assert found["runs"][-1]["line"]["start_us"]
    assert found["record"]["nodelist"].startswith("node")


def is_known(site: BookedSite, job: int) -> bool:
    return not site.daemon.ask("job", str(job), user=site.user, check=False).returncode


def test_a_job_that_slurm_refused_was_not_ended_by_a_signal(site: BookedSite) -> None:
    words = ["sbatch", "--mem=99G", "-J", "refused", "--wrap", "true"]
    assert site.cluster.run(words, user=site.user, check=False).returncode
    asked = ["squeue", "-h", "-t", "FAILED", "-n", "refused", "-o", "%A"]
    job = int(site.cluster.run(asked).stdout)

    def is_told() -> bool:
        return is_known(site, job) and page(site, job)["record"]["state"] == "FAILED"

    wait_until(is_told, WAIT_S)
    record = page(site, job)["record"]
    assert (record["exit_code"], record["exit_signal"]) == (1, 0)
    text = site.daemon.ask("job", str(job), user=site.user).stdout
    assert "FAILED before it started. No node satisfies the request" in text


def test_a_job_is_nobody_elses_where_jobs_are_private(site: BookedSite) -> None:
    job = site.submit("#!/bin/sh\ntrue\n", comment="hush")
    whole(site, job)
    other = list(site.cluster.users)[1]
    public = site.daemon.ask("job", str(job), user=other, check=False)
    assert public.returncode == 0
    assert "hush" not in public.stdout
    assert "hush" in site.daemon.ask("job", str(job), user=site.user).stdout


def test_the_mail_of_an_end_holds_the_page(mailed: BookedSite) -> None:
    site = mailed
    before = len(mails(site))
    job = site.submit(
        "#!/bin/sh\nexit 3\n",
        **{"mail-type": "ALL", "mail-user": "ada@example.org", "job-name": "x\nBcc: all"},
    )
    wait_until(lambda: len(mails(site)) == before + 2, 2 * WAIT_S)
    (end,) = [mail for mail in mails(site) if " Failed, " in mail]
    subject, address, body = end.split("\n", 2)
    assert subject.startswith(f"Slurm Job_id={job} Name=x\\nBcc: all Failed")
    assert address == "ada@example.org"
    assert body.startswith(f"Job {job}  x\\nBcc: all")
    assert "FAILED, exit code 3" in body
    # The nodes' facts were waited for.
    assert "\nSteps\n" in body
    (began,) = [mail for mail in mails(site) if " Began, " in mail]
    assert began.split("\n", 2)[2] == ""


def test_mails_go_out_while_the_daemon_is_away(mailed: BookedSite) -> None:
    site = mailed
    before = len(mails(site))
    site.daemon.stop()
    try:
        job = site.submit("#!/bin/sh\ntrue\n", **{"mail-type": "BEGIN", "mail-user": "ada"})
        wait_until(lambda: len(mails(site)) == before + 1, WAIT_S)
        assert f"Job_id={job} " in mails(site)[-1] or any(
            f"Job_id={job} " in mail for mail in mails(site)
        )
    finally:
        site.daemon.start()


def test_gaps_are_told_and_nothing_else(site: BookedSite) -> None:
    def kinds() -> set[str]:
        return {one["kind"] for one in site.daemon.ask_json("accounting", "gaps")["findings"]}

    assert kinds() == set()
    none = site.daemon.ask("accounting", "gaps", "--fail")
    assert (none.returncode, none.stdout) == (0, "No gaps in this period.\n")
    # A node that lost lines says so with the next that it writes.
    with (site.lines / "node1.log").open("ab") as log:
        log.write(
            b'{"v":1,"k":"prolog","t":%d,"j":1,"n":"node1","lost":7}\n' % int(time.time() * 1e6)
        )
    wait_until(lambda: kinds() == {"node-gap"}, WAIT_S)
    failed = site.daemon.ask("accounting", "gaps", "--fail", check=False)
    assert failed.returncode == 1
    assert "node1" in failed.stdout
    refused = site.daemon.ask("accounting", "gaps", user=site.user, check=False)
    assert refused.returncode == 1
    assert "only operators" in refused.stderr
