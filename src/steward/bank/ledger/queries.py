"""Read-only ledger queries: balances, statements, usage sums, daily history, gate data.

- :class:`LedgerQueries`: what people ask for: balance, statement, usage by account, user and month.
- :class:`BalanceHistory`: the balance and spending of allocations, day by day.
- :func:`export_books`: the accounts, allocations and users that the gate needs.

Amounts are micro-SU; days and months are cut in the given zone. SQL groups by 15-minute interval
(:func:`quarter_hour_number`), because every database can do that and each interval belongs to one
day in every time zone.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any, Final

import msgspec
from sqlalchemy import (
    BigInteger,
    Select,
    and_,
    case,
    func,
    literal,
    or_,
    select,
    type_coerce,
    union,
)

from steward.bank.errors import BankUsage
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.postings import USAGE_KINDS, LedgerSession
from steward.bank.ledger.records import Account, BalanceDay, Statement, StatementLine, UsageRow
from steward.bank.ledger.tables import allocation, charge, member, posting, transaction
from steward.bank.records import AccountBooks, AllocationBooks, GateBooks, UserBooks
from steward.core.sqlalchemy_tables import decode_row
from steward.core.timestamps import from_micros, to_micros

_QUARTER_HOUR_US: Final = 900_000_000
"""Fifteen minutes, in microseconds: in every time zone, days begin at such a boundary."""


def quarter_hour_number(at_us: Any) -> Any:
    """Return the number of the 15-minute interval of a time in microseconds; also for columns."""
    return at_us // _QUARTER_HOUR_US


def quarter_hour_date(quarter: int, zone: tzinfo) -> date:
    """Return the date, in a zone, of a 15-minute interval."""
    return from_micros(quarter * _QUARTER_HOUR_US).astimezone(zone).date()


_BATCH_SIZE: Final = 500
"""Maximum number of names or numbers in one SQL condition."""

_GROUPS: Final[dict[str, Any]] = {
    "cluster": charge.c.cluster,
    "account": charge.c.account,
    "user": charge.c.user,
    "partition": charge.c.partition,
}
"""Columns that usage can be grouped by in SQL; month and day are computed."""


class LedgerQueries:
    """Balance, statement and usage queries.

    Args:
        session: The transaction.
        accounts: The accounts of the same transaction.
        allocations: The allocations of the same transaction.
    """

    def __init__(
        self, session: LedgerSession, accounts: Accounts, allocations: Allocations
    ) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations

    def get_balance(self, account: str, at: datetime | None = None) -> int:
        """Return the sum of the active allocations that pay for an account, in micro-SU.

        Credit limit and SU holds are not included.

        Args:
            account: The account; if its parent pays, the payer's allocations count.
            at: Balance at this time; None for now.

        Raises:
            BankUsage: The account does not exist.
        """
        payer = self._accounts.find_payer(account)
        time_of_balance = at or self._session.now()
        active = [
            allocation
            for allocation in self._allocations.list_own(payer, with_ended=True)
            if allocation.is_active(time_of_balance)
        ]
        if at is None:
            return sum(allocation.balance for allocation in active)
        query = (
            select(func.sum(posting.c.amount))
            .join(transaction, transaction.c.number == posting.c.transaction)
            .where(posting.c.allocation.in_([allocation.number for allocation in active]))
            .where(transaction.c.at <= at)
        )
        return int(self._session.fetch_value(query) or 0)

    def get_statement(
        self,
        account: str = "",
        user: str = "",
        begin: datetime | None = None,
        end: datetime | None = None,
        limit: int = 0,
        before: int = 0,
    ) -> Statement:
        """Return the transfers of a period with a running balance.

        For an account: its money, and what was charged to it where another account pays. For a
        user: the cost of the user's jobs, in one account or in all.

        Args:
            account: The account; "" for all of a user's.
            user: The user; "" for all of an account's.
            begin: Start of the period.
            end: End of the period, exclusive.
            limit: Maximum number of lines, the latest ones; 0 for all.
            before: Only transfers with a lower number than this; 0 for all.

        Raises:
            BankUsage: Neither account nor user is given, or the account does not exist.
        """
        if not account and not user:
            raise BankUsage("a statement needs an account or a user: name one of them")
        name = self._accounts.find_payer(account) and account.lower() if account else ""
        query = self._select_lines(name, user)
        if end is not None:
            query = query.where(transaction.c.at < end)
        if before:
            query = query.where(transaction.c.number < before)
        closing = int(
            self._session.fetch_value(query.with_only_columns(func.sum(posting.c.amount))) or 0
        )
        if begin is not None:
            query = query.where(transaction.c.at >= begin)
        statement_lines, total = [], closing
        for line in self._session.fetch(StatementLine, _select_latest(query, limit)):
            amount = int(line.amount)  # PostgreSQL's sums are decimals
            statement_lines.append(msgspec.structs.replace(line, amount=amount, balance=total))
            total -= amount
        statement_lines.reverse()
        return Statement(
            account=name,
            user=user,
            begin=begin,
            end=end,
            opening=total,
            closing=closing,
            lines=tuple(self._add_allocations(statement_lines)),
        )

    def sum_usage(
        self,
        by: Sequence[str],
        *,
        accounts: Sequence[str] | None = None,
        users: Sequence[str] | None = None,
        viewer: tuple[str, Collection[str]] | None = None,
        begin: datetime | None = None,
        end: datetime | None = None,
        zone: tzinfo = UTC,
    ) -> list[UsageRow]:
        """Sum up charges by any of cluster, account, user, partition, month and day.

        Args:
            by: Names of the columns to group by.
            accounts: Only these accounts; None for all.
            users: Only these users; None for all.
            viewer: A user and the accounts they lead: only their own charges and those accounts'.
            begin: Only runs that began at this time or later.
            end: Only runs that began before this time.
            zone: Time zone in which months and days are cut.

        Raises:
            BankUsage: A column cannot be grouped by.
        """
        unknown = set(by) - {*_GROUPS, "month", "day"}
        if unknown:
            columns = ", ".join((*_GROUPS, "month", "day"))
            raise BankUsage(
                f"cannot group usage by {min(unknown)!r}: use one of {columns}", min(unknown)
            )
        conditions: list[Any] = []
        if accounts is not None:
            conditions.append(charge.c.account.in_([value.lower() for value in accounts]))
        if users is not None:
            conditions.append(charge.c.user.in_(users))
        if viewer is not None:
            user, led = viewer
            conditions.append(or_(charge.c.user == user, charge.c.account.in_(led)))
        if begin is not None:
            conditions.append(charge.c.begin >= begin)
        if end is not None:
            conditions.append(charge.c.begin < end)
        groups: dict[str, Any] = {name: _GROUPS[name] for name in by if name in _GROUPS}
        if "month" in by:
            groups["month"] = self._month_expression(conditions, zone)
        if "day" in by:
            groups["day"] = quarter_hour_number(type_coerce(charge.c.begin, BigInteger))
        difference = charge.c.amount - charge.c.refunded
        net_amount = case((difference > 0, difference), else_=0)
        query = select(
            *(column.label(name) for name, column in groups.items()),
            func.sum(net_amount).label("amount"),
            func.count().label("charges"),
        ).where(*conditions)
        # By name: the month expression has parameters, so no database sees two uses as equal.
        rows = self._session.fetch_rows(query.group_by(*groups).order_by(*groups))
        usage_rows = [
            UsageRow(
                **{name: getattr(row, name) for name in groups if name != "day"},
                day=quarter_hour_date(int(row.day), zone).isoformat() if "day" in groups else "",
                amount=int(row.amount or 0),
                charges=row.charges,
            )
            for row in rows
        ]
        return _merge_by_day(usage_rows) if "day" in groups else usage_rows

    def _month_expression(self, conditions: Sequence[Any], zone: tzinfo) -> Any:
        """Return an SQL expression for the month of a run's start, from the month boundaries."""
        first = self._session.fetch_value(select(func.min(charge.c.begin)).where(*conditions))
        last = self._session.fetch_value(select(func.max(charge.c.begin)).where(*conditions))
        if first is None:
            return literal("")
        starts = _list_months(first, last, zone)
        return case(
            *((charge.c.begin >= start, literal(name)) for name, start in starts[::-1]),
            else_=literal(""),
        )

    def _select_lines(self, account: str, user: str) -> "Select[Any]":
        """Select the postings of a statement.

        The query uses the indexes on account and user: its cost depends on their postings, not
        on the size of the ledger.
        """
        spent = transaction.c.kind.in_(USAGE_KINDS)
        if user:
            condition = and_(transaction.c.user == user, spent)
            if account:
                condition = and_(condition, transaction.c.account == account)
        else:
            charged = and_(transaction.c.account == account, spent)
            transactions = select(posting.c.transaction).join(
                allocation, allocation.c.number == posting.c.allocation
            )
            numbers = union(
                transactions.where(allocation.c.account == account),
                select(transaction.c.number).where(charged),
            )
            condition = and_(
                transaction.c.number.in_(numbers), or_(allocation.c.account == account, charged)
            )
        return (
            select(transaction.c.number, posting.c.amount)
            .select_from(transaction)
            .join(posting, posting.c.transaction == transaction.c.number)
            .join(allocation, allocation.c.number == posting.c.allocation)
            .where(allocation.c.number > 0, condition)
        )

    def _add_allocations(self, lines: Sequence[StatementLine]) -> list[StatementLine]:
        """Add to each statement line the allocations it changed."""
        allocations: dict[int, list[int]] = {line.number: [] for line in lines}
        numbers = list(allocations)
        for start in range(0, len(numbers), _BATCH_SIZE):
            condition = posting.c.transaction.in_(numbers[start : start + _BATCH_SIZE])
            query = select(posting.c.transaction, posting.c.allocation).where(
                condition, posting.c.allocation > 0
            )
            for row in self._session.fetch_rows(
                query.order_by(posting.c.transaction, posting.c.allocation)
            ):
                allocations[row.transaction].append(row.allocation)
        return [
            msgspec.structs.replace(line, allocations=tuple(allocations[line.number]))
            for line in lines
        ]


