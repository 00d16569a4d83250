"""Runs the migrations on the connection that ``steward.bank.ledger.tables`` hands over."""

from alembic import context

from steward.bank.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,  # it is all in the transaction that is open already
)
context.run_migrations()
