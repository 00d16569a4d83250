"""Forwarder of a controller: the cursor advances only after the receiver has stored the batch."""

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.forwarders import ForwardedSite, script_row, stores_in
from harness.spool import no_lease_signals
from harness.torque import Player, TorqueCapture
from servers.authority import Authority
from servers.http_server import Quiet, answering
from steward.core.config import Settings
from steward.core.consumers import Rejected
from steward.core.errors import Unavailable
from steward.core.events import Event, decode_event
from steward.core.script_stores import IncomingStores
from steward.extensions.controllers import wire
from steward.extensions.controllers.forwarder import EventForwarder
from steward.extensions.controllers.settings import ForwardSettings
from steward.slurm.settings import ClusterSettings

__all__ = ["no_lease_signals"]

MakeForward = Callable[..., EventForwarder]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def receiver(tmp_path: Path, authority: Authority) -> Iterator[ForwardedSite]:
    (tmp_path / "serve").mkdir()
    site = ForwardedSite(tmp_path / "serve", authority, {"c1": ("ctl1",)})
    yield site
    site.close()


@pytest.fixture
def make(tmp_path: Path, receiver: ForwardedSite, authority: Authority) -> Iterator[MakeForward]:
    made = []

    def forward(settings: ForwardSettings | None = None) -> EventForwarder:
        settings = settings or receiver.forward_settings("DNS:ctl1")
        all_settings = Settings(
            state_dir=str(tmp_path), cluster={"c1": ClusterSettings()}, forward=settings
        )
        made.append(EventForwarder(all_settings, "c1", stores_in(tmp_path)))
        return made[-1]

    yield forward
    for one in made:
        one.close()


def captured(home: Path, job_id: int, script: bytes = b"#!/bin/sh\n", cluster: str = "c1") -> Event:
    """Return the event of a script whose bytes lie in the controller's store."""
    row = script_row(job_id, script, cluster=cluster)
    event = decode_event(job_id, row.kind, row.cluster, row.key, row.data)
    (store,) = stores_in(home)
    for kept, data in (
        (event.body.script, row.script),
        (event.body.environment, row.environment),
    ):
        assert data is not None
        store.write(kept.path, data)
    store.close()
    return event


def nothing(_: object) -> None:
    pytest.fail("nothing is appended")


