"""TLS between hosts of a site: contexts, and the names that a certificate holds.

``ssl`` is imported only where a configuration asks for it: it costs every
process that loads it 5 MB.
"""

import socket
from typing import Any

from steward.core.errors import Unavailable

Context = Any
"""An ``ssl.SSLContext``, whose module is not loaded here."""


class TlsUnavailable(Unavailable):
    """A certificate or a key cannot be used now: it may be renewed at this moment."""


def server_context(certificate: str, key: str, client_ca: str) -> Context:
    """Make the context of what serves.

    Args:
        certificate: Path of our certificate, with what signed it.
        key: Path of its key.
        client_ca: Path of certificates that the clients' are checked against; "" asks for none.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, certificate, key, client_ca)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(certificate: str, key: str, ca: str) -> Context:
    """Make the context of what connects.

    Args:
        certificate: Path of our certificate; "" for none.
        key: Path of its key.
        ca: Path of certificates that the server's is checked against; "" for the system's.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not ca:
        context.load_default_certs()
    _load(context, certificate, key, ca)
    return context


def _load(context: Context, certificate: str, key: str, authority: str) -> None:
    name = ""
    try:
        if certificate:
            name = certificate
            # Without a password OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(certificate, key, password="")
        if authority:
            name = authority
            context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsUnavailable(f"{name} (or its key) cannot be used: {reason}", name) from error


def names_of(connection: socket.socket) -> frozenset[str]:
    """The host names and addresses that the other end's certificate is for.

    Of it only the subject's alternative names count, as in RFC 9525; a wildcard
    stands for nobody.
    """
    certificate: dict[str, Any] = getattr(connection, "getpeercert", dict)() or {}
    return frozenset(
        str(value)
        for kind, value in certificate.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )
