"""Alembic migrations of the ledger's schema; ``steward.bank.ledger.tables`` runs them."""
