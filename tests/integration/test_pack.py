"""StackStorm pack on a real cluster: its actions in the python runner, and its sensor."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import PATIENCE, submit_to, wait_until
from sandbox_daemon import Daemon
from sensor_daemon import python_of

from steward.automation.operation import load_operations
from steward.automation.settings import ActionsSettings
from steward.capture.settings import SensorSettings
from steward.core.config import AccessSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.cluster import SandboxProcess

pytestmark = [pytest.mark.matrix, pytest.mark.wide, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent.parent
PACK = ROOT / "packs" / "slurm"
RUNNERS = ROOT / "tests" / "stackstorm"
MARK = "%%%%%~=~=~=************=~=~=~%%%%"
PROGRAMS = f"/etc/steward-pack-programs-{os.getpid()}"  # tests of several versions run side by side
STANLEY = "carl"
"""User that StackStorm runs as: an administrator."""


class PackSite:
    """Cluster, daemon, and StackStorm's runners."""

    def __init__(self, cluster: Sandbox) -> None:
        self.cluster = cluster
        home = Path(cluster.directory) / "steward"
        home.mkdir()
        shutil.chown(home, "slurm")
        self.home = home
        self.daemon = Daemon(cluster, home, user="slurm")
        self.daemon.settings = msgspec.structs.replace(
            self.daemon.settings,
            access=AccessSettings(administrators=(STANLEY,)),
            actions=ActionsSettings(programs_file=PROGRAMS),
            sensor=SensorSettings(enabled=True, interval_s=0.5, helper=""),
        )
        self.daemon.config.write_text(render_config(LoadedConfig(self.daemon.settings)))
        self.config = {"socket": self.daemon.settings.socket}
        self.sensors: list[SandboxProcess] = []

    def run(
        self, ref: str, by: str = STANLEY, st2_user: str = "", **parameters: Any
    ) -> tuple[bool, Any]:
        """Run an action of the pack; return whether it succeeded, and its result.

        Args:
            ref: Reference of the action.
            by: User of the runner.
            st2_user: User who runs it in StackStorm; "" if StackStorm's API is down.
            parameters: Parameters of the action.
        """
        given = {"operation": ref, **parameters}
        done = self.cluster.run(
            [
                *(sys.executable, str(RUNNERS / "action_runner.py"), "--pack=slurm"),
                f"--file-path={PACK / 'actions' / 'run_action.py'}",
                f"--config={json.dumps(self.config)}",
                *("--stdin-parameters", "--user", st2_user),
            ],
            user=by,
            env={"PYTHONPATH": f"{RUNNERS}:{ROOT / 'src'}"},
            input=json.dumps({"parameters": given}) + "\n",
        )
        before, result, after = str(done.stdout).split(MARK)
        assert (before, after) == ("", "")
        output = json.loads(result)
        return output["status"], output["result"]

    def typed(self, ref: str, **parameters: Any) -> Any:
        """Return the result of ``steward action run``."""
        words = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in parameters.items()
        ]
        answer = self.daemon.ask("action", "run", ref, *words, "--json", user=STANLEY, check=False)
        return json.loads(answer.stdout)["result"]

    def sensor(self, user: str = STANLEY, config: str = "") -> SandboxProcess:
        place = {"config": config} if config else self.config
        of = {**place, "trigger_sensor_port": 0, "poll_interval": 1}
        with open(self.told_in, "ab") as told, open(f"{self.told_in}.log", "ab") as log:
            running = self.cluster.popen(
                [
                    *(sys.executable, str(RUNNERS / "sensor_container.py")),
                    *(str(PACK / "sensors" / "trigger_sensor.py"), "TriggerSensor"),
                    *(json.dumps(of), str(self.store)),
                ],
                user=user,
                env={"PYTHONPATH": f"{RUNNERS}:{ROOT / 'src'}"},
                stdout=told,
                stderr=log,
            )
        self.sensors.append(running)
        return running

    def close(self) -> None:
        """Stop the daemon, and the processes that a failed test left."""
        for running in self.sensors:
            running.kill()
            running.wait(PATIENCE * 30)
        self.daemon.close()

    @property
    def store(self) -> Path:
        return Path(self.cluster.directory) / "pack" / "datastore"

    @property
    def told_in(self) -> Path:
        return Path(self.cluster.directory) / "pack" / "told"

    def told(self, trigger: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.told_in.read_text().splitlines()]
        return [line["payload"] for line in lines if line["trigger"] == trigger]

    def states(self, node: str) -> list[str]:
        return [one["state"] for one in self.told("slurm.node.state") if one["node"] == node]

    def update(self, node: str, *words: str) -> None:
        self.cluster.run(["scontrol", "update", f"nodename={node}", *words])


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[PackSite]:
    spec = SandboxSpec(slurm=slurm_version, user_names=("ada", STANLEY))
    with Sandbox.up(spec, report=print) as cluster:
        site = PackSite(cluster)
        site.store.parent.mkdir()
        cluster.run(["chown", STANLEY, str(site.store.parent)])
        site.told_in.touch()
        Path(f"{site.told_in}.log").touch()
        site.daemon.start()
        try:
            yield site
        finally:
            site.close()
        print(
            Path(f"{site.told_in}.log").read_text(),
            site.told_in.read_text(),
            site.daemon.log()[-3000:],
        )


