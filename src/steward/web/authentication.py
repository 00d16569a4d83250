"""How often one may ask."""

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

from steward.admin.credentials.errors import NotKnown
from steward.admin.credentials.requests import (
    ClusterRole,
    MeAnswer,
    MeRequest,
    OpenAnswer,
    OpenRequest,
    VouchAnswer,
    VouchRequest,
)
from steward.core.listeners import host_of, is_within
from steward.core.munge import SCHEME, digest, is_credential
from steward.core.rate_limits import Buckets
from steward.web.daemon_client import VOUCH, Desk, Places, PlacesOfEach, take
from steward.web.errors import Forged, LoginNeeded, TooMany
from steward.web.settings import WebSettings

_BURST_S: Final = 10.0
"""So much of a time's requests may come at once."""


class Rate:
    """Lets only so many requests of each pass.

    Args:
        per_minute: How many of one.
        now: Tells seconds.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(per_minute / 60, per_minute / 60 * _BURST_S, now)

    def take(self, who: str) -> None:
        """Let a request pass.

        Args:
            who: Whom it is from.

        Raises:
            TooMany: It is one too many.
        """
        if not self._buckets.take(who):
            raise self._too_many(who)

    def look(self, who: str) -> None:
        """Whether a request would pass now, without counting it; raises as :meth:`take`."""
        if self._buckets.wait_s(who) > 0:
            raise self._too_many(who)

    def _too_many(self, who: str) -> TooMany:
        what = "that was too much in a short time: wait a few seconds"
        return TooMany(what, self._buckets.wait_s(who))


_OF_ONE: Final = 2
"""Credentials of one address that are looked at at once; of all it is twice that."""
_SMALL: Final = 16 << 10
"""A body that every connection of a stranger's may have in memory, in bytes."""
_LARGE: Final = 16
"""Larger ones of strangers that are read at once …"""
_LARGE_OF_ONE: Final = 4
"""… and of one address."""

Ask = Request[Any, Any, Any]


def peer(request: Ask) -> str:
    """The address that a request's connection comes from."""
    return request.client.host if request.client else ""


class Vouching:
    """Finds out whom MUNGE names.

    Args:
        web: [web].
        desk: Where the daemon is asked.
        rate: How often one may ask.
    """

    def __init__(self, web: WebSettings, desk: Desk, rate: Rate) -> None:
        self._desk = desk
        self._rate = rate
        # Apart from it, so that who sends nonsense keeps no neighbour's page from loading.
        self._strays = Rate(web.requests_per_minute)
        self._of_one = PlacesOfEach(_OF_ONE)
        self._noisy = Places(1)
        self._large = asyncio.Semaphore(_LARGE)
        self._large_of_one = PlacesOfEach(_LARGE_OF_ONE)

    async def ticket(self, request: Ask, credential: str) -> str:
        """The ticket, for this request, of whoever MUNGE says that it is from.

        Raises:
            NotKnown: It says nobody's, or that of somebody who is not let in.
            TooMany: They have asked too often.
            Crowded: Too many are looked at.
            Unavailable: munged does not answer, or the daemon.
        """
        # What costs nobody anything is not counted, and is read no further.
        if not is_credential(credential):
            raise NotKnown("that is no MUNGE credential")
        answer = await self._answer(request, credential)
        self._rate.take(f"uid:{answer.uid}")
        if answer.refused:
            raise NotKnown(answer.refused)
        return answer.secret

    async def _answer(self, request: Ask, credential: str) -> VouchAnswer:
        where = peer(request)
        target, query = request.scope["raw_path"], request.scope["query_string"]
        async with contextlib.AsyncExitStack() as until:
            if not _is_small(request):
                for place in (self._large_of_one.of(where), self._large):
                    await take(until, place)
            wanted = VouchRequest(
                credential=credential,
                method=request.method,
                target=(target + (b"?" + query if query else b"")).decode("latin-1"),
                digest=digest(await request.body()),
                peer=where,
            )
            await take(until, self._noisy if self._is_noisy(where) else self._of_one.of(where))
            try:
                answer: VouchAnswer = await self._desk.ask(VOUCH, wanted)
            except NotKnown:
                # Beyond its bound no more is counted: then it is noisy.
                with contextlib.suppress(TooMany):
                    self._strays.take(where)
                raise
        return answer

    def _is_noisy(self, where: str) -> bool:
        """Whether too much comes from an address that names nobody."""
        try:
            self._strays.look(where)
        except TooMany:
            return True
        return False


def _is_small(request: Ask) -> bool:
    """Whether a body says that it is small; one in chunks says nothing."""
    length = request.headers.get("content-length", "0")
    is_whole = "transfer-encoding" not in request.headers
    return is_whole and length.isascii() and length.isdigit() and int(length) <= _SMALL


CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"
_MASK_BYTES: Final = 16
_KNOWN_S: Final = 10.0
_MOST_KNOWN: Final = 4096
_MOST_UIDS: Final = 20_000
"""Secrets whose user is remembered, to count requests by; it lasts longer than what is known."""
_OF_SHARED: Final = 10
"""So many times as often an address that many share may ask without a user."""

How = Literal["cookie", "token", "proxy", "munge"]


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody's request.

    Attributes:
        how: How they were known.
        secret: Of their session or token; of one whom MUNGE names, a ticket for this request.
        me: What the daemon says of them.
        desk: Where their questions go.
        is_part: Whether only a part of a page is wanted (htmx asks).
    """

    how: How
    secret: str
    me: MeAnswer
    desk: Desk
    is_part: bool = False

    @property
    def user(self) -> str:
        """Their name."""
        return self.me.user

    @property
    def who(self) -> str:
        """Whom what they ask counts for, however many sessions and tokens they have."""
        return f"uid {self.me.uid}"

    @property
    def csrf(self) -> str:
        """What proves that a form is from a page of ours; another text on every page.

        A page is compressed, and holds what its address said: a token that is always the
        same could be guessed from the lengths.
        """
        token = _csrf(self.secret)
        mask = secrets.token_bytes(_MASK_BYTES)
        return (mask + bytes(a ^ b for a, b in zip(mask, token, strict=True))).hex()

    @property
    def is_operator(self) -> bool:
        """Whether they may see and do everything on some cluster."""
        return any(role.operator for role in self.me.clusters)

    @property
    def zone(self) -> str:
        """IANA name of the zone of what is of no cluster, or of several: the first one's."""
        return self.me.clusters[0].zone if self.me.clusters else ""

    def role(self, cluster: str) -> ClusterRole | None:
        """What they are on a cluster; None where there is none of that name."""
        return next((role for role in self.me.clusters if role.cluster == cluster), None)

    async def ask(self, name: str, request: Any, *, key: str = "") -> Any:
        """The daemon's answer to a request of theirs.

        Args:
            name: The action's: ``archive.list``.
            request: A value of its request type.
            key: Under which it is done once; "" for none.

        Raises:
            StewardError: Whatever the daemon refuses or cannot do.
        """
        return await self.desk.ask(name, request, self.secret, key=key, who=self.who)


def _authorized(request: Ask, scheme: str) -> str:
    """What a request shows under this scheme; "" for nothing."""
    shown, _, secret = request.headers.get("authorization", "").partition(" ")
    # Without a secret the daemon would take the question for our own.
    return secret.strip() if shown.lower() == scheme.lower() else ""


def _csrf(secret: str) -> bytes:
    return hashlib.sha256(b"steward csrf\0" + secret.encode()).digest()[:_MASK_BYTES]


def is_ours(secret: str, shown: str) -> bool:
    """Whether a form's token is from a page of this session."""
    try:
        data = bytes.fromhex(shown)
    except ValueError:
        return False
    if len(data) != 2 * _MASK_BYTES:
        return False
    mask, masked = data[:_MASK_BYTES], data[_MASK_BYTES:]
    token = bytes(a ^ b for a, b in zip(mask, masked, strict=True))
    return hmac.compare_digest(token, _csrf(secret))


