"""``steward listen`` as an unprivileged user: agents see no difference, it forges no node."""

import contextlib
import http.client
import json
import os
import pwd
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import pytest
from agents import NODE, events_of, hearing, lines, put, run_agent, tasks_of
from controllers import MakeMunged, Munged, make_munged
from job_submission import PATIENCE, wait_until
from spool_daemon import Daemon
from test_agent_trust import post

from servers.server import free_port
from steward.agent import agent
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.munge import Munge

__all__ = ["make_munged"]

USER = "daemon"
MOST_BODY = (1 << 20) + (64 << 10)
ENCODE: Final = """
import os, pwd, sys
from steward.core.munge import Munge
from steward.core.config.reader import LoadedConfig, render_config
os.setuid(pwd.getpwnam(sys.argv[2]).pw_uid)
print(Munge(sys.argv[1]).encode(sys.argv[3].encode()).decode())
"""
RUN: Final = """
import os, pwd, sys
from steward.capture.nodes.listener import run_listener
from steward.core.logs import configure_logging
configure_logging("info", "run_listener")
# Only now, since other users may not read where this Python is.
who = pwd.getpwnam(sys.argv[2])
os.setgroups([])
os.setgid(who.pw_gid)
os.setuid(who.pw_uid)
run_listener(sys.argv[1])
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the listener has another uid")


@pytest.fixture
def site(tmp_path: Path) -> Iterator["ListenerSite"]:
    # Not pytest's own directory, which is closed to other users.
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        os.chmod(path, 0o755)
        # Everybody may ask munged.
        with contextlib.closing(Munged(Path(path) / "munged", "127.0.0.1", b"")) as munged:
            yield ListenerSite(tmp_path, Path(path), munged)


class ListenerSite:
    """Daemon that receives from a listener."""

    def __init__(self, directory: Path, run: Path, munged: Munged) -> None:
        self.munged = munged
        self.port = free_port()
        settings = hearing(directory, self.port, munged, listener=USER)
        self.settings = msgspec.structs.replace(settings, run_dir=str(run))
        self.socket = str(run / "nodes.sock")
        self.daemon = Daemon(self.settings, directory)
        self.log = directory / "listener.log"

    @contextlib.contextmanager
    def listener(self, user: str = USER) -> Iterator["subprocess.Popen[bytes]"]:
        """Start ``steward listen``."""
        words = [sys.executable, "-c", RUN, self.socket, user]
        with (
            self.log.open("ab") as log,
            subprocess.Popen(words, stderr=log, cwd="/") as process,
        ):
            try:
                yield process
            finally:
                process.terminate()
                process.wait(PATIENCE * 10)

    def move(self, port: int) -> None:
        """Restart the daemon with another port in [nodes]."""
        self.port = port
        nodes = msgspec.structs.replace(self.settings.nodes, listen=f"127.0.0.1:{port}")
        self.settings = msgspec.structs.replace(self.settings, nodes=nodes)
        self.daemon.stop()
        self.daemon.settings = self.settings
        (self.log.parent / "steward.toml").write_text(render_config(LoadedConfig(self.settings)))
        self.daemon.start()

    def wait_for(self, what: str) -> None:
        """Wait until the listener has logged a text."""
        wait_until(lambda: what in self.log.read_text(), 60)


def test_agents_notice_nothing_of_it(site: ListenerSite, tmp_path: Path) -> None:
    put(tmp_path / "lines", lines(range(10)))
    with site.listener() as process:
        site.wait_for("waiting for the daemon")
        with site.daemon:
            site.wait_for("listening for nodes")
            assert os.stat(f"/proc/{process.pid}").st_uid == pwd.getpwnam(USER).pw_uid
            assert run_agent(tmp_path / "lines", site.port, site.munged.socket).returncode == 0
            assert len(tasks_of(site.settings)) == 10
            # The daemon restarts, the listener continues.
            site.daemon.stop()
            site.daemon.start()
            put(tmp_path / "lines", lines(range(10, 20)))

            def is_sent() -> bool:
                where = (tmp_path / "lines", site.port, site.munged.socket)
                return run_agent(*where).returncode == 0

            wait_until(is_sent, 60)
        assert len(tasks_of(site.settings)) == 20
        put(tmp_path / "lines", lines(range(20, 30)))
        done = run_agent(tmp_path / "lines", site.port, site.munged.socket)
        assert done.returncode == 1
        assert "the daemon is away" in done.stderr


def test_who_may_not_report(site: ListenerSite, tmp_path: Path, make_munged: MakeMunged) -> None:
    elsewhere = make_munged("127.0.0.9", site.munged.key)
    strange = make_munged()
    put(tmp_path / "lines", lines(range(10)))
    body = lines(range(10), "127.0.0.9")
    with site.daemon, site.listener():
        site.wait_for("listening for nodes")
        for munged, what in (
            (elsewhere, "was made on 127.0.0.9, but node localhost is at 127.0.0.1"),
            (strange, "was made with another key"),
        ):
            done = run_agent(tmp_path / "lines", site.port, munged.socket)
            assert (done.returncode, what in done.stderr) == (1, True), done.stderr
        status, words = post(site.port, elsewhere, "127.0.0.9", body)
        assert (status, b"the connection comes from 127.0.0.1" in words) == (403, True)
        assert events_of(site.settings) == []
        assert post(site.port, elsewhere, "127.0.0.9", body, source="127.0.0.9")[0] == 200


class Taken:
    """Compromised listener, which sends the daemon arbitrary messages."""

    def __init__(self, path: str) -> None:
        self._daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._daemon.settimeout(PATIENCE * 10)
        self._daemon.connect(path)
        self._replies = self._daemon.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._replies.close()
        self._daemon.close()

    def pass_on(self, *fds: int, first: bytes = b"c") -> None:
        """Send descriptors."""
        socket.send_fds(self._daemon, [first], list(fds))

    def say(self, body: bytes = b"", *, credential: bytes = b"", **head: Any) -> None:
        """Send the head of a batch, with these fields."""
        batch = json.dumps({"v": 1, "node": NODE, "sequence": 1, "place": "a"})
        lines = [f"POST {head.get('path', agent.PATH)} HTTP/1.1", "Host: x"]
        lines += [f"Content-Length: {head.get('length', len(body))}", "Expect: 100-continue"]
        lines += [f"Steward-Batch: {batch}", f"Steward-Credential: {credential.decode()}", "", ""]
        self.send("\r\n".join(lines).encode())

    def send(self, data: bytes) -> None:
        """Send arbitrary bytes."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._daemon.sendall(data)

    def hear(self) -> tuple[int, bytes]:
        """Return the daemon's reply: status and text; 100 to continue, -1 after its end."""
        with contextlib.suppress(ConnectionResetError):
            status = self._replies.readline()
            headers = http.client.parse_headers(self._replies)
            if status:
                return int(status.split()[1]), self._replies.read(
                    int(headers.get("Content-Length", 0))
                )
        return -1, b""


