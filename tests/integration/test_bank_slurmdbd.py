"""Charges from slurmdbd's records: runs before the bank, and ends that no source reported."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from bank_cluster import CPU, SHELL, BankSite, bank_site
from job_submission import state_of, wait_until
from slurmdbd_failures import failing_queries

from steward.bank.money import MICRO, round_half_up
from steward.bank.records import Rate

# Above the longest of its tests' waits, taken together.
pytestmark = [pytest.mark.long, pytest.mark.database, pytest.mark.timeout(3000)]

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
RATE = Rate(weights={"cpu": CPU}, valid_from=LONG_AGO)


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version, accounting=True) as site:
        site.open({"physics": 1_000 * MICRO}, rates=(RATE,))
        yield site


def recorded(site: BankSite, job: int) -> int:
    """Return the expected charge of slurmdbd's records of a job's runs."""
    words = ["sacct", "-X", "-D", "-n", "-P", "-j", str(job), "-o", "NCPUS,ElapsedRaw"]
    rows = [line.split("|") for line in site.cluster.run(words).stdout.splitlines()]
    return sum(round_half_up(Fraction(CPU * int(cpus) * int(ran), 3600)) for cpus, ran in rows)


def test_what_ran_before_the_bank_is_a_backfills_to_charge(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 3\n", time="5", ntasks=2)
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED", 60)
    wait_until(lambda: recorded(site, job) > 0, 30)
    site.start()
    after = site.submit(f"{SHELL}sleep 2\n", time="5")
    site.until_charged([after])
    # slurmdbd gets an end a moment after jobcomp.
    wait_until(lambda: site.charged()[after] == recorded(site, after), 30)
    assert job not in site.charged()
    dry = msgspec.json.decode(site.bank("backfill", "-S", "now-1day", "--dry-run", "--json"))
    assert job not in site.charged(), dry
    site.bank("backfill", "-S", "now-1day")
    assert site.charged()[job] == recorded(site, job)
    assert site.charged()[after] == recorded(site, after)
    site.bank("backfill", "-S", "now-1day")
    assert site.charged()[job] == recorded(site, job)


def test_commands_without_slurmdbds_answer_show_their_result_and_fail(site: BankSite) -> None:
    if not site.processes("bank"):
        site.start()
    job = site.submit(f"{SHELL}sleep 1\n", time="5")
    site.until_charged([job])
    with failing_queries(site.cluster):
        for command in ("backfill", "reconcile"):
            words = ("bank", command, "-S", "now-1day", "--dry-run", "--json")
            said = site.daemon.ask(*words, check=False)
            assert (said.returncode, command) == (1, command)
            assert "slurmdbd lists no job of the period" in said.stderr
            assert msgspec.json.decode(said.stdout)["missing_records"]


def test_a_run_that_came_and_went_unseen_is_charged_by_slurmdbds_record(site: BankSite) -> None:
    site.kill_daemon()
    job = site.submit(f"{SHELL}sleep 2\n", time="5")
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED", 60)
    wait_until(lambda: recorded(site, job) > 0, 30)
    # Its line is gone; slurmctld may still show it.
    (lines,) = (of.jobcomp_lines for of in site.settings.cluster.values())
    open(lines, "w").close()
    site.start()
    wait_until(lambda: job in site.charged() or bool(site.bank("reconcile", "-S", "now-1hour")), 60)
    wait_until(lambda: site.charged().get(job) == recorded(site, job), 60)
    assert site.findings() == []


def test_charges_and_slurmdbds_records_agree(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 2\n", time="5", requeue=True, array="1-3")
    site.until_idle()
    wait_until(lambda: not site.held(), 60)
    found = msgspec.json.decode(site.bank("reconcile", "-S", "now-1hour", "--dry-run", "--json"))
    assert job
    assert not any("differences" in key and found[key] for key in found), found


def test_each_size_of_a_resized_job_is_rid_of_its_own_suspended_time(site: BankSite) -> None:
    if not site.processes("bank"):
        site.start()
    site.until_idle()
    go = Path(site.cluster.directory) / "resized"
    script = f"{SHELL}while [ ! -e {go} ]; do sleep 0.3; done\n"
    jobs = [site.submit(script, nodes=2, ntasks_per_node=2, time="30") for _ in "ab"]
    before, after = jobs
    wait_until(lambda: all(state_of(site.cluster, job) == "RUNNING" for job in jobs), 60)
    # The one is suspended before it gives a node back, the other after that.
    _suspend(site, before)
    for job in jobs:
        assert site.as_root("scontrol", "update", f"jobid={job}", "numnodes=1")
    _suspend(site, after)
    go.touch()
    site.until_idle()
    wait_until(lambda: all(len(_sizes(site, job)) == 2 for job in jobs), 60)
    assert [bool(suspended) for *_, suspended in _sizes(site, before)] == [True, False]
    assert [bool(suspended) for *_, suspended in _sizes(site, after)] == [False, True]
    wait_until(lambda: all(_paid(site, job) == _due(site, job) for job in jobs), 200)


def _suspend(site: BankSite, job: int) -> None:
    assert site.as_root("scontrol", "suspend", str(job))
    time.sleep(3)
    assert site.as_root("scontrol", "resume", str(job))
    time.sleep(1)


def _sizes(site: BankSite, job: int) -> list[tuple[int, int, int]]:
    """Return CPUs, seconds and suspended seconds of each former size.

    slurmdbd gives each of them the start of the whole run.
    """
    columns = "NCPUS,Start,End,Suspended,State"
    words = ["sacct", "-X", "-D", "-n", "-P", "-j", str(job), "-o", columns]
    rows = site.cluster.run(words, env={"SLURM_TIME_FORMAT": "%s"}).stdout.splitlines()
    found: list[tuple[int, int, int]] = []
    begin = 0
    for cpus, start, end, suspended, state in sorted(
        (row.split("|") for row in rows), key=lambda row: row[2]
    ):
        if state in ("RESIZING", "COMPLETED"):
            held = sum(int(part) * 60**n for n, part in enumerate(suspended.split(":")[::-1]))
            found.append((int(cpus), int(end) - max(begin, int(start)) - held, held))
            begin = int(end)
    return found


def _due(site: BankSite, job: int) -> list[int]:
    return [round_half_up(Fraction(CPU * cpus * ran, 3600)) for cpus, ran, _ in _sizes(site, job)]


def _paid(site: BankSite, job: int) -> list[int]:
    charges = [charge for charge in site.charges() if charge.job_id == job]
    return [charge.amount for charge in sorted(charges, key=lambda one: one.piece_us or 2**62)]
