"""A cluster that Slurm and Steward both account for, with every component of a real site."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from job_submission import PATIENCE, submit_to, wait_until
from sandbox_daemon import STEWARD
from sandbox_daemon import Daemon as InSandbox
from sandboxes import build_plugins

from servers.server import free_port
from steward import native
from steward.admin.plugins.installation import install_shim
from steward.agent import agent
from steward.capture.settings import NodesSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.cluster import SandboxProcess

JOBCOMP = Path(native.__file__).parent / "jobcomp.lua"
AGENT = [sys.executable, "-I", str(agent.__file__)]
BIN = Path(__file__).parents[2] / "libexec/steward/bin"


def spec_of(directory: str, slurm: str, **options: Any) -> SandboxSpec:
    """Return the spec of a cluster with the plugins, on which Steward can run, in ``directory``."""
    own = f"steward_jobcomp_file = '{directory}/log/jobcomp.jsonl'\n"
    return SandboxSpec(
        **{
            "directory": directory,
            "slurm": slurm,
            "plugstack": ("include {directory}/etc/plugstack.conf.d/*.conf",),
            "jobcomp_lua": own + JOBCOMP.read_text(),
            "accounting": True,
            **options,
        }
    )


class BookedSite:
    """Cluster with its nodes' plugin and agent, and the daemon.

    Args:
        cluster: Cluster of :func:`spec_of`.
        snapshot_s: Seconds between two polls of the queue.
    """

    def __init__(self, cluster: Sandbox, snapshot_s: float = 0.5) -> None:
        self.cluster = cluster
        self.user = next(iter(cluster.users))
        self.lines = Path(cluster.directory) / "shim"
        self.port = free_port()
        self.agent: SandboxProcess | None = None
        self.daemon = InSandbox(
            cluster,
            Path(cluster.directory) / "steward",
            slurm={
                "munge_socket": cluster.plan.munge_socket,
                "jobcomp_lines": f"{cluster.directory}/log/jobcomp.jsonl",
                "snapshot_interval_s": snapshot_s,
                # Links to the commands of whichever Slurm runs, over an upgrade too.
                "slurm_bin": f"{cluster.directory}/bin",
            },
        )
        self.daemon.settings = msgspec.structs.replace(
            self.daemon.settings, nodes=NodesSettings(listen=f"127.0.0.1:{self.port}")
        )
        self.daemon.config.write_text(render_config(LoadedConfig(self.daemon.settings)))

    def start(self) -> None:
        """Install the plugin, and start the daemon and the agent."""
        self.install_plugin()
        self.daemon.start()
        self.start_agent()

    def install_plugin(self) -> None:
        """Install the SPANK plugin by the documented steps; nodes load it for the next step."""
        libdir = f"{self.cluster.directory}/lib"
        built = build_plugins(f"{self.cluster.plan.root}/usr/include", libdir)
        done = install_shim(
            built,
            libdir=libdir,
            plugstack=f"{self.cluster.directory}/etc/plugstack.conf",
            spool=str(self.lines),
        )
        assert done.remaining == ()

    def start_agent(self) -> None:
        """Start one resident agent for all nodes, with a short interval."""
        names = (name for name in self.cluster.get_status() if name.startswith("slurmd."))
        nodes = [word for name in names for word in ("--node", name.removeprefix("slurmd."))]
        with open(f"{self.cluster.directory}/log/agent.log", "ab") as log:
            self.agent = self.cluster.popen(
                [
                    *(*AGENT, "--spool", str(self.lines), "--to", f"127.0.0.1:{self.port}"),
                    *("--munge-socket", self.cluster.plan.munge_socket, "--limit", "0"),
                    *(*nodes, "--resident", "--every", "1", "--jitter", "0"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill_agent(self) -> None:
        """Kill the agent with SIGKILL."""
        if self.agent is not None:
            self.agent.send_signal(signal.SIGKILL)
            self.agent.wait(PATIENCE * 20)
            self.agent = None

    def submit(self, script: str, *, user: str = "", **options: Any) -> int:
        """Submit a batch script; return the job's id."""
        options.setdefault("output", "/dev/null")
        return submit_to(self.cluster, script, user=user or self.user, **options)

    def slurms(self, *words: str, user: str = "") -> str:
        """Return the output of Slurm's sacct."""
        return str(
            self.cluster.run(["sacct", *words], user=user, env={"TZ": "UTC"}, timeout_s=120).stdout
        )

    def ours(self, *words: str) -> str:
        """Return the output of Steward's sacct."""
        config = {"STEWARD_CONFIG": str(self.daemon.config), "TZ": "UTC"}
        return str(self.cluster.run([STEWARD, "sacct", *words], env=config, timeout_s=120).stdout)

    def until_idle(self, timeout_s: float = 120) -> None:
        """Wait until no job waits or runs."""
        words = ["squeue", "-h", "-t", "PD,R,S,CG,CF"]
        wait_until(lambda: not self.cluster.run(words, check=False).stdout.strip(), timeout_s)

    def close(self) -> None:
        """End the processes that the test started."""
        self.kill_agent()
        self.daemon.close()
