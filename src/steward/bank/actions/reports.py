"""The actions that show money: balances, statements, what was used, what is held."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.charged_jobs import names_of
from steward.bank.context import BankAnswer, BankRoom, Rights
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, CourseDay, Statement, UsageRow
from steward.bank.records import Hold
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.timestamps import moment
from steward.slurm.times import zone_called

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_MOST_HOLDS: Final = 100_000
_PAGE: Final = 1000

Grouping = Literal["account", "user", "partition", "month", "day", "cluster"]


class BalanceRequest(Request, frozen=True, kw_only=True):
    """bank.balance: what accounts have.

    Attributes:
        accounts: These; all that the asker is in or looks after if empty.
    """

    accounts: tuple[str, ...] = ()


class AccountBalance(Shape, frozen=True, kw_only=True):
    """What one account has.

    Attributes:
        account: The account.
        payer: Whose allocations pay: the account itself, or one above.
        balance: What the payer's allocations hold that can be drawn on now.
        credit: What the payer may owe.
        held: What is held for jobs that have not ended; None where the gate does not say.
        free: What a new job may cost; None where the gate does not say.
        user_limit: What the asker may spend of it; None for no limit.
        user_spent: What the asker has spent of it.
        closed: Whether nothing may be charged to it any more.
        known: Whether somebody created it; not if jobs were only charged to it.
        allocations: The payer's, in the order in which they are drawn on.
        remote_at: When a myBRC server elsewhere said what it has; None where none did.
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


class BalanceAnswer(BankAnswer, frozen=True, kw_only=True):
    """What accounts have.

    Attributes:
        accounts: By name.
        at: When that was so.
    """

    accounts: tuple[AccountBalance, ...]
    at: datetime


class StatementRequest(Request, frozen=True, kw_only=True):
    """bank.statement: what happened to an account's money, or by a user's jobs.

    Attributes:
        account: The account; "" for all that the asker looks after.
        user: Only what this user's jobs were charged; "" for everybody's.
        since: As people type times; "" for the beginning of the month.
        until: Likewise; "" for now.
        zone: IANA name of the zone that they are meant in; "" for the cluster's.
        limit: How many lines at the most, the latest of them; 0 for all.
        before: Only what was entered before the transfer of this number; 0 for all.
    """

    account: str = ""
    user: str = ""
    since: str = ""
    until: str = ""
    zone: str = ""
    limit: int = 0
    before: int = 0


class StatementAnswer(BankAnswer, frozen=True, kw_only=True):
    """What happened.

    Attributes:
        statement: Its lines, and the totals before and after.
        older: What to give as ``before`` for the lines before these; 0 where there are none.
        names: What Slurm calls array tasks and components, by the key of their charge.
    """

    statement: Statement
    older: int = 0
    names: dict[str, str]


class UsageRequest(Request, frozen=True, kw_only=True):
    """bank.usage: what was used, summed up.

    Attributes:
        by: What it is summed up by.
        accounts: Only of these; of all that the asker may see if empty.
        users: Only of these.
        since: Of runs that began since, as people type times; "" for the year's beginning.
        until: Likewise; "" for now.
        zone: IANA name of the zone of times and months; "" for the cluster's.
    """

    by: tuple[Grouping, ...] = ("user",)
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    zone: str = ""


class UsageAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was used.

    Attributes:
        rows: Months in order, else the largest first.
        total: Their sum.
        by: What it is summed up by.
        since: Beginning of the time looked at.
        until: Its end.
        is_all: Whether it is everybody's, and not only what the asker may see.
    """

    rows: tuple[UsageRow, ...]
    total: int
    by: tuple[str, ...]
    since: datetime
    until: datetime
    is_all: bool


class HoldsRequest(Request, frozen=True, kw_only=True):
    """bank.holds: money that is spoken for.

    Attributes:
        account: Only of this account.
        user: Only for this user's jobs.
        cluster: Only of this cluster's jobs.
        job_id: Only of this job.
    """

    account: str = ""
    user: str = ""
    cluster: str = ""
    job_id: int = 0


class HoldsAnswer(BankAnswer, frozen=True, kw_only=True):
    """Money that is spoken for.

    Attributes:
        holds: Oldest first.
        total: What they hold together.
    """

    holds: tuple[Hold, ...]
    total: int


def balance(room: BankRoom, asker: Asker, request: BalanceRequest) -> BalanceAnswer:
    """What accounts have: operators see all, others those that they are in or look after.

    Raises:
        BankRefused: The asker is in no such account.
        BankUsage: There is none.
    """
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in request.accounts:
            rights.need_sight(name.lower())
        if request.accounts:
            found = [_account(t, name.lower()) for name in request.accounts]
        else:
            found = [one for one in t.accounts.all(unknown=True) if rights.sees(one.name)]
        lines = [_balance(room, t, one.name, rights) for one in found]
    return BalanceAnswer(
        accounts=tuple(_with_holds(room, line, rights) for line in lines),
        at=room.now(),
        **room.heading(),
    )


def statement(room: BankRoom, asker: Asker, request: StatementRequest) -> StatementAnswer:
    """What happened to an account's money; to whoever only is in it, their own part.

    Raises:
        BankRefused: The asker may not see that.
        BankUsage: There is no such account, or a time cannot be read.
    """
    since = room.moment(request.since, request.zone) or _month(room, request.zone)
    until = room.moment(request.until, request.zone)
    account = request.account.lower()
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        if account:
            rights.need_sight(account)
            _account(t, account)
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
    names = names_of(room, dict.fromkeys(line.charge for line in found.lines if line.charge))
    return StatementAnswer(statement=found, older=older, names=names, **room.heading())


def usage(room: BankRoom, asker: Asker, request: UsageRequest) -> UsageAnswer:
    """What was used, summed up: of accounts that the asker looks after, and their own.

    Raises:
        BankRefused: It is about others' use.
        BankUsage: A time cannot be read, or nothing to sum up by was named.
    """
    zone = request.zone or room.zone()
    now = room.now()
    until = room.moment(request.until, zone) or now
    since = room.moment(request.since, zone) or _year(room, zone)
    if not request.by:
        raise BankUsage("say what to sum up by: --by user, partition, month, account or cluster")
    accounts = [name.lower() for name in request.accounts]
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in accounts:
            rights.need_sight(name)
        if not _all_led(rights, accounts) and (accounts or not rights.led):
            for user in request.users or ("",):
                rights.only_user("", user)
        rows = t.reading.usage(
            request.by,
            accounts=accounts or None,
            users=request.users or None,
            seen_by=None if rights.is_operator else (rights.user, rights.led),
            begin=since,
            end=until,
            zone=zone_called(zone),
        )
    ordered = sorted(rows, key=lambda row: (row.month, row.day, -row.amount, row.account, row.user))
    return UsageAnswer(
        rows=tuple(ordered),
        total=sum(row.amount for row in rows),
        by=request.by,
        since=since,
        until=until,
        is_all=rights.is_operator,
        **room.heading(),
    )


def holds(room: BankRoom, asker: Asker, request: HoldsRequest) -> HoldsAnswer:
    """Money that is spoken for: of accounts that the asker looks after, and their own jobs'.

    Raises:
        BankRefused: It is about others' jobs.
        GateUnavailable: The gate does not answer.
    """
    account = request.account.lower()
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
    found = all_holds(room, account, request.cluster, request.user, request.job_id)
    mine = [one for one in found if rights.leads(one.account) or _is_own(one, asker)]
    return HoldsAnswer(
        holds=tuple(sorted(mine, key=lambda one: (one.created_us, one.id))),
        total=sum(one.remaining for one in mine),
        **room.heading(),
    )


def all_holds(
    room: BankRoom, account: str = "", cluster: str = "", user: str = "", job_id: int = 0
) -> list[Hold]:
    """The open holds, page by page.

    Raises:
        GateUnavailable: The gate does not answer.
    """
    gate = room.gate
    found: list[Hold] = []
    after = ""
    while len(found) < _MOST_HOLDS:
        page = gate.holds(
            account=account, cluster=cluster, user=user, job_id=job_id, after=after, limit=_PAGE
        )
        found += page
        if len(page) < _PAGE:
            break
        after = page[-1].id
    return found


def _is_own(hold: Hold, asker: Asker) -> bool:
    return hold.uid == asker.uid or bool(asker.user and hold.user == asker.user)


def _all_led(rights: Rights, accounts: list[str]) -> bool:
    """Whether everybody's use of these accounts may be shown; of no account in particular, all."""
    return all(rights.leads(name) for name in accounts) if accounts else rights.is_operator


