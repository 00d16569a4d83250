"""The ground of the pages on a real daemon: logging in, whom is believed, what guards answers."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from submitting import wait_until
from webbing import USERS, WEB_USER, WebSite

from steward.sandbox import Sandbox, SandboxSpec


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    with Sandbox.up(SandboxSpec(slurm=slurm_version, user_names=USERS), say=print) as box:
        yield box


@pytest.fixture(scope="module")
def site(cluster: Sandbox) -> Iterator[WebSite]:
    with WebSite(cluster, Path(cluster.directory) / "steward") as site:
        yield site


def test_somebody_logs_in_once_by_a_link_and_out(site: WebSite) -> None:
    link = site.link("ada")
    with httpx.Client(base_url=site.url) as browser:
        assert browser.get("/").status_code == 401
        # Programs look at links before people do.
        for _ in range(2):
            assert "Continue as ada" in browser.get(link).text
        secret = link.rpartition("/")[2]
        answer = browser.post("/login", data={"secret": secret})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert "Hello ada" in browser.get("/").text
        assert browser.post("/login", data={"secret": secret}).status_code == 401
    visitor = site.visitor("ada")
    kept = dict(visitor.cookies)
    assert visitor.submit("/logout").status_code == 200
    with httpx.Client(base_url=site.url, cookies=kept) as thief:
        assert thief.get("/").status_code == 401


def test_what_changes_something_comes_from_a_page_of_ours(site: WebSite) -> None:
    ada, grace = site.visitor("ada"), site.visitor("grace")
    for fields, headers in (
        ({}, {}),
        ({"csrf": "00" * 32}, {}),
        ({"csrf": "x"}, {}),
        ({"csrf": grace.csrf()}, {}),
        ({"csrf": ada.csrf()}, {"Sec-Fetch-Site": "cross-site"}),
    ):
        answer = ada.post("/logout", data=fields, headers=headers)
        assert answer.status_code == 403, fields
    assert "Hello ada" in ada.page("/")
    assert ada.csrf() != ada.csrf()


def test_every_answer_is_guarded(site: WebSite) -> None:
    ada = site.visitor("ada")
    for path in ("/", "/no/such/page", "/static/app.js", "/api/v1/nothing"):
        headers = ada.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    assert "<script>" not in ada.page("/")
    assert ada.get("/").headers["cache-control"] == "no-store"


def test_the_process_has_no_rights_of_its_own(site: WebSite) -> None:
    refused = site.daemon.ask("archive", "list", "--json", user=WEB_USER)
    assert '"jobs": []' in refused.stdout or '"jobs":[]' in refused.stdout
    for path in (site.daemon.state, site.daemon.archive):
        assert site.cluster.run(["ls", str(path)], user=WEB_USER, check=False).returncode != 0


def test_the_daemon_away_is_said_and_it_comes_back(site: WebSite) -> None:
    ada = site.visitor("ada")
    site.daemon.stop()
    answer = ada.get("/no/such/page")
    assert answer.status_code == 404
    # What is known of ada is known for some seconds; a page that asks says that nobody answers.
    other = httpx.get(f"{site.url}/", cookies={"steward_session": "sts_x"})
    assert (other.status_code, "does not answer" in other.text) == (503, True)
    site.daemon.start()
    wait_until(lambda: ada.get("/").status_code == 200)
    assert "Hello ada" in ada.page("/")


def test_a_proxys_users_come_and_go(cluster: Sandbox) -> None:
    web = {"proxy_header": "X-Remote-User", "trusted_proxies": ("127.0.0.1",)}
    home = Path(cluster.directory) / "proxied"
    with (
        WebSite(cluster, home, web=web) as site,
        httpx.Client(base_url=site.url, headers={"X-Remote-User": "ada"}, timeout=60) as ada,
    ):
        page = ada.get("/").text
        assert "Hello ada" in page
        csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
        assert ada.post("/logout", data={"csrf": csrf}).status_code == 200
        # The proxy still says who she is.
        wait_until(lambda: "Hello ada" in ada.get("/").text)
        two = [("X-Remote-User", "grace"), ("X-Remote-User", "ada")]
        assert httpx.get(site.url, headers=two).status_code == 403
        for name in ("root", "no-such-user", "ada,grace"):
            answer = httpx.get(site.url, headers={"X-Remote-User": name})
            assert answer.status_code in (401, 403), name


def test_what_nobody_may_send_is_refused(site: WebSite) -> None:
    with httpx.Client(base_url=site.url, timeout=60) as stranger:
        assert stranger.post("/login", data={"secret": "x" * 10_000}).status_code == 413
        for path in ("/static/%00", f"/static/{'a' * 300}", f"/jobs/box/{'%41' * 300}"):
            assert stranger.get(path).status_code == 404, path
    ada = site.visitor("ada")
    assert ada.submit("/logout", more="x" * 100_000).status_code == 413
    assert "Hello ada" in ada.page("/")
