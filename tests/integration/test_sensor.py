"""The sensor against a real Slurm: what goes down, what comes back, and what is lost between."""

import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sensing import Watching
from steward_daemon import STEWARD
from submitting import submit_to, wait_until

from steward.events import CONTROLLER_STATE, NODE_STATE, PARTITION_STATE, RESERVATION_STATE
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

FAST = ("SlurmdTimeout=4", "TreeWidth=50", "MaxNodeCount=8", "ReturnToService=1")
"""A node that does not answer is soon known to be down; nodes can be made and deleted.

One that was set down by hand stays so: with ``ReturnToService=2`` an answer to slurmctld
that is on its way brings back even a node whose slurmd was killed before.
"""

MakeWatching = Callable[..., Watching]


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    """A cluster of this module's own: its daemons are killed here."""
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        Path(path).chmod(0o755)
        spec = SandboxSpec(directory=f"{path}/sandbox", nodes=3, slurm=slurm_version, extra=FAST)
        with Sandbox.up(spec) as box:
            yield box


@pytest.fixture
def make(cluster: Sandbox) -> Iterator[MakeWatching]:
    """Makes daemons with a sensor, and brings the cluster back to rest afterwards."""
    made: list[Watching] = []
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        Path(path).chmod(0o755)

        def call(*, installed: bool = True, **sensor: Any) -> Watching:
            watching = Watching(cluster, Path(path) / f"home{len(made)}", **sensor)
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
    """Bring back what a test left behind: daemons, nodes, triggers, reservations."""
    status = cluster.status()
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
            # One that is resumed is asked anew whether it is there.
            if state.startswith(("down", "drain", "fail")):
                update = ["scontrol", "update", f"nodename={node}"]
                cluster.run([*update, "state=resume"], check=False)
                cluster.run([*update, "state=undrain"], check=False)
        return list(states.values()) == ["idle"] * 3

    wait_until(all_idle, 60)


def scontrol(cluster: Sandbox, *words: str) -> None:
    cluster.run(["scontrol", *words])


def is_kept(cluster: Sandbox, file: str, text: str) -> bool:
    """Whether slurmctld has written this down: one that is killed before has forgotten it."""
    path = Path(cluster.spool, file)
    return path.exists() and text.encode() in path.read_bytes()


