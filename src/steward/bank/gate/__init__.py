"""The gate: one process that decides whether an account can pay for a job, and keeps the SU holds.

A submit: the plugin in slurmctld sends a line to `server.py`; `plugin_answers.py` checks that this
gate may decide; `holds.py` has `admission.py` decide from balances (`balances.py`), modes and rates
(`policy.py`), and writes the hold to gate.db (`store.py`). The reply puts a token (`token.py`) into
the job's admin_comment. Steward's other processes use `client.py`, which `calls.py` answers:
they send balances, rules and polls, confirm and settle holds (`sync.py`), and fetch facts.

Life of a hold: placed at submit; confirmed by a poll that shows the job, or void after a poll that
does not, or expired; started; reduced by each charge; closed by the final one, or released.
"""
