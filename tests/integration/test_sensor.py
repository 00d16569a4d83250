"""Sensor on a real Slurm: nodes that go down, return, or change between polls."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from job_submission import submit_to, wait_until
from sandbox_daemon import STEWARD
from sandboxes import passable_directory
from sensor_cluster import SOON_DOWN, MakeWatching, cluster, make, scontrol
from sensor_daemon import Front, Watching

from steward.capture.settings import SensorSettings
from steward.core.events import CONTROLLER_STATE, NODE_STATE, PARTITION_STATE, RESERVATION_STATE
from steward.sandbox import Sandbox

__all__ = ["cluster", "make"]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

EXTRA = (SOON_DOWN,)
DOWN_S = 5.0
"""Longest time from slurmctld's knowledge of a failed node to the event, in seconds."""


def is_kept(cluster: Sandbox, file: str, text: str) -> bool:
    """Return whether slurmctld has saved this state, which survives a kill then."""
    path = Path(cluster.spool, file)
    return path.exists() and text.encode() in path.read_bytes()


def test_a_killed_slurmd_is_told_of(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    cluster.stop_service("slurmd.node1", signal.SIGKILL)
    wait_until(lambda: watching.replayed()["node1"].startswith("DOWN"), 120)
    told = watching.of_node("node1")
    # On a busy host it may have been silent for SlurmdTimeout before, too: each failure is reported
    # once, and so is each recovery between two of them.
    turns = [
        "failed" if body.failed else "recovered" for body in told if body.failed != body.recovered
    ]
    assert turns == ["failed", *["recovered", "failed"] * (len(turns) // 2)]
    assert "Not responding" in told[-1].reason
    assert told[-1].reason_user == cluster.plan.slurm_user
    watching.bring_back("node1")
    watching.settle()


def test_the_event_of_a_failed_node_comes_within_seconds(make: MakeWatching) -> None:
    watching = make(interval_s=SensorSettings().interval_s)
    delays = [watching.down_delay_s("node1")]
    # A busy host delays every process: one kill out of four has to meet the limit.
    while min(delays) > DOWN_S and len(delays) < 4:
        delays.append(watching.down_delay_s("node1"))
    assert min(delays) <= DOWN_S, delays


@pytest.mark.wide
def test_a_slurmd_that_does_not_come_back_with_its_node_fails_anew(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    scontrol(cluster, "update", "nodename=node2", "state=down", "reason=by hand")
    wait_until(lambda: watching.replayed()["node2"].startswith("DOWN"), 60)
    cluster.stop_service("slurmd.node2", signal.SIGKILL)
    # No answer to slurmctld is on its way any more.
    wait_until(lambda: "NOT_RESPONDING" in watching.replayed()["node2"], 60)

    def told() -> list[tuple[str, bool]]:
        return [(body.state, body.failed) for body in watching.of_node("node2")]

    before = len(told())

    def is_told_as_resumed() -> bool:
        # On a busy machine it may be down again before anybody has looked.
        if watching.shown()["node2"].startswith("DOWN"):
            scontrol(cluster, "update", "nodename=node2", "state=resume")
        return ("IDLE+NOT_RESPONDING", False) in told()[before:]

    wait_until(is_told_as_resumed, 60)
    wait_until(lambda: [failed for _, failed in told()].count(True) == 2, 90)
    failures = [state for state, failed in told() if failed]
    assert [state.partition("+")[0] for state in failures] == ["DOWN", "DOWN"]


@pytest.mark.wide
def test_down_while_slurmctld_is_killed_comes_after_the_restart(
    cluster: Sandbox, make: MakeWatching
) -> None:
    """No periodic poll is due, and the trigger's report is lost."""
    with passable_directory() as path:
        front = Front(path, "primary_*")
        # Until the proxy is opened nothing wakes the sensor, whatever slurmctld starts.
        watching = make(helper=str(front.helper), interval_s=3600.0)
        restart = f"{watching.secret} box primary_slurmctld_resumed_operation"
        wait_until(lambda: is_kept(cluster, "trigger_state", restart))
        cluster.stop_service("slurmd.node3", signal.SIGKILL)
        scontrol(cluster, "update", "nodename=node3", "state=down", "reason=gone for good")
        wait_until(lambda: is_kept(cluster, "node_state", "gone for good"))
        cluster.kill_controller()
        assert watching.replayed()["node3"] == "IDLE"
        front.open(watching)
        cluster.restart_controller()
        wait_until(lambda: watching.replayed().get("node3", "").startswith("DOWN"), 60)
    told = watching.of_node("node3")
    assert [(body.old_state, body.source) for body in told[1:2]] == [("IDLE", "interval")]
    assert sum(body.failed for body in told) == 1
    restarted = [event.body for event in watching.events(CONTROLLER_STATE) if event.body.restarted]
    assert [(body.daemon, body.up) for body in restarted] == [("slurmctld", True)]


@pytest.mark.wide
def test_a_slurmd_that_is_killed_while_slurmctld_is_away(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    cluster.kill_controller()
    cluster.stop_service("slurmd.node3", signal.SIGKILL)
    time.sleep(1.0)
    cluster.restart_controller()
    wait_until(lambda: watching.replayed()["node3"].startswith("DOWN"), 60)
    down = [body for body in watching.of_node("node3") if body.state.startswith("DOWN")]
    assert down[0].source in ("interval", "trigger")
    watching.settle()


@pytest.mark.wide
def test_a_flap_within_a_tick_ends_in_the_right_state(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=3600.0)
    assert len(watching.all_triggers()) >= 6
    for _ in range(3):
        scontrol(cluster, "update", "nodename=node1", "state=down", "reason=flap")
        scontrol(cluster, "update", "nodename=node1", "state=resume")
    scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=stays")
    wait_until(lambda: "DRAIN" in watching.replayed()["node2"], 60)
    watching.settle()
    wait_until(lambda: watching.shown()["node1"] == "IDLE")


def test_flags_of_power_planning_and_maintenance_are_no_failures(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    scontrol(
        *(cluster, "create", "reservation", "reservationname=held", "starttime=now"),
        *("duration=60", "users=root", "nodes=node1", "flags=maint,ignore_jobs"),
    )
    wait_until(lambda: "MAINTENANCE" in watching.replayed()["node1"], 60)
    scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=by hand")
    wait_until(lambda: "DRAIN" in watching.replayed()["node2"])
    job = submit_to(
        cluster, "#!/bin/sh\nsleep 600\n", user=next(iter(cluster.users)), nodelist="node3"
    )
    wait_until(lambda: any(body.state == "MIXED" for body in watching.of_node("node3")))
    scontrol(cluster, "delete", "reservationname=held")
    scontrol(cluster, "update", "nodename=node2", "state=resume")
    cluster.run(["scancel", str(job)])
    watching.settle()
    # On a busy host a slurmd may really be silent for the few seconds of SlurmdTimeout.
    told = [event.body for event in watching.events(NODE_STATE)]
    assert [one for one in told if one.failed and "NOT_RESPONDING" not in one.state] == []


@pytest.mark.wide
def test_nodes_are_made_and_deleted(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    scontrol(cluster, "create", "nodename=dyn1", "state=CLOUD", "cpus=1", "realmemory=100")
    wait_until(lambda: "dyn1" in watching.replayed(), 60)
    new = watching.of_node("dyn1")[0]
    assert (new.old_state, new.failed) == ("", False)
    assert "CLOUD" in new.state
    scontrol(cluster, "delete", "nodename=dyn1")
    wait_until(lambda: "dyn1" not in watching.replayed(), 60)
    assert watching.of_node("dyn1")[-1].state == "REMOVED"
    assert not any(body.failed for body in watching.of_node("dyn1"))


@pytest.mark.wide
def test_nodes_of_a_configuration_that_is_read_anew(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    line = "NodeName=later1 NodeHostname=nowhere NodeAddr=127.0.0.1 Port=9 CPUs=1 State=DOWN"
    conf = Path(cluster.slurm_conf)
    before = conf.read_text()
    conf.write_text(f"{before}{line} Reason=later\n")
    try:
        cluster.restart_controller()
        wait_until(lambda: "later1" in watching.replayed(), 60)
        (new, *_) = watching.of_node("later1")
        assert (new.old_state, new.state.partition("+")[0], new.failed) == ("", "DOWN", False)
    finally:
        conf.write_text(before)
        cluster.restart_controller()
    wait_until(lambda: "later1" not in watching.replayed(), 60)
    watching.settle()


def test_slurmdbd_goes_away_and_comes_back(booked_sandbox: Sandbox) -> None:
    with passable_directory() as path:
        watching = Watching(booked_sandbox, path / "home")
        watching.install()
        watching.start()

        def told() -> list[bool]:
            events = watching.events(CONTROLLER_STATE)
            return [event.body.up for event in events if event.body.daemon == "slurmdbd"]

        try:
            watching.settle()
            assert told() == []
            booked_sandbox.stop_service("slurmdbd")
            try:
                wait_until(lambda: told() == [False], 60)
            finally:
                booked_sandbox.start_service("slurmdbd")
            wait_until(lambda: told() == [False, True], 60)
        finally:
            watching.close()
            slurm = booked_sandbox.plan.slurm_user
            words = ["strigger", "--clear", f"--user={slurm}", "-Q"]
            booked_sandbox.run(words, user=slurm, check=False)


def test_partitions_and_reservations(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    scontrol(cluster, "update", "partitionname=main", "state=DRAIN")
    scontrol(
        *(cluster, "create", "reservation", "reservationname=held", "starttime=now+4seconds"),
        *("duration=60", "users=root", "nodes=node1"),
    )
    wait_until(lambda: watching.replayed(PARTITION_STATE)["main"] == "DRAIN", 60)
    wait_until(lambda: watching.replayed(RESERVATION_STATE).get("held") == "ACTIVE", 60)
    told = [event.body for event in watching.events(RESERVATION_STATE)]
    assert told[-1].nodes == "node1"
    assert told[-1].users == ("root",)
    scontrol(cluster, "delete", "reservationname=held")
    scontrol(cluster, "update", "partitionname=main", "state=UP")
    wait_until(lambda: "held" not in watching.replayed(RESERVATION_STATE), 60)
    wait_until(lambda: watching.replayed(PARTITION_STATE)["main"] == "UP", 60)


def test_users_are_told_what_they_may_see(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    user = next(iter(cluster.users))
    scontrol(cluster, "update", "nodename=node1", "state=down", "reason=see the ticket")
    wait_until(lambda: watching.replayed()["node1"].startswith("DOWN"))
    # Another worker reads from Slurm who may see nodes.
    wait_until(lambda: watching.ask("events", "list", "-k", NODE_STATE, user=user).stdout != "")
    table = watching.ask("events", "list", "-w", "node1", "--failed", user=user).stdout
    assert "IDLE -> DOWN" in table
    assert "see the ticket [root]" in table
    answer = json.loads(watching.ask("events", "list", "--json", user=user).stdout)
    assert {event["kind"] for event in answer["events"]} >= {NODE_STATE, PARTITION_STATE}
    assert json.loads(watching.ask("events", "--json", user=user).stdout)["events"]
    lines = watching.ask("events", "tail", "--no-follow", "--json", "-L", "3", user=user).stdout
    assert [json.loads(line)["cluster"] for line in lines.splitlines()] == ["box"] * 3


def test_a_tail_goes_on_as_more_happens(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    assert watching.ask("events", "tail", "--no-follow", "-L", "0").stdout == ""
    out = watching.home / "tail"
    with out.open("wb") as file:
        tail = cluster.popen(
            [STEWARD, "events", "tail", "-L", "1", "--config", str(watching.config)],
            stdout=file,
            env={"PYTHONUNBUFFERED": "1"},
        )
    try:
        # It continues from the states that it shows first.
        wait_until(lambda: os.path.getsize(out) > 0)
        scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=to be seen")
        wait_until(lambda: "to be seen" in out.read_text(), 60)
        assert "node2" in out.read_text()
    finally:
        tail.send_signal(signal.SIGINT)
        tail.wait(20)
    assert os.path.getsize(out) < 10_000
