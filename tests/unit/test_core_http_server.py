"""HEAD requests of the HTTP server."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servers.authority import Authority
from steward.admin.credentials.requests import CallerAnswer
from steward.core.http_server import (
    ServerConfig,
    ServingError,
    answer_head,
    limit_concurrency,
    open_http_listener,
    send_text,
    serve_http,
)
from steward.core.listeners import ConnectionLimit, CountedConnection
from steward.core.section import TlsSettings
from steward.core.waits import Stop
from steward.web.application import build_application
from steward.web.daemon_client import DaemonClient
from steward.web.settings import WebSettings

# Litestar will change in a coming release how handlers name their parameters.
pytestmark = pytest.mark.filterwarnings("ignore:.*Inferred dependency:DeprecationWarning")


def asked(app: Any, requests: Sequence[tuple[str, str]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(answer_head(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(run())


def test_head_counts_among_the_requests_of_whoever_asks() -> None:
    app = build_application(WebSettings(requests_per_minute=60), DaemonClient("/nowhere"))
    path = "/api/v1/openapi.json"
    *answers, last = asked(app, [*[("HEAD", path)] * 30, ("GET", path)])
    assert answers[0].status_code == 200
    assert answers[-1].status_code == last.status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/v1/openapi.json", {"GET", "HEAD", "OPTIONS"}),
        ("/static/app.js", {"GET", "HEAD", "OPTIONS"}),
        ("/logout", {"OPTIONS", "POST"}),
    ],
)
def test_which_methods_there_are_is_told_with_head(path: str, allowed: set[str]) -> None:
    app = build_application(WebSettings(), DaemonClient("/nowhere"))
    (refused,) = asked(app, [("PUT", path)])
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == allowed
    (head,) = asked(app, [("HEAD", path)])
    assert (head.status_code == 405) == ("GET" not in allowed)


def test_an_answer_without_an_end_is_over_with_its_head() -> None:
    ended = asyncio.Event()

    async def endless(_: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-kind", b"news")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"news", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    (answer,) = asked(endless, [("HEAD", "/")])
    assert answer.headers["x-kind"] == "news"
    assert ended.is_set()


def test_other_methods_are_answered_whole() -> None:
    async def echo(scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        body = scope["method"].encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    answers = asked(echo, [(method, "/") for method in ("GET", "POST", "OPTIONS")])
    assert [answer.text for answer in answers] == ["GET!", "POST!", "OPTIONS!"]


@contextlib.contextmanager
def served(app: Any = None, **more: Any) -> Iterator[int]:
    """Serve a handler that replies with the body's length at loopback; return its port."""

    async def answer_length(scope: Any, receive: Any, send: Any) -> None:
        length, more_body = 0, True
        while more_body:
            message = await receive()
            length += len(message.get("body", b""))
            more_body = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(length).encode()})

    of = ServerConfig(name="it", section="[it]", listen="0.0.0.0:0", **more)
    stop, listener = Stop(), open_http_listener(of)
    port: int = listener.getsockname()[1]
    serving = threading.Thread(
        target=serve_http, args=(of, app or answer_length, listener, stop, lambda: None)
    )
    serving.start()
    try:
        yield port
    finally:
        stop.set()
        serving.join()


HALVES = (
    b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n",
    b"",
)


@pytest.mark.parametrize("half", HALVES)
def test_requests_that_are_not_whole_keep_nobody_else_away(half: bytes) -> None:
    with served() as port, contextlib.ExitStack() as held:
        for _ in range(600):
            half_open = held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            with contextlib.suppress(OSError):
                half_open.sendall(half)
                if b"\r\n\r\nGET" in half:
                    half_open.recv(12)  # complete requests are answered: that may take a while
        for source in ("127.0.0.1", "127.0.0.2"):
            for _ in range(20):
                answer = asked_from(source, port)
                assert (answer.status_code, answer.text) == (200, "5"), source


def test_so_many_whole_requests_are_answered_at_once_and_no_more() -> None:
    go_on = asyncio.Event()

    async def waits(_: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> list[int]:
        transport = httpx.ASGITransport(limit_concurrency(waits))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asking = [asyncio.create_task(client.get("/")) for _ in range(513)]
            refused, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status_code for task in refused] == [503]
            go_on.set()
            return [answer.status_code for answer in await asyncio.gather(*asking)]

    codes = asyncio.run(run())
    assert (codes.count(200), codes.count(503)) == (512, 1)


