"""Ledger proof: recompute sums and compare them with the stored values.

:func:`verify_ledger` runs all parts: schema and triggers, postings that sum to zero, balances,
charges, amounts spent by users, the account tree, and gapless numbering. It backs
``steward bank check``. SU holds belong to the gate and are compared with live jobs elsewhere.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import sqlalchemy
from sqlalchemy import Row, and_, case, func, or_, select

from steward.bank.ledger.postings import USAGE_KINDS, LedgerSession
from steward.bank.ledger.records import LedgerFinding, Member
from steward.bank.ledger.tables import (
    APPEND_ONLY,
    NEWEST_REVISION,
    StoredAllocation,
    account,
    allocation,
    charge,
    charge_version,
    member,
    posting,
    read_revision,
    settlement,
    state,
    transaction,
)
from steward.core.sqlalchemy_tables import decode_row

_MAX_FINDINGS: Final = 1000
"""Most findings of one kind that are reported; more add no information."""


def verify_ledger(session: LedgerSession) -> list[LedgerFinding]:
    """Run all checks; return the findings, none if the ledger is consistent."""
    findings: list[LedgerFinding] = []
    for check in _CHECKS:
        findings += check(session)
    return findings


def _check_schema(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Check the schema revision, the file, and the triggers of append-only tables."""
    revision = read_revision(session.connection)
    if revision != NEWEST_REVISION:
        yield LedgerFinding(
            kind="schema", finding=f"the schema is {revision!r}, not {NEWEST_REVISION}"
        )
    if session.connection.dialect.name == "sqlite":
        result = session.connection.exec_driver_sql("PRAGMA quick_check").scalar()
        if result != "ok":
            yield LedgerFinding(kind="damage", finding=f"the file is damaged: {result}")
        names = "SELECT tbl_name FROM sqlite_master WHERE type = 'trigger'"
        expected = 2
    else:
        names = (
            "SELECT tgrelid::regclass::text FROM pg_trigger "
            "WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')"
        )
        expected = 1
    triggers = [str(name) for name in session.connection.exec_driver_sql(names).scalars()]
    for table in APPEND_ONLY:
        # Settlements may be deleted once the gate has applied them.
        if triggers.count(table) < (1 if table == settlement.name else expected):
            yield LedgerFinding(kind="schema", finding=f"no trigger protects {table} from changes")


