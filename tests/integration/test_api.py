"""API on a real daemon: permissions, pages, idempotency keys, and errors."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_client import Program, token
from job_submission import submit_to, wait_until
from web_site import OPERATOR, USERS, WebSite

from steward.bank.settings import BankSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.wide

ALL = ("read", "scripts", "bank", "actions", "admin")


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[WebSite]:
    spec = SandboxSpec(slurm=slurm_version, user_names=USERS)
    settings: dict[str, Any] = {"bank": BankSettings(enabled=True)}
    with (
        Sandbox.up(spec, report=print) as cluster,
        WebSite(cluster, Path(cluster.directory) / "steward", settings=settings) as site,
    ):
        yield site


@pytest.fixture(scope="module")
def ada(site: WebSite) -> Iterator[Program]:
    with Program(site, "ada", "read", "scripts") as program:
        yield program


@pytest.fixture(scope="module")
def olga(site: WebSite) -> Iterator[Program]:
    with Program(site, OPERATOR, *ALL) as program:
        yield program


@pytest.fixture(scope="module")
def jobs(site: WebSite, ada: Program) -> list[int]:
    script = "#!/bin/sh\necho one\n"
    found = [submit_to(site.cluster, script, user="ada") for _ in range(3)]
    for job in found:
        site.daemon.wait_for_script(job)
    wait_until(lambda: len(ada.told("/jobs")["jobs"]) == len(found), 60)
    # The catalog adds scripts each half second at most.
    wait_until(lambda: len(ada.told("/scripts", terms="echo one")["hits"]) > 0, 60)
    return found


def test_a_job_is_told_whole(ada: Program, jobs: list[int]) -> None:
    job = jobs[0]
    assert ada.told(f"/jobs/{job}")["job"] == str(job)
    assert "echo one" in str(ada.told(f"/jobs/{job}/script")["content"])
    names = {one["name"] for one in ada.told(f"/jobs/{job}/environment")["variables"]}
    assert "PATH" in names
    assert ada.told(f"/jobs/{job}/diff/{jobs[1]}")["identical"]
    assert ada.told("/scripts", terms="echo one")["hits"]
    assert ada.told("/me")["user"] == "ada"


def test_another_has_neither_script_nor_environment(site: WebSite, jobs: list[int]) -> None:
    with Program(site, "grace", "read", "scripts") as grace:
        for what in ("script", "environment", f"diff/{jobs[1]}"):
            assert grace.get(f"/jobs/{jobs[0]}/{what}").status_code in (403, 404), what
        assert grace.told("/scripts", terms="echo one")["hits"] == []


def test_a_token_does_what_it_was_made_for_and_no_more(site: WebSite, jobs: list[int]) -> None:
    with Program(site, "ada", "read") as program:
        assert program.told("/jobs")["jobs"]
        for path in (f"/jobs/{jobs[0]}/script", "/tokens"):
            refused = program.get(path)
            assert refused.status_code == 403
            assert "requires the scope" in refused.json()["detail"]
        assert program.post("/tokens", json={}).status_code == 403
        assert program.post("/actions/slurm.node.drain", json={}).status_code == 403


def test_a_token_of_scope_actions_reads_no_scripts(site: WebSite, jobs: list[int]) -> None:
    said = {"parameters": {"jobid": str(jobs[0])}}
    key = {"Idempotency-Key": "script-get"}
    with Program(site, "ada", "actions", "scripts") as program:
        told = program.post("/actions/slurm.script.get", headers=key, json=said)
        assert "echo one" in told.json()["result"]["script"]
    for user in ("ada", OPERATOR):
        with Program(site, user, "actions", "read") as program:
            refused = program.post("/actions/slurm.script.get", json=said)
            assert refused.status_code == 403, refused.text
            assert "requires the scope 'scripts'" in refused.text
            assert (
                "echo one"
                not in program.post("/actions/slurm.script.get", headers=key, json=said).text
            )
    with Program(site, "ada", "actions") as program:
        refused = program.post("/actions/bank.balance", json={"parameters": {}})
        assert refused.status_code == 403, refused.text


def test_figures_show_accounts_to_an_operators_token_alone(site: WebSite, olga: Program) -> None:
    assert olga.post("/accounts", json={"name": "figures"}).status_code == 200
    passed_on = {"X-Forwarded-For": "192.0.2.7"}
    expected = {
        token(site, OPERATOR, "read"): 200,
        token(site, OPERATOR, "bank"): 403,
        token(site, "ada", "read"): 403,
    }
    # Each over a separate connection: a busy host may close an idle one meanwhile.
    with site.stranger(headers={"Connection": "close"}) as stranger:
        plain = stranger.get("/metrics")
        assert "steward_up 1.0" in plain.text
        assert "figures" not in plain.text
        assert "steward_account" not in plain.text
        for secret, status in expected.items():
            bearer = {"Authorization": f"Bearer {secret}", **passed_on}
            told = stranger.get("/metrics", headers=bearer)
            assert told.status_code == status, told.text
            assert ('steward_account_balance_su{account="figures"}' in told.text) == (status == 200)


def test_nobody_and_who_is_not_known_is_told_to_log_in(site: WebSite) -> None:
    for headers in ({}, {"Authorization": "Bearer stt_x"}, {"Authorization": "Basic eDp5"}):
        with site.stranger(headers=headers) as stranger:
            answer = stranger.get("/api/v1/jobs")
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"] == "Bearer, Munge"


def test_a_token_that_was_taken_back_lets_nobody_in(site: WebSite) -> None:
    with Program(site, "ada", "read", "admin") as program:
        (mine,) = [
            one["id"]
            for one in program.told("/tokens")["tokens"]
            if one["scopes"] == ["read", "admin"] and not one.get("ended")
        ]
        assert program.delete(f"/tokens/{mine}").status_code == 200
        assert program.get("/tokens").status_code == 401


def test_a_browser_needs_the_word_of_a_page_to_change_something(
    site: WebSite, jobs: list[int]
) -> None:
    visitor = site.visitor("ada")
    ask = "/api/v1/ask/accounting.jobs"
    assert visitor.post(ask, json={}).status_code == 403
    answer = visitor.post(ask, json={}, headers={"X-CSRF-Token": visitor.csrf()})
    assert len(answer.json()["jobs"]) == len(jobs)
    assert visitor.get("/api/v1/jobs").status_code == 200


def test_pages_follow_one_another_and_end(ada: Program, jobs: list[int]) -> None:
    found, where = [], "/jobs?limit=2"
    for _ in range(len(jobs)):
        answer = ada.get(where.removeprefix("/api/v1"))
        page = answer.json()
        found += [row["job_id"] for row in page["jobs"]]
        if not page["next"]:
            assert "next" not in answer.links
            break
        where = answer.links["next"]["url"]
    assert sorted(found) == sorted(jobs)
    assert ada.get("/jobs", params={"cursor": "nonsense"}).status_code == 422


def test_what_is_as_it_was_is_not_sent_again(ada: Program, jobs: list[int]) -> None:
    first = ada.get(f"/jobs/{jobs[0]}/script")
    known = {"If-None-Match": first.headers["etag"]}
    again = ada.get(f"/jobs/{jobs[0]}/script", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert ada.get(f"/jobs/{jobs[1]}/script", headers=known).status_code == 200
    assert "no-cache" in first.headers["cache-control"]


def test_what_is_asked_again_under_a_key_is_done_once(olga: Program) -> None:
    olga.post("/accounts", json={"name": "physics"}).raise_for_status()
    deposit = {"amount": 5_000_000, "reason": "grant"}

    def put(key: str, **more: Any) -> httpx.Response:
        return olga.post(
            "/accounts/physics/deposits", json=deposit | more, headers={"Idempotency-Key": key}
        )

    first, again = put("k1"), put("k1")
    assert first.status_code == 200
    assert again.json() == first.json()
    (balance,) = olga.told("/accounts/physics/balance")["accounts"]
    assert balance["balance"] == 5_000_000
    other = put("k1", amount=1)
    assert other.status_code == 422
    assert "another request" in other.json()["detail"]
    # A rejected request changed nothing, and its key is free.
    wrong = olga.post("/accounts/nobody/deposits", json=deposit, headers={"Idempotency-Key": "k2"})
    assert wrong.status_code == 404
    assert put("k2").status_code == 200


def test_modes_of_others_accounts_are_not_told(site: WebSite, olga: Program) -> None:
    olga.post("/accounts", json={"name": "secret"}).raise_for_status()
    for mode in ({"mode": "observe"}, {"mode": "off", "account": "secret"}):
        olga.post("/ask/bank.mode", json=mode).raise_for_status()
    with Program(site, "ada", "bank") as ada:
        for program, accounts in ((olga, {"", "secret"}), (ada, {""})):
            answer = program.post("/ask/bank.mode", json={})
            answer.raise_for_status()
            assert {rule.get("account", "") for rule in answer.json()["rules"]} == accounts


def test_a_key_is_done_once_however_many_come_at_once(olga: Program) -> None:
    olga.post("/accounts", json={"name": "storm"}).raise_for_status()
    answers: list[int] = []

    def one() -> None:
        answer = olga.post(
            "/accounts/storm/deposits",
            json={"amount": 7, "reason": "x"},
            headers={"Idempotency-Key": "storm"},
        )
        answers.append(answer.status_code)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {200, 409}
    assert 200 in answers
    (balance,) = olga.told("/accounts/storm/balance")["accounts"]
    assert balance["balance"] == 7


def test_a_tokens_secret_is_not_kept_for_its_key(site: WebSite) -> None:
    with Program(site, "ada", "admin") as program:
        # A token makes no tokens; a browser's session does.
        assert program.post("/tokens", json={}).status_code == 403
    visitor = site.visitor("ada")
    headers = {"Idempotency-Key": "t1", "X-CSRF-Token": visitor.csrf()}
    made = visitor.post("/api/v1/tokens", json={"scopes": ["read"]}, headers=headers)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    again = visitor.post("/api/v1/tokens", json={"scopes": ["read"]}, headers=headers)
    assert again.status_code == 409
    secret = made.json()["secret"].encode()
    assert site.daemon.bytes_anywhere(secret) == []


def test_what_is_wrong_is_said(ada: Program) -> None:
    for path, status, said in (
        ("/jobs?limt=3", 400, "unknown parameter 'limt'"),
        ("/jobs?limit=x", 400, "not a whole number"),
        ("/jobs?limit=1&limit=2", 400, "duplicate parameter 'limit'"),
        ("/scripts", 400, "missing parameter 'terms'"),
        ("/jobs?since=whenever", 422, "whenever"),
        ("/jobs/999999", 404, "999999"),
        ("/nothing", 404, "page not found"),
        ("/rules", 403, ""),
    ):
        answer = ada.get(path)
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert said in answer.json()["detail"], path
        assert answer.json()["status"] == status
    wrong = ada.post("/ask/accounting.jobs", json={"nothing": 1})
    assert wrong.status_code == 400
    plain = {"Content-Type": "text/plain"}
    assert ada.post("/ask/accounting.jobs", content="{}", headers=plain).status_code == 415
    assert ada.post("/ask/accounting.jobs", content=b"x" * (3 << 20)).status_code == 413
    assert ada.delete("/jobs").status_code == 405


def test_local_commands_are_not_to_be_had(site: WebSite) -> None:
    """Neither a token nor a session runs them, not even an administrator's."""
    visitor = site.visitor("carl")
    body = {"parameters": {"cmd": ["/bin/true"]}}
    headers = {"X-CSRF-Token": visitor.csrf()}
    with Program(site, "carl", "actions") as program:
        for action in ("local.command", "slurm.trigger.set"):
            for answer in (
                program.post(f"/actions/{action}", json=body),
                visitor.post(f"/api/v1/actions/{action}", json=body, headers=headers),
            ):
                assert answer.status_code == 403, (action, answer.text)
                assert "only for callers on this host" in answer.json()["detail"]