def steady(details: Any) -> Any:
    """Return the fields that do not change between two polls."""
    loads = ("load", "free", "time", "busy", "last", "boot", "watts", "energy")
    if isinstance(details, dict):
        return {
            name: steady(value)
            for name, value in details.items()
            if not any(word in name for word in loads)
        }
    return [steady(one) for one in details] if isinstance(details, list) else details


def test_what_is_read_is_what_steward_reads(site: PackSite) -> None:
    job = submit_to(site.cluster, "#!/bin/sh\nsleep 600\n", user="ada")
    wait_until(
        lambda: site.typed("slurm.job.get", jobids=[job])[str(job)][0]["job_state"] == "RUNNING"
    )
    # Steward's own observation comes with its next poll of the queue.
    wait_until(lambda: "RUNNING" in json.dumps(site.typed("slurm.node.jobs", nodes="ALL")))
    asked: dict[str, dict[str, Any]] = {
        "slurm.config.get": {"item": "topology_plugin"},
        "slurm.job.find": {"criterias": {"user_id": os.stat(site.home).st_uid, "name": "none"}},
        "slurm.job.get": {"jobids": [job]},
        "slurm.job.step.get": {"jobids": [job]},
        "slurm.node.get": {"nodes": "ALL"},
        "slurm.node.jobs": {"nodes": "ALL"},
        "slurm.script.get": {"jobid": str(job)},
    }
    for ref, parameters in asked.items():
        succeeded, result = site.run(ref, **parameters)
        assert succeeded, (ref, result)
        assert steady(result) == steady(site.typed(ref, **parameters)), ref
    # Numbers and lists, as workflows have them of other actions' results.
    for ref, given, typed in (
        ("slurm.script.get", {"jobid": job}, {"jobid": str(job)}),
        ("slurm.node.get", {"nodes": ["node[1", "2]", "node3"]}, {"nodes": "node[1-3]"}),
    ):
        succeeded, result = site.run(ref, **given)
        assert succeeded, (ref, result)
        assert steady(result) == steady(site.typed(ref, **typed)), ref
    assert site.run("slurm.job.cancel", jobids=[job])[0]


def test_what_is_changed(site: PackSite) -> None:
    reason = "ST2: Drained using slurm.node.drain action"
    succeeded, result = site.run("slurm.node.drain", nodes="node1", reason=reason)
    assert succeeded, result
    assert result["node1"]["reason"] == f"{reason} (steward: {STANLEY})"
    # Once more it is the same, by whichever way.
    again = site.typed("slurm.node.drain", nodes="node1", reason=reason)
    assert again == site.run("slurm.node.drain", nodes="node1", reason=reason)[1]
    assert site.run("slurm.node.resume", nodes="node1")[0]
    # The audit log names the StackStorm user as the one for whom its runner acts.
    given: dict[str, Any] = {"nodes": ["node1"], "reason": "r", "dry_run": False}
    succeeded, result = site.run("slurm.node.drain", st2_user="ingrid", **given)
    assert succeeded, result
    assert result["node1"]["reason"] == f"r (steward: {STANLEY} for ingrid)"
    (row,) = site.daemon.ask_json("action", "audit", user=STANLEY)["actions"][:1]
    assert (row["user"], row["speaker"]) == (STANLEY, f"{STANLEY} for ingrid")
    assert site.run("slurm.node.resume", st2_user="ingrid", nodes="node1", dry_run=False)[0]
    # Slurm asks its slurmd whether it is there before it is used again.
    wait_until(lambda: site.typed("slurm.node.get", nodes="node1")["node1"]["state"] == "IDLE")


