"""Listener for nodes while the daemon has no capacity for it."""

import contextlib
import os
import pwd
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steward.capture.nodes.listener import (
    ListenerEndpoint,
    NodeListener,
    listener_socket_path,
    make_server_config,
)
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.http_server import send_text, serve_http
from steward.core.waits import Stop

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    # Others come as far as the socket.
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o755)
    nodes = NodesSettings(listen="127.0.0.1:0", listener="nobody")
    return Settings(run_dir=str(tmp_path), nodes=nodes)


@contextlib.contextmanager
def busy(settings: Settings) -> Iterator[None]:
    """Make a daemon without capacity for nodes."""

    async def refuse(_: Any, receive: Any, send: Any) -> None:
        await send_text(send, 503, b"no room", {"Connection": "close", "Retry-After": "5"})

    stop, endpoint = Stop(), ListenerEndpoint(settings)
    config = make_server_config(settings.nodes)
    serving = threading.Thread(
        target=serve_http,
        args=(config, refuse, endpoint.listener, stop, lambda: None, endpoint.find_address),
    )
    serving.start()
    try:
        yield
    finally:
        stop.set()
        serving.join()


def test_a_listener_outlives_a_daemon_without_room(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()
    listener = NodeListener(settings.nodes, listener_socket_path(settings), check_interval_s=0.1)
    thread = threading.Thread(target=listener.run, args=(stop,))
    thread.start()
    url = "http://{}:{}/v1/events".format(*listener.address)
    with busy(settings), socket.create_connection(listener.address, 60) as first:
        first.sendall(b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        assert first.recv(12) == b"HTTP/1.1 503"
        answer = httpx.post(url, content=b"hello", timeout=60)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    deadline = time.monotonic() + 60
    while "nodes.sock" not in caplog.text:
        # Its checks of the settings go on, and fail only now.
        assert time.monotonic() < deadline
        time.sleep(0.1)
    answer = httpx.post(url, content=b"hello", timeout=60)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "15")
    assert thread.is_alive()
    stop.set()
    thread.join()


def test_only_the_listener_reaches_its_socket(settings: Settings) -> None:
    path = listener_socket_path(settings)
    with contextlib.closing(ListenerEndpoint(settings).listener):
        assert [_can_connect(path, uid) for uid in (pwd.getpwnam("nobody").pw_uid, 4001)] == [
            True,
            False,
        ]


def _can_connect(path: str, uid: int) -> bool:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(uid)
            socket.socket(socket.AF_UNIX).connect(path)
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