def test_a_stream_comes_line_by_line_and_says_how_it_ended(ada: Program, jobs: list[int]) -> None:
    answer = ada.post("/ask/archive.export", json={})
    assert answer.headers["content-type"].startswith("application/jsonl")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len([line for line in lines if line.get("item", {}).get("path")]) >= len(jobs)
    assert lines[-1]["ok"]
    assert all("item" in line for line in lines[:-1])


def test_events_come_as_they_happen(site: WebSite, olga: Program) -> None:
    with olga.stream("GET", "/events/stream?kinds=job.state&kinds=job.end&kinds=job.seen") as told:
        assert told.headers["content-type"].startswith("text/event-stream")
        lines = told.iter_lines()
        assert next(lines).startswith("retry:")
        submit_to(site.cluster, "#!/bin/sh\ntrue\n", user="ada")
        assert next(line for line in lines if line.startswith("event: job.")) is not None


def test_who_looks_at_events_no_more_makes_room(olga: Program) -> None:
    """Streams are limited, and each ends when its client disconnects."""
    for _ in range(120):
        with olga.stream("GET", "/events/stream") as told:
            assert told.status_code == 200
            assert next(told.iter_lines()).startswith("retry:")


def test_the_document_is_for_everyone_and_tells_of_all(site: WebSite) -> None:
    with site.stranger() as stranger:
        document = stranger.get("/api/v1/openapi.json").json()
    assert "/ask/bank.balance" in document["paths"]
    assert "/ask/credentials.open" not in document["paths"]
    assert token(site, "ada").startswith("stt_")
