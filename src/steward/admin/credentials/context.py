"""Credential checks: the user of a session, token or MUNGE credential, and one-minute tickets.

``verify_munge_request`` verifies the MUNGE credential of an HTTP request; ``make_ticket`` then
makes a ticket, which stands for its user for one minute. It is stored nowhere: it has the user,
signed with a key that the daemon's processes inherit from the parent and that ends with it.
:class:`CredentialsContext` is the context of the credentials actions; its ``bearer`` finds the user
of a session's or token's secret or of a ticket, with the scopes and rights that it gives.
"""

import functools
import hashlib
import hmac
import logging
import os
import pwd
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, Literal
from urllib.parse import urlsplit

from steward.admin.credentials.errors import MungeUserRejected, UnknownCredential
from steward.admin.credentials.requests import VouchRequest
from steward.admin.credentials.store import CredentialKind, CredentialStore
from steward.core.access import Access, Asker
from steward.core.config import Settings
from steward.core.errors import PermissionRefused
from steward.core.events import utc_now
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

TICKET_PREFIX: Final = "stm_"
"""Prefix of tickets."""
TICKET_LIFE: Final = timedelta(minutes=1)
"""Validity of a ticket."""
_KEY: Final = secrets.token_bytes(32)


def make_ticket(uid: int, user: str, now: datetime) -> str:
    """Make a ticket for a user."""
    text = f"{uid}:{to_micros(now + TICKET_LIFE)}:{user}"
    return f"{TICKET_PREFIX}{_sign(text)}:{text}"


def verify_ticket(ticket: str, now: datetime) -> tuple[int, str]:
    """Return the uid and name in a ticket.

    Raises:
        UnknownCredential: The running daemon did not make it, or its minute is over.
    """
    signature, _, text = ticket.removeprefix(TICKET_PREFIX).partition(":")
    if not hmac.compare_digest(signature.encode(), _sign(text).encode()):
        raise UnknownCredential("this is no ticket of the daemon that runs now: ask again")
    uid, until_us, user = text.split(":", 2)
    if to_micros(now) >= int(until_us):
        raise UnknownCredential(
            "what MUNGE vouches for is one request, and its minute is over: ask again"
        )
    return int(uid), user


def _sign(text: str) -> str:
    return hmac.new(_KEY, text.encode(), hashlib.sha256).hexdigest()


log = logging.getLogger(__name__)

SESSION_PREFIX = "sts_"
"""Prefix of session secrets."""
BY_PROXY = "proxy"
"""Value of ``how`` for a session that a trusted proxy opened, and for tokens made in it."""
BY_SHARED = "shared"
"""Value of ``how`` for a token made in a session on an origin shared with other applications."""
_RENEWED_EVERY = timedelta(seconds=10)
"""Least extension of a session that is stored: otherwise each request would be a write."""