def test_a_listener_that_was_taken_over_speaks_for_no_node(
    site: ListenerSite, tmp_path: Path, make_munged: MakeMunged
) -> None:
    elsewhere = make_munged("127.0.0.9", site.munged.key)
    body = lines(range(10))
    batch = json.dumps({"v": 1, "node": NODE, "sequence": 1, "place": "a"})
    claim = agent.claim_of(NODE, "", 1, agent.digest_of(batch.encode(), body))
    with (
        site.daemon,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as node,
    ):
        wait_until(lambda: os.path.exists(site.socket), 60)

        def told(credential: bytes, *fds: int, **head: Any) -> tuple[int, bytes]:
            with Taken(site.socket) as taken:
                taken.pass_on(*(fds or (node.fileno(),)))
                taken.say(body, credential=credential, **head)
                status, words = taken.hear()
                if status == 100:
                    taken.send(body)
                    status, words = taken.hear()
                return status, words

        # A credential of this uid, of another host, none, and of another batch.
        own = Munge(site.munged.socket).encode(claim)
        other = agent.claim_of(NODE, "", 2, agent.digest_of(batch.encode(), body))
        encode = [sys.executable, "-c", ENCODE, site.munged.socket, USER, claim.decode()]
        user = subprocess.run(encode, capture_output=True, check=True, timeout=60)
        uid = pwd.getpwnam(USER).pw_uid
        for credential, why in (
            (user.stdout.strip(), f"of uid {uid}, not of root or SlurmdUser"),
            (Munge(elsewhere.socket).encode(claim), "was made on 127.0.0.9"),
            (b"", "missing MUNGE credential"),
            (Munge(site.munged.socket).encode(other), "is for another batch"),
        ):
            status, said_of_it = told(credential)
            assert (status, why in said_of_it.decode()) == (403, True), said_of_it
        # A node's batch is valid once, and from the node's address.
        with socket.create_server(("127.0.0.1", 0)) as far, socket.socket() as strange:
            strange.bind(("127.0.0.8", 0))
            strange.connect(far.getsockname()[:2])
            accepted, _ = far.accept()
            with accepted:
                status, words = told(Munge(site.munged.socket).encode(claim), accepted.fileno())
                assert (status, b"the connection comes from 127.0.0.8" in words) == (403, True)
        assert events_of(site.settings) == []
        assert told(own)[0] == 200
        status, words = told(own)
        assert (status, b"was used before" in words) == (403, True), words
        assert len(tasks_of(site.settings)) == 10


