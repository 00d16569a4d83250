"""Components of the demo beside the archive: sensor and rule, bank, node agents, and web pages.

`format_configuration` assembles the daemon's configuration file from the lines of each part.
`format_rule_settings` and `write_rule` set up the sensor and a rule that drains failed nodes.
`DemoBank` installs the submit plugin for the bank, `DemoAgents` the SPANK plugin and node agents,
`DemoWebServer` runs ``steward web``; each has ``settings`` (its configuration lines) and
``skip_reason`` (why it is left out; "" if it runs). Without a compiler, Slurm's headers or root,
the demo prints the reason and goes on without the part.
"""

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from typing import Any, Final

import msgspec

from steward.accounting.job_page.requests import PageAnswer
from steward.admin.plugins.build import build_plugins, find_headers
from steward.admin.plugins.installation import install_shim
from steward.agent import agent
from steward.bank.actions.maintenance import CheckReply
from steward.core.errors import StewardError
from steward.demo.jobs import Submission
from steward.sandbox import Sandbox, SandboxProcess
from steward.slurm.settings import ClusterSettings


def format_configuration(
    *,
    state_dir: str,
    run_dir: str,
    cluster_name: str,
    cluster_settings: ClusterSettings,
    munge_socket: str,
    archive_dir: str,
    part_lines: list[str],
) -> str:
    """Return the text of the daemon's configuration file.

    Args:
        state_dir: Directory of the daemon's journal and databases.
        run_dir: Directory of the daemon's sockets.
        cluster_name: The cluster's name.
        cluster_settings: How to reach its Slurm.
        munge_socket: Path of munged's socket.
        archive_dir: Root directory of the archive.
        part_lines: Lines of the parts that have tables of their own.
    """
    lines = [
        f"state_dir = {encode_toml(state_dir)}",
        f"run_dir = {encode_toml(run_dir)}",
        "",
        f"[cluster.{cluster_name}]",
        f"slurm_conf = {encode_toml(cluster_settings.slurm_conf)}",
        f"slurm_bin = {encode_toml(cluster_settings.slurm_bin)}",
        f"spool = {encode_toml(cluster_settings.spool)}",
        f"snapshot_interval_s = {cluster_settings.snapshot_interval_s}",
        f"munge_socket = {encode_toml(munge_socket)}",
        "",
        # A job log needs a driver to close days; the demo is over before.
        "[accounting]",
        'type = "jobacct/none"',
        "",
        *part_lines,
        "[archive.sink.files]",
        f"path = {encode_toml(archive_dir)}",
    ]
    return "\n".join(lines) + "\n"


def encode_toml(value: Any) -> str:
    """Encode a value as TOML, which equals JSON for the values used here."""
    return msgspec.json.encode(value).decode()


SLURMD_TIMEOUT_S: Final = 10
"""SlurmdTimeout of the demo's cluster, in seconds."""
SLURM_CONF_LINES: Final = (f"SlurmdTimeout={SLURMD_TIMEOUT_S}",)
"""Lines of slurm.conf that let slurmctld notice a dead slurmd soon."""
RULE_NAME: Final = "drain_what_fails"

_RULE_TEXT: Final = f"""\
---
name: {RULE_NAME}
description: Drain nodes that fail.
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed:
    type: equals
    pattern: true
action:
  ref: slurm.node.drain
  parameters:
    nodes: "{{{{ trigger.node }}}}"
    reason: "was {{{{ trigger.old_state }}}}, became {{{{ trigger.state }}}}"
context:
  steward:
    dedup_window: 10m
    most_nodes_percent: 50
"""


def format_rule_settings(directory: str) -> list[str]:
    """Return the configuration lines of the sensor and the rules."""
    return [
        "[sensor]",
        "enabled = true",
        "interval_s = 1.0",
        'helper = ""',
        "",
        "[rules]",
        'mode = "on"',
        f"directories = [{json.dumps(directory)}]",
        "most_nodes_percent = 50.0",
        "",
    ]


def write_rule(directory: str) -> str:
    """Write the rule's file; return its path."""
    path = f"{directory}/{RULE_NAME}.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(_RULE_TEXT)
    return path


PLUGIN_DIRS: Final = ("{directory}/etc",)
CONTROLLER_ENV: Final = {"STEWARD_GATE_CONF": "{directory}/steward/gate.conf"}
PLUGIN_LIBRARY: Final = "job_submit_steward.so"
ACCOUNT: Final = "chemistry"
SBATCH_REJECTED: Final = 1
"""Exit code of sbatch if the job is rejected."""

