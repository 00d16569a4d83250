"""Two real slurmctlds with a shared StateSaveLocation, a controller for each, and a failover."""

import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controllers import controller_settings, serve_settings
from job_submission import submit_to, wait_until
from sandbox_daemon import STEWARD
from spool_daemon import archived, ask

from servers.server import free_port
from steward.core.config import Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.cluster import SandboxProcess
from steward.slurm.settings import ClusterSettings

BACKUP, ADDRESS = "backup", "127.0.0.2"
EVENTS = "SELECT key FROM event WHERE kind = ? UNION SELECT key FROM remembered WHERE key LIKE ?"


class Running:
    """``steward serve`` or ``steward controller`` inside a sandbox."""

    def __init__(self, box: Sandbox, command: str, settings: Settings) -> None:
        self.settings = settings
        self._box = box
        self._command = command
        self._home = Path(settings.state_dir).parent
        (self._home / "steward.toml").write_text(render_config(LoadedConfig(settings)))
        self._process: SandboxProcess | None = None

    def log(self) -> str:
        path = self._home / "log"
        return path.read_text() if path.exists() else ""

    def start(self) -> None:
        before = self.log().count('msg="ready:')
        with (self._home / "log").open("ab") as log:
            self._process = self._box.popen(
                [STEWARD, self._command, "--config", str(self._home / "steward.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self.log().count('msg="ready:') > before)

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None


@pytest.fixture
def box(slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a cluster whose second slurmctld stands by."""
    spec = SandboxSpec(
        nodes=2,
        slurm=slurm_version,
        extra=(f"SlurmctldHost={BACKUP}({ADDRESS})", "SlurmctldTimeout=10"),
    )
    with Sandbox.up(spec, report=print) as sandbox:
        etc = Path(sandbox.slurm_conf).parent
        with (etc / "hosts").open("a") as hosts:
            hosts.write(f"{ADDRESS} {BACKUP}\n")
        conf = Path(sandbox.slurm_conf).read_text()
        conf = conf.replace("/slurmctld.pid", "/backup.pid").replace(
            "/slurmctld.log", "/backup.log"
        )
        (etc / "backup.conf").write_text(conf)
        slurmctld = next(one for one in sandbox.plan.services if one.name == "slurmctld")
        words = shlex.join([*slurmctld.argv, "-f", str(etc / "backup.conf")])
        # A slurmctld knows by its host's name which of them it is.
        backup = sandbox.popen(
            ["unshare", "--uts", "sh", "-c", f"hostname {BACKUP} && exec {words}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: f"at {BACKUP} is UP" in ping(sandbox))
            yield sandbox
        finally:
            backup.send_signal(signal.SIGKILL)
            backup.wait(20)


def ping(box: Sandbox) -> str:
    return str(box.run(["scontrol", "ping"], check=False).stdout)


def settings_of(box: Sandbox, home: Path, port: int, name: str) -> Settings:
    """Return the settings of the controller of one slurmctld."""
    settings = controller_settings(home / name, port, Path(box.spool), box.plan.munge_socket)
    of: ClusterSettings = msgspec.structs.replace(
        box.make_cluster_settings(), snapshot_interval_s=0.3, munge_socket=box.plan.munge_socket
    )
    return msgspec.structs.replace(settings, cluster={"c1": of})


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_take_over_loses_nothing_and_says_nothing_twice(box: Sandbox) -> None:
    user = next(iter(box.users))
    home, port = Path(box.directory) / "stewards", free_port()
    home.mkdir()
    of = ClusterSettings(
        munge_socket=box.plan.munge_socket, controllers=("127.0.0.1", box.plan.host)
    )
    serve = Running(box, "serve", serve_settings(home / "serve", port, {"c1": of}))
    pair = [
        Running(box, "controller", settings_of(box, home, port, name)) for name in ("ctl1", "ctl2")
    ]
    scripts: dict[int, bytes] = {}

    def submit(count: int, seconds: int) -> None:
        for _ in range(count):
            script = f"#!/bin/sh\n# number {len(scripts)}\nsleep {seconds}\n".encode()
            scripts[submit_to(box, script, user=user, output="/dev/null")] = script

    try:
        for daemon in (serve, *pair):
            daemon.start()
        submit(5, 0)
        submit(3, 4)
        pair[0].end()  # its host has failed, and slurmctld with it
        box.run(["scontrol", "takeover", "1"])
        wait_until(lambda: "primary) at sandbox is DOWN" in ping(box))
        # A standby slurmctld answers no queries and accepts no jobs.
        wait_until(lambda: not box.run(["squeue", "-h"], check=False).returncode)
        submit(6, 0)
        pair[0].start()
        submit(2, 1)
        wait_until(lambda: set(ends(serve.settings)) >= set(scripts), 60)
        wait_until(lambda: verified(serve.settings) == scripts, 60)
        for daemon in pair:
            wait_until(lambda daemon=daemon: is_forwarded(daemon), 30)  # type: ignore[misc]
    except AssertionError:
        print(*(daemon.log()[-3000:] for daemon in (serve, *pair)), sep="\n\n")
        raise
    finally:
        for daemon in (*pair, serve):
            daemon.end()
    assert Counter(told(serve.settings, "job.script")) == Counter(scripts.keys())
    # Each controller's sources may report an end in different words; it is one end.
    assert Counter(ends(serve.settings)) == Counter(scripts.keys())
    assert ask(serve.settings, "journal.db", "SELECT * FROM dead") == []
    assert "UNKNOWN" not in str(ask(serve.settings, "jobs.db", "SELECT state FROM job"))
    assert len(ask(serve.settings, "jobs.db", "SELECT * FROM job")) == len(scripts)


def told(settings: Settings, kind: str) -> list[int]:
    """Return the job of each event of a kind that the journal has, or has had."""
    prefix = "script:%" if kind == "job.script" else f"{kind}:%"
    return [int(key.split(":")[1]) for (key,) in ask(settings, "journal.db", EVENTS, kind, prefix)]


def ends(settings: Settings) -> list[int]:
    """Return the job of each run's end event, without corrections (they have a longer key)."""
    rows = ask(settings, "journal.db", EVENTS, "run.end", "run.end:%")
    return [int(key.split(":")[1]) for (key,) in rows if key.count(":") == 3]


def verified(settings: Settings) -> dict[int, bytes]:
    """Return the archived scripts whose owner is known; fail if any is there twice."""
    root = Path(settings.sink_path("files"))
    unverified = {int(path.stem.split("-")[0]) for path in root.glob("**/unverified/**/*.sh")}
    found = archived(settings)
    return {job: files["sh"] for job, files in found.items() if job not in unverified}


def is_forwarded(daemon: Running) -> bool:
    """Return whether the receiver has stored every event of a controller."""
    ((head,),) = ask(daemon.settings, "journal.db", "SELECT ifnull(max(id), 0) FROM event")
    ((position,),) = ask(daemon.settings, "forward-c1.db", "SELECT position FROM cursor")
    return bool(position >= head)
