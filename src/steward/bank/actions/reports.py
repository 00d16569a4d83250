"""Bank reports: balances, statements, usage sums, open SU holds and daily balance history.

Read-only actions: ``bank.balance``, ``bank.statement``, ``bank.usage``, ``bank.holds`` and
``bank.course``. Operators see everything; others see accounts they use or manage, and their own
jobs. Holds and available amounts come from the gate, everything else from the ledger.
Amounts are micro-SU.
"""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.charged_jobs import name_charged_jobs
from steward.bank.context import BankContext, BankReply, Rights
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, BalanceDay, Statement, UsageRow
from steward.bank.records import Hold
from steward.core.access import Asker
from steward.core.actions import Action, ActionMessage, Request
from steward.core.timestamps import moment
from steward.slurm.times import load_zone

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_MAX_HOLDS: Final = 100_000
"""Maximum number of holds in a reply."""
_PAGE_SIZE: Final = 1000
"""Number of holds fetched from the gate at once."""

Grouping = Literal["account", "user", "partition", "month", "day", "cluster"]
"""Columns that usage can be grouped by."""


class BalanceRequest(Request, frozen=True, kw_only=True):
    """Request of bank.balance: balances of accounts.

    Attributes:
        accounts: Accounts to show; all that the caller uses or manages if empty.
    """

    accounts: tuple[str, ...] = ()


class AccountBalance(ActionMessage, frozen=True, kw_only=True):
    """Balance of one account.

    Attributes:
        account: The account.
        payer: Account whose allocations pay: itself, or one above.
        balance: Sum of the payer's active allocations.
        credit: Credit limit of the payer.
        held: Sum of holds for unfinished jobs; None if the gate does not answer.
        free: Available amount for a new job; None if the gate does not answer.
        user_limit: Spending limit of the caller; None for no limit.
        user_spent: Amount the caller has spent of it.
        closed: Whether new charges are forbidden.
        known: Whether somebody created it; False if it exists only because of charges.
        allocations: The payer's allocations, in spending order.
        remote_at: When a remote myBRC server reported its balance; None if none did.
    """

    account: str
    payer: str
    balance: int
    credit: int = 0
    held: int | None = None
    free: int | None = None
    user_limit: int | None = None
    user_spent: int = 0
    closed: bool = False
    known: bool = True
    allocations: tuple[Allocation, ...] = ()
    remote_at: datetime | None = None


class BalanceReply(BankReply, frozen=True, kw_only=True):
    """Reply with balances.

    Attributes:
        accounts: Balances by account name.
        at: Time of the balances.
    """

    accounts: tuple[AccountBalance, ...]
    at: datetime


class StatementRequest(Request, frozen=True, kw_only=True):
    """Request of bank.statement: transfers of an account, or charges of a user's jobs.

    Attributes:
        account: The account; "" for all that the caller manages.
        user: Only charges of this user's jobs; "" for everyone's.
        since: Start, as people type times; "" for the beginning of the month.
        until: End, likewise; "" for now.
        zone: IANA time zone of the times given; "" for the cluster's.
        limit: Maximum number of lines, the latest ones; 0 for all.
        before: Only transfers with a lower number than this; 0 for all.
    """

    account: str = ""
    user: str = ""
    since: str = ""
    until: str = ""
    zone: str = ""
    limit: int = 0
    before: int = 0


class StatementReply(BankReply, frozen=True, kw_only=True):
    """Reply with a statement.

    Attributes:
        statement: Its lines, with the balances before and after.
        older: Value of ``before`` for the next older page; 0 if there is none.
        names: Job ids in Slurm's notation for array tasks and components, by charge key.
    """

    statement: Statement
    older: int = 0
    names: dict[str, str]


