"""Database tables of the ledger (SQLAlchemy), and the upgrade of their schema.

Alembic migrations create the tables; :func:`upgrade_schema` runs them when a ledger is opened, and
loads Alembic only if the schema is not the newest.

Each change is a row of ``act`` (a ledger transaction) with number, author and reason. An act
that moves money has rows in ``entry`` (postings) whose sum is zero. Each posting belongs to a
row of ``pot``: an account's allocation, or one of the bank's own pots, which have negative
numbers. Balances are stored beside the entries, so that nobody needs to sum them up.
"""

from pathlib import Path
from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

from steward.bank.errors import BankError
from steward.bank.ledger.engine import LedgerDatabase

ISSUED: Final = -1
USAGE: Final = -2
EXPIRED: Final = -3
ADJUSTED: Final = -4

BANK_POTS: Final = {ISSUED: "issued", USAGE: "usage", EXPIRED: "expired", ADJUSTED: "adjusted"}
"""The bank's own pots: counterparts of deposits, charges, expiry and adjustments."""

APPEND_ONLY: Final = ("act", "entry", "charge_version", "rate", "settlement")
"""Append-only tables, enforced by database triggers; settlements may be deleted."""

metadata = MetaData()


def _int_column(name: str, *constraints: ForeignKey, **options: Any) -> Column[int]:
    return Column(
        name, BigInteger, *constraints, nullable=options.pop("nullable", False), **options
    )


def _text_column(name: str, *constraints: ForeignKey, **options: Any) -> Column[str]:
    return Column(name, Text, *constraints, nullable=options.pop("nullable", False), **options)


def _number_column(name: str) -> Column[int]:
    return Column(name, BigInteger, primary_key=True, autoincrement=False)


state = Table(
    "state",
    metadata,
    _number_column("id"),
    _int_column("seq"),
    _int_column("rules_seq"),
    _int_column("settlement"),
)
"""Single row that every writer locks first, so that writers queue and numbers have no gaps."""

account = Table(
    "account",
    metadata,
    _text_column("name", primary_key=True),
    _text_column("parent"),
    _text_column("owners"),
    _int_column("credit"),
    _int_column("draws_on_parent"),
    _int_column("only_listed"),
    _int_column("closed"),
    _text_column("note"),
    _int_column("known"),
    _int_column("created_us"),
    _int_column("seq"),
    CheckConstraint("credit >= 0", name="credit_is_not_negative"),
    Index("account_seq", "seq"),
)
"""Bank accounts. ``known`` is 0 for accounts that exist only because of a charge."""

member = Table(
    "member",
    metadata,
    _text_column("account", ForeignKey("account.name"), primary_key=True),
    _text_column("name", primary_key=True),
    _int_column("limit_amount", nullable=True),
    _int_column("spent"),
    _int_column("listed"),
    Index("member_name", "name"),
)
"""Users of accounts, with spending limit and amount spent, in micro-SU."""

pot = Table(
    "pot",
    metadata,
    _number_column("number"),
    _text_column("account", ForeignKey("account.name"), nullable=True),
    _int_column("begin_us"),
    _int_column("end_us", nullable=True),
    _text_column("rollover"),
    _text_column("note"),
    _int_column("balance"),
    _int_column("given"),
    _int_column("made_by"),
    CheckConstraint("number < 0 OR end_us IS NULL OR balance >= 0", name="not_below_zero"),
    CheckConstraint("end_us IS NULL OR begin_us < end_us", name="begins_before_it_ends"),
    CheckConstraint("(number < 0) = (account IS NULL)", name="has_an_account"),
    Index("pot_account", "account"),
    Index("pot_end", "end_us"),
    Index("pot_made_by", "made_by"),
)
"""Allocations (numbers from 1) and the bank's own pots (below 0), with their balances."""

act = Table(
    "act",
    metadata,
    _number_column("number"),
    _int_column("at_us"),
    _text_column("kind"),
    _text_column("who"),
    _text_column("why"),
    Column("client_key", Text, nullable=True),
    _text_column("asked"),
    _text_column("account"),
    _text_column("user_name"),
    _int_column("charge", nullable=True),
    _int_column("amount"),
    UniqueConstraint("client_key", name="act_client_key"),
    Index("act_account", "account", "at_us"),
    Index("act_user", "user_name", "at_us"),
    Index("act_charge", "charge"),
)
"""Ledger transactions: every change, with author, reason and idempotency key."""

entry = Table(
    "entry",
    metadata,
    _int_column("act", ForeignKey("act.number"), primary_key=True, autoincrement=False),
    _int_column("pot", ForeignKey("pot.number"), primary_key=True, autoincrement=False),
    _int_column("amount"),
    _int_column("balance"),
    CheckConstraint("amount <> 0", name="moves_something"),
    Index("entry_pot", "pot", "act"),
)
"""Postings: the change of one pot by a ledger transaction, and its balance afterwards."""

