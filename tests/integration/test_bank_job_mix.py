"""A thousand random jobs, with kills in between: each charge equals Slurm's recorded usage.

``STEWARD_BANK_SEED`` repeats the choices of an earlier run; each run prints its seed. The default
is 300 jobs; ``make soak`` sets ``STEWARD_BANK_JOBS=1000``. Both have the same twelve kills.
"""

import os
import random
import shutil
import time
from collections.abc import Callable

import expected_costs
import job_mix
import msgspec
import pytest
from bank_cluster import ACCOUNTS, BankSite, bank_site
from job_mix import Mix
from job_submission import wait_until
from spool_daemon import ask, chance_of

from servers.postgresql import PostgreSQL
from steward.bank.money import MICRO
from steward.bank.records import Charge
from steward.capture.observations import SNAPSHOT_SOURCE
from steward.core.records import JobRecord

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

PHYSICS = ACCOUNTS[0]
PLENTY = 1_000_000 * MICRO
KILLS = 12
FORGOTTEN_S = 60
"""Longest time from a job's start to the next poll, including a kill of slurmctld, in seconds."""
COMPARED_S = 200
"""Time until recent ends are compared with Slurm's, in seconds: two minutes and a margin."""
JOBS = int(os.environ.get("STEWARD_BANK_JOBS", "300"))


def opened(site: BankSite) -> None:
    """Open the bank with more SU than the jobs can use."""
    site.open({PHYSICS: PLENTY})
    site.start()


Run = tuple[int, int, str]
"""Job id, start (seconds since the epoch) and state of a run that has ended."""


def is_forgotten(charge: Charge, known: set[tuple[int, int]], shown: set[Run]) -> bool:
    """Return whether a charge is of a run without a recorded end, which slurmctld forgot.

    The charge ends when the run was found to be gone, or when slurmctld preempted it, if the queue
    showed that before the kill.
    """
    use = charge.use
    if use is None or use.start is None:
        return False
    start = int(use.start.timestamp())
    if (charge.job_id, start) in known or use.seconds > FORGOTTEN_S:
        return False
    is_preempted = use.state == "PREEMPTED" and (charge.job_id, start, use.state) in shown
    return use.state == "UNKNOWN" or is_preempted


def shown_ends(site: BankSite) -> set[Run]:
    """Return the ends that the queue showed to Steward."""
    rows = ask(site.settings, "journal.db", "SELECT data FROM event WHERE kind = 'job.end'")
    ends = [msgspec.json.decode(data) for (data,) in rows]
    records = [
        msgspec.convert(end["body"]["record"], JobRecord)
        for end in ends
        if end["source"] == SNAPSHOT_SOURCE
    ]
    return {
        (record.job_id, int(record.start.timestamp()), record.state)
        for record in records
        if record.start is not None
    }


def see_that_all_is_charged(
    site: BankSite, expected: Callable[[], list[expected_costs.Ran]], patience_s: float = 40
) -> None:
    """Check that every charge equals Slurm's record, and prove the ledger."""

    def wrong() -> dict[int, tuple[int, int]]:
        ran = expected()
        due = {job: amount for job, amount in expected_costs.costs(ran).items() if amount}
        known = {(one.job, int(one.start)) for one in ran}
        shown = shown_ends(site)
        paid: dict[int, int] = {}
        for charge in site.charges():
            if charge.amount and not is_forgotten(charge, known, shown):
                paid[charge.job_id] = paid.get(charge.job_id, 0) + charge.amount
        jobs = sorted({*due, *paid})
        return {
            job: (due.get(job, 0), paid.get(job, 0))
            for job in jobs
            if due.get(job, 0) != paid.get(job, 0)
        }

    try:
        wait_until(lambda: not wrong() and not site.held(), patience_s)
    except AssertionError:
        told = wrong()
        runs = [ran for ran in expected() if ran.job in told]
        raise AssertionError(
            f"due and paid: {told}\nSlurm: {runs}\nheld: {site.holds()}\n"
            f"charged: {[one for one in site.charges() if one.job_id in told]}\n"
            f"not over, for Steward: {site.unfinished()}"
        ) from None
    assert site.findings() == []
    assert site.balance() == PLENTY - sum(site.charged().values())


