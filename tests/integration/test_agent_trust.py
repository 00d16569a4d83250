"""Trust between agents and Steward: who may report for a node, with munged of several keys."""

import http.client
import json
import os
import time
from pathlib import Path

import pytest
from agents import NODE, Hearer, events_of, hearing, lines, put, run_agent, tasks_of
from controllers import MakeMunged, Munged, make_munged, said
from spool_daemon import Daemon

from servers.http_server import answering
from servers.server import free_port
from steward.agent import agent
from steward.core import munge
from steward.core.errors import PermissionRefused
from steward.core.munge import Munge, MungeClaim, MungeUnavailable

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
            (elsewhere.socket, "was made on 127.0.0.9, but node localhost is at 127.0.0.1"),
            (strange.socket, "was made with another key"),
        ):
            done = run_agent(tmp_path / "lines", port, socket)
            assert done.returncode == 1
            assert what in done.stderr
            assert done.stderr.count("\n") == 1
        assert events_of(settings) == []
        # With the cluster's key, munged claims any configured address.
        done = run_agent(tmp_path / "others", port, elsewhere.socket)
        assert done.returncode == 1
        assert "the connection comes from 127.0.0.1 (see [nodes] behind_nat), but node " in (
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
    settings = hearing(tmp_path, port, here, behind_nat=("127.0.0.0/8",))
    put(tmp_path / "others", lines(range(10), "127.0.0.9"), "127.0.0.9")
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        assert run_agent(tmp_path / "others", port, here.socket).returncode == 1
        assert run_agent(tmp_path / "others", port, elsewhere.socket).returncode == 0
    assert len(tasks_of(settings)) == 10


def post(
    port: int, munged: Munged, node: str, body: bytes, source: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send a batch from one of the test's addresses; return the answer."""
    head = json.dumps({"v": 1, "node": node, "sequence": 1, "place": "a"})
    claim = agent.claim_of(node, "", 1, agent.digest_of(head.encode(), body))
    return send(port, head, Munge(munged.socket).encode(claim), body, source)


def send(
    port: int, head: str, credential: bytes, body: bytes, source: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send a batch with this head and this credential."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=60, source_address=(source, 0)
    )
    headers = {"Steward-Batch": head, "Steward-Credential": credential.decode()}
    connection.request("POST", agent.PATH, body, headers)
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, text


def test_an_answer_of_somebody_else_is_not_believed(
    tmp_path: Path, make_munged: MakeMunged
) -> None:
    """The agent deletes lines on an answer, so only Steward may answer."""
    munged, strange = make_munged(), make_munged()
    recorded: list[str] = []

    class Impostor(Hearer):
        def answer(self, digest: str, durable: bytes) -> None:
            recorded.append(self.headers["Steward-Credential"])
            credentials = [
                "",
                self.headers["Steward-Credential"],
                Munge(strange.socket).encode(agent.answer_claim_of(digest, durable)).decode(),
                Munge(munged.socket).encode(agent.answer_claim_of("0" * 64, durable)).decode(),
            ]
            self.say(200, durable, credentials[len(recorded) - 1])

    put(tmp_path / "lines", lines(range(10)))
    with answering(Impostor) as server:
        for _ in range(4):
            done = run_agent(tmp_path / "lines", server.server_port, munged.socket)
            assert done.returncode == 1, done.stderr
    assert len(recorded) == 4
    assert agent.Place(str(tmp_path / "lines" / f"{NODE}.place")).sequence == 0


def test_it_comes_again_when_it_is_asked_to(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged = make_munged()
    asked: list[float] = []

    class Busy(Hearer):
        def answer(self, digest: str, durable: bytes) -> None:
            asked.append(time.monotonic())
            claim = agent.answer_claim_of(digest, durable)
            credential = Munge(munged.socket).encode(claim).decode()
            self.say(503 if len(asked) == 1 else 200, durable, credential, retry_after_s=2)

    put(tmp_path / "lines", lines(range(10)))
    with answering(Busy) as server:
        where = (tmp_path / "lines", server.server_port, munged.socket)
        done = run_agent(*where, "--limit", "200")
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[1] - asked[0] >= 2.0


@pytest.mark.parametrize("has_library", [True, False])
def test_munge_by_its_library_or_its_commands(
    make_munged: MakeMunged, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    if not has_library:
        monkeypatch.setattr(munge, "load_libmunge", lambda: None)
    elif munge.load_libmunge() is None:
        pytest.skip("there is no libmunge")
    here, strange = Munge(make_munged("127.0.0.9").socket), Munge(make_munged().socket)
    payload = bytes(range(1, 256)) * 4
    credential = here.encode(payload)
    assert here.decode(credential) == MungeClaim(os.geteuid(), "127.0.0.9", payload)
    with pytest.raises(PermissionRefused, match="was used before"):
        here.decode(credential)
    with pytest.raises(PermissionRefused, match="with another key"):
        here.decode(strange.encode(b"a"))
    for none in (b"", b"MUNGE:", b"MUNGE:AwQDAA:", b"x" * 20_000):
        with pytest.raises(PermissionRefused):
            here.decode(none)
    with pytest.raises(MungeUnavailable, match="cannot create a MUNGE credential"):
        Munge("/nonexistent/munge").encode(b"a")
    with pytest.raises(MungeUnavailable, match="cannot decode the MUNGE credential"):
        Munge("/nonexistent/munge").decode(credential)


def test_a_batch_that_is_played_again_is_refused(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    body = lines(range(5))
    head = json.dumps({"v": 1, "node": NODE, "sequence": 1, "place": "a", "nonce": "b"})
    digest = agent.digest_of(head.encode(), body)
    claim = agent.claim_of(NODE, "", 1, digest)

    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        credential = Munge(munged.socket).encode(claim)
        assert send(port, head, credential, body) == (200, f"durable {digest}\n".encode())
        _, refusal = send(port, head, credential, body)
        assert refusal.startswith(b"the MUNGE credential was used before")
        # The same process with its own credential is harmless.
        assert send(port, head, Munge(munged.socket).encode(claim), body)[0] == 200
        another = lines(range(5, 10))
        assert send(port, head, Munge(munged.socket).encode(claim), another)[0] == 403
    assert sorted(tasks_of(settings)) == list(range(5))