class UsageRequest(Request, frozen=True, kw_only=True):
    """Request of bank.usage: sums of charges.

    Attributes:
        by: Columns to group by.
        accounts: Only these accounts; all that the caller may see if empty.
        users: Only these users.
        since: Only runs that began since, as people type times; "" for the year's beginning.
        until: End, likewise; "" for now.
        zone: IANA time zone of times and months; "" for the cluster's.
    """

    by: tuple[Grouping, ...] = ("user",)
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    zone: str = ""


class UsageReply(BankReply, frozen=True, kw_only=True):
    """Reply with sums of charges.

    Attributes:
        rows: Rows in order of time, otherwise the largest first.
        total: Sum of all rows.
        by: Columns grouped by.
        since: Start of the period.
        until: End of the period.
        is_all: Whether it covers all users, not only what the caller may see.
    """

    rows: tuple[UsageRow, ...]
    total: int
    by: tuple[str, ...]
    since: datetime
    until: datetime
    is_all: bool


class HoldsRequest(Request, frozen=True, kw_only=True):
    """Request of bank.holds: open SU holds.

    Attributes:
        account: Only of this account.
        user: Only for this user's jobs.
        cluster: Only for this cluster's jobs.
        job_id: Only for this job.
    """

    account: str = ""
    user: str = ""
    cluster: str = ""
    job_id: int = 0


class HoldsReply(BankReply, frozen=True, kw_only=True):
    """Reply with open SU holds.

    Attributes:
        holds: The holds, oldest first.
        total: Sum of the holds.
    """

    holds: tuple[Hold, ...]
    total: int


def show_balances(room: BankContext, asker: Asker, request: BalanceRequest) -> BalanceReply:
    """Show balances: operators see all accounts, others those they use or manage.

    Raises:
        BankRefused: The caller may not see an account.
        BankUsage: An account does not exist.
    """
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in request.accounts:
            rights.need_sight(name.lower())
        if request.accounts:
            found = [_need_account(t, name.lower()) for name in request.accounts]
        else:
            found = [one for one in t.accounts.all(unknown=True) if rights.sees(one.name)]
        lines = [_account_balance(room, t, one.name, rights) for one in found]
    return BalanceReply(
        accounts=tuple(_add_holds(room, line, rights) for line in lines),
        at=room.now(),
        **room.heading(),
    )


def show_statement(room: BankContext, asker: Asker, request: StatementRequest) -> StatementReply:
    """Show the statement of an account; mere users of it see only their own part.

    Raises:
        BankRefused: The caller may not see it.
        BankUsage: The account does not exist, or a time is invalid.
    """
    since = room.moment(request.since, request.zone) or _month_start(room, request.zone)
    until = room.moment(request.until, request.zone)
    account = request.account.lower()
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        if account:
            rights.need_sight(account)
            _need_account(t, account)
        elif not rights.is_operator and request.user != rights.user:
            raise BankRefused(
                "name the account; of all of them you may see your own use: -u "
                f"{rights.user or 'NAME'}"
            )
        user = rights.only_user(account, request.user)
        limit = max(0, request.limit)
        found = t.reading.statement(account, user, since, until, limit, max(0, request.before))
    has_more = bool(limit) and len(found.lines) == limit
    older = found.lines[0].number if has_more else 0
    names = name_charged_jobs(
        room, dict.fromkeys(line.charge for line in found.lines if line.charge)
    )
    return StatementReply(statement=found, older=older, names=names, **room.heading())


