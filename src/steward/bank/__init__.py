"""Bank: charge jobs in service units (SU), reserve SU at submission, and keep the ledger."""
