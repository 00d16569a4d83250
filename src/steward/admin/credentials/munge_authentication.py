"""MUNGE authentication of the web API: verify a client's credential, and give a ticket for it.

``verify_munge_request`` verifies the MUNGE credential of an HTTP request and returns its user;
``make_ticket`` then makes a ticket, which stands for that user for one minute. No file stores it:
it has the user, signed with a key that the daemon's processes inherit and that ends with them.
"""

import hashlib
import hmac
import logging
import os
import pwd
import secrets
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from steward.admin.credentials.errors import MungeUserRejected
from steward.admin.credentials.requests import TicketRequest
from steward.core.errors import PermissionRefused, UnknownCredential
from steward.core.listeners import is_ipv6, is_within
from steward.core.munge import (
    Munge,
    MungeClaim,
    MungeUnavailable,
    build_statement_from_digest,
    describe_difference,
)
from steward.core.timestamps import to_micros
from steward.web.settings import WebSettings

log = logging.getLogger(__name__)

TICKET_PREFIX: Final = "stm_"
"""Prefix of tickets."""
TICKET_LIFE: Final = timedelta(minutes=1)
"""Validity of a ticket."""
_KEY: Final = secrets.token_bytes(32)


def make_ticket(uid: int, user: str, now: datetime) -> str:
    """Make a ticket for a user."""
    payload = f"{uid}:{to_micros(now + TICKET_LIFE)}:{user}"
    return f"{TICKET_PREFIX}{_sign(payload)}:{payload}"


def verify_ticket(ticket: str, now: datetime) -> tuple[int, str]:
    """Return the uid and name in a ticket.

    Raises:
        UnknownCredential: The running daemon did not make it, or its minute is over.
    """
    signature, _, payload = ticket.removeprefix(TICKET_PREFIX).partition(":")
    if not hmac.compare_digest(signature.encode(), _sign(payload).encode()):
        raise UnknownCredential(
            "this ticket was not made by the running daemon: authenticate again"
        )
    uid, expires_us, user = payload.split(":", 2)
    if to_micros(now) >= int(expires_us):
        raise UnknownCredential("this ticket has expired after a minute: authenticate again")
    return int(uid), user


def _sign(payload: str) -> str:
    return hmac.new(_KEY, payload.encode(), hashlib.sha256).hexdigest()


def verify_munge_request(web_settings: WebSettings, request: TicketRequest) -> tuple[int, str]:
    """Verify the MUNGE credential of an HTTP request; return uid and name of its maker.

    Args:
        web_settings: Section [web].
        request: The credential, and that request.

    Raises:
        MungeUserRejected: Its maker did not make that request, has no name here, is root or
            Steward's own user, or made it on a host outside ``munge_from``.
        UnknownCredential: It is invalid, or MUNGE is not accepted here or from that address.
        UsageError: The values do not describe an HTTP request.
        MungeUnavailable: munged does not answer.
    """
    if not web_settings.munge_from:
        raise UnknownCredential(
            "MUNGE authentication is disabled ('munge_from' of [web]): use a token"
        )
    # Not the host name that the client used: a server that relays the request may have named it.
    server_address = urlsplit(web_settings.url).netloc or web_settings.listen
    statement = build_statement_from_digest(
        request.method, request.target, request.digest, server_address
    )
    # Behind a proxy the peer is the proxy.
    if request.peer not in web_settings.trusted_proxies:
        if is_ipv6(request.peer):
            raise UnknownCredential(
                f"MUNGE authentication over IPv6 from {request.peer} is not possible: "
                "credentials name IPv4 addresses only. Use a token",
                request.peer,
            )
        _require_network(web_settings, request.peer)
    try:
        claim = Munge(web_settings.munge_socket).decode(
            request.credential.encode("ascii", "replace")
        )
    except PermissionRefused as error:
        raise UnknownCredential(str(error)) from error
    except MungeUnavailable as error:
        log.warning("MUNGE authentication is unavailable: %s", error)
        raise
    try:
        return claim.uid, _admit_claim(web_settings, claim, statement)
    except UnknownCredential as error:
        raise MungeUserRejected(str(error), claim.uid) from error


def _admit_claim(web_settings: WebSettings, claim: MungeClaim, statement: bytes) -> str:
    """Return the user name of a credential, if it covers the request and its user may use MUNGE."""
    difference = describe_difference(claim.payload, statement)
    if difference:
        raise UnknownCredential(f"the MUNGE credential {difference}")
    _require_network(web_settings, claim.address)
    if claim.uid in (0, os.geteuid()):
        raise UnknownCredential(
            "permission denied: root and Steward's user cannot authenticate from other hosts",
            claim.uid,
        )
    try:
        return pwd.getpwuid(claim.uid).pw_name
    except KeyError:
        raise UnknownCredential(
            f"your uid {claim.uid} has no user name on the daemon's host"
        ) from None


def _require_network(web_settings: WebSettings, address: str) -> None:
    if not is_within(address, web_settings.munge_from):
        raise UnknownCredential(
            f"MUNGE authentication from {address} is not allowed ('munge_from' of [web]): use "
            "a token",
            address,
        )
