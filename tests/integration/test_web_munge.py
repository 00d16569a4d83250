"""MUNGE authentication of requests without a token, on every host of the cluster."""

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from docs_code_blocks import code
from job_submission import wait_until
from sandbox_daemon import STEWARD
from web_munge import ME, credential, munge_site, origin, post
from web_site import OPERATOR, WEB_USER, WebSite

from steward.admin.credentials.munge_authentication import verify_munge_request
from steward.admin.credentials.requests import TicketRequest
from steward.core.errors import UnknownCredential
from steward.core.munge import build_statement, hash_body
from steward.web.settings import WebSettings

pytestmark = pytest.mark.wide
PLACES = 4
"""Number of credentials that are verified at the same time, for several hosts."""


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[WebSite]:
    with munge_site(slurm_version) as site:
        yield site


def far(site: WebSite) -> dict[str, str]:
    """Return the environment of a command on a host that has no daemon."""
    return {"STEWARD_URL": site.url, "STEWARD_MUNGE_SOCKET": site.cluster.plan.munge_socket}


@pytest.mark.matrix
def test_commands_elsewhere_need_no_token(site: WebSite) -> None:
    words = [STEWARD, "archive", "list", "--json"]
    for user in ("ada", OPERATOR):
        found = site.cluster.run(words, user=user, env=far(site))
        assert json.loads(found.stdout)["jobs"] == []
    # Each makes a link for whom it is, and tokens, as on the daemon's host.
    login = site.cluster.run([STEWARD, "login"], user="ada", env=far(site)).stdout
    page = httpx.get(f"{site.url}{login.strip()[len(site.url) :].splitlines()[0]}", timeout=60)
    assert "Continue as ada" in page.text
    token = site.cluster.run([STEWARD, "token", "create"], user="ada", env=far(site)).stdout
    assert "stt_" in token


def test_it_is_whom_munge_says(site: WebSite) -> None:
    made = build_statement("POST", ME, b"{}", origin(site))
    answer = post(site, ME, b"{}", credential(site, "ada", made))
    me = answer.json()
    assert (answer.status_code, me["user"], me["how"]) == (200, "ada", "munge")
    made = build_statement("GET", "/api/v1/jobs?users=ada", b"", origin(site))
    shown = f"Munge {credential(site, 'ada', made)}"
    found = httpx.get(
        f"{site.url}/api/v1/jobs?users=ada", headers={"Authorization": shown}, timeout=60
    )
    assert found.status_code == 200, found.text


def test_the_example_of_the_docs_runs(site: WebSite) -> None:
    (script,) = (block for block in code("api.md", "sh") if "| munge)" in block)
    # As the command is where munged's socket is the usual one.
    script = script.replace("| munge)", f"| munge --socket {site.cluster.plan.munge_socket})")
    env = {"STEWARD_URL": site.url}
    done = site.cluster.run(["bash", "-e", "-c", script], user="ada", env=env)
    assert json.loads(done.stdout)["user"] == "ada"


def test_it_is_good_once(site: WebSite) -> None:
    shown = credential(site, "ada", build_statement("POST", ME, b"{}", origin(site)))
    assert post(site, ME, b"{}", shown).status_code == 200
    again = post(site, ME, b"{}", shown)
    assert (again.status_code, "was used before" in again.json()["detail"]) == (401, True)


def test_it_is_good_for_its_own_request_alone(site: WebSite) -> None:
    listed = "/api/v1/ask/archive.list"
    here = origin(site)
    for made, path, body in (
        (build_statement("POST", ME, b"{}", here), listed, b"{}"),
        (build_statement("GET", ME, b"{}", here), ME, b"{}"),
        (build_statement("POST", listed, b'{"users":["ada"]}', here), listed, b'{"users":["bob"]}'),
        (b"anything", ME, b"{}"),
    ):
        answer = post(site, path, body, credential(site, "ada", made))
        assert answer.status_code == 401, answer.text
        assert "made for another request" in answer.json()["detail"]
    elsewhere = build_statement("POST", ME, b"{}", "elsewhere.example.org")
    answer = post(site, ME, b"{}", credential(site, "ada", elsewhere))
    assert (answer.status_code, "elsewhere" in answer.json()["detail"]) == (401, True)


