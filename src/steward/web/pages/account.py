"""One account: what is left and for how long, who used it, what is held, and what happened."""

import asyncio
import csv
import io
import re
import secrets
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.bank import money
from steward.bank.asking_accounts import (
    AccountPage,
    AccountShowRequest,
    UserRequest,
)
from steward.bank.asking_course import CourseAnswer, CourseRequest
from steward.bank.asking_money import DepositRequest, WithdrawRequest
from steward.bank.asking_views import (
    AccountBalance,
    BalanceAnswer,
    BalanceRequest,
    HoldsAnswer,
    HoldsRequest,
    StatementAnswer,
    StatementRequest,
    UsageAnswer,
    UsageRequest,
)
from steward.core.errors import Missing, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.core.printable import no_formula, safe
from steward.web import query
from steward.web.burning import burn_down
from steward.web.errors import NoSuchPage
from steward.web.rendering import Renderer, part
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]
_LINES: Final = 30
_HOLDS: Final = 100
_FARTHEST_BACK: Final = timedelta(days=730)
_USUAL_BACK: Final = timedelta(days=90)
_STATEMENT: Final = ("number", "at", "kind", "who", "why", "account", "user", "charge", "amount")
_MOVES: Final = {"deposit": DepositRequest, "withdraw": WithdrawRequest}


