"""``steward agent`` as a program: the lines that it sends, and their effects."""

import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from controllers import Munged
from spool_daemon import settings_in

from servers.http_server import Quiet
from steward.agent import agent
from steward.capture.nodes.aggregation import NODE_KINDS
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.events import TASK_EXIT, Event
from steward.core.journal import JournalReader
from steward.slurm.settings import ClusterSettings

AGENT = [os.environ.get("STEWARD_AGENT_PYTHON", sys.executable), "-I", str(agent.__file__)]
NODE = "localhost"
"""Name of a node: without Slurm, its address is looked up under this name."""


def lines(numbers: range, node: str = NODE) -> bytes:
    """Return the lines of steps with a thousand tasks each."""
    now = int(time.time() * 1e6)
    return b"".join(
        b'{"v":1,"k":"task","t":%d,"j":%d,"n":"%s","s":"%d","l":%d,"id":%d,"pid":%d,'
        b'"st":0,"ut":1000,"sy":1000,"rss":5000000,"minf":100,"vsw":10}\n'
        % (now, 7, node.encode(), n // 1000, 1_772_366_400_000_000, n % 1000, n + 1)
        for n in numbers
    )


def put(spool: Path, data: bytes, node: str = NODE) -> None:
    spool.mkdir(exist_ok=True)
    with (spool / f"{node}.log").open("ab") as file:
        file.write(data)


def run_agent(
    spool: Path, port: int, socket: str, *more: str
) -> "subprocess.CompletedProcess[str]":
    words = [*AGENT, "--spool", str(spool), "--to", f"127.0.0.1:{port}", "--munge-socket", socket]
    return subprocess.run(
        [*words, "--limit", "0", *more], capture_output=True, text=True, timeout=300, check=False
    )


class Hearer(Quiet, BaseHTTPRequestHandler):
    """Scripted receiver in Steward's place; the test sets its reply to a batch."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Receive a batch."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = agent.digest_of(self.headers["Steward-Batch"].encode(), body)
        self.answer(digest, f"durable {digest}\n".encode())

    def answer(self, digest: str, durable: bytes) -> None:
        """Answer a batch.

        Args:
            digest: Digest of the batch.
            durable: Text that says that the batch is durable.
        """
        raise NotImplementedError

    def say(self, status: int, said: bytes, credential: str, retry_after_s: int = 0) -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Steward-Credential", credential)
        self.send_header("Content-Length", str(len(said)))
        if retry_after_s:
            self.send_header("Retry-After", str(retry_after_s))
        self.end_headers()
        self.wfile.write(said)


def hearing(directory: Path, port: int, munged: Munged, **more: Any) -> Settings:
    of = ClusterSettings(slurm=False, spool=str(directory / "spool"), munge_socket=munged.socket)
    nodes = NodesSettings(listen=f"127.0.0.1:{port}", **more)
    return settings_in(directory, cluster={"c1": of}, nodes=nodes)


def events_of(settings: Settings) -> list[Event]:
    reader = JournalReader(settings.state_dir)
    found: list[Event] = []
    try:
        while True:
            some, _ = reader.read(found[-1].id if found else 0, set(NODE_KINDS), 1000)
            if not some:
                return found
            found += some
    finally:
        reader.close()


def tasks_of(settings: Settings) -> list[int]:
    """Return the numbers of all reported tasks, duplicates included."""
    return [
        int(event.body.step) * 1000 + task.task
        for event in events_of(settings)
        if event.kind == TASK_EXIT
        for task in event.body.tasks
    ]