def _merge_by_day(rows: Sequence[UsageRow]) -> list[UsageRow]:
    """Merge the rows of the same day."""
    days: dict[UsageRow, UsageRow] = {}
    for row in rows:
        group = msgspec.structs.replace(row, amount=0, charges=0)
        total = days.get(group, group)
        days[group] = msgspec.structs.replace(
            total, amount=total.amount + row.amount, charges=total.charges + row.charges
        )
    return sorted(days.values(), key=lambda row: row.day)


def _select_latest(postings: "Select[Any]", limit: int) -> "Select[Any]":
    """Select the lines of a statement, latest first, at most ``limit``; all for 0."""
    # Ledger transactions are numbered in the order of their times.
    sums = (
        postings.with_only_columns(transaction.c.number, func.sum(posting.c.amount).label("amount"))
        .group_by(transaction.c.number)
        .order_by(transaction.c.number.desc())
    )
    latest = (sums.limit(limit) if limit else sums).subquery()
    columns = (
        *(
            transaction.c.number,
            transaction.c.at,
            transaction.c.kind,
            transaction.c.posted_by,
            transaction.c.reason,
        ),
        *(
            transaction.c.account,
            transaction.c.user,
            func.coalesce(charge.c.key, ""),
            latest.c.amount,
        ),
    )
    return (
        select(*columns)
        .select_from(latest)
        .join(transaction, transaction.c.number == latest.c.number)
        .outerjoin(charge, charge.c.number == transaction.c.charge)
        .order_by(latest.c.number.desc())
    )


