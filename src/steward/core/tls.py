"""TLS between a controller and its receiver: contexts, and the names that a certificate holds.

``ssl`` is imported only where a configuration asks for it: it costs every
process that loads it 5 MB.
"""

import socket
from typing import Any

from steward.capture.settings import NodesSettings
from steward.core.errors import Unavailable
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings

Context = Any
"""An ``ssl.SSLContext``, whose module is not loaded here."""


class TlsUnavailable(Unavailable):
    """A certificate or a key cannot be used now: it may be renewed at this moment."""


def server_context(settings: ReceiveSettings | NodesSettings) -> Context:
    """What the receiver speaks.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, settings.certificate_file, settings.key_file, settings.client_ca_file)
    if settings.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(settings: ForwardSettings) -> Context:
    """What the controller speaks.

    Raises:
        TlsUnavailable: A file cannot be read, or is not what it should be.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not settings.ca_file:
        context.load_default_certs()
    _load(context, settings.certificate_file, settings.key_file, settings.ca_file)
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
