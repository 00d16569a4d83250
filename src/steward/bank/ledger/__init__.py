"""Ledger of the bank: accounts, allocations and every movement of service units (SU).

Double-entry bookkeeping on SQLite or PostgreSQL. Ledger transactions are never changed or
deleted; a correction is another transaction. Amounts are integer micro-SU.

:func:`open_ledger` returns a :class:`~steward.bank.ledger.ledger.Ledger`. Its ``transaction()``
and ``reading()`` give access to accounts, allocations, charges, transfers, rates and the outbox,
each in the module of that name. ``tables`` holds the schema, ``engine`` the database connection,
``postings`` the only code that writes postings, ``proof`` the consistency check.

Importing this package is cheap: it re-exports the record types. :func:`open_ledger` loads
the rest, which needs SQLAlchemy.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from steward.bank.ledger.records import (
    NO_ACCOUNT,
    Account,
    Allocation,
    ApiToken,
    Authorship,
    BalanceDay,
    ChargeResult,
    ChargeRow,
    ChargeVersion,
    Lease,
    LedgerFinding,
    Member,
    OutboxItem,
    Posting,
    RejectedJob,
    ReportedJob,
    ReportedTotals,
    Rollover,
    Statement,
    StatementLine,
    Transfer,
    TransferKind,
    UsageRow,
)
from steward.bank.records import Settlement
from steward.core.config import Settings
from steward.core.events import utc_now

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger

__all__ = [
    "NO_ACCOUNT",
    "Account",
    "Allocation",
    "ApiToken",
    "Authorship",
    "BalanceDay",
    "ChargeResult",
    "ChargeRow",
    "ChargeVersion",
    "Lease",
    "LedgerFinding",
    "Member",
    "OutboxItem",
    "Posting",
    "RejectedJob",
    "ReportedJob",
    "ReportedTotals",
    "Rollover",
    "Settlement",
    "Statement",
    "StatementLine",
    "Transfer",
    "TransferKind",
    "UsageRow",
    "open_ledger",
]


def open_ledger(settings: Settings, now: Callable[[], datetime] = utc_now) -> "Ledger":
    """Open the ledger, create it if it does not exist, and upgrade its schema.

    Args:
        settings: The configuration, for ``[bank]`` and the state directory.
        now: The clock.

    Raises:
        LedgerUnavailable: The database cannot be used now.
        BankError: The setting names no database, or a newer Steward made this one.
        SqliteError: The file is not a usable SQLite database.
    """
    from steward.bank.ledger.engine import LedgerDatabase, ledger_url
    from steward.bank.ledger.ledger import Ledger

    return Ledger(LedgerDatabase(ledger_url(settings)), now)
