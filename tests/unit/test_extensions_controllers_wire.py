"""What goes over the wire: any bytes are read or refused, and none are waited for for ever."""

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.extensions.controllers import wire
from steward.extensions.controllers.wire import (
    ControllerHello,
    EventBatch,
    ForwardedEvent,
    ReceiverGreeting,
    ReceiverReply,
)

ROWS = st.builds(
    ForwardedEvent,
    kind=st.text(),
    cluster=st.text(),
    key=st.text(),
    data=st.binary(),
    script=st.none() | st.binary(),
    environment=st.none() | st.binary(),
)
NUMBERS = st.integers(0, 2**63)
MESSAGES: st.SearchStrategy[wire.WireMessage] = st.one_of(
    st.builds(ReceiverGreeting, version=NUMBERS, nonce=st.binary()),
    st.builds(ControllerHello, version=NUMBERS, cluster=st.text(), nonce=st.binary()),
    st.builds(EventBatch, number=NUMBERS, rows=st.lists(ROWS, max_size=4)),
    st.builds(
        ReceiverReply,
        number=NUMBERS,
        verdict=st.text(),
        detail=st.text(),
        refused=st.lists(st.tuples(NUMBERS, st.text()), max_size=4),
    ),
)


class Pair:
    """Two ends of a connection."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.stream = wire.FrameStream(self.near, "the peer")

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair()
    yield ends
    ends.close()


@given(message=MESSAGES, credential=st.binary(max_size=300))
def test_a_message_comes_out_as_it_went_in(message: wire.WireMessage, credential: bytes) -> None:
    ends = Pair()
    try:
        wire.FrameStream(ends.far, "far").send(
            wire.build_frame(wire.encode_message(message), credential), 5.0
        )
        frame = ends.stream.receive(wire.MAX_WIRE_FRAME_BYTES, 5.0)
        assert frame is not None
        assert (frame.decode_message(), frame.credential) == (message, credential)
    finally:
        ends.close()


@given(data=st.binary(max_size=400), framed=st.booleans())
def test_any_bytes_are_a_frame_or_an_error(data: bytes, framed: bool) -> None:
    ends = Pair()
    try:
        ends.far.sendall(struct.pack("<I", len(data)) + data if framed else data)
        ends.far.shutdown(socket.SHUT_WR)
        try:
            frame = ends.stream.receive(wire.MAX_FIRST_FRAME_BYTES, 5.0)
            if frame is not None:
                frame.decode_message()
        except (wire.WireError, wire.WireUnavailable):
            pass
    finally:
        ends.close()


@given(data=st.binary(max_size=200))
def test_any_body_is_a_message_or_an_error(data: bytes) -> None:
    for body in (data, b"\x82\xa4type\xa5batch" + data, b"\x82\xa4type\xa5hello" + data):
        with contextlib.suppress(wire.WireError):
            assert isinstance(wire.Frame(body, b"").decode_message(), wire.WireMessage)


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(wire.WireError):
        wire.Frame(b"\x91" * 200_000, b"").decode_message()


def test_a_frame_that_is_announced_too_large_is_not_waited_for(pair: Pair) -> None:
    pair.far.sendall(struct.pack("<I", wire.MAX_FIRST_FRAME_BYTES + 1))
    with pytest.raises(wire.WireError, match="announces a frame of 65537 bytes"):
        pair.stream.receive(wire.MAX_FIRST_FRAME_BYTES, 60.0)


def test_a_frame_that_never_ends_is_given_up(pair: Pair) -> None:
    pair.far.sendall(struct.pack("<I", 100) + b"x")
    with pytest.raises(wire.WireUnavailable, match="the peer"):
        pair.stream.receive(wire.MAX_FIRST_FRAME_BYTES, 0.05)


@pytest.mark.parametrize("sent", [b"\1", struct.pack("<I", 9) + b"abc"])
def test_a_frame_that_is_cut_off_is_an_error(pair: Pair, sent: bytes) -> None:
    pair.far.sendall(sent)
    pair.far.close()
    with pytest.raises(wire.WireUnavailable, match="middle of a frame"):
        pair.stream.receive(wire.MAX_FIRST_FRAME_BYTES, 5.0)


def test_the_end_between_two_frames_is_none(pair: Pair) -> None:
    pair.far.close()
    assert pair.stream.receive(wire.MAX_FIRST_FRAME_BYTES, 5.0) is None


def test_more_than_fits_is_not_sent() -> None:
    with pytest.raises(wire.WireError, match="more than fit into one frame"):
        wire.build_frame(bytes(wire.MAX_WIRE_FRAME_BYTES))


def test_a_credential_is_for_one_place_of_one_connection() -> None:
    base = wire.credential_payload(wire.FROM_CONTROLLER, b"n" * 64, 3, b"body")
    others = {
        wire.credential_payload(wire.FROM_RECEIVER, b"n" * 64, 3, b"body"),
        wire.credential_payload(wire.FROM_CONTROLLER, b"m" * 64, 3, b"body"),
        wire.credential_payload(wire.FROM_CONTROLLER, b"n" * 64, 4, b"body"),
        wire.credential_payload(wire.FROM_CONTROLLER, b"n" * 64, 3, b"bodY"),
    }
    assert len(others | {base}) == 5
