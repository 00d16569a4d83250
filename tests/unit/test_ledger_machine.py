"""Any interleaving of what moves money keeps the ledger on SQLite right."""

import itertools
import shutil
from pathlib import Path

from ledger.machine import SETTINGS, LedgerMachine
from ledger.site import settings_for
from steward.bank.ledger import open_ledger
from steward.config import Settings


def test_the_ledger_is_right_whatever_happens(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    open_ledger(settings_for(str(empty))).close()
    numbers = itertools.count()

    class OnSqlite(LedgerMachine):
        @staticmethod
        def fresh() -> Settings:
            where = tmp_path / str(next(numbers))
            shutil.copytree(empty, where)
            return settings_for(str(where))

    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(OnSqlite, settings=SETTINGS)  # type: ignore[no-untyped-call]
