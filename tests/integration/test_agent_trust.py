"""Who may report for a node, and whose answer an agent believes: real munged of several keys."""

import http.client
import json
import os
import threading
import time
from pathlib import Path

import pytest
from agents import (
    NODE,
    MakeMunged,
    events_of,
    hearing,
    lines,
    make_munged,
    put,
    run_agent,
    tasks_of,
)
from controllers import Munged, said
from running import Daemon

from servers.process import free_port
from steward.agent import agent
from steward.errors import Refused
from steward.munge import library
from steward.munge.munged import Claim, Munge, MungeUnavailable

__all__ = ["make_munged"]


def test_who_may_not_report(tmp_path: Path, make_munged: MakeMunged) -> None:
    here, port = make_munged(), free_port()
    elsewhere = make_munged("127.0.0.9", here.key)
    strange = make_munged()
    settings = hearing(tmp_path, port, here)
    put(tmp_path / "lines", lines(range(10)))
    put(tmp_path / "others", lines(range(10), "127.0.0.9"), "127.0.0.9")
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        for socket, what in (
            (elsewhere.socket, "was made on 127.0.0.9, and node localhost is at 127.0.0.1"),
            (strange.socket, "was made with another key"),
        ):
            done = run_agent(tmp_path / "lines", port, socket)
            assert done.returncode == 1
            assert what in done.stderr
            assert done.stderr.count("\n") == 1
        assert events_of(settings) == []
        # With the cluster's key munged says whatever address it is told to.
        done = run_agent(tmp_path / "others", port, elsewhere.socket)
        assert done.returncode == 1
        assert "the connection comes from 127.0.0.1 (see [nodes] behind_nat), and node " in (
            done.stderr
        )
        assert events_of(settings) == []
        assert run_agent(tmp_path / "lines", port, here.socket).returncode == 0
        body = lines(range(10), "127.0.0.9")
        assert post(port, elsewhere, "127.0.0.9", body)[0] == 403
        assert post(port, elsewhere, "127.0.0.9", body, source="127.0.0.9")[0] == 200
    assert len(tasks_of(settings)) == 20


def test_who_may_report_where_addresses_say_nothing(
    tmp_path: Path, make_munged: MakeMunged
) -> None:
    here, port = make_munged(), free_port()
    elsewhere = make_munged("127.0.0.9", here.key)
    settings = hearing(tmp_path, port, here, behind_nat=True)
    put(tmp_path / "others", lines(range(10), "127.0.0.9"), "127.0.0.9")
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        assert run_agent(tmp_path / "others", port, here.socket).returncode == 1
        assert run_agent(tmp_path / "others", port, elsewhere.socket).returncode == 0
    assert len(tasks_of(settings)) == 10


def post(
    port: int, munged: Munged, node: str, body: bytes, source: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send a batch from an address of ours; what is answered."""
    head = json.dumps({"v": 1, "node": node, "sequence": 1, "place": "a"})
    claim = agent.claim_of(node, "", 1, agent.digest_of(head.encode(), body))
    credential = Munge(munged.socket).encode(claim).decode()
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=60, source_address=(source, 0)
    )
    headers = {"Steward-Batch": head, "Steward-Credential": credential}
    connection.request("POST", agent.PATH, body, headers)
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, text


def test_an_answer_of_somebody_else_is_not_believed(
    tmp_path: Path, make_munged: MakeMunged
) -> None:
    """Lines are let go of because of it: whoever is at the port has to be Steward."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    munged, strange = make_munged(), make_munged()
    recorded: list[str] = []

    class Impostor(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            digest = agent.digest_of(self.headers["Steward-Batch"].encode(), body)
            said = f"durable {digest}\n".encode()
            recorded.append(self.headers["Steward-Credential"])
            credentials = [
                "",
                self.headers["Steward-Credential"],
                Munge(strange.socket).encode(agent.answer_claim_of(digest, said)).decode(),
                Munge(munged.socket).encode(agent.answer_claim_of("0" * 64, said)).decode(),
            ]
            self.send_response(200)
            self.send_header("Steward-Credential", credentials[len(recorded) - 1])
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    put(tmp_path / "lines", lines(range(10)))
    server = HTTPServer(("127.0.0.1", 0), Impostor)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        for _ in range(4):
            done = run_agent(tmp_path / "lines", server.server_address[1], munged.socket)
            assert done.returncode == 1, done.stderr
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert len(recorded) == 4
    assert agent.Place(str(tmp_path / "lines" / f"{NODE}.place")).sequence == 0


def test_it_comes_again_when_it_is_asked_to(tmp_path: Path, make_munged: MakeMunged) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    munged = make_munged()
    asked: list[float] = []

    class Busy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(time.monotonic())
            body = self.rfile.read(int(self.headers["Content-Length"]))
            digest = agent.digest_of(self.headers["Steward-Batch"].encode(), body)
            said = f"durable {digest}\n".encode()
            self.send_response(503 if len(asked) == 1 else 200)
            self.send_header("Retry-After", "2")
            claim = agent.answer_claim_of(digest, said)
            self.send_header("Steward-Credential", Munge(munged.socket).encode(claim).decode())
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    put(tmp_path / "lines", lines(range(10)))
    server = HTTPServer(("127.0.0.1", 0), Busy)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        port = server.server_address[1]
        done = run_agent(tmp_path / "lines", port, munged.socket, "--limit", "200")
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[1] - asked[0] >= 2.0


@pytest.mark.parametrize("has_library", [True, False])
def test_munge_by_its_library_or_its_commands(
    make_munged: MakeMunged, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    if not has_library:
        monkeypatch.setattr(library, "loaded", lambda: None)
    elif library.loaded() is None:
        pytest.skip("there is no libmunge")
    here, strange = Munge(make_munged("127.0.0.9").socket), Munge(make_munged().socket)
    payload = bytes(range(1, 256)) * 4
    credential = here.encode(payload)
    assert here.decode(credential) == Claim(os.geteuid(), "127.0.0.9", payload)
    with pytest.raises(Refused, match="was used before"):
        here.decode(credential)
    with pytest.raises(Refused, match="with another key"):
        here.decode(strange.encode(b"a"))
    for none in (b"", b"MUNGE:", b"MUNGE:AwQDAA:", b"x" * 20_000):
        with pytest.raises(Refused):
            here.decode(none)
    with pytest.raises(MungeUnavailable, match="makes no credential"):
        Munge("/nonexistent/munge").encode(b"a")
    with pytest.raises(MungeUnavailable, match="opens no credential"):
        Munge("/nonexistent/munge").decode(credential)


def test_a_batch_that_is_played_again_is_refused(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    body = lines(range(5))
    head = json.dumps({"v": 1, "node": NODE, "sequence": 1, "place": "a", "nonce": "b"})
    digest = agent.digest_of(head.encode(), body)
    claim = agent.claim_of(NODE, "", 1, digest)

    def post(credential: bytes, data: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Steward-Batch": head, "Steward-Credential": credential.decode()}
        connection.request("POST", agent.PATH, data, headers)
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        connection.close()
        return status, text

    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        credential = Munge(munged.socket).encode(claim)
        assert post(credential, body) == (200, f"durable {digest}\n".encode())
        assert post(credential, body)[1].startswith(b"the MUNGE credential was used before")
        # The same one with a credential of its own is harmless.
        assert post(Munge(munged.socket).encode(claim), body)[0] == 200
        assert post(Munge(munged.socket).encode(claim), lines(range(5, 10)))[0] == 403
    assert sorted(tasks_of(settings)) == list(range(5))
