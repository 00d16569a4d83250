"""Database tables of the ledger, and the upgrade of their schema.

Each table is derived from a Struct: a record of the ledger, or a row that adds to it what only the
database holds. Alembic migrations create the tables; :func:`upgrade_schema` runs them when a ledger
is opened, and loads Alembic only if the schema is not the newest.

Each change is a row of ``ledger_transaction`` with number, author and reason. A transaction that
moves money has rows in ``posting`` whose sum is zero. Each posting belongs to a row of
``allocation``: an account's allocation, or one of the bank's own counterparts, which have
negative numbers. Balances are stored beside the postings, so that nobody needs to sum them up.
"""

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import sqlalchemy
from sqlalchemy import Connection, MetaData

from steward.bank.errors import BankError
from steward.bank.ledger.engine import LedgerDatabase
from steward.bank.ledger.records import (
    Account,
    Allocation,
    ApiToken,
    ChargeRow,
    ChargeVersion,
    Lease,
    Member,
    OutboxItem,
    RejectedJob,
    ReportedJob,
)
from steward.bank.records import BankRecord, ModeRule, Rate, Settlement
from steward.core.sqlalchemy_tables import derive_table
from steward.core.storage import Index

ISSUED: Final = -1
USAGE: Final = -2
EXPIRED: Final = -3
ADJUSTED: Final = -4

COUNTERPARTS: Final = {ISSUED: "issued", USAGE: "usage", EXPIRED: "expired", ADJUSTED: "adjusted"}
"""The bank's own rows of ``allocation``, for deposits, charges, expiry and adjustments."""

APPEND_ONLY: Final = ("ledger_transaction", "posting", "charge_version", "rate", "settlement")
"""Append-only tables, enforced by database triggers; settlements may be deleted."""


class State(BankRecord, frozen=True):
    """Row of ``state``: the numbers used last."""

    id: int
    seq: int
    rules_seq: int
    settlement: int


class StoredAccount(Account, frozen=True, kw_only=True):
    """Row of ``account``: an account, with the number of its last change."""

    seq: int


class StoredAllocation(Allocation, frozen=True, kw_only=True):
    """Row of ``allocation``: an allocation, with the ledger transaction that created it."""

    made_by: int


class StoredTransaction(BankRecord, frozen=True):
    """Row of ``ledger_transaction``, with its request and the number of its charge."""

    number: int
    at: datetime
    kind: str
    posted_by: str
    reason: str
    key: str
    asked: str
    account: str
    user: str
    charge: int | None
    amount: int


class StoredPosting(BankRecord, frozen=True):
    """Row of ``posting``: a ledger transaction's change of an allocation, and the new balance."""

    transaction: int
    allocation: int
    amount: int
    balance: int


class StoredCharge(ChargeRow, frozen=True, kw_only=True):
    """Row of ``charge``: the state of a charge, with the fields that queries need."""

    number: int
    key: str
    cluster: str
    job_id: int
    first_submit: datetime
    account: str
    user: str
    partition: str
    amount: int
    hold: str
    begin: datetime


class StoredVersion(ChargeVersion, frozen=True, kw_only=True):
    """Row of ``charge_version``: a version, with the number of its charge."""

    charge_number: int


class StoredRate(BankRecord, frozen=True):
    """Row of ``rate``: a rate, with the ledger transaction that added it."""

    number: int
    cluster: str
    partition: str
    qos: str
    valid_from: datetime
    made_by: int
    rate: Rate


class ConsumerCursor(BankRecord, frozen=True):
    """Row of ``cursor``: a consumer's position in the journal."""

    name: str
    position: int


class Mark(BankRecord, frozen=True):
    """Row of ``mark``: a short note by name, such as the last reconciliation of a cluster."""

    name: str
    said: str


class ReportedThreshold(BankRecord, frozen=True):
    """Row of ``threshold``: a threshold of an allocation that was reported."""

    allocation: int
    kind: str
    value: int
    at: datetime


class RemoteHold(BankRecord, frozen=True):
    """Row of ``remote_hold``: a hold that a remote myBRC server counts as used."""

    cluster: str
    job_id: int
    account: str
    uid: int
    amount: int


metadata = MetaData()
_NAMES: Final = {"user": "user_name", "partition": "partition_name"}
"""Column names, by field, that are not words of SQL."""
_derive = partial(derive_table, metadata, names=_NAMES)

state = _derive(State, "state", key="id")
"""Single row that every writer locks first, so that writers queue and numbers have no gaps."""

account = _derive(
    *(StoredAccount, "account"),
    key="name",
    not_null="created",
    checks={"credit_limit_is_not_negative": "credit_limit >= 0"},
    indexes={"seq": Index("seq")},
)
"""Bank accounts. ``known`` is 0 for accounts that exist only because of a charge."""

member = _derive(
    *(Member, "member"),
    key="account, user",
    names={"user": "name", "limit": "limit_amount"},
    references={"account": "account.name"},
    indexes={"name": Index("user")},
)
"""Users of accounts, with spending limit and amount spent, in micro-SU."""

