"""History of a real cluster: node states, jobs on nodes, and nothing twice after a kill."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from job_submission import state_of, submit_to, wait_until
from sandboxes import passable_directory
from sensor_daemon import Watching

from steward.core.events import NODE_STATE
from steward.sandbox import Sandbox, SandboxError, SandboxSpec

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def watching(slurm_version: str) -> Iterator[Watching]:
    """Start a daemon whose sensor polls periodically, on a separate cluster."""
    spec = SandboxSpec(nodes=3, slurm=slurm_version, private_data="jobs")
    with passable_directory() as path, Sandbox.up(spec) as box:
        daemon = Watching(box, path / "home", helper="", usage=False)
        daemon.start()
        try:
            wait_until(lambda: len(known(daemon)) == 3, 60)
            yield daemon
        finally:
            daemon.close()


def nodes(daemon: Watching, *words: str, user: str = "") -> dict[str, Any]:
    answer = daemon.ask_json("node", *words, user=user)
    return {one["node"]: one for one in answer["nodes"]}


def known(daemon: Watching) -> dict[str, Any]:
    """Return the nodes; none while the daemon does not know them yet, for waits."""
    try:
        return nodes(daemon)
    except SandboxError:
        return {}


def shown(daemon: Watching, node: str, what: str) -> str:
    """Return a field of a node; "" while it is unknown, for waits."""
    return str(known(daemon).get(node, {}).get(what, ""))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "+00:00"


def drain(daemon: Watching, node: str, reason: str) -> None:
    words = ["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"]
    daemon.cluster.run(words, user="root")
    wait_until(lambda: shown(daemon, node, "reason") == reason, 60)


def resume(daemon: Watching, node: str) -> None:
    words = ["scontrol", "update", f"nodename={node}", "state=resume"]
    daemon.cluster.run(words, user="root")
    wait_until(lambda: shown(daemon, node, "state") == "IDLE", 60)


def test_how_a_node_was_is_known_when_it_is_otherwise(watching: Watching) -> None:
    first = nodes(watching)["node1"]
    assert (first["state"], first["cpus"], first["memory_bytes"]) == ("IDLE", 4, 4 << 30)
    assert first["partitions"] == ["main", "debug"]
    assert not first["since_is_known"]
    before = now()
    time.sleep(1.1)  # a reason is dated to the second
    drain(watching, "node1", "a broken fan")
    between = now()
    resume(watching, "node1")
    assert nodes(watching, "node1", "--at", before)["node1"]["state"] == "IDLE"
    then = nodes(watching, "node1", "--at", between)["node1"]
    assert (then["state"], then["reason"], then["reason_user"]) == (
        *("IDLE+DRAIN", "a broken fan", "root"),
    )
    assert nodes(watching, "node1")["node1"]["since_is_known"]


def test_what_ran_on_a_node_and_what_happened_to_it_meanwhile(watching: Watching) -> None:
    cluster = watching.cluster
    ada, bela = cluster.users
    job = submit_to(
        cluster, "#!/bin/sh\nsleep 300\n", user=ada, nodelist="node2", output="/dev/null"
    )
    wait_until(lambda: state_of(cluster, job) == "RUNNING")
    # No event reports it.
    wait_until(lambda: shown(watching, "node2", "state") == "MIXED", 60)
    assert not [event for event in watching.events(NODE_STATE) if event.body.state == "MIXED"]

    def ran(*words: str, user: str = "") -> list[str]:
        answer = watching.ask_json("node", "node2", "--jobs", *words, user=user)
        return [one["label"] for one in answer["jobs"]]

    wait_until(lambda: ran() == [str(job)], 60)
    running = now()
    time.sleep(1.1)  # a reason is dated to the second
    drain(watching, "node2", "while it runs")
    cluster.run(["scancel", str(job)], user=ada)
    wait_until(lambda: ran() == [], 60)
    assert ran("--at", running) == [str(job)]
    assert ran("--at", running, user=ada) == [str(job)]
    assert ran("--at", running, user=bela) == []
    wait_until(lambda: shown(watching, "node2", "state") == "IDLE+DRAIN", 60)
    resume(watching, "node2")
    answer = watching.ask_json(
        "events", "list", "--history", "-w", "node2", "--since", running, "-L", "50"
    )
    states = [one["body"]["state"] for one in reversed(answer["events"])]
    assert any(state.startswith("MIXED") and "DRAIN" in state for state in states), states
    assert states[-1] == "IDLE"


def test_what_slurmctld_tells_no_more_is_shown_with_its_age(watching: Watching) -> None:
    def silent() -> str:
        return cast("str", watching.ask_json("node")["silent_since"].get("box", ""))

    assert silent() == ""
    watching.cluster.kill_controller()
    wait_until(lambda: silent() != "", 60)
    said = watching.ask("node")
    assert "slurmctld of cluster box does not answer" in said.stderr
    assert "node1" in said.stdout
    watching.cluster.restart_controller()
    wait_until(lambda: silent() == "", 60)

    def is_settled() -> bool:
        # A slurmctld that did not save a job's end before the kill may requeue the job.
        watching.cluster.run(["scancel", "--partition=main"], user="root")
        states = str(watching.cluster.run(["sinfo", "-h", "-o", "%T"]).stdout).split()
        return set(states) <= {"idle", "drained"}

    # A drain of a node that has not reported since the restart is lost: slurmctld makes it idle. A
    # node resumed right before the kill may be drained again.
    wait_until(is_settled, 120)


def test_each_event_is_kept_once_over_kills(watching: Watching) -> None:
    for number in range(4):
        drain(watching, "node3", f"round {number}")
        watching.stop(signal.SIGKILL)
        watching.start()
        resume(watching, "node3")

    def kept() -> list[str]:
        answer = watching.ask_json("events", "list", "--history", "-L", "5000")
        return [one["key"] for one in answer["events"]]

    in_journal = [event.key for event in watching.events(NODE_STATE)]
    wait_until(lambda: set(in_journal) <= set(kept()), 60)
    keys = kept()
    assert len(keys) == len(set(keys))
    assert nodes(watching)["node3"]["state"] == "IDLE"
    path = watching.state / "history.db"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.access(path, os.R_OK)