def test_a_killed_slurmd_is_told_of(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    cluster.stop_service("slurmd.node1", signal.SIGKILL)
    wait_until(lambda: watching.replayed()["node1"].startswith("DOWN"), 60)
    told = watching.of_node("node1")
    assert sum(body.failed for body in told) == 1
    assert "Not responding" in told[-1].reason
    assert told[-1].reason_user == cluster.plan.slurm_user
    cluster.start_service("slurmd.node1")
    wait_until(lambda: watching.replayed()["node1"] == "IDLE", 60)
    watching.settle()


def test_slurmctlds_triggers_wake_the_sensor(cluster: Sandbox, make: MakeWatching) -> None:
    """Its own look would be an hour away."""
    watching = make(interval_s=3600.0)
    wait_until(lambda: len(watching.triggers()) >= 6)
    # A slurmctld that has just started fires for that too, within its first round of triggers.
    scontrol(cluster, "update", "nodename=node1", "state=drain", "reason=first round")
    wait_until(lambda: "DRAIN" in watching.replayed()["node1"], 60)
    scontrol(cluster, "update", "nodename=node1", "state=resume")
    scontrol(cluster, "update", "nodename=node2", "state=down", "reason=bad DIMM; see #7 Key=x")
    wait_until(lambda: watching.replayed()["node2"].startswith("DOWN"), 60)
    wait_until(lambda: watching.replayed()["node1"] == "IDLE", 60)
    body = watching.of_node("node2")[1]
    assert (body.source, body.failed, body.old_state) == ("trigger", True, "IDLE")
    assert body.reason == "bad DIMM; see #7 Key=x"
    assert (body.reason_uid, body.reason_user) == (0, "root")
    scontrol(cluster, "update", "nodename=node2", "state=resume")
    wait_until(lambda: watching.replayed()["node2"] == "IDLE", 60)
    assert sum(body.failed for body in watching.of_node("node2")) == 1
    # That its slurmd had not answered yet when it was resumed is no failure.
    assert not any(body.failed for body in watching.of_node("node1"))


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
    scontrol(cluster, "update", "nodename=node2", "state=resume")

    def told() -> list[tuple[str, bool]]:
        return [(body.state, body.failed) for body in watching.of_node("node2")]

    wait_until(lambda: [failed for _, failed in told()].count(True) == 2, 90)
    failures = [state for state, failed in told() if failed]
    assert [state.partition("+")[0] for state in failures] == ["DOWN", "DOWN"]
    assert ("IDLE+NOT_RESPONDING", False) in told()


@pytest.mark.wide
def test_down_while_slurmctld_is_killed_comes_after_the_restart(
    cluster: Sandbox, make: MakeWatching
) -> None:
    """Nobody looks by the clock, and what its trigger would have told is lost."""
    watching = make(interval_s=3600.0)
    restart = f"{watching.secret} box primary_slurmctld_resumed_operation"
    wait_until(lambda: is_kept(cluster, "trigger_state", restart))
    away = watching.helper.rename(watching.helper.with_suffix(".away"))
    cluster.stop_service("slurmd.node3", signal.SIGKILL)
    scontrol(cluster, "update", "nodename=node3", "state=down", "reason=gone for good")
    wait_until(lambda: is_kept(cluster, "node_state", "gone for good"))
    cluster.kill_controller()
    away.rename(watching.helper)
    cluster.restart_controller()
    wait_until(lambda: watching.replayed().get("node3", "").startswith("DOWN"), 60)
    told = watching.of_node("node3")
    assert [(body.old_state, body.source) for body in told[1:2]] == [("IDLE", "reconcile")]
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
    assert down[0].source in ("reconcile", "trigger")
    watching.settle()


@pytest.mark.wide
def test_a_flap_within_a_tick_ends_in_the_right_state(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=3600.0)
    wait_until(lambda: len(watching.triggers()) >= 6)
    for _ in range(3):
        scontrol(cluster, "update", "nodename=node1", "state=down", "reason=flap")
        scontrol(cluster, "update", "nodename=node1", "state=resume")
    scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=stays")
    wait_until(lambda: "DRAIN" in watching.replayed()["node2"], 60)
    watching.settle()
    wait_until(lambda: watching.shown()["node1"] == "IDLE")


def test_triggers_that_are_lost_are_set_again_and_stale_ones_cleared(
    cluster: Sandbox, make: MakeWatching
) -> None:
    slurm = cluster.plan.slurm_user
    watching = make()
    wait_until(lambda: len(watching.triggers()) >= 6)
    ours = watching.triggers()
    assert all("PERM" in row for row in ours)
    watching.stop()
    stale = f"{watching.helper} --socket /elsewhere --secret /elsewhere box down"
    others = f"{watching.helper} --socket /elsewhere --secret /elsewhere another down"
    for program in (stale, others):
        words = ["strigger", "--set", "--node", "--down", "--flags=PERM", f"--program={program}"]
        cluster.run(words, user=slurm)
    rows = cluster.run(["strigger", "--get", "--noheader"]).stdout.splitlines()
    lost = next(row.split()[0] for row in rows if " up " in row)
    cluster.run(["strigger", "--clear", f"--id={lost}"], user=slurm)
    assert len(watching.triggers()) == len(ours) + 1
    watching.start()

    def programs(rows: list[str]) -> list[str]:
        return sorted(row.partition("/")[2] for row in rows)

    another = others[1:]
    wait_until(lambda: programs(watching.triggers()) == programs([*ours, others]), 60)
    assert another in programs(watching.triggers())


@pytest.mark.wide
def test_triggers_survive_a_slurmctld_that_had_not_saved_them(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    wait_until(lambda: len(watching.triggers()) >= 6)
    ours = watching.triggers()
    cluster.kill_controller()
    Path(cluster.spool, "trigger_state").unlink(missing_ok=True)
    Path(cluster.spool, "trigger_state.old").unlink(missing_ok=True)
    cluster.restart_controller("-i")
    wait_until(lambda: watching.triggers() == ours, 60)


def test_the_secret_is_seen_by_nobody_else(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    wait_until(lambda: len(watching.triggers()) >= 6)
    user = next(iter(cluster.users))
    secret = watching.secret.read_bytes().strip()
    found = watching.secret.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert len(secret) >= 32
    assert cluster.run(["cat", str(watching.secret)], user=user, check=False).returncode != 0
    shown = cluster.run(["strigger", "--get"], user=user).stdout
    assert str(watching.secret) in shown
    assert secret.decode() not in shown
    assert watching.bytes_anywhere(secret) == [str(watching.secret)]
    # Who installs again keeps what there is.
    watching.install()
    assert watching.secret.read_bytes().strip() == secret


def forge(watching: Watching, user: str, secret: str) -> str:
    """What the sensor answers to a wake-up of somebody's own making."""
    message = {"version": 1, "secret": secret, "cluster": "box", "event": "down", "nodes": "x"}
    script = (
        "import socket,sys\n"
        "s=socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
        "s.sendall(sys.argv[2].encode()+b'\\n'); print(s.recv(16).decode().strip())\n"
    )
    words = ["/usr/bin/python3", "-I", "-c", script, watching.settings.sensor.socket]
    done = watching.cluster.run([*words, json.dumps(message)], user=user, check=False)
    return str(done.stdout).strip()


def test_a_forged_wake_up_costs_a_look_at_most(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=3600.0)
    secret = watching.secret.read_text().strip()
    user, slurm = next(iter(cluster.users)), cluster.plan.slurm_user
    assert forge(watching, slurm, "a" * 43) == "no"
    assert forge(watching, user, secret) in ("no", "")
    before = len(watching.events())
    for _ in range(20):
        assert forge(watching, slurm, secret) == "ok"
    assert len(watching.events()) == before
    assert "a wake-up is refused" in watching.log()
    assert secret not in watching.log()


@pytest.mark.wide
def test_a_helper_never_hangs(cluster: Sandbox, make: MakeWatching) -> None:
    """Nobody answers on the socket, and the alarm is blocked, as slurmctld leaves it."""
    watching = make(installed=True)
    watching.stop()
    silent = watching.home / "run" / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        silent.chmod(0o666)
        listener.listen(1)
        words = [str(watching.helper), "--socket", str(silent), "--secret", str(watching.secret)]
        blocked = (
            "import os,signal,sys\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})\n"
            "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
            "os.execv(sys.argv[1], sys.argv[1:])\n"
        )
        began = time.monotonic()
        python = ["/usr/bin/python3", "-I", "-c", blocked]
        done = cluster.run(
            [*python, *words, "box", "down", "node1"],
            user=cluster.plan.slurm_user,
            check=False,
            timeout_s=200.0,
        )
    assert done.returncode != 0
    print(f"a helper that nobody answers ends after {time.monotonic() - began:.1f} s")


def test_flags_of_power_planning_and_maintenance_are_no_failures(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    scontrol(
        *(cluster, "create", "reservation", "reservationname=held", "starttime=now"),
        *("duration=1", "users=root", "nodes=node1", "flags=maint,ignore_jobs"),
    )
    wait_until(lambda: "MAINTENANCE" in watching.replayed()["node1"], 60)
    scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=by hand")
    wait_until(lambda: "DRAIN" in watching.replayed()["node2"])
    job = submit_to(
        cluster, "#!/bin/sh\nsleep 5\n", user=next(iter(cluster.users)), nodelist="node3"
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
    (new,) = watching.of_node("dyn1")
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
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        Path(path).chmod(0o755)
        watching = Watching(booked_sandbox, Path(path) / "home")
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
        *("duration=1", "users=root", "nodes=node1"),
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
    # Who may see what is asked of Slurm by another part of the daemon.
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
    out = watching.home / "tail"
    with out.open("wb") as file:
        tail = cluster.popen(
            [STEWARD, "events", "tail", "-L", "0", "--config", str(watching.config)],
            stdout=file,
            env={"PYTHONUNBUFFERED": "1"},
        )
    try:
        time.sleep(2.0)
        scontrol(cluster, "update", "nodename=node2", "state=drain", "reason=to be seen")
        wait_until(lambda: "to be seen" in out.read_text(), 60)
        assert "node2" in out.read_text()
    finally:
        tail.send_signal(signal.SIGINT)
        tail.wait(20)
    assert os.path.getsize(out) < 10_000
