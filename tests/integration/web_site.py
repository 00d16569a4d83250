"""Web pages on a real cluster, and their users."""

import re
import subprocess
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
from job_submission import PATIENCE, wait_until
from sandbox_daemon import STEWARD, Daemon

from servers.server import free_port
from steward.core.config import AccessSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox
from steward.sandbox.cluster import SandboxProcess
from steward.web.settings import WebSettings

ONCE = httpx.Limits(max_keepalive_connections=0)
"""Limits without kept connections, which the server may end at the moment of their next use."""
WEB_USER = "webby"
OPERATOR = "olga"
ADMINISTRATOR = "carl"
USERS = ("ada", "grace", OPERATOR, ADMINISTRATOR, WEB_USER)
"""Users that the sandbox of a site must have."""


class WebSite:
    """Daemon in a sandbox, with ``steward web`` as another user.

    Args:
        cluster: Cluster of both; with USERS.
        home: Directory of the daemon.
        settings: Settings of the daemon that differ.
        web: Settings of [web] that differ.
    """

    def __init__(
        self,
        cluster: Sandbox,
        home: Path,
        *,
        settings: dict[str, Any] | None = None,
        web: dict[str, Any] | None = None,
    ) -> None:
        self.cluster = cluster
        self.port = free_port()
        self.daemon = Daemon(cluster, home)
        chosen = {
            "listen": f"127.0.0.1:{self.port}",
            "user": WEB_USER,
            "requests_per_minute": 100_000,
            **(web or {}),
        }
        self.web = WebSettings(**chosen)
        self.daemon.settings = msgspec.structs.replace(
            self.daemon.settings,
            **{
                "web": self.web,
                "access": AccessSettings(operators=(OPERATOR,), administrators=(ADMINISTRATOR,)),
                **(settings or {}),
            },
        )
        self.daemon.config.write_text(render_config(LoadedConfig(self.daemon.settings)))
        self.log_path = home / "web.log"
        self._process: SandboxProcess | None = None
        self._visitors: list[Visitor] = []

    @property
    def url(self) -> str:
        """URL of the pages."""
        scheme = "https" if self.web.tls else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.daemon.start()
        try:
            self.start()
        except BaseException:
            self.daemon.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for visitor in self._visitors:
            visitor.close()
        self.stop()
        self.daemon.close()

    def start(self) -> None:
        """Start the web process, and wait until it answers."""
        with open(self.log_path, "ab") as log:
            self._process = self.cluster.popen(
                [STEWARD, "web", "--socket", self.daemon.settings.socket],
                user=WEB_USER,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self.answers, 30)

    def answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log_path.read_text()
        try:
            # Its certificate is the business of those who test that.
            return httpx.get(f"{self.url}/healthz", verify=False, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Stop the web process, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE * 20)
            self._process = None

    def link(self, user: str) -> str:
        """Return the link of ``steward login``, with this port whatever [web] url is."""
        said = self.daemon.ask("login", user=user)
        found = re.search(r"/login/\S+", said.stdout)
        assert found, said.stdout
        return f"{self.url}{found[0]}"

    def stranger(self, **options: Any) -> httpx.Client:
        """Return a client without a session; ``options`` are those of httpx.Client."""
        return httpx.Client(base_url=self.url, **{"timeout": 60, "limits": ONCE, **options})

    def visitor(self, user: str) -> "Visitor":
        """Return a client with a session."""
        visitor = Visitor(self, user)
        self._visitors.append(visitor)
        return visitor


class Visitor(httpx.Client):
    """User with a browser that runs no scripts.

    Args:
        site: Site of the pages.
        user: Name of the user.
    """

    def __init__(self, site: WebSite, user: str) -> None:
        super().__init__(base_url=site.url, timeout=60)
        self.user = user
        link = site.link(user)
        secret = link.rpartition("/")[2]
        assert f"Continue as {user}" in self.get(link).text
        answer = self.post("/login", data={"secret": secret})
        assert answer.status_code == 303, answer.text

    def page(self, path: str, **query: Any) -> str:
        """Return a page's text.

        Args:
            path: Its address, which may have a query.
            query: Further query parameters.
        """
        answer = self.get(path, params=query or None)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:2000])
        return answer.text

    def csrf(self) -> str:
        """Return the CSRF token of the user's forms."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.page("/"))
        assert found
        return found[1]

    def submit(self, path: str, **fields: Any) -> httpx.Response:
        """Submit a form."""
        return self.post(path, data={"csrf": self.csrf(), **fields})
