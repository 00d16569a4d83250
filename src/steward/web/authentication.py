"""Authentication of web requests: cookies, tokens, proxy headers, MUNGE; rate limits and CSRF.

:class:`RateLimiter` limits requests per user or address. :class:`MungeVerifier` has the daemon
verify MUNGE credentials. :class:`AuthenticatedRequest` is the result of authentication; handlers
use it to ask the daemon as its user. :class:`Authenticator`, which ``web/application.py`` creates,
handles a request in two steps. ``count``, before every handler, applies the rate limit.
``authenticate``, for handlers that need a user, finds the credential (token, MUNGE, proxy header
or cookie, in this order), asks the daemon whose it is (cached for 10 s), and checks the CSRF token
of changes by cookie or proxy. The daemon decides on all rights.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from litestar import Request

from steward.admin.credentials.requests import (
    CallerAnswer,
    CallerRequest,
    ClusterRole,
    OpenAnswer,
    OpenRequest,
    TicketAnswer,
    TicketRequest,
)
from steward.core.errors import UnknownCredential
from steward.core.listeners import get_limit_key, is_within
from steward.core.munge import SCHEME, hash_body, is_credential
from steward.core.rate_limits import TokenBuckets
from steward.web.daemon_client import (
    TICKET_ACTION,
    DaemonClient,
    RequestSlots,
    SlotsByUser,
    acquire_slot,
)
from steward.web.errors import CsrfError, LoginRequired, RateLimitExceeded
from steward.web.settings import SESSION_S, WebSettings

_BURST_S: Final = 10.0
"""Burst size: requests of this many seconds may come at once."""


class RateLimiter:
    """Limiter of requests: a token bucket for each user or address.

    Args:
        per_minute: Requests that each may send in a minute.
        now: Clock, in seconds.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._buckets = TokenBuckets(per_minute / 60, per_minute / 60 * _BURST_S, now)

    def count_request(self, sender: str) -> None:
        """Count a request, or raise if its sender exceeds the limit.

        Args:
            sender: User or address that sends the request.

        Raises:
            RateLimitExceeded: The sender exceeds the limit.
        """
        if not self._buckets.take(sender):
            raise self._make_error(sender)

    def check(self, sender: str) -> None:
        """Check the limit without counting a request; raise as :meth:`count_request`."""
        if self._buckets.get_wait_s(sender) > 0:
            raise self._make_error(sender)

    def _make_error(self, sender: str) -> RateLimitExceeded:
        message = "too many requests in a short time: try again in a few seconds"
        return RateLimitExceeded(message, self._buckets.get_wait_s(sender))


_CREDENTIALS_PER_ADDRESS: Final = 2
"""MUNGE credentials of one address that are checked at once; of all addresses, twice that."""
_SMALL_BODY: Final = 16 << 10
"""Largest body that any unauthenticated connection may hold in memory, in bytes."""
_LARGE_BODIES: Final = 16
"""Larger bodies of unauthenticated senders that are read at once …"""
_LARGE_BODIES_PER_ADDRESS: Final = 4
"""… and how many of them from one address."""

HttpRequest = Request[Any, Any, Any]


def find_peer_address(request: HttpRequest) -> str:
    """Return the address that a request's connection comes from."""
    return request.client.host if request.client else ""