def test_a_body_with_two_lengths_is_refused_and_what_follows_is_no_request() -> None:
    with served() as port, socket.create_connection(("127.0.0.1", port), 30) as proxy:
        proxy.sendall(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 41\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        answers = b"".join(iter(lambda: proxy.recv(4096), b""))
    assert answers.startswith(b"HTTP/1.1 400")
    assert answers.count(b"HTTP/1.1") == 1
    assert b"not both" in answers


def test_a_proxys_connections_are_bounded_with_all_others_alone() -> None:
    with served(shared=("127.0.0.0/30",)) as port, contextlib.ExitStack() as held:
        waiting = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(100)
        ]
        assert asked_from("127.0.0.2", port).status_code == 200
        for connection in waiting:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in waiting)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")
@pytest.mark.parametrize("shared", [(), ("127.0.0.1",)])
def test_a_user_of_this_host_keeps_no_other_away(shared: tuple[str, ...]) -> None:
    """Both clients have a proxy's address, and connections of other hosts are limited."""
    with served(shared=shared) as port, crowd_of(4001, port):
        for source in ("127.0.0.3", "127.0.0.1"):
            for _ in range(12):
                assert asked_from(source, port).status_code == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")
def test_connections_that_their_user_closed_are_not_roots() -> None:
    with served() as port, crowd_of(4001, port, closed=True):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), 30) as slow:
                slow.sendall(b"GET / HTTP/1.1\r\n")
                time.sleep(0.05)
                slow.sendall(b"Host: x\r\n\r\n")
                assert slow.recv(12) == b"HTTP/1.1 200"


def test_a_connection_whose_port_was_used_before_is_served() -> None:
    with served() as port:
        own = 0
        for whole in (b"", b"Host: x\r\n\r\n") * 20:
            with socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Reset as it is closed, so that the port is free at once.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.bind(("127.0.0.1", own))
                own = one.getsockname()[1]
                one.settimeout(30)
                one.connect(("127.0.0.1", port))
                one.sendall(b"GET / HTTP/1.1\r\n" + whole)
                assert not whole or one.recv(12) == b"HTTP/1.1 200"


def test_a_tls_connection_that_takes_the_descriptor_of_another_is_served(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate_file, key_file = authority.certificate("IP:127.0.0.1")
    tls = TlsSettings(certificate_file=certificate_file, key_file=key_file)
    context = ssl.create_default_context(cafile=authority.file)

    def ask(count: int) -> None:
        for _ in range(count):
            with (
                socket.create_connection(("127.0.0.1", port), 30) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
            ):
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 200"

    with (
        served(tls=tls) as port,
        ThreadPoolExecutor(8) as clients,
    ):
        for done in [clients.submit(ask, 50) for _ in range(8)]:
            done.result()


def test_a_server_with_a_ca_of_clients_serves_only_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate_file, key_file = authority.certificate("IP:127.0.0.1")
    tls = TlsSettings(
        certificate_file=certificate_file, key_file=key_file, client_ca_file=authority.file
    )
    stranger = ssl.create_default_context(cafile=authority.file)
    client = ssl.create_default_context(cafile=authority.file)
    client.load_cert_chain(certificate_file, key_file)

    def ask(context: ssl.SSLContext) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), 30) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(12)

    with served(tls=tls) as port:
        assert ask(client) == b"HTTP/1.1 200"
        # With TLS 1.3 the server's refusal comes after the client's handshake.
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert ask(stranger) == b""


@contextlib.contextmanager
def crowd_of(uid: int, port: int, *, closed: bool = False) -> Iterator[None]:
    """Open idle connections of another user; with ``closed`` they come and go for ever."""
    ready, child = os.pipe(), os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(uid)
            held = [socket.socket() for _ in range(300)]
            for one in held:
                one.connect(("127.0.0.1", port))
            os.write(ready[1], b"!")
            while closed:
                for _ in range(60):
                    with socket.socket() as one:
                        one.connect(("127.0.0.1", port))
                time.sleep(0.02)
            signal.pause()
        os._exit(1)
    os.close(ready[1])
    try:
        assert os.read(ready[0], 1) == b"!"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready[0])


