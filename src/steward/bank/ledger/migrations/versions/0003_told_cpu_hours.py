"""Jobs that clients told of are summed up by their CPU time, too.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep the CPU time beside what was told; what was told before counts as none."""
    op.add_column(
        "told",
        sqlalchemy.Column(
            "cpu_hours", sqlalchemy.Double, nullable=False, server_default=sqlalchemy.text("0")
        ),
    )
