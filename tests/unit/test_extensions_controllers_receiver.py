"""Receiver of controllers over TLS: who may report for which cluster, and the results."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.forwarders import ForwardedSite, Raw, read_status, script_row
from servers.authority import Authority
from steward.core.events import make_script_key
from steward.core.http_server import Timeouts
from steward.extensions.controllers import wire

Connect = Callable[..., Raw]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def limits() -> dict[str, Any]:
    """Return the receiver's limits for a test."""
    return {}


@pytest.fixture
def receiver(
    tmp_path: Path, authority: Authority, limits: dict[str, Any]
) -> Iterator[ForwardedSite]:
    hosts = {"c1": ("ctl1", "10.9.8.7"), "c2": ("ctl2",)}
    site = ForwardedSite(tmp_path, authority, hosts, **limits)
    yield site
    site.close()


@pytest.fixture
def connect(receiver: ForwardedSite, authority: Authority) -> Iterator[Connect]:
    made = []

    def make(*names: str) -> Raw:
        certificate = authority.certificate(*(names or ("DNS:ctl1",)))
        made.append(Raw(receiver.port, authority, certificate))
        return made[-1]

    yield make
    for raw in made:
        raw.close()


def test_a_batch_is_durable_when_it_is_answered(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    assert raw.greet().verdict == "durable"
    reply = raw.say(1, [script_row(1), script_row(2, environment=None)])
    assert reply == wire.ReceiverReply(verdict="durable")
    assert len(receiver.keys()) == 2
    assert sorted(receiver.kept().values()) == [b"\1\0\0\0A=1\0", b"#!/bin/sh\n", b"#!/bin/sh\n"]


def test_what_comes_twice_is_there_once(receiver: ForwardedSite, connect: Connect) -> None:
    for name in ("DNS:ctl1", "IP:10.9.8.7"):
        raw = connect(name)
        assert raw.greet().verdict == "durable"
        # The second batch comes again, as after an answer that was lost.
        for number in (1, 2, 2):
            reply = raw.say(number, [script_row(1)])
            assert reply == wire.ReceiverReply(verdict="durable")
    assert len(receiver.keys()) == 1
    assert len(receiver.kept()) == 2


@pytest.mark.parametrize("names", [("DNS:ctl1",), ("DNS:CTL1", "DNS:x"), ("IP:10.9.8.7",)])
def test_a_name_of_the_certificate_is_what_counts(connect: Connect, names: tuple[str]) -> None:
    assert connect(*names).greet().verdict == "durable"


@pytest.mark.parametrize(
    ("names", "cluster", "reason"),
    [
        (("DNS:ctl1",), "c2", "ctl1, not one of the 'controllers' of cluster 'c2'"),
        # The subject's common name is ctl1 in all of them.
        (("DNS:other",), "c1", "other, not one of"),
        (("DNS:*", "DNS:*.org"), "c1", "not one of"),
        (("IP:10.9.8.6",), "c1", "10.9.8.6, not one of"),
        (("email:ctl1@x",), "c1", "no host, not one of"),
        (("DNS:ctl1",), "c3", "no host may report"),
        (("DNS:ctl1",), "../c1", "no host may report"),
    ],
)
def test_a_host_reports_only_for_its_own_cluster(
    receiver: ForwardedSite, connect: Connect, names: tuple[str], cluster: str, reason: str
) -> None:
    raw = connect(*names)
    answer = raw.greet(cluster)
    assert answer.verdict == "refused"
    assert reason in answer.detail
    assert raw.stream == ""


def test_a_stream_is_of_one_controller_and_cluster(
    receiver: ForwardedSite, connect: Connect
) -> None:
    raw, other = connect(), connect("DNS:ctl2")
    raw.greet()
    other.greet("c2")
    other.stream = raw.stream
    assert other.say(1, [script_row(1, cluster="c2")]).verdict == "restart"
    other.cluster = "c1"
    reply = other.say(1, [script_row(1)])
    assert (reply.verdict, "differs from that of the stream" in reply.detail) == ("refused", True)
    assert receiver.keys() == receiver.keys("c2") == []


def test_events_of_another_cluster_are_refused(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.greet()
    answer = raw.say(1, [script_row(1, cluster="c2"), script_row(2)])
    assert [index for index, _ in answer.refused] == [0]
    assert receiver.keys("c2") == []
    assert len(receiver.keys("c1")) == 1


def test_bytes_that_are_others_are_refused(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.greet()
    row = script_row(1)
    forged = wire.ForwardedEvent(
        row.kind, row.cluster, row.key, row.data, b"rm -rf /\n", row.environment
    )
    ((index, reason),) = raw.say(1, [forged]).refused
    assert (index, "SHA-256" in reason) == (0, True)
    assert receiver.kept() == {}


@pytest.mark.parametrize("path", [wire.HELLO, wire.EVENTS])
def test_a_body_that_is_anothers_is_refused(
    receiver: ForwardedSite, connect: Connect, path: str
) -> None:
    raw = connect()
    raw.greet()
    body = wire.encode_message([script_row(1)])
    headers = raw.headers(path, b"another", int(path == wire.EVENTS))
    reply = raw.post(path, body if path == wire.EVENTS else b"x", headers)
    assert (reply.verdict, "SHA-256" in reply.detail) == ("refused", True)
    assert receiver.keys() == []


@pytest.mark.parametrize("number", [0, 1, 3, 2**63])
def test_a_number_that_is_not_due_changes_nothing(
    receiver: ForwardedSite, connect: Connect, number: int
) -> None:
    raw = connect()
    raw.greet()
    assert raw.say(1, [script_row(1)]).verdict == "durable"
    assert raw.say(number, [script_row(2)]).verdict == "restart"
    assert receiver.keys() == [make_script_key(1, 1_772_366_400_000_000_000)]


def test_too_many_events_at_once_are_not_taken(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.greet()
    reply = raw.say(1, [script_row(1)] * (wire.MAX_BATCH_ROWS + 1))
    assert (reply.verdict, "1001 events" in reply.detail) == ("refused", True)
    assert receiver.keys() == []


def test_another_version_is_told_which_one_is_spoken(connect: Connect) -> None:
    answer = connect().greet(version=99)
    assert (answer.verdict, answer.detail) == (
        "refused",
        "protocol version 99 is not supported: use 2",
    )


def test_nothing_is_taken_before_a_hello(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.stream = "0" * 64
    assert raw.say(1, [script_row(1)]).verdict == "restart"
    assert receiver.keys() == []
    assert receiver.kept() == {}


def test_a_stranger_gets_only_a_small_body(connect: Connect) -> None:
    raw = connect()
    raw.stream = "0" * 64
    # Both are answered by their heads: no body comes.
    with raw.send_head(wire.EVENTS, wire.MAX_BODY_BYTES, 1) as connection:
        assert read_status(connection) == 409
    with raw.send_head(wire.HELLO, wire.NONCE_BYTES + 1) as connection:
        assert read_status(connection) == 400
    raw.greet()
    with raw.send_head(wire.EVENTS, wire.MAX_BODY_BYTES + 1, 1) as connection:
        assert read_status(connection) == 400


@pytest.mark.parametrize("limits", [{"timeouts": Timeouts(request_s=0.5)}])
def test_a_body_that_never_ends_is_given_up(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.greet()
    # As many as a cluster may have at once, and one that waits for them.
    slow = [connect() for _ in range(3)]
    halves = []
    for other in slow:
        other.greet()
        halves.append(other.send_head(wire.EVENTS, 1000, 1, b"half"))
    assert [read_status(half) for half in halves] == [408, 408, 408]
    for half in halves:
        half.close()
    assert raw.say(1, [script_row(1)]).verdict == "durable"


def test_garbage_moves_nothing(receiver: ForwardedSite, connect: Connect) -> None:
    before = receiver.files()
    for length in (1, 3, 100, 5000):
        plain = socket.create_connection(("127.0.0.1", receiver.port), 10)
        plain.sendall(os.urandom(length))
        plain.close()
        raw = connect()
        with socket.create_connection(("127.0.0.1", receiver.port), 10) as inner:
            connection = raw.context.wrap_socket(inner, server_hostname="127.0.0.1")
            connection.sendall(os.urandom(length) + b"\r\n\r\n")
            assert read_status(connection) in (0, 400)
            connection.close()
        raw.greet()
        assert raw.say(1, [], os.urandom(length)).verdict == "refused"
    assert receiver.files() == before
    assert connect().greet().verdict == "durable"


def test_without_a_certificate_nobody_is_heard(
    receiver: ForwardedSite, authority: Authority
) -> None:
    other = Authority(Path(authority.file).parent / "other")
    raw = Raw(receiver.port, authority, other.certificate("DNS:ctl1"))
    with pytest.raises(httpx.TransportError):
        raw.greet()
    raw.close()
    assert receiver.keys() == []


def test_who_says_nothing_makes_room_for_others(receiver: ForwardedSite, connect: Connect) -> None:
    known = connect()
    assert known.greet().verdict == "durable"
    silent = [socket.create_connection(("127.0.0.1", receiver.port), 10) for _ in range(40)]
    try:
        assert connect("DNS:ctl2").greet("c2").verdict == "durable"
        assert known.say(1, []).verdict == "durable"
    finally:
        for one in silent:
            one.close()


def test_a_flood_takes_no_more_threads_than_there_may_be(
    receiver: ForwardedSite, connect: Connect
) -> None:
    before = threading.active_count()
    most = 0
    silent = []
    try:
        for _ in range(60):
            silent.append(socket.create_connection(("127.0.0.1", receiver.port), 10))
            most = max(most, threading.active_count() - before)
        assert connect().greet().verdict == "durable"
        most = max(most, threading.active_count() - before)
    finally:
        for one in silent:
            one.close()
    # Two for hellos and two for streams, of each cluster, and one for batches.
    assert most <= 9


@pytest.mark.parametrize("limits", [{"max_per_cluster": 3}])
def test_one_cluster_takes_no_place_of_anothers(receiver: ForwardedSite, connect: Connect) -> None:
    other = connect("DNS:ctl2")
    assert other.greet("c2").verdict == "durable"
    many = [connect() for _ in range(9)]
    for raw in many:
        assert raw.greet().verdict == "durable"
    assert [raw.say(1, []).verdict for raw in many[:6]] == ["restart"] * 6
    assert other.say(1, []).verdict == "durable"
    for raw in many[6:]:
        assert raw.say(1, [script_row(1)]).verdict == "durable"


def test_a_disk_that_is_away_is_later(receiver: ForwardedSite, connect: Connect) -> None:
    incoming = Path(receiver.settings.state_dir) / "incoming"
    incoming.write_bytes(b"in the way")
    raw = connect()
    raw.greet()
    answer = raw.say(1, [script_row(1)])
    assert answer.verdict == "later"
    assert str(incoming) in answer.detail
    incoming.unlink()
    assert raw.say(1, [script_row(1)]).verdict == "durable"
    assert len(receiver.keys()) == 1


def test_a_journal_that_is_away_is_later(receiver: ForwardedSite, connect: Connect) -> None:
    raw = connect()
    raw.greet()
    receiver.end_journal()
    assert raw.say(1, [script_row(1)]).verdict == "later"
    receiver.begin_journal()
    assert raw.say(1, [script_row(1)]).verdict == "durable"
    assert len(receiver.keys()) == 1
