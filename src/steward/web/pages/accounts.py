"""Account pages: list of bank accounts, one account with its burn-down, statement, and changes.

:func:`forecast_balance` extrapolates an account's balance to the end of its allocation. The
handlers show members, holds and statements, download statements as CSV or JSON, set user limits
(coordinators) and deposit or withdraw SU (operators). :func:`iterate_tree` orders accounts below
their parents.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.bank import money
from steward.bank.actions.accounts import AccountReply, AccountShowRequest, AccountUserRequest
from steward.bank.actions.money import MoveRequest
from steward.bank.actions.reports import (
    AccountBalance,
    BalanceHistoryReply,
    BalanceHistoryRequest,
    BalanceReply,
    BalanceRequest,
    HoldsReply,
    HoldsRequest,
    StatementReply,
    StatementRequest,
    UsageReply,
    UsageRequest,
)
from steward.bank.ledger import Account, Allocation, BalanceDay
from steward.bank.money import MICRO
from steward.core.errors import NotFound, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.core.layouts import Column, find_timezone
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.renderer import Plot, Renderer, download_reply, quote_path_part

FORECAST_DAYS: Final = 28
"""Days whose mean spending the forecast uses."""
_FORECAST_LIMIT: Final = timedelta(days=3650)
"""Beyond this the forecast reports that the balance is not used up."""


class BurnDown(msgspec.Struct, frozen=True, kw_only=True):
    """Balance of an account over time, with a forecast.

    Attributes:
        plot: Balance at the end of each day, and the forecast.
        per_day: Mean daily spending of late, micro-SU.
        until: End of the active allocation; None if there is none.
        left: Forecast balance at that time, micro-SU; negative if SU will be missing.
        used_up: When the balance reaches zero; None if after the end, or never.
    """

    plot: Plot
    per_day: int
    until: datetime | None
    left: int
    used_up: datetime | None


def forecast_balance(
    days: Sequence[BalanceDay],
    allocations: Sequence[Allocation],
    now: datetime,
    zone: str,
    unit: str,
) -> BurnDown | None:
    """Return the burn-down of an account, or None without history.

    Args:
        days: Daily balances, up to today.
        allocations: Allocations that jobs are charged to, in that order.
        now: The present time.
        zone: IANA zone of the days.
        unit: Name of the bank's unit.
    """
    if not days:
        return None
    daily_spending = [item.spent for item in days[-FORECAST_DAYS - 1 : -1]]
    per_day = round(sum(daily_spending) / len(daily_spending)) if daily_spending else days[-1].spent
    ends = [item.end for item in allocations if item.end is not None and item.is_active(now)]
    until = min(ends, default=None)
    balance = days[-1].balance
    used_up = _estimate_used_up(balance, per_day, now)
    end_balance = balance if until is None else round(balance - per_day * _count_days(until - now))
    if until is not None and used_up is not None and used_up > until:
        used_up = None
    return BurnDown(
        plot=_plot_balance(days, balance, per_day, now, until or used_up, zone, unit),
        per_day=per_day,
        until=until,
        left=end_balance,
        used_up=used_up,
    )


def _estimate_used_up(balance: int, per_day: int, now: datetime) -> datetime | None:
    """Return when the balance reaches zero at this rate of spending, or None."""
    if per_day <= 0 or balance <= 0:
        return None
    remaining = (
        timedelta(days=balance / per_day)
        if balance / per_day < _FORECAST_LIMIT.days
        else _FORECAST_LIMIT
    )
    return now + remaining if remaining < _FORECAST_LIMIT else None


def _plot_balance(
    days: Sequence[BalanceDay],
    balance: int,
    per_day: int,
    now: datetime,
    until: datetime | None,
    zone: str,
    unit: str,
) -> Plot:
    """Plot the daily balances and the forecast."""
    x = [_find_day_end(day.day, zone) for day in days[:-1]] + [now.timestamp()]
    balances: list[float | None] = [day.balance / MICRO for day in days]
    forecast: list[float | None] = [None] * (len(days) - 1) + [balance / MICRO]
    if until is not None and until > now:
        x.append(until.timestamp())
        balances.append(None)
        forecast.append((balance - per_day * _count_days(until - now)) / MICRO)
    return Plot(
        title="Balance at the end of each day",
        x=x,
        series=[("balance", balances), ("forecast", forecast)],
        unit=unit,
        zone=zone,
    )


def _find_day_end(day: str, zone: str) -> float:
    """Return the end of a day in seconds since 1970."""
    next_day = date.fromisoformat(day) + timedelta(days=1)
    return datetime.combine(next_day, time(), find_timezone(zone)).timestamp()


def _count_days(span: timedelta) -> float:
    """Convert a duration to days."""
    return span / timedelta(days=1)


HttpRequest = Request[Any, Any, Any]
_STATEMENT_LINES: Final = 30
"""Statement lines shown on the account page."""
_HOLDS: Final = 100
"""Most SU holds shown."""
_LONGEST_HISTORY: Final = timedelta(days=730)
_DEFAULT_HISTORY: Final = timedelta(days=90)
_MOVES: Final = ("deposit", "withdraw")
"""Kinds of forms that change a balance."""


@get("/accounts/{name:str}", include_in_schema=False)
async def account(
    auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Show an account, as far as the user may see it."""
    return await _make_account_page(auth, pages, name)


