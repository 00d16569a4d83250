"""The listener for nodes with a daemon that has no room for it."""

import contextlib
import os
import pwd
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from steward.capture.nodes.http import AgentConnection, AgentConnections
from steward.capture.nodes.listener import ListenerEndpoint, NodeListener, listener_socket_path
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.waits import Stop

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    # Others come as far as the socket.
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o755)
    nodes = NodesSettings(listen="127.0.0.1:0", listener="nobody", most_connections=1)
    return Settings(run_dir=str(tmp_path), nodes=nodes)


@contextlib.contextmanager
def busy(settings: Settings) -> Iterator[threading.Event]:
    """A daemon whose one place a node keeps, until the event is set."""
    told, stop = threading.Event(), Stop()
    heard = ListenerEndpoint(settings)

    def serve(connection: AgentConnection) -> None:
        with contextlib.suppress(Exception):
            if heard.authenticate(connection) is not None:
                connection.is_known = True
                told.wait(60)

    connections = AgentConnections(heard.listener, 1, (), serve, heard.reject)

    def take() -> None:
        while not stop.is_set():
            connections.serve_next(stop)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield told
    finally:
        told.set()
        stop.set()
        thread.join()
        connections.close()


def test_a_listener_outlives_a_daemon_without_room(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()
    with busy(settings) as told:
        listener = NodeListener(
            settings.nodes, listener_socket_path(settings), check_interval_s=0.5
        )
        thread = threading.Thread(target=listener.run, args=(stop,))
        thread.start()
        url = "http://{}:{}/v1/events".format(*listener.address)
        with socket.create_connection(listener.address, 60) as first:
            first.sendall(b"POST /v1/events HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
            deadline = time.monotonic() + 60
            while "no more nodes" not in caplog.text:
                assert time.monotonic() < deadline
                assert thread.is_alive()
                time.sleep(0.1)
            answer = httpx.post(url, content=b"hello", timeout=60)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert thread.is_alive()
        told.set()
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
