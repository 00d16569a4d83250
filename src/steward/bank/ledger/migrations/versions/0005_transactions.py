"""Rename tables and columns after ledger transactions, postings and transfers.

Revision ID: 0005
Revises: 0004
"""

from typing import Final

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TRIGGER: Final = """
    CREATE TRIGGER {table}_never_{verb} BEFORE {verb} ON {table}
    BEGIN SELECT RAISE(ABORT, '{table}: entered for ever, never changed'); END
"""

# SQLite renames no constraint, index or trigger: the tables are made again, with what is theirs.
_SQLITE: Final = (
    """
    CREATE TABLE ledger_transaction (
        number BIGINT NOT NULL,
        at_us BIGINT NOT NULL,
        kind TEXT NOT NULL,
        posted_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        client_key TEXT,
        asked TEXT NOT NULL,
        account TEXT NOT NULL,
        user_name TEXT NOT NULL,
        charge BIGINT,
        amount BIGINT NOT NULL,
        PRIMARY KEY (number),
        CONSTRAINT ledger_transaction_client_key UNIQUE (client_key)
    )
    """,
    """
    CREATE TABLE posting (
        "transaction" BIGINT NOT NULL,
        allocation BIGINT NOT NULL,
        amount BIGINT NOT NULL,
        balance BIGINT NOT NULL,
        PRIMARY KEY ("transaction", allocation),
        CONSTRAINT moves_something CHECK (amount <> 0),
        FOREIGN KEY("transaction") REFERENCES ledger_transaction (number),
        FOREIGN KEY(allocation) REFERENCES allocation (number)
    )
    """,
    "INSERT INTO ledger_transaction SELECT * FROM act ORDER BY number",
    "INSERT INTO posting SELECT * FROM entry ORDER BY rowid",
    "DROP TABLE entry",
    "DROP TABLE act",
    "CREATE INDEX ledger_transaction_account ON ledger_transaction (account, at_us)",
    "CREATE INDEX ledger_transaction_charge ON ledger_transaction (charge)",
    "CREATE INDEX ledger_transaction_user ON ledger_transaction (user_name, at_us)",
    'CREATE INDEX posting_allocation ON posting (allocation, "transaction")',
    *(
        _TRIGGER.format(table=table, verb=verb)
        for table in ("ledger_transaction", "posting")
        for verb in ("UPDATE", "DELETE")
    ),
)

_POSTGRESQL: Final = (
    "ALTER TABLE act RENAME TO ledger_transaction",
    "ALTER TABLE entry RENAME TO posting",
    'ALTER TABLE posting RENAME COLUMN act TO "transaction"',
    *(
        f"ALTER INDEX act_{name} RENAME TO ledger_transaction_{name}"
        for name in ("account", "charge", "client_key", "pkey", "user")
    ),
    *(f"ALTER INDEX entry_{name} RENAME TO posting_{name}" for name in ("allocation", "pkey")),
    "ALTER TABLE posting RENAME CONSTRAINT entry_act_fkey TO posting_transaction_fkey",
    "ALTER TABLE posting RENAME CONSTRAINT entry_allocation_fkey TO posting_allocation_fkey",
    *(
        f"ALTER TRIGGER {old}_never_changed ON {new} RENAME TO {new}_never_changed"
        for old, new in (("act", "ledger_transaction"), ("entry", "posting"))
    ),
)


def upgrade() -> None:
    """Rename tables and columns, with their indexes, constraints and append-only triggers."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in _SQLITE if is_sqlite else _POSTGRESQL:
        op.execute(statement)
    op.execute("ALTER TABLE charge_version RENAME COLUMN acts TO transfers")
