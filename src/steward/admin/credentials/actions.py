"""Actions of credentials: login links, browser sessions, MUNGE tickets, API tokens.

Their context is a :class:`steward.admin.credentials.sessions.CredentialsContext`. Only the web
process may open sessions, and only for the user of a login link or one that a trusted proxy
names; it gets a ticket only for a user whose MUNGE credential it brings. Without one of these
it cannot act as anybody.

Log in from a host: ``login`` makes a link for the caller, the web process shows its user (``peek``)
and exchanges it once for a session (``open``), which ``close`` ends. Programs use a token
(``token_create``, ``token_list``, ``token_revoke``), or a MUNGE credential for each request, which
``ticket`` exchanges for a ticket. ``me`` describes the caller to the pages.
"""

from datetime import timedelta
from typing import Final

from steward.admin.credentials.errors import CredentialMissing, MungeUserRejected
from steward.admin.credentials.munge_authentication import make_ticket, verify_munge_request
from steward.admin.credentials.requests import (
    CallerAnswer,
    CallerRequest,
    CloseRequest,
    ClusterRole,
    LoginAnswer,
    LoginRequest,
    OpenAnswer,
    OpenRequest,
    PeekAnswer,
    PeekRequest,
    SettingsAnswer,
    SettingsRequest,
    TicketAnswer,
    TicketRequest,
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
)
from steward.admin.credentials.sessions import (
    BY_PROXY,
    BY_SHARED,
    PROXY_SESSION_S,
    CredentialsContext,
    find_proxy_uid,
)
from steward.admin.credentials.store import Credential
from steward.core.access import SCOPES, Caller
from steward.core.actions import Answer, action, route
from steward.core.errors import PermissionRefused, UsageError
from steward.web.settings import SESSION_S, WebSettings

_MAX_NAME_CHARS: Final = 200
"""Longest name of a token, in characters."""
LOGIN_S: Final = 300.0
"""Lifetime of a link of ``steward login``, in seconds."""
_USUAL_TOKEN_S: Final = 90 * 86400.0
"""Default validity of a token: 90 days, in seconds."""
_MUNGE_TOKEN_DAYS: Final = 30
"""Longest lifetime of a token whose user MUNGE alone authenticated, in days: root of any node that
has the cluster's key could have made it."""
_MAX_TOKENS: Final = 100
"""Most valid tokens of one user."""


@action(
    "credentials.login",
    scope="admin",
    command="login",
)
def _create_login_link(
    context: CredentialsContext,
    caller: Caller,
    request: LoginRequest,  # noqa: ARG001 - it has no fields
) -> LoginAnswer:
    """Print a link that logs you in to the web pages.

    The link works once, within a few minutes. Do not share it.
    """
    web_settings = context.settings.web
    if not web_settings.listen:
        raise UsageError("web pages are disabled: set 'listen' in [web], and start 'steward web'")
    if caller.how not in ("socket", "local", "munge"):
        raise PermissionRefused(
            "sessions and tokens cannot create login links: run 'steward login' on a login node"
        )
    if not caller.user:
        raise PermissionRefused(
            f"your uid {caller.uid} has no user name on the daemon's host", caller
        )
    now = context.now()
    secret, credential = context.store.create(
        "login",
        uid=caller.uid,
        user=caller.user,
        how=caller.how,
        now=now,
        expires=now + timedelta(seconds=LOGIN_S),
    )
    return LoginAnswer(
        url=f"{_get_pages_url(web_settings)}/login/{secret}", expires=credential.expires
    )


def _get_pages_url(web_settings: WebSettings) -> str:
    scheme = "https" if web_settings.tls else "http"
    return web_settings.url.rstrip("/") or f"{scheme}://{web_settings.listen}"


@action(
    "credentials.open",
    scope="admin",
    role="administrator",
    for_web=True,
)
def _open_session(context: CredentialsContext, caller: Caller, request: OpenRequest) -> OpenAnswer:
    """Open a browser session for a login link or for the user of a trusted proxy."""
    _require_web(context, caller)
    now = context.now()
    if request.user:
        if not context.settings.web.proxy_header:
            raise PermissionRefused(
                "no trusted proxy is configured: set 'proxy_header' in [web]", request.user
            )
        uid, user, how = find_proxy_uid(request.user), request.user, BY_PROXY
    else:
        link = context.store.use_up(request.secret, now)
        uid, user, how = link.uid, link.user, link.how
    validity_s = PROXY_SESSION_S if how == BY_PROXY else SESSION_S
    secret, credential = context.store.create(
        "session",
        uid=uid,
        user=user,
        how=how,
        now=now,
        expires=now + timedelta(seconds=validity_s),
    )
    return OpenAnswer(secret=secret, user=user, expires=credential.expires)


