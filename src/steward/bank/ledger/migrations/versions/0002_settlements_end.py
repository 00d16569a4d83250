"""Allow the deletion of settlements that the gate has applied; they still cannot be changed.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the trigger that forbids the deletion of settlements."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER settlement_never_DELETE")
        return
    op.execute("DROP TRIGGER settlement_never_changed ON settlement")
    op.execute(
        "CREATE TRIGGER settlement_never_changed BEFORE UPDATE OR TRUNCATE ON settlement "
        "EXECUTE FUNCTION steward_for_ever()"
    )
