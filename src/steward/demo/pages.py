"""The pages in the demo: ``steward web`` beside the daemon, and a link that opens them."""

import json
import re
import socket
import subprocess
from typing import Final

from steward.sandbox import Inside, Sandbox

USER: Final = "steward-web"
"""Who ``steward web`` runs as."""
_LINK = re.compile(rb"^https?://\S+/login/\S+", re.MULTILINE)
_ANSWERS_S: Final = 60.0


class Pages:
    """The process that serves the pages.

    Args:
        sandbox: Where it runs.
        keep: Whether it is to live on when the caller ends.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        self._sandbox = sandbox
        self._keep = keep
        self._process: Inside | None = None
        self.trouble = (
            ""
            if USER in sandbox.users
            else "only root can have users of its own, and the pages run as one"
        )
        """Why there are none; "" if there are."""
        self._port = 0 if self.trouble else _free_port()

    @property
    def url(self) -> str:
        """Where they are."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def settings(self) -> list[str]:
        """The lines of the configuration file."""
        if self.trouble:
            return []
        return [
            "[web]",
            f"listen = {json.dumps(f'127.0.0.1:{self._port}')}",
            f"user = {json.dumps(USER)}",
            "",
        ]

    def start(self, daemon: str, log: str) -> None:
        """Start it.

        Args:
            daemon: The daemon's socket.
            log: The file that it writes to.
        """
        argv = ["steward", "web", "--socket", daemon]
        if self._keep:
            argv = ["setsid", "--fork", *argv]
        with open(log, "ab") as said:
            process = self._sandbox.popen(
                argv,
                user=USER,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        if self._keep:
            process.wait(_ANSWERS_S)
        else:
            self._process = process

    def answers(self) -> bool:
        """Whether the pages are there."""
        import httpx

        try:
            return httpx.get(f"{self.url}/healthz", timeout=_ANSWERS_S).status_code == 200
        except httpx.TransportError:
            return False

    def opens(self, link: str, user: str) -> bool:
        """Whether a link logs its user in, and shows them their jobs."""
        import httpx

        with httpx.Client(base_url=self.url, timeout=_ANSWERS_S) as browser:
            if f"Continue as {user}" not in browser.get(link).text:
                return False
            browser.post("/login", data={"secret": link.rpartition("/")[2]})
            jobs = browser.get("/jobs")
            return jobs.status_code == 200 and "relax" in jobs.text

    def stop(self) -> None:
        """End it, if it runs and is ours to end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def link_in(said: bytes) -> str:
    """The link in what ``steward login`` prints; "" if there is none."""
    found = _LINK.search(said)
    return found[0].decode() if found else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
