"""Replies of a process's own socket: long ones, peers that do not read, errors of the service."""

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steward.core.errors import Conflict, NotFound, StewardError
from steward.core.rpc import (
    RawRequest,
    RpcUnavailable,
    connect_socket,
    encode_request_line,
    send_request,
    send_request_async,
)
from steward.core.rpc_server import RpcListener

PATIENCE_S = 30.0


class OwnConflict(Conflict):
    """Error of the service."""


class Service:
    """Event loop of a process, in a thread."""

    def __init__(self, path: str, answer: Callable[[Any], Any]) -> None:
        self.listener = RpcListener(path, request_type=RawRequest, own=(OwnConflict,))
        self._answer = answer
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            select.select([self.listener.fd], [], [], 0.05)
            for call in self.listener.receive():
                try:
                    call.reply(self._answer(call.message.args))
                except StewardError as error:
                    call.reject(error)

    def close(self) -> None:
        self._end.set()
        self._thread.join(PATIENCE_S)
        self.listener.close()


def answer(args: msgspec.Raw) -> Any:
    asked = msgspec.json.decode(args)
    if asked == "own":
        raise OwnConflict("not now")
    if asked == "other":
        raise NotFound("not there")
    return "x" * asked


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "own.sock")
    service = Service(path, answer)
    yield path
    service.close()


def ask(path: str, args: Any) -> str:
    return send_request(
        path, "say", args, str, timeout_s=PATIENCE_S, own=(OwnConflict,), max_bytes=1 << 30
    )


def test_a_long_reply_comes_whole(path: str) -> None:
    assert ask(path, 30 << 20) == "x" * (30 << 20)


def test_a_peer_that_does_not_read_keeps_nobody_waiting(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.core.rpc_server.REPLY_TIMEOUT_S", 0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as idle:
        idle.settimeout(PATIENCE_S)
        connect_socket(idle, path)
        idle.sendall(encode_request_line("say", 30 << 20))
        assert ask(path, 3) == "xxx"
        threading.Event().wait(1.5)
        received = sum(iter(lambda: len(idle.recv(1 << 20)), 0))
        assert received < 30 << 20, "the reply was dropped"


def test_errors_of_the_service_arrive_as_such(path: str) -> None:
    with pytest.raises(OwnConflict, match="not now"):
        ask(path, "own")
    with pytest.raises(NotFound, match="not there"):
        ask(path, "other")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reply_that_is_too_large_is_named_with_its_bound(path: str, is_async: bool) -> None:
    def send(length: int) -> str:
        if is_async:
            sent = send_request_async(path, "x", length, str, timeout_s=30, max_bytes=1000)
            return asyncio.run(sent)
        return send_request(path, "x", length, str, timeout_s=30, max_bytes=1000)

    assert send(900) == "x" * 900
    with pytest.raises(RpcUnavailable, match=r"too large: \d+ bytes or more, of 1000 at most"):
        send(1000)
