"""Slurm's triggers and their helper: set, set again, with a secret, and never a delay."""

import json
import socket
import stat
import time
from pathlib import Path

import pytest
from job_submission import wait_until
from sandboxes import passable_directory
from sensor_cluster import MakeWatching, cluster, make, scontrol
from sensor_daemon import Front, Watching

from steward.capture.sensor.triggers import TRIGGER_EVENTS
from steward.core.events import CONTROLLER_STATE
from steward.sandbox import Sandbox

__all__ = ["cluster", "make"]

pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(600)]

DAEMONS = ("primary_", "backup_")
"""Events of Slurm's daemons, not of nodes."""


def test_slurmctlds_triggers_wake_the_sensor(cluster: Sandbox, make: MakeWatching) -> None:
    """The next periodic poll is an hour away."""
    with passable_directory() as path:
        # A slurmctld that has just started fires for that too, whenever its first round comes.
        front = Front(path, *(event for event in TRIGGER_EVENTS if not event.startswith(DAEMONS)))
        watching = make(helper=str(front.helper), interval_s=3600.0)
        assert len(watching.all_triggers()) >= 6
        front.open(watching)
        scontrol(cluster, "update", "nodename=node1", "state=drain", "reason=first round")
        wait_until(lambda: "DRAIN" in watching.replayed()["node1"], 60)
        scontrol(cluster, "update", "nodename=node1", "state=resume")
        scontrol(cluster, "update", "nodename=node2", "state=down", "reason=bad DIMM; see #7 Key=x")
        wait_until(lambda: watching.replayed()["node2"].startswith("DOWN"), 60)
        wait_until(lambda: watching.replayed()["node1"] == "IDLE", 60)
        (down,) = [body for body in watching.of_node("node2") if body.failed]
        assert (down.source, down.old_state) == ("trigger", "IDLE")
        assert down.reason == "bad DIMM; see #7 Key=x"
        assert (down.reason_uid, down.reason_user) == (0, "root")
        scontrol(cluster, "update", "nodename=node2", "state=resume")
        wait_until(lambda: watching.replayed()["node2"] == "IDLE", 60)
        assert sum(body.failed for body in watching.of_node("node2")) == 1
        # That its slurmd had not answered yet when it was resumed is no failure.
        assert not any(body.failed for body in watching.of_node("node1"))


@pytest.mark.long
def test_drains_that_no_look_shows_are_told(cluster: Sandbox, make: MakeWatching) -> None:
    """The next periodic poll is an hour away, and slurmctld reports after the node is back."""
    watching = make(interval_s=3600.0)
    time.sleep(61)  # it does not know reports from before its start
    nodes = ("node1", "node2", "node3")
    for node in nodes:
        scontrol(cluster, "update", f"nodename={node}", "state=drain", "reason=for a moment")
        scontrol(cluster, "update", f"nodename={node}", "state=resume")

    def states(node: str) -> list[str]:
        return [body.state for body in watching.of_node(node)]

    wait_until(lambda: all(states(node)[-2:] == ["IDLE+DRAIN", "IDLE"] for node in nodes), 60)
    assert not any(body.failed for node in nodes for body in watching.of_node(node))


def test_triggers_that_are_lost_are_set_again_and_stale_ones_cleared(
    cluster: Sandbox, make: MakeWatching
) -> None:
    slurm = cluster.plan.slurm_user
    watching = make()
    ours = watching.all_triggers()
    assert len(ours) >= 6
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


def test_a_configuration_that_is_read_again_is_told(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    assert len(watching.all_triggers()) >= 6

    def told() -> list[bool]:
        bodies = [event.body for event in watching.events(CONTROLLER_STATE)]
        # Later versions begin a new slurmctld for it.
        return [body.up for body in bodies if body.reconfigured or body.restarted]

    before = len(told())
    scontrol(cluster, "reconfigure")
    wait_until(lambda: len(told()) > before, 60)
    assert all(told())


@pytest.mark.wide
def test_triggers_survive_a_slurmctld_that_had_not_saved_them(
    cluster: Sandbox, make: MakeWatching
) -> None:
    watching = make()
    ours = watching.all_triggers()
    assert len(ours) >= 6
    cluster.kill_controller()
    Path(cluster.spool, "trigger_state").unlink(missing_ok=True)
    Path(cluster.spool, "trigger_state.old").unlink(missing_ok=True)
    cluster.restart_controller("-i")
    wait_until(lambda: watching.triggers() == ours, 60)


def test_the_secret_is_seen_by_nobody_else(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make()
    assert len(watching.all_triggers()) >= 6
    user = next(iter(cluster.users))
    secret = watching.secret.read_bytes().strip()
    found = watching.secret.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert len(secret) >= 32
    assert cluster.run(["cat", str(watching.secret)], user=user, check=False).returncode != 0
    shown = cluster.run(["strigger", "--get"], user=user).stdout
    assert str(watching.secret) in shown
    assert secret.decode() not in shown
    assert watching.bytes_anywhere(secret) == []
    # A repeated installation keeps existing files.
    watching.install()
    assert watching.secret.read_bytes().strip() == secret


def forge(watching: Watching, user: str, secret: str) -> str:
    """Return the sensor's reply to a forged report."""
    args = {"cluster": "box", "event": "down", "nodes": "x"}
    message = {"v": 1, "action": "sensor.wake", "args": args, "auth": secret}
    script = (
        "import socket,sys\n"
        "s=socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
        "s.sendall(sys.argv[2].encode()+b'\\n'); print(s.recv(4096).decode().strip())\n"
    )
    words = ["/usr/bin/python3", "-I", "-c", script, watching.settings.wake_socket("box")]
    done = watching.cluster.run([*words, json.dumps(message)], user=user, check=False)
    return str(done.stdout).strip()


def test_a_forged_wake_up_costs_a_look_at_most(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=3600.0)
    secret = watching.secret.read_text().strip()
    user, slurm = next(iter(cluster.users)), cluster.plan.slurm_user
    assert '"kind":"UnknownCredential"' in forge(watching, slurm, "a" * 43)
    reply = forge(watching, user, secret)
    assert not reply or '"kind":"PermissionRefused"' in reply
    before = len(watching.events())
    for _ in range(20):
        assert forge(watching, slurm, secret) == '{"ok":true,"answer":{}}'
    assert len(watching.events()) == before
    assert "rejected a request on" in watching.log()
    assert secret not in watching.log()


@pytest.mark.wide
def test_a_helper_never_hangs(cluster: Sandbox, make: MakeWatching) -> None:
    """The socket does not answer, and SIGALRM is blocked, as slurmctld leaves it."""
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
