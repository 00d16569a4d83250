"""Accounts, users, allocations, rates and modes, and their updates of the gate."""

from datetime import timedelta

import pytest

from ledger.fixtures import BY, DAY, NOON, Clock, account, allocation, charge, keyed
from steward.bank.errors import BankError, BankUsage
from steward.bank.ledger import NO_ACCOUNT, Account
from steward.bank.ledger.ledger import Ledger
from steward.bank.records import ModeRule, Rate
from steward.core.timestamps import from_micros


class AccountCases:
    def test_an_account_is_what_it_was_made(self, ledger: Ledger) -> None:
        wanted = Account(
            name="Phys",
            owners=("ann", "ann", "bob"),
            credit_limit=5,
            only_listed=True,
            note="physics",
        )
        with ledger.transaction() as t:
            made = t.accounts.create(wanted, BY)
        with ledger.reading() as t:
            assert t.accounts.get("PHYS") == made
            assert made.name == "phys"
            assert made.owners == ("ann", "bob")
            assert made.created == NOON
            assert t.accounts.list_led_by("bob", frozenset()) == {"phys"}
            assert t.allocations.get_open_ended("phys").balance == 0

    @pytest.mark.parametrize("name", ["", "two words", "a,b", "new\nline", "x" * 101])
    def test_what_cannot_be_a_name(self, ledger: Ledger, name: str) -> None:
        with ledger.transaction() as t, pytest.raises(BankUsage):
            t.accounts.create(Account(name=name), BY)

    def test_a_name_is_given_once(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            t.accounts.create(Account(name="phys"), keyed("once"))
            t.accounts.create(Account(name="phys"), keyed("once"))
            with pytest.raises(BankUsage, match="already"):
                t.accounts.create(Account(name="PHYS"), BY)
            assert len(t.accounts.list_all()) == 1

    def test_parents_pay_for_those_that_draw_on_them(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "top", 100)
            account(t, "middle", parent="TOP", parent_pays=True)
            account(t, "low", parent="middle", parent_pays=True)
            account(t, "own", parent="middle")
            assert [t.accounts.find_payer(name) for name in ("low", "own", "top")] == [
                *("top", "own", "top")
            ]
            assert [each.name for each in t.accounts.list_children("middle")] == ["low", "own"]
            t.charges.post(charge(30, "low"), BY)
            assert t.queries.get_balance("low") == t.queries.get_balance("top") == 70
            with pytest.raises(BankUsage, match="account middle pays for account low"):
                t.transfers.deposit("low", 5, BY)
            with pytest.raises(BankUsage, match="descendant of top"):
                t.accounts.change("top", BY, parent="low")
            account(t, "rich", 5, parent="top")
            with pytest.raises(BankUsage, match="has a balance: transfer it"):
                t.accounts.change("rich", BY, parent_pays=True)

    def test_a_change_leaves_the_rest(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", owners=("ann",), credit_limit=5)
            t.accounts.change("phys", BY, credit_limit=7)
            t.accounts.change("phys", BY, closed=True, owners=())
            found = t.accounts.require("phys")
            assert (found.credit_limit, found.closed, found.owners) == (7, True, ())
            with pytest.raises(BankUsage, match="closed"):
                t.transfers.deposit("phys", 1, BY)
            with pytest.raises(BankUsage, match="unknown account 'none'"):
                t.accounts.change("none", BY, credit_limit=1)

    def test_what_is_charged_to_a_name_that_nobody_knows_is_on_record(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            t.charges.post(charge(10, "Ghost"), BY)
            t.charges.post(charge(10, "", job_id=2), BY)
            assert t.accounts.list_all() == []
            assert [each.name for each in t.accounts.list_all(unknown=True)] == [
                NO_ACCOUNT,
                "ghost",
            ]
            assert t.export_books().accounts == ()
            t.accounts.create(Account(name="ghost", credit_limit=20), BY)
            assert t.queries.get_balance("ghost") == -10
            assert [each.name for each in t.export_books().accounts] == ["ghost"]

    def test_users_have_limits_and_what_they_spent(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            t.accounts.set_user("phys", "ann", BY, limit=50)
            t.charges.post(charge(30), BY)
            t.charges.post(charge(7, user="bob", job_id=2), BY)
            ann, bob = t.accounts.list_users("phys")
            assert (ann.limit, ann.spent, ann.listed) == (50, 30, True)
            assert (bob.limit, bob.spent, bob.listed) == (None, 7, False)
            (listed,) = t.accounts.list_of_user("ann")
            assert listed == ann

    def test_allocations_have_an_end(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            made = allocation(t, "phys", 50)
            assert (made.balance, made.granted, made.is_active(NOON)) == (50, 50, True)
            later = t.allocations.change(made.number, BY, end=NOON + 2 * DAY, note="longer")
            assert (later.end, later.note) == (NOON + 2 * DAY, "longer")
            assert [each.number for each in t.allocations.list_own("phys")] == [made.number, 1]
            with pytest.raises(BankUsage, match="must end after"):
                t.allocations.change(made.number, BY, end=NOON - 2 * DAY)
            with pytest.raises(BankUsage, match="must end after"):
                allocation(t, "phys", 1, begin=NOON, end=NOON)
            with pytest.raises(BankUsage, match="has no end"):
                t.allocations.change(1, BY, end=NOON)

    def test_an_allocation_is_made_once_by_its_key(self, ledger: Ledger) -> None:
        def make(amount: int) -> int:
            with ledger.transaction() as t:
                return t.allocations.create(
                    "phys", amount, keyed("grant"), begin=NOON, end=NOON + DAY
                ).number

        with ledger.transaction() as t:
            account(t, "phys")
        assert make(5) == make(5)
        with pytest.raises(BankUsage, match="another request"):
            make(6)

    def test_books_show_what_has_changed(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100, credit_limit=3)
            account(t, "chem", 50, only_listed=True)
            account(t, "sub", parent="phys", parent_pays=True)
            t.accounts.set_user("chem", "eve", BY, limit=9)
            whole = t.export_books()
        assert whole.whole
        assert [each.name for each in whole.accounts] == ["chem", "phys", "sub"]
        with ledger.transaction() as t:
            t.charges.post(charge(10, "sub"), BY)
            t.charges.post(charge(4, "chem", job_id=2), BY)
            news = t.export_books(whole.seq)
        assert (news.after, news.whole) == (whole.seq, False)
        chem, phys, sub = news.accounts
        assert [each.name for each in chem.users] == ["eve"], "only those that are listed"
        assert (phys.allocations[0].balance, phys.allocations[0].total, phys.credit) == (90, 100, 3)
        assert (sub.payer, sub.users[0].spent) == ("phys", 10)
        with ledger.reading() as t:
            assert t.export_books(news.seq).accounts == ()
            assert t.export_books(news.seq + 1).whole, "of another ledger"

    def test_books_forget_allocations_that_are_over(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            allocation(t, "phys", 5)
            clock.go(days=2)
            assert len(t.export_books().accounts[0].allocations) == 2, "it is not emptied yet"
            t.transfers.expire(BY)
            assert len(t.export_books().accounts[0].allocations) == 1

    def test_rates_are_added_and_stay(self, ledger: Ledger) -> None:
        rate = Rate(cluster="tux", partition="cpu", weights={"cpu": 5})
        with ledger.transaction() as t:
            first = t.rates.add(rate, keyed("first"))
            assert t.rates.add(rate, keyed("first")) == first
            second = t.rates.add(
                Rate(cluster="cub", free=True, valid_from=NOON + timedelta(days=1)), BY
            )
            assert (first.number, first.valid_from, second.number) == (1, NOON, 2)
            assert t.rates.list_all() == [first, second]
            assert t.rates.list_all("cub") == [second]
            assert t.rates.get(1) == first
            assert from_micros(first.created_us) == from_micros(second.created_us) == NOON
            rules = t.export_rules()
            assert rules.rates == (first, second)
            assert rules.seq == t.seq
            with pytest.raises(BankUsage):
                t.rates.add(Rate(), BY)
        with ledger.transaction() as t:
            account(t, "phys")
            assert t.export_rules().seq == rules.seq

    def test_the_last_mode_of_a_part_holds(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            t.modes.set(ModeRule(mode="observe", cluster="tux"), BY)
            t.modes.set(ModeRule(mode="enforce", cluster="tux"), BY)
            t.modes.set(ModeRule(mode="off", cluster="tux", account="PHYS"), BY)
            t.modes.set(ModeRule(mode="off", cluster="tux", account="phys"), BY)
            assert t.export_rules().modes == (
                ModeRule(mode="enforce", cluster="tux"),
                ModeRule(mode="off", cluster="tux", account="phys"),
            )
            seq = t.export_rules().seq
            t.modes.remove("tux", "", "Phys", BY)
            assert len(t.modes.list_all()) == 1
            assert t.export_rules().seq > seq
            with pytest.raises(BankUsage):
                t.modes.remove("tux", "", "phys", BY)
            with pytest.raises(BankUsage):
                t.modes.set(ModeRule(mode="perhaps"), BY)  # type: ignore[arg-type]

    def test_a_look_changes_nothing(self, ledger: Ledger) -> None:
        with pytest.raises(BankError), ledger.reading() as t:
            t.accounts.create(Account(name="phys"), BY)
        with ledger.reading() as t:
            assert t.accounts.list_all() == []
