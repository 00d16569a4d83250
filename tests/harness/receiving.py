"""Sites that receive over TLS: from nodes, and from controllers."""

import socket
import ssl
import threading
from pathlib import Path
from typing import Any, Protocol

from harness.site import Site
from servers.authority import Authority
from steward.core.config import ArchiveSettings
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.server import JournalServer
from steward.core.waiting import Stop


class Receives(Protocol):
    """What listens, until it is stopped."""

    @property
    def address(self) -> tuple[str, int]: ...

    def run(self, stop: Stop, beat: Any) -> None: ...


def listener_keys(authority: Authority) -> dict[str, Any]:
    """The keys of a section that listens on a free port, with a certificate of the authority's."""
    certificate, key = authority.certificate("IP:127.0.0.1", "DNS:localhost")
    return {
        "listen": "127.0.0.1:0",
        "certificate_file": certificate,
        "key_file": key,
        "client_ca_file": authority.file,
    }


def context_of(authority: Authority, *names: str) -> ssl.SSLContext:
    """What makes connections with a certificate for these names."""
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(*authority.certificate(*names))
    return context


class ReceivingSite(Site):
    """Its journal's writer, and its receiver, are threads of the test's process.

    Args:
        directory: Where its files are.
        authority: Signs its certificate and those of whoever speaks to it.
        sections: As of a Site.
    """

    def __init__(self, directory: Path, authority: Authority, **sections: Any) -> None:
        super().__init__(directory, archive=ArchiveSettings(sink={}), **sections)
        self.authority = authority
        self.begin_journal()
        self.reader = JournalReader(self.settings.state_dir)
        self._halt = Stop()
        self.link = JournalLink(self.settings.state_dir, self._halt)

    def start(self, receiver: Receives) -> None:
        """Start what receives."""
        self.port = receiver.address[1]
        self._receiver = threading.Thread(target=receiver.run, args=(self._halt, lambda: None))
        self._receiver.start()

    def begin_journal(self) -> None:
        """Start the journal's writer."""
        self._stop = Stop()
        server = JournalServer(self.settings.state_dir, self.settings.journal, self.stores)
        self._writer = threading.Thread(target=server.run, args=(self._stop,))
        self._writer.start()

    def end_journal(self) -> None:
        """End it."""
        self._stop.set()
        self._writer.join(20)
        assert not self._writer.is_alive()

    def connect_as(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """A connection of somebody who says what he likes."""
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def close(self) -> None:
        """End both."""
        self._halt.set()
        self._receiver.join(20)
        assert not self._receiver.is_alive()
        self.end_journal()
        self.link.close()
        self.reader.close()
        super().close()
