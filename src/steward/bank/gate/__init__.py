"""The gate: one process that decides whether an account can pay for a job, and keeps the holds."""
