"""Receiving Sites: they accept TLS connections of nodes or controllers, in threads."""

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
from steward.core.section import TlsSettings
from steward.core.waits import Stop


class Receives(Protocol):
    """A receiver that listens until it is stopped."""

    @property
    def address(self) -> tuple[str, int]: ...

    def run(self, stop: Stop, beat: Any) -> None: ...


def listener_keys(authority: Authority) -> dict[str, Any]:
    """Return the keys of a section that listens with TLS on any unused port."""
    certificate, key = authority.certificate("IP:127.0.0.1", "DNS:localhost")
    tls = TlsSettings(certificate_file=certificate, key_file=key, client_ca_file=authority.file)
    return {"listen": "127.0.0.1:0", "tls": tls}


def context_of(authority: Authority, *names: str) -> ssl.SSLContext:
    """Return a TLS context with a client certificate for these names."""
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(*authority.certificate(*names))
    return context


class ReceivingSite(Site):
    """A Site whose journal and receiver are threads of the test's process.

    Args:
        directory: Directory of the Site's files.
        authority: Signs the certificates of the Site and of its clients.
        sections: Other sections of the settings, as for Site.
    """

    def __init__(self, directory: Path, authority: Authority, **sections: Any) -> None:
        super().__init__(directory, archive=ArchiveSettings(sink={}), **sections)
        self.authority = authority
        self.begin_journal()
        self.reader = JournalReader(self.settings.state_dir)
        self._halt = Stop()
        self.link = JournalLink(self.settings.state_dir, self._halt)

    def start(self, receiver: Receives) -> None:
        """Start the receiver."""
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
        """End the journal's writer."""
        self._stop.set()
        self._writer.join(20)
        assert not self._writer.is_alive()

    def connect_as(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Open a raw TLS connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def close(self) -> None:
        """End the receiver and the journal's writer."""
        self._halt.set()
        self._receiver.join(20)
        assert not self._receiver.is_alive()
        self.end_journal()
        self.link.close()
        self.reader.close()
        super().close()
