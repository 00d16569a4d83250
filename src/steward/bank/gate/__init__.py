"""The gate: the one process that decides whether an account can pay, and keeps the holds."""
