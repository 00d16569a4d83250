"""Charges: idempotency key, corrections, refunds, and the allocation that pays."""

from datetime import timedelta

import msgspec
import pytest

from ledger.fixtures import (
    BY,
    DAY,
    NOON,
    Clock,
    account,
    allocation,
    balances,
    charge,
    keyed,
)
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account
from steward.bank.ledger.ledger import Ledger
from steward.bank.records import AllocationShare


class ChargeCases:
    def test_a_charge_is_posted_once(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            first = t.charges.post(charge(30), BY)
            assert (first.added, first.amount, first.first, first.payer) == (30, 30, True, "phys")
            assert first.shares == (AllocationShare(allocation=1, amount=30),)
            again = t.charges.post(charge(30, why="reconcile", source="sacct"), BY)
            assert (again.added, again.amount, again.first, again.transfers) == (0, 30, False, ())
            assert again.shares == first.shares
            found = t.charges.get(charge(30).key)
            assert found is not None
            assert (found.charge, found.versions, found.payer) == (charge(30), 1, "phys")
            assert t.queries.get_balance("phys") == 70

    def test_a_correction_moves_the_difference_and_says_why(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            t.charges.post(charge(30), BY)
            more = t.charges.post(charge(45, why="correction"), BY)
            less = t.charges.post(charge(20, why="reconcile", source="sacct"), BY)
            assert (more.added, less.added, less.amount) == (15, -25, 20)
            transfer = t.transfers.get(less.transfers[0])
            assert transfer is not None
            assert (transfer.kind, transfer.charge) == ("correction", charge(0).key)
            assert "45" in transfer.reason
            assert "20" in transfer.reason
            versions = t.charges.list_versions(charge(0).key)
            assert [(each.number, each.charge.amount, each.added) for each in versions] == [
                (1, 30, 30),
                (2, 45, 15),
                (3, 20, -25),
            ]
            assert versions[2].transfers == less.transfers
            assert t.accounts.list_users("phys")[0].spent == 20

    def test_a_charge_of_nothing_is_on_record(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            seq = t.seq
            made = t.charges.post(charge(0), BY)
            assert (made.added, made.transfers, made.first, t.seq) == (0, (), True, seq)
            assert t.charges.get(charge(0).key) is not None
            t.charges.post(charge(4), BY)
            t.charges.post(charge(0), BY)
            assert t.queries.get_balance("phys") == 0

    def test_the_first_to_end_pays_first(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            late = allocation(t, "phys", 10, end=NOON + 2 * DAY).number
            soon = allocation(t, "phys", 10).number
            allocation(t, "phys", 10, begin=NOON + timedelta(hours=1), end=NOON + DAY)
            made = t.charges.post(charge(25), BY)
            assert made.shares == (
                AllocationShare(allocation=1, amount=5),
                AllocationShare(allocation=late, amount=10),
                AllocationShare(allocation=soon, amount=10),
            )

    def test_what_its_hold_names_pays_before(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            soon = allocation(t, "phys", 10).number
            late = allocation(t, "phys", 10, end=NOON + 2 * DAY).number
            shares = (
                AllocationShare(allocation=late, amount=6),
                AllocationShare(allocation=99, amount=5),
            )
            t.charges.post(charge(8, shares=shares), BY)
            assert balances(t, "phys") == {soon: 8, late: 4, 1: 100}
            t.charges.post(charge(9, shares=shares), BY)
            assert balances(t, "phys") == {soon: 7, late: 4, 1: 100}, "its share is used up"

    def test_a_run_is_paid_by_what_was_there_when_it_started(
        self, ledger: Ledger, clock: Clock
    ) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            old = allocation(t, "phys", 10).number
            new = allocation(t, "phys", 10, begin=NOON + DAY, end=NOON + 2 * DAY).number
            clock.go(days=1, hours=1)
            t.charges.post(charge(4), BY)
            assert balances(t, "phys") == {old: 6, new: 10, 1: 0}

    def test_beyond_the_means_it_is_marked(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10, credit_limit=5)
            first = t.charges.post(charge(12), BY)
            assert (first.overdraw, t.queries.get_balance("phys")) == (0, -2)
            second = t.charges.post(charge(9, job_id=2), BY)
            assert (second.overdraw, t.queries.get_balance("phys")) == (6, -11)
            less = t.charges.post(charge(5, job_id=2), BY)
            assert less.overdraw == 2

    def test_what_may_not_overdraw_is_refused(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10, credit_limit=5)
            allocation(t, "phys", 5)
            t.charges.post(charge(20, overdraw=False), BY)
            with pytest.raises(BankRefused, match="cannot pay"):
                t.charges.post(charge(1, job_id=2, overdraw=False), BY)
            t.charges.post(charge(19, overdraw=False), BY)
            assert t.charges.get(charge(0, job_id=2).key) is None

    def test_what_comes_back_comes_to_the_last_first(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 5)
            soon = allocation(t, "phys", 10).number
            t.charges.post(charge(20), BY)
            assert balances(t, "phys") == {soon: 0, 1: -5}
            t.charges.post(charge(8), BY)
            assert balances(t, "phys") == {soon: 2, 1: 5}

    def test_another_account_is_charged_instead(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            account(t, "chem", 100)
            t.charges.post(charge(30), BY)
            moved = t.charges.post(charge(40, "chem"), BY)
            assert (moved.added, len(moved.transfers), moved.payer) == (10, 2, "chem")
            assert (t.queries.get_balance("phys"), t.queries.get_balance("chem")) == (100, 60)
            t.charges.post(charge(40, "chem", user="bob"), BY)
            assert [each.spent for each in t.accounts.list_of_user("ann")] == [0, 0]
            assert [each.spent for each in t.accounts.list_of_user("bob")] == [40]

    def test_a_correction_stays_with_whoever_paid(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "top", 100)
            account(t, "sub", parent="top", parent_pays=True)
            t.charges.post(charge(30, "sub"), BY)
            t.accounts.change("sub", BY, parent_pays=False)
            t.charges.post(charge(35, "sub"), BY)
            t.charges.post(charge(7, "sub", job_id=2), BY)
            assert (t.queries.get_balance("top"), t.queries.get_balance("sub")) == (65, -7)

    def test_what_changed_charges_is_told_in_order_with_who_did_it(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            assert t.charges.list_changed(0) == []
            t.charges.post(charge(30), BY)
            before = t.seq
            t.charges.post(charge(45, why="reconcile"), msgspec.structs.replace(BY, who="r"))
            t.transfers.refund_charge(charge(0).key, keyed("sorry"), amount=10)
            account(t, "chem", 5)
            found = t.charges.list_changed(before)
            assert [who for _, who, _ in found] == ["r", keyed("sorry").who]
            assert [number for number, _, _ in found] == sorted(number for number, _, _ in found)
            assert {(row.charge.amount, row.refunded) for _, _, row in found} == {(45, 10)}
            assert t.charges.list_changed(before, limit=1) == found[:1]
            assert t.charges.list_changed(found[-1][0]) == []

    def test_a_refund_stays_when_corrections_come(self, ledger: Ledger) -> None:
        key = charge(0).key
        with ledger.transaction() as t:
            account(t, "phys", 100)
            t.charges.post(charge(30), BY)
            made = t.transfers.refund_charge(key, keyed("sorry"), amount=10)
            assert (made.kind, made.charge, made.amount) == ("refund", key, 10)
            assert t.transfers.refund_charge(key, keyed("sorry"), amount=10) == made
            assert t.queries.get_balance("phys") == 80
            assert t.charges.post(charge(40), BY).amount == 30
            assert t.queries.get_balance("phys") == 70
            assert t.charges.post(charge(5), BY).amount == 0
            assert t.queries.get_balance("phys") == 100
            with pytest.raises(BankUsage):
                t.transfers.refund_charge(key, BY)
            with pytest.raises(BankUsage, match="unknown charge 'none'"):
                t.transfers.refund_charge("none", BY)
            t.charges.post(charge(25), BY)
            with pytest.raises(BankRefused, match="refund exceeds the charge"):
                t.transfers.refund_charge(key, BY, amount=16)
            assert t.transfers.refund_charge(key, BY).amount == 15

    def test_a_jobs_charges_are_found(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            runs = [charge(1), charge(2, restarts=1), charge(3, piece_us=5)]
            later = msgspec.structs.replace(charge(4), first_submit=NOON + DAY)
            for each in [*runs, later, charge(9, job_id=2)]:
                t.charges.post(each, BY)
            assert [each.charge for each in t.charges.list_of_job("tux", 1)] == [*runs, later]
            assert [each.charge for each in t.charges.list_of_job("tux", 1, NOON)] == runs
            first, *rest = t.charges.list_since(NOON, limit=1)
            assert rest == []
            others = t.charges.list_since(NOON, "tux", after=first.charge.key)
            assert len(others) == 4
            assert t.charges.list_since(NOON + DAY) == []

    def test_the_amount_is_none(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            with pytest.raises(BankUsage):
                t.charges.post(charge(-1), BY)
            assert t.accounts.list_all(unknown=True) == []

    def test_an_account_that_was_charged_before_it_was_created_keeps_its_debt(
        self, ledger: Ledger
    ) -> None:
        with ledger.transaction() as t:
            account(t, "top")
            t.charges.post(charge(10, "sub"), BY)
            with pytest.raises(BankUsage, match="account sub has a balance: transfer it"):
                t.accounts.create(Account(name="sub", parent="top", parent_pays=True), BY)
            t.accounts.create(Account(name="sub", parent="top"), BY)
            t.transfers.adjust("sub", 10, BY)
            t.accounts.change("sub", BY, parent_pays=True)
            assert t.accounts.find_payer("sub") == "top"
