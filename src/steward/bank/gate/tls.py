"""TLS connections between gates on different hosts, with certificates on both sides.

`TlsPeer` is a `GatePeer` over TLS; `listen_tls` makes the listening socket.
"""

import logging
import socket
import ssl

from steward.bank.errors import GateUnavailable
from steward.bank.gate.connections import CHUNK, GatePeer, split_address

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