def test_every_action_that_changes_says_what_it_would_do(site: PackSite) -> None:
    given: dict[str, dict[str, Any]] = {
        "slurm.node.down": {"nodes": "node1", "reason": "r"},
        "slurm.node.drain": {"nodes": "node1", "reason": "r"},
        "slurm.node.resume": {"nodes": "node1"},
        "slurm.node.update": {"nodes": "node1", "infos": {"weight": 2}},
        "slurm.node.reserve": {"nodes": "node1", "reservation_name": "r"},
        "slurm.partition.update": {"partition": "main", "infos": {"maxtime": 10}},
        "notify.email": {"to": ["ops"], "subject": "s", "body": "b"},
    }
    for ref, parameters in given.items():
        succeeded, result = site.run(ref, dry_run=True, **parameters)
        shown = site.daemon.ask(
            *("action", "run", ref, "--dry-run", "--json"),
            *(f"{n}={v if isinstance(v, str) else json.dumps(v)}" for n, v in parameters.items()),
            user=STANLEY,
            check=False,
        )
        answer = json.loads(shown.stdout)
        assert succeeded, (ref, result)
        assert (result, True) == (answer["result"], answer["dry_run"]), ref
        assert not load_operations()[ref].only_reads


def test_what_is_refused(site: PackSite) -> None:
    for by, ref, parameters, word in (
        ("ada", "slurm.node.drain", {"nodes": "node1", "reason": "r"}, "administrator"),
        (STANLEY, "slurm.node.drain", {"nodes": "node1,n99", "reason": "r"}, "n99"),
        (STANLEY, "slurm.node.drain", {"nodes": "node1"}, "reason"),
        (STANLEY, "slurm.trigger.set", {"program": "/bin/true", "event": "down"}, PROGRAMS),
        (STANLEY, "slurm.nonsense", {}, "slurm.nonsense"),
    ):
        succeeded, said = site.run(ref, by=by, **parameters)
        assert not succeeded
        assert word in said, said
        assert "\n" not in said


def test_the_sensor_tells_every_state_that_lasts(site: PackSite) -> None:
    running = site.sensor()
    # It gets the events from then on.
    wait_until(lambda: site.store.exists() and "IDLE" in site.store.read_text())
    site.update("node2", "state=drain", "reason=bad; fan=1")
    wait_until(lambda: site.states("node2")[-1:] == ["IDLE+DRAIN"], 30)
    (told,) = (one for one in site.told("slurm.node.state") if one["node"] == "node2")
    assert (told["reason"], told["reason_uid"], told["old_state"]) == ("bad; fan=1", 0, "IDLE")
    assert told["cluster"] == "box"
    # While it is away the node comes back, and goes again.
    running.send_signal(15)
    running.wait(PATIENCE * 30)
    assert site.told("slurm.sensor.trigger.down")
    site.update("node2", "state=resume")
    # Slurm asks its slurmd whether it is there before it is used again.
    wait_until(lambda: _last(site, "node2") == "IDLE", 30)
    site.update("node2", "state=drain", "reason=again")
    wait_until(lambda: _last(site, "node2") == "IDLE+DRAIN", 30)
    again = site.sensor()
    wait_until(lambda: site.states("node2")[-1] == "IDLE+DRAIN" and "IDLE" in site.states("node2"))
    # The node returned without a failure: no recovery is reported.
    news = [one for one in site.told("slurm.node.state") if one["node"] == "node2"]
    assert any(one["failed"] for one in news) or not any(one["recovered"] for one in news)
    site.update("node2", "state=resume")
    again.send_signal(15)
    again.wait(PATIENCE * 30)


