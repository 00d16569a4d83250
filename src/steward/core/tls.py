"""TLS contexts from the tables [tls.NAME], and the names in a peer's certificate.

Every server and client of Steward takes its context from here, so that all have the same minimum
version and ciphers: TLS 1.2 and Python's default ones. The agent, which is one file, makes its own.

``ssl`` is imported only when a configuration uses TLS: it costs every process that loads it
5 MB.
"""

from typing import Any

from steward.core.errors import Unavailable
from steward.core.section import TlsSettings

Context = Any
"""An ``ssl.SSLContext``; typed Any because this module does not import ``ssl`` at the top."""


class TlsUnavailable(Unavailable):
    """A certificate or key cannot be used now, perhaps because it is just being renewed."""


def make_server_context(tls: TlsSettings) -> Context:
    """Make the TLS context of a server.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificates(context, tls, tls.client_ca_file)
    if tls.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(tls: TlsSettings) -> Context:
    """Make the TLS context of a client.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not tls.ca_file:
        context.load_default_certs()
    _load_certificates(context, tls, tls.ca_file)
    return context


def _load_certificates(context: Context, tls: TlsSettings, ca_file: str) -> None:
    """Load our certificate and the CA certificates into a context."""
    name = ""
    try:
        if tls.certificate_file:
            name = tls.certificate_file
            # Without a password OpenSSL would prompt on the terminal for an encrypted key's.
            context.load_cert_chain(tls.certificate_file, tls.key_file, password="")
        if ca_file:
            name = ca_file
            context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsUnavailable(
            f"cannot load the certificate {name} with its key ({reason}): give PEM files that "
            "Steward's user may read, the key without a password",
            name,
        ) from error


def read_peer_names(connection: Any) -> frozenset[str]:
    """Return the host names and addresses in the certificate of a TLS connection's peer.

    Only subject alternative names count, as in RFC 9525. A wildcard is returned as it is written,
    so it matches no host.
    """
    certificate: dict[str, Any] = getattr(connection, "getpeercert", dict)() or {}
    return frozenset(
        str(value)
        for kind, value in certificate.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )
