"""Pages of users and reports on a real cluster, and their permissions."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from job_submission import submit_to, wait_until
from web_site import OPERATOR, USERS, WebSite

from steward.sandbox import Sandbox, SandboxSpec
from steward.web.pages.reports import REPORT_KINDS

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def site() -> Iterator[WebSite]:
    spec = SandboxSpec(user_names=USERS, extra=("PrivateData=jobs,usage,users,accounts",))
    with (
        Sandbox.up(spec, report=print) as box,
        WebSite(box, Path(box.directory) / "steward") as site,
    ):
        for user in ("ada", "ada", "grace"):
            submit_to(box, "#!/bin/sh\nsleep 1\n", user=user, output="/dev/null", time="5")
        wait_until(lambda: len(site.daemon.ask_json("archive", "list")["jobs"]) == 3)
        ended = '"COMPLETED"'
        wait_until(lambda: site.daemon.ask("archive", "list", "--json").stdout.count(ended) == 3)
        yield site


def table_of(site: WebSite, user: str, kind: str, **asked: str) -> list[dict[str, str]]:
    """Return a downloaded report as rows."""
    query = {"since": "now-1days", "until": "now", "form": "csv", **asked}
    said = site.visitor(user).page(f"/reports/{kind}/table", **query)
    return list(csv.DictReader(io.StringIO(said)))


@pytest.mark.parametrize("kind", REPORT_KINDS)
def test_every_report_is_a_page_a_table_and_a_download(site: WebSite, kind: str) -> None:
    operator = site.visitor(OPERATOR)
    page = operator.page(f"/reports/{kind}", since="now-1days", until="now", by="day")
    link = re.search(r'hx-get="([^"]+)"', page)
    assert link, page
    path = link[1].replace("&amp;", "&")
    assert "<table>" in operator.page(path)
    part = operator.get(path, headers={"HX-Request": "true"}).text
    assert "<table>" in part
    assert "<html" not in part
    assert table_of(site, OPERATOR, kind)
    answer: httpx.Response = operator.get(f"/reports/{kind}/table?since=now-1days&form=json")
    assert answer.json()["periods"]


def test_everybody_is_told_of_their_own_jobs(site: WebSite) -> None:
    every = {row["User"]: row["Jobs"] for row in table_of(site, OPERATOR, "users")}
    assert every == {"ada": "2", "grace": "1"}
    mine = {row["User"]: row["Jobs"] for row in table_of(site, "grace", "users")}
    assert mine == {"grace": "1"}
    page = site.visitor("grace").page("/reports/users/table")
    assert "This report covers only jobs visible to you" in page
    others = table_of(site, "grace", "users", users="ada")
    assert others == []


def test_what_there_is_no_report_of(site: WebSite) -> None:
    visitor = site.visitor("ada")
    assert visitor.get("/reports/nonsense").status_code == 404
    assert visitor.get("/reports/users/table?since=gibberish").status_code in (400, 422)


def test_a_user_sees_their_own_page_whole_and_others_as_far_as_they_may(site: WebSite) -> None:
    ada = site.visitor("ada")
    own, other = ada.page("/users/ada"), ada.page("/users/grace")
    assert "Your tokens" in own
    assert own.count('<th scope="row"><a href="/jobs/box/') == 2
    assert "Your tokens" not in other
    assert "No jobs visible to you" in other
    for mark in ("<meter", "\N{NARROW NO-BREAK SPACE}%"):
        assert mark not in ada.page("/users/grace/efficiency")
        assert mark in ada.page("/users/ada/efficiency")
    assert site.visitor(OPERATOR).page("/users/grace").count('href="/jobs/box/') == 1


def test_tokens_are_made_shown_once_and_taken_back(site: WebSite) -> None:
    ada, grace = site.visitor("ada"), site.visitor("grace")
    answer = ada.submit("/users/ada/tokens", name="cron", days="3", scopes="read")
    assert answer.status_code == 200
    found = re.search(r"stt_[\w-]+", answer.text)
    assert found
    assert found[0] not in ada.page("/users/ada")
    program = site.stranger(headers={"Authorization": f"Bearer {found[0]}"})
    assert program.get("/jobs").status_code == 200
    listed = site.daemon.ask_json("token", "list", user="ada")["tokens"]
    number = str(next(one["id"] for one in listed if one["name"] == "cron"))
    assert grace.submit("/users/grace/revoke", number=number).status_code == 404
    assert grace.submit("/users/ada/revoke", number=number).status_code == 403
    assert grace.submit("/users/ada/tokens", name="x", days="3").status_code == 403
    assert program.get("/jobs").status_code == 200
    assert ada.submit("/users/ada/revoke", number=number).status_code == 303
    wait_until(lambda: program.get("/jobs").status_code == 401)
    program.close()
    for days in ("", "x", "99999", "4000"):
        assert ada.submit("/users/ada/tokens", days=days, scopes="read").status_code == 400
