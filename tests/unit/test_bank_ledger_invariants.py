"""Any order of transfers keeps the ledger on SQLite consistent."""

import itertools
import shutil
from pathlib import Path

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from harness.empty_ledger import empty
from ledger.fixtures import settings_for
from ledger.state_machine import SETTINGS, LedgerMachine
from steward.core.config import Settings

__all__ = ["empty"]


def test_the_ledger_is_right_whatever_happens(tmp_path: Path, empty: Path) -> None:
    numbers = itertools.count()

    class OnSqlite(LedgerMachine):
        @staticmethod
        def fresh() -> Settings:
            where = tmp_path / str(next(numbers))
            shutil.copytree(empty, where)
            return settings_for(str(where))

    few = hypothesis.settings(SETTINGS, max_examples=10, stateful_step_count=20)
    run_state_machine_as_test(OnSqlite, settings=few)