def show_usage(room: BankContext, asker: Asker, request: UsageRequest) -> UsageReply:
    """Sum up charges of accounts the caller manages, and of the caller's own jobs.

    Raises:
        BankRefused: It is about the usage of others.
        BankUsage: A time is invalid, or no column to group by is named.
    """
    zone = request.zone or room.zone()
    now = room.now()
    until = room.moment(request.until, zone) or now
    since = room.moment(request.since, zone) or _year_start(room, zone)
    if not request.by:
        raise BankUsage("say what to sum up by: --by user, partition, month, account or cluster")
    accounts = [name.lower() for name in request.accounts]
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in accounts:
            rights.need_sight(name)
        if not _is_all_led(rights, accounts) and (accounts or not rights.led):
            for user in request.users or ("",):
                rights.only_user("", user)
        rows = t.reading.usage(
            request.by,
            accounts=accounts or None,
            users=request.users or None,
            seen_by=None if rights.is_operator else (rights.user, rights.led),
            begin=since,
            end=until,
            zone=load_zone(zone),
        )
    ordered = sorted(rows, key=lambda row: (row.month, row.day, -row.amount, row.account, row.user))
    return UsageReply(
        rows=tuple(ordered),
        total=sum(row.amount for row in rows),
        by=request.by,
        since=since,
        until=until,
        is_all=rights.is_operator,
        **room.heading(),
    )


def list_holds(room: BankContext, asker: Asker, request: HoldsRequest) -> HoldsReply:
    """List open SU holds of accounts the caller manages, and of their own jobs.

    Raises:
        BankRefused: It is about jobs of others.
        GateUnavailable: The gate does not answer.
    """
    account = request.account.lower()
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
    found = fetch_holds(room, account, request.cluster, request.user, request.job_id)
    mine = [one for one in found if rights.leads(one.account) or _is_own(one, asker)]
    return HoldsReply(
        holds=tuple(sorted(mine, key=lambda one: (one.created_us, one.id))),
        total=sum(one.remaining for one in mine),
        **room.heading(),
    )


def fetch_holds(
    room: BankContext, account: str = "", cluster: str = "", user: str = "", job_id: int = 0
) -> list[Hold]:
    """List the open holds, fetched from the gate page by page.

    Raises:
        GateUnavailable: The gate does not answer.
    """
    gate = room.gate
    found: list[Hold] = []
    after = ""
    while len(found) < _MAX_HOLDS:
        page = gate.holds(
            account=account,
            cluster=cluster,
            user=user,
            job_id=job_id,
            after=after,
            limit=_PAGE_SIZE,
        )
        found += page
        if len(page) < _PAGE_SIZE:
            break
        after = page[-1].id
    return found


def _is_own(hold: Hold, asker: Asker) -> bool:
    """Return True if a hold is for the caller's own job."""
    return hold.uid == asker.uid or bool(asker.user and hold.user == asker.user)


def _is_all_led(rights: Rights, accounts: list[str]) -> bool:
    """Return True if the caller may see everyone's usage of these accounts; all if empty."""
    return all(rights.leads(name) for name in accounts) if accounts else rights.is_operator


def _account_balance(
    room: BankContext, t: "Transaction", account: str, rights: Rights
) -> AccountBalance:
    """Return the balance of one account, without the data of the gate."""
    now = room.now()
    own = _need_account(t, account)
    payer = t.accounts.payer(account)
    paying = _need_account(t, payer)
    member = {one.user: one for one in t.accounts.users(account)}.get(rights.user)
    pots = [one for one in t.allocations.of(payer) if one.active(now) or one.begin > now]
    return AccountBalance(
        account=own.name,
        payer=payer,
        balance=t.reading.balance(account),
        credit=paying.credit,
        user_limit=member.limit if member else None,
        user_spent=member.spent if member else 0,
        closed=own.closed,
        known=own.known,
        allocations=tuple(sorted(pots, key=_spending_order)),
    )


def _need_account(t: "Transaction", name: str) -> Account:
    """Return an account by name, including one that exists only because of charges.

    Raises:
        BankUsage: The account does not exist.
    """
    return t.accounts.get(name) or t.accounts.need(name)


def _spending_order(pot: Allocation) -> tuple[bool, float, int]:
    """Return the sort key for spending order: by end, the open-ended one last."""
    return pot.end is None, pot.end.timestamp() if pot.end else 0.0, pot.number


