"""Add the table of holds that a remote myBRC server counts as used.

With it, Steward can read that server's balances.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, empty: balances are right once jobs reported earlier have ended."""
    op.create_table(
        "remote_hold",
        sqlalchemy.Column("cluster", sqlalchemy.Text, primary_key=True),
        sqlalchemy.Column("job_id", sqlalchemy.BigInteger, primary_key=True, autoincrement=False),
        sqlalchemy.Column("account", sqlalchemy.Text, nullable=False),
        sqlalchemy.Column("uid", sqlalchemy.BigInteger, nullable=False),
        sqlalchemy.Column("amount", sqlalchemy.BigInteger, nullable=False),
    )
    op.create_index("remote_hold_account", "remote_hold", ["account"])
