"""Sessions and tokens: the user of a credential, its rights, and how long a session lasts.

:class:`CredentialsContext` is the context of the credentials actions. Its ``find_caller`` returns
the user of a session's or token's secret or of a ticket, with the scopes and rights that it gives,
and extends a session that a proxy opened: it ends ``PROXY_SESSION_S`` after its last use.
``find_proxy_uid`` checks the user whom a proxy names.
"""

import functools
import logging
import os
import pwd
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, Literal

from steward.admin.credentials.munge_authentication import TICKET_PREFIX, verify_ticket
from steward.admin.credentials.store import CredentialKind, CredentialStore
from steward.core.access import Access, Caller, list_web_uids
from steward.core.config import Settings
from steward.core.errors import UnknownCredential
from steward.core.events import utc_now

log = logging.getLogger(__name__)

SESSION_PREFIX = "sts_"
"""Prefix of session secrets."""
BY_PROXY = "proxy"
"""Value of ``how`` for a session that a trusted proxy opened, and for tokens made in it."""
BY_SHARED = "shared"
"""Value of ``how`` for a token made in a session on an origin shared with other applications."""
PROXY_SESSION_S: Final = 600.0
"""Idle time after which a session that a proxy opened expires, in seconds."""
_MIN_EXTENSION = timedelta(seconds=10)
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

    def find_caller(self, secret: str) -> Caller:
        """Return the user of a session, token or ticket.

        Raises:
            UnknownCredential: It is unknown or no longer valid.
        """
        if secret.startswith(TICKET_PREFIX):
            uid, user = verify_ticket(secret, self.now())
            return Caller(uid=uid, user=user, how="munge", by_munge=True)
        kind: CredentialKind = "session" if secret.startswith(SESSION_PREFIX) else "token"
        now = self.now()
        credential = self.store.find_valid(kind, secret, now)
        if kind == "session" and credential.how == BY_PROXY:
            expires = now + timedelta(seconds=PROXY_SESSION_S)
            if expires - credential.expires >= _MIN_EXTENSION:
                self.store.renew(credential.id, expires)
        return Caller(
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
        web_settings = self.settings.web
        if how == BY_SHARED or (kind == "session" and web_settings.is_shared):
            return "user"
        return "reads" if how == BY_PROXY and not web_settings.proxy_operators else "full"

    def is_web(self, caller: Caller) -> bool:
        """Return whether the caller is the web process, as the kernel identifies it."""
        return caller.how in ("socket", "local") and caller.uid in list_web_uids(self.settings)


def find_proxy_uid(user: str) -> int:
    """Return the uid of a user whom a proxy names.

    Raises:
        UnknownCredential: There is none of that name, or it is root or Steward's own user.
    """
    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise UnknownCredential(f"unknown user {user!r} on this host", user) from None
    if entry.pw_uid in (0, os.geteuid()):
        raise UnknownCredential(f"permission denied: {user} cannot log in through a proxy", user)
    return entry.pw_uid
