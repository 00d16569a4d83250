"""Add the CPU hours of jobs that myBRC clients reported, so that SQL can sum them up.

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
    """Add the column ``cpu_hours``; jobs reported earlier count as 0."""
    op.add_column(
        "told",
        sqlalchemy.Column(
            "cpu_hours", sqlalchemy.Double, nullable=False, server_default=sqlalchemy.text("0")
        ),
    )
