"""Cluster that the sensor watches, brought back to rest after each test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from job_submission import wait_until
from sandboxes import passable_directory
from sensor_daemon import Watching

from steward.sandbox import Sandbox, SandboxSpec

SETTINGS = ("TreeWidth=50", "MaxNodeCount=8", "ReturnToService=1")
"""Settings with which nodes can be created and deleted.

A node that was set down stays down: with ``ReturnToService=2`` a late answer to slurmctld would
bring back even a node whose slurmd was killed before."""
SOON_DOWN = "SlurmdTimeout=8"
"""Setting with which slurmctld soon marks silent nodes as down, on a busy host healthy ones."""

MakeWatching = Callable[..., Watching]


@pytest.fixture(scope="module")
def cluster(slurm_version: str, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Bring up a cluster for this module, with its ``EXTRA`` settings; tests disturb it."""
    extra = (*SETTINGS, *getattr(request.module, "EXTRA", ()))
    with Sandbox.up(SandboxSpec(nodes=3, slurm=slurm_version, extra=extra)) as box:
        yield box


@pytest.fixture
def make(cluster: Sandbox) -> Iterator[MakeWatching]:
    """Return a function that makes daemons with a sensor; reset the cluster afterwards."""
    made: list[Watching] = []
    with passable_directory() as path:

        def call(*, installed: bool = True, **sensor: Any) -> Watching:
            watching = Watching(cluster, path / f"home{len(made)}", **sensor)
            made.append(watching)
            if installed:
                watching.install()
            watching.start()
            wait_until(lambda: watching.replayed() == watching.shown())
            return watching

        yield call
        for watching in made:
            watching.close()
        rest(cluster)


def rest(cluster: Sandbox) -> None:
    """Undo what a test left behind: daemons, nodes, triggers, reservations."""
    status = cluster.get_status()
    if not status["slurmctld"]:
        cluster.restart_controller()
    for name, pid in status.items():
        if name.startswith("slurmd.") and not pid:
            cluster.start_service(name)
    slurm = cluster.plan.slurm_user
    cluster.run(["strigger", "--clear", f"--user={slurm}", "-Q"], user=slurm, check=False)
    cluster.run(["scontrol", "update", "partitionname=main", "state=UP"], check=False)
    cluster.run(["scontrol", "delete", "reservationname=held"], check=False)

    def all_idle() -> bool:
        out = str(cluster.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout)
        states = dict(line.split() for line in out.splitlines())
        for node, state in states.items():
            # slurmctld checks a resumed node again.
            if state.startswith(("down", "drain", "fail")):
                update = ["scontrol", "update", f"nodename={node}"]
                cluster.run([*update, "state=resume"], check=False)
                cluster.run([*update, "state=undrain"], check=False)
        return list(states.values()) == ["idle"] * 3

    wait_until(all_idle, 60)


def scontrol(cluster: Sandbox, *words: str) -> None:
    cluster.run(["scontrol", *words])
