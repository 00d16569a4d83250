"""Receiver of node agents' batches, and forged senders."""

import contextlib
import http.client
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.nodes import HearingSite, line, task
from harness.receivers import context_of
from servers.authority import Authority
from steward.admin.certificates import CertificateAuthority as OwnAuthority
from steward.admin.certificates import CertificateError
from steward.agent import agent
from steward.capture.nodes.listener import MAX_BATCH_BYTES
from steward.core.errors import UsageError
from steward.core.events import NODE_GAP
from steward.core.usage import NodeGap

BATCH = line("start", tasks=3) + b"".join(map(task, range(3))) + line("end", tasks=3)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def hearing(tmp_path: Path, authority: Authority) -> Iterator[HearingSite]:
    here = HearingSite(tmp_path, authority, max_batches=4)
    yield here
    here.close()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    where = tmp_path / "spool"
    where.mkdir()
    return where


def put(spool: Path, data: bytes, node: str = "n1") -> None:
    with (spool / f"{node}.log").open("ab") as file:
        file.write(data)


def kinds(hearing: HearingSite) -> list[str]:
    return [event.kind for event in hearing.events()]


def test_what_a_node_writes_becomes_events_once(hearing: HearingSite, spool: Path) -> None:
    put(spool, BATCH)
    for _ in range(2):
        assert hearing.run_agent(spool) == 0
        assert kinds(hearing) == ["step.start", "task.exit", "step.end"]
    (spool / "n1.place").unlink()
    assert hearing.run_agent(spool) == 0
    found = hearing.events()
    assert [event.kind for event in found] == ["step.start", "task.exit", "step.end", "node.gap"]
    # Sent and not sent lines went with the place, as far as anybody knows.
    assert found[-1].body.why == "lost"
    assert found[-1].body.since is not None


def boot(monkeypatch: pytest.MonkeyPatch, boot_id: str) -> None:
    """Make the kernel report another boot."""
    really = open

    def opened(path: Any, *more: Any, **named: Any) -> Any:
        is_asked = path == "/proc/sys/kernel/random/boot_id"
        return io.StringIO(f"{boot_id}\n") if is_asked else really(path, *more, **named)

    monkeypatch.setattr("builtins.open", opened)


