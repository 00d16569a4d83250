"""Charges beside slurmdbd's own records: what ran before the bank, and what nobody saw end."""

from collections.abc import Iterator
from datetime import UTC, datetime
from fractions import Fraction

import msgspec
import pytest
from banking import CPU, SHELL, BankSite, bank_site
from submitting import state_of, wait_until

from steward.bank.money import MICRO, rounded
from steward.bank.records import Rate

pytestmark = [pytest.mark.long, pytest.mark.database]

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
RATE = Rate(weights={"cpu": CPU}, valid_from=LONG_AGO)


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version, accounting=True) as site:
        site.open({"physics": 1_000 * MICRO}, rates=(RATE,))
        yield site


def recorded(site: BankSite, job: int) -> int:
    """What slurmdbd's records of a job's runs come to."""
    words = ["sacct", "-X", "-D", "-n", "-P", "-j", str(job), "-o", "NCPUS,ElapsedRaw"]
    rows = [line.split("|") for line in site.cluster.run(words).stdout.splitlines()]
    return sum(rounded(Fraction(CPU * int(cpus) * int(ran), 3600)) for cpus, ran in rows)


def test_what_ran_before_the_bank_is_a_backfills_to_charge(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 3\n", time="5", ntasks=2)
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED", 60)
    wait_until(lambda: recorded(site, job) > 0, 30)
    site.start()
    after = site.submit(f"{SHELL}sleep 2\n", time="5")
    site.until_charged([after])
    assert job not in site.charged()
    dry = msgspec.json.decode(site.bank("backfill", "-S", "now-1day", "--dry-run", "--json"))
    assert job not in site.charged(), dry
    site.bank("backfill", "-S", "now-1day")
    assert site.charged()[job] == recorded(site, job)
    assert site.charged()[after] == recorded(site, after)
    site.bank("backfill", "-S", "now-1day")
    assert site.charged()[job] == recorded(site, job)


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
