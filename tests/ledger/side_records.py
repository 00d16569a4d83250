"""Side records of the ledger: positions, settlements, outbox, tokens, leases."""

from datetime import timedelta

import pytest

from ledger.fixtures import BY, DAY, NOON, Clock, account
from steward.bank.errors import BankUsage
from steward.bank.ledger import RejectedJob, ReportedJob, ReportedTotals
from steward.bank.ledger.leases import LeaseLost
from steward.bank.ledger.ledger import Ledger
from steward.bank.ledger.side_records import MAX_REJECTIONS_PER_DAY


class ListCases:
    def test_positions_and_marks(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            assert (t.read_cursor("bank"), t.read_mark("seen")) == (0, "")
            t.move_cursor("bank", 7)
            t.move_cursor("bank", 9)
            t.set_mark("seen", "a")
            t.set_mark("seen", "b\0")
        with ledger.reading() as t:
            assert (t.read_cursor("bank"), t.read_mark("seen"), t.read_cursor("other")) == (
                9,
                "b\ufffd",
                0,
            )

    def test_settlements_have_an_order(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            first = t.settlements.add("h1", "c1", 5, frees=7, final=False)
            second = t.settlements.add("h1", "", 0, final=True)
        with ledger.reading() as t:
            assert t.settlements.list_after(0) == [first, second]
            assert t.settlements.list_after(0, limit=1) == [first]
            assert t.settlements.list_after(first.seq) == [second]
            assert (first.seq, first.frees, second.final) == (1, 7, True)

    def test_a_threshold_is_told_once(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            assert t.thresholds.record_reported(3, "used", 75)
            assert not t.thresholds.record_reported(3, "used", 75)
            assert t.thresholds.record_reported(3, "used", 90)
            t.thresholds.forget_reported(3, "used")
            assert t.thresholds.record_reported(3, "used", 75)

    def test_the_outbox_keeps_until_it_is_told(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.transaction() as t:
            first = t.outbox.add("mybrc", b"one", key="k")
            assert t.outbox.add("mybrc", b"other", key="k") == first
            second = t.outbox.add("mybrc", b"two\0")
            t.outbox.add("notice", b"three")
            assert [each.payload for each in t.outbox.list_due("mybrc", NOON)] == [b"one", b"two\0"]
            t.outbox.record_failure(first, NOON + DAY, "away")
            (due,) = t.outbox.list_due("mybrc", NOON)
            assert due.id == second
            t.outbox.mark_delivered(second)
            assert t.outbox.list_due("mybrc", NOON) == []
            (due,) = t.outbox.list_due("mybrc", NOON + DAY)
            assert (due.tries, due.error, due.key) == (1, "away", "k")
            t.outbox.mark_delivered(first)
            assert t.outbox.add("mybrc", b"again", key="k") == first, "it was told"
            assert (t.outbox.count_pending("mybrc"), t.outbox.count_pending("notice")) == (0, 1)
            with pytest.raises(BankUsage):
                t.outbox.record_failure(99, NOON, "")
            clock.go(days=200)
            last = t.outbox.add("mybrc", b"new")
            t.outbox.mark_delivered(last)
            assert t.outbox.add("mybrc", b"new", key="k") == last + 1, "forgotten by now"

    def test_what_is_set_aside_is_not_due_until_somebody_asks(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            first, second = t.outbox.add("notice", b"one"), t.outbox.add("notice", b"two")
            t.outbox.add("event", b"three")
            t.outbox.make_dead_letter(first, "refused\0")
            assert [each.id for each in t.outbox.list_due("notice", NOON + DAY)] == [second]
            assert t.outbox.count_pending("notice") == 1
            found = t.outbox.list_undelivered(("notice", "mybrc"))
            assert [(each.id, each.aside, each.payload) for each in found] == [
                (first, True, b"one"),
                (second, False, b"two"),
            ]
            assert (found[0].tries, found[0].error) == (1, "refused\ufffd")
            assert t.outbox.list_undelivered(("notice",), limit=1) == found[:1]
            assert t.outbox.retry(("mybrc",), ()) == 0
            assert t.outbox.retry(("notice",), (first, 99)) == 1
            assert [each.tries for each in t.outbox.list_due("notice", NOON)] == [0, 0]
            t.outbox.make_dead_letter(second, "refused")
            assert t.outbox.retry(("notice",), ()) == 1
            t.outbox.mark_delivered(first)
            assert t.outbox.retry(("notice",), (first,)) == 0, "it was told"
            with pytest.raises(BankUsage):
                t.outbox.make_dead_letter(99, "")

    def test_tokens(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            t.tokens.add("ann", "d1", NOON, NOON + DAY, "hers")
            t.tokens.add("bob", "d2", NOON)
            found = t.tokens.find(["d0", "d1"])
            assert found is not None
            assert (found.user, found.expires, found.note) == ("ann", NOON + DAY, "hers")
            assert [each.digest for each in t.tokens.list_of_user("bob")] == ["d2"]
            assert len(t.tokens.list_all()) == 2
            assert t.tokens.delete("d1")
            assert not t.tokens.delete("d1")
            assert t.tokens.find(["d1"]) is None
            assert t.tokens.find([]) is None

    def test_settlements_that_were_taken_are_forgotten(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            made = [t.settlements.add("h1", "", 1, final=False) for _ in range(5)]
        with ledger.transaction() as t:
            assert t.settlements.prune(made[2].seq) == 3
            assert t.settlements.list_after(0) == made[3:]
        assert ledger.check() == []
        with ledger.transaction() as t:
            assert t.settlements.prune(made[4].seq + 100) == 1
            assert t.settlements.add("h1", "", 1, final=False).seq == made[4].seq + 1
        assert ledger.check() == []

    def test_refusals_are_bounded_for_a_user_and_forgotten(self, ledger: Ledger) -> None:
        def refused(number: int, uid: int = 1, day: int = 0) -> RejectedJob:
            return RejectedJob(id=f"{uid}:{day}:{number}", at=NOON + DAY * day, uid=uid)

        with ledger.transaction() as t:
            assert (
                sum(t.rejections.add(refused(n)) for n in range(MAX_REJECTIONS_PER_DAY - 1))
                == MAX_REJECTIONS_PER_DAY - 1
            )
        with ledger.transaction() as t:
            assert [
                t.rejections.add(refused(n))
                for n in (0, MAX_REJECTIONS_PER_DAY, MAX_REJECTIONS_PER_DAY + 1)
            ] == [
                False,
                True,
                False,
            ]
            assert t.rejections.add(refused(1, uid=2))
            assert t.rejections.add(refused(1, day=1))
        with ledger.transaction() as t:
            assert not t.rejections.add(refused(MAX_REJECTIONS_PER_DAY + 2))
            assert t.rejections.prune(NOON + DAY) == MAX_REJECTIONS_PER_DAY + 1
            assert len(t.rejections.list_since(NOON)) == 1

    def test_refusals(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            one = RejectedJob(
                id="1", at=NOON, user="ann", account="phys", amount=5, reason="too much"
            )
            two = RejectedJob(id="2", at=NOON + DAY, mode="enforce", user="bob", account="phys")
            assert t.rejections.add(one)
            assert not t.rejections.add(one)
            assert t.rejections.add(two)
            assert t.rejections.list_since(NOON) == [one, two]
            assert t.rejections.list_since(NOON, NOON + DAY) == [one]
            assert t.rejections.list_since(NOON, account="PHYS", user="bob") == [two]

    def test_told_jobs_are_found_by_anything(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            for number in range(5):
                t.told.put(
                    ReportedJob(
                        jobslurmid=str(number),
                        user="ann" if number % 2 else "bob",
                        account="phys",
                        status="RUNNING",
                        partition="cpu",
                        amount=number * 10,
                        started=NOON + timedelta(hours=number) if number else None,
                        cpu_hours=0.625,
                        body=b"\0body",
                    )
                )
            t.told.put(ReportedJob(jobslurmid="4", user="eve", amount=40, uid=7))
            found = t.told.get("4")
            assert found == ReportedJob(jobslurmid="4", user="eve", amount=40, uid=7)

            def ids(**wanted: object) -> list[str]:
                _, page = t.told.find(**wanted)  # type: ignore[arg-type]
                return [each.jobslurmid for each in page]

            assert ids() == ["1", "2", "3", "0", "4"]
            assert ids(user="ann") == ["1", "3"]
            assert ids(min_amount=20, max_amount=30) == ["2", "3"]
            assert ids(begin=NOON + timedelta(hours=2)) == ["2", "3"]
            assert ids(end=NOON + timedelta(hours=2)) == ["1", "2"]
            assert ids(status="RUNNING", partition="cpu", account="phys", limit=2) == ["1", "2"]
            totals, page = t.told.find(offset=4, limit=2)
            assert totals == ReportedTotals(jobs=5, amount=100, cpu_hours=2.5)
            assert len(page) == 1

    def test_one_holds_a_lease(self, ledger: Ledger, clock: Clock) -> None:
        leases = ledger.leases
        mine = leases.take("gate", "here", 30.0)
        assert mine is not None
        assert leases.take("gate", "there", 30.0) is None
        mine = leases.renew(mine, 60.0)
        held = leases.find_holder("gate")
        assert held is not None
        assert held.holder == "here"
        with ledger.transaction(lease=mine) as t:
            account(t, "phys", 5)
        leases.release(mine)
        assert leases.find_holder("gate") is None
        theirs = leases.take("gate", "there", 30.0)
        assert theirs is not None
        assert theirs.fence > mine.fence
        with pytest.raises(LeaseLost), ledger.transaction(lease=mine) as t:
            t.transfers.deposit("phys", 5, BY)
        with pytest.raises(LeaseLost):
            leases.renew(mine, 30.0)
        leases.release(mine)
        with ledger.transaction(lease=theirs) as t:
            assert t.queries.get_balance("phys") == 5

    def test_who_takes_it_again_has_a_number_of_its_own(self, ledger: Ledger) -> None:
        before = ledger.leases.take("gate", "here", 30.0)
        again = ledger.leases.take("gate", "here", 30.0)
        assert before is not None
        assert again is not None
        assert again.fence > before.fence
        with pytest.raises(LeaseLost), ledger.transaction(lease=before):
            pass

    def test_a_lease_that_ended_is_there_to_be_taken(self, ledger: Ledger) -> None:
        mine = ledger.leases.take("gate", "here", 0.0)
        assert mine is not None
        assert ledger.leases.find_holder("gate") is None
        assert ledger.leases.take("gate", "there", 30.0) is not None