def test_what_is_no_request_ends_that_connection_alone(site: ListenerSite, tmp_path: Path) -> None:
    put(tmp_path / "lines", lines(range(10)))
    with (
        site.daemon,
        site.listener(),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as node,
        contextlib.ExitStack() as held,
    ):
        site.wait_for("listening for nodes")
        reading, writing = os.pipe()
        held.callback(os.close, reading)
        held.callback(os.close, writing)
        one, two = socket.socketpair()
        held.callback(one.close)
        held.callback(two.close)
        for fds, first in (
            ((), b"c"),
            ((node.fileno(),), b"x"),
            ((reading,), b"c"),
            ((one.fileno(),), b"c"),
            ((server.fileno(),), b"c"),
        ):
            with Taken(site.socket) as taken:
                taken.pass_on(*fds, first=first)
                taken.say()
                assert taken.hear()[0] == -1
        heads: list[tuple[dict[str, Any], int]] = [
            ({"length": MOST_BODY + 1}, 413),
            ({"length": -1}, 400),
            ({"length": "x"}, 400),
            ({"path": "/etc"}, 404),
        ]
        for head, status in heads:
            with Taken(site.socket) as taken:
                taken.pass_on(node.fileno())
                taken.say(**head)
                assert taken.hear()[0] == status
        for data in (b"\xff" * 4 + b"\r\n\r\n", b"x" * (17 << 10), b"\0\0\0\0\r\n\r\n"):
            with Taken(site.socket) as taken:
                taken.pass_on(node.fileno())
                taken.send(data)
                assert taken.hear()[0] in (400, 431)
        # Half a request is waited for beside the others.
        for data in (b"", b"PO", b"POST / HTTP/1.1\r\nX"):
            half = held.enter_context(Taken(site.socket))
            half.pass_on(node.fileno())
            half.send(data)
        assert run_agent(tmp_path / "lines", site.port, site.munged.socket).returncode == 0
    assert len(tasks_of(site.settings)) == 10


def test_it_listens_where_the_daemon_says_now(site: ListenerSite, tmp_path: Path) -> None:
    put(tmp_path / "lines", lines(range(10)))
    with site.daemon, site.listener():
        site.wait_for(f"listening for nodes at 127.0.0.1 port {site.port}")
        site.move(free_port())
        site.wait_for(f"listening for nodes at 127.0.0.1 port {site.port}")
        assert run_agent(tmp_path / "lines", site.port, site.munged.socket).returncode == 0
    assert len(tasks_of(site.settings)) == 10


def test_nobody_else_may_listen(site: ListenerSite) -> None:
    with site.daemon:
        wait_until(lambda: os.path.exists(site.socket), 60)
        with site.listener("nobody"):
            site.wait_for("Permission denied")
