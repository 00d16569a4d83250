"""Page of another application on the origin of the pages, in an administrator's browser."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from browser_user import chromium
from job_submission import submit_to
from playwright.sync_api import Browser, Page
from web_site import ADMINISTRATOR, USERS, WebSite

from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
SECRET = "only-for-ada"
_ASK = """async ([path, options]) => {
    const answer = await fetch(path, options);
    return [answer.status, await answer.text()];
}"""


@contextmanager
def portal(port: int) -> Iterator[str]:
    """Serve Steward's pages on a host beside a page of one of its users; yield its address."""

    class Portal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/node/"):
                self._answer(200, [("Content-Type", "text/html")], b"<p>Mine, all mine.")
            else:
                self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass_on(self, body: bytes) -> None:
            headers = [(name, value) for name, value in self.headers.items() if name != "Host"]
            where = f"http://127.0.0.1:{port}{self.path}"
            told = httpx.request(self.command, where, headers=headers, content=body, timeout=60)
            dropped = {"transfer-encoding", "content-encoding", "content-length", "connection"}
            kept = [one for one in told.headers.multi_items() if one[0] not in dropped]
            self._answer(told.status_code, kept, told.content)

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is there
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Portal)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Hostile:
    """Foreign page that sends requests with an administrator's cookie.

    Args:
        browser: The administrator's browser.
        site: The pages.
        address: Host of both.
    """

    def __init__(self, browser: Browser, site: WebSite, address: str) -> None:
        self.page: Page = browser.new_page()
        secret = site.link(ADMINISTRATOR).rpartition("/")[2]
        self.page.goto(f"{address}/steward/login/{secret}")
        self.page.get_by_role("button", name=f"Continue as {ADMINISTRATOR}").click()
        self.page.get_by_role("button", name="Log out").wait_for()
        self.page.goto(f"{address}/node/c1/8080/")

    def ask(self, path: str, **options: Any) -> tuple[int, str]:
        status, text = self.page.evaluate(_ASK, [f"/steward{path}", options])
        return status, text

    def send(self, path: str, **fields: str) -> tuple[int, str]:
        """Send a form with the CSRF token from a page of Steward."""
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        body = str(httpx.QueryParams({"csrf": self.csrf(), **fields}))
        return self.ask(path, method="POST", headers=headers, body=body)

    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.ask("/")[1])
        assert found
        return found[1]

    def token(self) -> str:
        """Create a token as the attacked user."""
        headers = {"Content-Type": "application/json", "X-CSRF-Token": self.csrf()}
        body = '{"scopes": ["read", "scripts", "bank", "actions", "admin"]}'
        status, text = self.ask("/api/v1/tokens", method="POST", headers=headers, body=body)
        assert status == 201, text
        found = re.search(r"stt_[A-Za-z0-9_-]+", text)
        assert found
        return found[0]


def test_a_hostile_page_of_the_same_origin_does_nothing_as_an_operator() -> None:
    drain = {"verb": "drain", "nodes": "node1", "reason": "mine", "sure": "yes"}
    with Sandbox.up(SandboxSpec(user_names=USERS), report=print) as cluster, chromium() as browser:
        job = 0
        for own_host in (True, False):
            home = Path(cluster.directory) / f"own-{own_host}"
            web = {"url": "http://127.0.0.1/steward", "own_host": own_host}
            with WebSite(cluster, home, web=web) as site, portal(site.port) as address:
                job = job or submit_to(cluster, f"#!/bin/sh\necho {SECRET}\n", user="ada")
                site.daemon.wait_for_script(job)
                hostile = Hostile(browser, site, address)
                paths = ("/status", f"/jobs/box/{job}/script", f"/api/v1/jobs/{job}/script")
                told = [hostile.ask(path) for path in paths]
                if own_host:
                    # As is said of such a host; so it is the origin that bounds the rest.
                    assert [status for status, _ in told] == [200, 200, 200]
                    assert SECRET in told[2][1]
                    continue
                assert {status for status, _ in told} <= {403, 404}
                assert not any(SECRET in text for _, text in told)
                hostile.send("/cluster/box/change", key="k", **drain)
                assert hostile.send("/rules/switch", rule="x", to="off")[0] in (400, 403, 404)
                token = {"Authorization": f"Bearer {hostile.token()}"}
                for path in ("/api/v1/status", f"/api/v1/jobs/{job}/script"):
                    status, text = hostile.ask(path, headers=token)
                    assert (status in (403, 404), SECRET in text) == (True, False), text
                headers = {**token, "Content-Type": "application/json"}
                body = '{"parameters": {"nodes": "node1", "reason": "mine"}}'
                path = "/api/v1/actions/slurm.node.drain"
                status, text = hostile.ask(path, method="POST", headers=headers, body=body)
                assert status == 403, text
                shown = cluster.run(["scontrol", "show", "node", "node1"]).stdout
                assert "DRAIN" not in shown
                assert "mine" not in shown
