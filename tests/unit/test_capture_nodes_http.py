"""HTTP of agents from hostile peers: lengths and waits have limits."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from steward.capture.nodes.listener import (
    MAX_BATCH_BYTES,
    RequestError,
    make_server_config,
    parse_length,
    read_chunks,
)
from steward.capture.settings import NodesSettings
from steward.core.http_server import Timeouts, open_http_listener, send_text, serve_http
from steward.core.waits import Stop

GOOD = b"POST /nodes/1/lines HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"


@contextlib.contextmanager
def served(problems: list[str], **timeouts: float) -> Iterator[socket.socket]:
    """Open a connection to a server that echoes batches."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        try:
            length = parse_length(scope)
            body = b"".join([chunk async for chunk in read_chunks(receive)])
        except RequestError as error:
            problems.append(str(error))
            await send_text(send, error.status, str(error).encode(), {"Connection": "close"})
        else:
            assert len(body) == length
            await send_text(send, 200, body)

    config = make_server_config(NodesSettings(listen="127.0.0.1:0"))
    config = msgspec.structs.replace(config, timeouts=Timeouts(**timeouts))
    stop, listener = Stop(), open_http_listener(config)
    address = listener.getsockname()
    serving = threading.Thread(target=serve_http, args=(config, answer, listener, stop, bool))
    serving.start()
    try:
        with socket.create_connection(address, 50) as other:
            yield other
    finally:
        stop.set()
        serving.join()


def read_answer(other: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(other)
    answer.begin()
    return answer.status, answer.read()


def test_requests_follow_each_other_on_one_connection() -> None:
    with served([]) as other:
        other.sendall(GOOD + b"hello")
        assert read_answer(other) == (200, b"hello")
        other.sendall(GOOD.replace(b"Host: x", b"Host: x\r\nConnection: Close") + b"again")
        assert read_answer(other) == (200, b"again")
        assert other.recv(1) == b""


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GOOD.replace(b"POST", b"GET"), 400),
        (GOOD.replace(b"1.1", b"1.0"), 400),
        (GOOD.replace(b"/nodes", b"/\x80"), 400),
        (GOOD.replace(b"Host: x", b"Host x"), 400),
        (GOOD.replace(b"Host: x", b"X: y"), 400),
        (GOOD.replace(b"Host: x", b"Host: \0"), 400),
        (GOOD.replace(b"Host: x", b"X:" + b" " * 15000 + b"\0"), 400),
        (GOOD.replace(b"Host: x", b"Host: x\r\nContent-Length: 6"), 400),
        (GOOD.replace(b"Content-Length: 5", b"Content-Size: 5"), 411),
        (GOOD.replace(b"5", b"-5"), 400),
        (GOOD.replace(b"5", b"9" * 11), 411),
        (GOOD.replace(b"5", b"9" * 5000), 400),
        (GOOD.replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"), 400),
        (GOOD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"), 411),
        (GOOD.replace(b"5", str(MAX_BATCH_BYTES + 1).encode()), 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_what_is_no_request(head: bytes, status: int) -> None:
    with served([]) as other:
        other.sendall(head)
        assert read_answer(other)[0] == status


def test_a_head_without_an_end_is_cut() -> None:
    with served([]) as other:
        other.sendall(b"POST " + b"a" * (17 << 10))
        assert read_answer(other)[0] == 431


@pytest.mark.parametrize(("begin", "status"), [(b"", 0), (GOOD.replace(b"5", b"500000"), 408)])
def test_a_byte_now_and_then_does_not_prolong_the_wait(begin: bytes, status: int) -> None:
    over = threading.Event()
    with served([], head_s=0.3, request_s=0.3) as other:

        def drip() -> None:
            other.sendall(begin)
            with contextlib.suppress(OSError):
                while not over.wait(0.02):
                    other.send(b"P")

        dripping = threading.Thread(target=drip)
        dripping.start()
        began = time.monotonic()
        try:
            if status:
                assert read_answer(other)[0] == status
            else:
                with contextlib.suppress(ConnectionResetError):
                    assert other.recv(1) == b""
        finally:
            over.set()
            dripping.join()
        assert time.monotonic() - began < 50


def test_a_peer_that_goes_in_the_middle() -> None:
    problems: list[str] = []
    with served(problems) as other:
        other.sendall(GOOD + b"hel")
        other.close()
        until = time.monotonic() + 50
        while not problems and time.monotonic() < until:
            time.sleep(0.02)
    assert "middle of a batch" in problems[0]


def test_silence_ends() -> None:
    with served([], head_s=0.05) as other:
        assert other.recv(1) == b""
