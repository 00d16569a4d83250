"""The ledger's schema, version by version; see ``steward.bank.ledger.tables``."""
