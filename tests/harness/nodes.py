"""A Steward that hears nodes, in threads of the test's process, and lines as a node writes them."""

import json
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from harness.events import NOON_US
from servers.authority import Authority
from steward.agent import agent
from steward.capture.nodes.folding import KINDS
from steward.capture.nodes.heard import Heard
from steward.capture.nodes.receiving import NodeReceiver
from steward.capture.settings import NodesSettings
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.core.events import Event
from steward.core.incoming import stores_of
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.server import JournalServer
from steward.core.waiting import Stop
from steward.slurm.settings import ClusterSettings


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


class Hearing:
    """Journal and receiver of one Steward, which knows nodes by their certificates.

    Args:
        directory: Where all its files are.
        authority: Signs its certificate and those of the nodes.
        nodes: What differs from the usual [nodes].
    """

    def __init__(self, directory: Path, authority: Authority, **nodes: Any) -> None:
        self._authority = authority
        certificate, key = authority.certificate("IP:127.0.0.1", "DNS:localhost")
        self._state = directory / "state"
        self._state.mkdir()
        self.settings = Settings(
            state_dir=str(self._state),
            cluster={"c1": ClusterSettings(slurm=False)},
            archive=ArchiveSettings(sink={}),
            nodes=NodesSettings(
                listen="127.0.0.1:0",
                certificate_file=certificate,
                key_file=key,
                client_ca_file=authority.file,
                **nodes,
            ),
        )
        self.begin_journal()
        self.reader = JournalReader(str(self._state))
        self._halt = Stop()
        self._link = JournalLink(str(self._state), self._halt)
        receiver = NodeReceiver(self.settings, lambda rows: self._link.ask("append", *rows))
        self.port = receiver.address[1]
        self._receiver = threading.Thread(target=receiver.run, args=(self._halt, lambda: None))
        self._receiver.start()

    def begin_journal(self) -> None:
        """Start the journal's writer."""
        self._stop = Stop()
        server = JournalServer(str(self._state), JournalSettings(), stores_of(self.settings))
        self._journal = threading.Thread(target=server.run, args=(self._stop,))
        self._journal.start()

    def end_journal(self) -> None:
        """End it."""
        self._stop.set()
        self._journal.join(20)

    def close(self) -> None:
        """End both."""
        self._halt.set()
        self._receiver.join(20)
        assert not self._receiver.is_alive()
        self.end_journal()
        self._link.close()
        self.reader.close()

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
        certificate, key = self._authority.certificate(f"DNS:{name or node}")
        return [
            *("--spool", str(spool), "--to", f"127.0.0.1:{self.port}", "--node", node, "--tls"),
            *("--ca", self._authority.file, "--certificate", certificate, "--key", key),
            *("--limit", "0", *more),
        ]

    def run_agent(self, spool: Path, *more: str, node: str = "n1", name: str = "") -> int:
        """Run an agent once; its exit code."""
        return agent.main(self.words(spool, node, *more, name=name))

    def connect(self, name: str = "n1") -> ssl.SSLSocket:
        """A connection of somebody who says what he likes."""
        return self.connect_as(self.context(name))

    def context(self, name: str) -> ssl.SSLContext:
        """What makes connections with a certificate for this name."""
        context = ssl.create_default_context(cafile=self._authority.file)
        context.load_cert_chain(*self._authority.certificate(f"DNS:{name}"))
        return context

    def connect_as(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """A connection with a certificate that was made before."""
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")
