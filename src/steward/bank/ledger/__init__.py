"""The ledger: accounts, allocations, and every movement of money between them, for ever.

What is here is light to import; the rest of the package, which needs SQLAlchemy,
is loaded by :func:`open_ledger`.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from steward.bank.ledger.records import (
    NO_ACCOUNT,
    Account,
    Allocation,
    By,
    Charged,
    ChargeRow,
    ChargeVersion,
    CourseDay,
    Entry,
    Finding,
    Kind,
    Lease,
    Member,
    OutboxItem,
    Refusal,
    Rollover,
    Statement,
    StatementLine,
    Token,
    ToldJob,
    ToldTotals,
    Transfer,
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
    "By",
    "ChargeRow",
    "ChargeVersion",
    "Charged",
    "CourseDay",
    "Entry",
    "Finding",
    "Kind",
    "Lease",
    "Member",
    "OutboxItem",
    "Refusal",
    "Rollover",
    "Settlement",
    "Statement",
    "StatementLine",
    "Token",
    "ToldJob",
    "ToldTotals",
    "Transfer",
    "UsageRow",
    "open_ledger",
]


def open_ledger(settings: Settings, now: Callable[[], datetime] = utc_now) -> "Ledger":
    """Open the ledger, make it if there is none, and bring its schema up to date.

    Args:
        settings: The configuration, for ``[bank]`` and the state directory.
        now: The clock.

    Raises:
        LedgerUnavailable: Its database cannot be used now.
        BankError: The setting names no database, or a newer Steward made this one.
        SqliteError: The file cannot be used as it is.
    """
    from steward.bank.ledger.engine import Database, url_of
    from steward.bank.ledger.ledger import Ledger

    return Ledger(Database(url_of(settings)), now)
