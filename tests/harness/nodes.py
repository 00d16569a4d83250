"""Compute nodes: a Site that receives their batches, and lines of the SPANK plugin."""

import json
import ssl
import time
from pathlib import Path
from typing import Any

from harness.events import NOON_US
from harness.receivers import ReceivingSite, context_of, listener_keys
from servers.authority import Authority
from steward.agent import agent
from steward.capture.nodes.aggregation import NODE_KINDS
from steward.capture.nodes.node_reports import NodeReportsReader
from steward.capture.nodes.receiver import MAX_BATCHES, NodeReceiver
from steward.capture.settings import NodesSettings
from steward.core.events import Event


def line(kind: str, /, job: int = 7, node: str = "n1", **more: Any) -> bytes:
    """Return a line of the SPANK plugin; lines about a step name step 0."""
    of_step = {"s": "0", "l": NOON_US} if kind in ("start", "smgr", "task", "end") else {}
    of_user = {"u": 1000, "g": 1000} if kind in ("start", "prolog", "epilog") else {}
    facts: dict[str, Any] = {"v": 1, "k": kind, "t": NOON_US + 1_000_000, "j": job, "n": node}
    facts |= {**of_step, **of_user, **more}
    return json.dumps(facts, separators=(",", ":")).encode() + b"\n"


def task(number: int, /, **more: Any) -> bytes:
    """Return the line of a task."""
    return line(
        "task", **{"id": number, "pid": 5000 + number, "st": 0, "ut": 1500, "sy": 500, **more}
    )


class HearingSite(ReceivingSite):
    """A Site that receives from nodes with certificates."""

    def __init__(
        self, directory: Path, authority: Authority, max_batches: int = MAX_BATCHES
    ) -> None:
        settings = NodesSettings(**listener_keys(authority))
        super().__init__(directory, authority, nodes=settings)
        self.start(NodeReceiver(self.settings, self.link.append_once, max_batches))

    def events(self) -> list[Event]:
        """Return the events that nodes reported, in order."""
        return self.reader.read(0, set(NODE_KINDS), 100_000)[0]

    def heard(self) -> NodeReportsReader:
        """Wait until nodes.db contains a node, and open it."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            heard = NodeReportsReader(self.settings.state_dir)
            if heard.read_reports():
                return heard
            heard.close()
            time.sleep(0.05)
        raise AssertionError("no node was heard")

    def words(self, spool: Path, node: str = "n1", *more: str, name: str = "") -> list[str]:
        """Return the agent's options on a node; ``name`` is the certificate's name, if another."""
        certificate, key = self.authority.certificate(f"DNS:{name or node}")
        return [
            *("--spool", str(spool), "--to", f"127.0.0.1:{self.port}", "--node", node, "--tls"),
            *("--ca", self.authority.file, "--certificate", certificate, "--key", key),
            *("--limit", "0", *more),
        ]

    def run_agent(self, spool: Path, *more: str, node: str = "n1", name: str = "") -> int:
        """Run an agent once; return its exit code."""
        return agent.main(self.words(spool, node, *more, name=name))

    def connect(self, name: str = "n1") -> ssl.SSLSocket:
        """Open a raw TLS connection with a node's certificate."""
        return self.connect_as(context_of(self.authority, f"DNS:{name}"))
