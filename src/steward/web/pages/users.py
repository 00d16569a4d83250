"""User page: accounts, jobs, usage and efficiency; for oneself also API tokens and sessions."""

import asyncio
from datetime import datetime
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.accounting.job_list_requests import JobsAnswer
from steward.accounting.job_list_requests import JobsRequest as ListRequest
from steward.admin.credentials.requests import (
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
)
from steward.bank.actions.accounts import AccountPage, UserShowRequest
from steward.bank.actions.reports import UsageAnswer, UsageRequest
from steward.bank.money import MICRO
from steward.core.access import SCOPES
from steward.core.errors import Refused, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.reports.requests import WasteAnswer, WasteRequest
from steward.web.authentication import Visit
from steward.web.errors import NoSuchPage
from steward.web.formats import zone_of
from steward.web.rendering import Plot, Renderer, part

Ask = Request[Any, Any, Any]
_JOBS: Final = 10
"""Most jobs shown."""
_DAY_S: Final = 86400.0
_LONGEST_NAME: Final = 64


@get("/users/{name:str}", include_in_schema=False)
async def user(visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Show a user, as far as the reader may see."""
    return await _page(visit, pages, name)


@get("/users/{name:str}/efficiency", include_in_schema=False)
async def efficiency(visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Show the user's allocated but unused resources, which take a while to sum up."""
    answer: WasteAnswer = await visit.ask(
        "reports.waste", WasteRequest(users=(name,), since="now-90days", until="now")
    )
    return pages.either(
        "efficiency.html",
        visit,
        name=name,
        answer=answer,
    )


@post("/users/{name:str}/tokens", include_in_schema=False, status_code=200)
async def create(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Create a token and show its secret once."""
    _need_self(visit, name)
    given = await request.form()
    days = str(given.get("days", "30")).strip()
    scopes: Any = tuple(word for word in SCOPES if word in given.getall("scopes", []))
    try:
        if not days.isascii() or not days.isdigit() or len(days) > 4:
            raise UsageError(f"a token is good for some days, not {days[:20]!r}")
        answer: TokenAnswer = await visit.ask(
            "credentials.token_create",
            TokenCreateRequest(
                name=str(given.get("name", "")), scopes=scopes, expires_s=int(days) * _DAY_S
            ),
        )
    except Unavailable:
        raise
    except StewardError as error:
        return await _page(visit, pages, name, error=str(error))
    return await _page(visit, pages, name, made=answer)


@post("/users/{name:str}/revoke", include_in_schema=False, status_code=303)
async def revoke(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Revoke a token or a session."""
    _need_self(visit, name)
    number = str((await request.form()).get("number", ""))
    if not number.isascii() or not number.isdigit():
        raise UsageError(f"a token has a number, not {number[:20]!r}")
    await visit.ask("credentials.token_revoke", TokenRevokeRequest(numbers=(int(number),)))
    return pages.redirect(f"/users/{part(name)}", visit)


def _need_self(visit: Visit, name: str) -> None:
    """Fail unless the user is the reader."""
    if name != visit.user:
        raise Refused("tokens are made and taken back by whose they are", name)


async def _page(
    visit: Visit,
    pages: Renderer,
    name: str,
    *,
    error: str = "",
    made: TokenAnswer | None = None,
) -> Response[Any]:
    """Return the page of a user, with a new token or an error message if given."""
    if not name or len(name) > _LONGEST_NAME:
        raise NoSuchPage("there is no such user")
    jobs: JobsAnswer
    members: AccountPage | None
    used: UsageAnswer | None
    tokens: TokenListAnswer | None
    jobs, members, used, tokens = await asyncio.gather(
        visit.ask("accounting.jobs", ListRequest(users=(name,), limit=_JOBS)),
        _members(visit, name),
        _used(visit, name),
        _tokens(visit, name),
    )
    return pages.page(
        "user.html",
        visit,
        status=400 if error else 200,
        here=f"/users/{name}",
        name=name,
        error=error,
        made=made,
        jobs=jobs,
        members=members,
        used=used,
        plot=_plot(used) if used else None,
        tokens=tokens,
        scopes=SCOPES,
        now=utc_now(),
    )


async def _members(visit: Visit, name: str) -> AccountPage | None:
    """Return the user's accounts, or None without a bank."""
    if not visit.me.bank:
        return None
    answer: AccountPage = await visit.ask("bank.user_show", UserShowRequest(users=(name,)))
    return answer


async def _used(visit: Visit, name: str) -> UsageAnswer | None:
    """Return the user's usage by month, as far as the reader may see it."""
    if not visit.me.bank:
        return None
    try:
        answer: UsageAnswer = await visit.ask(
            "bank.usage", UsageRequest(by=("month",), users=(name,), since="now-365days")
        )
    except Refused:
        # Other users' usage is visible only to coordinators: the page omits it.
        return None
    return answer


async def _tokens(visit: Visit, name: str) -> TokenListAnswer | None:
    """Return the user's own tokens and sessions; None for anybody else."""
    if name != visit.user:
        return None
    answer: TokenListAnswer = await visit.ask(
        "credentials.token_list", TokenListRequest(sessions=True)
    )
    return answer


def _plot(used: UsageAnswer) -> Plot | None:
    """Plot the usage by month, or return None for fewer than two months."""
    months = {row.month: row.amount for row in used.rows if row.month}
    if len(months) < 2:
        return None
    zone = zone_of(used.zone)
    starts = [
        datetime(int(month[:4]), int(month[5:7]), 1, tzinfo=zone).timestamp() for month in months
    ]
    return Plot(
        title="Used by month",
        x=starts,
        series=[("used", [amount / MICRO for amount in months.values()])],
        unit=used.unit,
        zone=used.zone,
        bars=True,
    )


ROUTES: Final = (user, efficiency, create, revoke)