def test_events_and_bytes_arrive_and_the_cursor_moves(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    forward = make()
    assert forward.cursor() == 0
    forward.apply([captured(tmp_path, n, b"#%d" % n) for n in (1, 2, 3)], 7, nothing)
    assert forward.cursor() == 7
    assert len(receiver.keys()) == 3
    assert {b"#1", b"#2", b"#3"} < set(receiver.kept().values())
    forward.close()
    again = make()
    assert again.cursor() == 7
    again.apply([captured(tmp_path, 3, b"#3"), captured(tmp_path, 4)], 9, nothing)
    assert len(receiver.keys()) == 4


def test_what_is_of_another_cluster_is_passed_over(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    forward = make()
    forward.apply([captured(tmp_path, 1, cluster="c2")], 5, nothing)
    assert forward.cursor() == 5
    assert receiver.keys() == receiver.keys("c2") == []


def test_many_bytes_go_in_several_batches(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    really = wire.encode_message

    def encoded(message: Any) -> bytes:
        body = really(message)
        sent.append(len(body))
        return body

    monkeypatch.setattr(wire, "encode_message", encoded)
    scripts = [os.urandom(3 << 20) for _ in range(3)]
    make().apply([captured(tmp_path, n, s) for n, s in enumerate(scripts, 1)], 3, nothing)
    assert set(scripts) < set(receiver.kept().values())
    assert sum(size > 1 << 20 for size in sent) == 3


def test_what_is_refused_is_named_and_the_others_are_there(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    forward = make()
    good, bad = captured(tmp_path, 1), captured(tmp_path, 2)
    bad = msgspec.structs.replace(bad, source="nobody")
    for _ in range(3):
        with pytest.raises(Rejected, match="source 'nobody' is not accepted") as caught:
            forward.apply([bad, good], 2, nothing)
        assert caught.value.event.id == 2
    assert forward.cursor() == 0
    forward.apply([good], 2, nothing)
    assert forward.cursor() == 2
    assert receiver.keys() == [good.key]


def test_bytes_that_are_gone_set_one_event_aside(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    event = captured(tmp_path, 1)
    (tmp_path / "incoming" / event.body.script.path).unlink()
    with pytest.raises(Rejected, match="the script of job 1 is missing"):
        make().apply([event], 1, nothing)
    assert receiver.keys() == []


def test_more_than_a_body_holds_sets_one_event_aside(tmp_path: Path, make: MakeForward) -> None:
    with pytest.raises(Rejected, match="can be forwarded"):
        make().apply(
            [captured(tmp_path, 1, bytes(wire.MAX_BODY_BYTES - (1 << 20) + 1))], 1, nothing
        )


def test_a_host_that_may_not_report_waits_and_says_why(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    forward = make(receiver.forward_settings("DNS:ctl9"))
    with pytest.raises(Unavailable, match=r"does not accept this host for cluster c1: .*ctl9"):
        forward.apply([captured(tmp_path, 1)], 1, nothing)
    assert forward.cursor() == 0


def test_who_is_not_certified_is_sent_nothing(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = Authority(tmp_path / "elsewhere" / "ca")
    settings = receiver.forward_settings("DNS:ctl1")
    assert settings.tls
    tls = msgspec.structs.replace(settings.tls, ca_file=other.file)
    settings = msgspec.structs.replace(settings, tls=tls)
    forward = make(settings)
    with pytest.raises(Unavailable, match=r"cannot reach .*: .*certificate"):
        forward.apply([captured(tmp_path, 1)], 1, nothing)
    named = msgspec.structs.replace(
        receiver.forward_settings("DNS:ctl1"), to=f"127.0.0.2:{receiver.port}"
    )
    with pytest.raises(Unavailable, match="cannot reach"):
        make(named).apply([captured(tmp_path, 1)], 1, nothing)
    assert receiver.keys() == []


def test_a_certificate_that_cannot_be_read_is_waited_for(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    settings = receiver.forward_settings("DNS:ctl1")
    assert settings.tls
    Path(settings.tls.key_file).write_text("being written")
    with pytest.raises(Unavailable, match="cannot load the certificate"):
        make(settings).apply([captured(tmp_path, 1)], 1, nothing)
    fresh = receiver.forward_settings("DNS:ctl1")
    make(fresh).apply([captured(tmp_path, 1)], 1, nothing)
    assert len(receiver.keys()) == 1


class Scripted:
    """Receiver that answers each batch as the test sets.

    Args:
        authority: Signs its certificate.
        answers: Answers, one for each batch; None to hang up.
    """

    def __init__(
        self, authority: Authority, answers: list[wire.ReceiverReply | bytes | None]
    ) -> None:
        self.answers = answers
        self.batches: list[tuple[str, int, bytes]] = []
        self._stack = ExitStack()
        server = self._stack.enter_context(answering(self._make_handler()))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*authority.certificate("IP:127.0.0.1"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self.port = server.server_address[1]

    def close(self) -> None:
        self._stack.close()
        assert self.answers == []

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        scripted = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer: wire.ReceiverReply | bytes | None
                if self.path == wire.HELLO:
                    answer = wire.ReceiverReply(verdict="durable", stream=wire.hash_body(body))
                else:
                    stream, number = self.headers["steward-stream"], self.headers["steward-number"]
                    scripted.batches.append((stream, int(number), body))
                    answer = scripted.answers.pop(0)
                if answer is None:
                    self.close_connection = True
                    return
                content = answer if isinstance(answer, bytes) else wire.encode_message(answer)
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


@pytest.mark.parametrize(
    "answers",
    [
        [wire.ReceiverReply(verdict="restart")] * 2,
        [wire.ReceiverReply(verdict="later", detail="the disk is full")],
        [wire.ReceiverReply(verdict="perhaps")],
        [wire.ReceiverReply(verdict="refused")],
        [b"<html>"],
        [b""],
        [bytes(5 << 20)],
        [None] * 2,
    ],
)
def test_any_other_answer_leaves_the_cursor(
    tmp_path: Path,
    receiver: ForwardedSite,
    make: MakeForward,
    authority: Authority,
    answers: list[wire.ReceiverReply | bytes | None],
) -> None:
    other = Scripted(authority, list(answers))
    settings = receiver.forward_settings("DNS:ctl1")
    forward = make(msgspec.structs.replace(settings, to=f"127.0.0.1:{other.port}"))
    with pytest.raises(Unavailable):
        forward.apply([captured(tmp_path, 1)], 1, nothing)
    assert forward.cursor() == 0
    forward.close()
    other.close()


def test_a_connection_that_ended_meanwhile_is_made_anew(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    good = wire.ReceiverReply(verdict="durable")
    other = Scripted(authority, [good, None, good])
    settings = receiver.forward_settings("DNS:ctl1")
    forward = make(msgspec.structs.replace(settings, to=f"127.0.0.1:{other.port}"))
    forward.apply([captured(tmp_path, 1)], 1, nothing)
    forward.apply([captured(tmp_path, 2)], 2, nothing)
    assert forward.cursor() == 2
    # The receiver may have stored the unanswered batch: it is sent again under its number.
    assert [number for _, number, _ in other.batches] == [1, 2, 2]
    assert other.batches[1] == other.batches[2]
    forward.close()
    other.close()


def test_a_receiver_that_forgot_the_stream_gets_another(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    good = wire.ReceiverReply(verdict="durable")
    other = Scripted(authority, [good, wire.ReceiverReply(verdict="restart"), good, good])
    settings = receiver.forward_settings("DNS:ctl1")
    forward = make(msgspec.structs.replace(settings, to=f"127.0.0.1:{other.port}"))
    for number in (1, 2, 3):
        forward.apply([captured(tmp_path, number)], number, nothing)
    assert [number for _, number, _ in other.batches] == [1, 2, 1, 2]
    assert len({stream for stream, _, _ in other.batches}) == 2
    forward.close()
    other.close()


def test_a_batch_that_comes_later_keeps_its_number(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    forward = make()
    events = [captured(tmp_path, number) for number in (1, 2, 3)]
    forward.apply(events[:1], 1, nothing)
    receiver.end_journal()
    with pytest.raises(Unavailable, match="is not ready"):
        forward.apply(events[1:2], 2, nothing)
    receiver.begin_journal()
    # Meanwhile there is more to send.
    forward.apply(events[1:], 3, nothing)
    assert receiver.keys() == [event.key for event in events]


def test_the_second_controller_sends_the_same_and_it_is_there_once(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward, authority: Authority
) -> None:
    events = [captured(tmp_path, number) for number in (1, 2)]
    make().apply(events, 2, nothing)
    kept = receiver.kept()
    (tmp_path / "second").mkdir()
    settings = Settings(
        state_dir=str(tmp_path / "second"),
        cluster={"c1": ClusterSettings()},
        forward=receiver.forward_settings("DNS:x", "DNS:ctl1"),
    )
    second = EventForwarder(settings, "c1", stores_in(tmp_path))
    second.apply(events, 2, nothing)
    assert second.cursor() == 2
    second.close()
    assert receiver.keys() == [event.key for event in events]
    assert receiver.kept() == kept


def test_a_script_of_nearly_64_mib_arrives(
    tmp_path: Path, receiver: ForwardedSite, make: MakeForward
) -> None:
    script = os.urandom(1 << 20) * 63
    script = script[: wire.MAX_BODY_BYTES - (1 << 20) - 4096]
    forward = make()
    forward.apply([captured(tmp_path, 1, script), captured(tmp_path, 2)], 2, nothing)
    assert forward.cursor() == 2
    assert script in receiver.kept().values()
    assert len(receiver.keys()) == 2


@pytest.mark.parametrize("moment", ["running", "completed"])
def test_jobs_of_torque_arrive_with_the_tasks_of_its_arrays(
    tmp_path: Path, receiver: ForwardedSite, authority: Authority, moment: str
) -> None:
    Player("flat", tmp_path / "spool").snapshot(moment, tmp_path / "at" / "jobs")
    site = TorqueCapture(tmp_path / "torque", tmp_path / "at").finish()
    events = [msgspec.structs.replace(event, id=n) for n, event in enumerate(site.events, 1)]
    settings = Settings(
        state_dir=str(tmp_path),
        cluster={"c1": ClusterSettings()},
        forward=receiver.forward_settings("DNS:ctl1"),
    )
    forward = EventForwarder(settings, "c1", IncomingStores([site.store]))
    forward.apply(events, len(events), nothing)
    forward.close()
    keys = {event.key for event in events}
    assert any(event.key.split(":")[1] == "1000010220000003" for event in events)
    assert set(receiver.keys()) == keys
