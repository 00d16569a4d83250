"""Bank reports: balances, statements, usage sums, open SU holds and daily balance history.

Read-only actions: ``bank.balance``, ``bank.statement``, ``bank.usage``, ``bank.holds`` and
``bank.balance_history``. Operators see everything; others see accounts they use or manage, and
their own jobs. Holds and available amounts come from the gate, everything else from the ledger.
Amounts are micro-SU.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, get_args

import msgspec

from steward.bank.actions.accounts import AccountNames
from steward.bank.context import (
    NO_ACCOUNTS,
    UNTIL,
    AccountFilter,
    BankContext,
    BankReply,
    ClusterFilter,
    Rights,
    UserFilter,
    annotate_since,
)
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, BalanceDay, Statement, StatementLine, UsageRow
from steward.bank.records import Hold, parse_charge_key
from steward.core.access import Caller
from steward.core.actions import (
    ActionMessage,
    Request,
    Zone,
    action,
    argument,
    described,
    option,
    route,
)
from steward.core.layouts import Column, Layout, Link, read_user
from steward.core.timestamps import from_micros
from steward.slurm.times import load_zone

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_PAGE_SIZE: Final = 1000
"""Number of holds fetched from the gate at once."""

Grouping = Literal["account", "user", "partition", "month", "day", "cluster"]
"""Columns that usage can be grouped by."""


class BalanceRequest(Request, frozen=True, kw_only=True):
    """Request of bank.balance: balances of accounts."""

    accounts: AccountNames = ()


class AccountBalance(ActionMessage, frozen=True, kw_only=True):
    """Balance of one account.

    Attributes:
        account: The account.
        payer: Account whose allocations pay: itself, or one above.
        balance: Sum of the payer's active allocations.
        credit_limit: Credit limit of the payer.
        holds: Sum of holds for unfinished jobs; None if the gate does not answer.
        available: Available amount for a new job; None if the gate does not answer.
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
    credit_limit: int = 0
    holds: int | None = None
    available: int | None = None
    user_limit: int | None = None
    user_spent: int = 0
    closed: bool = False
    known: bool = True
    allocations: tuple[Allocation, ...] = ()
    remote_at: datetime | None = None


def _read_spendable(row: AccountBalance, _: object) -> int | str:
    """Return what the caller may still spend."""
    return "no limit" if row.user_limit is None else row.user_limit - row.user_spent


def _read_first_end(row: AccountBalance, reply: "BalanceReply") -> datetime | None:
    """Return the end of the active allocation that ends first."""
    ends = (item.end for item in row.allocations if item.end and item.is_active(reply.at))
    return next(ends, None)


def _read_account_state(row: AccountBalance, _: object) -> str:
    return "closed" if row.closed else "" if row.known else "not created"


def _has_limits(reply: "BalanceReply") -> bool:
    return any(row.user_limit is not None for row in reply.accounts)


def _has_other_payers(reply: "BalanceReply") -> bool:
    return any(row.payer != row.account for row in reply.accounts)


class BalanceReply(BankReply, frozen=True, kw_only=True):
    """Reply with balances.

    Attributes:
        accounts: Balances by account name.
        at: Time of the balances.
    """

    accounts: tuple[AccountBalance, ...]
    at: datetime
    layout: ClassVar[Layout] = (
        Column("Account", "account", link="account"),
        Column("Payer", "payer", show=_has_other_payers, title="Paid by", link="account"),
        Column("Balance", "balance", "money"),
        Column("Holds", "holds", "money"),
        Column("CreditLimit", "credit_limit", "money", title="Credit limit", show="filled"),
        Column("Available", "available", "money"),
        Column(
            "Yours",
            _read_spendable,
            "money",
            show=_has_limits,
            title="Remaining for you",
            exact=lambda row, _: "" if row.user_limit is None else row.user_limit - row.user_spent,
        ),
        Column("FirstEnd", _read_first_end, "time", title="Ends"),
        Column("AsOf", "remote_at", "time", title="Balance read", show="filled"),
        Column("State", _read_account_state, show="filled"),
    )

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Time of the balances."""
        return self.at, self.at

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return NO_ACCOUNTS

    def list_notes(self) -> Iterable[str]:
        """Yield why there are no holds, and how to create unknown accounts."""
        if not all(account.known for account in self.accounts):
            yield (
                "Jobs were charged to an account that does not exist: "
                "'steward bank account create' creates it with these charges."
            )
        if any(account.available is None for account in self.accounts):
            yield "The gate does not answer: SU holds and available SU are unknown."


class StatementRequest(Request, frozen=True, kw_only=True):
    """Request of bank.statement: transactions of an account, or charges of a user's jobs."""

    account: Annotated[
        str,
        argument("Name of the account.", "ACCOUNT", default="with --user, all accounts"),
    ] = ""
    user: UserFilter = ""
    since: Annotated[str, annotate_since("Start of the period.", "the start of this month")] = ""
    until: Annotated[str, UNTIL] = ""
    zone: Zone = ""
    limit: Annotated[
        int, described("Maximum number of transactions; the newest are kept. 0 means all.", ge=0)
    ] = 0
    before: Annotated[int, described("Only transactions with a lower number; all if 0.", ge=0)] = 0


