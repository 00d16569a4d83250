"""A Steward that hears nodes, in threads of the test's process, and lines as a node writes them."""

import json
import ssl
import time
from pathlib import Path
from typing import Any

from harness.events import NOON_US
from harness.receiving import ReceivingSite, context_of, listener_keys
from servers.authority import Authority
from steward.agent import agent
from steward.capture.nodes.folding import KINDS
from steward.capture.nodes.heard import Heard
from steward.capture.nodes.receiving import NodeReceiver
from steward.capture.settings import NodesSettings
from steward.core.events import Event


def line(kind: str, /, job: int = 7, node: str = "n1", **more: Any) -> bytes:
    """A line of the SPANK plugin; of what runs in a step it names step 0."""
    of_step = {"s": "0", "l": NOON_US} if kind in ("start", "smgr", "task", "end") else {}
    of_user = {"u": 1000, "g": 1000} if kind in ("start", "prolog", "epilog") else {}
    facts: dict[str, Any] = {"v": 1, "k": kind, "t": NOON_US + 1_000_000, "j": job, "n": node}
    facts |= {**of_step, **of_user, **more}
    return json.dumps(facts, separators=(",", ":")).encode() + b"\n"


def task(number: int, /, **more: Any) -> bytes:
    """A task's line."""
    return line(
        "task", **{"id": number, "pid": 5000 + number, "st": 0, "ut": 1500, "sy": 500, **more}
    )


class HearingSite(ReceivingSite):
    """Hears nodes, which it knows by their certificates; ``nodes`` sets keys of [nodes]."""

    def __init__(self, directory: Path, authority: Authority, **nodes: Any) -> None:
        heard = NodesSettings(**listener_keys(authority), **nodes)
        super().__init__(directory, authority, nodes=heard)
        self.start(NodeReceiver(self.settings, lambda rows: self.link.ask("append", *rows)))

    def events(self) -> list[Event]:
        """What nodes have reported, in order."""
        return self.reader.read(0, set(KINDS), 100_000)[0]

    def heard(self) -> Heard:
        """What is known of nodes, once it is written down."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            heard = Heard(self.settings.state_dir)
            if heard.nodes():
                return heard
            heard.close()
            time.sleep(0.05)
        raise AssertionError("no node was heard")

    def words(self, spool: Path, node: str = "n1", *more: str, name: str = "") -> list[str]:
        """The agent's options on a node of this name, or with the certificate of another."""
        certificate, key = self.authority.certificate(f"DNS:{name or node}")
        return [
            *("--spool", str(spool), "--to", f"127.0.0.1:{self.port}", "--node", node, "--tls"),
            *("--ca", self.authority.file, "--certificate", certificate, "--key", key),
            *("--limit", "0", *more),
        ]

    def run_agent(self, spool: Path, *more: str, node: str = "n1", name: str = "") -> int:
        """Run an agent once; its exit code."""
        return agent.main(self.words(spool, node, *more, name=name))

    def connect(self, name: str = "n1") -> ssl.SSLSocket:
        """A connection of somebody who says what he likes."""
        return self.connect_as(context_of(self.authority, f"DNS:{name}"))