@action(
    "credentials.ticket",
    scope="admin",
    role="administrator",
    only_reads=True,
    for_web=True,
)
def _create_ticket(
    context: CredentialsContext, caller: Caller, request: TicketRequest
) -> TicketAnswer:
    """Verify the MUNGE credential of one request and return a ticket for it."""
    _require_web(context, caller)
    try:
        uid, user = verify_munge_request(context.settings.web, request)
    except MungeUserRejected as error:
        # Not raised as an error: the request must count against the user, not the host.
        return TicketAnswer(uid=error.uid, reason=str(error))
    return TicketAnswer(uid=uid, secret=make_ticket(uid, user, context.now()))


@action(
    "credentials.peek",
    scope="admin",
    role="administrator",
    for_web=True,
)
def _show_link_user(
    context: CredentialsContext, caller: Caller, request: PeekRequest
) -> PeekAnswer:
    """Show the user of a login link; the link stays valid."""
    _require_web(context, caller)
    return PeekAnswer(user=context.store.find_valid("login", request.secret, context.now()).user)


@action(
    "credentials.close",
    scope="admin",
    role="administrator",
    for_web=True,
)
def _close_session(context: CredentialsContext, caller: Caller, request: CloseRequest) -> Answer:
    """End a browser session."""
    _require_web(context, caller)
    now = context.now()
    context.store.end(context.store.find_valid("session", request.secret, now).id, now)
    return Answer()


def _require_web(context: CredentialsContext, caller: Caller) -> None:
    if not context.is_web(caller):
        raise PermissionRefused(
            f"permission denied: only {context.settings.web.user!r}, the user of 'steward "
            "web' ([web] user), may do this"
        )


@action(
    "credentials.settings",
    scope="admin",
    role="administrator",
    only_reads=True,
    for_web=True,
)
def _show_web_settings(
    context: CredentialsContext,
    caller: Caller,
    request: SettingsRequest,  # noqa: ARG001 - it has no fields
) -> SettingsAnswer:
    """Return the settings of the web process."""
    if caller.uid != 0:
        _require_web(context, caller)
    return SettingsAnswer(web=context.settings.web)


@action(
    "credentials.me",
    scope="any",
    routes=(route("GET /me"),),
    only_reads=True,
)
def _show_caller(
    context: CredentialsContext,
    caller: Caller,
    request: CallerRequest,  # noqa: ARG001 - it has no fields
) -> CallerAnswer:
    """Show the caller: user, authentication and roles."""
    access = context.access
    clusters = tuple(
        ClusterRole(
            cluster=cluster,
            zone=settings.timezone,
            operator=access.is_operator(caller, cluster),
            administrator=access.is_administrator(caller, cluster),
            sees_nodes=access.can_see_nodes(caller, cluster),
            sees_jobs=access.get_job_scope(caller, cluster).everything,
            coordinates=tuple(sorted(access.list_coordinated(caller, cluster))),
        )
        for cluster, settings in context.settings.cluster.items()
    )
    return CallerAnswer(
        uid=caller.uid,
        user=caller.user,
        how=caller.how,
        clusters=clusters,
        bank=context.settings.bank.enabled,
        sensor=context.settings.sensor.enabled,
        rules=context.settings.rules.is_enabled,
    )


