"""User page: accounts, jobs, usage and efficiency; for oneself also API tokens and sessions."""

import asyncio
from datetime import datetime
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.accounting.job_list_requests import JobsAnswer, JobsRequest
from steward.admin.credentials.requests import (
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
)
from steward.bank.actions.accounts import AccountReply, UserShowRequest
from steward.bank.actions.reports import UsageReply, UsageRequest
from steward.bank.money import MICRO
from steward.core.access import SCOPES
from steward.core.errors import PermissionRefused, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.core.layouts import find_timezone
from steward.reports.requests import WasteReply, WasteRequest
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.renderer import Plot, Renderer, quote_path_part

HttpRequest = Request[Any, Any, Any]
_JOBS: Final = 10
"""Most jobs shown."""
_DAY_S: Final = 86400.0
_LONGEST_NAME: Final = 64


@get("/users/{name:str}", include_in_schema=False)
async def user(auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Show a user, as far as the reader may see."""
    return await _make_user_page(auth, pages, name)


@get("/users/{name:str}/efficiency", include_in_schema=False)
async def efficiency(
    auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Show the user's allocated but unused resources, which take a while to sum up."""
    reply: WasteReply = await auth.call_action(
        "reports.waste", WasteRequest(users=(name,), since="now-90days", until="now")
    )
    return pages.render_page_or_part(
        "efficiency.html",
        auth,
        name=name,
        answer=reply,
    )


@post("/users/{name:str}/tokens", include_in_schema=False, status_code=200)
async def create(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Create a token and show its secret once."""
    _require_self(auth, name)
    form = await request.form()
    days = str(form.get("days", "30")).strip()
    scopes: Any = tuple(scope for scope in SCOPES if scope in form.getall("scopes", []))
    try:
        if not days.isascii() or not days.isdigit() or len(days) > 4:
            raise UsageError(f"invalid validity {days[:20]!r}: give a number of days")
        reply: TokenAnswer = await auth.call_action(
            "credentials.token_create",
            TokenCreateRequest(
                name=str(form.get("name", "")), scopes=scopes, expires_s=int(days) * _DAY_S
            ),
        )
    except Unavailable:
        raise
    except StewardError as error:
        return await _make_user_page(auth, pages, name, error=str(error))
    return await _make_user_page(auth, pages, name, new_token=reply)


@post("/users/{name:str}/revoke", include_in_schema=False, status_code=303)
async def revoke(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Revoke a token or a session."""
    _require_self(auth, name)
    number = str((await request.form()).get("number", ""))
    if not number.isascii() or not number.isdigit():
        raise UsageError(f"invalid token number {number[:20]!r}")
    await auth.call_action("credentials.token_revoke", TokenRevokeRequest(numbers=(int(number),)))
    return pages.make_redirect(f"/users/{quote_path_part(name)}", auth)


def _require_self(auth: AuthenticatedRequest, name: str) -> None:
    """Fail unless the user is the reader."""
    if name != auth.user:
        raise PermissionRefused("permission denied: users manage only their own tokens", name)


async def _make_user_page(
    auth: AuthenticatedRequest,
    pages: Renderer,
    name: str,
    *,
    error: str = "",
    new_token: TokenAnswer | None = None,
) -> Response[Any]:
    """Return the page of a user, with a new token or an error message if given."""
    if not name or len(name) > _LONGEST_NAME:
        raise PageNotFound("unknown user")
    jobs: JobsAnswer
    members: AccountReply | None
    usage: UsageReply | None
    tokens: TokenListAnswer | None
    jobs, members, usage, tokens = await asyncio.gather(
        auth.call_action("accounting.jobs", JobsRequest(users=(name,), limit=_JOBS)),
        _fetch_accounts(auth, name),
        _fetch_usage(auth, name),
        _fetch_tokens(auth, name),
    )
    return pages.render_page(
        "user.html",
        auth,
        status=400 if error else 200,
        here=f"/users/{name}",
        name=name,
        error=error,
        new_token=new_token,
        jobs=jobs,
        members=members,
        used=usage,
        plot=_plot_usage(usage) if usage else None,
        tokens=tokens,
        valid_tokens=[
            token for token in tokens.tokens if not token.ended and token.expires > utc_now()
        ]
        if tokens
        else [],
        scopes=SCOPES,
    )


async def _fetch_accounts(auth: AuthenticatedRequest, name: str) -> AccountReply | None:
    """Return the user's accounts, or None without a bank."""
    if not auth.me.bank:
        return None
    reply: AccountReply = await auth.call_action("bank.user_show", UserShowRequest(users=(name,)))
    return reply


async def _fetch_usage(auth: AuthenticatedRequest, name: str) -> UsageReply | None:
    """Return the user's usage by month, as far as the reader may see it."""
    if not auth.me.bank:
        return None
    try:
        reply: UsageReply = await auth.call_action(
            "bank.usage", UsageRequest(by=("month",), users=(name,), since="now-365days")
        )
    except PermissionRefused:
        # Other users' usage is visible only to coordinators: the page omits it.
        return None
    return reply


async def _fetch_tokens(auth: AuthenticatedRequest, name: str) -> TokenListAnswer | None:
    """Return the user's own tokens and sessions; None for anybody else."""
    if name != auth.user:
        return None
    reply: TokenListAnswer = await auth.call_action(
        "credentials.token_list", TokenListRequest(sessions=True)
    )
    return reply


def _plot_usage(usage: UsageReply) -> Plot | None:
    """Plot the usage by month, or return None for fewer than two months."""
    months = {row.month: row.amount for row in usage.rows if row.month}
    if len(months) < 2:
        return None
    zone = find_timezone(usage.zone)
    starts = [
        datetime(int(month[:4]), int(month[5:7]), 1, tzinfo=zone).timestamp() for month in months
    ]
    return Plot(
        title="Usage by month",
        x=starts,
        series=[("used", [amount / MICRO for amount in months.values()])],
        unit=usage.unit,
        zone=usage.zone,
        bars=True,
    )


ROUTES: Final = (user, efficiency, create, revoke)
