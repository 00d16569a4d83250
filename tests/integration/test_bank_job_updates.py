"""Updates and releases on a real cluster: priced for every sender, silent for other users."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bank_cluster import ACCOUNTS, CPU, RATE, SHELL, BankSite, bank_site
from job_submission import wait_until
from web_site import WEB_USER, Visitor, WebSite

from steward.bank.money import MICRO
from steward.bank.records import Rate

pytestmark = [
    pytest.mark.wide,
    pytest.mark.database,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

MEANS = 40 * MICRO
"""Balance that pays for five hours of a CPU, but not for six."""
COORDINATOR, OWNER, OPERATOR, STRANGER = "ada", "bela", "oper", "mallory"
DEAR, CHEAP = "--time=40:00:00", "--time=3:00:00"
PARTITIONS = (
    "Licenses=abq:9",
    "PartitionName=licensed Nodes=node3 MaxTime=INFINITE",
    "PartitionName=low Nodes=node3 PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE",
    "PartitionName=high Nodes=node3 PriorityTier=10 MaxTime=INFINITE",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
)


@pytest.fixture(scope="module")
def shared(slurm_version: str) -> Iterator[BankSite]:
    users = (COORDINATOR, OWNER, OPERATOR, STRANGER, WEB_USER)
    with bank_site(slurm_version, accounting=True, user_names=users, extra=PARTITIONS) as site:
        site.as_root("sacctmgr", "-i", "modify", "user", OPERATOR, "set", "adminlevel=Operator")
        licensed = Rate(partition="licensed", weights={"license/abq": CPU})
        site.open({ACCOUNTS[0]: MEANS, ACCOUNTS[1]: MEANS}, rates=(RATE, licensed))
        site.start()
        wait_until(lambda: site.tries(f"{SHELL}true\n", "--time=9-0").returncode != 0, 60)
        # Until the gate knows who operators and coordinators are, it takes them for strangers:
        # for seconds, and not until Steward asks Slurm again after a minute.
        released, changed = held(site, CHEAP), held(site, CHEAP)
        wait_until(lambda: acts(site, "slurm.job.release", released, OPERATOR)[0], 10)
        wait_until(lambda: changes(site, changed, "timelimit=2:00:00", user=OPERATOR), 10)
        wait_until(lambda: changes(site, changed, "timelimit=1:00:00", user=COORDINATOR), 10)
        site.as_root("scancel", str(released), str(changed))
        yield site


@pytest.fixture(scope="module")
def pages(shared: BankSite) -> Iterator[WebSite]:
    names = ("cluster", "bank", "gate")
    settings = {name: getattr(shared.settings, name) for name in names}
    web = WebSite(shared.cluster, Path(shared.cluster.directory) / "steward", settings=settings)
    shared.kill_daemon()
    shared.daemon, shared.settings = web.daemon, web.daemon.settings
    with web:
        shared.until_gate()
        yield web


@pytest.fixture(scope="module")
def owner(pages: WebSite) -> Visitor:
    return pages.visitor(OWNER)


@pytest.fixture
def site(shared: BankSite) -> Iterator[BankSite]:
    yield shared
    shared.as_root("scancel", "--user", OWNER)
    shared.until_idle()
    wait_until(lambda: not shared.held(), 60)


def held(site: BankSite, *words: str) -> int:
    """Submit a job that its owner holds; return its id when the bank has seen it."""
    done = site.tries(f"{SHELL}sleep 1000\n", "-H", *words, user=OWNER)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    wait_until(lambda: job in {hold.job_id for hold in site.holds()}, 60)
    return job


def changes(site: BankSite, job: int, *words: str, user: str) -> bool:
    return site.as_user("scontrol", "update", f"jobid={job}", *words, user=user)


def releases(site: BankSite, job: int, user: str) -> bool:
    return site.as_user("scontrol", "release", str(job), user=user)


def state(site: BankSite, job: int) -> str:
    return str(site.cluster.run(["squeue", "-h", "-j", str(job), "-o", "%T"]).stdout).strip()


def acts(site: BankSite, ref: str, job: int, user: str) -> tuple[bool, str]:
    """Run an action for a user; return whether it succeeded, and its message."""
    words = ("action", "run", ref, f"jobids={job}")
    done = site.daemon.ask(*words, user=user, check=False)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("user", [OWNER, COORDINATOR, OPERATOR])
def test_what_cannot_be_paid_is_released_and_enlarged_by_nobody(site: BankSite, user: str) -> None:
    dear, cheap = held(site, DEAR), held(site, CHEAP)
    assert not releases(site, dear, user)
    if user != COORDINATOR:
        done, said = acts(site, "slurm.job.release", dear, user)
        assert not done
        assert "SU" in said, "the gate's own words"
    for change in (
        "timelimit=40:00:00",
        "numnodes=4 mincpusnode=8",
        f"partition=main numnodes=4 account={ACCOUNTS[1]}",
    ):
        words = change.split()
        changes(site, cheap, *words, user=user)
    releases(site, cheap, user)
    wait_until(lambda: state(site, cheap) in ("PENDING", "RUNNING"), 30)
    assert state(site, dear) == "PENDING"
    assert site.held() <= MEANS
    assert site.link.get_means(ACCOUNTS[0]).available >= 0
    assert site.link.get_means(ACCOUNTS[1]).available >= 0


def test_a_job_is_not_made_larger_where_it_was_moved_to_for_less(site: BankSite) -> None:
    job = held(site, CHEAP)
    assert changes(site, job, "partition=licensed", user=OWNER), "it costs nothing there"
    assert not changes(site, job, "licenses=abq:9", user=OWNER), "the queue need not show that yet"
    assert changes(site, job, "licenses=abq:1", user=OWNER)
    assert releases(site, job, OWNER)
    wait_until(lambda: state(site, job) == "RUNNING", 60)
    wait_until(lambda: 3 * CPU <= site.held() < 4 * CPU, 60)


def test_a_job_is_not_moved_to_where_what_it_came_to_ask_for_is_dear(site: BankSite) -> None:
    job = held(site, CHEAP)
    assert changes(site, job, "licenses=abq:9", user=OWNER), "they cost nothing in main"

    def is_polled() -> bool:
        return any(one.job_id == job and one.licenses for one in site.unfinished())

    wait_until(is_polled, 60)
    time.sleep(8)  # until the gate has a poll that began after the change
    assert not changes(site, job, "partition=licensed", user=OWNER)
    assert changes(site, job, "licenses=abq:1", user=OWNER)


def test_the_gate_prices_a_rejected_update_that_slurmctld_applies_in_part(site: BankSite) -> None:
    job = held(site, "--time=2:00:00")
    assert not changes(site, job, "numnodes=2", "features=nosuch", user=OWNER), "by Slurm"

    def is_polled() -> bool:
        return any(row.job_id == job and (row.cpus or 0) >= 2 for row in site.unfinished())

    wait_until(is_polled, 60)
    time.sleep(8)  # until the gate has a poll that began after the change
    assert not changes(site, job, "timelimit=3:00:00", user=OWNER), "6 hours on both nodes"
    assert releases(site, job, OWNER)
    wait_until(lambda: state(site, job) == "RUNNING", 60)
    wait_until(lambda: 4 * CPU <= site.held() < 5 * CPU, 60)


def test_the_gate_prices_an_update_of_an_array_task_by_either_id(site: BankSite) -> None:
    job = held(site, "--time=0:30:00", "--array=1-2")
    assert changes(site, job, "timelimit=0:40:00", user=OWNER)
    task = f"{job}_1"
    assert site.as_user("scontrol", "update", f"jobid={task}", "timelimit=0:50:00", user=OWNER)
    shown = site.cluster.run(["scontrol", "-o", "show", "job", task]).stdout
    raw = shown.partition("JobId=")[2].split()[0]
    assert raw != str(job), "slurmctld gives it an id of its own"
    dear = ("scontrol", "update", f"jobid={raw}", "timelimit=9:00:00")
    assert not site.as_user(*dear, user=OWNER)
    assert site.as_user("scontrol", "update", f"jobid={raw}", "timelimit=1:00:00", user=OWNER)


@pytest.mark.parametrize("user", [OWNER, COORDINATOR, OPERATOR])
def test_what_can_be_paid_is_released_and_held_for_once(site: BankSite, user: str) -> None:
    cheap = held(site, CHEAP)
    assert releases(site, cheap, user)
    wait_until(lambda: state(site, cheap) == "RUNNING", 60)
    wait_until(lambda: 3 * CPU <= site.held() < 4 * CPU, 60)


@pytest.mark.parametrize("user", [OWNER, OPERATOR])
def test_steward_asks_the_gate_as_its_user_and_holds_once(site: BankSite, user: str) -> None:
    cheap = held(site, CHEAP)
    done, said = acts(site, "slurm.job.release", cheap, user)
    assert done, said
    assert 3 * CPU <= site.held() < 4 * CPU
    wait_until(lambda: state(site, cheap) == "RUNNING", 60)
    done, said = acts(site, "slurm.job.requeue", cheap, user)
    assert done, said
    wait_until(lambda: site.held() < 4 * CPU, 60)


def test_a_stranger_learns_nothing_and_changes_nothing(site: BankSite) -> None:
    victim = held(site, CHEAP)
    assert releases(site, victim, OWNER)
    wait_until(lambda: len([hold for hold in site.holds() if hold.confirmed]) == 1, 60)
    before = site.held(), site.balance(), site.link.get_means(ACCOUNTS[0]).available
    said = ""
    for number in range(20):
        words = ["scontrol", "update", f"jobid={victim}", f"timelimit={60 + number}"]
        done = site.cluster.run(words, user=STRANGER, check=False)
        assert done.returncode != 0
        said += done.stdout + done.stderr
    assert not re.search(r"SU|balance|physics|[0-9]+\.[0-9]", said), said
    assert (site.held(), site.balance(), site.link.get_means(ACCOUNTS[0]).available) == before
    cheap = site.tries(f"{SHELL}sleep 1\n", "--time=1", user=OWNER)
    assert cheap.returncode == 0, cheap.stderr


def test_decreases_holds_and_cancels_always_pass(site: BankSite) -> None:
    job = held(site, DEAR)
    assert changes(site, job, "timelimit=39:00:00", user=OWNER)
    assert site.as_user("scontrol", "hold", str(job), user=OWNER)
    assert site.as_user("scontrol", "hold", str(job), user=COORDINATOR)
    assert site.as_user("scancel", str(job), user=OWNER)


def test_root_passes_is_charged_and_marked(site: BankSite) -> None:
    dear = held(site, DEAR)
    assert site.as_root("scontrol", "release", str(dear))
    wait_until(lambda: state(site, dear) == "RUNNING", 60)
    wait_until(lambda: site.held() > 39 * CPU, 60)
    time.sleep(2)  # some polls
    assert state(site, dear) == "RUNNING"
    assert site.tries(f"{SHELL}true\n", "--time=1", user=OWNER).returncode != 0, "overdrawn"
    wait_until(lambda: "admitted for root" in site.bank("would-reject", "--all", "--json"), 30)


def test_an_operator_allows_one_job(site: BankSite) -> None:
    dear, other = held(site, DEAR), held(site, DEAR)
    words = ("allow", str(dear), "--reason", "deadline", "--until", "now+1hour")
    assert "only operators" in site.daemon.ask("bank", *words, user=OWNER, check=False).stderr
    site.bank(*words, user=OPERATOR)
    assert not releases(site, other, OWNER)
    assert releases(site, dear, OWNER)
    wait_until(lambda: state(site, dear) == "RUNNING", 60)
    wait_until(lambda: f"allowed by {OPERATOR}" in site.bank("would-reject", "--all", "--json"), 30)


def runs_on(site: BankSite, partition: str, node: str) -> int:
    """Return the id of a running job of one CPU hour."""
    words = ("--requeue", "--time=1:00:00", f"--partition={partition}", f"--nodelist={node}")
    job = held(site, *words)
    assert releases(site, job, OWNER)
    wait_until(lambda: state(site, job) == "RUNNING", 60)
    return job


def restarts(site: BankSite, job: int) -> int:
    said = str(site.cluster.run(["scontrol", "show", "job", str(job)]).stdout)
    return int(said.partition("Restarts=")[2].split()[0])


def until_polled(site: BankSite, job: int, how: str) -> None:
    """Wait until the bank knows a job's second run; print the delay after slurmctld."""
    wait_until(lambda: restarts(site, job) == 1, 120)
    begun = time.monotonic()
    wait_until(lambda: (job, 1) in {(one.job_id, one.restarts) for one in site.unfinished()}, 60)
    print(f"{how}: polled {time.monotonic() - begun:.2f} s after slurmctld showed it")


