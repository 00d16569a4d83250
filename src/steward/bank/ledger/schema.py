"""Brings the ledger's schema up to date, and refuses one that a newer Steward made.

Alembic is loaded only where there is something to do.
"""

from pathlib import Path
from typing import Final

import sqlalchemy
from sqlalchemy import Connection

from steward.bank.errors import BankError
from steward.bank.ledger.engine import Database

MIGRATIONS: Final = Path(__file__).with_name("migrations")

_REVISIONS: Final = sorted(path.name[:4] for path in MIGRATIONS.glob("versions/[0-9]*.py"))

NEWEST: Final = _REVISIONS[-1]
"""The revision that this Steward works with."""

_ADVISORY_LOCK: Final = 0x57E3A2D


def bring_up_to_date(database: Database) -> None:
    """Make the tables, or change them to what this Steward works with.

    Raises:
        BankError: A newer Steward made them.
        LedgerUnavailable: The database is away.
    """
    with database.reading() as connection:
        if revision_of(connection) == NEWEST:
            return
    with database.writing() as connection:
        if not database.is_sqlite:
            # Two that start at once: the second waits, and finds it done.
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
    """The revision that a database is at; "" for one that is empty."""
    if not sqlalchemy.inspect(connection).has_table("alembic_version"):
        return ""
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return str(found or "")


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
