"""Manual transactions, statements, and balances at the end of an allocation."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

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
from steward.bank.ledger import Authorship, StatementLine
from steward.bank.ledger.ledger import Ledger
from steward.bank.money import MAX_AMOUNT


class MoneyCases:
    def test_a_deposit_says_all_about_itself(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            made = t.transfers.deposit("PHYS", 70, Authorship(who="ann", why="a grant", key="k1"))
        assert (made.kind, made.posted_by, made.reason, made.key) == (
            "deposit",
            "ann",
            "a grant",
            "k1",
        )
        assert (made.account, made.amount, made.at) == ("phys", 70, NOON)
        assert [(each.name, each.amount, each.balance) for each in made.postings] == [
            ("issued", -70, -70),
            ("allocation:1", 70, 70),
        ]
        with ledger.reading() as t:
            assert t.transfers.get(made.number) == t.transfers.find_by_key("k1") == made
            assert t.transfers.get(made.number + 1) is None
            assert t.transfers.find_by_key("k2") is None

    def test_a_repeat_moves_nothing(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            account(t, "chem")
            for _ in range(2):
                t.transfers.deposit("phys", 5, keyed("a"))
                t.transfers.withdraw("phys", 5, keyed("b"))
                t.transfers.transfer("phys", "chem", 5, keyed("c"))
                t.transfers.refund("phys", 5, keyed("d"))
                t.transfers.adjust("phys", -5, keyed("e"))
            assert t.queries.get_balance("phys") == 95
            for other in (keyed("a"), keyed("b")):
                with pytest.raises(BankUsage, match="another request"):
                    t.transfers.deposit("phys", 6, other)

    @pytest.mark.parametrize("amount", [0, -1, MAX_AMOUNT + 1])
    def test_amounts_that_are_none(self, ledger: Ledger, amount: int) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
            with pytest.raises(BankUsage):
                t.transfers.deposit("phys", amount, BY)
            with pytest.raises(BankUsage):
                t.transfers.withdraw("phys", amount, BY)

    def test_no_balance_is_beyond_all_measure(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", MAX_AMOUNT)
        with pytest.raises(BankUsage, match="beyond the limit"), ledger.transaction() as t:
            t.transfers.deposit("phys", MAX_AMOUNT, BY)
        with ledger.reading() as t:
            assert t.queries.get_balance("phys") == MAX_AMOUNT

    def test_withdrawing_takes_what_lasts_longest(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
            soon = allocation(t, "phys", 20).number
            late = allocation(t, "phys", 20, end=NOON + 2 * DAY).number
            t.transfers.withdraw("phys", 25, BY)
            assert balances(t, "phys") == {soon: 20, late: 5, 1: 0}
            t.transfers.withdraw("phys", 7, BY, allocation=soon)
            assert balances(t, "phys")[soon] == 13
            with pytest.raises(BankRefused, match="insufficient funds"):
                t.transfers.withdraw("phys", 14, BY, allocation=soon)
            with pytest.raises(BankRefused, match="insufficient funds"):
                t.transfers.withdraw("phys", 19, BY)
            assert t.queries.get_balance("phys") == 18

    def test_a_debt_is_no_money(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10, credit_limit=100)
            t.charges.post(charge(60), BY)
            with pytest.raises(BankRefused):
                t.transfers.withdraw("phys", 1, BY)

    def test_a_transfer_goes_where_it_is_sent(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            account(t, "chem")
            target = allocation(t, "chem", 0).number
            t.transfers.transfer("phys", "chem", 40, BY, target_allocation=target)
            assert (balances(t, "phys"), balances(t, "chem")) == ({1: 60}, {target: 40, 2: 0})
            t.transfers.transfer("chem", "chem", 10, BY, source_allocation=target)
            assert balances(t, "chem") == {target: 30, 2: 10}
            for wrong in (target, 99):
                with pytest.raises(BankUsage):
                    t.transfers.deposit("phys", 1, BY, allocation=wrong)
            with pytest.raises(BankRefused):
                t.transfers.transfer("phys", "phys", 1, BY)

    def test_adjusting_goes_below_zero_only_without_an_end(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            dated = allocation(t, "phys", 5).number
            t.transfers.adjust("phys", -30, BY)
            with pytest.raises(BankRefused):
                t.transfers.adjust("phys", -6, BY, allocation=dated)
            assert balances(t, "phys") == {dated: 5, 1: -30}

    def test_what_is_refused_leaves_the_transaction_as_it_was(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
            with pytest.raises(BankRefused):
                t.transfers.withdraw("phys", 11, BY)
            t.transfers.withdraw("phys", 4, BY)
        with ledger.reading() as t:
            assert t.queries.get_balance("phys") == 6

    def test_an_error_undoes_all(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
            seq = t.seq

        def fail() -> None:
            with ledger.transaction() as t:
                t.transfers.deposit("phys", 5, BY)
                t.move_cursor("bank", 9)
                t.settlements.add("h", "c", 5, final=True)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with ledger.reading() as t:
            assert (t.queries.get_balance("phys"), t.read_cursor("bank"), t.seq) == (10, 0, seq)
            assert t.settlements.list_after(0) == []

    def test_what_is_left_at_the_end_expires_once(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
            dated = allocation(t, "phys", 50).number
            assert t.transfers.expire(BY) == []
        clock.go(days=1)
        for expected in (1, 0):
            with ledger.transaction() as t:
                made = t.transfers.expire(BY)
                assert len(made) == expected
                assert balances(t, "phys") == {dated: 0, 1: 10}
                assert t.queries.get_balance("phys") == 10

    def test_what_running_jobs_need_is_kept(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            dated = allocation(t, "phys", 50).number
            clock.go(days=1)
            (first,) = t.transfers.expire(BY, reserved={dated: 30})
            assert first.amount == 20
            assert t.transfers.expire(BY, reserved={dated: 30}) == []
            t.charges.post(charge(25), BY)
            assert balances(t, "phys") == {dated: 5, 1: 0}
            (rest,) = t.transfers.expire(BY)
            assert rest.amount == 5

    def test_what_rolls_over_goes_to_the_next(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            first = allocation(t, "phys", 50, rollover="next").number
            third = allocation(t, "phys", 1, begin=NOON + 2 * DAY, end=NOON + 3 * DAY).number
            second = allocation(
                t, "phys", 1, begin=NOON + DAY, end=NOON + 2 * DAY, rollover="next"
            ).number
            clock.go(days=1)
            (made,) = t.transfers.expire(BY)
            assert (made.kind, made.amount) == ("rollover", 50)
            assert balances(t, "phys") == {first: 0, second: 51, third: 1, 1: 0}
            found = t.allocations.get(second)
            assert found is not None
            assert found.granted == 51
            clock.go(days=1)
            t.transfers.expire(BY)
            clock.go(days=1)
            t.transfers.expire(BY)
            assert balances(t, "phys") == {first: 0, second: 0, third: 0, 1: 0}

    def test_what_rolls_over_with_nothing_behind_it_is_not_lost(
        self, ledger: Ledger, clock: Clock
    ) -> None:
        with ledger.transaction() as t:
            account(t, "phys")
            allocation(t, "phys", 50, rollover="next")
            clock.go(days=1)
            t.transfers.expire(BY)
            assert t.queries.get_balance("phys") == 50

    def test_a_statement_runs_from_opening_to_closing(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 100)
            account(t, "chem")
            account(t, "sub", parent="phys", parent_pays=True)
        begin = clock.go(days=1)
        with ledger.transaction() as t:
            t.transfers.transfer("phys", "chem", 10, BY)
            t.charges.post(charge(20), BY)
            t.charges.post(charge(5, "sub", user="bob", job_id=2), BY)
        end = clock.go(days=1)
        with ledger.transaction() as t:
            t.transfers.deposit("phys", 1, BY)
        with ledger.reading() as t:
            said = t.queries.get_statement("phys", begin=begin, end=end)
            assert (said.opening, said.closing) == (100, 65)
            assert [(each.kind, each.amount, each.balance) for each in said.lines] == [
                ("transfer", -10, 90),
                ("charge", -20, 70),
                ("charge", -5, 65),
            ]
            assert said.lines[1].charge == charge(20).key
            assert said.lines[1].allocations == (1,)
            assert t.queries.get_statement("phys", limit=1).opening == 65
            # Page by page backwards it is the same.
            every, older = t.queries.get_statement("phys").lines, 0
            paged: list[StatementLine] = []
            while page := t.queries.get_statement("phys", limit=2, before=older).lines:
                paged[:0] = page
                older = page[0].number
            assert tuple(paged) == every
            assert [each.amount for each in t.queries.get_statement("chem").lines] == [10]
            assert t.queries.get_statement("sub").closing == -5
            assert t.queries.get_statement(user="ann").closing == -20
            assert t.queries.get_statement("phys", user="bob").lines == ()
            assert t.queries.get_balance("phys", at=begin - timedelta(hours=1)) == 100
            with pytest.raises(BankUsage):
                t.queries.get_statement()
            with pytest.raises(BankUsage):
                t.queries.get_statement("none")

    def test_usage_is_summed_by_anything(self, ledger: Ledger) -> None:
        # Half an hour before and behind midnight in Berlin: May ends between them.
        before = datetime(2026, 5, 31, 21, 30, tzinfo=UTC)
        with ledger.transaction() as t:
            account(t, "phys", 1000)
            for number, (amount, user, start) in enumerate(
                [
                    (10, "ann", before),
                    (20, "ann", before + timedelta(hours=1)),
                    (40, "bob", before + timedelta(hours=1)),
                ]
            ):
                t.charges.post(charge(amount, user=user, start=start, job_id=number), BY)
            t.transfers.refund_charge(charge(0, job_id=2).key, BY, amount=1)
            rows = t.queries.sum_usage(("user", "month"), zone=ZoneInfo("Europe/Berlin"))
            assert [(each.user, each.month, each.amount) for each in rows] == [
                ("ann", "2026-05", 10),
                ("ann", "2026-06", 20),
                ("bob", "2026-06", 39),
            ]
            days = t.queries.sum_usage(("day",), zone=ZoneInfo("Europe/Berlin"))
            assert [row.day for row in days] == ["2026-05-31", "2026-06-01"]
            assert [row.amount for row in days] == [
                row.amount
                for row in t.queries.sum_usage(("month",), zone=ZoneInfo("Europe/Berlin"))
            ]
            (every,) = t.queries.sum_usage(())
            assert (every.amount, every.charges) == (69, 3)
            (ann,) = t.queries.sum_usage(
                ("account",), users=["ann"], begin=before, end=NOON + 60 * DAY
            )
            assert (ann.account, ann.amount) == ("phys", 30)
            assert t.queries.sum_usage(("partition", "cluster"), accounts=["chem"]) == []
            with pytest.raises(BankUsage):
                t.queries.sum_usage(("colour",))

    def test_hostile_text_is_kept_as_far_as_it_can_be(self, ledger: Ledger) -> None:
        hostile = "a\0b\ud800c'; DROP TABLE posting; --\u202e"
        with ledger.transaction() as t:
            account(t, "phys", note=hostile)
            made = t.transfers.deposit("phys", 1, Authorship(who=hostile, why=hostile, key=hostile))
            again = t.transfers.deposit("phys", 1, Authorship(who="x", key=hostile))
            assert made.number == again.number
            t.charges.post(msgspec.structs.replace(charge(5), user=hostile, partition=hostile), BY)
            assert t.queries.get_statement(user=hostile).closing == -5
            assert "DROP TABLE" in made.reason
