"""Every operation on a real cluster: what it does, what it refuses, and to whom."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import msgspec
import pytest
from steward_daemon import STEWARD, Daemon
from submitting import state_of, submit_to, wait_until

from steward.access import Access, Asker
from steward.actions import Registry
from steward.automation.catalogue import operations
from steward.automation.running import Runner
from steward.config import AccessSettings
from steward.config_accounting import MailSettings
from steward.config_automation import ActionsSettings
from steward.sandbox import Sandbox, SandboxSpec
from steward.settings.file import Loaded, render
from steward.slurm.changing import Changing

pytestmark = [pytest.mark.matrix, pytest.mark.wide]

USERS = ("ada", "bela", "olga", "carl")
"""An owner of jobs, another user, an operator and an administrator."""
SLEEP = "#!/bin/sh\nsleep 600\n"


class Hook(BaseHTTPRequestHandler):
    """A webhook that keeps what it is told."""

    told: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.told.append(json.loads(self.rfile.read(length)))
        self.send_response(404 if self.path == "/gone" else 204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """A cluster with a daemon that has people of every standing."""

    def __init__(self, cluster: Sandbox, port: int) -> None:
        self.cluster = cluster
        home = Path(cluster.directory) / "steward"
        home.mkdir()
        shutil.chown(home, "slurm")
        self.daemon = Daemon(cluster, home, user="slurm")
        self.programs = Path(cluster.directory) / "programs"
        self.mails = home / "mails"
        self.mails.touch()
        self.mails.chmod(0o666)
        mailer = home / "mailer"
        mailer.write_text(f'#!/bin/sh\n{{ echo "$@"; cat; }} >> {self.mails}\n')
        mailer.chmod(0o755)
        settings = msgspec.structs.replace(
            self.daemon.settings,
            access=AccessSettings(operators=("olga",), administrators=("carl",)),
            actions=ActionsSettings(
                programs_file=str(self.programs),
                webhooks={
                    "site": f"http://127.0.0.1:{port}/site",
                    "gone": f"http://127.0.0.1:{port}/gone",
                },
                timeout_s=30.0,
            ),
            mail=MailSettings(program=str(mailer)),
        )
        self.daemon.settings = settings
        self.daemon.config.write_text(render(Loaded(settings)))
        self.nodes = sorted(set(self.said("sinfo", "-h", "-N", "-o", "%N").split()))

    def said(self, *words: str) -> str:
        return str(self.cluster.run(list(words)).stdout)

    def run(self, ref: str, *options: str, by: str = "carl", **given: Any) -> dict[str, Any]:
        """Have it done through the daemon's socket, or here where ``by`` is ``root``."""
        done = self._asked(ref, options, by, given)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) == (answer["status"] == "succeeded"), answer
        return answer

    def result(self, ref: str, *options: str, by: str = "carl", **given: Any) -> Any:
        answer = self.run(ref, *options, by=by, **given)
        assert answer["status"] == "succeeded", answer
        return answer["result"]

    def refused(self, ref: str, *options: str, by: str = "carl", **given: Any) -> str:
        """Why it was not done, and that nothing was begun."""
        before = self.audited()
        done = self._asked(ref, options, by, given)
        assert done.returncode in (1, 2), done.stdout
        assert not done.stdout, done.stdout
        assert self.audited() == before
        return str(done.stderr)

    def _asked(self, ref: str, options: tuple[str, ...], by: str, given: dict[str, Any]) -> Any:
        words = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in given.items()
        ]
        user = "" if by == "root" else by
        return self.daemon.ask(
            "action", "run", ref, *words, *options, "--json", user=user, check=False
        )

    def audited(self) -> list[Any]:
        found: list[Any] = self.daemon.ask_json("action", "audit")["actions"]
        return found

    def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.result("slurm.node.get", nodes=name)[name]
        return found

    def heal(self) -> None:
        """Bring every node back, whoever took it out."""
        for name in self.nodes:
            self.result("slurm.node.resume", "--force", by="root", nodes=name)
        wait_until(lambda: all(self.node(name)["state"] == "IDLE" for name in self.nodes))


@pytest.fixture(scope="module")
def hook() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def site(slurm_version: str, hook: int) -> Iterator[Site]:
    spec = SandboxSpec(slurm=slurm_version, user_names=USERS)
    with Sandbox.up(spec, say=print) as cluster:
        site = Site(cluster, hook)
        site.daemon.start()
        yield site
        site.daemon.close()


@pytest.fixture
def healthy(site: Site) -> Iterator[Site]:
    yield site
    site.heal()