@action(
    "credentials.token_create",
    scope="admin",
    command="token create",
    routes=(route("POST /tokens", status=201),),
)
def _create_token(
    context: CredentialsContext, caller: Caller, request: TokenCreateRequest
) -> TokenAnswer:
    """Create an API token for a program that acts as you.

    Steward prints the token once and stores only its hash: put the token where only the program can
    read it. Root and Steward's own user can create tokens for other users, too.
    """
    if caller.how == "token":
        raise PermissionRefused("permission denied: a token cannot create tokens")
    uid, user = caller.uid, caller.user
    if request.user and request.user != user:
        if not context.access.is_local_owner(caller):
            raise PermissionRefused(
                "permission denied: only root and Steward's user may create tokens for others",
                request.user,
            )
        uid, user = find_proxy_uid(request.user), request.user
    if not user:
        raise PermissionRefused(f"your uid {uid} has no user name on the daemon's host", caller)
    validity_s = _get_validity_s(context.settings.web, caller, request.expires_s)
    if not request.scopes:
        raise UsageError(f"no scope given: use one or more of {', '.join(SCOPES)}")
    if len(request.name) > _MAX_NAME_CHARS or not request.name.isprintable():
        raise UsageError(
            f"invalid token name: use up to {_MAX_NAME_CHARS} printable characters", request.name
        )
    now = context.now()
    valid_tokens = [
        token
        for token in context.store.list_all("token", uid)
        if not token.ended and token.expires > now
    ]
    if len(valid_tokens) >= _MAX_TOKENS:
        raise UsageError(
            f"user {user} has {len(valid_tokens)} tokens, the maximum: revoke some with "
            "'steward token revoke'",
            user,
        )
    secret, credential = context.store.create(
        "token",
        uid=uid,
        user=user,
        how=_get_origin(context.settings.web, caller),
        name=request.name,
        scopes=tuple(dict.fromkeys(request.scopes)),
        now=now,
        expires=now + timedelta(seconds=validity_s),
    )
    return TokenAnswer(secret=secret, token=credential)


def _get_origin(web_settings: WebSettings, caller: Caller) -> str:
    """Return how the maker of a token was identified: it limits the token too."""
    if caller.how == "session" and web_settings.is_shared:
        return BY_SHARED
    if caller.by_proxy:
        return BY_PROXY
    return "munge" if caller.by_munge else caller.how


def _get_validity_s(web_settings: WebSettings, caller: Caller, requested_s: float | None) -> float:
    """Return a token's validity in seconds: as requested, or the default."""
    days = (
        min(web_settings.token_days, _MUNGE_TOKEN_DAYS)
        if caller.by_munge
        else web_settings.token_days
    )
    longest_s = days * 86400.0
    if requested_s is None:
        return min(_USUAL_TOKEN_S, longest_s)
    if 0 < requested_s <= longest_s:
        return requested_s
    message = f"invalid validity of the token: give at most {days} days"
    if caller.by_munge:
        message += (
            " for a caller that MUNGE authenticates: create a longer one on the daemon's host"
        )
    raise UsageError(message, requested_s)


@action(
    "credentials.token_list",
    scope="admin",
    command="token list",
    rows="tokens",
    routes=(route("GET /tokens"),),
    only_reads=True,
)
def _list_tokens(
    context: CredentialsContext, caller: Caller, request: TokenListRequest
) -> TokenListAnswer:
    """List your API tokens."""
    if request.everybodys and not context.access.is_local_owner(caller):
        raise PermissionRefused(
            "permission denied: only root and Steward's user may list the tokens of all users"
        )
    uid = None if request.everybodys else caller.uid
    credentials = context.store.list_all("token", uid)
    if request.sessions:
        credentials += context.store.list_all("session", uid)
    return TokenListAnswer(
        tokens=tuple(
            credential
            for credential in credentials
            if request.everybodys or _is_own(credential, caller)
        )
    )


def _is_own(credential: Credential, caller: Caller) -> bool:
    """Return True if a credential is the caller's, not a former user's of the same uid."""
    return (credential.uid, credential.user) == (caller.uid, caller.user)


@action(
    "credentials.token_revoke",
    scope="admin",
    command="token revoke",
    routes=(route("DELETE /tokens/{token}", "Revoke a token.", parts={"token": "numbers"}),),
)
def _revoke_tokens(
    context: CredentialsContext, caller: Caller, request: TokenRevokeRequest
) -> Answer:
    """Revoke API tokens or browser sessions.

    Root and Steward's own user revoke those of other users, too.
    """
    credentials = [context.store.get(number) for number in request.numbers]
    for credential in credentials:
        if not (_is_own(credential, caller) or context.access.is_local_owner(caller)):
            raise CredentialMissing(
                f"unknown credential {credential.id}: 'steward token list' lists them",
                credential.id,
            )
    for credential in credentials:
        context.store.end(credential.id, context.now())
    return Answer()
