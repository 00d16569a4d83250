"""Listener of a process's own socket: limits on peers, requests and time, and long paths."""

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from steward.core import rpc_server
from steward.core.errors import Conflict
from steward.core.rpc import RpcUnavailable, encode_request_line, send_request, shorten_socket_path
from steward.core.rpc_server import RpcListener


class Echo:
    """Listener that replies to each request with its arguments, and to "conflict" with an error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = RpcListener(path, max_bytes=1000)
        self._end_fd, self._ending_fd = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._end_fd, select.POLLIN)
        poller.register(self.listener.fd, select.POLLIN)
        while self._end_fd not in {fd for fd, _ in poller.poll(20)}:
            for call in self.listener.receive():
                if call.message.action == "conflict":
                    call.reject(Conflict("it is running"))
                else:
                    call.reply(call.message.args)

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(20)
        with shorten_socket_path(self.path) as name:
            peer.connect(name)
        return peer

    def close(self) -> None:
        os.close(self._ending_fd)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.listener.close()
        os.close(self._end_fd)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(str(tmp_path / ("d" * 120) / "a.sock"))
    yield echo
    echo.close()
    assert not os.path.exists(echo.path)


def test_answers_and_errors_travel_over_a_long_path(echo: Echo) -> None:
    assert send_request(echo.path, "echo", [1, "a"], list, timeout_s=20) == [1, "a"]
    with pytest.raises(Conflict, match="it is running"):
        send_request(echo.path, "conflict", {}, dict, timeout_s=20)
    with pytest.raises(RpcUnavailable, match="cannot decode the reply"):
        send_request(echo.path, "echo", [1], dict, timeout_s=20)


def test_a_request_that_is_too_long_is_rejected(echo: Echo) -> None:
    with echo.connect() as peer:
        peer.sendall(b"x" * 1001)
        assert b"longer than 1000 bytes" in peer.recv(4096)
    assert send_request(echo.path, "echo", 7, int, timeout_s=20) == 7


def test_a_request_of_another_version_is_rejected(echo: Echo) -> None:
    with echo.connect() as peer:
        peer.sendall(encode_request_line("echo", 1).replace(b'"v":1', b'"v":9'))
        assert b"version 1 of the protocol, not 9" in peer.recv(4096)


def test_a_silent_peer_is_dropped_in_time(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "REQUEST_TIMEOUT_S", 0.1)
    with echo.connect() as peer:
        peer.sendall(b"{")
        assert peer.recv(1) == b""


def test_a_user_who_is_not_listed_is_rejected(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc_server, "get_peer_uid", lambda _: 65534)
    with echo.connect() as peer:
        assert b'"kind":"PermissionRefused"' in peer.recv(4096)
    assert "permission denied to uid 65534" in caplog.text


def test_no_listener(tmp_path: Path) -> None:
    with pytest.raises(RpcUnavailable, match="cannot reach a daemon"):
        send_request(str(tmp_path / "a.sock"), "echo", 1, int, timeout_s=1)