@get("/accounts/{name:str}/statement", include_in_schema=False)
async def statement(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Show a page of a statement, or download the statement of a period."""
    _require_bank(auth)
    file_format = query.read_text(request, "form")
    statement_request = StatementRequest(
        account=name,
        user=query.read_text(request, "user"),
        since=query.read_text(request, "since"),
        until=query.read_text(request, "until"),
        limit=0 if file_format else _STATEMENT_LINES,
        before=query.read_number(request, "before"),
    )
    reply: StatementReply = await auth.call_action("bank.statement", statement_request)
    if file_format in ("csv", "json"):
        file_stem = re.sub(r"[^A-Za-z0-9_-]", "", name) or "account"
        return download_reply(reply, reply.statement.lines, f"{file_stem}-statement", file_format)
    return pages.render_page_or_part(
        "statement.html",
        auth,
        here="/accounts",
        name=reply.statement.account,
        asked=statement_request,
        answer=reply,
    )


@post("/accounts/{name:str}/limit", include_in_schema=False, status_code=303)
async def limit(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Set the limit of a member, or add one (coordinators and owners of the account)."""
    form = await request.form()
    user, limit_text = str(form.get("user", "")).strip(), str(form.get("limit", "")).strip()

    async def do() -> None:
        change_request = AccountUserRequest(
            account=name,
            user=user,
            limit=money.parse_money(limit_text) if limit_text else "none",
            reason=str(form.get("reason", "")),
        )
        account_reply: AccountReply = await auth.call_action(
            "bank.account_show", AccountShowRequest(names=(name,))
        )
        is_member = any(member.user == user for member in account_reply.users)
        await auth.call_action(
            "bank.user_change" if is_member else "bank.user_create", change_request
        )

    return await _perform_change(auth, pages, name, do)


@post("/accounts/{name:str}/money", include_in_schema=False, status_code=303)
async def move_money(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Deposit to or withdraw from an account (operators)."""
    form = await request.form()
    kind = str(form.get("kind", ""))
    if kind not in _MOVES:
        raise PageNotFound(f"unknown form {kind[:60]!r}: use one of {', '.join(_MOVES)}")

    async def do() -> None:
        allocation_number = str(form.get("allocation", "")).strip()
        if allocation_number and not (allocation_number.isascii() and allocation_number.isdigit()):
            raise UsageError(f"invalid allocation {allocation_number[:60]!r}: give its number")
        move_request = MoveRequest(
            account=name,
            amount=money.parse_money(str(form.get("amount", ""))),
            reason=str(form.get("reason", "")),
            key=str(form.get("key", "")),
            allocation=int(allocation_number or 0),
        )
        await auth.call_action(f"bank.{kind}", move_request)

    return await _perform_change(auth, pages, name, do)


async def _perform_change(
    auth: AuthenticatedRequest, pages: Renderer, name: str, change: Any
) -> Response[Any]:
    """Perform a change and show the account; an error appears above it."""
    _require_bank(auth)
    try:
        await change()
    except Unavailable:
        raise
    except StewardError as error:
        return await _make_account_page(auth, pages, name, str(error))
    return pages.make_redirect(f"/accounts/{quote_path_part(name)}", auth)


async def _make_account_page(
    auth: AuthenticatedRequest, pages: Renderer, name: str, error: str = ""
) -> Response[Any]:
    """Return the page of an account, with an error message if given."""
    _require_bank(auth)
    balance_reply: BalanceReply = await auth.call_action(
        "bank.balance", BalanceRequest(accounts=(name,))
    )
    if not balance_reply.accounts:
        raise NotFound(f"unknown account {name!r}", name)
    account_balance = balance_reply.accounts[0]
    since = _forecast_start(account_balance.allocations, balance_reply.at)
    account_reply: AccountReply
    history: BalanceHistoryReply
    usage: UsageReply
    statement_reply: StatementReply
    holds: HoldsReply | None
    account_reply, history, usage, statement_reply, holds = await asyncio.gather(
        _fetch_account(auth, account_balance),
        auth.call_action(
            "bank.balance_history",
            BalanceHistoryRequest(account=account_balance.account, since=since),
        ),
        auth.call_action(
            "bank.usage", UsageRequest(accounts=(account_balance.account,), since=since)
        ),
        auth.call_action(
            "bank.statement",
            StatementRequest(account=account_balance.account, limit=_STATEMENT_LINES),
        ),
        _fetch_holds(auth, account_balance.account),
    )
    bank_account = next(
        (item for item in account_reply.accounts if item.name == account_balance.account), None
    )
    may_edit = auth.is_operator or (
        bank_account is not None
        and (auth.user in bank_account.owners or _is_coordinator(auth, account_balance.account))
    )
    return pages.render_page(
        "account.html",
        auth,
        status=400 if error else 200,
        here="/accounts",
        error=error,
        answer=balance_reply,
        line=account_balance,
        accounts=AccountReply,
        of=bank_account,
        leads=may_edit,
        burning=forecast_balance(
            history.days,
            account_balance.allocations,
            balance_reply.at,
            balance_reply.zone,
            balance_reply.unit,
        ),
        history=history,
        users=usage,
        members=[item for item in account_reply.users if item.account == account_balance.account],
        holds=holds,
        statement=statement_reply,
        asked=StatementRequest(account=account_balance.account, limit=_STATEMENT_LINES),
        key=secrets.token_hex(8),
        now=utc_now(),
    )


def _is_coordinator(auth: AuthenticatedRequest, account: str) -> bool:
    """Return True if the user is a coordinator of the account."""
    return any(account in role.coordinates for role in auth.me.clusters)


async def _fetch_account(auth: AuthenticatedRequest, balance: AccountBalance) -> AccountReply:
    """Return members and owners; empty for an account that nobody created in the bank."""
    if not balance.known:
        return AccountReply()
    reply: AccountReply = await auth.call_action(
        "bank.account_show", AccountShowRequest(names=(balance.account,))
    )
    return reply


async def _fetch_holds(auth: AuthenticatedRequest, account: str) -> HoldsReply | None:
    """Return the account's SU holds, or None if the gate does not answer."""
    try:
        reply: HoldsReply = await auth.call_action("bank.holds", HoldsRequest(account=account))
    except Unavailable:
        # The page reports the holds as unknown and shows everything else.
        return None
    return msgspec.structs.replace(reply, holds=reply.holds[-_HOLDS:])


def _forecast_start(allocations: Any, now: datetime) -> str:
    """Return the first day of the burn-down: the start of the active allocation, within limits.

    It is at least a week ago, and not before ``_LONGEST_HISTORY``.
    """
    begins = [
        allocation.begin
        for allocation in allocations
        if allocation.end is not None and allocation.is_active(now)
    ]
    since = max(min(begins, default=now - _DEFAULT_HISTORY), now - _LONGEST_HISTORY)
    since = min(since, now - timedelta(days=7))
    return since.strftime("%Y-%m-%d")


def _require_bank(auth: AuthenticatedRequest) -> None:
    """Fail if there is no bank."""
    if not auth.me.bank:
        raise PageNotFound("the bank is disabled: set 'enabled = true' in [bank]")


ACCOUNT_ROUTES: Final = (account, statement, limit, move_money)


_DEEPEST: Final = 20
"""Deepest level of the account tree shown."""
_DEEPEST_INDENT: Final = 6
"""Deepest level that is indented further than its parent."""


class AccountTreeRow(AccountBalance, frozen=True, kw_only=True):
    """An account in the list: its balance, and the number of its ancestors in the list."""

    depth: int

    @property
    def row_class(self) -> str:
        """CSS class of its row."""
        return f"depth-{min(self.depth, _DEEPEST_INDENT)}"


def _read_left_share(row: AccountTreeRow, _: object) -> float | None:
    """Return the balance over what was given; None if nothing was."""
    given = sum(allocation.granted for allocation in row.allocations)
    return max(row.balance, 0) / given if given > 0 else None


_LEFT_SHARE: Final = Column("Left%", _read_left_share, "percent", title="Remaining share", low=0.1)


@get("/accounts", include_in_schema=False)
async def accounts(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """List all accounts, each below its parent."""
    if not auth.me.bank:
        return pages.render_page("no_bank.html", auth, here="/accounts")
    reply: BalanceReply = await auth.call_action("bank.balance", BalanceRequest())
    # Accounts that nobody created, only charged by jobs, have no more to show.
    names = tuple(balance.account for balance in reply.accounts if balance.known)
    account_reply = AccountReply(unit=reply.unit, decimals=reply.decimals, zone=reply.zone)
    if names:
        account_reply = await auth.call_action("bank.account_show", AccountShowRequest(names=names))
    return pages.render_page(
        "accounts.html",
        auth,
        here="/accounts",
        answer=reply,
        layout=(*reply.layout, _LEFT_SHARE),
        rows=list(iterate_tree(account_reply.accounts, reply.accounts)),
    )


def iterate_tree(
    accounts: Iterable[Account], balances: Iterable[AccountBalance]
) -> Iterator[AccountTreeRow]:
    """Yield the accounts in tree order, each after its parent."""
    balances_by_name = {item.account: item for item in balances}
    accounts_by_name = {item.name: item for item in accounts}
    children: dict[str, list[Account]] = {}
    for name in sorted(balances_by_name):
        account = accounts_by_name.get(name, Account(name=name, known=False))
        parent = account.parent if account.parent in balances_by_name else ""
        children.setdefault(parent, []).append(account)

    def rows(parent_name: str, depth: int) -> Iterator[AccountTreeRow]:
        for account in children.get(parent_name, ()) if depth < _DEEPEST else ():
            balance = balances_by_name[account.name]
            yield AccountTreeRow(**msgspec.structs.asdict(balance), depth=depth)
            yield from rows(account.name, depth + 1)

    return rows("", 0)


ROUTES: Final = (accounts,)
