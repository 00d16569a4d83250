"""Client of search servers: nodes, credentials, TLS, and invalid replies."""

import gzip
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from servers.authority import Authority
from servers.http_server import Quiet, answering
from servers.server import free_port
from steward.archive.errors import ArchiveUnavailable
from steward.core.section import TlsSettings
from steward.extensions.search_servers import client as module
from steward.extensions.search_servers.client import (
    NDJSON_TYPE,
    REQUEST_TIMEOUT_S,
    NodeRotation,
    SearchClient,
    ServerReply,
)
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)

Answer = Callable[["Handler"], None]


class Seen(NamedTuple):
    """Request that the node received."""

    command: str
    path: str
    headers: Message
    body: bytes
    client_address: tuple[str, int]


class Handler(Quiet, BaseHTTPRequestHandler):
    """Handler that records each request, and answers as the node does."""

    protocol_version = "HTTP/1.1"
    node: "Node"

    def reply(self, body: bytes = b"{}", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("X-Elastic-Product", "Elasticsearch")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        seen = Seen(self.command, self.path, self.headers, body, self.client_address)
        self.node.requests.append(seen)
        self.node.answer(self)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 -- http.server's names


class Node:
    """Node of a search server.

    Args:
        answer: Answers each request.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[Seen] = []
        self.url = ""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def serve(stack: ExitStack) -> Callable[..., Node]:
    """Start a node."""

    def call(answer: Answer = Handler.reply, context: ssl.SSLContext | None = None) -> Node:
        node = Node(answer)
        server = stack.enter_context(answering(type("Of", (Handler,), {"node": node})))
        # The subject of these tests is the behaviour of clients.
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.daemon_threads, server.block_on_close = True, False
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        node.url = f"{scheme}://127.0.0.1:{server.server_port}"
        return node

    return call


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., SearchClient]:
    """Make a client of some nodes, which the test's end closes."""

    def call(
        *nodes: Node | str,
        kind: Any = OpenSearchSinkSettings,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **more: Any,
    ) -> SearchClient:
        urls = tuple(of if isinstance(of, str) else of.url for of in nodes)
        client = SearchClient(kind(urls=urls, **more), timeout_s)
        stack.callback(client.close)
        return client

    return call


def test_each_product_gets_the_media_types_that_it_knows(serve: Any, connect: Any) -> None:
    node = serve()
    for kind, accepted, sent in (
        (OpenSearchSinkSettings, "application/json", "application/x-ndjson"),
        (
            ElasticsearchSinkSettings,
            "application/vnd.elasticsearch+json; compatible-with=8",
            "application/vnd.elasticsearch+x-ndjson; compatible-with=8",
        ),
    ):
        assert connect(node, kind=kind).request("POST", "/_bulk", b"{}\n", NDJSON_TYPE).body
        seen = node.requests[-1]
        assert (seen.headers["Accept"], seen.headers["Content-Type"]) == (accepted, sent)


def test_large_bodies_are_compressed_both_ways_and_small_ones_are_not(
    serve: Any, connect: Any
) -> None:
    def echo(request: Handler) -> None:
        request.reply(gzip.compress(b"y" * 200_000), Content_Encoding="gzip")

    node = serve(echo)
    client = connect(node)
    assert client.request("POST", "/a", b"x" * 1024).body == b"y" * 200_000
    assert client.request("PUT", "/b?c=d.*,e", b"x" * 1025).status == 200
    whole = random.Random(4).randbytes(3_000_000)
    assert client.request("POST", "/c", whole).status == 200
    small, large, huge = node.requests
    assert gzip.decompress(huge.body) == whole
    assert (small.body, small.headers["Content-Encoding"]) == (b"x" * 1024, None)
    assert large.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(large.body) == b"x" * 1025
    assert (large.command, large.path) == ("PUT", "/b?c=d.*,e")
    assert {of.headers["Accept-Encoding"] for of in node.requests} == {"gzip"}


def test_a_path_in_front_of_the_server_is_kept(serve: Any, connect: Any) -> None:
    node = serve()
    connect(f"{node.url}/search/").request("GET", "/")
    assert node.requests[0].path == "/search/"


@pytest.mark.parametrize("status", [200, 404])
def test_another_product_is_told_by_the_header_of_what_succeeds(
    serve: Any, connect: Any, status: int
) -> None:
    def plain(request: Handler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", "0")
        request.end_headers()

    node = serve(plain)
    assert connect(node).request("GET", "/") == ServerReply(status, b"")
    client = connect(node, kind=ElasticsearchSinkSettings)
    if status == 200:
        with pytest.raises(ArchiveUnavailable, match='not Elasticsearch: set kind = "opensearch"'):
            client.request("GET", "/")
    else:
        assert client.request("GET", "/").status == status


def test_a_reply_is_bounded_as_it_is_and_as_it_becomes(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 1 << 20)
    for size, is_taken in ((1 << 20, True), ((1 << 20) + 1, False), (1 << 28, False)):
        packed = gzip.compress(bytes(size))

        def bomb(request: Handler, body: bytes = packed) -> None:
            request.reply(body, Content_Encoding="gzip")

        client = connect(serve(bomb))
        if is_taken:
            assert len(client.request("GET", "/").body) == size
            continue
        with pytest.raises(ArchiveUnavailable, match="the reply has more than 1 MiB"):
            client.request("GET", "/")


GZIP_HEAD = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "disconnected without sending a response"),
        (b"SSH-2.0-x\r\n\r\n", r"cannot reach http\S+: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", r"cannot reach http\S+: "),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}",
            "incorrect header check",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, r"cannot reach http\S+: "),
        (
            GZIP_HEAD % 400_022 + gzip.compress(b"{}", mtime=0) + bytes(400_000),
            "after the end of its gzip",
        ),
        (GZIP_HEAD % 12 + gzip.compress(b"{}", mtime=0)[:12], "ends within its gzip stream"),
    ],
)
def test_what_is_no_reply_is_tried_again(serve: Any, connect: Any, raw: bytes, why: str) -> None:
    def write(request: Handler) -> None:
        request.close_connection = True
        request.wfile.write(raw)

    with pytest.raises(ArchiveUnavailable, match=why) as caught:
        connect(serve(write)).request("GET", "/")
    assert str(caught.value).isprintable()


