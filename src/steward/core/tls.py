"""TLS contexts for servers and clients, and the names in a peer's certificate.

``ssl`` is imported only when a configuration uses TLS: it costs every process that loads it
5 MB.
"""

import socket
from typing import Any

from steward.core.errors import Unavailable

Context = Any
"""An ``ssl.SSLContext``; typed Any because this module does not import ``ssl`` at the top."""


class TlsUnavailable(Unavailable):
    """A certificate or key cannot be used now, perhaps because it is just being renewed."""


def make_server_context(certificate: str, key: str, client_ca: str) -> Context:
    """Make the TLS context of a server.

    Args:
        certificate: Path of our certificate, with its chain.
        key: Path of its key.
        client_ca: Path of the CA certificates that verify clients; "" requests no certificate.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificates(context, certificate, key, client_ca)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(certificate: str, key: str, ca: str) -> Context:
    """Make the TLS context of a client.

    Args:
        certificate: Path of our certificate; "" for none.
        key: Path of its key.
        ca: Path of the CA certificates that verify the server; "" for the system's.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not ca:
        context.load_default_certs()
    _load_certificates(context, certificate, key, ca)
    return context


def _load_certificates(context: Context, certificate: str, key: str, ca: str) -> None:
    """Load our certificate and the CA certificates into a context."""
    name = ""
    try:
        if certificate:
            name = certificate
            # Without a password OpenSSL would prompt on the terminal for an encrypted key's.
            context.load_cert_chain(certificate, key, password="")
        if ca:
            name = ca
            context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsUnavailable(f"{name} (or its key) cannot be used: {reason}", name) from error


def read_peer_names(connection: socket.socket) -> frozenset[str]:
    """Return the host names and addresses in the peer's certificate.

    Only subject alternative names count, as in RFC 9525. A wildcard is returned as it is written,
    so it matches no host.
    """
    certificate: dict[str, Any] = getattr(connection, "getpeercert", dict)() or {}
    return frozenset(
        str(value)
        for kind, value in certificate.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )
