"""What people ask of the ledger: balances, statements, and what was used by whom."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any, Final

import msgspec
from sqlalchemy import Row, Select, and_, case, func, literal, or_, select, union

from steward.bank.errors import BankUsage
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.postings import SPENDING, Session, clean
from steward.bank.ledger.records import Account, CourseDay, Statement, StatementLine, UsageRow
from steward.bank.ledger.tables import act, charge, entry, member, pot
from steward.bank.records import AccountBooks, AllocationBooks, Books, UserBooks
from steward.core.timestamps import micros, moment

_QUARTER_US: Final = 900_000_000
"""No zone's days begin within a quarter of an hour."""


def quarter_of(at_us: Any) -> Any:
    """The quarter of an hour that a column's moments are in, to group by: its number."""
    return at_us // _QUARTER_US


def day_of(quarter: int, zone: tzinfo) -> date:
    """The day that a quarter of an hour is of, in a zone."""
    return moment(quarter * _QUARTER_US).astimezone(zone).date()


_AT_ONCE: Final = 500

_GROUPS: Final[dict[str, Any]] = {
    "cluster": charge.c.cluster,
    "account": charge.c.account,
    "user": charge.c.user_name,
    "partition": charge.c.partition_name,
}


class Reading:
    """Questions that change nothing.

    Args:
        session: The transaction.
        accounts: The accounts in it.
        allocations: The allocations in it.
    """

    def __init__(self, session: Session, accounts: Accounts, allocations: Allocations) -> None:
        self._session = session
        self._accounts = accounts
        self._allocations = allocations

    def balance(self, account: str, at: datetime | None = None) -> int:
        """What is in the allocations that an account can draw on, micro-SU.

        Credit and holds are not in it.

        Args:
            account: The account; its payer's allocations count.
            at: As it was then; now if None.

        Raises:
            BankUsage: There is no such account.
        """
        payer = self._accounts.payer(account)
        when = at or self._session.now()
        active = [each for each in self._allocations.of(payer, ended=True) if each.active(when)]
        if at is None:
            return sum(each.balance for each in active)
        chosen = (
            select(func.sum(entry.c.amount))
            .join(act, act.c.number == entry.c.act)
            .where(entry.c.pot.in_([each.number for each in active]))
            .where(act.c.at_us <= micros(at))
        )
        return int(self._session.value(chosen) or 0)

    def statement(
        self,
        account: str = "",
        user: str = "",
        begin: datetime | None = None,
        end: datetime | None = None,
        limit: int = 0,
        before: int = 0,
    ) -> Statement:
        """What happened in a period, with the running total.

        Of an account: its money, and what was charged to it where another pays. Of a user:
        what the user's jobs cost, in one account or in all.

        Args:
            account: The account; "" for all of a user's.
            user: The user; "" for all of an account's.
            begin: From when on.
            end: Until before when.
            limit: How many lines at the most, the latest of them; 0 for all.
            before: Only what was entered before the transfer of this number; 0 for all.

        Raises:
            BankUsage: Neither account nor user is named, or there is no such account.
        """
        if not account and not user:
            raise BankUsage("a statement is of an account or of a user: name one of them")
        name = self._accounts.payer(account) and account.lower() if account else ""
        lines = self._lines(name, clean(user))
        if end is not None:
            lines = lines.where(act.c.at_us < micros(end))
        if before:
            lines = lines.where(act.c.number < before)
        closing = int(self._session.value(lines.with_only_columns(func.sum(entry.c.amount))) or 0)
        if begin is not None:
            lines = lines.where(act.c.at_us >= micros(begin))
        made, total = [], closing
        for row in self._session.rows(_latest(lines, limit)):
            made.append(_line(row, total))
            total -= int(row.amount)
        made.reverse()
        return Statement(
            account=name,
            user=user,
            begin=begin,
            end=end,
            opening=total,
            closing=closing,
            lines=tuple(self._with_allocations(made)),
        )

    def usage(
        self,
        by: Sequence[str],
        *,
        accounts: Sequence[str] | None = None,
        users: Sequence[str] | None = None,
        seen_by: tuple[str, Collection[str]] | None = None,
        begin: datetime | None = None,
        end: datetime | None = None,
        zone: tzinfo = UTC,
    ) -> list[UsageRow]:
        """What was charged, summed up by any of cluster, account, user, partition, month, day.

        Args:
            by: What to group by.
            accounts: Of these accounts alone.
            users: Of these users alone.
            seen_by: What this user may see alone: their own, and all of the accounts they lead.
            begin: Of runs that began then or later.
            end: Of runs that began before.
            zone: The zone that months and days are cut in.

        Raises:
            BankUsage: It cannot be grouped by that.
        """
        unknown = set(by) - {*_GROUPS, "month", "day"}
        if unknown:
            raise BankUsage(f"usage cannot be grouped by {min(unknown)}", min(unknown))
        conditions: list[Any] = []
        if accounts is not None:
            conditions.append(charge.c.account.in_([clean(each.lower()) for each in accounts]))
        if users is not None:
            conditions.append(charge.c.user_name.in_([clean(each) for each in users]))
        if seen_by is not None:
            user, led = seen_by
            own = charge.c.user_name == clean(user)
            conditions.append(or_(own, charge.c.account.in_([clean(each) for each in led])))
        if begin is not None:
            conditions.append(charge.c.begin_us >= micros(begin))
        if end is not None:
            conditions.append(charge.c.begin_us < micros(end))
        groups: dict[str, Any] = {name: _GROUPS[name] for name in by if name in _GROUPS}
        if "month" in by:
            groups["month"] = self._month(conditions, zone)
        if "day" in by:
            groups["day"] = quarter_of(charge.c.begin_us)
        kept = charge.c.amount - charge.c.refunded
        due = case((kept > 0, kept), else_=0)
        chosen = select(
            *(column.label(name) for name, column in groups.items()),
            func.sum(due).label("amount"),
            func.count().label("charges"),
        ).where(*conditions)
        # By name: the expression of the month has parameters, which no database takes for equal.
        rows = self._session.rows(chosen.group_by(*groups).order_by(*groups))
        found = [
            UsageRow(
                **{name: getattr(row, name) for name in groups if name != "day"},
                day=day_of(int(row.day), zone).isoformat() if "day" in groups else "",
                amount=int(row.amount or 0),
                charges=row.charges,
            )
            for row in rows
        ]
        return _by_day(found) if "day" in groups else found

    def _month(self, conditions: Sequence[Any], zone: tzinfo) -> Any:
        """The month in which a run began, as the database can tell it: by where months begin."""
        first = self._session.value(select(func.min(charge.c.begin_us)).where(*conditions))
        last = self._session.value(select(func.max(charge.c.begin_us)).where(*conditions))
        if first is None:
            return literal("")
        starts = _months(moment(first), moment(last), zone)
        return case(
            *((charge.c.begin_us >= micros(start), literal(name)) for name, start in starts[::-1]),
            else_=literal(""),
        )

    def _lines(self, account: str, user: str) -> "Select[Any]":
        """The entries that a statement is made of.

        What is looked for is found by the indexes of what it is about: however large the
        ledger is, a statement costs as much as its own account or user has entries.
        """
        spent = act.c.kind.in_(SPENDING)
        if user:
            mine = and_(act.c.user_name == user, spent)
            if account:
                mine = and_(mine, act.c.account == account)
        else:
            charged = and_(act.c.account == account, spent)
            moved = select(entry.c.act).join(pot, pot.c.number == entry.c.pot)
            known = union(
                moved.where(pot.c.account == account), select(act.c.number).where(charged)
            )
            mine = and_(act.c.number.in_(known), or_(pot.c.account == account, charged))
        return (
            select(act.c.number, entry.c.amount)
            .select_from(act)
            .join(entry, entry.c.act == act.c.number)
            .join(pot, pot.c.number == entry.c.pot)
            .where(pot.c.number > 0, mine)
        )

    def _with_allocations(self, lines: Sequence[StatementLine]) -> list[StatementLine]:
        touched: dict[int, list[int]] = {each.number: [] for each in lines}
        numbers = list(touched)
        for start in range(0, len(numbers), _AT_ONCE):
            some = entry.c.act.in_(numbers[start : start + _AT_ONCE])
            chosen = select(entry.c.act, entry.c.pot).where(some, entry.c.pot > 0)
            for row in self._session.rows(chosen.order_by(entry.c.act, entry.c.pot)):
                touched[row.act].append(row.pot)
        return [
            msgspec.structs.replace(each, allocations=tuple(touched[each.number])) for each in lines
        ]