@get("/accounts/{name:str}", include_in_schema=False)
async def account(visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """All about an account, as far as its reader may know it."""
    return await _page(visit, pages, name)


@get("/accounts/{name:str}/statement", include_in_schema=False)
async def statement(
    request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """The lines of a statement: a part of them, or all of a time to be downloaded."""
    _need_bank(visit)
    form = query.text(request, "form")
    asked = StatementRequest(
        account=name,
        user=query.text(request, "user"),
        since=query.text(request, "since"),
        until=query.text(request, "until"),
        limit=0 if form else _LINES,
        before=query.number(request, "before"),
    )
    answer: StatementAnswer = await visit.ask("bank.statement", asked)
    if form in ("csv", "json"):
        return _download(answer, name, form)
    return pages.either(
        "statement.html",
        visit,
        here="/accounts",
        name=answer.statement.account,
        asked=asked,
        answer=answer,
    )


@post("/accounts/{name:str}/limit", include_in_schema=False, status_code=303)
async def limit(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Set what a member may spend: by whoever looks after the account."""
    given = await request.form()
    user, text = str(given.get("user", "")).strip(), str(given.get("limit", "")).strip()

    async def do() -> None:
        wanted = UserRequest(
            account=name,
            user=user,
            limit=money.parse(text) if text else None,
            is_limited=True,
            reason=str(given.get("reason", "")),
        )
        page: AccountPage = await visit.ask("bank.account_show", AccountShowRequest(names=(name,)))
        is_in = any(one.user == user for one in page.users)
        await visit.ask("bank.user_change" if is_in else "bank.user_create", wanted)

    return await _done(visit, pages, name, do)


@post("/accounts/{name:str}/money", include_in_schema=False, status_code=303)
async def moved(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Give an account money, or take it away: by operators."""
    given = await request.form()
    kind = str(given.get("kind", ""))
    if kind not in _MOVES:
        raise NoSuchPage(f"money can be had {' or '.join(_MOVES)}, not {kind[:60]!r}")

    async def do() -> None:
        number = str(given.get("allocation", "")).strip()
        if number and not (number.isascii() and number.isdigit()):
            raise UsageError(f"an allocation has a number, not {number[:60]!r}")
        wanted = _MOVES[kind](
            account=name,
            amount=money.parse(str(given.get("amount", ""))),
            reason=str(given.get("reason", "")),
            key=str(given.get("key", "")),
            allocation=int(number or 0),
        )
        await visit.ask(f"bank.{kind}", wanted)

    return await _done(visit, pages, name, do)


async def _done(visit: Visit, pages: Renderer, name: str, do: Any) -> Response[Any]:
    """Do something, and show the account; what was wrong stands above it."""
    _need_bank(visit)
    try:
        await do()
    except Unavailable:
        raise
    except StewardError as error:
        return await _page(visit, pages, name, str(error))
    return pages.redirect(f"/accounts/{part(name)}", visit)


async def _page(visit: Visit, pages: Renderer, name: str, error: str = "") -> Response[Any]:
    _need_bank(visit)
    balance: BalanceAnswer = await visit.ask("bank.balance", BalanceRequest(accounts=(name,)))
    if not balance.accounts:
        raise Missing(f"there is no account {name!r}", name)
    line = balance.accounts[0]
    since = _since(line.allocations, balance.at)
    shown: AccountPage
    course: CourseAnswer
    users: UsageAnswer
    lines: StatementAnswer
    held: HoldsAnswer | None
    shown, course, users, lines, held = await asyncio.gather(
        _shown(visit, line),
        visit.ask("bank.course", CourseRequest(account=line.account, since=since)),
        visit.ask("bank.usage", UsageRequest(accounts=(line.account,), since=since)),
        visit.ask("bank.statement", StatementRequest(account=line.account, limit=_LINES)),
        _holds(visit, line.account),
    )
    of = next((one for one in shown.accounts if one.name == line.account), None)
    leads = visit.is_operator or (
        of is not None and (visit.user in of.owners or _coordinates(visit, line.account))
    )
    return pages.page(
        "account.html",
        visit,
        status=400 if error else 200,
        here="/accounts",
        error=error,
        answer=balance,
        line=line,
        of=of,
        leads=leads,
        burning=burn_down(course.days, line.allocations, balance.at, balance.zone, balance.unit),
        days=course.days,
        users=users,
        members=[one for one in shown.users if one.account == line.account],
        held=held,
        statement=lines,
        asked=StatementRequest(account=line.account, limit=_LINES),
        key=secrets.token_hex(8),
        now=utc_now(),
    )


def _coordinates(visit: Visit, account: str) -> bool:
    return any(account in role.coordinates for role in visit.me.clusters)


async def _shown(visit: Visit, line: AccountBalance) -> AccountPage:
    """Its members and owners; of an account that nobody created there is nothing to be shown."""
    if not line.known:
        return AccountPage()
    page: AccountPage = await visit.ask(
        "bank.account_show", AccountShowRequest(names=(line.account,))
    )
    return page


async def _holds(visit: Visit, account: str) -> HoldsAnswer | None:
    """What is held; None where the gate does not say."""
    try:
        answer: HoldsAnswer = await visit.ask("bank.holds", HoldsRequest(account=account))
    except Unavailable:
        # The page says that this is not known now; all else on it is.
        return None
    return msgspec.structs.replace(answer, holds=answer.holds[-_HOLDS:])


def _since(allocations: Any, now: datetime) -> str:
    """From when on the course is shown: from when what is drawn on now began."""
    begins = [one.begin for one in allocations if one.end is not None and one.active(now)]
    since = max(min(begins, default=now - _USUAL_BACK), now - _FARTHEST_BACK)
    since = min(since, now - timedelta(days=7))
    return since.strftime("%Y-%m-%d")


def _need_bank(visit: Visit) -> None:
    if not visit.me.bank:
        raise NoSuchPage("there is no bank here")


def _download(answer: StatementAnswer, name: str, form: str) -> Response[Any]:
    plain = re.sub(r"[^A-Za-z0-9_-]", "", name) or "account"
    headers = {"Content-Disposition": f'attachment; filename="{plain}-statement.{form}"'}
    if form == "json":
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*_STATEMENT, "balance"])
    for line in answer.statement.lines:
        cells = [getattr(line, field) for field in _STATEMENT[:-1]]
        cells[1] = line.at.isoformat()
        amounts = [money.plain(line.amount), money.plain(line.balance)]
        writer.writerow([*(no_formula(safe(str(cell))) for cell in cells), *amounts])
    return Response(out.getvalue(), media_type="text/csv", headers=headers)


ROUTES: Final = (account, statement, limit, moved)
