"""Abuse of MUNGE authentication: no user blocks others, and the web process vouches for nobody."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from docs_code_blocks import code
from sandbox_daemon import STEWARD
from web_munge import ME, credential, munge_site, origin, post
from web_site import OPERATOR, WEB_USER, WebSite

from steward.core.munge import build_statement, hash_body

pytestmark = pytest.mark.wide


LOGIN, OTHER = "127.0.0.2", "127.0.0.3"
"""Two login nodes, which users share."""


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[WebSite]:
    with munge_site(slurm_version, requests_per_minute=60) as site:
        yield site


def test_nonsense_from_a_login_node_keeps_none_of_its_users_out(site: WebSite) -> None:
    made = build_statement("POST", ME, b"{}", origin(site))
    good = {user: credential(site, user, made) for user in ("ada", "grace", OPERATOR)}
    used = credential(site, "ada", made)
    assert post(site, ME, b"{}", used, address=LOGIN).status_code == 200
    for nonsense in ("bogus", "MUNGE:AwQFAAD:", used):
        with ThreadPoolExecutor(8) as at_once:
            sent = [
                at_once.submit(post, site, ME, b"{}", nonsense, address=LOGIN) for _ in range(50)
            ]
            assert {one.result().status_code for one in sent} == {401}
        user, shown = good.popitem()
        answer = post(site, ME, b"{}", shown, address=LOGIN)
        assert (answer.status_code, answer.json().get("user")) == (200, user)


def test_who_asks_too_often_keeps_neither_neighbours_nor_other_hosts_waiting(
    site: WebSite,
) -> None:
    made = build_statement("POST", ME, b"{}", origin(site))
    shown = [credential(site, "grace", made) for _ in range(24)]
    with ThreadPoolExecutor(len(shown)) as at_once:
        sent = [at_once.submit(post, site, ME, b"{}", one, address=LOGIN) for one in shown]
        for host in (OTHER, LOGIN):
            answer = post(site, ME, b"{}", credential(site, OPERATOR, made), address=host)
            assert (answer.status_code, answer.json().get("user")) == (200, OPERATOR)
        assert {one.result().status_code for one in sent} == {200, 429}


_VOUCH = """
import json, sys
from steward.client import Client
from steward.core.errors import StewardError
try:
    answer = Client(socket=sys.argv[1]).ask("credentials.ticket", **json.loads(sys.argv[2]))
except StewardError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"secret": answer.secret, "reason": answer.reason}))
"""


def vouched(site: WebSite, **asked: Any) -> dict[str, str]:
    """Return the daemon's reply to a ticket request of the web process."""
    words = [sys.executable, "-c", _VOUCH, site.daemon.settings.socket, json.dumps(asked)]
    done: subprocess.CompletedProcess[str] = site.cluster.run(words, user=WEB_USER)
    said: dict[str, str] = json.loads(done.stdout)
    return said


def test_who_breaks_into_the_pages_is_whom_no_credential_for_them_names(site: WebSite) -> None:
    """A credential for another service gets no ticket, whatever the web process requests."""
    asked = {"method": "POST", "target": ME, "digest": hash_body(b"{}"), "peer": "127.0.0.1"}
    made = build_statement("POST", ME, b"{}", origin(site))
    assert vouched(site, credential=credential(site, "ada", made), **asked)["secret"]
    elsewhere = build_statement("POST", ME, b"{}", "elsewhere.example.org")
    for text in (b"another service's own text", elsewhere):
        said = vouched(site, credential=credential(site, "ada", text), **asked)
        assert (said["secret"], "MUNGE credential was made" in said["reason"]) == ("", True)
        shown = credential(site, "ada", text)
        said = vouched(site, credential=shown, statement=text.decode())
        assert "statement" in said["error"], said
    target = f"{ME}\n{hash_body(b'{}')}\nelsewhere.example.org\n"
    said = vouched(
        site, credential=credential(site, "ada", elsewhere), **asked | {"target": target}
    )
    assert "not an HTTP request" in said["error"], said


def test_what_was_had_by_munge_is_found_after_a_break_in(site: WebSite) -> None:
    """Verify with the command that the page about safety names."""
    env = {"STEWARD_URL": site.url, "STEWARD_MUNGE_SOCKET": site.cluster.plan.munge_socket}
    create = [STEWARD, "token", "create"]
    by_munge = site.cluster.run([*create, "--json"], user="grace", env=env)
    made = json.loads(by_munge.stdout)["token"]
    lasts = datetime.fromisoformat(made["expires"]) - datetime.fromisoformat(made["created"])
    assert lasts == timedelta(days=30)
    longer = site.cluster.run([*create, "--expires", "31d"], user="grace", env=env, check=False)
    assert "at most 30 days for a caller that MUNGE authenticates" in longer.stderr
    site.daemon.ask("token", "create", user="ada")
    (command,) = (block for block in code("safety.md", "sh") if "token list" in block)
    said = site.daemon.ask(*command.split()[1:], "--parsable2").stdout
    found = {(row["User"], row["How"]) for row in csv.DictReader(said.splitlines(), delimiter="|")}
    assert found >= {("grace", "munge"), ("ada", "socket")}
