"""A gate on another host: it asks the one that decides, encrypted, and goes by the policy alone."""

import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar, Final

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
from servers.http_server import Quiet, answering
from steward.bank.gate.requests import DECIDE_PATH, LONGEST_BATCH, TIMEOUT_HEADER, PluginRequest
from steward.bank.money import MICRO
from steward.core.config import Settings
from steward.core.section import TlsSettings
from steward.core.tls import make_client_context, make_server_context

OTHER_CLUSTER: Final = "d"
CALLS: Final = 4
"""Calls to the gate that its server makes at once."""
LISTS_OF_HOST: Final = 8
"""Lists of one host that the server reads at once."""


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
        timeout_ms=1000,
        **more,
    )
    cluster = settings.cluster[CLUSTER]
    clusters = {
        CLUSTER: msgspec.structs.replace(cluster, controllers=("localhost",)),
        OTHER_CLUSTER: msgspec.structs.replace(cluster, controllers=("CTL2.example.org.",)),
    }
    return msgspec.structs.replace(settings, gate=gate, cluster=clusters)


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
            assert time.monotonic() - began < 1, "the plugin's time-out"
        finally:
            deciding.process.send_signal(signal.SIGCONT)
        asking.wait(lambda: is_passed_on(asking))


def test_hostile_requests_of_other_hosts_are_rejected(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    sent = encode_request(9)
    held = deciding.link.get_means("chem").held
    asker = Asker(authority, address)
    assert asker.post(b"[]", "/other").status_code == 404
    assert asker.post(b"[]").json() == []
    assert deciding.link.get_status().tally.slowest_us == 0, "nothing was answered"
    bodies = (b"", b"{}", b"[1]", b"[" * 100_000, b"[" + sent + b"],1", b"[" + sent * 2 + b"]")
    for body in (*bodies, b"[" + b",".join([sent] * 51) + b"]", b'[{"v":1,"op":"steal"}]'):
        assert asker.post(body).status_code == 400, body[:80]
    for timeout in ("", "-1", "1e3", "99999", "1.5"):
        assert asker.post(b"[]", timeout_ms=timeout).status_code == 400, timeout
    assert asker.post(b" " * (LONGEST_BATCH + 1)).status_code == 413
    with pytest.raises(httpx.TransportError):
        Asker(authority, address, TlsSettings(ca_file=authority.file)).post(b"[]")
    assert deciding.link.get_means("chem").held == held
    assert len(asker.post(b"[" + sent + b"]").json()) == 1
    assert deciding.link.get_means("chem").held == held + 10 * MICRO
    newer = sent.replace(b'"v":1', b'"v":2')
    assert asker.post(b"[" + newer + b"]").status_code == 503
    deciding.kill()
    assert asker.post(b"[]").status_code == 503


def test_a_certificate_decides_for_the_clusters_of_its_host_only(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    other, stranger = (
        TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
        for certificate, key in map(
            authority.certificate, ("DNS:ctl2.example.org", "DNS:elsewhere")
        )
    )
    own_list, other_list = (
        b"[" + encode_request(9, cluster) + b"]" for cluster in (CLUSTER, OTHER_CLUSTER)
    )
    held = deciding.link.get_means("chem").held
    asker = Asker(authority, address)
    answer = asker.post(other_list)
    assert answer.status_code == 403
    assert "the certificate is for 127.0.0.1, localhost" in answer.text
    assert f"'controllers' of cluster {OTHER_CLUSTER!r}" in answer.text
    assert asker.post(other_list[:-1] + b"," + own_list[1:]).status_code == 403
    assert asker.post(b"[" + encode_request(9, "") + b"]").status_code == 403
    assert Asker(authority, address, other).post(own_list).status_code == 403
    for body in (own_list, other_list, b"[]"):
        assert Asker(authority, address, stranger).post(body).status_code == 403
    assert deciding.link.get_means("chem").held == held
    assert Asker(authority, address, other).post(other_list).status_code == 200
    assert asker.post(own_list).status_code == 200
    assert deciding.link.get_means("chem").held == held + 10 * MICRO


def connect_tls(authority: Authority, address: str, name: str = "") -> ssl.SSLSocket:
    """Open a connection with the gates' certificate, or with one for another name."""
    certificate, key = authority.certificate(name) if name else issue_certificate(authority)
    tls = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
    host, _, port = address.partition(":")
    plain = socket.create_connection((host, int(port)), PATIENCE_S)
    return make_client_context(tls).wrap_socket(plain, server_hostname=host)


def send_part(connection: ssl.SSLSocket) -> None:
    """Send the head of a long list and the beginning of the body."""
    head = f"POST {DECIDE_PATH} HTTP/1.1\r\nHost: x\r\n{TIMEOUT_HEADER}: 70\r\n"
    connection.sendall(f"{head}Content-Length: {LONGEST_BATCH}\r\n\r\n".encode() + b" " * 1000)


def test_a_certificate_of_no_controller_is_rejected_before_its_list_is_read(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    with connect_tls(authority, address, "DNS:elsewhere") as connection:
        connection.settimeout(3)
        send_part(connection)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"connection: close" in answer.lower()


def test_a_host_sends_a_few_lists_at_once_at_most(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    with ExitStack() as connections:
        for _ in range(LISTS_OF_HOST):
            send_part(connections.enter_context(connect_tls(authority, address)))
        asker = Asker(authority, address)
        until = time.monotonic() + PATIENCE_S
        while asker.post(b"[]").status_code != 503:
            assert time.monotonic() < until, "the server reads any number of lists"
    while asker.post(b"[]").status_code != 200:
        assert time.monotonic() < until, "the server still counts closed connections"


def encode_request(minutes: int, cluster: str = CLUSTER) -> bytes:
    return msgspec.json.encode(PluginRequest(v=1, op="submit", cluster=cluster, job=job(minutes)))


class Asker:
    """Posts what a gate of another host posts, and what it never would."""

    def __init__(self, authority: Authority, address: str, tls: TlsSettings | None = None) -> None:
        certificate, key = issue_certificate(authority)
        own = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
        self._context = make_client_context(tls or own)
        self._address = address

    def post(self, body: bytes, path: str = "/decide", timeout_ms: str = "5000") -> httpx.Response:
        with httpx.Client(verify=self._context, timeout=PATIENCE_S) as client:
            headers = {TIMEOUT_HEADER: timeout_ms}
            return client.post(f"https://{self._address}{path}", content=body, headers=headers)

    def post_and_leave(self, body: bytes) -> None:
        """Post a body, and close the connection without waiting for the answer."""
        connection = HTTPSConnection(self._address, context=self._context, timeout=PATIENCE_S)
        connection.request("POST", "/decide", body, {TIMEOUT_HEADER: "5000"})
        connection.close()


@contextmanager
def stopped(gate: RunningGate) -> Iterator[None]:
    """Stop the gate's process within the block."""
    assert gate.process
    gate.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        gate.process.send_signal(signal.SIGCONT)


def test_a_request_is_not_decided_when_its_asker_waits_no_longer(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        held = deciding.link.get_means("chem").held
        with stopped(deciding):
            assert asking.ask(job(49)) == {"v": 1, "ok": True}
            time.sleep(0.1)  # its time is over there a moment later
        asking.wait(lambda: is_passed_on(asking))
        assert deciding.link.get_means("chem").held == held + 2 * MICRO


def test_a_gate_that_hangs_does_not_stop_the_server(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    asker = Asker(authority, address)
    with stopped(deciding), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asker.post, b"[]", timeout_ms="1500")
        time.sleep(0.3)
        assert asker.post(b"[]", "/other").status_code == 404
        assert not answer.done()
        assert answer.result(PATIENCE_S).status_code == 503


def test_a_request_whose_connection_is_closed_is_not_decided(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    asker = Asker(authority, address)
    list_of_one = b"[" + encode_request(9) + b"]"
    with ThreadPoolExecutor(CALLS) as threads:
        with stopped(deciding):
            answers = [threads.submit(asker.post, list_of_one) for _ in range(CALLS)]
            time.sleep(0.5)  # all of the server's calls to the gate wait
            asker.post_and_leave(list_of_one)
            time.sleep(0.5)
        assert [answer.result(PATIENCE_S).status_code for answer in answers] == [200] * CALLS
    assert asker.post(b"[]").status_code == 200
    assert deciding.link.get_means("chem").held == CALLS * 10 * MICRO


class _Answers(Quiet, BaseHTTPRequestHandler):
    """Answers lists of requests, the next ones late or with an error, as a test says."""

    protocol_version = "HTTP/1.1"
    connections = 0
    delays_s: ClassVar[list[float]] = []
    statuses: ClassVar[list[int]] = []

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def do_POST(self) -> None:
        requests = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        delay_s, status = 0.0, 200
        if requests:
            delay_s = self.delays_s.pop(0) if self.delays_s else 0.0
            status = self.statuses.pop(0) if self.statuses else 200
        time.sleep(delay_s)
        body = json.dumps([{"v": 1, "ok": True, "admin_comment": "decided"} for _ in requests])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@contextmanager
def run_answers(
    tmp_path: Path, authority: Authority
) -> Iterator[tuple[type[_Answers], RunningGate]]:
    """Run an HTTPS server in the other gate's place, and the gate that asks it."""
    handler = type("Answers", (_Answers,), {"delays_s": [], "statuses": []})
    with answering(handler) as server:
        certificate, key = issue_certificate(authority)
        tls = TlsSettings(certificate_file=certificate, key_file=key)
        server.socket = make_server_context(tls).wrap_socket(server.socket, server_side=True)
        address = f"127.0.0.1:{server.server_address[1]}"
        with running(gate_settings(tmp_path / "second", authority, ask=address)) as asking:
            asking.wait(lambda: is_open(asking) and is_passed_on(asking))
            yield handler, asking


@pytest.fixture
def answers(tmp_path: Path, authority: Authority) -> Iterator[tuple[type[_Answers], RunningGate]]:
    with run_answers(tmp_path, authority) as both:
        yield both


def test_an_error_of_the_other_gate_fails_its_own_requests_only(
    answers: tuple[type[_Answers], RunningGate],
) -> None:
    handler, asking = answers
    for status in (503, 400):
        handler.statuses.append(status)
        assert asking.ask(job(1)) == {"v": 1, "ok": True}, "the policy lets it in"
        assert is_passed_on(asking)
    assert handler.connections == 1


def test_a_late_answer_fails_its_own_requests_only(
    answers: tuple[type[_Answers], RunningGate],
) -> None:
    handler, asking = answers
    handler.delays_s.append(0.8)  # of 0.7 s
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(is_passed_on, asking)
        time.sleep(0.4)
        assert is_passed_on(asking), "it waited behind the late one"
        assert not late.result(PATIENCE_S)
    assert is_passed_on(asking)
    assert handler.connections == 1


def measure_asks(gate: RunningGate, count: int) -> list[float]:
    """Ask the gate about a job one time after the other; return the duration of each, in s."""
    durations_s = []
    for _ in range(count):
        began = time.monotonic()
        assert gate.ask(job(1)) == {"v": 1, "ok": True}, "the policy lets it in"
        durations_s.append(time.monotonic() - began)
    return durations_s


def test_the_policy_answers_at_once_while_the_other_gate_hangs(
    tmp_path: Path,
    authority: Authority,
    address: str,
    deciding: RunningGate,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        with stopped(deciding):
            assert max(measure_asks(asking, 30)[4:]) < 0.35, "half the time of a late reply"
            time.sleep(2.5)
            assert max(measure_asks(asking, 10)) < 0.35, "an empty list had no answer either"
        asking.wait(lambda: is_passed_on(asking))
    assert capfd.readouterr().err.count("lists of requests in a row") == 1


def test_the_policy_answers_at_once_while_replies_are_late(
    tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_answers(tmp_path, authority) as (handler, asking):
        handler.delays_s += [0.8] * 9  # of 0.7 s
        durations_s = measure_asks(asking, 20)
        assert sum(duration_s > 0.35 for duration_s in durations_s) in (3, 4)
        asking.wait(lambda: is_passed_on(asking) and not handler.delays_s)
        assert handler.connections == 1
    assert capfd.readouterr().err.count("lists of requests in a row") == 1