charge = Table(
    "charge",
    metadata,
    _number_column("number"),
    _text_column("key"),
    _text_column("cluster"),
    _int_column("job_id"),
    _int_column("first_submit_us"),
    _text_column("account"),
    _text_column("user_name"),
    _text_column("partition_name"),
    _text_column("payer"),
    _int_column("amount"),
    _int_column("refunded"),
    _int_column("overdraw"),
    _text_column("hold"),
    _int_column("begin_us"),
    _int_column("first_at_us"),
    _int_column("last_at_us"),
    _int_column("versions"),
    Column("body", LargeBinary, nullable=False),
    CheckConstraint("amount >= 0 AND refunded >= 0", name="charge_is_not_negative"),
    UniqueConstraint("key", name="charge_key"),
    Index("charge_job", "cluster", "job_id"),
    Index("charge_account", "account", "begin_us"),
    Index("charge_user", "user_name", "begin_us"),
    Index("charge_last", "last_at_us", "number"),
)
"""Charges, one for each run or piece of a run, as last posted."""

charge_version = Table(
    "charge_version",
    metadata,
    _int_column("charge", ForeignKey("charge.number"), primary_key=True, autoincrement=False),
    _int_column("number", primary_key=True, autoincrement=False),
    _int_column("at_us"),
    _text_column("who"),
    _text_column("why"),
    _int_column("added"),
    _text_column("acts"),
    Column("body", LargeBinary, nullable=False),
)
"""All posted versions of charges."""

settlement = Table(
    "settlement",
    metadata,
    _number_column("seq"),
    _text_column("hold"),
    _text_column("charge"),
    _int_column("amount"),
    _int_column("frees"),
    _int_column("final"),
)
"""Amounts that the gate deducts from its holds, in order."""

rate = Table(
    "rate",
    metadata,
    _number_column("number"),
    _text_column("cluster"),
    _text_column("partition_name"),
    _text_column("qos"),
    _int_column("valid_from_us"),
    _int_column("made_by"),
    Column("body", LargeBinary, nullable=False),
)
"""Rates: the prices of partitions."""

mode = Table(
    "mode",
    metadata,
    _text_column("cluster", primary_key=True),
    _text_column("partition_name", primary_key=True),
    _text_column("account", primary_key=True),
    _text_column("mode"),
)
"""Mode rules: off, observe or gate, by cluster, partition and account."""

cursor = Table("cursor", metadata, _text_column("name", primary_key=True), _int_column("position"))
"""Positions of consumers in the journal."""

mark = Table("mark", metadata, _text_column("name", primary_key=True), _text_column("said"))
"""Short notes by name, such as the last reconciliation of a cluster."""

threshold = Table(
    "threshold",
    metadata,
    _int_column("allocation", primary_key=True, autoincrement=False),
    _text_column("kind", primary_key=True),
    _int_column("value", primary_key=True, autoincrement=False),
    _int_column("at_us"),
)
"""Thresholds of allocations that were reported."""

outbox = Table(
    "outbox",
    metadata,
    _number_column("id"),
    _text_column("kind"),
    Column("item_key", Text, nullable=True),
    Column("payload", LargeBinary, nullable=False),
    _int_column("tries"),
    _int_column("next_us"),
    _text_column("error"),
    _int_column("done"),
    UniqueConstraint("kind", "item_key", name="outbox_key"),
    Index("outbox_due", "kind", "done", "next_us"),
)
"""Messages to deliver: events, notices, reports to remote banks."""

token = Table(
    "token",
    metadata,
    _text_column("digest", primary_key=True),
    _text_column("user_name"),
    _int_column("created_us"),
    _int_column("expires_us", nullable=True),
    _text_column("note"),
)
"""Tokens of the myBRC API, by digest."""

refusal = Table(
    "refusal",
    metadata,
    _text_column("id", primary_key=True),
    _int_column("at_us"),
    _text_column("mode"),
    _text_column("cluster"),
    _int_column("uid"),
    _text_column("user_name"),
    _text_column("account"),
    _text_column("partition_name"),
    _int_column("job_id"),
    _int_column("amount"),
    _text_column("why"),
    Index("refusal_at", "at_us"),
)
"""Jobs that the gate rejected, or would have rejected."""

reported_job = Table(
    "told",
    metadata,
    _text_column("jobslurmid", primary_key=True),
    _text_column("user_name"),
    _int_column("uid"),
    _text_column("account"),
    _text_column("status"),
    _text_column("partition_name"),
    _int_column("amount"),
    _int_column("submitted_us", nullable=True),
    _int_column("started_us", nullable=True),
    _int_column("ended_us", nullable=True),
    Column("body", LargeBinary, nullable=False),
    Column("cpu_hours", Double, nullable=False, server_default=sqlalchemy.text("0")),
    Index("told_started", "started_us", "jobslurmid"),
)
"""Jobs that clients of the myBRC API reported."""

remote_hold = Table(
    "remote_hold",
    metadata,
    _text_column("cluster", primary_key=True),
    _int_column("job_id", primary_key=True, autoincrement=False),
    _text_column("account"),
    _int_column("uid"),
    _int_column("amount"),
    Index("remote_hold_account", "account"),
)
"""Holds that a remote myBRC server counts as used."""

lease = Table(
    "lease",
    metadata,
    _text_column("name", primary_key=True),
    _text_column("holder"),
    _int_column("fence"),
    _int_column("until_us"),
)
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