def _add_holds(room: BankContext, line: AccountBalance, rights: Rights) -> AccountBalance:
    """Add the gate's data to a balance: holds and available amount."""
    means = room.means(line.account, rights.user)
    if means is None:
        return line
    return msgspec.structs.replace(
        line,
        held=means.held,
        free=means.available,
        user_limit=means.user_limit,
        remote_at=moment(means.at_us) if means.at_us else None,
    )


def _month_start(room: BankContext, zone: str) -> datetime:
    """Return the beginning of the current month in a zone."""
    here = room.now().astimezone(load_zone(zone or room.zone()))
    begin = here.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(room.now().tzinfo)


def _year_start(room: BankContext, zone: str) -> datetime:
    """Return the beginning of the current year in a zone."""
    here = room.now().astimezone(load_zone(zone or room.zone()))
    begin = here.replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(room.now().tzinfo)


MONEY_ACTIONS: Final = (
    Action(
        name="bank.balance",
        help="Show what accounts have.",
        request=BalanceRequest,
        answer=BalanceReply,
        run=show_balances,
        only_reads=True,
    ),
    Action(
        name="bank.statement",
        help="Show what happened to an account's money.",
        request=StatementRequest,
        answer=StatementReply,
        run=show_statement,
        only_reads=True,
    ),
    Action(
        name="bank.usage",
        help="Sum up what was used.",
        request=UsageRequest,
        answer=UsageReply,
        run=show_usage,
        only_reads=True,
    ),
    Action(
        name="bank.holds",
        help="Show what money is spoken for.",
        request=HoldsRequest,
        answer=HoldsReply,
        run=list_holds,
        only_reads=True,
    ),
)


_MAX_DAYS: Final = 3700
"""Maximum length of a balance history, in days."""
_DEFAULT_PERIOD: Final = timedelta(days=90)
"""Default length of a balance history."""


class BalanceHistoryRequest(Request, frozen=True, kw_only=True):
    """Request of bank.course: balance and spending of an account, day by day.

    Attributes:
        account: The account; if it draws on another, that one's money is shown.
        since: Start, as people type times; "" for 90 days ago.
        until: End, likewise; "" for now.
        zone: IANA time zone of the times given and of the days; "" for the cluster's.
    """

    account: str
    since: str = ""
    until: str = ""
    zone: str = ""


class BalanceHistoryReply(BankReply, frozen=True, kw_only=True):
    """Reply with balance and spending, day by day.

    Attributes:
        payer: Account whose money it is.
        days: The days in order; the last may not be over.
        since: Start of the period.
        until: End of the period.
    """

    payer: str
    days: tuple[BalanceDay, ...]
    since: datetime
    until: datetime


def show_balance_history(
    room: BankContext, asker: Asker, request: BalanceHistoryRequest
) -> BalanceHistoryReply:
    """Return the daily balance history of the allocations an account draws on now.

    Raises:
        BankRefused: The caller may not see the account.
        BankUsage: The account does not exist, or the period is invalid or too long.
    """
    zone = request.zone or room.zone()
    now = room.now()
    until = min(now, room.moment(request.until, zone) or now)
    since = room.moment(request.since, zone) or until - _DEFAULT_PERIOD
    if not timedelta() < until - since <= timedelta(days=_MAX_DAYS):
        raise BankUsage(f"a course has from one to {_MAX_DAYS} days", request.since)
    account = request.account.lower()
    with room.ledger.reading() as t:
        room.rights(asker, t).need_sight(account)
        payer = t.accounts.payer(account)
        pots = [one.number for one in t.allocations.of(payer, ended=True) if one.begin <= now]
        days = t.course.days(pots, since, until, load_zone(zone))
    return BalanceHistoryReply(
        payer=payer, days=tuple(days), since=since, until=until, **room.heading()
    )


COURSE_ACTIONS: Final = (
    Action(
        name="bank.course",
        help="Show how an account's money went, day by day.",
        request=BalanceHistoryRequest,
        answer=BalanceHistoryReply,
        run=show_balance_history,
        only_reads=True,
    ),
)
