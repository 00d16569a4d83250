"""slurmctld, a slurmd, the agent and the daemon are killed in the middle of 500 jobs.

``STEWARD_ACCOUNTING_KILL_SEED`` repeats the order of an earlier run.
"""

import collections
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from accounting_cluster import BookedSite, spec_of
from job_submission import wait_until
from sandboxes import passable_directory
from spool_daemon import chance_of

from steward.accounting.context import AccountingContext
from steward.accounting.gaps import Finding, GapsRequest
from steward.accounting.gaps import list_accounting_gaps as find_gaps
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.events import RUN_END, RUN_START, utc_now
from steward.core.journal import JournalReader
from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

JOBS = 500
KILLS = 12
BATCH = """#!/bin/sh -e
ran() {{ echo "$SLURM_JOB_NAME $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $1" >>{ran}; }}
ran batch
srun sh -c 'echo "$SLURM_JOB_NAME $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} 0" >>{ran}'
sleep 0.{tenths}
"""
"""Script whose steps record that they began: a run can be cut short before."""


@pytest.fixture
def site(slurm_version: str) -> Iterator[BookedSite]:
    options = {"cpus": 8, "min_job_age_s": 300, "extra": ("SlurmdTimeout=600",)}
    with (
        passable_directory() as path,
        Sandbox.up(
            spec_of(str(path), slurm_version, accounting=False, **options), report=print
        ) as cluster,
    ):
        site = BookedSite(cluster)
        try:
            site.start()
            yield site
        finally:
            site.close()


def kill(site: BookedSite, what: str) -> None:
    """Kill a component with SIGKILL, and start it again."""
    cluster = site.cluster
    if what == "slurmctld":
        cluster.kill_controller()
        cluster.restart_controller()
    elif what == "agent":
        site.kill_agent()
        site.start_agent()
    elif what == "serve":
        site.daemon.close()
        site.daemon.start()
    else:
        cluster.stop_service(what, 9)
        cluster.start_service(what)


def resume(site: BookedSite) -> None:
    """Resume nodes: slurmctld drains those with jobs that it has forgotten."""
    words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%N %t"]
    for line in site.cluster.run(words, check=False).stdout.splitlines():
        node, state = line.split()
        if state.startswith(("drain", "drng", "down")):
            update = ["scontrol", "update", f"nodename={node}", "state=resume"]
            site.cluster.run(update, check=False)
    # A job whose launch failed is requeued and held; others are begun again after two minutes.
    for job, reason, start in _queue(site, "PD"):
        if "held" in reason:
            site.cluster.run(["scontrol", "release", job], check=False)
        elif reason == "BeginTime" and _ahead_s(start) > 10:
            # Not at once: a node rejects a job whose former run it has just been told to end.
            words = ["scontrol", "update", f"jobid={job}", "starttime=now+3"]
            site.cluster.run(words, check=False)


def _queue(site: BookedSite, states: str) -> list[list[str]]:
    """Return id, reason and start of each job in a state."""
    words = ["squeue", "-h", "-t", states, "-o", "%i|%r|%S"]
    found = site.cluster.run(words, env={"TZ": "UTC"}, check=False).stdout
    return [line.split("|") for line in found.splitlines()]


def _ahead_s(start: str) -> float:
    """Return the seconds until a time; none if it is unknown."""
    if start == "N/A":
        return 0
    return (datetime.fromisoformat(f"{start}+00:00") - datetime.now(UTC)).total_seconds()


STEPS = {"batch", "0"}
"""Steps of a job that nothing cut short."""
LOST_S = 30
"""Time after which a job counts as lost, in seconds: jobs last one, slurmctld needs twenty."""


class Operator:
    """Resumes a cluster whose slurmctld forgot the ends of jobs when it was killed.

    slurmctld believes that they run until their node registers again: once in twenty pings, or when
    slurmd starts.
    """

    def __init__(self, site: BookedSite) -> None:
        self._site = site
        self._helped = time.monotonic()

    def is_idle(self) -> bool:
        """Return whether all nodes are up and no job is pending or running."""
        resume(self._site)
        if not _queue(self._site, "PD,R,S,CG,CF"):
            return self._site.cluster.run(["scontrol", "ping"], check=False).returncode == 0
        running = _queue(self._site, "R")
        is_due = time.monotonic() - self._helped > LOST_S
        if is_due and any(_ahead_s(start) < -LOST_S for *_, start in running):
            self._helped = time.monotonic()
            for name in self._site.cluster.get_status():
                if name.startswith("slurmd."):
                    self._site.cluster.restart_service(name)
        time.sleep(0.5)  # Every look is work for a machine that has enough of it.
        return False


Run = tuple[int, str, int]


def counts(site: BookedSite) -> dict[str, collections.Counter[Run]]:
    """Count the start and end events of each run, without corrections."""
    found: dict[str, collections.Counter[Run]] = {
        kind: collections.Counter() for kind in (RUN_START, RUN_END)
    }
    reader = JournalReader(str(site.daemon.state))
    position = 0
    try:
        while True:
            events, position = reader.read(position, {RUN_START, RUN_END}, 1000)
            if not events:
                return found
            for event in events:
                body = event.body
                if not body.correction and body.piece_end is None:
                    run = (body.job_id, body.first_submit.isoformat(), body.restarts)
                    found[event.kind][run] += 1
    finally:
        reader.close()


