"""The ledger on SQLite does what any ledger does."""

from pathlib import Path

import pytest

from ledger.accounts import AccountCases
from ledger.charges import ChargeCases
from ledger.lists import ListCases
from ledger.money import MoneyCases
from ledger.site import clock, ledger, settings_for
from steward.config import Settings

__all__ = ["clock", "ledger"]


@pytest.fixture
def place(tmp_path: Path) -> Settings:
    return settings_for(str(tmp_path))


class TestAccounts(AccountCases): ...


class TestCharges(ChargeCases): ...


class TestLists(ListCases): ...


class TestMoney(MoneyCases): ...
