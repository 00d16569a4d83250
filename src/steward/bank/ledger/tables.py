"""Database tables of the ledger (SQLAlchemy), and the upgrade of their schema.

Alembic migrations create the tables; :func:`bring_up_to_date` runs them at start.

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
from steward.bank.ledger.engine import Database

ISSUED: Final = -1
USAGE: Final = -2
EXPIRED: Final = -3
ADJUSTED: Final = -4

COUNTERS: Final = {ISSUED: "issued", USAGE: "usage", EXPIRED: "expired", ADJUSTED: "adjusted"}
"""The bank's own pots: counterparts of deposits, charges, expiry and adjustments."""

FOR_EVER: Final = ("act", "entry", "charge_version", "rate", "settlement")
"""Append-only tables, enforced by database triggers; settlements may be deleted."""

metadata = MetaData()


def _int(name: str, *rest: ForeignKey, **options: Any) -> Column[int]:
    return Column(name, BigInteger, *rest, nullable=options.pop("nullable", False), **options)


def _text(name: str, *rest: ForeignKey, **options: Any) -> Column[str]:
    return Column(name, Text, *rest, nullable=options.pop("nullable", False), **options)


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, primary_key=True, autoincrement=False)


state = Table("state", metadata, _number("id"), _int("seq"), _int("rules_seq"), _int("settlement"))
"""Single row that every writer locks first, so that writers queue and numbers have no gaps."""

account = Table(
    "account",
    metadata,
    _text("name", primary_key=True),
    _text("parent"),
    _text("owners"),
    _int("credit"),
    _int("draws_on_parent"),
    _int("only_listed"),
    _int("closed"),
    _text("note"),
    _int("known"),
    _int("created_us"),
    _int("seq"),
    CheckConstraint("credit >= 0", name="credit_is_not_negative"),
    Index("account_seq", "seq"),
)
"""Bank accounts. ``known`` is 0 for accounts that exist only because of a charge."""

member = Table(
    "member",
    metadata,
    _text("account", ForeignKey("account.name"), primary_key=True),
    _text("name", primary_key=True),
    _int("limit_amount", nullable=True),
    _int("spent"),
    _int("listed"),
    Index("member_name", "name"),
)
"""Users of accounts, with spending limit and amount spent, in micro-SU."""

pot = Table(
    "pot",
    metadata,
    _number("number"),
    _text("account", ForeignKey("account.name"), nullable=True),
    _int("begin_us"),
    _int("end_us", nullable=True),
    _text("rollover"),
    _text("note"),
    _int("balance"),
    _int("given"),
    _int("made_by"),
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
    _number("number"),
    _int("at_us"),
    _text("kind"),
    _text("who"),
    _text("why"),
    Column("client_key", Text, nullable=True),
    _text("asked"),
    _text("account"),
    _text("user_name"),
    _int("charge", nullable=True),
    _int("amount"),
    UniqueConstraint("client_key", name="act_client_key"),
    Index("act_account", "account", "at_us"),
    Index("act_user", "user_name", "at_us"),
    Index("act_charge", "charge"),
)
"""Ledger transactions: every change, with author, reason and idempotency key."""

entry = Table(
    "entry",
    metadata,
    _int("act", ForeignKey("act.number"), primary_key=True, autoincrement=False),
    _int("pot", ForeignKey("pot.number"), primary_key=True, autoincrement=False),
    _int("amount"),
    _int("balance"),
    CheckConstraint("amount <> 0", name="moves_something"),
    Index("entry_pot", "pot", "act"),
)
"""Postings: the change of one pot by a ledger transaction, and its balance afterwards."""

charge = Table(
    "charge",
    metadata,
    _number("number"),
    _text("key"),
    _text("cluster"),
    _int("job_id"),
    _int("first_submit_us"),
    _text("account"),
    _text("user_name"),
    _text("partition_name"),
    _text("payer"),
    _int("amount"),
    _int("refunded"),
    _int("overdraw"),
    _text("hold"),
    _int("begin_us"),
    _int("first_at_us"),
    _int("last_at_us"),
    _int("versions"),
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
    _int("charge", ForeignKey("charge.number"), primary_key=True, autoincrement=False),
    _int("number", primary_key=True, autoincrement=False),
    _int("at_us"),
    _text("who"),
    _text("why"),
    _int("added"),
    _text("acts"),
    Column("body", LargeBinary, nullable=False),
)
"""All posted versions of charges."""

settlement = Table(
    "settlement",
    metadata,
    _number("seq"),
    _text("hold"),
    _text("charge"),
    _int("amount"),
    _int("frees"),
    _int("final"),
)
"""Amounts that the gate deducts from its holds, in order."""

rate = Table(
    "rate",
    metadata,
    _number("number"),
    _text("cluster"),
    _text("partition_name"),
    _text("qos"),
    _int("valid_from_us"),
    _int("made_by"),
    Column("body", LargeBinary, nullable=False),
)
"""Rates: the prices of partitions."""