class CredentialsContext:
    """Context of the credentials actions.

    Args:
        settings: The whole configuration.
        access: Access decisions.
        now: Returns the current time.
    """

    def __init__(
        self, settings: Settings, *, access: Access, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.settings = settings
        self.access = access
        self.now = now

    @functools.cached_property
    def store(self) -> CredentialStore:
        """The store of credentials."""
        return CredentialStore(self.settings.state_dir)

    def find_bearer(self, secret: str) -> Asker:
        """Return the user of a session, token or ticket.

        Raises:
            UnknownCredential: It is unknown or no longer valid.
        """
        if secret.startswith(TICKET_PREFIX):
            uid, user = verify_ticket(secret, self.now())
            return Asker(uid=uid, user=user, how="munge", by_munge=True)
        kind: CredentialKind = "session" if secret.startswith(SESSION_PREFIX) else "token"
        now = self.now()
        credential = self.store.find_valid(kind, secret, now)
        if kind == "session" and credential.how == BY_PROXY:
            expires = now + timedelta(seconds=self.settings.web.proxy_session_s)
            if expires - credential.expires >= _RENEWED_EVERY:
                self.store.renew(credential.id, expires)
        return Asker(
            uid=credential.uid,
            user=credential.user,
            how=kind,
            by_munge=credential.how == "munge",
            by_proxy=credential.how == BY_PROXY,
            scopes=frozenset(credential.scopes) if kind == "token" else None,
            rank=self._get_rank(kind, credential.how),
        )

    def _get_rank(self, kind: CredentialKind, how: str) -> Literal["full", "reads", "user"]:
        """Return how far an operator's rights go with a credential, see ``Asker.rank``.

        Another application of the same origin can do what a session can, and make tokens with
        it: those are limited as the session was.
        """
        web = self.settings.web
        if how == BY_SHARED or (kind == "session" and web.is_shared):
            return "user"
        return "reads" if how == BY_PROXY and not web.proxy_operators else "full"

    def is_web(self, caller: Asker) -> bool:
        """Return whether the caller is the web process, as the kernel identifies it."""
        return caller.how in ("socket", "local") and caller.uid in list_web_uids(self.settings)


def list_web_uids(settings: Settings) -> frozenset[int]:
    """Return the uids that ``steward web`` may run as: [web] user, if [web] is configured."""
    if not settings.web.listen:
        return frozenset()
    try:
        return frozenset({pwd.getpwnam(settings.web.user).pw_uid})
    except KeyError:
        return frozenset()


def find_proxy_uid(user: str) -> int:
    """Return the uid of a user whom a proxy names.

    Raises:
        UnknownCredential: There is none of that name, or it is root or Steward's own user.
    """
    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise UnknownCredential(f"there is no user {user!r} on this host", user) from None
    if entry.pw_uid in (0, os.geteuid()):
        raise UnknownCredential(f"a proxy cannot log in {user}", user)
    return entry.pw_uid


def verify_munge_request(web: WebSettings, request: VouchRequest) -> tuple[int, str]:
    """Verify the MUNGE credential of an HTTP request; return uid and name of its maker.

    Args:
        web: Section [web].
        request: The credential, and that request.

    Raises:
        MungeUserRejected: Its maker did not make that request, has no name here, is root or
            Steward's own user, or made it on a host outside ``munge_from``.
        UnknownCredential: It is invalid, or MUNGE is not accepted here or from that address.
        UsageError: The values do not describe an HTTP request.
        MungeUnavailable: munged does not answer.
    """
    if not web.munge:
        raise UnknownCredential("MUNGE is not asked here ('munge' of [web]): bring a token")
    # Not the host name that the client used: a server that relays the request may have named it.
    origin = urlsplit(web.url).netloc or web.listen
    statement = build_statement_from_digest(request.method, request.target, request.digest, origin)
    # Behind a proxy the peer is the proxy.
    if request.peer not in web.trusted_proxies:
        if is_ipv6(request.peer):
            raise UnknownCredential(
                f"MUNGE is not believed from {request.peer}, over IPv6: it names addresses of IPv4 "
                "alone: bring a token",
                request.peer,
            )
        _require_network(web, request.peer)
    try:
        claim = Munge(web.munge_socket).decode(request.credential.encode("ascii", "replace"))
    except PermissionRefused as error:
        raise UnknownCredential(str(error)) from error
    except MungeUnavailable as error:
        log.warning("nobody is known by MUNGE: %s", error)
        raise
    try:
        return claim.uid, _admit_claim(web, claim, statement)
    except UnknownCredential as error:
        raise MungeUserRejected(str(error), claim.uid) from error


def _admit_claim(web: WebSettings, claim: MungeClaim, statement: bytes) -> str:
    """Return the user name of a credential, if it covers the request and its user may use MUNGE."""
    difference = describe_difference(claim.payload, statement)
    if difference:
        raise UnknownCredential(f"the MUNGE credential {difference}")
    _require_network(web, claim.address)
    if claim.uid in (0, os.geteuid()):
        raise UnknownCredential(
            "root and Steward's own user are not let in from other hosts", claim.uid
        )
    try:
        return pwd.getpwuid(claim.uid).pw_name
    except KeyError:
        raise UnknownCredential(
            f"your uid, {claim.uid}, has no name on the daemon's host"
        ) from None


def _require_network(web: WebSettings, address: str) -> None:
    if web.munge_from and not is_within(address, web.munge_from):
        raise UnknownCredential(
            f"MUNGE is not believed from {address} ('munge_from' of [web]): bring a token", address
        )
