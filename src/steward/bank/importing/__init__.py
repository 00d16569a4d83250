"""What other programs know of accounts and prices, as a plan for the ledger."""