def test_drain_and_resume(healthy: Site) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    both = f"{one},{two}"
    answer = site.run("slurm.node.drain", nodes=both, reason="bad DIMM")
    assert answer["status"] == "succeeded"
    assert answer["parameters"] == {"nodes": both, "reason": "bad DIMM"}
    for name in (one, two):
        assert answer["result"][name] == {
            "old_state": "IDLE",
            "state": "IDLE+DRAIN",
            "reason": "bad DIMM (steward: carl)",
            "changed": True,
        }
        assert site.node(name)["reason"] == "bad DIMM (steward: carl)"
    again = site.result("slurm.node.drain", nodes=one, reason="bad DIMM")
    assert again[one]["changed"] is False
    back = site.result("slurm.node.resume", nodes=both)
    # Slurm asks its slurmd whether it is there before it is used.
    assert all("DRAIN" not in back[name]["state"] for name in (one, two))
    wait_until(lambda: site.node(one)["state"] == "IDLE")
    nothing = site.result("slurm.node.resume", nodes=both)
    assert not any(line["changed"] for line in nothing.values())


def test_a_dry_run_changes_nothing(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    before = site.audited()
    answer = site.run("slurm.node.drain", "--dry-run", nodes=one, reason="bad DIMM")
    assert (answer["dry_run"], answer["id"]) == (True, 0)
    assert answer["result"][one]["would_change"] is True
    assert site.node(one)["state"] == "IDLE"
    assert site.audited() == before


def test_down(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    done = site.result("slurm.node.down", by="root", nodes=one, reason="no power")
    assert done[one]["state"].startswith("DOWN")
    assert done[one]["reason"] == "no power (steward: root)"
    assert site.node(one)["state"].startswith("DOWN")
    assert "show the reason" not in site.refused("slurm.node.drain", nodes=one, reason="x")


def test_unknown_nodes_are_refused_before_anything_changes(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    for ref, more in (
        ("slurm.node.down", {"reason": "x"}),
        ("slurm.node.drain", {"reason": "x"}),
        ("slurm.node.resume", {}),
        ("slurm.node.update", {"infos": {"weight": 3}}),
        ("slurm.node.reserve", {"reservation_name": "r"}),
        ("slurm.node.unreserve", {"reservation_name": "r"}),
        ("slurm.node.get", {}),
        ("slurm.node.jobs", {}),
    ):
        assert "nope" in site.refused(ref, nodes=f"{one},nope", **more), ref
    assert site.node(one)["state"] == "IDLE"


def test_a_reason_that_somebody_else_gave_stays(healthy: Site) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    site.said("scontrol", "update", f"nodename={one}", "state=drain", "reason=I look at it = ada")
    for by in ("carl", "root"):
        why = site.refused("slurm.node.drain", by=by, nodes=f"{one},{two}", reason="mine")
        assert "I look at it = ada" in why
        assert "--force" in why
        assert "I look" in site.refused("slurm.node.resume", by=by, nodes=one)
        assert "I look" in site.refused("slurm.node.down", by=by, nodes=one, reason="mine")
        for name in ("state", "STATE", "node_state", "NodeState", "state_up", "st_ate"):
            infos = {name: "RESUME"}
            assert "I look" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
        infos = {"state_up": "RESUME", "state": "DRAIN", "reason": "x"}
        assert "two ways" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
        infos = {"reason": "mine"}
        assert "I look" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
    assert site.node(two)["state"] == "IDLE"
    done = site.result("slurm.node.drain", "--force", nodes=one, reason="mine")
    assert done[one]["reason"] == "mine (steward: carl)"
    # carl's now, which root's is not.
    assert "mine" in site.refused("slurm.node.resume", by="root", nodes=one)
    assert "DRAIN" not in site.result("slurm.node.resume", nodes=one)[one]["state"]


def test_a_reason_that_a_resume_left_is_nobodys(healthy: Site) -> None:
    """Slurm 24.11 leaves it; where it is taken away there is nothing to be kept."""
    site, one = healthy, healthy.nodes[0]
    site.said("scontrol", "update", f"nodename={one}", "state=drain", "reason=fan")
    site.said("scontrol", "update", f"nodename={one}", "state=resume")
    is_left = site.node(one)["reason"] is not None
    done = site.result("slurm.node.drain", nodes=one, reason="disk")
    behind = "; was: fan" if is_left else ""
    assert done[one]["reason"] == f"disk{behind} (steward: carl)"


def test_slurmctlds_own_reason_is_kept_behind(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    words = ["scontrol", "update", f"nodename={one}", "state=down", "reason=Not responding"]
    site.cluster.run(words, user="slurm")
    done = site.result("slurm.node.drain", nodes=one, reason="cable")
    assert done[one]["reason"] == "cable; was: Not responding (steward: carl)"


def test_update_of_nodes(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    done = site.result("slurm.node.update", nodes=one, infos={"weight": 7, "comment": "on loan"})
    assert done[one]["changed"] is True
    assert site.node(one)["weight"] == 7
    site.result("slurm.node.update", nodes=one, infos={"state": "drain", "reason": "by update"})
    assert site.node(one)["reason"] == "by update (steward: carl)"
    site.result("slurm.node.resume", nodes=one)
    assert "reason" in site.refused("slurm.node.update", nodes=one, infos={"state": "drain"})
    assert "nodename" in site.refused("slurm.node.update", nodes=one, infos={"nodename": "node2"})
    assert site.node(one)["weight"] == 7
    site.result("slurm.node.update", nodes=one, infos={"weight": 1, "comment": ""})


def test_reserve_and_unreserve(healthy: Site) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    made = site.result("slurm.node.reserve", by="olga", nodes=one, reservation_name="repair")
    assert (made["created"], made["nodes"]) == (True, one)
    shown = site.said("scontrol", "-o", "show", "reservation", "repair")
    assert "Users=root" in shown
    for flag in ("MAINT", "IGNORE_JOBS", "OVERLAP"):
        assert flag in shown
    more = site.result("slurm.node.reserve", nodes=f"{one},{two}", reservation_name="repair")
    assert (more["created"], more["changed"]) == (False, True)
    assert site.cluster.run(["scontrol", "show", "reservation"]).stdout.count("repair") == 1
    same = site.result("slurm.node.reserve", nodes=two, reservation_name="repair")
    assert same["changed"] is False
    less = site.result("slurm.node.unreserve", nodes=one, reservation_name="repair")
    assert (less["nodes"], less["deleted"]) == (two, False)
    gone = site.result("slurm.node.unreserve", nodes=two, reservation_name="repair")
    assert gone["deleted"] is True
    assert "repair" not in site.cluster.run(["scontrol", "show", "reservation"]).stdout
    assert "repair" in site.refused("slurm.node.unreserve", nodes=two, reservation_name="repair")


def test_a_reservation_with_props(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    props = {"start_time": "now+1hour", "duration": 60, "users": ["ada"], "flags": "OVERLAP"}
    site.result("slurm.node.reserve", nodes=one, reservation_name="class", props=props)
    shown = site.said("scontrol", "-o", "show", "reservation", "class")
    assert "Users=ada" in shown
    assert "Duration=01:00:00" in shown
    assert "MAINT" not in shown
    site.result("slurm.node.unreserve", nodes=one, reservation_name="class")
    wrong: dict[str, Any] = {"nodes": one, "reservation_name": "x", "props": {"until": "never"}}
    assert "until" in site.refused("slurm.node.reserve", **wrong)
    failed = site.run("slurm.node.reserve", **{**wrong, "props": {"users": "nosuchuser"}})
    assert failed["status"] == "failed"


def test_partition(healthy: Site) -> None:
    site = healthy
    done = site.result("slurm.partition.update", partition="debug", infos={"state": "DOWN"})
    assert (done["old_state"], done["state"]) == ("UP", "DOWN")
    site.result("slurm.partition.update", partition="debug", infos={"state": "UP"})
    wrong: dict[str, Any] = {"partition": "nope", "infos": {"state": "UP"}}
    assert "nope" in site.refused("slurm.partition.update", **wrong)
    bad = {"nodename": "x"}
    assert "nodename" in site.refused("slurm.partition.update", partition="debug", infos=bad)


def test_configuration(site: Site) -> None:
    assert site.result("slurm.config.get", by="ada", item="cluster_name") == {
        "cluster_name": "sandbox"
    }
    every = site.result("slurm.config.get", by="ada")
    assert every["slurm_user"].startswith("slurm") or every["slurm_user_name"] == "slurm"
    assert "nosuchitem" in site.refused("slurm.config.get", by="ada", item="nosuchitem")


def test_jobs_are_found_and_shown(site: Site) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada", hold=True, job_name="found")
    other = submit_to(
        site.cluster, SLEEP, user="bela", hold=True, job_name="found", exclude=site.nodes[0]
    )
    ids = site.result("slurm.job.find", by="bela", criterias={"name": "found"})
    assert sorted(ids) == [job, other]
    criterias = {"name": "found", "user_id": site.cluster.users["ada"].uid}
    assert site.result("slurm.job.find", by="ada", criterias=criterias) == [job]
    assert "nosuch" in site.refused("slurm.job.find", criterias={"nosuch": 1})
    shown = site.result("slurm.job.get", by="bela", jobids=f"{job},{other}")
    assert [shown[str(one)][0]["name"] for one in (job, other)] == ["found", "found"]
    assert site.result("slurm.job.step.get", by="ada", jobids=[job]) == {str(job): {}}
    # Which nodes it must not have, scontrol alone shows.
    only = {"name": "found", "exc_nodes": site.nodes[0]}
    assert site.result("slurm.job.find", criterias=only) == [other]
    assert site.result("slurm.job.get", jobids="999999") == {"999999": []}
    assert "1;2" in site.refused("slurm.job.get", jobids="1;2")
    site.result("slurm.job.cancel", by="root", jobids=[job, other])


def test_steps(site: Site) -> None:
    script = "#!/bin/sh\nsrun --overlap sleep 300\n"
    job = submit_to(site.cluster, script, user="ada")

    def steps() -> Any:
        return site.result("slurm.job.step.get", by="ada", jobids=[job])[str(job)]

    wait_until(lambda: len(steps()) >= 2)
    assert {name.rpartition(".")[2] for name in steps()} >= {"0"} or "0" in steps()
    site.result("slurm.job.cancel", by="ada", jobids=job)


def test_owners_and_their_jobs(site: Site) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada", begin="now+1hour")
    for ref in ("cancel", "hold", "release", "requeue", "suspend", "resume"):
        why = site.refused(f"slurm.job.{ref}", by="bela", jobids=job)
        assert "operators" in why, ref
    held = site.result("slurm.job.hold", by="ada", jobids=job, reason="not yet")
    assert held[str(job)]["changed"] is True
    assert "JobHeldUser" in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    assert site.result("slurm.job.hold", by="ada", jobids=job)[str(job)]["changed"] is False
    assert site.result("slurm.job.release", by="ada", jobids=job)[str(job)]["changed"] is True
    site.result("slurm.job.hold", by="olga", jobids=job, reason="quota")
    assert "JobHeldAdmin" in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
    site.result("slurm.job.release", by="olga", jobids=job)
    for ref in ("suspend", "resume"):
        assert "operators" in site.refused(f"slurm.job.{ref}", by="ada", jobids=job)
    assert site.result("slurm.job.cancel", by="ada", jobids=job)[str(job)]["changed"] is True
    wait_until(lambda: state_of(site.cluster, job) == "CANCELLED")
    over = site.result("slurm.job.cancel", by="ada", jobids=job)
    assert over[str(job)]["changed"] is False
    assert "999999" in site.refused("slurm.job.cancel", by="root", jobids="999999")
    assert "999999" in site.refused("slurm.job.hold", by="root", jobids=[job, 999999])


def test_running_jobs(site: Site) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.result("slurm.job.suspend", by="olga", jobids=job)
    assert state_of(site.cluster, job) == "SUSPENDED"
    site.result("slurm.job.resume", by="olga", jobids=job)
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    node = site.said("squeue", "-h", "-j", str(job), "-o", "%N").strip()
    site.result("slurm.job.requeue", by="ada", jobids=job, exclude=node)
    # Slurm lets a requeued job wait for two minutes.
    wait_until(lambda: state_of(site.cluster, job) == "PENDING")
    shown = site.result("slurm.job.get", jobids=job)[str(job)][0]
    assert node in json.dumps(shown)
    assert "ExcNodeList=" + node in site.said("scontrol", "show", "job", str(job))
    assert "JobHeld" not in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    dry = site.result("slurm.job.cancel", "--dry-run", by="ada", jobids=job)
    assert dry[str(job)]["would_change"] is True
    assert state_of(site.cluster, job) == "PENDING"
    site.result("slurm.job.cancel", by="ada", jobids=job)


def reason_of(site: Site, job: object) -> str:
    return site.said("squeue", "-h", "-a", "-j", str(job), "-o", "%r").strip()


def is_waiting(site: Site, job: int) -> bool:
    # Not so while the run that was ended still is cleared away.
    return "JobState=PENDING" in site.said("scontrol", "show", "job", str(job))


@pytest.fixture
def empty(site: Site) -> Iterator[Site]:
    yield site
    for name in USERS:
        site.said("scancel", "-u", name)
    wait_until(lambda: not site.said("squeue", "-h", "-u", ",".join(USERS)))


def test_a_requeue_ends_nobodys_hold(empty: Site) -> None:
    """An owner gets no further with Steward's rights than with Slurm's own commands."""
    site = empty
    one = site.nodes[0]
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.said("scontrol", "hold", str(job))
    assert reason_of(site, job) == "JobHeldAdmin"
    # Nor may it become the owner's own hold.
    held = site.result("slurm.job.hold", by="ada", jobids=job)
    assert held[str(job)]["changed"] is False
    assert reason_of(site, job) == "JobHeldAdmin"
    done = site.result("slurm.job.requeue", by="ada", jobids=job, exclude=one)
    assert done[str(job)]["changed"] is True
    wait_until(lambda: is_waiting(site, job))
    for _ in range(2):
        assert reason_of(site, job) == "JobHeldAdmin"
        assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
        assert "administrator" in site.refused("slurm.job.release", "--force", by="ada", jobids=job)
        # Waiting now, and an operator's requeue is no release either.
        site.result("slurm.job.requeue", by="olga", jobids=job, exclude=f"{one},{site.nodes[1]}")
    assert f"ExcNodeList={one[:-1]}" in site.said("scontrol", "show", "job", str(job))
    site.result("slurm.job.release", by="olga", jobids=job)
    assert "Held" not in reason_of(site, job)


def test_a_requeue_leaves_what_the_bank_says(empty: Site) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    changing = Changing("box", site.daemon.settings.cluster["box"])
    assert changing.hold(str(job), "steward: the account is empty")
    site.result("slurm.job.requeue", by="ada", jobids=job, exclude=site.nodes[0])
    wait_until(lambda: is_waiting(site, job))
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "the account is empty" in site.said("scontrol", "show", "job", str(job))
    assert "is empty" in site.refused("slurm.job.release", by="olga", jobids=job)


def test_a_hold_of_what_runs_is_ended(empty: Site) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.result("slurm.job.hold", by="olga", jobids=job)
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
    site.result("slurm.job.release", by="olga", jobids=job)
    assert "Held" not in reason_of(site, job)


def test_an_operators_hold_takes_an_owners_place(empty: Site) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada", begin="now+1hour")
    site.result("slurm.job.hold", by="ada", jobids=job)
    assert reason_of(site, job) == "JobHeldUser"
    site.result("slurm.job.hold", by="olga", jobids=job)
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)


@pytest.mark.parametrize("by", ["ada", "olga"])
def test_what_is_held_after_a_requeue_is_released(empty: Site, by: str) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.said("scontrol", "requeuehold", str(job))
    wait_until(lambda: is_waiting(site, job))
    assert "held" in reason_of(site, job)
    assert site.result("slurm.job.hold", by="ada", jobids=job)[str(job)]["changed"] is False
    done = site.result("slurm.job.release", by=by, jobids=job)
    assert done[str(job)]["changed"] is True
    assert "held" not in reason_of(site, job).lower()
    assert "Priority=0" not in site.said("scontrol", "show", "job", str(job))


def test_an_array_in_several_states(empty: Site) -> None:
    """What runs is requeued, what waits stays, and nothing is left held."""
    site = empty
    full = submit_to(site.cluster, SLEEP, user="ada", array="0-5%2")
    wait_until(lambda: site.said("squeue", "-h", "-t", "R", "-o", "%A").count("\n") == 2)
    done = site.result("slurm.job.requeue", by="ada", jobids=full, exclude=site.nodes[0])
    assert done[str(full)]["changed"] is True
    shown = site.said("scontrol", "-o", "show", "job", str(full)).splitlines()
    assert len(shown) >= 2
    assert all(f"ExcNodeList={site.nodes[0]} " in line for line in shown), shown
    assert not any("Priority=0 " in line for line in shown), shown
    # Of those that wait, the ones that nobody holds.
    site.said("scontrol", "hold", f"{full}_5")
    site.result("slurm.job.hold", by="ada", jobids=full)
    assert reason_of(site, f"{full}_5") == "JobHeldAdmin"
    assert reason_of(site, f"{full}_4") == "JobHeldUser"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=full)
    site.result("slurm.job.release", by="ada", jobids=f"{full}_4")
    assert " Priority=0 " not in site.said("scontrol", "-o", "show", "job", f"{full}_4")
    again = site.result("slurm.job.release", by="olga", jobids=full)
    assert again[str(full)]["changed"] is True
    assert " Priority=0 " not in site.said("scontrol", "-o", "show", "job", str(full))


def test_a_requeue_that_was_killed_is_ended_by_the_next(empty: Site) -> None:
    """As it is found where nothing came after ``requeuehold``."""
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    settings = site.daemon.settings.cluster["box"]
    changing = Changing("box", settings)
    one = site.nodes[0]
    said = f"steward: requeued away from {one} (steward: olga)"
    assert changing.comment(str(job), said)
    assert changing.requeue(str(job), hold=True)
    wait_until(lambda: is_waiting(site, job))
    access = Access(site.daemon.settings.access, os.getuid(), lambda _cluster: None)
    runner = Runner(site.daemon.settings, access, Registry((), {}))
    asked = ("slurm.job.requeue", {"jobids": [job], "exclude": one}, Asker(uid=0, user="root"))
    # Whoever was to do it knows by this that it has to be done again.
    assert runner.check(*asked, speaker="olga") is False
    done = site.result("slurm.job.requeue", by="olga", jobids=job, exclude=one)
    assert done[str(job)]["changed"] is True
    assert runner.check(*asked, speaker="olga") is True
    shown = site.said("scontrol", "-o", "show", "job", str(job))
    assert f"ExcNodeList={one} " in shown
    assert "requeued away" not in shown
    assert "held" not in shown


def test_what_ran_last_on_a_node(site: Site) -> None:
    job = submit_to(site.cluster, "#!/bin/sh\nexit 3\n", user="ada", nodelist=site.nodes[0])

    def last() -> Any:
        return site.result("slurm.node.jobs", by="olga", nodes=site.nodes[0], limit=5)

    wait_until(lambda: any(row["job_id"] == str(job) for row in last()[site.nodes[0]]))
    wait_until(lambda: last()[site.nodes[0]][0]["exit_code"] == 3)
    assert "operators" in site.refused("slurm.node.jobs", by="ada", nodes=site.nodes[0])


def test_script_from_the_archive(site: Site) -> None:
    job = submit_to(site.cluster, "#!/bin/sh\n# for slurm.script.get\n", user="ada")
    wait_until(
        lambda: (
            site.daemon.ask("archive", "show", str(job), user="ada", check=False).returncode == 0
        )
    )
    shown = site.result("slurm.script.get", by="ada", jobid=str(job))
    assert shown["script"] == "#!/bin/sh\n# for slurm.script.get\n"
    assert str(job) in site.refused("slurm.script.get", by="bela", jobid=str(job)) or (
        site.result("slurm.script.get", by="bela", jobid=str(job))["script"] is None
    )


def test_rights(site: Site) -> None:
    """Everything that changes is refused to whom it is not for, and nothing was begun."""
    one = site.nodes[0]
    given: dict[str, dict[str, Any]] = {
        "slurm.node.down": {"nodes": one, "reason": "x"},
        "slurm.node.drain": {"nodes": one, "reason": "x"},
        "slurm.node.resume": {"nodes": one},
        "slurm.node.update": {"nodes": one, "infos": {"weight": 2}},
        "slurm.node.reserve": {"nodes": one, "reservation_name": "r"},
        "slurm.node.unreserve": {"nodes": one, "reservation_name": "r"},
        "slurm.partition.update": {"partition": "main", "infos": {"state": "DOWN"}},
        "slurm.trigger.set": {"program": "/bin/true", "event": "down"},
        "slurm.trigger.unset": {"trigger_ids": "1"},
        "slurm.job.suspend": {"jobids": 1},
        "slurm.job.resume": {"jobids": 1},
        "notify.email": {"to": "root", "subject": "x"},
        "notify.webhook": {"name": "site", "subject": "x"},
        "local.command": {"program": "/bin/true"},
    }
    changing = {
        one.ref: one for one in operations().values() if one.changes and one.right != "owner"
    }
    assert set(given) == set(changing)
    for ref, parameters in given.items():
        right = changing[ref].right
        assert f"{right}s" in site.refused(ref, by="ada", **parameters), ref
        if right == "administrator":
            assert "administrators" in site.refused(ref, by="olga", **parameters), ref
    assert site.node(one)["state"] == "IDLE"


def test_mail(site: Site) -> None:
    done = site.result(
        "notify.email", by="olga", to="root,ops@example.org", subject="node1 is down", body="So."
    )
    assert done == {"to": ["root", "ops@example.org"], "sent": True}
    mail = site.mails.read_text()
    assert "node1 is down" in mail
    assert "root,ops@example.org" in mail
    assert "So." in mail
    dry = site.result("notify.email", "--dry-run", by="olga", to="root", subject="never")
    assert dry["sent"] is False
    assert "never" not in site.mails.read_text()
    why = site.refused("notify.email", by="olga", to="-oQ/tmp,x", subject="x")
    assert "no address" in why


def test_webhook(site: Site) -> None:
    done = site.result("notify.webhook", by="olga", name="site", subject="s", body={"n": 1})
    assert done["answer"] == 204
    told = Hook.told[-1]
    assert (told["subject"], told["body"], told["by"]) == ("s", {"n": 1}, "olga")
    count = len(Hook.told)
    site.result("notify.webhook", "--dry-run", by="olga", name="site", subject="s")
    assert len(Hook.told) == count
    gone = site.run("notify.webhook", by="olga", name="gone", subject="s")
    assert (gone["status"], "404" in gone["message"]) == ("failed", True)
    why = site.refused("notify.webhook", by="olga", name="http://evil", subject="s")
    assert "names no" in why


def list_programs(site: Site, *lines: str, mode: int = 0o644) -> None:
    site.programs.write_text("".join(f"{line}\n" for line in lines))
    site.programs.chmod(mode)


def test_programs(site: Site) -> None:
    program = Path(site.cluster.directory) / "program"
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\necho err >&2\n')
    program.chmod(0o755)
    assert "not in" in site.refused("local.command", program=str(program))
    list_programs(site, "# ours", f"{program}  # a test's", "/bin/false", "/bin/sleep")
    done = site.result("local.command", program=str(program), arguments=["a b", "$(id)", "; x"])
    assert done == {"exit_code": 0, "stdout": "<a b>\n<$(id)>\n<; x>\n", "stderr": "err\n"}
    failed = site.run("local.command", program="/bin/false")
    assert (failed["status"], failed["result"]["exit_code"]) == ("failed", 1)
    assert "not in" in site.refused("local.command", program="/bin/true")
    assert "not in" in site.refused("local.command", program=f"{program} x")
    dry = site.result("local.command", "--dry-run", program=str(program))
    assert dry["would_run"] is True
    program.chmod(0o777)
    assert "writable by nobody else" in site.refused("local.command", program=str(program))
    list_programs(site, "/bin/true", mode=0o664)
    assert "root's" in site.refused("local.command", program="/bin/true")
    list_programs(site, "/bin/true")
    os.chown(site.programs, site.cluster.users["carl"].uid, -1)
    assert "root's" in site.refused("local.command", program="/bin/true")
    site.programs.unlink()


def test_triggers(site: Site) -> None:
    program = "/bin/true"
    assert "not in" in site.refused("slurm.trigger.set", program=program, event="down")
    list_programs(site, program)
    number = site.result("slurm.trigger.set", program=f"{program} x", event="down")
    assert isinstance(number, int)
    again = site.result("slurm.trigger.set", program=f"{program} x", event="down")
    assert again == number
    one = site.nodes[0]
    on_node = site.result(
        "slurm.trigger.set", program=program, event="drain", nodes=one, offset="10"
    )
    assert on_node != number
    job = submit_to(site.cluster, SLEEP, user="ada", hold=True)
    ended = site.result("slurm.trigger.set", program=program, jobid=job, fini="true")
    shown = site.said("strigger", "--get")
    assert f"{ended}" in shown
    dry = site.result("slurm.trigger.set", "--dry-run", program=program, event="up")
    assert dry["event"] == "up"
    assert " up " not in site.said("strigger", "--get")
    refusals: tuple[dict[str, Any], ...] = (
        {"event": "burst_buffer"},
        {"event": "nosuchevent"},
        {},
        {"event": "down", "nodes": "nope"},
        {"jobid": "999999", "fini": "true"},
        {"jobid": str(job), "fini": "true", "event": "down"},
    )
    for given in refusals:
        assert site.refused("slurm.trigger.set", program=program, **given), given
    assert "never fires" in site.refused("slurm.trigger.set", program=program, event="burst_buffer")
    assert "999" in site.refused("slurm.trigger.unset", trigger_ids=f"{number},999")
    assert "slurm" in site.refused("slurm.trigger.unset", trigger_ids=number, user="ada")
    done = site.result("slurm.trigger.unset", trigger_ids=f"{number},{on_node},{ended}")
    assert all(line["changed"] for line in done.values())
    assert not any(
        line.split()[:1] == [str(number)] for line in site.said("strigger", "--get").splitlines()
    )
    site.result("slurm.job.cancel", by="root", jobids=job)
    site.programs.unlink()


def test_audit_says_who_and_what(healthy: Site) -> None:
    site, one = healthy, healthy.nodes[0]
    by_socket = site.run("slurm.node.drain", nodes=one, reason="who")["id"]
    by_root = site.run("slurm.node.resume", "--force", by="root", nodes=one)["id"]
    rows = {row["id"]: row for row in site.audited()}
    assert (rows[by_socket]["user"], rows[by_socket]["how"]) == ("carl", "socket")
    assert (rows[by_root]["user"], rows[by_root]["how"]) == ("root", "local")
    assert (rows[by_root]["force"], rows[by_socket]["force"]) == (True, False)
    assert rows[by_socket]["parameters"] == {"nodes": one, "reason": "who"}
    assert rows[by_socket]["status"] == "succeeded"
    assert rows[by_socket]["result"][one]["changed"] is True
    state = site.daemon.state
    for name in os.listdir(state):
        if name.startswith("audit.db"):
            status = os.stat(state / name)
            assert (status.st_uid, status.st_mode & 0o777) == (os.stat(state).st_uid, 0o600), name
    own = site.daemon.ask_json("action", "audit", user="carl")["actions"]
    assert by_root in {row["id"] for row in own} or all(row["user"] == "carl" for row in own)
    assert site.daemon.ask_json("action", "audit", user="ada")["actions"] == [
        row for row in site.audited() if row["user"] == "ada"
    ]


def test_an_action_that_was_killed_has_no_end(site: Site) -> None:
    list_programs(site, "/bin/sleep")
    running = site.cluster.popen(
        [
            STEWARD,
            *("action", "run", "local.command", "program=/bin/sleep", "arguments=300"),
        ],
        env={"STEWARD_CONFIG": str(site.daemon.config)},
    )

    def newest() -> Any:
        return site.audited()[0]

    wait_until(lambda: newest()["ref"] == "local.command" and newest()["status"] == "running")
    running.send_signal(signal.SIGKILL)
    running.wait(10)
    assert newest()["status"] == "unfinished"
    assert newest()["ended"] is None
    site.programs.unlink()


def test_an_action_that_takes_too_long(site: Site) -> None:
    list_programs(site, "/bin/sleep")
    settings = msgspec.structs.replace(
        site.daemon.settings,
        actions=msgspec.structs.replace(site.daemon.settings.actions, timeout_s=0.5),
    )
    hasty = site.daemon.home / "hasty.toml"
    hasty.write_text(render(Loaded(settings)))
    began = time.monotonic()
    done = site.cluster.run(
        [STEWARD, "action", "run", "local.command", "program=/bin/sleep", "arguments=600",
         "--json", "--config", str(hasty)],
        check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["status"] == "timeout"
    assert time.monotonic() - began < 300
    site.programs.unlink()


def test_words_of_the_command_line(site: Site) -> None:
    ask = site.daemon.ask
    assert "write NAME=VALUE" in ask("action", "run", "slurm.node.get", "n1", check=False).stderr
    assert (
        "twice" in ask("action", "run", "slurm.node.get", "nodes=a", "nodes=b", check=False).stderr
    )
    assert "is it nodes?" in ask("action", "run", "slurm.node.get", "node=a", check=False).stderr
    assert "slurm.node.get" in ask("action", "run", "slurm.node.got", check=False).stderr
    blank = ask("action", "run", "slurm.node.drain", "nodes= ", "reason=x", check=False)
    assert "needs nodes" in blank.stderr
    text = ask("action", "run", "slurm.config.get", "item=cluster_name", user="ada").stdout
    assert text.splitlines() == [
        "id: 0",
        "status: succeeded",
        "parameters:",
        "  item: cluster_name",
        "result:",
        "  cluster_name: sandbox",
    ]
    names = {one["action"] for one in site.daemon.ask_json("action", "list", user="ada")["actions"]}
    assert names == set(operations())
    assert "required" in ask("action", "help", "slurm.node.drain", user="ada").stdout


def test_who_may_by_slurms_own_books(booked_sandbox: Sandbox) -> None:
    """AdminLevel in slurmdbd makes operators and administrators, as it does for Slurm."""
    cluster = booked_sandbox
    for user, level in (("ada", "Operator"), ("bela", "Administrator")):
        cluster.run(["sacctmgr", "-i", "modify", "user", user, "set", f"adminlevel={level}"])
    daemon = Daemon(cluster, Path(cluster.directory) / "steward-actions")
    daemon.start()
    one = min(cluster.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split())
    drain = ("action", "run", "slurm.node.drain", f"nodes={one}", "reason=books", "--dry-run")
    reserve = (
        *("action", "run", "slurm.node.reserve", f"nodes={one}", "reservation_name=r"),
        "--dry-run",
    )

    def code(words: tuple[str, ...], user: str) -> int:
        return int(daemon.ask(*words, user=user, check=False).returncode)

    try:
        wait_until(lambda: code(drain, "bela") == 0)
        assert code(reserve, "bela") == 0
        assert code(reserve, "ada") == 0
        assert "administrators" in daemon.ask(*drain, user="ada", check=False).stderr
    finally:
        daemon.close()
        for user in ("ada", "bela"):
            cluster.run(["sacctmgr", "-i", "modify", "user", user, "set", "adminlevel=None"])