def rows(site: BookedSite) -> list[list[str]]:
    """Return job or step, state and times of all records."""
    words = ("-a", "-D", "-n", "-P", "-S", "now-1hour", "-o", "JobID,State,Start,End,Restarts")
    return [row.split("|") for row in site.ours(*words).splitlines()]


def test_every_run_has_one_start_one_end_and_its_steps(site: BookedSite) -> None:
    ran = Path(site.cluster.directory) / "ran"
    ran.touch()
    ran.chmod(0o666)
    chance = chance_of("STEWARD_ACCOUNTING_KILL_SEED")
    victims = ["slurmctld", "slurmd.node1", "agent", "serve"] * (KILLS // 4)
    chance.shuffle(victims)
    at = sorted(chance.sample(range(20, JOBS - 20), len(victims)))
    submitted: list[int] = []
    # A slurmctld that is killed forgets the jobs of seconds, and gives their ids once more.
    while len(set(submitted)) < JOBS:
        while at and at[0] <= len(set(submitted)):
            at.pop(0)
            victim = victims.pop()
            print(f"{time.strftime('%H:%M:%S')} job {len(submitted)}: {victim} is killed")
            kill(site, victim)
            resume(site)
        script = BATCH.format(ran=ran, tenths=chance.randrange(10))
        submitted.append(site.submit(script, job_name=f"s{len(submitted)}"))
    print(f"{time.strftime('%H:%M:%S')} all are submitted")
    wait_until(Operator(site).is_idle, 200)
    print(f"{time.strftime('%H:%M:%S')} all are over")
    try:
        wait_until(lambda: not _unbooked(site, set(submitted)), 120)
    except AssertionError:
        print(_unbooked(site, set(submitted)))
        print(site.cluster.run(["squeue", "-t", "all"], check=False).stdout[-2000:])
        print(site.daemon.log()[-4000:])
        raise
    said = counts(site)
    missing = gaps(site)
    print(collections.Counter(one.kind for one in missing))
    print(f"{len(submitted)} submitted, {len(set(submitted))} ids, {len(said[RUN_END])} runs")
    assert {job for job, *_ in said[RUN_END]} == set(submitted)
    twice = [(run, number) for kind in said for run, number in said[kind].items() if number > 1]
    assert not twice
    named = {(str(one.kind), one.job) for one in missing}
    check_steps(_runs(rows(site)), named, ran, submitted)


def gaps(site: BookedSite) -> tuple[Finding, ...]:
    """Return the gaps as of ten minutes from now, when late reports have arrived."""
    settings = site.daemon.settings
    access = Access(settings.access, 0, lambda _cluster: ClusterRoles())
    room = AccountingContext(settings, access=access, now=lambda: utc_now() + timedelta(minutes=10))
    try:
        return find_gaps(room, Caller(uid=0, user="root"), GapsRequest(limit=10_000)).findings
    finally:
        room.close()


class Booked(NamedTuple):
    """Run as sacct shows it."""

    job: str
    state: str
    start: str
    restarts: str
    steps: set[str]


def _runs(found: list[list[str]]) -> list[Booked]:
    runs: list[Booked] = []
    for name, state, start, _end, restarts in found:
        job, _, step = name.partition(".")
        if step:
            runs[-1].steps.add(step)
        else:
            runs.append(Booked(job, state, start, restarts, set()))
    return runs


def check_steps(
    runs: list[Booked], named: set[tuple[str, str]], ran: Path, submitted: list[int]
) -> None:
    """Check that each step has a record or a gap."""
    # A run that slurmctld forgot before it was saved has no known end.
    lost = [run for run in runs if run.state == "UNKNOWN"]
    assert not [run for run in lost if ("run-lost", run.job) not in named]
    stepless = [run for run in runs if run.start != "Unknown" and not run.steps >= STEPS]
    for run in stepless:
        print(run)
    jobs = {job for _kind, job in named}
    booked = collections.Counter(
        (run.job, run.restarts, step) for run in runs for step in run.steps
    )
    # Not by name: slurmd starts no job whose id runs already, so that one which slurmctld
    # forgot runs on in the place of the next that was given its id.
    lines = {tuple(line.split()) for line in ran.read_text().splitlines()}
    there = collections.Counter((job, restarts, step) for _name, job, restarts, step in lines)
    # A slurmd that is killed as it begins a script fails the job before the script's first line.
    cut = {run.job for run in stepless if run.state == "FAILED" and "batch" in run.steps}
    silent = {str(job) for job in submitted} - {job for job, *_ in there}
    assert silent <= jobs | cut
    unseen = {job for job, *_ in there - booked} - jobs
    assert not unseen, [one for one in [*runs, *lines] if one[0] in unseen or one[1] in unseen]
    ended = [run for run in stepless if run.state == "COMPLETED"]
    assert not [run for run in ended if run.job not in jobs]
    assert len(stepless) <= len(set(submitted)) // 10


def _unbooked(site: BookedSite, jobs: set[int]) -> list[list[str]]:
    """List unfinished records, and jobs without a record."""
    found = rows(site)
    ended = {name for name, state, _, end, *_ in found if end != "Unknown" or state == "UNKNOWN"}
    missing = [[name] for name in sorted({str(job) for job in jobs} - ended)]
    return missing + [row for row in found if row[1] in ("RUNNING", "PENDING")]
