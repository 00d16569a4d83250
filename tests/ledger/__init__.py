"""Ledger tests that run on every database.

The classes here contain the tests; tests/unit runs them on SQLite, tests/integration on PostgreSQL.
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