class MungeVerifier:
    """Verifier of MUNGE credentials: asks the daemon which user a credential names.

    Args:
        web: Settings of the section [web].
        client: Client of the daemon.
        limiter: Rate limiter of users and addresses.
    """

    def __init__(self, settings: WebSettings, client: DaemonClient, limiter: RateLimiter) -> None:
        self._client = client
        self._limiter = limiter
        # A separate limit: invalid credentials must not block other users of the address.
        self._invalid_limiter = RateLimiter(settings.requests_per_minute)
        self._address_slots = SlotsByUser(_CREDENTIALS_PER_ADDRESS)
        self._noisy_slots = RequestSlots(1)
        self._large_slots = asyncio.Semaphore(_LARGE_BODIES)
        self._large_address_slots = SlotsByUser(_LARGE_BODIES_PER_ADDRESS)

    async def fetch_ticket(self, request: HttpRequest, credential: str) -> str:
        """Return a secret, valid for this request, of the user that MUNGE names.

        Raises:
            UnknownCredential: The credential is invalid, or its user has no access.
            RateLimitExceeded: The user exceeds the rate limit.
            ServerBusy: Too many credentials are being checked.
            Unavailable: munged or the daemon does not answer.
        """
        # A malformed credential costs nothing: reject it uncounted and read no further.
        if not is_credential(credential):
            raise UnknownCredential("malformed MUNGE credential")
        reply = await self._verify_credential(request, credential)
        self._limiter.count_request(f"uid:{reply.uid}")
        if reply.reason:
            raise UnknownCredential(reply.reason)
        return reply.secret

    async def _verify_credential(self, request: HttpRequest, credential: str) -> TicketAnswer:
        address = find_peer_address(request)
        target, query = request.scope["raw_path"], request.scope["query_string"]
        async with contextlib.AsyncExitStack() as exit_stack:
            if not _is_small(request):
                for slots in (self._large_address_slots.get_slots(address), self._large_slots):
                    await acquire_slot(exit_stack, slots)
            ticket_request = TicketRequest(
                credential=credential,
                method=request.method,
                target=(target + (b"?" + query if query else b"")).decode("latin-1"),
                digest=hash_body(await request.body()),
                peer=address,
            )
            await acquire_slot(
                exit_stack,
                self._noisy_slots
                if self._is_noisy(address)
                else self._address_slots.get_slots(address),
            )
            try:
                reply: TicketAnswer = await self._client.call_action(TICKET_ACTION, ticket_request)
            except UnknownCredential:
                # Over its limit an address is not counted further; it is then noisy.
                with contextlib.suppress(RateLimitExceeded):
                    self._invalid_limiter.count_request(address)
                raise
        return reply

    def _is_noisy(self, address: str) -> bool:
        """Return True if an address sends too many invalid credentials."""
        try:
            self._invalid_limiter.check(address)
        except RateLimitExceeded:
            return True
        return False


def _is_small(request: HttpRequest) -> bool:
    """Return True if a body declares a small length; chunked bodies declare none."""
    length = request.headers.get("content-length", "0")
    is_whole = "transfer-encoding" not in request.headers
    return is_whole and length.isascii() and length.isdigit() and int(length) <= _SMALL_BODY


CSRF_FIELD: Final = "csrf"
"""Form field of the CSRF token."""
CSRF_HEADER: Final = "x-csrf-token"
"""Header of the CSRF token, for htmx."""
_MASK_BYTES: Final = 16
_CACHE_S: Final = 10.0
"""Time for which the daemon's reply about a user is cached, in seconds."""
_MOST_CACHED: Final = 4096
"""Most secrets whose user is cached."""
_MOST_UIDS: Final = 20_000
"""Secrets whose uid is remembered for rate limits, longer than the cached reply itself."""
_SHARED_FACTOR: Final = 10
"""Factor on the limit of requests without a user, for an address that many people share."""

AuthenticationMethod = Literal["cookie", "token", "proxy", "munge"]
"""How a request authenticates."""


class AuthenticatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated web request: its user, and how it asks the daemon.

    Attributes:
        how: How the user was authenticated.
        secret: Secret of the session or token; with MUNGE, a ticket for this request.
        me: The user's name, uid and roles, as the daemon reports them.
        client: Client of the daemon.
        is_part: Whether htmx requests only a part of a page.
    """

    how: AuthenticationMethod
    secret: str
    me: CallerAnswer
    client: DaemonClient
    is_part: bool = False

    @property
    def user(self) -> str:
        """Return the user name."""
        return self.me.user

    @property
    def who(self) -> str:
        """Return the key for limits, the same for all sessions and tokens of a user."""
        return f"uid {self.me.uid}"

    @property
    def csrf(self) -> str:
        """Return a CSRF token for a form, masked differently on every page.

        Pages are compressed and echo parts of their address; a constant token could be guessed from
        the lengths (the BREACH attack).
        """
        token = _make_csrf(self.secret)
        mask = secrets.token_bytes(_MASK_BYTES)
        return (mask + bytes(a ^ b for a, b in zip(mask, token, strict=True))).hex()

    @property
    def is_operator(self) -> bool:
        """Return True if the user is an operator of some cluster."""
        return any(role.operator for role in self.me.clusters)

    @property
    def zone(self) -> str:
        """Return the IANA time zone of the first cluster, for values of no or several clusters."""
        return self.me.clusters[0].zone if self.me.clusters else ""

    @property
    def zones(self) -> dict[str, str]:
        """Return the IANA time zone of each cluster, for tables of rows of several."""
        return {role.cluster: role.zone for role in self.me.clusters}

    def find_role(self, cluster: str) -> ClusterRole | None:
        """Return the user's roles on a cluster, or None if the cluster is unknown."""
        return next((role for role in self.me.clusters if role.cluster == cluster), None)

    async def call_action(self, name: str, request: Any, *, key: str = "") -> Any:
        """Send a request to the daemon as this user and return its reply.

        Args:
            name: Name of the action, such as ``archive.list``.
            request: A value of the action's request type.
            key: Idempotency key; "" for none.

        Raises:
            StewardError: The action failed or rejected the request.
        """
        return await self.client.call_action(name, request, self.secret, key=key, user=self.who)