allocation = _derive(
    *(StoredAllocation, "allocation"),
    key="number",
    empty_as_null="account",
    references={"account": "account.name"},
    checks={
        "not_below_zero": "number < 0 OR end_us IS NULL OR balance >= 0",
        "begins_before_it_ends": "end_us IS NULL OR begin_us < end_us",
        "has_an_account": "(number < 0) = (account IS NULL)",
    },
    indexes={"account": Index("account"), "end": Index("end"), "made_by": Index("made_by")},
)
"""Allocations (numbers from 1) and the bank's own counterparts (below 0), with their balances."""

transaction = _derive(
    *(StoredTransaction, "ledger_transaction"),
    key="number",
    names=_NAMES | {"key": "client_key"},
    empty_as_null="key",
    indexes={
        "client_key": Index("key", is_unique=True),
        "account": Index("account, at"),
        "user": Index("user, at"),
        "charge": Index("charge"),
    },
)
"""Ledger transactions: every change, with author, reason and idempotency key."""

posting = _derive(
    *(StoredPosting, "posting"),
    key="transaction, allocation",
    references={"transaction": "ledger_transaction.number", "allocation": "allocation.number"},
    checks={"moves_something": "amount <> 0"},
    indexes={"allocation": Index("allocation, transaction")},
)
"""Postings: the change of one allocation by a ledger transaction, and its balance afterwards."""

charge = _derive(
    *(StoredCharge, "charge"),
    key="number",
    names=_NAMES | {"charge": "body"},
    checks={"charge_is_not_negative": "amount >= 0 AND refunded >= 0"},
    indexes={
        "key": Index("key", is_unique=True),
        "job": Index("cluster, job_id"),
        "account": Index("account, begin"),
        "user": Index("user, begin"),
        "last": Index("last_at, number"),
    },
)
"""Charges, one for each run or piece of a run, as last posted."""

charge_version = _derive(
    *(StoredVersion, "charge_version"),
    key="charge_number, number",
    names={"charge_number": "charge", "charge": "body"},
    references={"charge_number": "charge.number"},
)
"""All posted versions of charges."""

settlement = _derive(Settlement, "settlement", key="seq")
"""Amounts that the gate deducts from its holds, in order."""

rate = _derive(StoredRate, "rate", key="number", names=_NAMES | {"rate": "body"})
"""Rates: the prices of partitions."""

mode = _derive(ModeRule, "mode", key="cluster, partition, account")
"""Mode rules: off, observe or gate, by cluster, partition and account."""

cursor = _derive(ConsumerCursor, "cursor", key="name")
"""Positions of consumers in the journal."""

mark = _derive(Mark, "mark", key="name")
"""Short notes by name."""

threshold = _derive(ReportedThreshold, "threshold", key="allocation, kind, value")
"""Thresholds of allocations that were reported."""

outbox = _derive(
    *(OutboxItem, "outbox"),
    key="id",
    names={"key": "item_key", "next_at": "next_us"},
    empty_as_null="key",
    indexes={"key": Index("kind, key", is_unique=True), "due": Index("kind, done, next_at")},
)
"""Messages to deliver: events, notices, reports to remote banks."""

token = _derive(ApiToken, "token", key="digest", not_null="created")
"""Tokens of the myBRC API, by digest."""

rejection = _derive(RejectedJob, "rejection", key="id", indexes={"at": Index("at")})
"""Jobs that the gate rejected, or would have rejected."""

reported_job = _derive(
    *(ReportedJob, "told"), key="jobslurmid", indexes={"started": Index("started, jobslurmid")}
)
"""Jobs that clients of the myBRC API reported."""

remote_hold = _derive(
    *(RemoteHold, "remote_hold"), key="cluster, job_id", indexes={"account": Index("account")}
)
"""Holds that a remote myBRC server counts as used."""

lease = _derive(Lease, "lease", key="name")
"""Leases: exclusive rights with a fencing number, such as that of the deciding gate."""


MIGRATIONS: Final = Path(__file__).with_name("migrations")
"""Directory of Alembic's migrations."""

_REVISIONS: Final = sorted(path.name[:4] for path in MIGRATIONS.glob("versions/[0-9]*.py"))

NEWEST_REVISION: Final = _REVISIONS[-1]
"""Schema revision that this version of Steward uses."""

_ADVISORY_LOCK: Final = 0x57E3A2D
"""Key of the PostgreSQL advisory lock that serializes schema upgrades."""


def upgrade_schema(database: LedgerDatabase) -> None:
    """Create the tables, or upgrade their schema to the newest revision.

    Raises:
        BankError: A newer Steward created them.
        LedgerUnavailable: The database is unreachable.
    """
    with database.reading() as connection:
        if read_revision(connection) == NEWEST_REVISION:
            return
    with database.writing() as connection:
        if not database.is_sqlite:
            # If two processes start at once, the second waits and finds it done.
            connection.execute(
                sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_ADVISORY_LOCK))
            )
        revision = read_revision(connection)
        if revision not in {"", *_REVISIONS}:
            raise BankError(
                f"the ledger {database.display_url} was written by a newer Steward (schema "
                f"{revision}, "
                f"this one knows {NEWEST_REVISION}): install that version again"
            )
        if revision != NEWEST_REVISION:
            _run_migrations(connection)


def read_revision(connection: Connection) -> str:
    """Return the schema revision of a database; "" if it is empty."""
    if not sqlalchemy.inspect(connection).has_table("alembic_version"):
        return ""
    version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return str(version or "")


def _run_migrations(connection: Connection) -> None:
    """Run Alembic's migrations up to the newest revision."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