class Doorkeeper:
    """Finds out who a request is from.

    Args:
        web: [web].
        desk: Where the daemon is asked.
        rate: How often one may ask.
    """

    def __init__(self, web: WebSettings, desk: Desk, rate: Rate) -> None:
        self._web = web
        self._desk = desk
        self._rate = rate
        self._vouching = Vouching(web, desk, rate)
        self._shared = Rate(web.requests_per_minute * _OF_SHARED)
        self._known: dict[str, tuple[float, MeAnswer]] = {}
        self._uids: dict[str, int] = {}
        self._by_proxy: dict[str, tuple[float, str]] = {}

    def bearer(self, request: Ask) -> tuple[How, str]:
        """How a request says whom it is from: by a name of the proxy's, or by a secret.

        Raises:
            LoginNeeded: It does not say.
        """
        token = self.token(request)
        if token:
            return "token", token
        credential = _authorized(request, SCHEME)
        if credential:
            return "munge", credential
        named = self._named_by_proxy(request)
        if named:
            return "proxy", named
        secret = request.cookies.get(self._web.cookie, "")
        if secret:
            return "cookie", secret
        raise LoginNeeded(
            "log in first: run 'steward login' on a login node (programs bring a token of "
            "'steward token create')"
        )

    def token(self, request: Ask) -> str:
        """The token that a request brings; "" for none."""
        return _authorized(request, "Bearer")

    def count(self, request: Ask, *, is_asked_who: bool) -> None:
        """Let a request pass, if whoever it is from has not asked too often.

        Who makes up a secret for each is one and the same address. Whom MUNGE names is counted
        when it is known who that is: a login node's address is everybody's who works there.

        Args:
            request: It.
            is_asked_who: Whether what answers it asks who it is from.

        Raises:
            TooMany: They have.
        """
        try:
            how, secret = self.bearer(request)
        except LoginNeeded:
            how, secret = "token", ""
        if how == "munge" and is_asked_who:
            return
        uid = self.met(secret)
        if how == "proxy":
            self._rate.take(f"user:{secret}")
        elif uid is not None:
            self._rate.take(f"uid:{uid}")
        else:
            address = self._address(request)
            is_shared = is_within(address, self._web.shared_from)
            (self._shared if is_shared else self._rate).take(f"address:{host_of(address)}")

    async def visit(self, request: Ask) -> Visit:
        """Who a request is from.

        Raises:
            LoginNeeded: Nobody whom the daemon knows.
            Forged: It changes something, and is not from a page of ours.
        """
        how, secret = self.bearer(request)
        if how == "proxy":
            secret, me = await self._by_name(secret)
        elif how == "munge":
            secret = await self._vouching.ticket(request, secret)
            me = await self._desk.ask("credentials.me", MeRequest(), secret)
        else:
            me = await self._me(secret)
        # What a browser sends by itself is a cookie, or what a proxy adds.
        if how in ("cookie", "proxy") and request.method not in ("GET", "HEAD", "OPTIONS"):
            await self._check_form(request, secret)
        is_part = request.headers.get("hx-request") == "true"
        is_part = is_part and request.headers.get("hx-history-restore-request") != "true"
        return Visit(how=how, secret=secret, me=me, desk=self._desk, is_part=is_part)

    def met(self, secret: str) -> int | None:
        """The uid of whoever brings a secret that the daemon has known before; else None."""
        return self._uids.get(secret)

    def forget(self, secret: str) -> None:
        """A session has ended."""
        self._known.pop(secret, None)
        self._uids.pop(secret, None)

    def _address(self, request: Ask) -> str:
        """The address that a request is from: of one that a trusted proxy passes on, as it says."""
        address = peer(request)
        if address in self._web.trusted_proxies:
            # The last is the proxy's own word; those before it the client's.
            said = ",".join(request.headers.getall("x-forwarded-for", [])).rpartition(",")[2]
            return said.strip() or address
        return address

    async def _me(self, secret: str) -> MeAnswer:
        now = time.monotonic()
        found = self._known.get(secret)
        if found is not None and found[0] > now:
            return found[1]
        try:
            me: MeAnswer = await self._desk.ask("credentials.me", MeRequest(), secret)
        except NotKnown:
            self.forget(secret)
            raise
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[secret] = (now + _KNOWN_S, me)
        if len(self._uids) >= _MOST_UIDS:
            self._uids.pop(next(iter(self._uids)))
        self._uids[secret] = me.uid
        return me

    def _named_by_proxy(self, request: Ask) -> str:
        if not self._web.proxy_header:
            return ""
        if peer(request) not in self._web.trusted_proxies:
            return ""
        named = request.headers.getall(self._web.proxy_header, [])
        if len(named) > 1:
            # A proxy that adds its word to the client's, in place of replacing it.
            raise Forged("the proxy names two users: have it remove the header that clients send")
        return "".join(named).strip()

    async def _by_name(self, user: str) -> tuple[str, MeAnswer]:
        """The session of a proxy's user; another one where theirs was ended or taken back."""
        secret = await self._session_of(user)
        try:
            return secret, await self._me(secret)
        except NotKnown:
            self._by_proxy.pop(user, None)
        secret = await self._session_of(user)
        return secret, await self._me(secret)

    async def _session_of(self, user: str) -> str:
        now = time.monotonic()
        found = self._by_proxy.get(user)
        if found is not None and found[0] > now:
            return found[1]
        answer: OpenAnswer = await self._desk.ask("credentials.open", OpenRequest(user=user))
        if len(self._by_proxy) >= _MOST_KNOWN:
            self._by_proxy.clear()
        # It is renewed by use: as long as it is known here somebody uses it.
        self._by_proxy[user] = (now + self._web.session_s, answer.secret)
        return answer.secret

    async def _check_form(self, request: Ask, secret: str) -> None:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Forged("this request comes from a page of another site")
        shown = request.headers.get(CSRF_HEADER, "")
        if not shown and "form" in request.headers.get("content-type", ""):
            shown = str((await request.form()).get(CSRF_FIELD, ""))
        if not is_ours(secret, shown):
            raise Forged("this form is too old, or not from here: load its page again")
