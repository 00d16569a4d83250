"""Tests of a ledger that run on every database.

The classes here have the tests; those of tests/unit run them on SQLite, those of
tests/integration on PostgreSQL.
"""

import pytest

pytest.register_assert_rewrite(
    "ledger.accounts",
    "ledger.charges",
    "ledger.concurrency",
    "ledger.side_records",
    "ledger.state_machine",
    "ledger.transactions",
)