_PAID_SCRIPT: Final = """\
#!/bin/bash
#SBATCH --job-name=paid
#SBATCH --ntasks=2
#SBATCH --time=00:05:00
# Four seconds on two CPUs.
sleep 4
"""

PAID_JOB: Final = Submission(
    description="four seconds on two CPUs, with a limit of five minutes",
    name="paid",
    user_index=0,
    script=_PAID_SCRIPT.encode(),
    command=("sbatch", f"--account={ACCOUNT}", "paid.sh"),
)
UNAFFORDABLE_COMMAND: Final = ("sbatch", f"--account={ACCOUNT}", "--time=20:00:00", "paid.sh")
"""A submission that the account cannot pay."""

OPENING_COMMANDS: Final = (
    "steward bank rate create '*' --weight cpu=100",
    f"steward bank account create {ACCOUNT} --owners {{owner}}",
    f"steward bank deposit {ACCOUNT} 500 --reason 'a grant'",
)
"""Commands with which operators open the bank."""


class DemoBank:
    """The bank's submit plugin in slurmctld.

    Args:
        sandbox: The cluster, brought up with ``PLUGIN_DIRS`` and ``CONTROLLER_ENV``.
        skip_reason: Why there can be no bank; "" if there can.

    Attributes:
        skip_reason: Why there is no bank; "" if there is.
    """

    def __init__(self, sandbox: Sandbox, skip_reason: str) -> None:
        self._sandbox = sandbox
        self.skip_reason = skip_reason or self._install_plugin()

    @property
    def settings(self) -> list[str]:
        """Return the configuration lines of the bank and the gate."""
        if self.skip_reason:
            return []
        return [
            "[bank]",
            "enabled = true",
            'unknown_accounts = "allow"',
            "",
        ]

    def _install_plugin(self) -> str:
        """Install the submit plugin in slurmctld; return why that failed, or ""."""
        directory = self._sandbox.directory
        libraries = glob.glob(f"{glob.escape(directory)}/lib/*/{PLUGIN_LIBRARY}")
        if not libraries:
            return f"{PLUGIN_LIBRARY} was not built"
        try:
            shutil.copy(libraries[0], f"{directory}/etc/{PLUGIN_LIBRARY}")
            self._sandbox.configure("JobSubmitPlugins=steward")
            self._sandbox.run(["scontrol", "reconfigure"])
        except (OSError, StewardError) as error:
            return str(error)
        return ""


def is_ledger_sound(reply: CheckReply) -> bool:
    """Return True if a check of the ledger found no problem and included the holds."""
    return not reply.findings and reply.holds is not None


PLUGSTACK: Final = ("include {directory}/etc/plugstack.conf.d/*.conf",)
BURST_BYTES: Final = 300 * 1024**2
"""Memory that the job allocates for two seconds, in bytes."""

_BURST_SCRIPT: Final = """\
#!/bin/bash
#SBATCH --job-name=burst
# Hold 300 MB for two seconds: tail keeps the last 300 MB in memory.
head -c 300M /dev/zero | tail -c 300M | { sleep 2; wc -c; }
"""

BURST_JOB: Final = Submission(
    description="300 MB for two seconds",
    name="burst",
    user_index=0,
    script=_BURST_SCRIPT.encode(),
    # Slurm's default interval. The sandbox samples every second, and would see more short jobs than
    # a usual cluster.
    command=("sbatch", "--acctg-freq=task=30", "--time=60", "burst.sh"),
)