@pytest.mark.matrix
@pytest.mark.wide
def test_jobs_of_all_sorts(slurm_version: str) -> None:
    chance = chance_of("STEWARD_BANK_SEED")
    with bank_site(slurm_version, extra=job_mix.PARTITIONS, **job_mix.ROOM) as site:
        opened(site)
        mix = Mix(site, chance)
        kinds = [kind for kind in job_mix.RARE if kind is not job_mix.limited]
        for kind in (*kinds, *job_mix.COMMON):
            mix.begin(kind)
            mix.go_on()
        mix.finish()
        see_that_all_is_charged(site, lambda: expected_costs.by_slurmctld(site))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_jobs_with_kills(slurm_version: str, postgresql: PostgreSQL) -> None:
    chance = chance_of("STEWARD_BANK_SEED")
    with bank_site(
        slurm_version,
        bank={"database": postgresql.url(postgresql.new_database())},
        accounting=True,
        extra=(*job_mix.PARTITIONS, "SlurmdTimeout=600"),
        min_job_age_s=90,  # so that looks at the queue stay short; slurmdbd knows the rest
        **job_mix.ROOM,
    ) as site:
        opened(site)
        # 26.05 does not start from a state in which associations were never written down.
        site.cluster.restart_controller()
        mix = Mix(site, chance)
        mix.begin(job_mix.scrontab)
        kinds = _kinds(chance)
        at = _moments(chance, len(kinds))
        victims = ["slurmctld", "serve", "gate", "postgresql"] * (KILLS // 4)
        chance.shuffle(victims)
        for number, kind in enumerate(kinds):
            if at and at[0] <= number:
                at.pop(0)
                victim = victims.pop()
                print(f"{time.strftime('%H:%M:%S')} {len(mix.submitted)}: {victim} is killed")
                kill(site, victim, postgresql)
            mix.begin(kind)
            if number % 4 == 0:
                mix.go_on()
        print(f"{time.strftime('%H:%M:%S')} {len(mix.submitted)} submitted")
        mix.finish()
        print(f"{time.strftime('%H:%M:%S')} all are over")
        see_that_all_is_charged(
            site, lambda: expected_costs.by_sacct(site, mix.suspensions), COMPARED_S
        )


def _kinds(chance: random.Random) -> list[Callable[[Mix], job_mix.Life]]:
    """Return the submissions in random order: a thousand jobs, tasks and components included."""
    often = [kind for kind in job_mix.COMMON for _ in range(45 * JOBS // 1000)]
    rare = [kind for kind in job_mix.RARE if kind is not job_mix.node_failed]
    seldom = [kind for kind in rare for _ in range(max(1, 8 * JOBS // 1000))]
    kinds: list[Callable[[Mix], job_mix.Life]] = [*often, *seldom]
    kinds += [job_mix.node_failed, job_mix.node_failed]
    chance.shuffle(kinds)
    return kinds


def _moments(chance: random.Random, length: int) -> list[int]:
    """Return the numbers of submissions after which a component is killed, some before the end."""
    stretch = length * 3 // 4 // KILLS
    return [stretch * (number + 1) + chance.randrange(stretch) for number in range(KILLS)]


def kill(site: BankSite, victim: str, postgresql: PostgreSQL) -> None:
    """Kill a component with SIGKILL, and start it again."""
    if victim == "slurmctld":
        site.cluster.kill_controller()
        site.cluster.restart_controller()
    elif victim == "serve":
        site.restart()
    elif victim == "gate":
        site.signal_part("gate", 9)
    else:
        postgresql.kill()
        time.sleep(1)  # so that some reports meet an unavailable database
        postgresql.start()