def test_what_an_encoding_unasked_for_holds_is_left_as_it_is(serve: Any, connect: Any) -> None:
    def stacked(request: Handler) -> None:
        request.reply(b"{}", Content_Encoding="gzip, gzip")

    assert connect(serve(stacked)).request("GET", "/").body == b"{}"


def test_a_server_that_is_silent_or_slow_has_as_long_as_a_request_may_take(
    serve: Any, connect: Any
) -> None:
    ended = threading.Event()

    def silent(_: Handler) -> None:
        ended.wait(30)

    def drip(request: Handler, start: bytes, piece: bytes) -> None:
        request.close_connection = True
        request.wfile.write(start)
        try:
            while not ended.wait(0.05):
                request.wfile.write(piece)
        except OSError:
            pass  # the client has gone

    def slow_body(request: Handler) -> None:
        drip(request, b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" ")

    def slow_headers(request: Handler) -> None:
        drip(request, b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x")

    def interim_replies(request: Handler) -> None:
        drip(request, b"", b"HTTP/1.1 102 Processing\r\n\r\n")

    try:
        for answer in (silent, slow_body, slow_headers, interim_replies):
            client = connect(serve(answer), timeout_s=0.4)
            began = time.monotonic()
            with pytest.raises(ArchiveUnavailable, match=r"within 0\.4 s: check whether"):
                client.request("GET", "/")
            assert time.monotonic() - began < 10
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{port}", r"cannot reach http://127\.0\.0\.1:\d+: Connection refused"),
        (f"http://{'x' * 64}.example:9200", r"cannot reach http\S+: "),
        ("http://.example:9200", r"cannot reach http\S+: "),
    ],
)
def test_nobody_at_an_address_says_why(connect: Any, url: str, why: str) -> None:
    with pytest.raises(ArchiveUnavailable, match=why):
        connect(url.format(port=free_port())).request("GET", "/")


def test_no_redirect_proxy_or_cookie_leads_elsewhere(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = serve()

    def redirect(request: Handler) -> None:
        request.reply(status=302, Location=other.url, Set_Cookie="a=b; Path=/")

    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, other.url)
    node = serve(redirect)
    client = connect(node)
    assert [client.request("GET", "/").status for _ in range(2)] == [302, 302]
    assert other.requests == []
    assert [of.headers["Cookie"] for of in node.requests] == [None, None]


def test_one_connection_serves_one_request_after_another(serve: Any, connect: Any) -> None:
    node = serve()
    client = connect(node)
    for _ in range(5):
        client.request("GET", "/")
    assert len({of.client_address for of in node.requests}) == 1


def test_a_node_that_is_down_is_passed_over_until_it_is_back(serve: Any, connect: Any) -> None:
    node = serve()
    port = free_port()
    client = connect(node, f"http://127.0.0.1:{port}")
    failures = 0
    for _ in range(8):
        try:
            client.request("GET", "/")
        except ArchiveUnavailable:
            failures += 1
    assert (failures, len(node.requests)) == (1, 7)
    with socket.create_server(("127.0.0.1", port)) as back:
        back.settimeout(0)
        deadline = time.monotonic() + 30
        with ThreadPoolExecutor(1) as pool:
            while True:
                assert time.monotonic() < deadline
                pool.submit(client.request, "GET", "/")
                try:
                    back.accept()[0].close()
                    break
                except BlockingIOError:
                    time.sleep(0.05)


