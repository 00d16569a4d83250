"""Array whose allocation ends: each task is paid by the allocation on which it started."""

from pathlib import Path

import msgspec
import pytest

from harness.gate import CLUSTER, DAY_US, GateCore, account, job, now_us, rules
from steward.bank.gate.requests import HoldReply, HoldRequest, ShownJob
from steward.bank.money import MICRO
from steward.bank.records import AllocationBooks, GateBooks, Settlement

ARRAY = 8


class Array:
    """Array of four tasks of 10 SU each; two have started when the day ends."""

    def __init__(self, tmp_path: Path, *, later_su: int) -> None:
        self.now = now_us()
        self.end = self.now + DAY_US
        self.old = AllocationBooks(number=1, balance=40 * MICRO, end_us=self.end)
        self.open_ended = AllocationBooks(number=2, balance=0)
        self.new = AllocationBooks(number=3, balance=later_su * MICRO, begin_us=self.end)
        self.site = GateCore(tmp_path, account("chem", 0, allocations=self.allocations))
        comment = self.site.submit(job(9, array="0-3"), at_us=self.now).admin_comment
        self.seen = ShownJob(
            cluster=CLUSTER, job_id=ARRAY, uid=1000, admin_comment=comment, started=True
        )
        self.starts = (self.now + 5, self.now + 6)
        self.seq = 0
        with self.site.store.transaction():
            self.site.upkeep.confirm([self.seen], self.now)
            self.site.upkeep.tick(self.now)
        assert self.shares() == {1: 40}
        self.now = self.end
        with self.site.store.transaction():
            self.site.upkeep.tick(self.now)

    @property
    def allocations(self) -> tuple[AllocationBooks, ...]:
        return (self.old, self.open_ended, self.new)

    def shares(self) -> dict[int, float]:
        (hold,) = self.site.keeper.balances.holds.values()
        assert sum(part for _, part in hold.shares) == hold.remaining
        return {number: part / MICRO for number, part in hold.shares}

    def cover(self, tasks: str, starts: tuple[int, ...] | None) -> HoldReply:
        claim = HoldRequest(
            cluster=CLUSTER,
            job_id=ARRAY,
            description=job(9, array=tasks),
            started=True,
            starts=starts,
        )
        with self.site.store.transaction():
            return self.site.upkeep.place_hold(claim, "alice", self.now)

    def lingering(self) -> int:
        with self.site.store.transaction():
            return len(self.site.upkeep.allocation_mover.list_lingering())

    def settle(self, su: int, *, of: int) -> None:
        """End a task that an allocation has paid."""
        self.seq += 1
        self.old, self.new = (
            msgspec.structs.replace(one, balance=one.balance - su * MICRO)
            if one.number == of
            else one
            for one in (self.old, self.new)
        )
        one = Settlement(seq=self.seq, hold=self.hold, amount=su * MICRO, frees=10 * MICRO)
        self.site.seq += 1
        chem = account("chem", 0, allocations=self.allocations)
        books = GateBooks(seq=self.site.seq, accounts=(chem,), whole=True)
        with self.site.store.transaction():
            self.site.upkeep.settle([one], books, self.now)

    @property
    def hold(self) -> str:
        (name,) = self.site.keeper.balances.holds
        return name


def test_tasks_that_wait_move_and_those_that_run_stay(tmp_path: Path) -> None:
    array = Array(tmp_path, later_su=30)
    assert array.lingering() == 1
    assert array.cover("0-3", array.starts).is_paid
    assert array.shares() == {1: 20, 3: 20}
    assert array.site.free(at_us=array.now) == 10, "nobody else can have what the others need"
    assert array.site.upkeep.allocation_mover.sum_started(1) == 20 * MICRO
    array.site.keeper.load()
    assert array.shares() == {1: 20, 3: 20}
    array.settle(8, of=1)
    assert array.shares() == {1: 10, 3: 20}
    assert array.cover("1-3", array.starts[1:]).is_paid
    assert array.shares() == {1: 10, 3: 20}


def test_a_task_that_starts_later_and_ends_first_takes_nothing_from_the_others(
    tmp_path: Path,
) -> None:
    array = Array(tmp_path, later_su=20)
    begun_later = array.end + 5
    assert array.cover("0-3", (*array.starts, begun_later)).is_paid
    for left in ("0-2", "0-1"):
        array.settle(9, of=3)
        assert array.lingering() == 1
        assert array.cover(left, array.starts).is_paid
        assert array.shares()[1] == 20
        assert array.site.free(at_us=array.now) in (1, 2)
    assert array.shares() == {1: 20}


def test_tasks_that_no_allocation_can_pay_are_not_paid_and_the_others_stay(
    tmp_path: Path,
) -> None:
    array = Array(tmp_path, later_su=15)
    covered = array.cover("0-3", array.starts)
    assert not covered.is_paid
    assert "no other allocation of its account can pay" in covered.why
    assert array.shares() == {1: 20}
    assert array.site.free(at_us=array.now) == 15
    array.site.ground.put_rules(rules("observe"))
    assert array.cover("0-3", array.starts).is_paid, "on paper nobody is held"
    array.site.ground.put_rules(rules())
    array.new = msgspec.structs.replace(array.new, balance=25 * MICRO)
    array.site.tell(account("chem", 0, allocations=array.allocations), at_us=array.now)
    assert array.cover("0-3", None).is_paid, "as any job that waited for money"
    assert array.shares() == {1: 20, 3: 20}


def test_what_was_held_is_moved_and_no_more(tmp_path: Path) -> None:
    array = Array(tmp_path, later_su=20)
    array.settle(9, of=1)
    # The row that waits still names all of them.
    assert array.cover("0-3", array.starts[1:]).is_paid
    assert array.shares() == {1: 10, 3: 20}


def test_none_that_runs_keeps_nothing_of_what_has_ended(tmp_path: Path) -> None:
    array = Array(tmp_path, later_su=40)
    assert array.cover("2-3", (array.end + 5,)).is_paid
    assert array.shares() == {3: 40}
    array.old = msgspec.structs.replace(array.old, balance=0)
    array.site.tell(account("chem", 0, allocations=array.allocations), at_us=array.now)
    assert array.lingering() == 0


@pytest.mark.parametrize("is_array", [True, False])
def test_only_arrays_are_asked_about(tmp_path: Path, is_array: bool) -> None:
    array = Array(tmp_path, later_su=40)
    other = job(9, array="0-1" if is_array else "")
    with array.site.store.transaction():
        claim = HoldRequest(cluster=CLUSTER, job_id=77, description=other, started=True)
        assert array.site.upkeep.place_hold(claim, "alice", array.now).is_paid
        array.site.upkeep.tick(array.now + 1)
    assert array.lingering() == 1, "what is on no ended allocation is as it should be"
