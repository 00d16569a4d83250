"""Kills of the daemon at random instants: nothing is lost, and nothing stored twice.

``STEWARD_KILL_SEED`` repeats the instants of an earlier run.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from job_submission import PATIENCE, wait_until
from sandbox_daemon import Daemon as ClusterDaemon
from spool_daemon import (
    Daemon,
    ask,
    assert_kept,
    chance_of,
    children_of,
    incoming_bytes,
    journalled,
    play,
    settings_in,
    stored,
)

from steward.archive.files.manifest import MANIFEST_FILE_NAME, decode_facts
from steward.archive.files.verify import verify_sink
from steward.core.config import JournalSettings, Settings
from steward.sandbox import Sandbox

_BURST = 20


def kill_once(daemon: Daemon, chance: Random) -> None:
    """Kill the daemon or one of its workers, within the next half second."""
    time.sleep(chance.uniform(0.0, 0.5))
    parts = daemon.parts()
    if parts and chance.random() < 0.4:
        # It may end before the kill, and no other process can take its id until the supervisor has
        # seen its end.
        victim = chance.choice(parts)
        if victim in children_of(daemon.pid):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(victim, signal.SIGKILL)
        return
    daemon.kill()
    daemon.start()


def forget_some(settings: Settings, spool: Path, forgotten: set[int], chance: Random) -> None:
    """Remove half of the stored jobs, as slurmctld does; then only Steward has them."""
    for job_id in (journalled(settings) | stored(settings)) - forgotten:
        if chance.random() < 0.5:
            shutil.rmtree(spool / f"hash.{job_id % 10}" / f"job.{job_id}")
            forgotten.add(job_id)


def assert_consistent(settings: Settings, jobs: range) -> None:
    """Check that archive, manifests, databases and store agree on these jobs."""
    assert_kept(settings, jobs)
    assert list(verify_sink(settings, "files")) == []
    told: dict[str, str] = {}
    for manifest in Path(settings.sink_path("files")).rglob(MANIFEST_FILE_NAME):
        for fact in decode_facts(manifest.read_bytes()):
            assert fact.fact == "kept"
            assert fact.script is not None
            assert told.setdefault(fact.key, fact.script.name) == fact.script.name
            assert (manifest.parent / fact.script.name).exists()
    assert len(told) == len(jobs)
    wanted = [(job_id,) for job_id in jobs]
    assert ask(settings, "jobs.db", "SELECT job_id FROM job ORDER BY job_id") == wanted
    assert ask(settings, "jobs.db", "SELECT job_id FROM script ORDER BY job_id") == wanted
    assert ask(settings, "journal.db", "SELECT * FROM dead") == []
    assert journalled(settings) == set(jobs)
    assert ask(settings, "journal.db", "SELECT bytes FROM incoming") == [
        (incoming_bytes(settings),)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "total"), [(12, 300), pytest.param(100, 2000, marks=pytest.mark.long)]
)
def test_kills_at_random_instants_lose_nothing(fast: Path, kills: int, total: int) -> None:
    chance = chance_of("STEWARD_KILL_SEED")
    # Kept bytes are removed during kills, too.
    settings = settings_in(fast, journal=JournalSettings(keep_s=2.0))
    spool = fast / "spool"
    jobs = range(1, total + 1)
    forgotten: set[int] = set()
    # As many bursts as kills, a little slower than they come.
    rate = total / (kills * 0.55)
    generator = play(str(spool), jobs, f"--rate={rate}", f"--burst={_BURST}")
    try:
        with Daemon(settings, fast) as daemon:
            for _ in range(kills):
                kill_once(daemon, chance)
                forget_some(settings, spool, forgotten, chance)
            assert generator.wait(PATIENCE * 60) == 0
            daemon.wait(lambda: daemon.is_quiet(total), 60.0)
            assert daemon.stop() == 0
    finally:
        generator.kill()
        generator.wait()
    print(f"{len(forgotten)} jobs had left the spool before the end", file=sys.stderr)
    assert_consistent(settings, jobs)


_SUBMIT = """
import subprocess, sys, time
for number in range(int(sys.argv[1])):
    script = f"#!/bin/sh\\n# the {number}th\\nexit 0\\n"
    subprocess.run(
        ["sbatch", "--parsable", "-J", f"n{number}", "-o", "/dev/null"],
        input=script.encode(),
        check=True,
    )
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.matrix
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_kills_lose_no_job_of_a_real_cluster(sandbox: Sandbox, submitter: str) -> None:
    chance = chance_of("STEWARD_KILL_SEED")
    total, kills = 200, 40
    daemon = ClusterDaemon(sandbox, Path(sandbox.directory) / "steward-kill")
    before = set(spooled(sandbox))
    daemon.start()
    submitting = sandbox.popen(
        [sys.executable, "-c", _SUBMIT, str(total), "0.1"],
        user=submitter,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0.0, 0.7))
            parts = children_of(daemon.pid)
            if parts and chance.random() < 0.4:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(chance.choice(parts), signal.SIGKILL)
            else:
                daemon.stop(signal.SIGKILL)
                daemon.start()
        jobs = [int(line) for line in submitting.communicate(timeout=120)[0].split()]
        assert len(jobs) == total

        def is_kept(number: int) -> bool:
            path = daemon.script_of(jobs[number])
            return path is not None and path.with_suffix(".env").exists()

        wait_until(lambda: all(is_kept(number) for number in range(total)), 60)
        assert daemon.stop() == 0
    finally:
        submitting.kill()
        submitting.wait()
        daemon.close()
    for number, job in enumerate(jobs):
        paths = [p for p in daemon.files(f"{job}-*.sh") if submitter in p.parts]
        assert len(paths) == 1
        assert paths[0].name == f"{job}-n{number}.sh"
        assert paths[0].read_text() == f"#!/bin/sh\n# the {number}th\nexit 0\n"
    archived = [path for path in daemon.files("*.sh") if int(path.name.split("-")[0]) not in before]
    assert len(archived) == total
    assert list(verify_sink(daemon.settings, "files")) == []
    verified = "SELECT count(*) FROM job WHERE verified AND name GLOB 'n[0-9]*'"
    assert ask(daemon.settings, "jobs.db", verified) == [(total,)]


def spooled(cluster: Sandbox) -> list[int]:
    """Return the ids of the jobs in a cluster's spool."""
    return [int(path.name[4:]) for path in Path(cluster.spool).glob("hash.*/job.*")]
