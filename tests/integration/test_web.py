"""Web pages on a real daemon: logins, proxies, and protected replies."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_submission import wait_until
from web_site import USERS, WEB_USER, WebSite

from steward.sandbox import Sandbox, SandboxSpec


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    with Sandbox.up(SandboxSpec(slurm=slurm_version, user_names=USERS), report=print) as box:
        yield box


@pytest.fixture(scope="module")
def site(cluster: Sandbox) -> Iterator[WebSite]:
    with WebSite(cluster, Path(cluster.directory) / "steward") as site:
        yield site


def test_somebody_logs_in_once_by_a_link_and_out(site: WebSite) -> None:
    link = site.link("ada")
    with site.stranger() as browser:
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
    with site.stranger(cookies=kept) as thief:
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


def test_head_is_answered_as_get_is_but_for_the_body(site: WebSite) -> None:
    ada = site.visitor("ada")
    ada.headers["Accept-Encoding"] = "identity"
    for path in (
        *("/healthz", "/reports", "/static/app.js", "/no/such/page", "/rules/switch"),
        *("/api/v1/openapi.json", "/api/v1/tokens", "/api/v1/nothing", "/api/v1/jobs?x=y"),
    ):
        head, got = ada.head(path), ada.get(path)
        assert head.status_code == got.status_code, path
        for name in ("content-type", "content-length", "etag", "cache-control", "allow"):
            assert head.headers.get(name) == got.headers.get(name), (path, name)
        assert "content-security-policy" in head.headers, path
    tag = ada.head("/api/v1/tokens").headers["etag"]
    assert ada.head("/api/v1/tokens", headers={"If-None-Match": tag}).status_code == 304
    with site.stranger() as stranger:
        assert stranger.head("/reports").status_code == 401
        assert stranger.head("/api/v1/tokens").status_code == 401


def test_nothing_comes_behind_what_head_is_answered(site: WebSite) -> None:
    asked = "HEAD {} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n"
    with socket.create_connection(("127.0.0.1", site.port), 60) as wire:
        wire.settimeout(60)
        # On one connection: bytes after the first request would become the second.
        for path in ("/static/app.js", "/healthz"):
            wire.sendall((asked.format(path) + "\r\n").encode())
            head = b""
            while b"\r\n\r\n" not in head:
                piece = wire.recv(65536)
                assert piece, head
                head += piece
            assert head.startswith(b"HTTP/1.1 200"), head
            assert head.endswith(b"\r\n\r\n"), head
        wire.sendall((asked.format("/no/such/page") + "Connection: close\r\n\r\n").encode())
        rest = b"".join(iter(lambda: wire.recv(65536), b""))
    assert rest.startswith(b"HTTP/1.1 404"), rest
    assert rest.endswith(b"\r\n\r\n"), rest


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
    # ada's roles are cached for some seconds; a page without them says that the daemon is away.
    with site.stranger(cookies={"steward_session": "sts_x"}) as stranger:
        other = stranger.get("/")
    assert (other.status_code, "does not answer" in other.text) == (503, True)
    site.daemon.start()
    wait_until(lambda: ada.get("/").status_code == 200)
    assert "Hello ada" in ada.page("/")


def test_a_proxys_users_come_and_go(cluster: Sandbox) -> None:
    web = {"proxy_header": "X-Remote-User", "trusted_proxies": ("127.0.0.1",)}
    home = Path(cluster.directory) / "proxied"
    with (
        WebSite(cluster, home, web=web) as site,
        site.stranger(headers={"X-Remote-User": "ada"}) as ada,
        site.stranger() as stranger,
    ):
        page = ada.get("/").text
        assert "Hello ada" in page
        csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
        assert ada.post("/logout", data={"csrf": csrf}).status_code == 200
        # The proxy still says who she is.
        wait_until(lambda: "Hello ada" in ada.get("/").text)
        two = [("X-Remote-User", "grace"), ("X-Remote-User", "ada")]
        assert stranger.get("/", headers=two).status_code == 403
        for name in ("root", "no-such-user", "ada,grace"):
            answer = stranger.get("/", headers={"X-Remote-User": name})
            assert answer.status_code in (401, 403), name


def test_what_nobody_may_send_is_refused(site: WebSite) -> None:
    with site.stranger() as stranger:
        assert stranger.post("/login", data={"secret": "x" * 10_000}).status_code == 413
        for path in ("/static/%00", f"/static/{'a' * 300}", f"/jobs/box/{'%41' * 300}"):
            assert stranger.get(path).status_code == 404, path
    ada = site.visitor("ada")
    assert ada.submit("/logout", more="x" * 100_000).status_code == 413
    assert "Hello ada" in ada.page("/")
