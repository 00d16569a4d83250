"""``steward agent`` on real clusters: Slurm's node addresses, and events of steps."""

import os
import shutil
from pathlib import Path
from signal import SIGTERM

import msgspec
import pytest
from agents import AGENT, events_of, lines, put, tasks_of
from job_submission import wait_until
from sandbox_daemon import Daemon as InSandbox
from sandboxes import build_plugins

from servers.server import free_port
from steward.accounting.settings import AccountingSettings
from steward.admin.plugins.installation import install_shim
from steward.capture.settings import NodesSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import TASK_EXIT
from steward.sandbox import Sandbox, SandboxSpec

WATCHER = """
import os
from steward.extensions.jobacct_plugins import JobAcctPlugin

class Watcher(JobAcctPlugin):
    plugin_name = "writes down the hooks of steps"
    plugin_type = "jobacct/watcher"

    def tell(self, *words):
        with open(os.environ["WATCHER"], "a") as file:
            print(*words, file=file)

    def slurmd_jobacct_smgr(self, step):
        self.tell("smgr", step.step, step.node)

    def slurmd_jobacct_jobstep_terminated(self, step):
        self.tell("terminated", step.step, step.node, step.smgr_status)
"""


def install_watcher(site: Path) -> None:
    """Write an installed package that holds the plugin."""
    about = site / "watcher-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "watcher.py").write_text(WATCHER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: watcher\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[steward.jobacct]\nwatcher = watcher:Watcher\n")


@pytest.mark.matrix
@pytest.mark.interface
def test_on_a_real_cluster(sandbox: Sandbox, tmp_path: Path) -> None:
    """The receiver gets node addresses from Slurm; only root on a node reports for it."""
    home = Path(sandbox.directory) / f"agent-{os.getpid()}"
    port = free_port()
    daemon = InSandbox(sandbox, home, slurm={"munge_socket": sandbox.plan.munge_socket})
    daemon.settings = msgspec.structs.replace(
        daemon.settings, nodes=NodesSettings(listen=f"127.0.0.1:{port}")
    )
    daemon.config.write_text(render_config(LoadedConfig(daemon.settings)))
    spool = home / "lines"
    node, user = "node1", next(iter(sandbox.users))
    put(spool, lines(range(100), node), node)
    put(spool, lines(range(100), "n999"), "n999")
    own = home / "own"
    put(own, lines(range(100), node), node)
    for path in (own, own / f"{node}.log"):
        os.chown(path, sandbox.users[user].uid, -1)
    rest = ["--to", f"127.0.0.1:{port}", "--limit", "0"]
    rest += ["--munge-socket", sandbox.plan.munge_socket]
    nodes = sandbox.run(["scontrol", "-o", "show", "node"]).stdout
    assert f"NodeName={node} " in nodes
    daemon.start()
    try:
        wait_until(lambda: "listening for nodes" in daemon.log())
        theirs = sandbox.run([*AGENT, "--spool", str(own), *rest], user=user, check=False)
        assert theirs.returncode == 1
        assert f"of uid {sandbox.users[user].uid}, not of root or SlurmdUser" in theirs.stderr
        ours = sandbox.run([*AGENT, "--spool", str(spool), "--node", node, *rest], check=False)
        assert (ours.returncode, ours.stderr) == (0, "")
        none = sandbox.run([*AGENT, "--spool", str(spool), "--node", "n999", *rest], check=False)
        assert none.returncode == 1
        assert "has no node 'n999'" in none.stderr
        assert sorted(tasks_of(daemon.settings)) == list(range(100))
    finally:
        daemon.close()


@pytest.mark.matrix
@pytest.mark.interface
@pytest.mark.skipif(
    not shutil.which("cc") or not Path("/usr/include/slurm/spank.h").exists(),
    reason="needs a C compiler and Slurm's headers",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root")
def test_from_a_step_to_its_events(
    slurm_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes with four tasks each: lines of the plugin, one agent, and the events.

    Then an accounting plugin is called for a step while it runs.
    """
    install_watcher(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("WATCHER", str(tmp_path / "hooks"))
    hooks = tmp_path / "hooks"
    stack = ("include {directory}/etc/plugstack.conf.d/*.conf",)
    spec = SandboxSpec(slurm=slurm_version, nodes=2, cpus=4, plugstack=stack)
    with Sandbox.up(spec) as cluster:
        directory, port = cluster.directory, free_port()
        built = build_plugins(f"{cluster.plan.root}/usr/include", f"{directory}/lib")
        spool = f"{directory}/shim"
        install_shim(
            built,
            libdir=f"{directory}/lib",
            plugstack=f"{directory}/etc/plugstack.conf",
            spool=spool,
        )
        for name in cluster.get_status():
            if name.startswith("slurmd."):
                cluster.restart_service(name)
        wait_until(lambda: set(cluster.run(["sinfo", "-h", "-o", "%T"]).stdout.split()) == {"idle"})
        daemon = InSandbox(cluster, Path(directory) / "steward")
        daemon.settings = msgspec.structs.replace(
            daemon.settings,
            cluster={
                "box": msgspec.structs.replace(
                    daemon.settings.cluster["box"], munge_socket=cluster.plan.munge_socket
                )
            },
            nodes=NodesSettings(listen=f"127.0.0.1:{port}"),
            accounting=AccountingSettings(type="jobacct/watcher"),
        )
        daemon.config.write_text(render_config(LoadedConfig(daemon.settings)))
        daemon.start()
        try:
            wait_until(lambda: "listening for nodes" in daemon.log())
            user = next(iter(cluster.users))
            ran = cluster.run(["srun", "-N2", "-n8", "sh", "-c", "exit 3"], user=user, check=False)
            assert ran.returncode == 3, ran.stderr
            words = [*AGENT, "--spool", spool, "--to", f"127.0.0.1:{port}", "--limit", "30"]
            words += ["--munge-socket", cluster.plan.munge_socket]

            def told() -> bool:
                cluster.run(words, check=False)
                return sum(e.kind == "step.end" for e in events_of(daemon.settings)) >= 2

            wait_until(told)
            events = events_of(daemon.settings)

            def heard(line: str) -> bool:
                cluster.run(words, check=False)
                return hooks.exists() and line in hooks.read_text().splitlines()

            submit = ["sbatch", "--parsable", "-n1", "--output=/dev/null", "--wrap"]
            job = cluster.run([*submit, "exec sleep 600"], user=user).stdout.strip()
            # The plugin hears of the batch step while it runs, and of its end with its status.
            wait_until(lambda: heard("smgr batch node1"), 60)
            assert "terminated batch" not in hooks.read_text()
            assert cluster.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout == "RUNNING\n"
            cluster.run(["scancel", job])
            wait_until(lambda: heard(f"terminated batch node1 {SIGTERM:d}"), 60)
            assert hooks.read_text().splitlines().count("smgr batch node1") == 1
        finally:
            daemon.close()
    assert [event for event in events if event.kind == "node.gap"] == []
    exits = [event.body for event in events if event.kind == TASK_EXIT and event.body.step == "0"]
    tasks = {task.task: task.status for body in exits for task in body.tasks}
    assert tasks == dict.fromkeys(range(8), 3 << 8)
    assert {body.node for body in exits} == {"node1", "node2"}
    starts = [e.body for e in events if e.kind == "step.start" and e.body.step == "0"]
    assert [(start.tasks, start.name) for start in starts] == [(4, "sh"), (4, "sh")]
