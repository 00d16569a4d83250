"""Ledger tests on SQLite."""

from harness.empty_ledger import empty, place
from ledger.accounts import AccountCases
from ledger.charges import ChargeCases
from ledger.fixtures import clock, ledger
from ledger.side_records import ListCases
from ledger.transactions import MoneyCases

__all__ = ["clock", "empty", "ledger", "place"]


class TestAccounts(AccountCases): ...


class TestCharges(ChargeCases): ...


class TestLists(ListCases): ...


class TestMoney(MoneyCases): ...