def _read_authorization(request: HttpRequest, scheme: str) -> str:
    """Return the secret of the Authorization header under this scheme, or ""."""
    given_scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    # Without a secret the daemon would treat the request as the web process's own.
    return secret.strip() if given_scheme.lower() == scheme.lower() else ""


def _make_csrf(secret: str) -> bytes:
    """Derive the CSRF token of a session from its secret."""
    return hashlib.sha256(b"steward csrf\0" + secret.encode()).digest()[:_MASK_BYTES]


def is_csrf_valid(secret: str, csrf: str) -> bool:
    """Return True if a form's CSRF token belongs to this session."""
    try:
        data = bytes.fromhex(csrf)
    except ValueError:
        return False
    if len(data) != 2 * _MASK_BYTES:
        return False
    mask, masked = data[:_MASK_BYTES], data[_MASK_BYTES:]
    token = bytes(a ^ b for a, b in zip(mask, masked, strict=True))
    return hmac.compare_digest(token, _make_csrf(secret))


class Authenticator:
    """Authentication of requests: identifies the user, and applies rate limits.

    Args:
        web: Settings of the section [web].
        client: Client of the daemon.
        limiter: Rate limiter of users and addresses.
    """

    def __init__(self, settings: WebSettings, client: DaemonClient, limiter: RateLimiter) -> None:
        self._settings = settings
        self._client = client
        self._limiter = limiter
        self._munge = MungeVerifier(settings, client, limiter)
        self._shared_limiter = RateLimiter(settings.requests_per_minute * _SHARED_FACTOR)
        self._callers: dict[str, tuple[float, CallerAnswer]] = {}
        self._uids: dict[str, int] = {}
        self._proxy_sessions: dict[str, tuple[float, str]] = {}

    def find_credential(self, request: HttpRequest) -> tuple[AuthenticationMethod, str]:
        """Return how a request authenticates, and its secret or the proxy's user name.

        Raises:
            LoginRequired: The request carries no credentials.
        """
        token = self.read_token(request)
        if token:
            return "token", token
        credential = _read_authorization(request, SCHEME)
        if credential:
            return "munge", credential
        user = self._read_proxy_user(request)
        if user:
            return "proxy", user
        secret = request.cookies.get(self._settings.cookie, "")
        if secret:
            return "cookie", secret
        raise LoginRequired(
            "not logged in: run 'steward login' on a login node (programs use a token of "
            "'steward token create')"
        )

    def read_token(self, request: HttpRequest) -> str:
        """Return the bearer token of a request, or ""."""
        return _read_authorization(request, "Bearer")

    def count(self, request: HttpRequest, *, needs_user: bool) -> None:
        """Count a request against the rate limit of its user or address.

        Unknown secrets count for their address, so inventing secrets gains nothing. MUNGE requests
        are counted once their user is known: many users share a login node's address.

        Args:
            request: The request.
            needs_user: Whether the handler authenticates the request later.

        Raises:
            RateLimitExceeded: The user or address exceeds the limit.
        """
        try:
            method, secret = self.find_credential(request)
        except LoginRequired:
            method, secret = "token", ""
        if method == "munge" and needs_user:
            return
        uid = self.find_uid(secret)
        if method == "proxy":
            self._limiter.count_request(f"user:{secret}")
        elif uid is not None:
            self._limiter.count_request(f"uid:{uid}")
        else:
            address = self._find_address(request)
            is_shared = is_within(address, self._settings.shared_from)
            (self._shared_limiter if is_shared else self._limiter).count_request(
                f"address:{get_limit_key(address)}"
            )

    async def authenticate(self, request: HttpRequest) -> AuthenticatedRequest:
        """Authenticate a request and check its CSRF token.

        Raises:
            LoginRequired: The daemon does not know the user.
            CsrfError: The request changes something and lacks a valid CSRF token.
        """
        method, secret = self.find_credential(request)
        if method == "proxy":
            secret, caller = await self._open_proxy_session(secret)
        elif method == "munge":
            secret = await self._munge.fetch_ticket(request, secret)
            caller = await self._client.call_action("credentials.me", CallerRequest(), secret)
        else:
            caller = await self._fetch_caller(secret)
        # Browsers send cookies, and proxies their header, without the user's intent.
        if method in ("cookie", "proxy") and request.method not in ("GET", "HEAD", "OPTIONS"):
            await self._check_csrf(request, secret)
        is_part = request.headers.get("hx-request") == "true"
        is_part = is_part and request.headers.get("hx-history-restore-request") != "true"
        return AuthenticatedRequest(
            how=method, secret=secret, me=caller, client=self._client, is_part=is_part
        )

    def find_uid(self, secret: str) -> int | None:
        """Return the uid of a secret that the daemon has accepted before, or None."""
        return self._uids.get(secret)

    def drop_session(self, secret: str) -> None:
        """Drop an ended session from the caches."""
        self._callers.pop(secret, None)
        self._uids.pop(secret, None)

    def _find_address(self, request: HttpRequest) -> str:
        """Return the client's address, taken from a trusted proxy's header if it is one."""
        address = find_peer_address(request)
        if address in self._settings.trusted_proxies:
            # The last address is the proxy's own word; earlier ones come from the client.
            forwarded = ",".join(request.headers.getall("x-forwarded-for", [])).rpartition(",")[2]
            return forwarded.strip() or address
        return address

    async def _fetch_caller(self, secret: str) -> CallerAnswer:
        now = time.monotonic()
        cached_entry = self._callers.get(secret)
        if cached_entry is not None and cached_entry[0] > now:
            return cached_entry[1]
        try:
            caller: CallerAnswer = await self._client.call_action(
                "credentials.me", CallerRequest(), secret
            )
        except UnknownCredential:
            self.drop_session(secret)
            raise
        if len(self._callers) >= _MOST_CACHED:
            self._callers.clear()
        self._callers[secret] = (now + _CACHE_S, caller)
        if len(self._uids) >= _MOST_UIDS:
            self._uids.pop(next(iter(self._uids)))
        self._uids[secret] = caller.uid
        return caller

    def _read_proxy_user(self, request: HttpRequest) -> str:
        if not self._settings.proxy_header:
            return ""
        if find_peer_address(request) not in self._settings.trusted_proxies:
            return ""
        users = request.headers.getall(self._settings.proxy_header, [])
        if len(users) > 1:
            # The proxy appends its header to the client's instead of replacing it.
            raise CsrfError(
                f"the proxy sent several users in {self._settings.proxy_header}: configure it to "
                "remove this header from clients' requests"
            )
        return "".join(users).strip()

    async def _open_proxy_session(self, user: str) -> tuple[str, CallerAnswer]:
        """Return the session of a proxy's user; a new one if theirs ended or was revoked."""
        secret = await self._find_proxy_session(user)
        try:
            return secret, await self._fetch_caller(secret)
        except UnknownCredential:
            self._proxy_sessions.pop(user, None)
        secret = await self._find_proxy_session(user)
        return secret, await self._fetch_caller(secret)

    async def _find_proxy_session(self, user: str) -> str:
        now = time.monotonic()
        cached_entry = self._proxy_sessions.get(user)
        if cached_entry is not None and cached_entry[0] > now:
            return cached_entry[1]
        reply: OpenAnswer = await self._client.call_action(
            "credentials.open", OpenRequest(user=user)
        )
        if len(self._proxy_sessions) >= _MOST_CACHED:
            self._proxy_sessions.clear()
        # Use renews the session, so the cached secret stays valid while it is used.
        self._proxy_sessions[user] = (now + SESSION_S, reply.secret)
        return reply.secret

    async def _check_csrf(self, request: HttpRequest, secret: str) -> None:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise CsrfError("rejected: the request comes from a page of another site")
        csrf = request.headers.get(CSRF_HEADER, "")
        if not csrf and "form" in request.headers.get("content-type", ""):
            csrf = str((await request.form()).get(CSRF_FIELD, ""))
        if not is_csrf_valid(secret, csrf):
            raise CsrfError("the form has expired: reload the page and submit it again")
