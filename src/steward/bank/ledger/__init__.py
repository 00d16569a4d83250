"""The ledger: accounts, allocations, and entries that are never changed."""
