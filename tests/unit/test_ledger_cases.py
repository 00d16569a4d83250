"""The ledger on SQLite does what any ledger does."""

from harness.ledger_place import empty, place
from ledger.accounts import AccountCases
from ledger.charges import ChargeCases
from ledger.lists import ListCases
from ledger.money import MoneyCases
from ledger.site import clock, ledger

__all__ = ["clock", "empty", "ledger", "place"]


class TestAccounts(AccountCases): ...


class TestCharges(ChargeCases): ...


class TestLists(ListCases): ...


class TestMoney(MoneyCases): ...
