"""Actions of credentials: login links, browser sessions, MUNGE tickets, API tokens.

Their context is a :class:`steward.admin.credentials.context.CredentialsRoom`. Only the web
process may open sessions, and only for the user of a login link or one that a trusted proxy
names; it gets a ticket only for a user whose MUNGE credential it brings. Without one of these
it cannot act as anybody.
"""

from datetime import timedelta
from typing import Final

from steward.admin.credentials.context import (
    BY_PROXY,
    BY_SHARED,
    CredentialsRoom,
    ticket,
    uid_of,
    who_asked,
)
from steward.admin.credentials.errors import NoSuchCredential, NotLetIn
from steward.admin.credentials.requests import (
    CloseRequest,
    ClusterRole,
    LoginAnswer,
    LoginRequest,
    MeAnswer,
    MeRequest,
    OpenAnswer,
    OpenRequest,
    PeekAnswer,
    PeekRequest,
    SettingsAnswer,
    SettingsRequest,
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
    VouchAnswer,
    VouchRequest,
)
from steward.core.access import SCOPES, Asker
from steward.core.actions import Action, Answer
from steward.core.errors import Refused, UsageError
from steward.web.settings import WebSettings

_LONGEST_NAME: Final = 200
"""Longest name of a token, in characters."""
_USUAL_TOKEN_S: Final = 90 * 86400.0
"""Default validity of a token: 90 days, in seconds."""
_MOST_TOKENS: Final = 100
"""Most valid tokens of one user."""


def _login(room: CredentialsRoom, asker: Asker, request: LoginRequest) -> LoginAnswer:  # noqa: ARG001 - it has no fields
    """Create a login link for the caller."""
    web = room.settings.web
    if not web.listen:
        raise UsageError("there are no pages: set 'listen' in [web], and start 'steward web'")
    if asker.how not in ("socket", "local", "munge"):
        raise Refused("a session or a token makes no link: run 'steward login' on a login node")
    if not asker.user:
        raise Refused(f"your uid, {asker.uid}, has no name on the daemon's host", asker)
    now = room.now()
    secret, kept = room.store.make(
        "login",
        uid=asker.uid,
        user=asker.user,
        how=asker.how,
        now=now,
        expires=now + timedelta(seconds=web.login_s),
    )
    return LoginAnswer(url=f"{_url(web)}/login/{secret}", expires=kept.expires)


def _url(web: WebSettings) -> str:
    scheme = "https" if web.certificate_file else "http"
    return web.url.rstrip("/") or f"{scheme}://{web.listen}"


def _open(room: CredentialsRoom, asker: Asker, request: OpenRequest) -> OpenAnswer:
    """Open a session for a login link or a proxy's user."""
    _only_web(room, asker)
    now = room.now()
    if request.user:
        if not room.settings.web.proxy_header:
            raise Refused("no proxy is trusted: set 'proxy_header' in [web]", request.user)
        uid, user, how = uid_of(request.user), request.user, BY_PROXY
    else:
        link = room.store.use_up(request.secret, now)
        uid, user, how = link.uid, link.user, link.how
    web = room.settings.web
    life_s = web.proxy_session_s if how == BY_PROXY else web.session_s
    secret, kept = room.store.make(
        "session",
        uid=uid,
        user=user,
        how=how,
        now=now,
        expires=now + timedelta(seconds=life_s),
    )
    return OpenAnswer(secret=secret, user=user, expires=kept.expires)


def _vouch(room: CredentialsRoom, asker: Asker, request: VouchRequest) -> VouchAnswer:
    """Verify a MUNGE credential and return a ticket for its user."""
    _only_web(room, asker)
    try:
        uid, user = who_asked(room.settings.web, request)
    except NotLetIn as error:
        # Not raised as an error: the request must count against the user, not the host.
        return VouchAnswer(uid=error.uid, refused=str(error))
    return VouchAnswer(uid=uid, secret=ticket(uid, user, room.now()))


def _peek(room: CredentialsRoom, asker: Asker, request: PeekRequest) -> PeekAnswer:
    _only_web(room, asker)
    return PeekAnswer(user=room.store.known("login", request.secret, room.now()).user)


def _close(room: CredentialsRoom, asker: Asker, request: CloseRequest) -> Answer:
    _only_web(room, asker)
    now = room.now()
    room.store.end(room.store.known("session", request.secret, now).id, now)
    return Answer()


def _only_web(room: CredentialsRoom, asker: Asker) -> None:
    if not room.is_web(asker):
        raise Refused(
            f"only {room.settings.web.user!r}, whom 'steward web' runs as ([web] user), may do that"
        )


def _settings(room: CredentialsRoom, asker: Asker, request: SettingsRequest) -> SettingsAnswer:  # noqa: ARG001 - it has no fields
    if asker.uid != 0:
        _only_web(room, asker)
    return SettingsAnswer(web=room.settings.web)


def _me(room: CredentialsRoom, asker: Asker, request: MeRequest) -> MeAnswer:  # noqa: ARG001 - it has no fields
    access = room.access
    clusters = tuple(
        ClusterRole(
            cluster=cluster,
            zone=of.timezone,
            operator=access.is_operator(asker, cluster),
            administrator=access.is_administrator(asker, cluster),
            sees_nodes=access.may_see_nodes(asker, cluster),
            sees_jobs=access.scope(asker, cluster).everything,
            coordinates=tuple(sorted(access.coordinated(asker, cluster))),
        )
        for cluster, of in room.settings.cluster.items()
    )
    return MeAnswer(
        uid=asker.uid,
        user=asker.user,
        how=asker.how,
        clusters=clusters,
        bank=room.settings.bank.enabled,
        sensor=room.settings.sensor.enabled,
        rules=room.settings.rules.enabled,
    )


