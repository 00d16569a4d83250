"""A gate on another host: it asks the one that decides, encrypted, and goes by the policy alone."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.gate import PATIENCE_S, RunningGate, account, job, running, settings_of
from servers.authority import Authority
from steward.bank.money import MICRO
from steward.core.config import Settings
from steward.core.section import TlsSettings


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def gate_settings(where: Path, authority: Authority, **more: str) -> Settings:
    where.mkdir()
    certificate, key = authority.certificate("IP:127.0.0.1", "DNS:localhost")
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
    with running(gate_settings(tmp_path / "first", authority, listen=address)) as gate:
        gate.tell(account("chem", 100))
        yield gate


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
