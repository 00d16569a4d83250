"""Wire format of controllers: any headers and bytes are parsed or rejected."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.core.errors import PermissionRefused
from steward.extensions.controllers import wire
from steward.extensions.controllers.wire import ForwardedEvent, ReceiverReply, RequestHead

IDS = st.binary(min_size=32, max_size=32).map(bytes.hex)
ROWS = st.builds(
    ForwardedEvent,
    kind=st.text(),
    cluster=st.text(),
    key=st.text(),
    data=st.binary(),
    script=st.none() | st.binary(),
    environment=st.none() | st.binary(),
)
REPLIES = st.builds(
    ReceiverReply,
    verdict=st.text(),
    detail=st.text(),
    stream=st.just("") | IDS,
    refused=st.lists(st.tuples(st.integers(0, 2**63), st.text()), max_size=4),
)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
HEADS = st.one_of(
    st.builds(RequestHead, path=st.just(wire.HELLO), origin=NAMES, cluster=NAMES, digest=IDS),
    st.builds(
        RequestHead,
        path=st.just(wire.EVENTS),
        origin=NAMES,
        cluster=NAMES,
        stream=IDS,
        number=st.integers(0, 2**63),
        digest=IDS,
    ),
)
HEAD = RequestHead(
    path=wire.EVENTS, origin="s:1", cluster="c1", stream="a" * 64, number=3, digest="b" * 64
)


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), text.encode()) for name, text in headers.items()]


@given(head=HEADS, credential=NAMES)
def test_a_head_comes_out_as_it_went_in(head: RequestHead, credential: str) -> None:
    more = {"content-length": "32", "authorization": credential}
    assert wire.parse_head(head.path, raw({**head.build_headers(), **more})) == (head, credential)


@given(rows=st.lists(ROWS, max_size=4), reply=REPLIES)
def test_a_message_comes_out_as_it_went_in(
    rows: list[ForwardedEvent], reply: ReceiverReply
) -> None:
    assert wire.decode_rows(wire.encode_message(rows)) == rows
    assert wire.decode_reply(wire.encode_message(reply)) == reply


@given(
    path=st.sampled_from([wire.HELLO, wire.EVENTS]),
    name=st.sampled_from([*HEAD.build_headers(), "content-length"]),
    data=st.none() | st.binary(),
)
def test_any_headers_are_a_head_or_an_error(path: str, name: str, data: bytes | None) -> None:
    headers = dict(raw({**HEAD.build_headers(), "content-length": "9"}))
    if data is None:
        del headers[name.encode()]
    else:
        headers[name.encode()] = data
    with contextlib.suppress(wire.WireError, PermissionRefused):
        head, credential = wire.parse_head(path, list(headers.items()))
        assert (head.path, credential) == (path, "")
        assert head.number <= 10**19


@given(data=st.binary(max_size=200))
def test_any_body_is_a_message_or_an_error(data: bytes) -> None:
    for body in (data, b"\x91\x96" + data, b"\x82\xa7verdict" + data):
        with contextlib.suppress(wire.WireError):
            assert isinstance(wire.decode_rows(body), list)
        with contextlib.suppress(wire.WireError):
            assert isinstance(wire.decode_reply(body), ReceiverReply)


@pytest.mark.parametrize("stream", ["x", "a" * 63, "a" * 65, "a" * 64 + "\n", "\u0661" * 64])
def test_a_stream_that_is_none_is_an_error(stream: str) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_reply(wire.encode_message(ReceiverReply(verdict="durable", stream=stream)))


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(wire.WireError):
        wire.decode_rows(b"\x91" * 200_000)
    with pytest.raises(wire.WireError):
        wire.decode_reply(b"\x81\xa1x" + b"\x91" * 200_000)


@pytest.mark.parametrize(
    ("path", "length"), [(wire.HELLO, wire.NONCE_BYTES), (wire.EVENTS, wire.MAX_BODY_BYTES)]
)
def test_a_body_that_is_announced_too_large_is_not_waited_for(path: str, length: int) -> None:
    head = HEAD
    if path == wire.HELLO:
        head = msgspec.structs.replace(HEAD, path=path, stream="", number=0)
    headers = head.build_headers()
    assert wire.parse_head(path, raw({**headers, "content-length": str(length)})) == (head, "")
    with pytest.raises(wire.WireError, match=f"invalid body length of {length + 1} bytes"):
        wire.parse_head(path, raw({**headers, "content-length": str(length + 1)}))


def test_a_credential_is_for_one_place_of_one_stream() -> None:
    statements = {HEAD.build_statement()}
    others = {
        "path": wire.HELLO,
        "origin": "s:2",
        "cluster": "c2",
        "stream": "c" * 64,
        "number": 4,
        "digest": "d" * 64,
    }
    assert set(others) == set(HEAD.__struct_fields__)
    for name, value in others.items():
        statements.add(msgspec.structs.replace(HEAD, **{name: value}).build_statement())
    assert len(statements) == 7


def test_the_credential_of_an_answer_is_for_one_request_and_body() -> None:
    statements = {HEAD.build_statement(), HEAD.build_reply_statement("durable", b"body")}
    for name, value in {"stream": "c" * 64, "number": 4, "digest": "d" * 64}.items():
        other = msgspec.structs.replace(HEAD, **{name: value})
        statements.add(other.build_reply_statement("durable", b"body"))
    statements.add(HEAD.build_reply_statement("later", b"body"))
    statements.add(HEAD.build_reply_statement("durable", b"bodY"))
    assert len(statements) == 7