def test_whom_it_is_shown_to_cannot_use_it(site: WebSite) -> None:
    made = build_statement("POST", ME, b"{}", "elsewhere.example.org")
    headers = {
        "Authorization": f"Munge {credential(site, 'ada', made)}",
        "Content-Type": "application/json",
        "Host": "elsewhere.example.org",
    }
    answer = httpx.post(f"{site.url}{ME}", content=b"{}", headers=headers, timeout=60)
    assert (answer.status_code, "elsewhere" in answer.json()["detail"]) == (401, True)


def test_a_path_is_signed_as_it_is_sent(site: WebSite) -> None:
    path = "/api/v1/jobs?users=ada%20x"
    shown = credential(site, "ada", build_statement("GET", path, b"", origin(site)))
    for sent, status in ((path.replace("%20", "+"), 401), (path, 401)):
        answer = httpx.get(
            f"{site.url}{sent}", headers={"Authorization": f"Munge {shown}"}, timeout=60
        )
        assert answer.status_code == status
    shown = credential(site, "ada", build_statement("GET", path, b"", origin(site)))
    answer = httpx.get(f"{site.url}{path}", headers={"Authorization": f"Munge {shown}"}, timeout=60)
    assert answer.status_code in (200, 422), answer.text


def test_the_session_of_a_link_makes_no_links(site: WebSite) -> None:
    """Otherwise a stolen session could be renewed for ever."""
    login = site.cluster.run([STEWARD, "login"], user="ada", env=far(site)).stdout
    secret = login.split()[0].rpartition("/")[2]
    with httpx.Client(base_url=site.url, timeout=60) as browser:
        assert browser.post("/login", data={"secret": secret}).status_code == 303
        csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', browser.get("/").text)
        assert csrf
        headers = {"X-CSRF-Token": csrf[1]}
        answer = browser.post("/api/v1/ask/credentials.login", json={}, headers=headers)
        assert (answer.status_code, "login node" in answer.json()["detail"]) == (403, True)


def opened_at_once(log: str) -> list[int]:
    """Return the number of credentials in verification after each start or failure."""
    found = [0]
    for line in log.splitlines():
        if "requests credentials.ticket" in line:
            found.append(found[-1] + 1)
        elif "MUNGE authentication is unavailable" in line:
            found.append(found[-1] - 1)
    return found


def test_while_munged_hangs_others_work(site: WebSite) -> None:
    """Requests with MUNGE get an error, and do not use the capacity of others."""
    ada = site.visitor("ada")
    token = site.daemon.ask("token", "create", user="ada").stdout.split()[0]
    bearer = {"Authorization": f"Bearer {token}"}
    made = build_statement("POST", ME, b"{}", origin(site))
    shown = [credential(site, "ada", made) for _ in range(4 * PLACES)]
    logged = len(site.daemon.log())
    site.cluster.stop_service("munged", signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(shown)) as at_once:
            waiting = [
                at_once.submit(post, site, ME, b"{}", one, address=f"127.0.0.{2 + number % 4}")
                for number, one in enumerate(shown)
            ]
            wait_until(lambda: opened_at_once(site.daemon.log()[logged:])[-1] == PLACES)
            body = {"name": "x", "scopes": ["read"]}
            headers = {"X-CSRF-Token": ada.csrf()}
            create = "/api/v1/ask/credentials.token_create"
            assert ada.post(create, json=body, headers=headers).status_code == 200
            hangs = True
            while hangs:
                hangs = not all(one.done() for one in waiting)
                assert ada.get("/jobs").status_code == 200
                assert ada.get("/").status_code == 200
                answer = httpx.post(f"{site.url}{ME}", json={}, headers=bearer, timeout=60)
                assert (answer.status_code, answer.json()["how"]) == (200, "token")
            answers = [one.result() for one in waiting]
    finally:
        site.cluster.stop_service("munged", signal.SIGCONT)
    assert {answer.status_code for answer in answers} == {503}
    opened = opened_at_once(site.daemon.log()[logged:])
    assert (max(opened), opened[-1]) == (PLACES, 0)
    said = Counter(answer.json()["detail"] for answer in answers)
    turned_away = said.pop("too many requests at once: try again in a moment")
    assert all(text.startswith("cannot decode the MUNGE credential") for text in said), said
    # Each request with a place got munged's silence as error, each other that there is no place.
    assert said.total() == len(opened) // 2
    assert turned_away == len(shown) - said.total()
    for user in ("ada", OPERATOR):
        answer = post(site, ME, b"{}", credential(site, user, made))
        assert (answer.status_code, answer.json()["user"]) == (200, user)


