"""Requests and answers of the credentials actions: login, sessions, MUNGE tickets, tokens."""

from datetime import datetime
from typing import Annotated, ClassVar

import msgspec

from steward.admin.credentials.store import Credential
from steward.core.access import SCOPES, TokenScope
from steward.core.actions import ActionMessage, Answer, Request, argument, described, option
from steward.core.layouts import Column, Layout
from steward.web.settings import WebSettings


class LoginRequest(Request, frozen=True, kw_only=True):
    """credentials.login: a link that logs the caller into the web pages, once."""


class LoginAnswer(Answer, frozen=True, kw_only=True):
    """A login link.

    Attributes:
        url: The link; secret.
        expires: End of its validity, UTC.
    """

    url: str
    expires: datetime


class OpenRequest(Request, frozen=True, kw_only=True):
    """credentials.open: a session for the bearer of a login link, or a trusted proxy's user."""

    secret: Annotated[str, described('Secret of the link; "" if a user is given.')] = ""
    user: Annotated[str, described('User that the proxy names; "" for the link\'s.')] = ""


class OpenAnswer(Answer, frozen=True, kw_only=True):
    """A browser session.

    Attributes:
        secret: Secret for the browser's cookie.
        user: User of the session.
        expires: End of its validity, UTC.
    """

    secret: str
    user: str
    expires: datetime


class TicketRequest(Request, frozen=True, kw_only=True):
    """credentials.ticket: create a ticket, for one request of the user whom MUNGE identifies.

    The daemon, which knows the pages' address, builds the text that the credential must cover:
    the sender could name the address of another service.
    """

    credential: Annotated[str, described("MUNGE credential of the request.")]
    method: Annotated[str, described("HTTP method of the request.")]
    target: Annotated[str, described("Path and query of the request, from ``/api/`` on.")]
    digest: Annotated[str, described("SHA-256 of its body, in hexadecimal.")]
    peer: Annotated[str, described("Address of the client.")]


class TicketAnswer(Answer, frozen=True, kw_only=True):
    """The user whom MUNGE identifies, and a ticket.

    Attributes:
        uid: Uid of the user.
        secret: The ticket, used like a session's secret; "" if the user is rejected.
        reason: Reason for the rejection, in one line.
    """

    uid: int
    secret: str = ""
    reason: str = ""


class PeekRequest(Request, frozen=True, kw_only=True):
    """credentials.peek: the user of a login link, without using it up."""

    secret: Annotated[str, described("Secret of the link.")]


class PeekAnswer(Answer, frozen=True, kw_only=True):
    """The user of a login link.

    Attributes:
        user: Name of the user.
    """

    user: str


class CloseRequest(Request, frozen=True, kw_only=True):
    """credentials.close: end a session."""

    secret: Annotated[str, described("Secret of the session.")]


class CallerRequest(Request, frozen=True, kw_only=True):
    """credentials.me: the caller, with roles."""


class ClusterRole(ActionMessage, frozen=True, kw_only=True):
    """Roles and rights of the caller on a cluster.

    Attributes:
        cluster: Name of the cluster.
        zone: IANA name of its time zone; "" for this host's.
        operator: Whether the caller is an operator: may see everything, and change jobs.
        administrator: Whether the caller may also change what only Slurm's administrators may.
        sees_nodes: Whether the caller may see nodes.
        sees_jobs: Whether the caller may see everybody's jobs.
        coordinates: Accounts that the caller coordinates.
    """

    cluster: str
    zone: str
    operator: bool
    administrator: bool
    sees_nodes: bool
    sees_jobs: bool
    coordinates: tuple[str, ...]


class CallerAnswer(Answer, frozen=True, kw_only=True):
    """The caller, with roles, and the parts of Steward in use.

    Attributes:
        uid: Uid of the caller.
        user: User name; "" for none.
        how: Way of identification.
        clusters: Roles on each cluster.
        bank: Whether there is a bank.
        sensor: Whether there is a sensor.
        rules: Whether rules run.
    """

    uid: int
    user: str
    how: str
    clusters: tuple[ClusterRole, ...]
    bank: bool
    sensor: bool
    rules: bool


class SettingsRequest(Request, frozen=True, kw_only=True):
    """credentials.settings: the settings that the web process needs."""


class SettingsAnswer(Answer, frozen=True, kw_only=True):
    """Section [web] of the configuration.

    Attributes:
        web: The section.
    """

    web: WebSettings


class TokenCreateRequest(Request, frozen=True, kw_only=True):
    """credentials.token_create: an API token for a program."""

    name: Annotated[str, option("Purpose of the token.", "--name", metavar="TEXT")] = ""
    scopes: Annotated[
        tuple[TokenScope, ...],
        option(
            f"Scopes of the token: {', '.join(SCOPES)}.",
            "--scope",
            metavar="SCOPE,…",
        ),
    ] = ("read",)
    expires_s: Annotated[
        float | None,
        option(
            "Validity of the token: 12h, 30d, 8w.",
            "--expires",
            metavar="TIME",
            default="90 days, or the configured maximum if that is shorter",
            unit="duration",
        ),
    ] = None
    user: Annotated[
        str,
        option(
            "Owner of the token; only root and Steward's own user may name others.",
            "--user",
            "-u",
            metavar="NAME",
            default="you",
        ),
    ] = ""


class TokenAnswer(Answer, frozen=True, kw_only=True):
    """A new API token.

    Attributes:
        secret: The token for the program; never shown again.
        token: Stored record of the token.
    """

    secret: str
    token: Credential


class TokenListRequest(Request, frozen=True, kw_only=True):
    """credentials.token_list: list API tokens."""

    everybodys: Annotated[
        bool,
        option(
            "List tokens of all users. Only root and Steward's own user may do this.", "--all", "-a"
        ),
    ] = False
    sessions: Annotated[bool, option("Also list browser sessions.", "--sessions")] = False


class TokenListAnswer(Answer, frozen=True, kw_only=True):
    """API tokens, newest first.

    Attributes:
        tokens: The tokens.
    """

    tokens: tuple[Credential, ...]
    layout: ClassVar[Layout] = (
        Column("ID", "id", "count"),
        Column("User", "user"),
        Column("Kind", "kind", show="requested"),
        Column("How", "how", show="requested"),
        Column("Scopes", "scopes"),
        Column("Created", "created", "time"),
        Column("Expires", lambda row, _: "revoked" if row.ended else row.expires, "time"),
        Column("Used", "used", "time", title="Last used"),
        Column("Name", "name"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No tokens. 'steward token create' creates one."


class TokenRevokeRequest(Request, frozen=True, kw_only=True):
    """credentials.token_revoke: revoke tokens or sessions."""

    numbers: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)], ...],
        argument("Numbers of tokens, as 'steward token list' shows them.", "ID"),
    ]