def _check_zero_sums(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Check that postings sum to zero, by transaction and in total."""
    sums = (
        select(posting.c.transaction, func.sum(posting.c.amount).label("amount"))
        .group_by(posting.c.transaction)
        .having(func.sum(posting.c.amount) != 0)
    )
    for row in _fetch_findings(session, sums):
        yield _make_finding(
            "unbalanced", f"its postings sum to {int(row.amount)}", "transfer", row.transaction
        )
    moved = ("deposit", "withdraw", "transfer", "expire", "rollover", "adjust", *USAGE_KINDS)
    without_entries = (
        select(transaction.c.number)
        .outerjoin(posting, posting.c.transaction == transaction.c.number)
        .where(transaction.c.kind.in_(moved), posting.c.transaction.is_(None))
    )
    for row in _fetch_findings(session, without_entries):
        yield _make_finding("unbalanced", "it has no postings", "transfer", row.number)
    total = session.fetch_value(select(func.sum(allocation.c.balance)))
    if total:
        yield LedgerFinding(kind="unbalanced", finding=f"all balances sum to {int(total)}, not 0")


def _check_balances(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Compare the balances of allocations with their postings."""
    is_given = or_(
        transaction.c.kind.in_(("deposit", "withdraw", "transfer", "adjust")),
        and_(transaction.c.kind == "rollover", posting.c.amount > 0),
    )
    sums = (
        select(
            posting.c.allocation,
            func.sum(posting.c.amount).label("amount"),
            func.sum(case((is_given, posting.c.amount), else_=0)).label("given"),
            func.max(posting.c.transaction).label("last"),
        )
        .join(transaction, transaction.c.number == posting.c.transaction)
        .group_by(posting.c.allocation)
        .subquery()
    )
    last = posting.alias()
    rows = session.fetch_rows(
        select(allocation, sums.c.amount, sums.c.given, last.c.balance)
        .outerjoin(sums, sums.c.allocation == allocation.c.number)
        .outerjoin(
            last, and_(last.c.allocation == allocation.c.number, last.c.transaction == sums.c.last)
        )
    )
    for row in rows:
        stored, (amount, given, last_balance) = decode_row(StoredAllocation, row), row[-3:]
        number, balance = stored.number, stored.balance
        if balance != int(amount or 0):
            problem = f"its balance is {balance}, its postings sum to {int(amount or 0)}"
            yield _make_finding("balance", problem, "allocation", number)
        if last_balance is not None and last_balance != balance:
            problem = f"its balance is {balance}, its last posting shows {last_balance}"
            yield _make_finding("balance", problem, "allocation", number)
        if number > 0 and stored.granted != int(given or 0):
            problem = f"its granted amount is {stored.granted}, its postings show {int(given or 0)}"
            yield _make_finding("balance", problem, "allocation", number)
        if stored.end is not None and balance < 0:
            yield _make_finding("below zero", f"its balance is {balance}", "allocation", number)


def _check_charges(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Compare charges with their transfers, refunds and versions."""
    used = (
        select(
            transaction.c.charge,
            func.sum(-posting.c.amount).label("paid"),
            func.sum(case((transaction.c.kind == "refund", posting.c.amount), else_=0)).label(
                "back"
            ),
        )
        .join(posting, posting.c.transaction == transaction.c.number)
        .where(transaction.c.charge.is_not(None), posting.c.allocation > 0)
        .group_by(transaction.c.charge)
        .subquery()
    )
    posted = (
        select(charge_version.c.charge_number, func.count().label("versions"))
        .group_by(charge_version.c.charge_number)
        .subquery()
    )
    due = case((charge.c.amount > charge.c.refunded, charge.c.amount - charge.c.refunded), else_=0)
    wrong = (
        select(charge.c.key, due.label("due"), used.c.paid, posted.c.versions)
        .outerjoin(used, used.c.charge == charge.c.number)
        .outerjoin(posted, posted.c.charge_number == charge.c.number)
        .where(
            or_(
                due != func.coalesce(used.c.paid, 0),
                charge.c.refunded != func.coalesce(used.c.back, 0),
                charge.c.versions != func.coalesce(posted.c.versions, 0),
            )
        )
    )
    for row in _fetch_findings(session, wrong):
        problem = f"its amount is {row.due}, its postings sum to {int(row.paid or 0)}"
        yield _make_finding("charge", problem, "charge", row.key)
    orphans = (
        select(transaction.c.number)
        .outerjoin(charge, charge.c.number == transaction.c.charge)
        .where(transaction.c.charge.is_not(None), charge.c.number.is_(None))
    )
    for row in _fetch_findings(session, orphans):
        yield _make_finding("charge", "its charge is missing", "transfer", row.number)


def _check_spent(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Compare the amounts spent by users with the postings."""
    query = (
        select(
            transaction.c.account, transaction.c.user, func.sum(-posting.c.amount).label("spent")
        )
        .join(posting, posting.c.transaction == transaction.c.number)
        .where(
            transaction.c.kind.in_(USAGE_KINDS), posting.c.allocation > 0, transaction.c.user != ""
        )
        .group_by(transaction.c.account, transaction.c.user)
    )
    summed = {(name, user): int(spent) for name, user, spent in session.fetch_rows(query)}
    members = session.fetch(Member, select(member))
    stored = {(member.account, member.user): member.spent for member in members}
    for key in sorted(summed.keys() | stored.keys()):
        if summed.get(key, 0) != stored.get(key, 0):
            problem = f"spent {stored.get(key, 0)}, the postings show {summed.get(key, 0)}"
            yield _make_finding("spent", problem, "user", f"{key[1]} of {key[0]}")


def _check_accounts(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Check the account tree, and that each account has one open-ended allocation."""
    rows = session.fetch_rows(select(account.c.name, account.c.parent))
    parents = {row.name: row.parent for row in rows}
    query = (
        select(allocation.c.account, func.count().label("allocations"))
        .where(allocation.c.number > 0, allocation.c.end.is_(None))
        .group_by(allocation.c.account)
    )
    allocations = {row.account: row.allocations for row in session.fetch_rows(query)}
    for name, parent in sorted(parents.items()):
        if allocations.get(name, 0) != 1:
            problem = f"it has {allocations.get(name, 0)} open-ended allocations"
            yield _make_finding("account", problem, "account", name)
        if parent and parent not in parents:
            yield _make_finding("account", f"its parent {parent} is missing", "account", name)
        visited, ancestor = {name}, parent
        while ancestor and ancestor not in visited:
            visited.add(ancestor)
            ancestor = parents.get(ancestor, "")
        if ancestor:
            yield _make_finding("account", "its parents form a cycle", "account", name)
    for name in sorted(allocations.keys() - parents.keys()):
        yield _make_finding("account", "it is missing, but has an allocation", "account", name)


def _check_numbers(session: LedgerSession) -> Iterator[LedgerFinding]:
    """Check that ledger transactions and settlements are numbered without gaps."""
    for table, column, expected in (
        (transaction, transaction.c.number, session.seq),
        (settlement, settlement.c.seq, session.settlement),
    ):
        lowest, last = (func.coalesce(aggregate(column), 0) for aggregate in (func.min, func.max))
        query = select(func.count(), lowest, last).select_from(table)
        count, first, highest = (int(number) for number in session.fetch_rows(query)[0])
        # Applied settlements are pruned after a time, ledger transactions never.
        before = max(0, first - 1) if table is settlement else 0
        if not before + count == highest == expected:
            problem = (
                f"{count} rows, the last has the number {highest}, the next follows {expected}"
            )
            yield _make_finding("numbers", problem, "table", table.name)
    if session.fetch_value(select(func.count()).select_from(state)) != 1:
        yield _make_finding("numbers", "it does not have exactly one row", "table", state.name)


_CHECKS: Final[tuple[Callable[[LedgerSession], Iterator[LedgerFinding]], ...]] = (
    _check_schema,
    _check_zero_sums,
    _check_balances,
    _check_charges,
    _check_spent,
    _check_accounts,
    _check_numbers,
)
"""All checks, in order."""


def _fetch_findings(
    session: LedgerSession, statement: "sqlalchemy.Select[Any]"
) -> "list[Row[*tuple[Any, ...]]]":
    return session.fetch_rows(statement.limit(_MAX_FINDINGS))


def _make_finding(kind: str, problem: str, object_kind: str, name: object) -> LedgerFinding:
    return LedgerFinding(kind=kind, finding=f"{object_kind} {name}: {problem}", object=str(name))
