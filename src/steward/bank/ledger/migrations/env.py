"""Alembic environment: run the migrations on the connection of ``upgrade_schema``."""

from alembic import context

from steward.bank.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,  # all of them run in the transaction that is already open
)
context.run_migrations()
