"""Cluster whose slurmctld asks the test's gate, through the submit plugin in C or in Lua."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import msgspec
from job_submission import submit_to
from sandboxes import build_plugins

from servers.gate import AskedGate
from steward.admin.plugins.job_submit import install_submit_lua
from steward.sandbox import Sandbox, SandboxSpec
from steward.sandbox.slurm_install import DEBIAN_SUITES, ensure_root

QUIET_S = 2.0
TIMEOUT_MS = 100
LUA_SOCKETS = "/usr/lib/*/lua/5.*/socket"
"""Directory of Debian's LuaSocket, for each version of Lua."""


def headers(version: str) -> str:
    """Return the directory of a Slurm version's headers."""
    series = ".".join(version.split(".")[:2])
    return (
        f"{ensure_root(version, print)}/usr/include" if series in DEBIAN_SUITES else "/usr/include"
    )


class AskingSite:
    """Cluster, the gate that it asks, and the policy that the plugin reads."""

    def __init__(self, cluster: Sandbox, gate: AskedGate, directory: Path) -> None:
        self.cluster = cluster
        self.gate = gate
        self.directory = directory
        self.user = next(iter(cluster.users))

    def conf(self, *lines: str, timeout_ms: int = TIMEOUT_MS) -> None:
        """Write the policy as the gate would."""
        text = [f"socket {self.gate.path}", f"off_file {self.directory}/off"]
        text += [f"timeout_ms {timeout_ms}", f"quiet_s {QUIET_S}", *lines]
        fresh = self.directory / "gate.conf.new"
        fresh.write_text("".join(f"{line}\n" for line in text))
        fresh.rename(self.directory / "gate.conf")

    def submit(self, **options: Any) -> int:
        """Submit a job that stays in the queue."""
        options = {"output": "/dev/null", "hold": True, **options}
        return submit_to(self.cluster, "#!/bin/sh\nsleep 100\n", user=self.user, **options)

    def run(self, *words: str, user: str = "") -> tuple[int, str]:
        """Run a command as the user; return its exit code and output."""
        done = self.cluster.run(list(words), user=user or self.user, cwd="/tmp", check=False)
        return done.returncode, done.stdout + done.stderr

    def refused(self, *words: str) -> str:
        """Return the message of sbatch for a rejected job."""
        code, said = self.run("sbatch", "-o", "/dev/null", *words, "--wrap", "sleep 100")
        assert code == 1, said
        return said

    def comment(self, job: int) -> str:
        """Return the job's AdminComment."""
        shown = self.cluster.run(["scontrol", "show", "job", str(job)]).stdout
        found = [line for line in shown.splitlines() if "AdminComment=" in line]
        return found[0].strip().removeprefix("AdminComment=") if found else ""

    def log(self) -> list[str]:
        """Return the lines of slurmctld's log about the gate."""
        text = Path(f"{self.cluster.directory}/log/slurmctld.log").read_text(errors="replace")
        return [line for line in text.splitlines() if "the gate " in line]

    def took(self, count: int) -> list[float]:
        """Return the duration of that many submits in sequence, in seconds."""
        found = []
        for _ in range(count):
            begun = time.monotonic()
            self.submit()
            found.append(time.monotonic() - begun)
        return found


@contextmanager
def asking(directory: Path, version: str, kind: str, **more: Any) -> Iterator[AskingSite]:
    """Bring up the site; ``kind`` is ``c`` or ``lua``."""
    shared = directory / "run"
    shared.mkdir()
    shared.chmod(0o777)
    env = {"STEWARD_GATE_CONF": f"{shared}/gate.conf"}
    spec = SandboxSpec(slurm=version, nodes=2)
    if kind == "c":
        built = build_plugins(headers(version), f"{directory}/lib")
        spec = msgspec.structs.replace(
            spec, job_submit=("steward",), plugin_dirs=(str(Path(built.path).parent),)
        )
    else:
        env |= put_lua(directory)
        lua = (directory / "etc" / "job_submit.lua").read_text()
        spec = msgspec.structs.replace(spec, job_submit=("lua",), job_submit_lua=lua)
    spec = msgspec.structs.replace(spec, controller_env=env, **more)
    with AskedGate(shared / "gate.sock") as gate, Sandbox.up(spec) as cluster:
        site = AskingSite(cluster, gate, shared)
        site.conf()
        yield site


def put_lua(directory: Path, cluster: str = "sandbox") -> dict[str, str]:
    """Install the module, and LuaSocket where every version of Slurm and Lua finds it."""
    (directory / "etc").mkdir()
    install_submit_lua(f"{directory}/etc", libdir=f"{directory}/lua", cluster=cluster)
    env = {}
    for found in glob(LUA_SOCKETS):
        version = Path(found).parent.name
        shutil.copytree(found, directory / f"lua{version}" / "socket")
        # From 5.2 on, each Lua version first reads its own variable.
        name = "LUA_CPATH" if version == "5.1" else f"LUA_CPATH_{version.replace('.', '_')}"
        env[name] = f"{directory}/lua{version}/?.so"
    return env