def test_the_doctor_says_whether_munged_answers(site: WebSite) -> None:
    def status() -> str:
        done = site.daemon.ask("doctor", "--only", "munge", "--json", check=False)
        return str(json.loads(done.stdout)["findings"][0]["status"])

    assert status() == "ok"
    site.cluster.stop_service("munged")
    try:
        assert status() == "warning"
        made = {"Authorization": "Munge MUNGE:AwQFAAD:", "Content-Type": "application/json"}
        answer = httpx.post(f"{site.url}{ME}", content=b"{}", headers=made, timeout=60)
        assert (answer.status_code, "munge" in answer.json()["detail"]) == (503, True)
    finally:
        site.cluster.start_service("munged")
    wait_until(lambda: status() == "ok")


def test_it_is_believed_from_its_networks_alone(site: WebSite) -> None:
    munge_socket = site.cluster.plan.munge_socket
    made = build_statement("POST", ME, b"{}", origin(site))

    def asked(**web: Any) -> tuple[int, str]:
        settings = WebSettings(url=site.url, munge_socket=munge_socket, **web)
        shown = credential(site, "ada", made)
        peer = {"peer": "10.1.2.3", "method": "POST", "target": ME, "digest": hash_body(b"{}")}
        return verify_munge_request(settings, TicketRequest(credential=shown, **peer))

    # This process is outside of the sandbox: there she has no name, which is checked last.
    with pytest.raises(UnknownCredential, match="has no user name"):
        asked(munge_from=("0.0.0.0/0",))
    with pytest.raises(UnknownCredential, match=r"MUNGE authentication from .* is not allowed"):
        asked(munge_from=("192.0.2.0/24", "10.1.2.0/24"))
    with pytest.raises(UnknownCredential, match=r"authentication from 10\.1\.2\.3 is not allowed"):
        asked(munge_from=("192.0.2.0/24",))
    with pytest.raises(UnknownCredential, match="use a token"):
        asked(munge_from=())


def test_who_is_no_user_of_the_pages_is_not_let_in(site: WebSite) -> None:
    made = build_statement("POST", ME, b"{}", origin(site))
    answer = post(site, ME, b"{}", credential(site, "root", made))
    assert (answer.status_code, "root" in answer.json()["detail"]) == (401, True)
    for shown in ("MUNGE:nonsense:", "x" * 5000):
        assert post(site, ME, b"{}", shown).status_code == 401
    # The web process has a user, but no rights by MUNGE.
    answer = post(site, ME, b"{}", credential(site, WEB_USER, made))
    assert answer.json()["user"] == WEB_USER


def test_root_on_another_host_is_told_why(site: WebSite) -> None:
    refused = site.cluster.run(
        [STEWARD, "archive", "list"], env={"HOME": "/nonexistent", **far(site)}, check=False
    )
    assert refused.returncode == 1
    assert "cannot authenticate from other hosts" in refused.stderr
    assert "Traceback" not in refused.stderr