mode = Table(
    "mode",
    metadata,
    _text("cluster", primary_key=True),
    _text("partition_name", primary_key=True),
    _text("account", primary_key=True),
    _text("mode"),
)
"""Mode rules: off, observe or gate, by cluster, partition and account."""

cursor = Table("cursor", metadata, _text("name", primary_key=True), _int("position"))
"""Positions of consumers in the journal."""

mark = Table("mark", metadata, _text("name", primary_key=True), _text("said"))
"""Short notes by name, such as the last reconciliation of a cluster."""

threshold = Table(
    "threshold",
    metadata,
    _int("allocation", primary_key=True, autoincrement=False),
    _text("kind", primary_key=True),
    _int("value", primary_key=True, autoincrement=False),
    _int("at_us"),
)
"""Thresholds of allocations that were reported."""

outbox = Table(
    "outbox",
    metadata,
    _number("id"),
    _text("kind"),
    Column("item_key", Text, nullable=True),
    Column("payload", LargeBinary, nullable=False),
    _int("tries"),
    _int("next_us"),
    _text("error"),
    _int("done"),
    UniqueConstraint("kind", "item_key", name="outbox_key"),
    Index("outbox_due", "kind", "done", "next_us"),
)
"""Messages to deliver: events, notices, reports to remote banks."""

token = Table(
    "token",
    metadata,
    _text("digest", primary_key=True),
    _text("user_name"),
    _int("created_us"),
    _int("expires_us", nullable=True),
    _text("note"),
)
"""Tokens of the myBRC API, by digest."""

refusal = Table(
    "refusal",
    metadata,
    _text("id", primary_key=True),
    _int("at_us"),
    _text("mode"),
    _text("cluster"),
    _int("uid"),
    _text("user_name"),
    _text("account"),
    _text("partition_name"),
    _int("job_id"),
    _int("amount"),
    _text("why"),
    Index("refusal_at", "at_us"),
)
"""Jobs that the gate rejected, or would have rejected."""

told = Table(
    "told",
    metadata,
    _text("jobslurmid", primary_key=True),
    _text("user_name"),
    _int("uid"),
    _text("account"),
    _text("status"),
    _text("partition_name"),
    _int("amount"),
    _int("submitted_us", nullable=True),
    _int("started_us", nullable=True),
    _int("ended_us", nullable=True),
    Column("body", LargeBinary, nullable=False),
    Column("cpu_hours", Double, nullable=False, server_default=sqlalchemy.text("0")),
    Index("told_started", "started_us", "jobslurmid"),
)
"""Jobs that clients of the myBRC API reported."""

remote_hold = Table(
    "remote_hold",
    metadata,
    _text("cluster", primary_key=True),
    _int("job_id", primary_key=True, autoincrement=False),
    _text("account"),
    _int("uid"),
    _int("amount"),
    Index("remote_hold_account", "account"),
)
"""Holds that a remote myBRC server counts as used."""

lease = Table(
    "lease",
    metadata,
    _text("name", primary_key=True),
    _text("holder"),
    _int("fence"),
    _int("until_us"),
)
"""Leases: exclusive rights with a fencing number, such as that of the deciding gate."""


MIGRATIONS: Final = Path(__file__).with_name("migrations")
"""Directory of Alembic's migrations."""

_REVISIONS: Final = sorted(path.name[:4] for path in MIGRATIONS.glob("versions/[0-9]*.py"))

NEWEST: Final = _REVISIONS[-1]
"""Schema revision that this version of Steward uses."""

_ADVISORY_LOCK: Final = 0x57E3A2D
"""Key of the PostgreSQL advisory lock that serializes schema upgrades."""


def bring_up_to_date(database: Database) -> None:
    """Create the tables, or upgrade their schema to the newest revision.

    Raises:
        BankError: A newer Steward created them.
        LedgerUnavailable: The database is unreachable.
    """
    with database.reading() as connection:
        if revision_of(connection) == NEWEST:
            return
    with database.writing() as connection:
        if not database.is_sqlite:
            # If two processes start at once, the second waits and finds it done.
            connection.execute(
                sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_ADVISORY_LOCK))
            )
        found = revision_of(connection)
        if found not in {"", *_REVISIONS}:
            raise BankError(
                f"the ledger {database.shown} was written by a newer Steward (schema {found}, "
                f"this one knows {NEWEST}): install that version again"
            )
        if found != NEWEST:
            _upgrade(connection)


def revision_of(connection: Connection) -> str:
    """Return the schema revision of a database; "" if it is empty."""
    if not sqlalchemy.inspect(connection).has_table("alembic_version"):
        return ""
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return str(found or "")


def _upgrade(connection: Connection) -> None:
    """Run Alembic's migrations up to the newest revision."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