def _by_day(rows: Sequence[UsageRow]) -> list[UsageRow]:
    """The rows of the same day as one."""
    days: dict[UsageRow, UsageRow] = {}
    for row in rows:
        what = msgspec.structs.replace(row, amount=0, charges=0)
        so_far = days.get(what, what)
        days[what] = msgspec.structs.replace(
            so_far, amount=so_far.amount + row.amount, charges=so_far.charges + row.charges
        )
    return sorted(days.values(), key=lambda row: row.day)


def _latest(entries: "Select[Any]", limit: int) -> "Select[Any]":
    """What was done by the latest of the acts that entries belong to; by all for limit 0."""
    # Transfers are numbered in the order of their times.
    last = (
        entries.with_only_columns(act.c.number, func.sum(entry.c.amount).label("amount"))
        .group_by(act.c.number)
        .order_by(act.c.number.desc())
    )
    some = (last.limit(limit) if limit else last).subquery()
    columns = (
        *(act.c.number, act.c.at_us, act.c.kind, act.c.who, act.c.why),
        *(act.c.account, act.c.user_name, charge.c.key, some.c.amount),
    )
    return (
        select(*columns)
        .select_from(some)
        .join(act, act.c.number == some.c.number)
        .outerjoin(charge, charge.c.number == act.c.charge)
        .order_by(some.c.number.desc())
    )


