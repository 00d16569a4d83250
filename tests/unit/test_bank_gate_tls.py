"""A gate that asks another over TLS, and applies the outage policy when it gets no reply."""

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import msgspec
import pytest
from job_submission import wait_until

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
from steward.bank.gate.requests import DECIDE_PATH, LONGEST_BATCH, PluginRequest
from steward.bank.money import MICRO
from steward.core.config import Settings
from steward.core.rpc import connect_socket
from steward.core.section import TlsSettings
from steward.core.tls import make_client_context, make_server_context

OTHER_CLUSTER: Final = "d"
CALLS: Final = 4
"""Number of simultaneous calls of the server to the gate."""
SENT_US: Final = 1_000_000_000
"""Time at which these tests send lists, by the asking host's clock, in µs."""
LISTS_OF_HOST: Final = 8
"""Number of lists of one host that the server reads at the same time."""


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


def gate_settings(
    where: Path, authority: Authority, *, timeout_ms: int = 1000, **more: str
) -> Settings:
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
        timeout_ms=timeout_ms,
        **more,
    )
    cluster = settings.cluster[CLUSTER]
    clusters = {
        CLUSTER: msgspec.structs.replace(cluster, controllers=("localhost",)),
        OTHER_CLUSTER: msgspec.structs.replace(cluster, controllers=("CTL2.example.org.",)),
    }
    return msgspec.structs.replace(settings, gate=gate, cluster=clusters)


@pytest.fixture
def deciding_settings(tmp_path: Path, authority: Authority, address: str) -> Settings:
    return gate_settings(tmp_path / "first", authority, listen=address)