def test_another_boot_with_another_place_was_a_reboot(
    hearing: HearingSite, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hearing.run_agent(spool) == 0
    boot(monkeypatch, "another-boot")
    (spool / "n1.place").unlink()
    assert hearing.run_agent(spool) == 0
    (gap,) = hearing.events()
    assert gap.body.why == "reboot"
    boot(monkeypatch, "a-third-boot")
    assert hearing.run_agent(spool) == 0
    assert len(kinds(hearing)) == 1  # the spool is on a disk: nothing went with the boot


def test_nodes_say_that_they_are_there(hearing: HearingSite, spool: Path) -> None:
    assert hearing.run_agent(spool) == 0
    heard = hearing.heard()
    (node,) = heard.read_reports("c1")
    assert (node.node, node.sequence, node.lost) == ("n1", 1, 0)
    assert heard.read_silent(node.heard_at) == []
    assert heard.read_reports("c2") == []
    heard.close()
    # Not for each batch: most runs of a node need no query.
    assert hearing.run_agent(spool, "--to", "127.0.0.1:1") == 0


def test_what_was_dropped_is_a_gap(hearing: HearingSite, spool: Path) -> None:
    put(spool, b"".join(map(task, range(100))))
    small = ("--rotate-bytes", "4000", "--most-bytes", "4000")
    assert hearing.run_agent(spool, *small, "--to", "127.0.0.1:1") == 1
    put(spool, line("prolog"))
    for _ in range(2):
        assert hearing.run_agent(spool, *small) == 0
    gaps = [event.body for event in hearing.events() if event.kind == NODE_GAP]
    assert gaps == [NodeGap(node="n1", why="lost", lines=100)]


def test_a_node_reports_on_itself_alone(
    hearing: HearingSite, spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(spool, BATCH)
    assert hearing.run_agent(spool, name="n2") == 1
    assert "the certificate is for n2, not for n1 or n1.c1" in capsys.readouterr().err
    assert hearing.run_agent(spool, "--cluster", "c2") == 1
    assert "unknown cluster 'c2'" in capsys.readouterr().err
    assert kinds(hearing) == []
    put(spool, line("start", node="n1"), node="n2")
    assert hearing.run_agent(spool, node="n2") == 0
    assert [event.body.why for event in hearing.events()] == ["garbled"]
    assert hearing.run_agent(spool, name="n1.c1") == 0


def test_a_stranger_is_no_node(hearing: HearingSite, spool: Path, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "other").certificate("DNS:n1")
    words = ("--certificate", certificate, "--key", key)
    assert hearing.run_agent(spool, *words) == 1
    assert kinds(hearing) == []


def test_while_the_journal_is_away_nodes_keep_what_they_have(
    hearing: HearingSite, spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(spool, BATCH)
    hearing.end_journal()
    assert hearing.run_agent(spool) == 1
    assert "answers 503" in capsys.readouterr().err
    hearing.begin_journal()
    until = time.monotonic() + 60
    while hearing.run_agent(spool) and time.monotonic() < until:
        time.sleep(0.05)
    assert kinds(hearing) == ["step.start", "task.exit", "step.end"]


def test_a_long_backlog_comes_in_pieces(hearing: HearingSite, spool: Path) -> None:
    tasks = b"".join(task(number % 500, s=str(number // 500)) for number in range(30_000))
    put(spool, tasks)
    assert hearing.run_agent(spool, "--limit", "120") == 0
    found = {(event.body.step, one.task) for event in hearing.events() for one in event.body.tasks}
    assert len(found) == 30_000
    assert agent.Place(str(spool / "n1.place")).sequence > 1


def answer_to(hearing: HearingSite, data: bytes) -> bytes:
    with hearing.connect() as connection:
        connection.sendall(data)
        return connection.recv(1 << 16).split(b"\r\n")[0]


def request(head: str, body: bytes, path: str = agent.PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Steward-Batch: {head}"]
    lines += [f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\0" * 100 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (request("", b"", "/"), b"404"),
        (b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000, b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1114113\r\n\r\n", b"413"),
        (request("{", b""), b"400"),
        (request('{"v": 2, "node": "n1"}', b""), b"400"),
        (request('{"v": 1, "node": "../n1"}', b""), b"400"),
        (request('{"v": 1, "node": "n1", "boot": "\\u0000"}', b""), b"400"),
        (request('{"v": 1, "node": "n1", "sequence": -1}', b""), b"400"),
        (request('{"v": 1, "node": "n2"}', b"x" * MAX_BATCH_BYTES), b"403"),
        (request('{"v": 1, "node": "n1"}', b"x" * 5), b"200"),
    ],
)
def test_what_is_no_batch_is_answered_and_let_go(
    hearing: HearingSite, data: bytes, status: bytes
) -> None:
    assert status in answer_to(hearing, data)


def test_who_says_nothing_holds_up_nobody(hearing: HearingSite, spool: Path) -> None:
    """Four connections may be served at once, and a dozen are silent."""
    silent = [socket.create_connection(("127.0.0.1", hearing.port), 20) for _ in range(12)]
    put(spool, BATCH)
    assert hearing.run_agent(spool, "--limit", "200", "--timeout", "100") == 0
    assert kinds(hearing) == ["step.start", "task.exit", "step.end"]
    for connection in silent:
        connection.close()


def status_of(connection: ssl.SSLSocket) -> bytes:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return str(answer.status).encode()


def test_a_node_has_one_batch_under_way(hearing: HearingSite) -> None:
    whole = request('{"v": 1, "node": "n1"}', BATCH)
    with hearing.connect() as slow:
        slow.sendall(whole[:-10])
        # The head of one must be known before the other's comes.
        found = b""
        for _ in range(200):
            with hearing.connect() as other:
                other.sendall(whole)
                found = status_of(other)
            if b"503" in found:
                break
            time.sleep(0.05)
            if b"200" in found:
                pytest.fail("two batches of one node were under way")
        assert b"503" in found
        with hearing.connect("n2") as other:
            other.sendall(request('{"v": 1, "node": "n2"}', BATCH))
            assert b"200" in status_of(other)
        slow.sendall(whole[-10:])
        assert b"200" in status_of(slow)


def test_a_connection_that_rests_makes_room_for_its_nodes_next(hearing: HearingSite) -> None:
    with hearing.connect() as idle:
        idle.sendall(request('{"v": 1, "node": "n1"}', BATCH))
        assert b"200" in status_of(idle)
        with hearing.connect() as other:
            other.sendall(request('{"v": 1, "node": "n1"}', BATCH))
            assert b"200" in status_of(other)
            assert idle.recv(1) == b""


def flood(
    hearing: HearingSite, context: ssl.SSLContext, over: threading.Event, taken: list[int]
) -> None:
    """Send batches of garbage as fast as the server takes them."""
    data = request('{"v": 1, "node": "n2"}', b"a\n" * (MAX_BATCH_BYTES // 2))
    while not over.is_set():
        with contextlib.suppress(OSError), hearing.connect_as(context) as connection:
            connection.sendall(data)
            if b"200" in status_of(connection):
                taken.append(1)


def test_one_node_that_floods_silences_no_other(tmp_path: Path, authority: Authority) -> None:
    hearing = HearingSite(tmp_path, authority)
    over, taken = threading.Event(), list[int]()
    context = context_of(authority, "DNS:n2")
    many = [threading.Thread(target=flood, args=(hearing, context, over, taken)) for _ in range(30)]
    try:
        for one in many:
            one.start()
        until = time.monotonic() + 60
        while not taken and time.monotonic() < until:
            time.sleep(0.05)
        with hearing.connect() as honest:
            before = len(taken)
            for number in range(5):
                honest.sendall(request(f'{{"v": 1, "node": "n1", "sequence": {number}}}', BATCH))
                assert b"200" in status_of(honest)
        # For each of ours at the most a few of theirs, however many connections they have.
        assert len(taken) - before < 30
    finally:
        over.set()
        for one in many:
            one.join(60)
        hearing.close()


def test_certificates_of_the_commands_making(tmp_path: Path) -> None:
    authority = OwnAuthority(str(tmp_path / "ca"), 30)
    assert authority.make_server(["localhost", "127.0.0.1", "::1"])
    assert list(authority.make_nodes("n[1-2],gpu1")) == [("gpu1", True), ("n1", True), ("n2", True)]
    again = OwnAuthority(str(tmp_path / "ca"), 30)
    assert not again.make_server(["localhost"])
    assert dict(again.make_nodes("n[2-3]")) == {"n2": False, "n3": True}
    modes = {"": 0o711, "nodes": 0o700, "server.crt": 0o644, "server.key": 0o600, "ca.key": 0o600}
    for name, mode in modes.items():
        assert (tmp_path / "ca" / name).stat().st_mode & 0o777 == mode
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ca").rglob("*.key")} == {0o600}
    with pytest.raises(UsageError):
        list(again.make_nodes("n[1-"))
    with pytest.raises(UsageError):
        again.make_server(["a,DNS:b"])
    (tmp_path / "file").touch()
    with pytest.raises(CertificateError):
        OwnAuthority(str(tmp_path / "file"), 30)


def test_nodes_are_known_by_them(tmp_path: Path) -> None:
    class Own(Authority):
        """Receiver as the command starts it."""

        def __init__(self, directory: Path) -> None:
            self._own = OwnAuthority(str(directory), 30)
            self.file = self._own.ca_file

        def certificate(self, *names: str) -> tuple[str, str]:
            name = names[0].partition(":")[2]
            where = Path(self.file).parent
            if name == "127.0.0.1":
                self._own.make_server([name])
                return str(where / "server.crt"), str(where / "server.key")
            list(self._own.make_nodes(name))
            return str(where / "nodes" / f"{name}.crt"), str(where / "nodes" / f"{name}.key")

    hearing = HearingSite(tmp_path, Own(tmp_path / "ca"))
    (tmp_path / "spool").mkdir()
    put(tmp_path / "spool", BATCH)
    try:
        assert hearing.run_agent(tmp_path / "spool") == 0
        assert hearing.run_agent(tmp_path / "spool", "--heartbeat", "0", name="n2") == 1
    finally:
        hearing.close()


def test_an_agent_says_where_only_one_side_has_tls(
    tmp_path: Path,
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    munge = tmp_path / "munge"
    munge.write_text("#!/bin/sh\necho MUNGE:x:\n")  # the connection fails before it is verified
    munge.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def said(port: int, *words: str) -> str:
        to = ("--to", f"127.0.0.1:{port}", "--limit", "0")
        assert agent.main(["--spool", str(spool), "--node", "n1", *to, *words]) == 1
        return capsys.readouterr().err

    authority = Authority(tmp_path)
    hearing = HearingSite(tmp_path, authority)
    try:
        assert "if Steward listens with TLS, give --tls" in said(hearing.port)
    finally:
        hearing.close()

    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            with plain.accept()[0] as one:
                one.recv(1 << 16)
                one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    one.recv(1 << 16)

        answering = threading.Thread(target=answer)
        answering.start()
        port = plain.getsockname()[1]
        assert "listens without TLS, remove --tls" in said(port, "--tls", "--ca", authority.file)
        answering.join(20)