class DemoAgents:
    """SPANK plugin and node agents that report what jobs use, in a sandbox.

    Args:
        sandbox: The cluster, brought up with ``PLUGSTACK``.
        keep: Whether the agents live on when the caller ends.

    Attributes:
        skip_reason: Why nodes do not report; "" if they do.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        self._sandbox = sandbox
        self._keep = keep
        self._agent_process: SandboxProcess | None = None
        self.listen = f"127.0.0.1:{_find_free_port()}"
        self.skip_reason = self._install_plugin()

    @property
    def settings(self) -> list[str]:
        """Return the configuration lines of the node receiver."""
        return [] if self.skip_reason else ["[nodes]", f"listen = {encode_toml(self.listen)}", ""]

    @property
    def _spool_dir(self) -> str:
        return f"{self._sandbox.directory}/shim"

    def _install_plugin(self) -> str:
        """Build and install the SPANK plugin; return why that failed, or ""."""
        plan = self._sandbox.plan
        if os.geteuid() != 0 or not plan.contained:
            return "node agents need root, and this demo runs without root"
        libdir = f"{self._sandbox.directory}/lib"
        headers = f"{plan.root}/usr/include" if plan.root else find_headers()
        try:
            install_shim(
                build_plugins(headers, libdir),
                libdir=libdir,
                plugstack=f"{self._sandbox.directory}/etc/plugstack.conf",
                spool=self._spool_dir,
            )
        except StewardError as error:
            return str(error)
        return ""

    def start(self) -> None:
        """Start one agent for all nodes, which reports every second."""
        if self.skip_reason:
            return
        names = [name for name in self._sandbox.get_status() if name.startswith("slurmd.")]
        nodes = [word for name in names for word in ("--node", name.removeprefix("slurmd."))]
        argv = [
            *(sys.executable, "-I", str(agent.__file__)),
            *("--spool", self._spool_dir, "--to", self.listen, "--resident", "--every", "1"),
            *("--jitter", "0", "--munge-socket", self._sandbox.plan.munge_socket, *nodes),
        ]
        user = self._sandbox.plan.spec.slurm_user
        argv += ["--user", user]
        if self._keep:
            # Programs started inside end with their caller, unless they start their own session.
            argv = ["setsid", "--fork", *argv]
        with open(f"{self._sandbox.directory}/log/agent.log", "ab") as log_file:
            process = self._sandbox.popen(
                argv, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, cwd="/"
            )
        if self._keep:
            process.wait(10)
        else:
            self._agent_process = process

    def stop(self) -> None:
        """Stop the agent."""
        if self._agent_process is not None:
            self._agent_process.kill()
            self._agent_process.wait()
            self._agent_process = None


def has_all_reports(page: PageAnswer) -> bool:
    """Return True if a job's page has all reports of its nodes."""
    runs = page.runs
    return bool(runs and runs[-1].steps) and not runs[-1].efficiency.at_least


def get_page_peak(page: PageAnswer) -> int:
    """Return the peak memory on a job's page, in bytes."""
    return page.runs[-1].efficiency.memory_used_bytes or 0


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WEB_USER: Final = "steward-web"
"""User that ``steward web`` runs as."""
_LOGIN_LINK_PATTERN = re.compile(rb"^https?://\S+/login/\S+", re.MULTILINE)
_WEB_TIMEOUT_S: Final = 60.0


class DemoWebServer:
    """The web server's process (``steward web``) in the sandbox.

    Args:
        sandbox: The sandbox that it runs in.
        keep: Whether it lives on when the caller ends.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        self._sandbox = sandbox
        self._keep = keep
        self._process: SandboxProcess | None = None
        self.skip_reason = (
            ""
            if WEB_USER in sandbox.users
            else "the web pages need a user of their own, and this demo runs without root"
        )
        """Why there are no pages; "" if there are."""
        self._port = 0 if self.skip_reason else _find_free_port()

    @property
    def url(self) -> str:
        """Return the address of the pages."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def settings(self) -> list[str]:
        """Return the configuration lines of the web server."""
        if self.skip_reason:
            return []
        return [
            "[web]",
            f"listen = {json.dumps(f'127.0.0.1:{self._port}')}",
            f"user = {json.dumps(WEB_USER)}",
            "",
        ]

    def start(self, socket_path: str, log_path: str) -> None:
        """Start the web server.

        Args:
            socket_path: Path of the daemon's socket.
            log_path: Path of its log file.
        """
        argv = ["steward", "web", "--socket", socket_path]
        if self._keep:
            argv = ["setsid", "--fork", *argv]
        with open(log_path, "ab") as log_file:
            process = self._sandbox.popen(
                argv,
                user=WEB_USER,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
            )
        if self._keep:
            process.wait(_WEB_TIMEOUT_S)
        else:
            self._process = process

    def is_answering(self) -> bool:
        """Return True if the web server responds."""
        import httpx

        try:
            return httpx.get(f"{self.url}/healthz", timeout=_WEB_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def can_open(self, link: str, user: str) -> bool:
        """Return True if a login link works once and shows the user's jobs."""
        import httpx

        with httpx.Client(base_url=self.url, timeout=_WEB_TIMEOUT_S) as browser:
            if f"Continue as {user}" not in browser.get(link).text:
                return False
            browser.post("/login", data={"secret": link.rpartition("/")[2]})
            jobs = browser.get("/jobs")
            return jobs.status_code == 200 and "relax" in jobs.text

    def stop(self) -> None:
        """Stop the web server, if this process started it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def find_login_link(output: bytes) -> str:
    """Return the login link in the output of ``steward login``; "" if there is none."""
    match = _LOGIN_LINK_PATTERN.search(output)
    return match[0].decode() if match else ""
