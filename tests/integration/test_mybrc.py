"""myBRC API as its clients use it: the old plugins' bytes, many at once, TLS."""

import http.client
import io
import pwd
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from servers.authority import Authority
from servers.mybrc import (
    PASSWORD,
    SU,
    balance,
    client_of,
    job,
    mybrc_settings,
    serving,
    token_of,
    with_money,
)
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.records import ModeRule
from steward.core.config import Settings
from steward.core.http_server import Timeouts
from steward.core.section import TlsSettings

BY = Authorship(who="tests")
JOBCOMP = (
    '{"jobslurmid":"4711","submitdate":"2026-03-01T10:00:00+00:00",'
    '"startdate":"2026-03-01T10:00:05+00:00","enddate":"2026-03-01T10:30:05+00:00",'
    '"userid":"10001","accountid":"physics","amount":"6.00","jobstatus":"COMPLETED",'
    '"partition":"savio2","qos":"normal","nodes":[{"name":"n0000.savio2"},'
    '{"name":"n0001.savio2"}],"num_cpus":12,"num_req_nodes":1,"num_alloc_nodes":2,'
    '"raw_time":0.5,"cpu_time":6.0}'
)
"""Request of jobcomp_bank (2021) at the end of a job, as serde_json writes it."""


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    made = mybrc_settings(tmp_path)
    with_money(made, "physics")
    return made


