"""A gate on another host: it asks the one that decides, encrypted, and goes by the policy alone."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import msgspec
import pytest

from harness.gate import (
    CLUSTER,
    PATIENCE_S,
    RunningGate,
    account,
    job,
    running,
    settings_of,
    start_worker,
)
from servers.authority import Authority
from steward.bank.gate.requests import LONGEST_BATCH, PluginRequest
from steward.bank.money import MICRO
from steward.core.config import Settings
from steward.core.section import TlsSettings
from steward.core.tls import make_client_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@cache
def issue_certificate(authority: Authority) -> tuple[str, str]:
    """Issue the gates' certificate once: a server may be reading its files."""
    return authority.certificate("IP:127.0.0.1", "DNS:localhost")


def gate_settings(where: Path, authority: Authority, **more: str) -> Settings:
    where.mkdir()
    certificate, key = issue_certificate(authority)
    settings = settings_of(where)
    gate = msgspec.structs.replace(
        settings.gate,
        tls=TlsSettings(
            certificate_file=certificate,
            key_file=key,
            ca_file=authority.file,
            client_ca_file=authority.file,
        ),
        timeout_ms=2000,
        **more,
    )
    return msgspec.structs.replace(settings, gate=gate)


@pytest.fixture
def deciding(tmp_path: Path, authority: Authority, address: str) -> Iterator[RunningGate]:
    settings = gate_settings(tmp_path / "first", authority, listen=address)
    server = start_worker(settings, "run_gate_server")
    try:
        with running(settings) as gate:
            gate.tell(account("chem", 100))
            gate.wait(lambda: can_connect(address))
            yield gate
    finally:
        server.terminate()
        assert server.wait(PATIENCE_S) == 0


def can_connect(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


def is_open(gate: RunningGate) -> bool:
    return os.path.exists(gate.settings.gate_socket)


def is_passed_on(gate: RunningGate) -> bool:
    return "admin_comment" in gate.ask(job(1))


def test_the_other_gate_decides_for_many_at_once(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        deciding.kill()
        assert asking.ask(job(1)) == {"v": 1, "ok": True}, "the policy lets it in"
        deciding.start()
        deciding.wait_open()
        asking.wait(lambda: is_passed_on(asking))
        free = deciding.link.get_means("chem").available // MICRO
        said: list[bool] = []

        def submit() -> None:
            said.append(bool(asking.ask(job(9))["ok"]))

        threads = [threading.Thread(target=submit) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert said.count(True) == free // 10
        assert deciding.link.get_means("chem").available == (free % 10) * MICRO
        refused = asking.ask(job(99))
        assert "account chem has" in refused["say"]


def test_a_gate_of_another_authority_is_not_heard(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    address: str,
    deciding: RunningGate,
) -> None:
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    settings = gate_settings(tmp_path / "second", stranger, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking))
        for _ in range(20):
            assert asking.ask(job(1)) == {"v": 1, "ok": True}
        assert deciding.link.get_means("chem").held == 0
        assert deciding.ask(job(1))["ok"]


def test_a_connection_outlives_the_servers_patience_with_idle_ones(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    with running(gate_settings(tmp_path / "second", authority, ask=address)) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        time.sleep(7)
        assert is_passed_on(asking)


def test_a_late_reply_leaves_the_job_to_the_policy(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        assert deciding.process
        deciding.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            assert asking.ask(job(1)) == {"v": 1, "ok": True}
            assert time.monotonic() - began < 2, "the plugin's time-out"
        finally:
            deciding.process.send_signal(signal.SIGCONT)
        asking.wait(lambda: is_passed_on(asking))


def test_hostile_requests_of_other_hosts_are_rejected(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    certificate, key = authority.certificate("DNS:elsewhere")
    own = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
    sent = msgspec.json.encode(PluginRequest(v=1, op="submit", cluster=CLUSTER, job=job(9)))

    def post(body: bytes, path: str = "/decide", tls: TlsSettings = own) -> httpx.Response:
        with httpx.Client(verify=make_client_context(tls), timeout=PATIENCE_S) as client:
            return client.post(f"https://{address}{path}", content=body)

    held = deciding.link.get_means("chem").held
    assert post(b"[]", "/other").status_code == 404
    bodies = (b"", b"{}", b"[1]", b"[" * 100_000, b"[" + sent + b"],1", b"[" + sent * 2 + b"]")
    for body in (*bodies, b"[" + b",".join([sent] * 51) + b"]", b'[{"v":1,"op":"steal"}]'):
        assert post(body).status_code == 400, body[:80]
    assert post(b" " * (LONGEST_BATCH + 1)).status_code == 413
    with pytest.raises(httpx.TransportError):
        post(b"[]", tls=TlsSettings(ca_file=authority.file))
    assert deciding.link.get_means("chem").held == held
    assert len(post(b"[" + sent + b"]").json()) == 1
    assert deciding.link.get_means("chem").held == held + 10 * MICRO
    newer = sent.replace(b'"v":1', b'"v":2')
    assert post(b"[" + newer + b"]").status_code == 503
    deciding.kill()
    assert post(b"[]").status_code == 503