def _balance(room: BankRoom, t: "Transaction", account: str, rights: Rights) -> AccountBalance:
    now = room.now()
    own = _account(t, account)
    payer = t.accounts.payer(account)
    paying = _account(t, payer)
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
        allocations=tuple(sorted(pots, key=_drawn)),
    )


def _account(t: "Transaction", name: str) -> Account:
    """The account of a name, also one that nobody created and jobs were charged to.

    Raises:
        BankUsage: There is none.
    """
    return t.accounts.get(name) or t.accounts.need(name)


def _drawn(pot: Allocation) -> tuple[bool, float, int]:
    return pot.end is None, pot.end.timestamp() if pot.end else 0.0, pot.number


def _with_holds(room: BankRoom, line: AccountBalance, rights: Rights) -> AccountBalance:
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


def _month(room: BankRoom, zone: str) -> datetime:
    here = room.now().astimezone(zone_called(zone or room.zone()))
    begin = here.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(room.now().tzinfo)


def _year(room: BankRoom, zone: str) -> datetime:
    here = room.now().astimezone(zone_called(zone or room.zone()))
    begin = here.replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(room.now().tzinfo)


MONEY_ACTIONS: Final = (
    Action(
        name="bank.balance",
        help="Show what accounts have.",
        request=BalanceRequest,
        answer=BalanceAnswer,
        run=balance,
        only_reads=True,
    ),
    Action(
        name="bank.statement",
        help="Show what happened to an account's money.",
        request=StatementRequest,
        answer=StatementAnswer,
        run=statement,
        only_reads=True,
    ),
    Action(
        name="bank.usage",
        help="Sum up what was used.",
        request=UsageRequest,
        answer=UsageAnswer,
        run=usage,
        only_reads=True,
    ),
    Action(
        name="bank.holds",
        help="Show what money is spoken for.",
        request=HoldsRequest,
        answer=HoldsAnswer,
        run=holds,
        only_reads=True,
    ),
)


_MOST_DAYS: Final = 3700
_USUAL: Final = timedelta(days=90)


class CourseRequest(Request, frozen=True, kw_only=True):
    """bank.course: what an account had at the end of each day, and what it spent.

    Attributes:
        account: The account; of one that draws on another's money, that one's.
        since: As people type times; "" for 90 days ago.
        until: Likewise; "" for now.
        zone: IANA name of the zone that times are meant in, and days are cut in; "" for the
            cluster's.
    """

    account: str
    since: str = ""
    until: str = ""
    zone: str = ""


class CourseAnswer(BankAnswer, frozen=True, kw_only=True):
    """How it went.

    Attributes:
        payer: Whose money it is.
        days: Each day, the first first; the last may not be over.
        since: Beginning of the time looked at.
        until: Its end.
    """

    payer: str
    days: tuple[CourseDay, ...]
    since: datetime
    until: datetime


def course(room: BankRoom, asker: Asker, request: CourseRequest) -> CourseAnswer:
    """What the allocations that an account draws on now had at the end of each day.

    Raises:
        BankRefused: The asker may not see the account.
        BankUsage: There is none, or the time cannot be read or is too long.
    """
    zone = request.zone or room.zone()
    now = room.now()
    until = min(now, room.moment(request.until, zone) or now)
    since = room.moment(request.since, zone) or until - _USUAL
    if not timedelta() < until - since <= timedelta(days=_MOST_DAYS):
        raise BankUsage(f"a course has from one to {_MOST_DAYS} days", request.since)
    account = request.account.lower()
    with room.ledger.reading() as t:
        room.rights(asker, t).need_sight(account)
        payer = t.accounts.payer(account)
        pots = [one.number for one in t.allocations.of(payer, ended=True) if one.begin <= now]
        days = t.course.days(pots, since, until, zone_called(zone))
    return CourseAnswer(payer=payer, days=tuple(days), since=since, until=until, **room.heading())


COURSE_ACTIONS: Final = (
    Action(
        name="bank.course",
        help="Show how an account's money went, day by day.",
        request=CourseRequest,
        answer=CourseAnswer,
        run=course,
        only_reads=True,
    ),
)
