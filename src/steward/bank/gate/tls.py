"""TLS connections between gates on different hosts, with certificates on both sides.

`TlsPeer` is a `GatePeer` over TLS; `listen_tls` makes the listening socket, and `make_tls_context`
the SSL context from [gate].
"""

import logging
import socket
import ssl

from steward.bank.errors import GateUnavailable
from steward.bank.gate.connections import CHUNK, GatePeer, split_address
from steward.bank.settings import GateSettings

log = logging.getLogger(__name__)


class TlsPeer(GatePeer):
    """One TLS connection to or from another gate."""

    socket: ssl.SSLSocket

    def _receive(self) -> bytes | None:
        """Read available bytes: b"" at the end, None if there are none yet."""
        try:
            return self.socket.recv(CHUNK)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            log.warning("the connection of another gate ended: %s", error)
            return b""

    def _send(self) -> int | None:
        """Send buffered bytes; return their number, None if the peer accepts none now."""
        try:
            return self.socket.send(self.out)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            log.warning("the connection of another gate ended: %s", error)
            self.is_ended = True
            return None


def listen_tls(address: str) -> socket.socket:
    """Listen on ``HOST:PORT`` for gates on other hosts.

    Raises:
        GateUnavailable: The socket cannot be made.
    """
    host, port = split_address(address)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, socket_type, _, _, socket_address = addresses[0]
        listener = socket.socket(family, socket_type)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(64)
    except OSError as error:
        raise GateUnavailable(f"cannot listen on {address}: {error.strerror}", address) from error
    listener.setblocking(False)
    return listener


def make_tls_context(settings: GateSettings, *, is_server: bool) -> ssl.SSLContext:
    """Make an SSL context that requires peers to have a certificate of the site's CA.

    Raises:
        GateUnavailable: A certificate or key cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate_file, settings.key_file or None)
        context.load_verify_locations(settings.ca_file)
    except OSError as error:
        raise GateUnavailable(
            f"the certificates of [gate] cannot be used: {error}", settings.certificate_file
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context