def said(url: str, request: bytes) -> tuple[int, dict[str, object]]:
    """Return a server's reply to these bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        plain.sendall(request)
        answer = http.client.HTTPResponse(plain)
        answer.begin()
        body = answer.read()
    assert answer.headers["content-type"] == "application/json"
    return answer.status, msgspec.json.decode(body)


def asked(url: str, prefix: str, token: str, cost: str, account: str = "physics") -> bytes:
    """Return the request of job_submit_bank: reqwest 0.9 writes lower-case names in this order."""
    host = url.removeprefix("http://")
    return (
        f"GET {prefix}/can_submit_job/{cost}/10001/{account}/ HTTP/1.1\r\n"
        "user-agent: OpenAPI-Generator/v1/rust\r\n"
        f"authorization: Token {token}\r\n"
        "accept: */*\r\n"
        "accept-encoding: gzip\r\n"
        f"host: {host}\r\n\r\n"
    ).encode()


def put(url: str, prefix: str, token: str, body: str) -> bytes:
    """Return the request of jobcomp_bank."""
    host = url.removeprefix("http://")
    return (
        f"PUT {prefix}/jobs/4711/ HTTP/1.1\r\n"
        "user-agent: OpenAPI-Generator/v1/rust\r\n"
        f"authorization: Token {token}\r\n"
        "content-type: application/json\r\n"
        "accept: */*\r\n"
        "accept-encoding: gzip\r\n"
        f"content-length: {len(body)}\r\n"
        f"host: {host}\r\n\r\n{body}"
    ).encode()


@pytest.mark.parametrize("prefix", ["/mybrc-rest", "/api"])
def test_the_old_plugins_requests_byte_by_byte(site: Settings, prefix: str) -> None:
    with serving(site) as url:
        token = token_of(url, prefix)
        status, answer = said(url, asked(url, prefix, token, "12.50"))
        assert (status, answer["success"]) == (200, True)
        status, answer = said(url, asked(url, prefix, token, "1000.01"))
        assert (status, answer["success"]) == (200, False)
        status, answer = said(url, asked(url, prefix, token, "1.00", "no_such"))
        assert (status, answer["success"]) == (400, False)
        status, answer = said(url, asked(url, prefix, "0" * 40, "1.00"))
        assert status == 401
        for _ in range(2):  # slurmctld writes some records twice
            status, answer = said(url, put(url, prefix, token, JOBCOMP))
            assert status == 200
            assert answer == msgspec.json.decode(JOBCOMP.replace("+00:00", "Z"))
    assert balance(site) == 994 * SU


def test_a_job_is_created_once_and_told_by_form_too(site: Settings) -> None:
    with serving(site) as url, client_of(url, token_of(url), "/api") as client:
        assert client.post("/jobs/", json=job(amount="5")).status_code == 201
        assert client.post("/jobs/", json=job(amount="5")).status_code == 400
        form = {"jobslurmid": "1001", "userid": "10001", "accountid": "physics", "amount": "2"}
        assert client.put("/jobs/1001/", data=form).status_code == 200
        assert [one["amount"] for one in client.get("/jobs/").json()["results"]] == ["2.00"]
        assert client.get("/jobs/1001/").status_code == 405
        assert client.put("/upload_cpu_data/x.zip", content=b"PK").status_code == 403
        login = {"username": "plugin", "password": PASSWORD}
        with httpx.Client(base_url=f"{url}/api", timeout=60) as stranger:
            assert stranger.post("/api_token_auth/", data=login).status_code == 200
            wrong = stranger.post("/api_token_auth/", data=login | {"password": "x"})
        assert wrong.status_code == 400
    assert balance(site) == 998 * SU


@pytest.mark.parametrize("path", ["/swagger.json", "/api/swagger.json"])
def test_the_description_is_where_the_reference_server_has_it(site: Settings, path: str) -> None:
    with serving(site) as url:
        described = httpx.get(f"{url}{path}", timeout=30).json()
        assert described == httpx.get(f"{url}/schema/openapi.json", timeout=30).json()
    assert "/mybrc-rest/jobs" in described["paths"]


def test_pages_lead_to_each_other(site: Settings) -> None:
    with serving(site) as url, client_of(url, token_of(url)) as client:
        for number in range(101):
            client.put(f"/jobs/{number}/", json=job(str(number), amount="0.01"))
        first = client.get("/jobs/", params={"account": "physics"}).json()
        assert (first["count"], len(first["results"]), first["previous"]) == (101, 100, None)
        second = client.get(first["next"]).json()
        assert (len(second["results"]), second["next"]) == (1, None)
        assert client.get(second["previous"]).json() == first
        for wrong in ("page=3", "page=0", "min_amount=x", "start_time=x", "user=%00"):
            assert client.get(f"/jobs/?{wrong}").status_code in (400, 404)
    assert balance(site) == 1000 * SU - 101 * 10_000


def test_many_at_once_are_all_charged(site: Settings) -> None:
    with serving(site) as url, client_of(url, token_of(url)) as client:

        def tell(number: int) -> int:
            body = job(str(number % 50), amount="1.01")
            return client.put(f"/jobs/{number % 50}/", json=body).status_code

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(tell, range(200))) == {200}
    assert balance(site) == 1000 * SU - 50 * 1_010_000


def test_a_mode_that_somebody_set_is_kept_to(site: Settings) -> None:
    ledger = open_ledger(site)
    with serving(site) as url, client_of(url, token_of(url)) as client:

        def is_let_in() -> bool:
            answer = client.get("/can_submit_job/5000/10001/physics/").json()
            return bool(answer["success"])

        assert not is_let_in()
        for mode, is_let in (("observe", True), ("enforce", False), ("off", True)):
            with ledger.transaction() as t:
                t.modes.set(ModeRule(mode=mode, cluster="c"), BY)  # type: ignore[arg-type]
            assert is_let_in() == is_let
    ledger.close()


def test_limits_of_users_closed_accounts_and_members(site: Settings) -> None:
    ledger = open_ledger(site)
    with serving(site) as url, client_of(url, token_of(url)) as client:

        def answer(cost: str, user: str = "daemon") -> str:
            uid = pwd.getpwnam(user).pw_uid
            answered = client.get(f"/can_submit_job/{cost}/{uid}/physics/").json()
            return "" if answered["success"] else str(answered["message"])

        assert not answer("900")
        with ledger.transaction() as t:
            t.accounts.set_user("physics", "daemon", BY, limit=10 * SU)
        assert not answer("10")
        refusal = answer("10.01")
        assert "the spending limit of user daemon in account physics leaves 10.00 SU" in refusal
        with ledger.transaction() as t:
            t.accounts.change("physics", BY, only_listed=True)
        assert "bin may not charge account physics" in answer("1", "bin")
        with ledger.transaction() as t:
            t.accounts.change("physics", BY, closed=True)
        assert "closed" in answer("1")
    ledger.close()


def test_what_is_too_large_or_too_slow_is_ended(site: Settings) -> None:
    with serving(site) as url:
        token = token_of(url)
        with client_of(url, token) as client:
            assert client.put("/jobs/1/", content=b" " * (1 << 21)).status_code == 413
    # A separate server: on a busy host the requests above take as long.
    with serving(site, timeouts=Timeouts(head_s=0.5, request_s=0.5)) as url:
        host, port = url.removeprefix("http://").split(":")
        whole = put(url, "/api", token, JOBCOMP)
        head = whole.index(b"\r\n\r\n") + 4
        for begun in (b"", whole[:20], whole[: head - 2]):
            with socket.create_connection((host, int(port)), timeout=20) as plain:
                plain.sendall(begun)
                assert _rest(plain) == b""
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            plain.sendall(whole[: head + 5])
            assert _rest(plain).startswith(b"HTTP/1.1 408 ")
    assert balance(site) == 1000 * SU


def _rest(plain: socket.socket) -> bytes:
    """Return all data until the peer closes the connection."""
    found = io.BytesIO()
    try:
        while part := plain.recv(4096):
            found.write(part)
    except ConnectionResetError:
        return found.getvalue()  # an end is an end
    return found.getvalue()


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.certificate("IP:127.0.0.1")
    settings = mybrc_settings(tmp_path)
    mybrc = msgspec.structs.replace(
        settings.mybrc, tls=TlsSettings(certificate_file=certificate, key_file=key)
    )
    settings = msgspec.structs.replace(settings, mybrc=mybrc)
    with_money(settings, "physics")
    trusting = ssl.create_default_context(cafile=authority.file)
    with serving(settings, verify=trusting) as url:
        assert url.startswith("https://")
        login = {"username": "plugin", "password": PASSWORD}
        with httpx.Client(verify=trusting, timeout=60) as client:
            token = client.post(f"{url}/api/api_token_auth/", json=login).json()["token"]
            headers = {"Authorization": f"Token {token}"}
            answer = client.get(f"{url}/api/can_submit_job/1/10001/physics/", headers=headers)
            assert answer.json()["success"] is True