def _list_months(first: datetime, last: datetime, zone: tzinfo) -> list[tuple[str, datetime]]:
    """List the months from ``first`` to ``last`` with the time each begins in a zone."""
    start = first.astimezone(zone).replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)
    months = []
    while start.astimezone(UTC) <= last:
        months.append((f"{start:%Y-%m}", start.astimezone(UTC)))
        start = (start + timedelta(days=31)).replace(day=1)
    return months


class BalanceHistory:
    """Daily history of balance and spending.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def list_days(
        self, allocations: Sequence[int], begin: datetime, end: datetime, zone: tzinfo
    ) -> list[BalanceDay]:
        """Return balance at the end of each day, and the amount spent that day.

        Args:
            allocations: Numbers of the allocations.
            begin: A time in the first day.
            end: A time in the last day; the last row shows the balance at this time.
            zone: Time zone in which days are cut.
        """
        first = begin.astimezone(zone).date()
        midnight = datetime.combine(first, time(), zone).astimezone(UTC)
        changes = self._sum_by_quarter(allocations, midnight, end)
        balance = self._balance_before(allocations, midnight)
        history, day, index = [], first, 0
        while day <= end.astimezone(zone).date():
            next_day = day + timedelta(days=1)
            next_quarter = quarter_hour_number(to_micros(datetime.combine(next_day, time(), zone)))
            spent = 0
            while index < len(changes) and changes[index][0] < next_quarter:
                balance += changes[index][1]
                spent += changes[index][2]
                index += 1
            history.append(BalanceDay(day=day.isoformat(), balance=balance, spent=-spent))
            day = next_day
        return history

    def _balance_before(self, allocations: Sequence[int], at: datetime) -> int:
        """Return the balance of allocations before a time."""
        query = (
            select(func.sum(posting.c.amount))
            .join(transaction, transaction.c.number == posting.c.transaction)
            .where(posting.c.allocation.in_(allocations), transaction.c.at < at)
        )
        return int(self._session.fetch_value(query) or 0)

    def _sum_by_quarter(
        self, allocations: Sequence[int], begin: datetime, end: datetime
    ) -> list[tuple[int, int, int]]:
        """Sum postings by 15-minute interval: interval, amount moved, and part spent on jobs."""
        quarter = quarter_hour_number(type_coerce(transaction.c.at, BigInteger)).label("quarter")
        spent = case((transaction.c.kind.in_(USAGE_KINDS), posting.c.amount), else_=0)
        query = (
            select(
                quarter, func.sum(posting.c.amount).label("amount"), func.sum(spent).label("spent")
            )
            .select_from(transaction)
            .join(posting, posting.c.transaction == transaction.c.number)
            .join(allocation, allocation.c.number == posting.c.allocation)
            .where(allocation.c.number.in_(allocations))
            .where(transaction.c.at >= begin, transaction.c.at < end)
            .group_by(quarter)
            .order_by(quarter)
        )
        return [
            (int(row.quarter), int(row.amount), int(row.spent))
            for row in self._session.fetch_rows(query)
        ]


def export_books(session: LedgerSession, accounts: Accounts, after_seq: int) -> GateBooks:
    """Return the accounts that changed after a sequence number; all of them for 0.

    Also all of them if the number is ahead of the ledger, which then is an older ledger
    restored from a backup.
    """
    session.store_touched()
    is_full = after_seq <= 0 or after_seq > session.seq
    by_name = {
        account.name: account for account in accounts.list_changed(0 if is_full else after_seq)
    }
    created = [account for account in by_name.values() if account.known]
    _add_payers(by_name, accounts)
    books = GateBooks(
        seq=session.seq, accounts=tuple(_attach_money(session, created, by_name)), whole=is_full
    )
    return books if is_full else msgspec.structs.replace(books, after=after_seq)


def _add_payers(by_name: dict[str, Account], accounts: Accounts) -> None:
    """Add the ancestors that pay for these accounts."""
    pending = list(by_name.values())
    while pending:
        account = pending.pop()
        if account.parent_pays and account.parent not in by_name:
            parent = accounts.get(account.parent)
            if parent is not None:
                by_name[parent.name] = parent
                pending.append(parent)


def _attach_money(
    session: LedgerSession, created: list[Account], by_name: dict[str, Account]
) -> list[AccountBooks]:
    """Add allocations and users to accounts, in the form the gate gets."""
    allocations: dict[str, list[AllocationBooks]] = defaultdict(list)
    users: dict[str, list[UserBooks]] = defaultdict(list)
    # Ended allocations matter while not yet emptied: jobs that started on them may draw.
    live = or_(
        allocation.c.end.is_(None), allocation.c.end > session.now(), allocation.c.balance != 0
    )
    begin_us, end_us = (
        type_coerce(allocation.c.begin, BigInteger),
        type_coerce(allocation.c.end, BigInteger),
    )
    columns = (
        allocation.c.number,
        allocation.c.balance,
        begin_us,
        func.coalesce(end_us, 0),
        allocation.c.granted,
    )
    query = select(*columns, allocation.c.account).order_by(
        allocation.c.end.is_(None), allocation.c.end, allocation.c.number
    )
    members = select(
        member.c.user, member.c.limit, member.c.spent, member.c.account, member.c.listed
    )
    for start in range(0, len(created), _BATCH_SIZE):
        names = [account.name for account in created[start : start + _BATCH_SIZE]]
        for row in session.fetch_rows(query.where(allocation.c.account.in_(names), live)):
            allocations[row.account].append(decode_row(AllocationBooks, row))
        query = members.where(member.c.account.in_(names)).order_by(member.c.user)
        for row in session.fetch_rows(query):
            if row.listed or not by_name[row.account].only_listed:
                users[row.account].append(decode_row(UserBooks, row))
    return [
        AccountBooks(
            name=account.name,
            payer=_find_payer(account, by_name),
            credit=account.credit_limit,
            closed=account.closed,
            allocations=tuple(allocations[account.name]),
            users=tuple(users[account.name]),
            only_listed=account.only_listed,
            owners=tuple(account.owners),
        )
        for account in created
    ]


def _find_payer(account: Account, by_name: dict[str, Account]) -> str:
    """Return the name of the account that pays for an account."""
    visited = set()
    while account.parent_pays and account.parent in by_name and account.name not in visited:
        visited.add(account.name)
        account = by_name[account.parent]
    return account.name
