"""Controllers that report to a Steward, and the munged of each cluster."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self

import httpx
import msgspec
import pytest
from job_submission import PATIENCE, wait_until
from spool_daemon import Daemon, ask

from servers.http_server import Quiet, answering
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.extensions.controllers import wire
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.slurm.settings import ClusterSettings


class Munged:
    """munged with the test's key.

    Args:
        directory: Directory of its socket and its key; created if missing.
        origin: Address that its credentials carry.
        key: The key; a new one if empty.
    """

    def __init__(self, directory: Path, origin: str = "127.0.0.1", key: bytes = b"") -> None:
        directory.mkdir(mode=0o711)
        self.socket = str(directory / "socket")
        self.key = key or os.urandom(128)
        key_file = directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(self.key)
        files = {
            "key-file": key_file,
            "socket": self.socket,
            "log-file": directory / "log",
            "pid-file": directory / "pid",
            "seed-file": directory / "seed",
        }
        options = [f"--{name}={value}" for name, value in files.items()]
        self._command = ["munged", "--foreground", "--force", f"--origin={origin}", *options]
        self._out = directory / "out"
        self.start()

    def start(self) -> None:
        """Start munged, also after a close; it has no memory of earlier credentials."""
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
            )
        try:
            wait_until(lambda: os.path.exists(self.socket), 20.0)
        except AssertionError:
            self.close()
            raise AssertionError(self._out.read_text()) from None

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(PATIENCE * 20)


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body of an answer."""


class Relay:
    """Proxy that passes a controller's requests on to the receiver, with scripted answers.

    Args:
        port: Port of the receiver.
    """

    def __init__(self, port: int) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.alter: Callable[[Answer], Answer] = lambda answer: answer
        self.host = ""
        """Host that it names to the receiver in place of its own; its own if empty."""
        self._url = f"http://127.0.0.1:{port}"
        self._stack = ExitStack()
        server = self._stack.enter_context(answering(self._make_handler()))
        self.port: int = server.server_address[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def post(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Send a request to the receiver and return its answer."""
        response = httpx.post(
            self._url + path, headers=headers, content=body, trust_env=False, timeout=60.0
        )
        return response.status_code, dict(response.headers), response.content

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        relay = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): text for name, text in self.headers.items()}
                relay.requests.append((self.path, headers, body))
                if relay.host:
                    headers = {**headers, "host": relay.host}
                answer = relay.post(self.path, headers, body)
                if self.path == wire.EVENTS:
                    answer = relay.alter(answer)
                self.send_response(answer[0])
                for name, text in answer[1].items():
                    if name not in ("content-length", "connection"):
                        self.send_header(name, text)
                self.send_header("content-length", str(len(answer[2])))
                self.end_headers()
                self.wfile.write(answer[2])

        return Handler


MakeMunged = Callable[..., Munged]


@pytest.fixture
def make_munged(tmp_path: Path) -> Iterator[MakeMunged]:
    """Return a function that creates munged processes; end them after the test."""
    made: list[Munged] = []

    def make(origin: str = "127.0.0.1", key: bytes = b"") -> Munged:
        made.append(Munged(tmp_path / f"munged{len(made)}", origin, key))
        return made[-1]

    yield make
    for munged in made:
        munged.close()


class Controller(Daemon):
    """``steward controller``, as a slurmctld host runs it."""

    command = "controller"

    def is_forwarded(self, cluster: str = "c1") -> bool:
        """Return whether the receiver has stored all captured events."""
        head = ask(self.settings, "journal.db", "SELECT ifnull(max(id), 0) FROM event")
        ((position,),) = ask(self.settings, f"forward-{cluster}.db", "SELECT position FROM cursor")
        state, _ = self.status(f"forward.{cluster}")
        return bool(position >= head[0][0] and state == "running")


def serve_settings(
    directory: Path,
    port: int,
    clusters: dict[str, ClusterSettings],
    receive: ReceiveSettings | None = None,
) -> Settings:
    """Return the settings of the receiving Steward."""
    directory.mkdir(exist_ok=True)
    # Without Slurm no source reports owners: do not wait for them.
    files = FilesSinkSettings(path=str(directory / "archive"))
    receive = receive or ReceiveSettings()
    return Settings(
        state_dir=str(directory / "state"),
        run_dir=str(directory),
        cluster={
            name: msgspec.structs.replace(of, remote=True, slurm=False)
            for name, of in clusters.items()
        },
        archive=ArchiveSettings(sink={"files": files}),
        journal=JournalSettings(keep_s=2.0),
        tls={"receive": receive.tls} if receive.tls else {},
        receive=msgspec.structs.replace(receive, listen=f"127.0.0.1:{port}"),
    )


def controller_settings(
    directory: Path,
    port: int,
    spool: Path,
    munge_socket: str = "",
    *,
    cluster: str = "c1",
    forward: ForwardSettings | None = None,
) -> Settings:
    """Return settings of a controller that watches a spool."""
    directory.mkdir(exist_ok=True)
    spool.mkdir(exist_ok=True)
    forward = forward or ForwardSettings()
    return Settings(
        state_dir=str(directory / "state"),
        run_dir=str(directory),
        cluster={
            cluster: ClusterSettings(slurm=False, spool=str(spool), munge_socket=munge_socket)
        },
        journal=JournalSettings(keep_s=2.0),
        tls={"forward": forward.tls} if forward.tls else {},
        forward=msgspec.structs.replace(forward, to=f"127.0.0.1:{port}"),
    )


def said(daemon: Daemon, what: str, timeout_s: float = 30.0) -> None:
    """Wait until a daemon has logged a text."""
    daemon.wait(lambda: what in daemon.log(), timeout_s)
