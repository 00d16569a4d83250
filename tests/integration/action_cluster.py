"""Cluster with users of every role, and a daemon that runs their actions."""

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from job_submission import wait_until
from sandbox_daemon import Daemon

from servers.http_server import Quiet, answering
from steward.accounting.settings import MailSettings
from steward.automation.settings import ActionsSettings
from steward.core.config import AccessSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox, SandboxSpec

USERS = ("ada", "bela", "olga", "carl")
"""An owner of jobs, another user, an operator and an administrator."""
SLEEP = "#!/bin/sh\nsleep 600\n"


class Hook(Quiet, BaseHTTPRequestHandler):
    """Webhook that records the notifications it receives."""

    told: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.told.append(json.loads(self.rfile.read(length)))
        self.send_response(404 if self.path == "/gone" else 204)
        self.end_headers()


class ActingSite:
    """Cluster with a daemon, and users of every role."""

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
        self.daemon.config.write_text(render_config(LoadedConfig(settings)))
        self.nodes = sorted(set(self.said("sinfo", "-h", "-N", "-o", "%N").split()))

    def said(self, *words: str) -> str:
        return str(self.cluster.run(list(words)).stdout)

    def run(self, ref: str, *options: str, by: str = "carl", **given: Any) -> dict[str, Any]:
        """Run an action through the daemon's socket, or in this process if ``by`` is ``root``."""
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
        """Return the error of a rejected action; check that it did not begin."""
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
        """Resume every node, also those that another user drained."""
        for name in self.nodes:
            self.result("slurm.node.resume", "--force", by="root", nodes=name)
        wait_until(lambda: all(self.node(name)["state"] == "IDLE" for name in self.nodes))


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[ActingSite]:
    """Bring up a cluster for this module, and its daemon."""
    with answering(Hook) as server:
        # An answer of its slurmd's that is on its way must not bring back a node that is set down.
        spec = SandboxSpec(slurm=slurm_version, user_names=USERS, extra=("ReturnToService=0",))
        with Sandbox.up(spec, report=print) as cluster:
            site = ActingSite(cluster, server.server_port)
            site.daemon.start()
            try:
                yield site
            finally:
                site.daemon.close()


@pytest.fixture
def healthy(site: ActingSite) -> Iterator[ActingSite]:
    """Return the cluster, and bring back all of its nodes after the test."""
    yield site
    site.heal()