def is_up_again(site: BankSite, node: str) -> bool:
    """Resume a node, unless it has returned to service by itself."""
    site.as_root("scontrol", "update", f"nodename={node}", "state=resume")
    shown = site.cluster.run(["sinfo", "-h", "-N", "-n", node, "-p", "main", "-o", "%T"]).stdout
    return shown.strip() in ("idle", "mixed", "allocated")


def test_which_runs_slurmctld_asks_nobody_of(site: BankSite) -> None:
    """Slurm asks no plugin about requeues, preemption, node failures: polls price them."""
    requeued, failed = runs_on(site, "main", "node1"), runs_on(site, "main", "node2")
    preempted = runs_on(site, "low", "node3")

    def asked() -> int:
        tally = site.link.get_status().tally
        return tally.admitted + tally.rejected

    before = asked()
    assert site.as_user("scontrol", "requeue", str(requeued), user=OWNER)
    down = ("scontrol", "update", "nodename=node2", "state=down", "reason=lost")
    assert site.as_root(*down)
    try:
        until_polled(site, requeued, "requeue")
        until_polled(site, failed, "failed node")
        assert asked() == before, "slurmctld asked the plugin of a requeue or a failed node"
    finally:
        wait_until(lambda: is_up_again(site, "node2"), 120)
    words = ("--partition=high", "--ntasks=8", "--time=1")
    assert site.tries(f"{SHELL}sleep 1\n", *words, user=OWNER).returncode == 0
    before += 1  # of the submission
    until_polled(site, preempted, "preemption")
    assert asked() == before, "slurmctld asked the plugin of a preemption"
    jobs = (requeued, failed, preempted)
    # No sooner than the credential of the first run has expired.
    wait_until(lambda: {state(site, job) for job in jobs} == {"RUNNING"}, 300)
    site.as_root("scontrol", "suspend", str(requeued))
    site.as_root("scontrol", "resume", str(requeued))
    assert asked() == before, "slurmctld asked the plugin of a resume"
    wait_until(lambda: 3 * CPU <= site.held() < 4 * CPU, 60)


def test_the_page_releases_for_its_owner_what_can_be_paid(site: BankSite, owner: Visitor) -> None:
    dear, cheap = held(site, DEAR), held(site, CHEAP)
    pages = [f"/jobs/{site.name}/{job}" for job in (dear, cheap)]
    wait_until(lambda: all(f'{page}/release"' in owner.get(page).text for page in pages), 60)
    answer = owner.submit(f"/jobs/{site.name}/{dear}/release")
    assert answer.status_code not in (200, 303), answer.text
    assert " SU" in answer.text, "the gate's own words"
    assert state(site, dear) == "PENDING"
    answer = owner.submit(f"/jobs/{site.name}/{cheap}/release")
    assert answer.status_code == 303, answer.text
    wait_until(lambda: state(site, cheap) == "RUNNING", 60)
    assert 3 * CPU <= site.held() < 4 * CPU
    assert state(site, dear) == "PENDING"