def test_the_sensor_as_root_reads_stewards_files_itself(site: PackSite) -> None:
    running = site.sensor("root", str(site.daemon.config))
    wait_until(lambda: site.store.exists() and "IDLE" in site.store.read_text())
    site.update("node3", "state=drain", "reason=by root")
    wait_until(lambda: site.states("node3")[-1:] == ["IDLE+DRAIN"], 60)
    (told,) = (one for one in site.told("slurm.node.state") if one["node"] == "node3")
    assert (told["reason"], told["old_state"], told["partitions"][0]) == ("by root", "IDLE", "main")
    running.send_signal(15)
    running.wait(PATIENCE * 30)
    site.update("node3", "state=resume")
    wait_until(lambda: _last(site, "node3") == "IDLE", 30)
    # Only the root of the cluster's host could write its output.
    site.store.unlink()


def _last(site: PackSite, node: str) -> str:
    found = site.daemon.ask_json("events", "list", "--nodelist", node)["events"]
    return str(found[-1]["body"]["state"])


def test_what_it_compares_at_a_restart(site: PackSite) -> None:
    """It reports changes without an event; it does not report a job that came to a node."""

    def record() -> Any:
        return json.loads(json.loads(site.store.read_text())["record"])

    def run(ready: Callable[[], bool]) -> None:
        running = site.sensor()
        wait_until(ready)
        running.send_signal(15)
        running.wait(PATIENCE * 30)

    idle = {"box": {"IDLE": "node[1-4]"}}
    run(lambda: site.store.exists() and record()["states"] == idle)
    states = {"box": {"IDLE": "node[1,3-4]", "DOWN": "node2"}}
    site.store.write_text(json.dumps({"record": json.dumps({**record(), "states": states})}))
    # It was never drained: a reason that goes is news, and may go as a job comes.
    job = submit_to(site.cluster, "#!/bin/sh\nsleep 600\n", user="ada", nodelist="node4")
    wait_until(lambda: site.typed("slurm.node.get", nodes="node4")["node4"]["state"] == "MIXED")
    before = len(site.told("slurm.node.state"))
    # The sensor reports before it records: a kill in between repeats the report.
    run(lambda: len(site.told("slurm.node.state")) > before and record()["states"] == idle)
    (told,) = site.told("slurm.node.state")[before:]
    assert (told["node"], told["old_state"], told["state"]) == ("node2", "DOWN", "IDLE")
    assert (told["cluster"], told["source"]) == ("box", "start")
    site.cluster.run(["scancel", str(job)])


def test_a_trigger_of_slurms_reaches_it_and_is_set_again(site: PackSite) -> None:
    """Rules set the trigger at start, get its event, and set it again."""
    # Where slurmctld sees it, too, and with a Python that exists there.
    program = f"{site.cluster.directory}/slurm-trigger-notify"
    _, _, rest = (PACK / "bin" / "slurm-trigger-notify").read_text().partition("\n")
    Path(program).write_text(f"#!{python_of(site.cluster, site.home)}\n{rest}")
    Path(program).chmod(0o755)
    site.cluster.run(["sh", "-c", f"echo {program} > {PROGRAMS} && chmod 644 {PROGRAMS}"])
    before = len(site.told("slurm.sensor.trigger.up"))
    running = site.sensor()
    wait_until(lambda: len(site.told("slurm.sensor.trigger.up")) > before)
    where = site.told("slurm.sensor.trigger.up")[-1]
    # Of this node alone: what others became shortly before would set it off, too.
    given = {
        "program": f"{program} {where['url']}/node/drain",
        "event": "drain",
        "nodes": "node3",
    }
    succeeded, number = site.run("slurm.trigger.set", **given)
    assert succeeded, number
    site.update("node3", "state=drain", "reason=x")
    wait_until(lambda: bool(site.told("slurm.sensor.trigger.triggered")), 90)
    told = site.told("slurm.sensor.trigger.triggered")[-1]
    assert (told["class"], told["type"], told["nodes"]) == ("node", "drain", "node3")
    succeeded, number = site.run("slurm.trigger.set", **given)
    assert succeeded, number
    site.update("node3", "state=resume")
    running.send_signal(15)
    running.wait(PATIENCE * 30)
    site.cluster.run(["rm", PROGRAMS])