def _line(row: "Row[Any]", balance: int) -> StatementLine:
    return StatementLine(
        number=row.number,
        at=moment(row.at_us),
        kind=row.kind,
        who=row.who,
        why=row.why,
        account=row.account,
        user=row.user_name,
        charge=row.key or "",
        amount=int(row.amount),
        balance=balance,
    )


def _months(first: datetime, last: datetime, zone: tzinfo) -> list[tuple[str, datetime]]:
    """Every month from the one of ``first`` to that of ``last``, and when it begins in a zone."""
    start = first.astimezone(zone).replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)
    found = []
    while start.astimezone(UTC) <= last:
        found.append((f"{start:%Y-%m}", start.astimezone(UTC)))
        start = (start + timedelta(days=31)).replace(day=1)
    return found


class Course:
    """Questions about the past of an account's money.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def days(
        self, allocations: Sequence[int], begin: datetime, end: datetime, zone: tzinfo
    ) -> list[CourseDay]:
        """What was in allocations at the end of each day, and what was spent of it that day.

        Args:
            allocations: Their numbers.
            begin: In the first day.
            end: In the last day, whose end it stands for.
            zone: The zone that days are cut in.
        """
        first = begin.astimezone(zone).date()
        midnight = datetime.combine(first, time(), zone).astimezone(UTC)
        moved = self._moved(allocations, midnight, end)
        balance = self._before(allocations, midnight)
        found, day, place = [], first, 0
        while day <= end.astimezone(zone).date():
            morrow = day + timedelta(days=1)
            until = quarter_of(micros(datetime.combine(morrow, time(), zone)))
            spent = 0
            while place < len(moved) and moved[place][0] < until:
                balance += moved[place][1]
                spent += moved[place][2]
                place += 1
            found.append(CourseDay(day=day.isoformat(), balance=balance, spent=-spent))
            day = morrow
        return found

    def _before(self, allocations: Sequence[int], at: datetime) -> int:
        chosen = (
            select(func.sum(entry.c.amount))
            .join(act, act.c.number == entry.c.act)
            .where(entry.c.pot.in_(allocations), act.c.at_us < micros(at))
        )
        return int(self._session.value(chosen) or 0)

    def _moved(
        self, allocations: Sequence[int], begin: datetime, end: datetime
    ) -> list[tuple[int, int, int]]:
        """What moved in each quarter of an hour, and what of it was spent on jobs."""
        quarter = quarter_of(act.c.at_us).label("quarter")
        spent = case((act.c.kind.in_(SPENDING), entry.c.amount), else_=0)
        chosen = (
            select(
                quarter, func.sum(entry.c.amount).label("amount"), func.sum(spent).label("spent")
            )
            .select_from(act)
            .join(entry, entry.c.act == act.c.number)
            .join(pot, pot.c.number == entry.c.pot)
            .where(pot.c.number.in_(allocations))
            .where(act.c.at_us >= micros(begin), act.c.at_us < micros(end))
            .group_by(quarter)
            .order_by(quarter)
        )
        return [
            (int(row.quarter), int(row.amount), int(row.spent))
            for row in self._session.rows(chosen)
        ]


def books(session: Session, accounts: Accounts, after_seq: int) -> Books:
    """The accounts that have changed after a position; all of them for 0.

    All of them also where the position is ahead of the ledger, which then is an older
    one that was put back.
    """
    session.show_touched()
    whole = after_seq <= 0 or after_seq > session.seq
    known = {each.name: each for each in accounts.changed(0 if whole else after_seq)}
    wanted = [each for each in known.values() if each.known]
    _add_payers(known, accounts)
    made = Books(
        seq=session.seq,
        accounts=tuple(_with_money(session, wanted, known)),
        whole=whole,
    )
    return made if whole else msgspec.structs.replace(made, after=after_seq)


def _add_payers(known: dict[str, Account], accounts: Accounts) -> None:
    """Add the accounts that others draw on, as far up as money is drawn."""
    missing = list(known.values())
    while missing:
        each = missing.pop()
        if each.draws_on_parent and each.parent not in known:
            above = accounts.get(each.parent)
            if above is not None:
                known[above.name] = above
                missing.append(above)


def _with_money(
    session: Session, wanted: list[Account], known: dict[str, Account]
) -> list[AccountBooks]:
    allocations: dict[str, list[AllocationBooks]] = defaultdict(list)
    users: dict[str, list[UserBooks]] = defaultdict(list)
    now_us = micros(session.now())
    for start in range(0, len(wanted), _AT_ONCE):
        names = [each.name for each in wanted[start : start + _AT_ONCE]]
        # Of those that have ended only what is not emptied yet: started jobs may draw on it.
        live = or_(pot.c.end_us.is_(None), pot.c.end_us > now_us, pot.c.balance != 0)
        pots = select(pot).where(pot.c.account.in_(names), live)
        for row in session.rows(pots.order_by(pot.c.end_us.is_(None), pot.c.end_us, pot.c.number)):
            allocations[row.account].append(_allocation(row))
        members = select(member).where(member.c.account.in_(names))
        for row in session.rows(members.order_by(member.c.name)):
            if row.listed or not known[row.account].only_listed:
                users[row.account].append(
                    UserBooks(name=row.name, limit=row.limit_amount, spent=row.spent)
                )
    return [
        AccountBooks(
            name=each.name,
            payer=_payer(each, known),
            credit=each.credit,
            closed=each.closed,
            allocations=tuple(allocations[each.name]),
            users=tuple(users[each.name]),
            only_listed=each.only_listed,
            owners=tuple(each.owners),
        )
        for each in wanted
    ]


def _allocation(row: "Row[Any]") -> AllocationBooks:
    return AllocationBooks(
        number=row.number,
        balance=row.balance,
        begin_us=row.begin_us,
        end_us=row.end_us or 0,
        total=row.given,
    )


def _payer(each: Account, known: dict[str, Account]) -> str:
    passed = set()
    while each.draws_on_parent and each.parent in known and each.name not in passed:
        passed.add(each.name)
        each = known[each.parent]
    return each.name
