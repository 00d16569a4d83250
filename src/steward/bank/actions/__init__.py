"""Bank actions: one module for each kind. Their context is a ``bank.context.BankContext``."""
