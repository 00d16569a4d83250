"""Nodes, triggers and jobs of a real Slurm: queries and changes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import state_of, submit_to, wait_until

from steward.sandbox import Sandbox, SandboxProcess, SandboxSpec
from steward.slurm import NodeRecord, ReservationRecord, TriggerRecord
from steward.slurm.node_states import is_available, is_failing

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.wide,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can have further users"),
]

INSIDE = str(Path(__file__).parent / "cluster_calls.py")
HOSTILE = "bad ; = [x] Reason=evil State=IDLE Comment=y [root@2026-01-01T00:00:00]"
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def machine(slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a cluster for this module, with two nodes in a cloud that never starts."""
    cloud = (
        "NodeName=cloud[1-2] NodeAddr=127.0.0.1 Port=1 CPUs=2 RealMemory=100 State=CLOUD",
        "PartitionName=cloud Nodes=cloud[1-2]",
        "SuspendProgram=/bin/true",
        "ResumeProgram=/bin/true",
        "SuspendTime=600",
        "SuspendTimeout=5",
        # So long that it is seen on a busy machine, too.
        "ResumeTimeout=15",
        "SuspendExcNodes=node[1-3]",
        # An answer of its slurmd's that is on its way must not bring back a node that is set down.
        "ReturnToService=1",
    )
    with Sandbox.up(
        SandboxSpec(slurm=slurm_version, nodes=3, extra=cloud), report=print
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def call(machine: Sandbox) -> Iterator[Call]:
    """Return a function that calls a method of a Slurm client inside, as root or as a user."""
    callers: dict[str, SandboxProcess] = {}
    words = call_words(machine)

    def run(what: str, method: str, *args: Any, user: str = "", **options: Any) -> Any:
        # One program for each user: importing the client takes longer than most calls.
        if user not in callers:
            callers[user] = machine.popen(
                words, user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        caller = callers[user]
        assert caller.stdin
        assert caller.stdout
        caller.stdin.write(msgspec.json.encode([what, method, args, options]) + b"\n")
        caller.stdin.flush()
        return msgspec.json.decode(caller.stdout.readline())

    yield run
    for caller in callers.values():
        caller.communicate(timeout=60)
        assert caller.returncode == 0


def call_words(cluster: Sandbox) -> list[str]:
    """Return the command of a program that calls a client's methods."""
    settings = msgspec.json.encode(cluster.make_cluster_settings()).decode()
    return [sys.executable, INSIDE, settings]


@pytest.fixture(autouse=True)
def nodes_up(machine: Sandbox) -> Iterator[None]:
    """Return nodes to service for the next test, without reasons, comments and reservations."""
    yield
    for node in ("node1", "node2", "node3"):
        for words in (("state=undrain",), ("state=resume",), ("comment=", "extra=", "weight=1")):
            machine.run(["scontrol", "update", f"nodename={node}", *words], check=False)
    wait_until(lambda: shown_state(machine, "node1,node2,node3") <= {"idle", "mixed", "allocated"})


def shown_state(machine: Sandbox, nodes: str) -> set[str]:
    out = machine.run(["sinfo", "-h", "-a", "-N", "-n", nodes, "-O", "StateLong:40"]).stdout
    return {line.strip() for line in out.splitlines()}


def nodes_of(call: Call, nodelist: str = "") -> dict[str, NodeRecord]:
    return msgspec.convert(call("machine", "nodes", nodelist), dict[str, NodeRecord])


def test_states_and_who_said_why(call: Call, machine: Sandbox) -> None:
    assert call("changing", "set_state", ["node1", "node2"], "DRAIN", HOSTILE) == {
        "node1": "",
        "node2": "",
    }
    assert call("changing", "set_state", ["node3"], "DOWN", "power; ticket=42 [a]") == {"node3": ""}
    nodes = nodes_of(call)
    assert {"node1", "node2", "node3"} <= nodes.keys()
    # A node may not have answered for the first time yet.
    states = {name: set(nodes[name].flags) - {"NOT_RESPONDING"} for name in nodes}
    assert (nodes["node1"].base, states["node1"]) == ("IDLE", {"DRAIN"})
    assert (nodes["node3"].base, states["node3"]) == ("DOWN", set())
    assert nodes["node1"].reason == nodes["node2"].reason == HOSTILE
    assert nodes["node3"].reason == "power; ticket=42 [a]"
    for name in ("node1", "node2", "node3"):
        node = nodes[name]
        assert (node.reason_user, node.reason_uid) == ("root", 0)
        assert node.reason_at is not None
        assert (node.cpus, node.memory_bytes) == (4, 4096 * 2**20)
        assert node.partitions == ("main", "debug")
        assert node.version.startswith(machine.plan.slurm_version[:5])
    # The list, and one node singly, say the same.
    for name in ("node1", "node3"):
        assert nodes_of(call, name)[name].reason == nodes[name].reason
    assert call("changing", "set_state", ["node1", "node2", "node3"], "RESUME") == {
        "node1": "",
        "node2": "",
        "node3": "",
    }
    assert nodes_of(call, "node[1-2]")["node1"].base == "IDLE"
    assert not set(nodes_of(call, "node1")["node1"].flags) & {"DRAIN"}


def test_a_half_right_list_changes_nothing(call: Call, machine: Sandbox) -> None:
    answer = call("changing", "set_state", ["node1", "nope"], "DRAIN", "half")
    assert answer["error"] == "UnknownNode"
    assert "nope" in answer["what"]
    assert shown_state(machine, "node1") == {"idle"}
    assert call("machine", "node_names", "node[1-2],nope")["error"] == "UnknownNode"
    assert call("machine", "nodes", "nope")["error"] == "UnknownNode"
    # So it must be: Slurm itself changes the one and says that it failed.
    words = ["scontrol", "update", "nodename=node1,nope", "state=drain", "reason=half"]
    assert machine.run(words, check=False).returncode != 0
    assert shown_state(machine, "node1") == {"drained"}


def test_what_is_said_of_each_node(call: Call) -> None:
    assert call("changing", "set_state", ["node1"], "DRAIN", "x") == {"node1": ""}
    # node2 is as it is to be: of Slurm alone that is an error.
    assert call("changing", "set_state", ["node1", "node2"], "RESUME") == {"node1": "", "node2": ""}
    told = call("changing", "update_nodes", ["node1", "node2"], {"weight": "heavy"})
    assert set(told) == {"node1", "node2"}
    assert all("heavy" in said for said in told.values())
    assert call("changing", "update_nodes", ["node1"], {"weight": 7, "comment": "a=b c"}) == {
        "node1": ""
    }
    details = nodes_of(call, "node1")["node1"].details
    assert (details["weight"], details["comment"]) == (7, "a=b c")
    assert call("changing", "set_state", ["node1"], "DRAIN", "")["error"] == "WrongUpdate"


def test_a_comment_cannot_speak_for_another_node(call: Call, machine: Sandbox) -> None:
    line = machine.run(["scontrol", "-o", "show", "node", "node2"]).stdout.strip()
    forged = line.replace("State=IDLE", "State=DOWN+DRAIN")
    phantom = forged.replace("NodeName=node2", "NodeName=node9")
    machine.run(["scontrol", "update", "nodename=node1", f"comment=x\n{forged}\n{phantom}"])
    nodes = nodes_of(call)
    assert set(nodes) == {"node1", "node2", "node3", "cloud1", "cloud2"}
    assert nodes["node2"].base == "IDLE"
    assert call("machine", "node_names", "node9")["error"] == "UnknownNode"


def test_reservations(call: Call) -> None:
    flags = ["MAINT", "IGNORE_JOBS", "OVERLAP"]
    create = ("changing", "create_reservation")
    assert call(*create, "maint", ["node1"], users=["root"], flags=flags) is None
    try:
        assert call(*create, "maint", ["node1"], users=["root"])["error"] == "WrongUpdate"
        shown = msgspec.convert(call("machine", "reservations"), dict[str, ReservationRecord])
        maint = shown["maint"]
        assert (maint.nodes, maint.state, maint.users) == ("node1", "ACTIVE", ("root",))
        assert set(flags) <= set(maint.flags)
        assert maint.start is not None
        assert maint.end is not None
        assert (maint.end - maint.start).days == 365
        wait_until(lambda: "MAINTENANCE" in nodes_of(call, "node1")["node1"].flags)
        assert call("changing", "set_reservation_nodes", "maint", ["node1", "node2"]) is None
        shown = msgspec.convert(call("machine", "reservations"), dict[str, ReservationRecord])
        assert shown["maint"].nodes == "node[1-2]"
        assert call("changing", "update_reservation", "maint", {"duration": 60}) is None
        shown = msgspec.convert(call("machine", "reservations"), dict[str, ReservationRecord])
        assert shown["maint"].details["duration"] == "01:00:00"
    finally:
        assert call("changing", "delete_reservation", "maint") is None
    assert call("machine", "reservations") == {}
    for method, args in (
        ("delete_reservation", ["maint"]),
        ("update_reservation", ["maint", {"duration": 5}]),
        ("set_reservation_nodes", ["maint", ["node1"]]),
    ):
        assert call("changing", method, *args)["error"] == "UnknownReservation"
    for wrong, kind in (
        ({"nodes": ["nope"], "users": ["root"]}, "UnknownNode"),
        ({"nodes": ["node1"], "users": ["nobody-there"]}, "WrongUpdate"),
        ({"nodes": ["node1"], "users": ["root"], "flags": ["BOGUS"]}, "WrongUpdate"),
        ({"nodes": ["node1"], "users": ["root"], "duration": "soon"}, "WrongUpdate"),
    ):
        assert call(*create, "bad", **wrong)["error"] == kind
    assert call("machine", "reservations") == {}


def test_partitions(call: Call) -> None:
    assert call("changing", "update_partition", "debug", {"state": "DRAIN"}) is None
    assert call("machine", "partitions")["debug"]["state"] == "DRAIN"
    assert call("changing", "update_partition", "debug", {"state": "UP"}) is None
    assert call("machine", "partitions")["debug"]["state"] == "UP"
    update = ("changing", "update_partition")
    assert call(*update, "nope", {"state": "UP"})["error"] == "UnknownPartition"
    assert call(*update, "debug", {"state": "SIDEWAYS"})["error"] == "WrongUpdate"
    assert call(*update, "debug", {"bogus": "1"})["error"] == "WrongUpdate"


def test_a_user_who_may_not(call: Call, machine: Sandbox) -> None:
    user = next(iter(machine.users))
    refused = [
        call("changing", "set_state", ["node1"], "DRAIN", "x", user=user),
        call("changing", "set_state", ["node1", "node2"], "DRAIN", "x", user=user),
        call("changing", "update_nodes", ["node1"], {"weight": 5}, user=user),
        call("changing", "create_reservation", "r", ["node1"], users=["root"], user=user),
        call("changing", "update_partition", "debug", {"state": "DOWN"}, user=user),
        call("triggers", "set", "/bin/true", "down", user=user),
    ]
    assert [answer["error"] for answer in refused] == ["SlurmRefused"] * len(refused)
    assert shown_state(machine, "node1,node2") == {"idle"}
    trigger = call("triggers", "set", "/bin/true mine", "down")
    assert call("triggers", "clear", trigger, user=user)["error"] == "SlurmRefused"
    assert call("triggers", "clear", trigger) is None
    # Every user sees public objects.
    assert "node1" in call("machine", "nodes", user=user)


def test_triggers_are_set_once_and_cleared(call: Call, machine: Sandbox) -> None:
    first = call("triggers", "set", "/bin/true a b", "drain", nodes="node[1-2]", permanent=True)
    again = call("triggers", "set", "/bin/true a b", "drained", nodes="node2,node1", permanent=True)
    assert first == again
    other = call("triggers", "set", "/bin/true a b", "drained", nodes="node1", permanent=True)
    late = call("triggers", "set", "/bin/true a b", "drained", offset_s=20)
    assert len({first, other, late}) == 3
    rows = msgspec.convert(call("triggers", "list_all"), list[TriggerRecord])
    assert [row for row in rows if row.id == first] == [
        TriggerRecord(
            id=first,
            resource="node",
            resource_id="node[1-2]",
            event="drained",
            user=machine.plan.spec.slurm_user,
            permanent=True,
            program="/bin/true a b",
        )
    ]
    assert [(row.offset_s, row.permanent) for row in rows if row.id == late] == [(20, False)]
    assert call("triggers", "clear", first, user="slurm") is None
    for trigger in (other, late):
        assert call("triggers", "clear", trigger) is None
    assert call("triggers", "clear", first)["error"] == "UnknownTrigger"
    assert call("triggers", "clear", 99999)["error"] == "UnknownTrigger"
    assert call("triggers", "list_all") == []
    assert call("triggers", "set", "/bin/true", "down", nodes="nope")["error"] == "UnknownNode"
    assert call("triggers", "set", "/bin/true", "fini", job="99999")["error"] == "UnknownJob"
    assert call("triggers", "set", "/bin/true", "explosion")["error"] == "UnknownEvent"
    assert call("triggers", "set", "/bin/true", "burst_buffer")["error"] == "EventNeverFires"


def test_a_trigger_that_fired_before_slurmctld_was_started_anew(
    call: Call, machine: Sandbox
) -> None:
    """Until slurmctld forgets a trigger that it no longer shows, the same one is a duplicate."""
    # Without arguments: those are cut off where it has fired, and it is the same no more.
    program = Path(machine.directory) / "fired-program"
    program.write_text(f"#!/bin/sh\ntouch {machine.directory}/fired\n")
    program.chmod(0o755)
    fired = Path(machine.directory) / "fired"
    machine.run(["install", "-o", machine.plan.spec.slurm_user, "/dev/null", str(fired)])
    before = fired.stat().st_mtime_ns
    first = call("triggers", "set", str(program), "drained", nodes="node1")
    assert call("changing", "set_state", ["node1"], "DRAIN", "x") == {"node1": ""}
    wait_until(lambda: fired.stat().st_mtime_ns > before)
    assert call("triggers", "list_all") == []
    machine.restart_controller()
    again = call("triggers", "set", str(program), "drained", nodes="node1")
    assert again > first
    rows = msgspec.convert(call("triggers", "list_all"), list[TriggerRecord])
    assert [row.id for row in rows] == [again]
    assert call("triggers", "clear", again) is None


def test_which_events_fire(call: Call, machine: Sandbox) -> None:
    """Each event that this Slurm is documented to fire fires, and no other does."""
    directory = Path(machine.spool)
    program, log = directory / "fired.sh", directory / "fired"
    program.write_text(f'#!/bin/sh\necho "$1" >> {log}\n')
    program.chmod(0o755)
    events = call("triggers", "list_events")
    wanted = ["down", "drained", "up", "reconfig"]
    wanted += [event for event in ("draining", "resume") if event in events]
    assert all(events[event] == "" for event in wanted)
    options = [] if events["fail"] else ["fail"]
    for event in [*wanted, *options]:
        assert isinstance(call("triggers", "set", f"{program} {event}", event, permanent=True), int)
    if events["fail"]:
        # As it would be set without asking.
        words = ["strigger", "--set", "--node", "--fail", "--flags=PERM"]
        machine.run([*words, f"--program={program} fail"], user=machine.plan.spec.slurm_user)

    def fired() -> set[str]:
        return set(log.read_text().split()) if log.exists() else set()

    assert call("changing", "set_state", ["node1"], "DRAIN", "x") == {"node1": ""}
    assert call("changing", "set_state", ["node2"], "DOWN", "x") == {"node2": ""}
    assert call("changing", "set_state", ["node3"], "FAIL", "x") == {"node3": ""}
    early = {"drained", "down", "reconfig", *options} | ({"draining"} & set(wanted))
    wait_until(lambda: early <= fired())
    assert call("changing", "set_state", ["node1", "node2", "node3"], "RESUME") == {
        "node1": "",
        "node2": "",
        "node3": "",
    }
    wait_until(lambda: set(wanted) <= fired())
    assert ("fail" in fired()) == bool(options)
    for row in call("triggers", "list_all"):
        assert row["permanent"]
        assert call("triggers", "clear", row["id"]) is None


def test_a_job_and_its_steps(call: Call, machine: Sandbox) -> None:
    user = next(iter(machine.users))
    name = "x Name=y\nStepId=1.0 UserId=0 State=NONE"
    job = submit_to(
        machine,
        "#!/bin/sh\nsrun -n2 sleep 300\n",
        user=user,
        ntasks=2,
        job_name=name,
        exclude="node3",
        output="/dev/null",
    )
    array = submit_to(machine, "#!/bin/sh\nsleep 300\n", user=user, array="1-2", output="/dev/null")
    try:
        wait_until(lambda: "0" in call("machine", "steps", [str(job)])[str(job)])
        wait_until(lambda: state_of(machine, array) == "RUNNING\nRUNNING")
        steps = call("machine", "steps", [str(job), f"{array}_2", "99999"])
        assert set(steps) == {str(job), f"{array}_2", "99999"}
        assert steps["99999"] == {}
        assert list(steps[f"{array}_2"]) == ["batch"]
        step = steps[str(job)]["0"]
        assert (step["name"], step["num_tasks"], step["state"]) == ("sleep", 2, "RUNNING")
        assert step["user_id"] == machine.users[user].uid
        found = call("machine", "job_details", [str(job), f"{array}_2", "99999"])
        assert found["99999"] == []
        (details,) = found[str(job)]
        assert (details["job_id"], details["name"], details["job_state"]) == (job, name, "RUNNING")
        assert (details["user_name"], details["num_tasks"]) == (user, 2)
        assert (details["exc_nodes"], details["requeue"], details["nice"]) == ("node3", True, 0)
        assert details["nodes"] in ("node1", "node2")
        (task,) = found[f"{array}_2"]
        assert (task["array_job_id"], task["array_task_id"]) == (array, 2)
        assert len(call("machine", "job_details", [str(array)])[str(array)]) == 2
        every = {one["job_id"]: one for one in call("machine", "all_job_details", full=True)}
        assert every[job]["exc_nodes"] == "node3"
        assert every[job]["job_state"] == details["job_state"]
        quick = call("machine", "all_job_details")
        assert all("exc_nodes" not in one for one in quick)
        assert {one["job_id"] for one in quick} == set(every)
        uid = machine.users[user].uid
        own = call("machine", "all_job_details", uid=uid)
        assert {one["job_id"] for one in own} == {
            one["job_id"] for one in quick if one["user_id"] == uid
        }
        assert job in {one["job_id"] for one in own}
        assert call("machine", "all_job_details", uid=uid + 4000, full=True) == []
    finally:
        for each in (job, array):
            assert call("jobs", "cancel", str(each)) is True


def test_jobs_are_changed(call: Call, machine: Sandbox) -> None:
    user = next(iter(machine.users))
    job = str(submit_to(machine, "#!/bin/sh\nsleep 300\n", user=user, output="/dev/null"))
    wait_until(lambda: state_of(machine, int(job)) == "RUNNING")
    assert call("jobs", "suspend", job) is True
    assert state_of(machine, int(job)) == "SUSPENDED"
    assert call("jobs", "resume", job) is True
    assert call("jobs", "resume", job)["error"] == "SlurmError"
    assert state_of(machine, int(job)) == "RUNNING"
    (before,) = call("machine", "job_details", [job])[job]
    assert call("jobs", "requeue", job, hold=True) is True
    assert call("jobs", "exclude_nodes", job, [before["nodes"]]) is True
    wait_until(lambda: state_of(machine, int(job)) == "PENDING")
    (held,) = call("machine", "job_details", [job])[job]
    assert (held["restart_cnt"], held["exc_nodes"]) == (1, before["nodes"])
    assert held["priority"] == 0
    assert call("jobs", "requeue", job)["error"] == "SlurmError"
    assert call("jobs", "release", job, clear_reason=False) is True
    # Slurm lets a requeued job wait for two minutes.
    (released,) = call("machine", "job_details", [job])[job]
    assert (released["priority"] > 0, released["job_state"]) == (True, "PENDING")
    assert released["exc_nodes"] == before["nodes"]
    assert call("jobs", "cancel", job) is True
    wait_until(lambda: state_of(machine, int(job)) == "CANCELLED")
    assert call("jobs", "suspend", job) is False
    pending = str(submit_to(machine, "#!/bin/sh\n", user=user, begin="now+1hour"))
    assert call("jobs", "hold", pending, by_user=True) is True
    assert call("jobs", "release", pending, clear_reason=False, user=user) is True
    assert call("jobs", "hold", pending, "not yet") is True
    assert call("jobs", "release", pending, user=user)["error"] == "SlurmRefused"
    assert call("jobs", "cancel", pending) is True
    for method in ("suspend", "requeue", "hold"):
        assert call("jobs", method, "99999") is False
    # Of this one scancel says nothing.
    assert call("jobs", "cancel", "99999") is True


def test_a_cloud_that_saves_power_is_no_failure(call: Call, machine: Sandbox) -> None:
    off = nodes_of(call)
    assert {"cloud1", "cloud2"} <= off.keys(), "hidden, but not gone"
    for name in ("cloud1", "cloud2"):
        assert {"CLOUD", "POWERED_DOWN"} <= set(off[name].flags)
        assert not is_failing(off[name].state)
        assert is_available(off[name].state)
        assert nodes_of(call, name)[name].state == off[name].state
    user = next(iter(machine.users))
    job = submit_to(machine, "#!/bin/sh\n", user=user, partition="cloud", output="/dev/null")
    try:
        wait_until(lambda: any("POWERING_UP" in node.flags for node in nodes_of(call).values()))
        booting = [node for node in nodes_of(call).values() if "POWERING_UP" in node.flags]
        assert not any(is_failing(node.state) for node in booting)
        # It never comes: 22.05 then hides it again, later versions say that it failed.
        wait_until(lambda: all("POWERING_UP" not in node.flags for node in nodes_of(call).values()))
        nodes = nodes_of(call)
        assert {"cloud1", "cloud2"} <= nodes.keys()
        failed = [node for node in nodes.values() if is_failing(node.state)]
        if machine.plan.slurm_version >= "24.11":
            (gone,) = failed
            assert (gone.base, gone.reason) == ("DOWN", "ResumeTimeout reached")
            assert gone.reason_user == machine.plan.spec.slurm_user
        else:
            assert failed == []
    finally:
        call("jobs", "cancel", str(job))


def test_a_restart_is_seen(call: Call, machine: Sandbox) -> None:
    (ping,) = call("machine", "pings")
    assert (ping["daemon"], ping["role"], ping["up"]) == ("slurmctld", "primary", True)
    config = call("machine", "config_items")
    assert (config["cluster_name"], config["slurm_user_name"]) == ("sandbox", "slurm")
    assert config["max_job_cnt"] == config["max_job_count"] == 200000
    assert config["slurm_version"] == machine.plan.slurm_version
    before = call("machine", "read_start_time")
    assert call("machine", "read_start_time") == before
    machine.stop_service("slurmctld")
    (ping,) = call("machine", "pings")
    assert ping["up"] is False
    assert call("machine", "nodes")["error"] in ("SlurmDown", "SlurmUnavailable")
    machine.start_service("slurmctld")
    wait_until(lambda: isinstance(call("machine", "read_start_time"), str))
    assert call("machine", "read_start_time") > before


def test_slurmdbd_is_asked_for_itself(booked_sandbox: Sandbox) -> None:
    question = b'["machine","pings",[],{}]\n'
    words = call_words(booked_sandbox)
    answer = msgspec.json.decode(booked_sandbox.run(words, input=question, text=False).stdout)
    assert [(ping["daemon"], ping["up"]) for ping in answer] == [
        ("slurmctld", True),
        ("slurmdbd", True),
    ]