def _token_create(room: CredentialsRoom, asker: Asker, request: TokenCreateRequest) -> TokenAnswer:
    """Create an API token for the caller, or for another user as root."""
    if asker.how == "token":
        raise Refused("a token makes no tokens")
    uid, user = asker.uid, asker.user
    if request.user and request.user != user:
        if not _is_root(room, asker):
            raise Refused("only root and Steward's own user make tokens for others", request.user)
        uid, user = uid_of(request.user), request.user
    if not user:
        raise Refused(f"your uid, {uid}, has no name on the daemon's host", asker)
    life_s = _life_s(room.settings.web, asker, request.expires_s)
    if not request.scopes:
        raise UsageError(f"say what the token may do: {', '.join(SCOPES)}")
    if len(request.name) > _LONGEST_NAME or not request.name.isprintable():
        raise UsageError(f"a token's name has up to {_LONGEST_NAME} plain characters", request.name)
    now = room.now()
    living = [one for one in room.store.all_of("token", uid) if not one.ended and one.expires > now]
    if len(living) >= _MOST_TOKENS:
        raise UsageError(
            f"{user} has {len(living)} tokens: take some back with 'steward token revoke'", user
        )
    secret, kept = room.store.make(
        "token",
        uid=uid,
        user=user,
        how=_how(room.settings.web, asker),
        name=request.name,
        scopes=tuple(dict.fromkeys(request.scopes)),
        now=now,
        expires=now + timedelta(seconds=life_s),
    )
    return TokenAnswer(secret=secret, token=kept)


def _how(web: WebSettings, asker: Asker) -> str:
    """Return how the maker of a token was identified: it limits the token too."""
    if asker.how == "session" and web.is_shared:
        return BY_SHARED
    if asker.by_proxy:
        return BY_PROXY
    return "munge" if asker.by_munge else asker.how


def _life_s(web: WebSettings, asker: Asker, wanted_s: float | None) -> float:
    """Return a token's validity in seconds: as requested, or the default."""
    days = min(web.token_days, web.munge_token_days) if asker.by_munge else web.token_days
    longest_s = days * 86400.0
    if wanted_s is None:
        return min(_USUAL_TOKEN_S, longest_s)
    if 0 < wanted_s <= longest_s:
        return wanted_s
    what = f"a token is good for {days} days at most"
    if asker.by_munge:
        what += " where MUNGE says whose it is: make one for longer on the daemon's host"
    raise UsageError(what, wanted_s)


def _token_list(room: CredentialsRoom, asker: Asker, request: TokenListRequest) -> TokenListAnswer:
    """List tokens, and sessions if requested."""
    if request.everybodys and not _is_root(room, asker):
        raise Refused("only root and Steward's own user see everybody's tokens")
    uid = None if request.everybodys else asker.uid
    found = room.store.all_of("token", uid)
    if request.sessions:
        found += room.store.all_of("session", uid)
    return TokenListAnswer(tokens=tuple(found))


def _token_revoke(room: CredentialsRoom, asker: Asker, request: TokenRevokeRequest) -> Answer:
    """Revoke tokens or sessions, of others as root only."""
    found = [room.store.get(number) for number in request.numbers]
    for one in found:
        if one.uid != asker.uid and not _is_root(room, asker):
            raise NoSuchCredential(f"there is no credential with the number {one.id}", one.id)
    for one in found:
        room.store.end(one.id, room.now())
    return Answer()


def _is_root(room: CredentialsRoom, asker: Asker) -> bool:
    # A caller without a name is an administrator by uid alone.
    by_uid = room.access.is_administrator(Asker(uid=asker.uid), "")
    return by_uid and asker.how in ("socket", "local")


ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="credentials.login",
        help="Make a link that opens the pages.",
        request=LoginRequest,
        answer=LoginAnswer,
        run=_login,
    ),
    Action(
        name="credentials.open",
        help="Open a browser's session.",
        request=OpenRequest,
        answer=OpenAnswer,
        run=_open,
        role="administrator",
    ),
    Action(
        name="credentials.vouch",
        help="Know somebody by MUNGE, for one request.",
        request=VouchRequest,
        answer=VouchAnswer,
        run=_vouch,
        only_reads=True,
        role="administrator",
    ),
    Action(
        name="credentials.peek",
        help="Say for whom a link is.",
        request=PeekRequest,
        answer=PeekAnswer,
        run=_peek,
        role="administrator",
    ),
    Action(
        name="credentials.close",
        help="End a browser's session.",
        request=CloseRequest,
        answer=Answer,
        run=_close,
        role="administrator",
    ),
    Action(
        name="credentials.me",
        help="Say who asks, and what they are.",
        request=MeRequest,
        answer=MeAnswer,
        run=_me,
        only_reads=True,
    ),
    Action(
        name="credentials.settings",
        help="Tell the pages' process its settings.",
        request=SettingsRequest,
        answer=SettingsAnswer,
        run=_settings,
        only_reads=True,
        role="administrator",
    ),
    Action(
        name="credentials.token_create",
        help="Make a token for a program.",
        request=TokenCreateRequest,
        answer=TokenAnswer,
        run=_token_create,
    ),
    Action(
        name="credentials.token_list",
        help="List tokens.",
        request=TokenListRequest,
        answer=TokenListAnswer,
        run=_token_list,
        only_reads=True,
    ),
    Action(
        name="credentials.token_revoke",
        help="Take tokens back.",
        request=TokenRevokeRequest,
        answer=Answer,
        run=_token_revoke,
    ),
)
"""Every action of credentials."""
