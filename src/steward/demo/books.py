"""Job accounting in the demo: the plugin and the agent of its nodes, and a job that shows it.

All of it is left out where it cannot be had (no compiler, no headers, no root),
and the demo says so and goes on.
"""

import os
import socket
import subprocess
import sys
from typing import Final

from steward.accounting.page.shapes import PageAnswer
from steward.admin.plugins import building, installing
from steward.agent import agent
from steward.core.errors import StewardError
from steward.demo.cast import Submission
from steward.demo.configured import toml
from steward.sandbox import Inside, Sandbox

PLUGSTACK: Final = ("include {directory}/etc/plugstack.conf.d/*.conf",)
HELD: Final = 300 * 1024**2
"""Bytes that the job holds for a moment."""

_BURST: Final = """\
#!/bin/bash
#SBATCH --job-name=burst
# Hold 300 MB for a moment: tail keeps what it may have to print.
head -c 300M /dev/zero | tail -c 300M | wc -c
"""

BURST: Final = Submission(
    about="300 MB for a moment",
    name="burst",
    author=0,
    script=_BURST.encode(),
    # Slurm's default; the sandbox samples once a second, which not every short job is.
    command=("sbatch", "--acctg-freq=task=30", "burst.sh"),
)


class Books:
    """What compute nodes report with, in a sandbox.

    Args:
        sandbox: The cluster, brought up with ``PLUGSTACK``.
        keep: Whether it is to live on when the caller ends.

    Attributes:
        trouble: Why nodes do not report; "" where they do.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        self._sandbox = sandbox
        self._keep = keep
        self._agent: Inside | None = None
        self.listen = f"127.0.0.1:{_free_port()}"
        self.trouble = self._build()

    @property
    def settings(self) -> list[str]:
        """The lines of the configuration file."""
        return [] if self.trouble else ["[nodes]", f"listen = {toml(self.listen)}", ""]

    @property
    def _lines(self) -> str:
        return f"{self._sandbox.directory}/shim"

    def _build(self) -> str:
        plan = self._sandbox.plan
        if os.geteuid() != 0 or not plan.contained:
            return "nodes' agents run as root, and this demo does not"
        libdir = f"{self._sandbox.directory}/lib"
        headers = f"{plan.root}/usr/include" if plan.root else building.find_headers()
        try:
            installing.install_shim(
                building.build(headers, libdir),
                libdir=libdir,
                plugstack=f"{self._sandbox.directory}/etc/plugstack.conf",
                spool=self._lines,
            )
        except StewardError as error:
            return str(error)
        return ""

    def start(self) -> None:
        """Start one agent for all nodes, which looks every second."""
        if self.trouble:
            return
        names = [name for name in self._sandbox.status() if name.startswith("slurmd.")]
        nodes = [word for name in names for word in ("--node", name.removeprefix("slurmd."))]
        words = [
            *(sys.executable, "-I", str(agent.__file__)),
            *("--spool", self._lines, "--to", self.listen, "--resident", "--every", "1"),
            *("--jitter", "0", "--munge-socket", self._sandbox.plan.munge_socket, *nodes),
        ]
        user = self._sandbox.plan.spec.slurm_user
        words += ["--user", user]
        if self._keep:
            # What is started inside ends with its caller, unless it becomes its own master.
            words = ["setsid", "--fork", *words]
        with open(f"{self._sandbox.directory}/log/agent.log", "ab") as log:
            process = self._sandbox.popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        if self._keep:
            process.wait(10)
        else:
            self._agent = process

    def stop(self) -> None:
        """End the agent."""
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait()
            self._agent = None


def is_told(page: PageAnswer) -> bool:
    """Whether a job's page has all that its nodes have to tell."""
    runs = page.runs
    return bool(runs and runs[-1].steps) and not runs[-1].efficiency.at_least


def peak_of(page: PageAnswer) -> int:
    """The peak of memory that a job's page tells, in bytes."""
    return page.runs[-1].efficiency.memory_used_bytes or 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
