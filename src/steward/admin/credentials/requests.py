"""What is asked and answered about credentials."""

from datetime import datetime

from steward.admin.credentials.store import Credential
from steward.core.access import TokenScope
from steward.core.actions import Answer, Request, Shape
from steward.web.settings import WebSettings


class LoginRequest(Request, frozen=True, kw_only=True):
    """credentials.login: a link that logs whoever asks into the pages, once."""


class LoginAnswer(Answer, frozen=True, kw_only=True):
    """A link.

    Attributes:
        url: The link; secret.
        expires: Until when it can be used, UTC.
    """

    url: str
    expires: datetime


class OpenRequest(Request, frozen=True, kw_only=True):
    """credentials.open: a session for whoever brings a link, or whom a trusted proxy names.

    Attributes:
        secret: The link's secret …
        user: … or the proxy's user.
    """

    secret: str = ""
    user: str = ""


class OpenAnswer(Answer, frozen=True, kw_only=True):
    """A session.

    Attributes:
        secret: What the browser keeps.
        user: Whose it is.
        expires: Until when it is good, UTC.
    """

    secret: str
    user: str
    expires: datetime


class VouchRequest(Request, frozen=True, kw_only=True):
    """credentials.vouch: a ticket, for one request, for whom MUNGE names.

    The text that the credential has to be made over is put together by the daemon, which
    knows the pages' address: who asks could name that of another service.

    Attributes:
        credential: The MUNGE credential that came with the request.
        method: Of that request.
        target: Its path from ``/api/`` on, with its query.
        digest: SHA-256 of its body, in hexadecimal.
        peer: Address that its connection comes from.
    """

    credential: str
    method: str
    target: str
    digest: str
    peer: str


class VouchAnswer(Answer, frozen=True, kw_only=True):
    """Whom MUNGE names, and their ticket.

    Attributes:
        uid: Theirs.
        secret: The ticket, in place of a session's secret; "" where they are not let in.
        refused: Why they are not, in one line.
    """

    uid: int
    secret: str = ""
    refused: str = ""


class PeekRequest(Request, frozen=True, kw_only=True):
    """credentials.peek: for whom a link is, without taking it.

    Attributes:
        secret: The link's.
    """

    secret: str


class PeekAnswer(Answer, frozen=True, kw_only=True):
    """For whom a link is.

    Attributes:
        user: That one.
    """

    user: str


class CloseRequest(Request, frozen=True, kw_only=True):
    """credentials.close: end a session.

    Attributes:
        secret: The session's.
    """

    secret: str


class MeRequest(Request, frozen=True, kw_only=True):
    """credentials.me: who asks, and what they are."""


class ClusterRole(Shape, frozen=True, kw_only=True):
    """What somebody is on a cluster.

    Attributes:
        cluster: Its name.
        zone: IANA name of its zone; "" for this host's.
        operator: Whether they may see and do everything …
        administrator: … and what only Slurm's administrators may.
        sees_nodes: Whether they may see nodes.
        sees_jobs: Whether they may see everybody's jobs.
        coordinates: The accounts that they coordinate.
    """

    cluster: str
    zone: str
    operator: bool
    administrator: bool
    sees_nodes: bool
    sees_jobs: bool
    coordinates: tuple[str, ...]


class MeAnswer(Answer, frozen=True, kw_only=True):
    """Who asks.

    Attributes:
        uid: Their uid.
        user: Their name; "" for none.
        how: How they are known.
        clusters: What they are on each cluster.
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
    """credentials.settings: what the process that serves pages has to know."""


class SettingsAnswer(Answer, frozen=True, kw_only=True):
    """[web].

    Attributes:
        web: It.
    """

    web: WebSettings


class TokenCreateRequest(Request, frozen=True, kw_only=True):
    """credentials.token_create: a token for a program.

    Attributes:
        name: What it is for.
        scopes: What it may do.
        expires_s: How long it is good, in seconds; None for 90 days, or the longest that one
            may be good.
        user: Whose it is; whoever asks if empty.
    """

    name: str = ""
    scopes: tuple[TokenScope, ...] = ("read",)
    expires_s: float | None = None
    user: str = ""


class TokenAnswer(Answer, frozen=True, kw_only=True):
    """A new token.

    Attributes:
        secret: What the program keeps; never told again.
        token: What is kept of it here.
    """

    secret: str
    token: Credential


class TokenListRequest(Request, frozen=True, kw_only=True):
    """credentials.token_list: the tokens.

    Attributes:
        everybodys: Those of all users, not of whoever asks alone.
        sessions: Sessions of browsers, too.
    """

    everybodys: bool = False
    sessions: bool = False


class TokenListAnswer(Answer, frozen=True, kw_only=True):
    """Tokens, newest first.

    Attributes:
        tokens: They.
    """

    tokens: tuple[Credential, ...]


class TokenRevokeRequest(Request, frozen=True, kw_only=True):
    """credentials.token_revoke: take tokens or sessions back.

    Attributes:
        numbers: Theirs.
    """

    numbers: tuple[int, ...]
