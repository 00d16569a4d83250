"""steward.client on a real daemon: by its socket, and over TLS from a host without it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_client import token
from docs_code_blocks import code
from job_submission import submit_to, wait_until
from sandbox_daemon import STEWARD
from web_site import ADMINISTRATOR, OPERATOR, USERS, WebSite

from servers.authority import Authority
from steward.archive.requests import JobListReply
from steward.bank.settings import BankSettings
from steward.client import Client, DaemonAway
from steward.core.errors import NotFound, PermissionRefused, UnknownCredential, UsageError
from steward.core.section import TlsSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.wide
API: list[str] = [block for block in code("api.md", "sh") if "| munge)" not in block]
"""Blocks that programs send; test_web_munge has the one without a token."""


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    with Sandbox.up(SandboxSpec(slurm=slurm_version, user_names=USERS), report=print) as box:
        yield box


@pytest.fixture(scope="module")
def authority(cluster: Sandbox) -> Authority:
    return Authority(Path(cluster.directory) / "authority")


@pytest.fixture(scope="module")
def site(cluster: Sandbox, authority: Authority) -> Iterator[WebSite]:
    certificate, key = authority.certificate("IP:127.0.0.1")
    Path(key).chmod(0o644)
    tls = TlsSettings(certificate_file=certificate, key_file=key)
    settings: dict[str, Any] = {"bank": BankSettings(enabled=True), "tls": {"web": tls}}
    home = Path(cluster.directory) / "steward"
    with WebSite(cluster, home, settings=settings, web={"tls": tls}) as site:
        yield site


@pytest.fixture(scope="module")
def far(site: WebSite, authority: Authority) -> Client:
    return Client(url=site.url, token=token(site, "ada", "read", "scripts"), ca_file=authority.file)


@pytest.fixture(scope="module")
def job(site: WebSite) -> int:
    job = submit_to(site.cluster, "#!/bin/sh\necho one\n", user="ada")
    site.daemon.wait_for_script(job)
    return job


def test_it_answers_with_types_wherever_it_is_asked(site: WebSite, far: Client, job: int) -> None:
    wait_until(lambda: bool(far.ask("archive.list").jobs))
    near = Client(socket=site.daemon.settings.socket)
    here = Client(config=str(site.daemon.config))
    for client in (far, near, here):
        answer = client.ask("archive.list", users=["ada"])
        assert isinstance(answer, JobListReply)
        assert [one.job_id for one in answer.jobs] == [job]


def test_a_stream_comes_item_by_item(far: Client, job: int) -> None:
    *items, last = far.stream("archive.export")
    assert type(last).__name__ == "ExportReply"
    assert any(str(job) in getattr(item, "path", "") for item in items)


def test_errors_are_of_their_families(site: WebSite, far: Client, authority: Authority) -> None:
    with pytest.raises(NotFound, match="987"):
        far.ask("archive.show", job="987")
    with pytest.raises(PermissionRefused, match="requires the scope"):
        far.ask("bank.deposit", account="x", amount=1, reason="y")
    with pytest.raises(UsageError, match="whenever"):
        far.ask("archive.list", since="whenever")
    with pytest.raises(UnknownCredential):
        Client(url=site.url, token="stt_x", ca_file=authority.file).ask("credentials.me")
    with pytest.raises(DaemonAway, match="certificate"):
        Client(url=site.url, token="stt_x").ask("credentials.me")
    with pytest.raises(DaemonAway, match="does not answer"):
        Client(url="https://127.0.0.1:9", token="stt_x").ask("credentials.me")


def test_what_is_asked_once_is_done_once(site: WebSite, authority: Authority) -> None:
    olga = token(site, OPERATOR, "read", "bank")
    far = Client(url=site.url, token=olga, ca_file=authority.file)
    near = Client(socket=site.daemon.settings.socket)
    here = Client(config=str(site.daemon.config))
    for number, client in enumerate((far, near, here)):
        name = f"account{number}"
        client.ask("bank.account_create", name=name)
        deposit = {"account": name, "amount": 5, "reason": "grant"}
        first = client.ask("bank.deposit", once=name, **deposit)
        assert client.ask("bank.deposit", once=name, **deposit) == first
        with pytest.raises(UsageError, match="another request"):
            client.ask("bank.deposit", once=name, **deposit | {"amount": 6})
        (balance,) = client.ask("bank.balance", accounts=[name]).accounts
        assert balance.balance == 5


def test_commands_work_where_there_is_no_daemon(
    site: WebSite, authority: Authority, job: int
) -> None:
    where = {"STEWARD_URL": site.url, "SSL_CERT_FILE": authority.file}
    where["STEWARD_TOKEN"] = token(site, "ada", "read", "scripts")
    for words in (["archive", "list"], ["sacct", "-X", "-S", "now-1days"]):
        answer = site.cluster.run([STEWARD, *words, "-P", "-n"], user="ada", env=where, check=False)
        assert str(job) in answer.stdout, answer.stderr
    missing = site.cluster.run([STEWARD, "job", "987"], user="ada", env=where, check=False)
    assert (missing.returncode, "987" in missing.stderr) == (1, True)
    wrong = where | {"STEWARD_TOKEN": "stt_x"}
    refused = site.cluster.run([STEWARD, "job", "1"], user="ada", env=wrong, check=False)
    assert "steward token create" in refused.stderr


@pytest.fixture
def told(site: WebSite, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of the documentation's examples."""
    monkeypatch.setenv("STEWARD_URL", site.url)
    monkeypatch.setenv(
        "STEWARD_TOKEN", token(site, ADMINISTRATOR, "read", "scripts", "bank", "actions")
    )
    monkeypatch.setenv("SSL_CERT_FILE", authority.file)
    monkeypatch.setenv("CURL_CA_BUNDLE", authority.file)
    with contextlib.suppress(UsageError):
        Client(config=str(site.daemon.config)).ask("bank.account_create", name="physics")


def test_the_examples_of_the_client_run(
    told: None, job: int, capsys: pytest.CaptureFixture[str]
) -> None:
    del told, job
    blocks = code("client.md", "python")
    exec(compile("\n".join(blocks), "client.md", "exec"), {})
    printed = capsys.readouterr().out
    assert f"{ADMINISTRATOR} token" in printed
    assert "123456789" in printed
    assert "ExportReply" in printed


@pytest.mark.parametrize("number", range(len(API)))
def test_the_examples_of_the_api_run(told: None, job: int, number: int) -> None:
    del told, job
    done = subprocess.run(
        ["bash", "-e", "-c", API[number]], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"status":4' not in done.stdout, done.stdout
    assert '"status":5' not in done.stdout, done.stdout
