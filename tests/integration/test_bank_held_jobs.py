"""Jobs without an SU hold that are released or enlarged: no account is overdrawn."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bank_cluster import ACCOUNTS, CPU, SHELL, BankSite, bank_site
from job_submission import wait_until

from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.wide,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

MEANS = 40 * MICRO
"""Balance that pays for five hours of a CPU, but not for six."""


@pytest.fixture(scope="module")
def shared(slurm_version: str) -> Iterator[BankSite]:
    assert 5 * CPU < MEANS < 6 * CPU
    with bank_site(slurm_version) as site:
        site.open({ACCOUNTS[0]: MEANS})
        site.start()
        wait_until(lambda: site.tries(f"{SHELL}true\n", "--time=9-0").returncode != 0, 30)
        yield site


@pytest.fixture
def site(shared: BankSite) -> Iterator[BankSite]:
    yield shared
    shared.as_root("scancel", "--user", shared.user)
    shared.until_idle()
    wait_until(lambda: not shared.holds(), 60)


def put_off(site: BankSite, *words: str) -> int:
    """Submit a job that does not start yet; return its id when the bank has seen it."""
    done = site.tries(f"{SHELL}sleep 100\n", *words)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    wait_until(lambda: job in {hold.job_id for hold in site.holds()}, 60)
    return job


def changes(site: BankSite, job: int, *words: str) -> bool:
    return site.as_user("scontrol", "update", f"jobid={job}", *words)


def state(site: BankSite, job: int) -> str:
    return str(site.cluster.run(["squeue", "-h", "-j", str(job), "-o", "%T"]).stdout).strip()


def test_a_release_is_paid_for(site: BankSite) -> None:
    dear = put_off(site, "-H", "--time=40:00:00")
    assert not site.as_user("scontrol", "release", str(dear))
    assert not changes(site, dear, "priority=100", "timelimit=39:00:00")
    assert state(site, dear) == "PENDING"
    first, second = (put_off(site, "-H", "--time=3:00:00") for _ in range(2))
    assert site.held() == 0
    assert site.as_user("scontrol", "release", str(first))
    assert site.held() > 3 * CPU
    assert not site.as_user("scontrol", "release", str(second)), "the first has it"
    wait_until(lambda: state(site, first) == "RUNNING", 60)
    assert (state(site, dear), state(site, second)) == ("PENDING", "PENDING")


def test_what_begins_later_is_not_made_larger_than_can_be_paid(site: BankSite) -> None:
    job = put_off(site, "--begin=now+1hour", "--time=10")
    assert not changes(site, job, "timelimit=40:00:00")
    assert site.as_root("scontrol", "update", f"jobid={job}", "timelimit=20")
    assert site.held() == 0
    dear = put_off(site, "--begin=now+1hour", "--time=40:00:00")
    assert not changes(site, dear, "starttime=now")
    assert state(site, dear) == "PENDING"
    assert changes(site, job, "starttime=now")
    assert site.held() > 0


def test_one_that_was_just_submitted_cannot_be_changed_unseen(site: BankSite) -> None:
    site.signal_part("bank", signal.SIGSTOP)
    try:
        done = site.tries(f"{SHELL}sleep 100\n", "-H", "--time=40:00:00")
        assert done.returncode == 0, done.stderr
        assert not site.as_user("scontrol", "release", done.stdout.strip())
    finally:
        site.signal_part("bank", signal.SIGCONT)


def test_while_the_gate_is_off_unpaid_jobs_run(site: BankSite) -> None:
    off = Path(site.settings.gate_off)
    off.touch()
    try:
        # It starts after more than one poll.
        dear = site.submit(f"{SHELL}sleep 100\n", time="40:00:00", begin="now+10")
        wait_until(lambda: state(site, dear) == "RUNNING", 60)
    finally:
        off.unlink()
    wait_until(lambda: site.held() > MEANS, 60)
    site.as_root("scancel", str(dear))
    site.until_idle()
    wait_until(lambda: not site.held(), 60)


def test_what_is_made_smaller_can_be_let_go(site: BankSite) -> None:
    job = put_off(site, "-H", "--time=40:00:00")
    assert changes(site, job, "timelimit=10")
    wait_until(lambda: site.as_user("scontrol", "release", str(job)), 120)
    assert 0 < site.held() < CPU