def test_a_node_that_is_overloaded_or_broken_is_passed_over(serve: Any, connect: Any) -> None:
    for status in (429, 500, 503):

        def fail(request: Handler, status: int = status) -> None:
            request.reply(status=status)

        good, bad = serve(), serve(fail)
        client = connect(good, bad)
        statuses = [client.request("GET", "/").status for _ in range(6)]
        assert (statuses.count(status), len(bad.requests)) == (1, 1)


class TestRotation:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]

        def tick() -> float:
            now[0] += 0.001
            return now[0]

        monkeypatch.setattr(time, "monotonic", tick)
        return now

    def test_nodes_take_turns(self, clock: list[float]) -> None:
        nodes = NodeRotation(["a", "b", "c"])
        turns = [nodes.take_turn() for _ in range(6)]
        assert set(turns[:3]) == {"a", "b", "c"}
        assert turns[3:] == turns[:3]

    def test_pauses_grow_and_end(self, clock: list[float]) -> None:
        nodes = NodeRotation(["a", "b"])
        paused_s = []
        for _ in range(8):
            nodes.pause("a")
            began = clock[0]
            while nodes.take_turn() == "b":
                clock[0] += 0.1
            paused_s.append(int(clock[0] - began))
        assert paused_s == [1, 2, 4, 8, 16, 32, 60, 60]
        nodes.resume("a")
        nodes.pause("a")
        clock[0] += 1.1
        assert "a" in {nodes.take_turn(), nodes.take_turn()}

    def test_where_all_pause_the_first_to_be_back_is_tried(self, clock: list[float]) -> None:
        nodes = NodeRotation(["a", "b"])
        nodes.pause("a")
        nodes.pause("a")
        nodes.pause("b")
        assert nodes.take_turn() == "b"

    def test_one_node_is_always_tried(self, clock: list[float]) -> None:
        nodes = NodeRotation(["a", "a"])
        nodes.pause("a")
        assert nodes.take_turn() == "a"


def test_a_new_secret_applies_to_the_next_request_and_breaks_off_none(
    serve: Any, connect: Any, tmp_path: Path
) -> None:
    arrived, going_on = threading.Event(), threading.Event()

    def wait(request: Handler) -> None:
        if request.path == "/wait":
            arrived.set()
            assert going_on.wait(30)
        request.reply(request.headers["Authorization"].encode())

    path = tmp_path / "key"
    path.write_text("b2xk\n")
    path.chmod(0o600)
    client = connect(serve(wait), password_file=str(path))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.request, "GET", "/wait")
        assert arrived.wait(30)
        path.write_text("newer-one=\n")
        assert client.request("GET", "/").body == b"ApiKey newer-one="
        client.close()
        going_on.set()
        assert under_way.result(30).body == b"ApiKey b2xk"
    path.unlink()
    with pytest.raises(ArchiveUnavailable, match=r"cannot read .*: No such file"):
        client.request("GET", "/")


def test_certificates_are_read_again_and_names_are_compared(
    serve: Any, connect: Any, tmp_path: Path
) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.certificate("IP:127.0.0.1"))
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    node = serve(context=context)
    files = {name: tmp_path / name for name in ("ca_file", "certificate_file", "key_file")}

    def put(ca: Authority, certificate: tuple[str, str]) -> None:
        for path, source in zip(files.values(), (ca.file, *certificate), strict=True):
            path.write_text(Path(source).read_text())
            path.chmod(0o600)

    ours, theirs = authority.certificate("DNS:client"), stranger.certificate("DNS:client")
    tls = TlsSettings(**{name: str(path) for name, path in files.items()})
    put(stranger, ours)
    client = connect(node, tls=tls)
    with pytest.raises(ArchiveUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*set ca_file"):
        client.request("GET", "/")
    put(authority, theirs)
    with pytest.raises(ArchiveUnavailable, match="cannot reach"):
        client.request("GET", "/")
    assert node.requests == []
    put(authority, ours)
    assert client.request("GET", "/").status == 200
    put(authority, (ours[0], theirs[1]))
    with pytest.raises(ArchiveUnavailable, match="cannot load the certificate"):
        client.request("GET", "/")
    put(authority, ours)
    elsewhere = connect(node.url.replace("127.0.0.1", "localhost"), tls=tls)
    with pytest.raises(ArchiveUnavailable, match="mismatch"):
        elsewhere.request("GET", "/")


def test_tls_and_plain_ports_are_told_apart(serve: Any, connect: Any) -> None:
    with pytest.raises(ArchiveUnavailable, match="does not speak TLS on that port"):
        connect(serve().url.replace("http:", "https:")).request("GET", "/")
