"""HTTP as agents speak it, from a peer that means no good: lengths have bounds, waits an end."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from steward.capture.nodes.http import (
    MAX_BATCH_BYTES,
    MAX_HEAD_BYTES,
    AgentPeer,
    PeerGone,
    RequestError,
)

GOOD = b"POST /nodes/1/lines HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[AgentPeer, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    with ours, theirs:
        yield AgentPeer(ours), theirs


def test_requests_follow_each_other_on_one_connection(
    pair: tuple[AgentPeer, socket.socket],
) -> None:
    peer, other = pair
    other.sendall(GOOD + b"hello" + GOOD.replace(b"Host: x", b"Connection: Close") + b"again")
    for body, closes in ((b"hello", False), (b"again", True)):
        request = peer.read_request(5, 5)
        assert request is not None
        assert (request.path, request.length) == ("/nodes/1/lines", 5)
        assert request.closes_connection is closes
        assert peer.read_body(5, 5) == body
    other.close()
    assert peer.read_request(5, 5) is None


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GOOD.replace(b"POST", b"GET"), 400),
        (GOOD.replace(b"1.1", b"1.0"), 400),
        (GOOD.replace(b"/nodes", b"/\x80"), 400),
        (GOOD.replace(b"Host: x", b"Host x"), 400),
        (GOOD.replace(b"Host: x", b"Host: \xff"), 400),
        (GOOD.replace(b"Host: x", b"X:" + b" " * 15000 + b"\x80"), 400),
        (GOOD.replace(b"Host: x", b"Content-Length: 6"), 400),
        (GOOD.replace(b"Content-Length: 5", b"Content-Size: 5"), 411),
        (GOOD.replace(b"5", b"-5"), 411),
        (GOOD.replace(b"5", b"9" * 5000), 411),
        (GOOD.replace(b"Host: x", b"Transfer-Encoding: chunked"), 411),
        (GOOD.replace(b"5", str(MAX_BATCH_BYTES + 1).encode()), 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_what_is_no_request(
    pair: tuple[AgentPeer, socket.socket], head: bytes, status: int
) -> None:
    peer, other = pair
    other.sendall(head)
    with pytest.raises(RequestError) as caught:
        peer.read_request(5, 5)
    assert caught.value.status == status


def test_a_head_without_an_end_is_cut(pair: tuple[AgentPeer, socket.socket]) -> None:
    peer, other = pair
    sender = threading.Thread(target=other.sendall, args=(b"POST " + b"a" * (MAX_HEAD_BYTES + 5),))
    sender.start()
    with pytest.raises(RequestError) as caught:
        peer.read_request(5, 5)
    assert caught.value.status == 431
    sender.join()


def test_a_byte_now_and_then_does_not_prolong_the_wait(
    pair: tuple[AgentPeer, socket.socket],
) -> None:
    peer, other = pair
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            other.send(b"P")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    try:
        with pytest.raises(PeerGone, match="slow"):
            peer.read_request(60, 0.3)
    finally:
        over.set()
        dripping.join()
    assert time.monotonic() - began < 50


def test_a_peer_that_goes_in_the_middle(pair: tuple[AgentPeer, socket.socket]) -> None:
    peer, other = pair
    other.sendall(GOOD + b"hel")
    other.close()
    assert peer.read_request(5, 5) is not None
    with pytest.raises(PeerGone, match="middle of a batch"):
        peer.read_body(5, 5)


def test_silence_ends(pair: tuple[AgentPeer, socket.socket]) -> None:
    with pytest.raises(PeerGone, match="slow"):
        pair[0].read_request(0.05, 5)