def _describe_line(line: StatementLine, reply: "StatementReply") -> str:
    """Return the job and why it was charged, or the reason of a manual transaction."""
    if not line.charge:
        return line.reason
    key_parts = parse_charge_key(line.charge)
    job_label = (
        f"job {reply.names.get(line.charge, str(key_parts[1]))}"
        if key_parts is not None
        else line.charge
    )
    return job_label if line.kind == "charge" else f"{job_label}: {line.reason}"


class StatementReply(BankReply, frozen=True, kw_only=True):
    """Reply with a statement.

    Attributes:
        statement: Its lines, with the balances before and after.
        older: Value of ``before`` for the next older page; 0 if there is none.
        names: Job ids in Slurm's notation for array tasks and components, by charge key.
        at: Time of the statement.
    """

    statement: Statement
    older: int = 0
    names: dict[str, str]
    at: datetime
    layout: ClassVar[Layout] = (
        Column("Time", "at", "time"),
        Column("Number", "number", show="pages", right=True),
        Column("Account", "account", show=lambda reply: not reply.statement.account),
        Column("Kind", "kind"),
        Column("User", "user"),
        Column(
            "Description",
            _describe_line,
            max_width=44,
            exact=lambda line, _: line.charge or line.reason,
        ),
        Column("Amount", "amount", "money"),
        Column("Balance", "balance", "money"),
        Column("Charge", "charge", show="requested"),
        Column("PostedBy", "posted_by", title="Posted by", show="pages"),
        Column("Reason", "reason", show="requested"),
    )

    @property
    def lines(self) -> tuple[StatementLine, ...]:
        """Lines of the statement."""
        return self.statement.lines

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period of the transactions."""
        end = self.statement.end or self.at
        return self.statement.begin or end, end

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No transactions in this period."

    def list_lines(self) -> Iterable[str]:
        """Yield the balance of the account at the end."""
        if self.statement.account and not self.statement.user:
            yield f"{self.format_with_unit(self.statement.closing)} at the end."


class UsageRequest(Request, frozen=True, kw_only=True):
    """Request of bank.usage: sums of charges."""

    by: Annotated[
        tuple[Grouping, ...],
        option(
            f"Columns to group by: {', '.join(get_args(Grouping))}.",
            "--by",
            metavar="COLUMN,…",
        ),
    ] = ("user",)
    accounts: AccountNames = ()
    users: Annotated[
        tuple[str, ...], option("Only jobs of these users.", "--user", "-u", metavar="NAME,…")
    ] = ()
    since: Annotated[
        str,
        annotate_since("Start of the period in which runs started.", "the start of this year"),
    ] = ""
    until: Annotated[str, UNTIL] = ""
    zone: Zone = ""


_GROUP_LINKS: Final[dict[str, Link]] = {
    "account": "account",
    "user": "user",
    "partition": "partition",
}
"""Pages of the values that rows are grouped by."""


def _make_group_column(name: str) -> Column:
    """Return the column of a value that rows are grouped by; "-" if empty."""
    return Column(
        name.capitalize(),
        lambda row, _: getattr(row, name) or "-",
        link=_GROUP_LINKS.get(name, ""),
        target=name,
    )


class UsageReply(BankReply, frozen=True, kw_only=True, dict=True):
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
    layout: ClassVar[Layout] = (
        Column("Charges", "charges", "count", title="Jobs charged", link="jobs"),
        Column("Used", "amount", "money"),
        Column("Share", lambda row, reply: reply.format_share(row), right=True),
        Column("Bar", lambda row, reply: row.amount / max(reply.largest, 1), "bar"),
    )

    def list_columns(self) -> Layout:
        """Return the columns grouped by, then those of the sums."""
        return (*map(_make_group_column, self.by), *self.layout)

    @cached_property
    def largest(self) -> int:
        """Largest amount of a row."""
        return max((row.amount for row in self.rows), default=0)

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period in which the runs started."""
        return self.since, self.until

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        visibility = "" if self.is_all else " to you or to accounts that you own or coordinate"
        return f"No run that started in this period was charged{visibility}."

    def list_notes(self) -> Iterable[str]:
        """Return the sum of the rows."""
        return (f"{self.format_with_unit(self.total)} in all.",) if self.rows else ()

    def format_share(self, row: UsageRow) -> str:
        """Return the share of a row in the total."""
        return f"{100 * row.amount / self.total:.1f}%" if self.total > 0 else ""