@contextmanager
def serving(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process that serves gates on other hosts."""
    process = start_worker(settings, "run_gate_server")
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def server(deciding_settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    with serving(deciding_settings) as process:
        yield process


@pytest.fixture
def deciding(
    deciding_settings: Settings, server: subprocess.Popen[bytes], address: str
) -> Iterator[RunningGate]:
    with running(deciding_settings) as gate:
        gate.tell(account("chem", 100))
        gate.wait(lambda: can_connect(address))
        yield gate


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to a lower nice value")
def test_the_server_goes_before_bulk_work_but_never_at_real_time(
    server: subprocess.Popen[bytes], address: str
) -> None:
    wait_until(lambda: can_connect(address))
    assert os.getpriority(os.PRIO_PROCESS, server.pid) == -10
    assert os.sched_getscheduler(server.pid) == os.SCHED_OTHER


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
    assert asker.post(encode_list(), "/other").status_code == 404
    assert asker.post(encode_list()).json() == []
    assert deciding.link.get_status().tally.slowest_us == 0, "nothing was answered"
    bodies = (b"", b"{}", b"[1]", b"[" * 100_000, encode_list(sent) + b",1", encode_list()[:-1])
    for body in (*bodies, encode_list(*[sent] * 51), encode_list(b'{"v":1,"op":"steal"}')):
        assert asker.post(body).status_code == 400, body[:80]
    for time_us in (b"-1", b'"1"', b"1.5", b"1" * 30):
        body = b'{"sent_us":0,"due_us":' + time_us + b"}"
        assert asker.post(body).status_code == 400, time_us
    assert asker.post(b" " * (LONGEST_BATCH + 1)).status_code == 413
    with pytest.raises(httpx.TransportError):
        Asker(authority, address, TlsSettings(ca_file=authority.file)).post(encode_list())
    assert deciding.link.get_means("chem").held == held
    assert len(asker.post(encode_list(sent)).json()) == 1
    assert deciding.link.get_means("chem").held == held + 10 * MICRO
    newer = sent.replace(b'"v":1', b'"v":2')
    assert "cannot decode" in asker.post(encode_list(newer)).json()[0]
    deciding.kill()
    assert asker.post(encode_list()).status_code == 503


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
        encode_list(encode_request(9, cluster)) for cluster in (CLUSTER, OTHER_CLUSTER)
    )
    held = deciding.link.get_means("chem").held
    asker = Asker(authority, address)
    [reason] = asker.post(other_list).json()
    assert "the certificate is for 127.0.0.1, localhost" in reason
    assert f"'controllers' of cluster {OTHER_CLUSTER!r}" in reason
    assert "'controllers'" in asker.post(encode_list(encode_request(9, ""))).json()[0]
    assert "'controllers'" in Asker(authority, address, other).post(own_list).json()[0]
    for body in (own_list, other_list, encode_list()):
        assert Asker(authority, address, stranger).post(body).status_code == 403
    assert deciding.link.get_means("chem").held == held
    [undecided] = Asker(authority, address, other).post(other_list).json()
    assert undecided == {"v": 1, "ok": True}, "the gate has no state of that cluster"
    clusters = (OTHER_CLUSTER, CLUSTER, "")
    mixed = asker.post(encode_list(*(encode_request(9, cluster) for cluster in clusters))).json()
    assert [isinstance(reply, dict) and reply["ok"] for reply in mixed] == [False, True, False]
    assert asker.post(own_list).status_code == 200
    assert deciding.link.get_means("chem").held == held + 20 * MICRO


def test_a_request_whose_time_is_over_fails_alone(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    sent = encode_request(9)
    replies = Asker(authority, address).post(encode_list(sent, sent, waits_s=(5.0, -1.0))).json()
    assert replies[0]["ok"]
    assert "came too late" in replies[1]
    assert deciding.link.get_means("chem").held == 10 * MICRO


def connect_tls(authority: Authority, address: str, name: str = "") -> ssl.SSLSocket:
    """Open a connection with the gates' certificate, or with one for another name."""
    certificate, key = authority.certificate(name) if name else issue_certificate(authority)
    tls = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
    host, _, port = address.partition(":")
    plain = socket.create_connection((host, int(port)), PATIENCE_S)
    connection: ssl.SSLSocket = make_client_context(tls).wrap_socket(plain, server_hostname=host)
    return connection


def send_part(connection: ssl.SSLSocket) -> None:
    """Send the head of a long list and the beginning of the body."""
    head = f"POST {DECIDE_PATH} HTTP/1.1\r\nHost: x\r\n"
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


def test_a_host_of_no_controller_learns_no_clusters_name_and_the_log_tells_once(
    deciding_settings: Settings,
    authority: Authority,
    address: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    certificate, key = authority.certificate("DNS:elsewhere")
    stranger = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
    with serving(deciding_settings), running(deciding_settings) as gate:
        gate.wait(lambda: can_connect(address))
        for _ in range(2):
            reply = Asker(authority, address, stranger).post(encode_list(encode_request(9)))
            assert reply.status_code == 403
            assert reply.text.startswith("the certificate is for elsewhere, ")
            assert repr(CLUSTER) not in reply.text
    logged = capfd.readouterr().err
    [line] = [line for line in logged.splitlines() if "is for elsewhere" in line]
    assert f"none of the 'controllers' of cluster {CLUSTER!r}, {OTHER_CLUSTER!r}" in line


def test_a_host_sends_a_few_lists_at_once_at_most(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    with ExitStack() as connections:
        for _ in range(LISTS_OF_HOST):
            send_part(connections.enter_context(connect_tls(authority, address)))
        asker = Asker(authority, address)
        until = time.monotonic() + PATIENCE_S
        while asker.post(encode_list()).status_code != 503:
            assert time.monotonic() < until, "the server reads any number of lists"
    while asker.post(encode_list()).status_code != 200:
        assert time.monotonic() < until, "the server still counts closed connections"


def encode_request(minutes: int, cluster: str = CLUSTER) -> bytes:
    return msgspec.json.encode(PluginRequest(v=1, op="submit", cluster=cluster, job=job(minutes)))


def encode_list(
    *requests: bytes, waits_s: Iterable[float] = repeat(5.0), due_s: float = 5
) -> bytes:
    """Encode a list of requests in JSON, each with the time that its asker waits."""
    due = [
        b'{"request":' + request + b',"due_us":%d}' % (SENT_US + wait_s * 1e6)
        for request, wait_s in zip(requests, waits_s, strict=False)
    ]
    times = b'{"sent_us":%d,"due_us":%d' % (SENT_US, SENT_US + due_s * 1e6)
    return times + b',"requests":[' + b",".join(due) + b"]}"


class Asker:
    """Client that posts requests of another host's gate, and invalid ones."""

    def __init__(self, authority: Authority, address: str, tls: TlsSettings | None = None) -> None:
        certificate, key = issue_certificate(authority)
        own = TlsSettings(certificate_file=certificate, key_file=key, ca_file=authority.file)
        self._context = make_client_context(tls or own)
        self._address = address

    def post(self, body: bytes, path: str = "/decide") -> httpx.Response:
        with httpx.Client(verify=self._context, timeout=PATIENCE_S) as client:
            return client.post(f"https://{self._address}{path}", content=body)

    def post_and_leave(self, body: bytes) -> None:
        """Post a body, and close the connection without waiting for the answer."""
        connection = HTTPSConnection(self._address, context=self._context, timeout=PATIENCE_S)
        connection.request("POST", "/decide", body)
        connection.close()


@contextmanager
def stopped(process: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Stop a process within the block."""
    assert process
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_request_is_not_decided_when_its_asker_waits_no_longer(
    tmp_path: Path, authority: Authority, address: str, deciding: RunningGate
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        held = deciding.link.get_means("chem").held
        with stopped(deciding.process):
            assert asking.ask(job(49)) == {"v": 1, "ok": True}
            time.sleep(0.1)  # its deadline there passes a moment later
        asking.wait(lambda: is_passed_on(asking))
        assert deciding.link.get_means("chem").held == held + 2 * MICRO


def test_a_gate_that_hangs_does_not_stop_the_server(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    asker = Asker(authority, address)
    with stopped(deciding.process), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asker.post, encode_list(due_s=1.5))
        time.sleep(0.3)
        assert asker.post(encode_list(), "/other").status_code == 404
        assert not answer.done()
        assert answer.result(PATIENCE_S).status_code == 503


def test_a_request_whose_connection_is_closed_is_not_decided(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    asker = Asker(authority, address)
    list_of_one = encode_list(encode_request(9))
    with ThreadPoolExecutor(CALLS) as threads:
        with stopped(deciding.process):
            answers = [threads.submit(asker.post, list_of_one) for _ in range(CALLS)]
            time.sleep(0.5)  # all of the server's calls to the gate wait
            asker.post_and_leave(list_of_one)
            time.sleep(0.5)
        assert [answer.result(PATIENCE_S).status_code for answer in answers] == [200] * CALLS
    assert asker.post(encode_list()).status_code == 200
    assert deciding.link.get_means("chem").held == CALLS * 10 * MICRO


@pytest.mark.parametrize("stopped_s", [0.5, 2.5])
def test_a_list_that_waited_for_the_server_is_not_decided(
    tmp_path: Path,
    authority: Authority,
    address: str,
    deciding: RunningGate,
    server: subprocess.Popen[bytes],
    stopped_s: float,
) -> None:
    settings = gate_settings(tmp_path / "second", authority, ask=address, timeout_ms=300)
    with running(settings) as asking:
        asking.wait(lambda: is_open(asking) and is_passed_on(asking))
        held = deciding.link.get_means("chem").held
        with stopped(server):
            assert asking.ask(job(49)) == {"v": 1, "ok": True}, "the policy lets it in"
            time.sleep(stopped_s)  # in the second case the asking gate has left meanwhile
        asking.wait(lambda: is_passed_on(asking))
        assert (deciding.link.get_means("chem").held - held) // MICRO < 50


def test_a_list_with_the_end_of_its_connection_is_not_decided(
    authority: Authority, address: str, deciding: RunningGate, server: subprocess.Popen[bytes]
) -> None:
    body = encode_list(encode_request(9))
    head = f"POST {DECIDE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = connect_tls(authority, address)
    time.sleep(0.3)  # the server has finished the handshake
    with stopped(server):
        connection.sendall(head.encode() + body)
        connection.close()
    assert Asker(authority, address).post(encode_list()).status_code == 200
    assert deciding.link.get_means("chem").held == 0


def test_the_hold_of_an_unused_reply_is_released(
    authority: Authority, address: str, deciding: RunningGate
) -> None:
    asker = Asker(authority, address)
    [reply] = asker.post(encode_list(encode_request(9))).json()
    assert deciding.link.get_means("chem").held == 10 * MICRO
    unused = {"cluster": CLUSTER, "uid": 1000, "admin_comment": reply["admin_comment"]}
    for wrong in ({"cluster": OTHER_CLUSTER}, {"uid": 1001}, {"admin_comment": "steward=1.a"}):
        asker.post(add_unused(encode_list(), unused | wrong))
    assert deciding.link.get_means("chem").held == 10 * MICRO
    for _ in range(2):
        assert asker.post(add_unused(encode_list(), unused)).json() == []
        assert deciding.link.get_means("chem").held == 0


def add_unused(forwarded: bytes, unused: dict[str, Any]) -> bytes:
    """Add a reply that came too late to a list."""
    return json.dumps(json.loads(forwarded) | {"unused": [unused]}).encode()


class _Answers(Quiet, BaseHTTPRequestHandler):
    """Server whose next replies are late or errors, as the test sets."""

    protocol_version = "HTTP/1.1"
    connections = 0
    is_closing = False
    delays_s: ClassVar[list[float]] = []
    statuses: ClassVar[list[int]] = []
    waits_us: ClassVar[list[list[int]]] = []
    """Remaining time of each request of each list, in µs."""
    unused: ClassVar[list[dict[str, Any]]] = []

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def do_POST(self) -> None:
        forwarded = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        requests = forwarded.get("requests", [])
        if requests:
            self.waits_us.append([one["due_us"] - forwarded["sent_us"] for one in requests])
        delay_s, status = 0.0, 200
        if requests:
            delay_s = self.delays_s.pop(0) if self.delays_s else 0.0
            status = self.statuses.pop(0) if self.statuses else 200
        time.sleep(delay_s)
        body = json.dumps([{"v": 1, "ok": True, "admin_comment": "decided"} for _ in requests])
        self.unused.extend(forwarded.get("unused", []))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.is_closing:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body.encode())


@contextmanager
def run_answers(
    tmp_path: Path, authority: Authority
) -> Iterator[tuple[type[_Answers], RunningGate]]:
    """Run an HTTPS server in the other gate's place, and the gate that asks it."""
    handler = type(
        "Answers", (_Answers,), {"delays_s": [], "statuses": [], "waits_us": [], "unused": []}
    )
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
    unused = {"cluster": CLUSTER, "uid": 1000, "admin_comment": "decided"}
    asking.wait(lambda: handler.unused == [unused])
    assert is_passed_on(asking)
    assert handler.connections == 1


def test_each_request_of_a_list_has_its_own_time(
    answers: tuple[type[_Answers], RunningGate],
) -> None:
    handler, asking = answers
    handler.delays_s.append(0.6)  # of 0.7 s
    with ThreadPoolExecutor(3) as threads:
        replies = []
        for _ in range(3):
            replies.append(threads.submit(is_passed_on, asking))
            time.sleep(0.2)
        assert all(reply.result(PATIENCE_S) for reply in replies)
    first_us, second_us = handler.waits_us[-1]
    assert second_us - first_us > 100_000
    assert 0 < first_us < 600_000


def submit_and_leave(gate: RunningGate, minutes: int) -> None:
    """Send a submit to a gate, and close the connection without waiting for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connect_socket(connection, gate.settings.gate_socket)
        connection.sendall(encode_request(minutes) + b"\n")
        time.sleep(0.1)


def test_a_request_of_a_plugin_that_has_left_is_not_forwarded(
    answers: tuple[type[_Answers], RunningGate],
) -> None:
    handler, asking = answers
    handler.delays_s.append(0.4)  # of 0.7 s
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(is_passed_on, asking)
        time.sleep(0.1)
        submit_and_leave(asking, 49)
        assert is_passed_on(asking)
        assert first.result(PATIENCE_S)
    assert len(handler.waits_us[-1]) == 1


def test_a_request_of_a_plugin_that_has_left_is_not_decided(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 100))
        with stopped(gate.process):
            submit_and_leave(gate, 49)
        assert gate.ask(job(1))["ok"]
        assert gate.link.get_means("chem").held == 2 * MICRO


def test_each_failure_of_the_other_gate_is_logged_once(
    tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_answers(tmp_path, authority) as (handler, asking):
        for _ in range(5):
            handler.statuses += [503, 400]
            measure_asks(asking, 2)
            assert is_passed_on(asking)
    logged = capfd.readouterr().err
    assert logged.count("answers with status 503") == 1
    assert logged.count("answers with status 400") == 1


def test_a_server_that_closes_each_connection_is_asked_at_growing_intervals(
    answers: tuple[type[_Answers], RunningGate],
) -> None:
    handler, asking = answers
    handler.is_closing = True
    before = handler.connections
    time.sleep(5)
    assert handler.connections - before < 10
    handler.is_closing = False
    asking.wait(lambda: is_passed_on(asking))


def measure_asks(gate: RunningGate, count: int) -> list[float]:
    """Ask the gate about jobs one after the other; return each duration, in seconds."""
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
        with stopped(deciding.process):
            assert max(measure_asks(asking, 30)[4:]) < 0.35, "half the time of a late reply"
            time.sleep(2.5)
            assert max(measure_asks(asking, 10)) < 0.35, "an empty list had no answer either"
        asking.wait(lambda: is_passed_on(asking))
    logged = capfd.readouterr().err
    assert logged.count("times in a row") == 1
    assert logged.count("answers with status 503") == 1


def test_the_policy_answers_at_once_while_replies_are_late(
    tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_answers(tmp_path, authority) as (handler, asking):
        handler.delays_s += [0.8] * 9  # of 0.7 s
        durations_s = measure_asks(asking, 20)
        assert sum(duration_s > 0.35 for duration_s in durations_s) in (3, 4)
        asking.wait(lambda: is_passed_on(asking) and not handler.delays_s)
        assert handler.connections == 1
    assert capfd.readouterr().err.count("times in a row") == 1