def test_an_answer_before_the_end_of_a_body_arrives() -> None:
    """A reset because of unread data would discard the answer."""

    async def refuse(_: Any, receive: Any, send: Any) -> None:
        await send_text(send, 403, b"no", {"Connection": "close"})

    with (
        served(app=refuse) as port,
        socket.create_connection(("127.0.0.1", port), 30) as client,
    ):
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        client.sendall(bytes(1_000_000))
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 403")


def test_a_head_that_is_too_large_is_told_to_be() -> None:
    with served() as port, socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000)
        assert client.recv(12) == b"HTTP/1.1 431"


def test_a_whole_request_counts_until_its_client_is_identified() -> None:
    is_known, go_on = threading.Event(), threading.Event()

    async def identify(scope: Any, receive: Any, send: Any) -> None:
        if not is_known.is_set():
            scope["state"]["connection"].identify()
            is_known.set()
        await asyncio.to_thread(go_on.wait, 60)
        await send_text(send, 200, scope["client"][0].encode())

    with served(app=identify, identifies=True) as port, contextlib.ExitStack() as held:

        def ask() -> socket.socket:
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return client

        known = ask()
        assert is_known.wait(60)
        others = [ask() for _ in range(100)]
        # The first of them are closed for the last; the authenticated one stays.
        assert others[0].recv(12) == b""
        go_on.set()
        assert known.recv(12) == others[-1].recv(12) == b"HTTP/1.1 200"


def test_many_who_come_at_once_get_a_second_each() -> None:
    limit = ConnectionLimit(2, 6, ("10.0.0.0/8",))
    with contextlib.ExitStack() as held:

        def come(address: str) -> CountedConnection:
            ours, theirs = map(held.enter_context, socket.socketpair())
            theirs.settimeout(20)
            return limit.add(ours, address)

        first, second, *_ = (come(f"10.0.0.{number}") for number in range(4))
        wait_s = limit.find_wait()
        assert wait_s is not None
        assert 0 < wait_s <= 1
        second.count(False)
        assert limit.find_wait() is None
        # One host alone is not waited for.
        hosts = [come("192.0.2.1") for _ in range(3)]
        assert limit.find_wait() == 0
        assert [host.is_dropped for host in hosts] == [True, False, False]
        # There are as many as there may be.
        come("192.0.2.2")
        assert limit.find_wait()
        for host in hosts:
            host.count(False)
        second.count(True)
        first.since -= 1
        assert (limit.find_wait(), first.is_dropped) == (0, True)


def asked_from(source: str, port: int) -> httpx.Response:
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, timeout=60) as client:
        return client.post(f"http://127.0.0.1:{port}/", content=b"hello")


@pytest.mark.parametrize("length", [(1 << 20) - 200, 3 << 19, 3 << 20])
def test_a_body_that_is_too_large_is_told_to_be(length: int, tmp_path: Path) -> None:
    # Numbers that need more characters for the daemon than for the client.
    body = b'{"action": "x", "parameters": {"n": [' + b",".join([b"1E18"] * (length // 5)) + b"]}}"
    app: Any = build_application(WebSettings(), Answers(str(tmp_path)))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": "Bearer stt_x", "Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/api/v1/ask/automation.run", content=body, headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 413, answer.text


class Answers(DaemonClient):
    """Client of the daemon that answers ``credentials.me`` itself."""

    async def call_action(self, name: str, request: Any, *more: Any, **named: Any) -> Any:
        if name == "credentials.me":
            return CallerAnswer(
                uid=1, user="ada", how="token", clusters=(), bank=True, sensor=True, rules=True
            )
        return await super().call_action(name, request, *more, **named)


def test_a_certificate_that_cannot_be_used_is_named_with_its_table(tmp_path: Path) -> None:
    path = str(tmp_path / "certificate.pem")
    tls = TlsSettings(certificate_file=path, key_file=path)
    config = ServerConfig(name="it", section="[it]", listen="127.0.0.1:0", tls=tls)
    with (
        open_http_listener(config) as listener,
        pytest.raises(ServingError, match=rf"^\[it\] tls: cannot load the certificate {path} "),
    ):
        serve_http(config, lambda *_: None, listener, Stop(), lambda: None)
