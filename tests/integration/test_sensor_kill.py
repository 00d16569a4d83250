"""Two hundred changes of nodes, while slurmctld and Steward are killed at any moment.

``STEWARD_SENSOR_SEED`` repeats the choices of an earlier run.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from job_submission import submit_to, wait_until
from sandboxes import passable_directory
from sensor_daemon import Watching
from spool_daemon import children_of

from steward.core.events import CONTROLLER_STATE, NODE_STATE
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.spec import SandboxError

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

NODES = 6
CHANGES = 200
QUIET_EVERY = 40
INTERVAL_S = 0.2
LATE_S = 5 * INTERVAL_S


@pytest.fixture
def watching(slurm_version: str) -> Iterator[Watching]:
    spec = SandboxSpec(
        nodes=NODES, slurm=slurm_version, min_job_age_s=5, extra=("SlurmdTimeout=5",)
    )
    with passable_directory() as path, Sandbox.up(spec) as cluster:
        watching = Watching(cluster, path / "home", interval_s=INTERVAL_S)
        watching.install()
        watching.start()
        try:
            yield watching
        finally:
            watching.close()


class Storm:
    """Changes nodes, and kills slurmctld and Steward.

    Args:
        watching: The daemon, and its cluster.
        chance: Random generator of the changes.
    """

    def __init__(self, watching: Watching, chance: random.Random) -> None:
        self.watching = watching
        self.cluster = watching.cluster
        self.chance = chance
        self.kills = {"slurmctld": 0, "serve": 0, "part": 0, "slurmd": 0}
        self.refused = 0

    def change(self, number: int) -> None:
        """Change one node, or several, in some way."""
        nodes = sorted(self.chance.sample(range(1, NODES + 1), self.chance.choice((1, 1, 2))))
        names = ",".join(f"node{one}" for one in nodes)
        kind = self.chance.choice(("drain", "undrain", "down", "resume", "job", "slurmd", "fail"))
        if kind == "slurmd":
            self._slurmd(f"slurmd.node{nodes[0]}")
        elif kind == "job":
            with contextlib.suppress(AssertionError, subprocess.CalledProcessError, SandboxError):
                user = next(iter(self.cluster.users))
                submit_to(
                    self.cluster, "#!/bin/sh\nsleep 2\n", user=user, nodelist=names.split(",")[0]
                )
        else:
            words = ["scontrol", "update", f"nodename={names}", f"state={kind}"]
            if kind in ("drain", "down", "fail"):
                words.append(f"reason=change {number}: State=IDLE Reason=none")
            done = self.cluster.run(words, check=False)
            self.refused += done.returncode != 0

    def _slurmd(self, service: str) -> None:
        if self.cluster.get_status()[service]:
            self.cluster.stop_service(service, signal.SIGKILL)
            self.kills["slurmd"] += 1
        else:
            self.cluster.start_service(service)

    def kill(self) -> None:
        """Kill slurmctld, Steward or a worker, and restart what does not restart itself."""
        victim = self.chance.choice(("slurmctld", "serve", "part"))
        self.kills[victim] += 1
        if victim == "slurmctld":
            self.cluster.kill_controller()
            time.sleep(self.chance.uniform(0.0, 1.5))
            self.cluster.restart_controller()
        elif victim == "serve":
            self.watching.stop(signal.SIGKILL)
            time.sleep(self.chance.uniform(0.0, 1.5))
            self.watching.start()
        else:
            wait_until(lambda: len(children_of(self.watching.pid)) > 5)
            part = self.chance.choice(children_of(self.watching.pid) or [0])
            with contextlib.suppress(ProcessLookupError):
                if part:
                    os.kill(part, signal.SIGKILL)

    def quiet(self) -> None:
        """Wait until nothing changes, and compare the events with Slurm's states."""

        def rests() -> bool:
            before = self.watching.shown()
            if self.watching.replayed() != before:
                return False
            # Late reports do not undo it.
            time.sleep(LATE_S)
            return self.watching.replayed() == before == self.watching.shown()

        try:
            wait_until(rests, 120)
        except AssertionError:
            print(f"shown: {self.watching.shown()}\ntold: {self.watching.replayed()}")
            print(self.watching.log()[-5000:])
            raise


def test_events_replayed_are_what_slurm_shows_whoever_is_killed(watching: Watching) -> None:
    seed = int(os.environ.get("STEWARD_SENSOR_SEED") or random.SystemRandom().randrange(10**6))
    print(f"STEWARD_SENSOR_SEED={seed}")
    storm = Storm(watching, random.Random(seed))
    wait_until(lambda: watching.replayed() == watching.shown(), 60)
    for number in range(1, CHANGES + 1):
        storm.change(number)
        if storm.chance.random() < 0.15:
            storm.kill()
        if number % QUIET_EVERY == 0:
            storm.quiet()
    told = watching.events(NODE_STATE)
    keys = [event.key for event in watching.events()]
    assert len(keys) == len(set(keys))
    restarts = [event for event in watching.events(CONTROLLER_STATE) if event.body.restarted]
    assert len(restarts) <= storm.kills["slurmctld"]
    sources = dict.fromkeys(("trigger", "interval", "start"), 0)
    for event in told:
        sources[event.body.source] += 1
    print(
        f"{CHANGES} changes ({storm.refused} refused), kills {storm.kills}, "
        f"{len(told)} events by {sources}, {sum(event.body.failed for event in told)} failures"
    )
    assert storm.kills["slurmctld"]
    assert storm.kills["serve"]
