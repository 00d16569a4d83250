"""The bank's worker on a real Slurm: charges, SU holds and notices of jobs of every kind."""

import re
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
from bank_cluster import CPU, SHELL, BankSite, bank_site
from job_submission import state_of, wait_until

from steward.bank.ledger import Authorship, open_ledger
from steward.bank.money import MICRO, round_half_up
from steward.core.events import utc_now

pytestmark = [pytest.mark.matrix, pytest.mark.long, pytest.mark.timeout(1800)]

BY = Authorship(who="root", why="a test")


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version) as site:
        site.open({"physics": 1_000_000 * MICRO, "chemistry": 1_000_000 * MICRO})
        site.start()
        yield site


def shown(site: BankSite, job: int | str) -> dict[str, str]:
    """Return scontrol's record of a job."""
    out = site.cluster.run(["scontrol", "-o", "show", "job", str(job)]).stdout
    return dict(re.findall(r"(\w+)=(\S*)", out))


def until(go: Path) -> str:
    """Return the beginning of a script that waits for a file."""
    return f"{SHELL}while [ ! -e {go} ]; do sleep 0.3; done\n"


def seconds(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def due(site: BankSite, job: int) -> int:
    """Return the expected charge of scontrol's record, at the tests' rate."""
    record = shown(site, job)
    cpus = int(record["NumCPUs"])
    return round_half_up(Fraction(CPU * cpus * seconds(record["RunTime"]), 3600))


def test_a_job_is_held_for_and_then_charged_what_it_used(site: BankSite) -> None:
    before = site.balance()
    go = Path(site.cluster.directory) / "confirmed"
    job = site.submit(f"{until(go)}sleep 3\n", time="10", ntasks=2)
    wait_until(lambda: site.held() > 0, 20)
    (hold,) = (one for one in site.holds() if one.job_id in (0, job))
    assert hold.amount >= round_half_up(Fraction(CPU * 2 * 660, 3600))
    wait_until(lambda: any(one.confirmed and one.job_id == job for one in site.holds()), 20)
    go.touch()
    site.until_charged([job])
    assert site.charged()[job] == due(site, job)
    assert before - site.balance() == due(site, job)


def test_every_run_of_a_requeued_job_and_one_after_its_end(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 2\n", time="5", requeue=True)
    site.until_charged([job])
    first = site.charged()[job]
    assert first == due(site, job)
    assert site.as_root("scontrol", "requeue", str(job))
    # Slurm would have it wait for two minutes.
    assert site.as_root("scontrol", "update", f"JobId={job}", "StartTime=now+15")
    # The first job was submitted without the gate; the second one asks it.
    wait_until(lambda: any(one.job_id == job for one in site.holds()), 30)
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED" and not site.held(), 90)
    wait_until(lambda: site.charged()[job] > first, 30)
    assert site.charged()[job] == first + due(site, job)


def test_array_tasks_settle_their_part_and_what_is_cancelled_is_given_back(
    site: BankSite,
) -> None:
    job = site.submit(f"{SHELL}sleep 2\n", time="5", array="1-4%2")
    wait_until(lambda: any(one.job_id == job for one in site.holds()), 20)
    site.as_root("scancel", f"{job}_4")
    site.until_idle()
    wait_until(lambda: not site.held(), 60)
    out = site.cluster.run(["squeue", "-h", "-t", "all", "-r", "-j", str(job), "-o", "%A %i %M"])
    ran = [line.split() for line in out.stdout.splitlines()]
    wait_until(lambda: sum(int(raw) in site.charged() for raw, *_ in ran) >= 3, 30)
    charged = site.charged()
    for raw, name, _elapsed in ran:
        if not name.endswith("_4"):
            assert charged[int(raw)] == due_of(site, name), name


def due_of(site: BankSite, name: str) -> int:
    record = shown(site, name)
    return round_half_up(Fraction(CPU * int(record["NumCPUs"]) * seconds(record["RunTime"]), 3600))


def test_a_job_that_cannot_be_paid_is_held_with_the_reason_until_it_can(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 1\n", account="chemistry", time="5", requeue=True)
    site.until_charged([job])
    first = site.charged()[job]
    ledger = open_ledger(site.settings)
    with ledger.transaction() as t:
        t.transfers.withdraw("chemistry", t.queries.get_balance("chemistry"), BY)
    wait_until(lambda: site.link.get_means("chemistry").available == 0, 20)
    # Slurm delays the job for two minutes, long enough to see that no account can pay.
    assert site.as_root("scontrol", "requeue", str(job))
    wait_until(lambda: shown(site, job).get("Reason") == "JobHeldAdmin", 30)
    wait_until(lambda: "steward: " in seen_by_its_user(site, job), 20)
    assert "steward=1." in seen_by_its_user(site, job), "the token is left alone"
    assert not site.as_user("scontrol", "release", str(job))
    with ledger.transaction() as t:
        t.transfers.deposit("chemistry", 1000 * MICRO, BY)
    ledger.close()
    wait_until(lambda: shown(site, job).get("Reason") != "JobHeldAdmin", 30)
    wait_until(lambda: "steward: " not in seen_by_its_user(site, job), 20)
    assert "steward=1." in seen_by_its_user(site, job)
    site.as_root("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED", 60)
    wait_until(lambda: site.charged()[job] > first, 60)
    assert site.charged()[job] == first + due(site, job)


def test_a_job_whose_allocation_ends_before_it_starts_waits_for_the_next(site: BankSite) -> None:
    ledger = open_ledger(site.settings)
    now = utc_now()
    with ledger.transaction() as t:
        t.transfers.withdraw("chemistry", t.queries.get_balance("chemistry"), BY)
        end = now + timedelta(seconds=30)
        ending = t.allocations.create("chemistry", 1000 * MICRO, BY, begin=now, end=end)
    wait_until(lambda: site.link.get_means("chemistry").available == 1000 * MICRO, 20)
    job = site.submit(f"{SHELL}sleep 1\n", account="chemistry", time="5", begin="now+10minutes")
    wait_until(lambda: shown(site, job).get("Reason") == "JobHeldAdmin", 60)
    wait_until(lambda: "no allocation" in seen_by_its_user(site, job), 20)
    with ledger.transaction() as t:
        end = utc_now() + timedelta(hours=1)
        after = t.allocations.create("chemistry", 1000 * MICRO, BY, begin=now, end=end)
    wait_until(lambda: shown(site, job).get("Reason") != "JobHeldAdmin", 30)
    site.as_root("scontrol", "update", f"JobId={job}", "StartTime=now")
    site.until_charged([job])
    assert site.charged()[job] == due(site, job)
    with ledger.reading() as t:
        balances = {
            one.number: one.balance for one in t.allocations.list_own("chemistry", with_ended=True)
        }
    ledger.close()
    assert balances[after.number] == 1000 * MICRO - due(site, job)
    assert balances[ending.number] == 0, "what was left of it has expired"


def test_each_task_of_an_array_is_paid_by_the_allocation_that_it_started_on(
    site: BankSite,
) -> None:
    ledger = open_ledger(site.settings)
    now = utc_now()
    end = now + timedelta(seconds=45)
    with ledger.transaction() as t:
        for one in t.allocations.list_own("chemistry"):
            if one.balance > 0:
                t.transfers.withdraw("chemistry", one.balance, BY, allocation=one.number)
        ending = t.allocations.create("chemistry", 1000 * MICRO, BY, begin=now, end=end)
        later = now + timedelta(hours=1)
        after = t.allocations.create("chemistry", 1000 * MICRO, BY, begin=end, end=later)
    wait_until(lambda: site.link.get_means("chemistry").available == 1000 * MICRO, 20)
    go = Path(site.cluster.directory) / "others"
    job = site.submit(f"{until(go)}sleep 3\n", account="chemistry", time="5", array="0-3%2")
    first = {f"{job}_0", f"{job}_1"}
    wait_until(lambda: running(site, job) == first, 15)

    def shares() -> dict[int, int]:
        holds = site.link.list_holds(cluster=site.name, job_id=job)
        if not any(hold.started for hold in holds):
            return {}  # the gate does not know yet which job that is, or that it runs
        (hold,) = holds
        per_task = hold.quote.per_task if hold.quote else 0
        return {share.allocation: share.amount // per_task for share in hold.shares}

    wait_until(lambda: shares() == {ending.number: 4}, 10)
    assert utc_now() < end
    wait_until(lambda: shares() == {ending.number: 2, after.number: 2}, 60)
    assert running(site, job) == first
    go.touch()
    wait_until(lambda: not site.held(), 120)
    late = due_of(site, f"{job}_2") + due_of(site, f"{job}_3")
    assert late > 0

    def balances() -> dict[int, int]:
        with ledger.reading() as t:
            return {
                one.number: one.balance
                for one in t.allocations.list_own("chemistry", with_ended=True)
            }

    wait_until(lambda: balances()[after.number] == 1000 * MICRO - late, 30)
    # The hold that the first two jobs did not need expires a minute later.
    wait_until(lambda: balances()[ending.number] == 0, 90)
    assert balances()[after.number] == 1000 * MICRO - late
    ledger.close()


def running(site: BankSite, job: int) -> set[str]:
    """Return the ids of the tasks of an array that run."""
    words = ["squeue", "-h", "-r", "-t", "R", "-j", str(job), "-o", "%i"]
    return set(site.cluster.run(words, check=False).stdout.split())


def seen_by_its_user(site: BankSite, job: int) -> str:
    return str(site.cluster.run(["scontrol", "show", "job", str(job)], user=site.user).stdout)


def test_the_proof_holds(site: BankSite) -> None:
    assert site.findings() == []