class HoldsRequest(Request, frozen=True, kw_only=True):
    """Request of bank.holds: open SU holds."""

    account: AccountFilter = ""
    user: UserFilter = ""
    cluster: ClusterFilter = ""
    job_id: Annotated[
        int, option("Only the job with this raw id.", "--jobs", "-j", metavar="ID", ge=0)
    ] = 0


def _read_hold_state(hold: Hold, _: object) -> str:
    if hold.started:
        return "running"
    return "queued" if hold.confirmed else "unconfirmed"


class HoldsReply(BankReply, frozen=True, kw_only=True):
    """Reply with open SU holds.

    Attributes:
        holds: The holds, oldest first.
        total: Sum of the holds.
    """

    holds: tuple[Hold, ...]
    total: int
    layout: ClassVar[Layout] = (
        Column("Since", lambda hold, _: from_micros(hold.created_us), "time"),
        Column("Cluster", "cluster", show="several"),
        Column(
            "JobID",
            lambda hold, _: hold.job_id or None,
            title="Job",
            link="job",
            right=True,
            is_key=True,
        ),
        Column("User", read_user),
        Column("Account", "account"),
        Column("Amount", "remaining", "money"),
        Column("AtFirst", "amount", "money", title="Amount placed", show="pages"),
        Column("State", _read_hold_state),
        Column("Origin", "origin", show="requested"),
        Column("Hold", "id", show="requested"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No SU holds: no queued or running job that you may see has one."

    def list_notes(self) -> Iterable[str]:
        """Return the sum of the holds."""
        return (f"{self.format_with_unit(self.total)} in all.",) if self.holds else ()


@action(
    "bank.balance",
    scope="read",
    command="bank balance",
    rows="accounts",
    routes=(
        route("GET /accounts/{account}/balance", parts={"account": "accounts"}),
        route("GET /balances", "Show the balances of all accounts."),
    ),
    only_reads=True,
)
def show_balances(context: BankContext, caller: Caller, request: BalanceRequest) -> BalanceReply:
    """Show account balances, holds and available SU.

    Balance is the sum of the active allocations. Holds is the sum of the SU holds of unfinished
    jobs. Available is the most that a new job may cost. Operators see all accounts, others those
    that they use or manage.

    Raises:
        BankRefused: The caller may not see an account.
        BankUsage: An account does not exist.
    """
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        for name in request.accounts:
            rights.require_balance_access(name.lower())
        if request.accounts:
            accounts = [_require_account(t, name.lower()) for name in request.accounts]
        else:
            accounts = [
                account
                for account in t.accounts.list_all(unknown=True)
                if rights.can_see_balance(account.name)
            ]
        lines = [_read_account_balance(context, t, account.name, rights) for account in accounts]
    return BalanceReply(
        accounts=tuple(_add_holds(context, line, rights) for line in lines),
        at=context.now(),
        **context.make_heading(),
    )


@action(
    "bank.statement",
    scope="read",
    command="bank statement",
    rows="lines",
    routes=(route("GET /accounts/{account}/statement"),),
    only_reads=True,
)
def show_statement(
    context: BankContext, caller: Caller, request: StatementRequest
) -> StatementReply:
    """Show the transactions of an account, with the balance after each.

    Owners, coordinators and operators see all transactions, other users the charges of their own
    jobs.

    Raises:
        BankRefused: The caller may not see it.
        BankUsage: The account does not exist, or a time is invalid.
    """
    from steward.bank.job_charges import map_job_names

    since = context.parse_moment(request.since, request.zone) or _get_month_start(
        context, request.zone
    )
    until = context.parse_moment(request.until, request.zone)
    account = request.account.lower()
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        if account:
            rights.require_balance_access(account)
            _require_account(t, account)
        elif not rights.is_operator and request.user != rights.user:
            raise BankRefused(
                f"no account given: name it, or give `user` {rights.user or 'NAME'} to see "
                "your own use in all accounts"
            )
        user = rights.limit_to_user(account, request.user)
        statement = t.queries.get_statement(
            account, user, since, until, request.limit, request.before
        )
    has_more = bool(request.limit) and len(statement.lines) == request.limit
    older = statement.lines[0].number if has_more else 0
    names = map_job_names(
        context, dict.fromkeys(line.charge for line in statement.lines if line.charge)
    )
    return StatementReply(
        statement=statement,
        older=older,
        names=names,
        at=context.now(),
        **context.make_heading(),
    )


@action(
    "bank.usage",
    scope="read",
    command="bank usage",
    rows="rows",
    routes=(route("GET /usage", "Sum up charges by user, account, partition, time or cluster."),),
    only_reads=True,
)
def show_usage(context: BankContext, caller: Caller, request: UsageRequest) -> UsageReply:
    """Sum up charges by user, account, partition, time or cluster.

    The sums are charges less refunds. Each bar shows a row as a share of the largest one. You see
    the accounts that you own or coordinate, and your own jobs; operators see everything.

    Raises:
        BankRefused: It is about the usage of others.
        BankUsage: A time is invalid, or no column to group by is named.
    """
    zone = request.zone or context.get_time_zone()
    now = context.now()
    until = context.parse_moment(request.until, zone) or now
    since = context.parse_moment(request.since, zone) or _get_year_start(context, zone)
    if not request.by:
        raise BankUsage("no grouping given: set `by` to user, partition, month, account or cluster")
    accounts = [name.lower() for name in request.accounts]
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        for name in accounts:
            rights.require_balance_access(name)
        for account in accounts or ([] if rights.led else [""]):
            for user in request.users or ("",):
                rights.limit_to_user(account, user)
        rows = t.queries.sum_usage(
            request.by,
            accounts=accounts or None,
            users=request.users or None,
            viewer=None if rights.is_operator else (rights.user, rights.led),
            begin=since,
            end=until,
            zone=load_zone(zone),
        )
    sorted_rows = sorted(
        rows, key=lambda row: (row.month, row.day, -row.amount, row.account, row.user)
    )
    return UsageReply(
        rows=tuple(sorted_rows),
        total=sum(row.amount for row in rows),
        by=request.by,
        since=since,
        until=until,
        is_all=rights.is_operator,
        **context.make_heading(),
    )


@action(
    "bank.holds",
    scope="read",
    command="bank holds",
    rows="holds",
    routes=(
        route("GET /accounts/{account}/holds"),
        route("GET /holds", "List SU holds of queued and running jobs."),
    ),
    only_reads=True,
)
def list_holds(context: BankContext, caller: Caller, request: HoldsRequest) -> HoldsReply:
    """List holds: service units reserved for queued and running jobs.

    A hold reserves the highest price of its job. At the end of the job, the bank releases the
    unused part. You see the holds of accounts that you own or coordinate, and of your own jobs.

    Raises:
        BankRefused: It is about jobs of others.
        GateUnavailable: The gate does not answer.
        UsageError: The cluster does not exist.
    """
    if request.cluster:
        from steward.jobs.queries import check_clusters, list_clusters

        check_clusters([request.cluster], list_clusters(context.settings))
    account = request.account.lower()
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
    holds = fetch_holds(context, account, request.cluster, request.user, request.job_id)
    visible = [hold for hold in holds if rights.is_led(hold.account) or _is_own(hold, caller)]
    return HoldsReply(
        holds=tuple(sorted(visible, key=lambda hold: (hold.created_us, hold.id))),
        total=sum(hold.remaining for hold in visible),
        **context.make_heading(),
    )


def fetch_holds(
    context: BankContext, account: str = "", cluster: str = "", user: str = "", job_id: int = 0
) -> list[Hold]:
    """List the open holds, fetched from the gate page by page.

    Raises:
        GateUnavailable: The gate does not answer.
    """
    gate = context.gate
    holds: list[Hold] = []
    after = ""
    while True:
        page = gate.list_holds(
            account=account,
            cluster=cluster,
            user=user,
            job_id=job_id,
            after=after,
            limit=_PAGE_SIZE,
        )
        holds += page
        if len(page) < _PAGE_SIZE:
            return holds
        after = page[-1].id


def _is_own(hold: Hold, caller: Caller) -> bool:
    """Return True if a hold is for the caller's own job."""
    return hold.uid == caller.uid or bool(caller.user and hold.user == caller.user)


def _read_account_balance(
    context: BankContext, t: "Transaction", account: str, rights: Rights
) -> AccountBalance:
    """Return the balance of one account, without the data of the gate."""
    now = context.now()
    bank_account = _require_account(t, account)
    payer = t.accounts.find_payer(account)
    payer_account = _require_account(t, payer)
    member = {item.user: item for item in t.accounts.list_users(account)}.get(rights.user)
    allocations = [
        item for item in t.allocations.list_own(payer) if item.is_active(now) or item.begin > now
    ]
    return AccountBalance(
        account=bank_account.name,
        payer=payer,
        balance=t.queries.get_balance(account),
        credit_limit=payer_account.credit_limit,
        user_limit=member.limit if member else None,
        user_spent=member.spent if member else 0,
        closed=bank_account.closed,
        known=bank_account.known,
        allocations=tuple(sorted(allocations, key=_get_spending_order)),
    )


def _require_account(t: "Transaction", name: str) -> Account:
    """Return an account by name, including one that exists only because of charges.

    Raises:
        BankUsage: The account does not exist.
    """
    return t.accounts.get(name) or t.accounts.require(name)


def _get_spending_order(allocation: Allocation) -> tuple[bool, float, int]:
    """Return the sort key for spending order: by end, the open-ended one last."""
    return (
        allocation.end is None,
        allocation.end.timestamp() if allocation.end else 0.0,
        allocation.number,
    )


def _add_holds(context: BankContext, balance: AccountBalance, rights: Rights) -> AccountBalance:
    """Add the gate's data to a balance: holds and available amount."""
    gate_balance = context.get_means(balance.account, rights.user)
    if gate_balance is None:
        return balance
    return msgspec.structs.replace(
        balance,
        holds=gate_balance.held,
        available=gate_balance.available,
        user_limit=gate_balance.user_limit,
        remote_at=from_micros(gate_balance.at_us) if gate_balance.at_us else None,
    )


def _get_month_start(context: BankContext, zone: str) -> datetime:
    """Return the beginning of the current month in a zone."""
    now = context.now().astimezone(load_zone(zone or context.get_time_zone()))
    begin = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(context.now().tzinfo)


def _get_year_start(context: BankContext, zone: str) -> datetime:
    """Return the beginning of the current year in a zone."""
    now = context.now().astimezone(load_zone(zone or context.get_time_zone()))
    begin = now.replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.astimezone(context.now().tzinfo)


_MAX_DAYS: Final = 3700
"""Maximum length of a balance history, in days."""
_DEFAULT_PERIOD: Final = timedelta(days=90)
"""Default length of a balance history."""


class BalanceHistoryRequest(Request, frozen=True, kw_only=True):
    """Request of bank.balance_history: balance and spending of an account, day by day."""

    account: Annotated[
        str, described("Name of the account; if a parent pays for it, the balance is the parent's.")
    ]
    since: Annotated[
        str, annotate_since("Start of the period.", f"{_DEFAULT_PERIOD.days} days ago")
    ] = ""
    until: Annotated[str, UNTIL] = ""
    zone: Zone = ""


class BalanceHistoryReply(BankReply, frozen=True, kw_only=True):
    """Reply with balance and spending, day by day.

    Attributes:
        payer: Account that pays.
        days: The days in order; the last may not be over.
        since: Start of the period.
        until: End of the period.
    """

    payer: str
    days: tuple[BalanceDay, ...]
    since: datetime
    until: datetime
    layout: ClassVar[Layout] = (
        Column("Day", "day"),
        Column("Used", "spent", "money"),
        Column("Balance", "balance", "money"),
    )


@action(
    "bank.balance_history",
    scope="read",
    routes=(route("GET /accounts/{account}/balance-history"),),
    only_reads=True,
)
def show_balance_history(
    context: BankContext, caller: Caller, request: BalanceHistoryRequest
) -> BalanceHistoryReply:
    """Show balance and spending of an account, day by day.

    The history is that of the allocations on which the account draws now.

    Raises:
        BankRefused: The caller may not see the account.
        BankUsage: The account does not exist, or the period is invalid or too long.
    """
    zone = request.zone or context.get_time_zone()
    now = context.now()
    until = min(now, context.parse_moment(request.until, zone) or now)
    since = context.parse_moment(request.since, zone) or until - _DEFAULT_PERIOD
    if not timedelta() < until - since <= timedelta(days=_MAX_DAYS):
        raise BankUsage(f"invalid period: give 1 to {_MAX_DAYS} days", request.since)
    account = request.account.lower()
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_balance_access(account)
        payer = t.accounts.find_payer(account)
        numbers = [
            allocation.number
            for allocation in t.allocations.list_own(payer, with_ended=True)
            if allocation.begin <= now
        ]
        days = t.balance_history.list_days(numbers, since, until, load_zone(zone))
    return BalanceHistoryReply(
        payer=payer, days=tuple(days), since=since, until=until, **context.make_heading()
    )
