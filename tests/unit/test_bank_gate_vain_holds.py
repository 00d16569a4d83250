"""Repeated requests for jobs that are never submitted do not keep SU on hold."""

from pathlib import Path

import pytest

from harness.gate import CLUSTER, GateCore, account, job, now_us, rules
from steward.bank.gate.requests import HoldRequest, PluginRequest, ShownJob
from steward.bank.records import JobRequest

ALICE, BOB = 1000, 1001
LOOK_US = 7_000_000
"""Time between two polls of the queue, in µs."""


class Queue:
    """Polls of a queue that a test sets, with time between them."""

    def __init__(self, site: GateCore) -> None:
        self.site = site
        self.now = now_us()

    def ask(self, minutes: int, uid: int = ALICE) -> str:
        """Submit a job; return the gate's message, "" if the job was admitted."""
        return self.site.submit(job(minutes, uid=uid), at_us=self.now).say

    def fill(self, minutes: int = 9, uid: int = ALICE) -> int:
        """Submit jobs until the gate rejects one; return the number of admitted jobs."""
        count = 0
        while not self.ask(minutes, uid):
            count += 1
        return count

    def look(self, comment: str = "") -> None:
        """Report a poll of the whole queue, with at most one job in it."""
        self.now += LOOK_US
        upkeep = self.site.upkeep
        with self.site.store.transaction():
            if comment:
                seen = ShownJob(cluster=CLUSTER, job_id=7, uid=ALICE, admin_comment=comment)
                assert upkeep.confirm([seen], self.now)[0] is not None
            upkeep.record_poll(CLUSTER, self.now - 1, self.now)


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(GateCore(tmp_path, account("chem", 100)))


def test_a_loop_leaves_colleagues_nearly_all_from_the_third_look_on(queue: Queue) -> None:
    frozen = 0
    for _ in range(40):
        queue.fill()
        frozen += queue.site.free() < 85
        queue.look()
        assert queue.site.free() == 100, "nothing that never came stays held"
    assert frozen == 3
    assert queue.fill() == 1
    assert queue.fill(uid=BOB) == 9, "a colleague can use all the rest"


def test_one_large_question_in_a_loop_is_bounded_like_many_small_ones(queue: Queue) -> None:
    let_in = []
    for number in range(60):
        if not queue.ask(99):
            let_in.append(number)
        queue.look()
    assert let_in == [0, 1, 2, 4, 24, 44], "in the end for a twentieth of the time"


def test_who_stops_is_trusted_again_and_meanwhile_has_a_part(queue: Queue) -> None:
    for _ in range(4):
        queue.fill()
        queue.look()
    said = queue.ask(49)
    assert "never became jobs in Slurm (sbatch --test-only counts, too)" in said
    assert "your holds in account chem may grow by only 10.00 SU" in said
    assert "--time=9)" in said
    wait_s = int(said.split("Try again in ")[1].split(" s")[0])
    assert 0 < wait_s <= 200
    assert not queue.ask(4), "smaller ones go at once"
    assert "Try again in 10 s" in queue.ask(9), "what is held now is shown, or void, by then"
    queue.now += (wait_s - 1) * 1_000_000
    assert queue.ask(49)
    queue.now += 1_000_000
    assert not queue.ask(49)


def test_trying_a_few_times_costs_nobody_their_trust(queue: Queue) -> None:
    for _ in range(2):
        assert not queue.ask(79)
        queue.look()
    assert not queue.ask(99)


def test_what_slurm_shows_is_no_reason_for_doubt(queue: Queue) -> None:
    for _ in range(6):
        comment = queue.site.submit(job(99), at_us=queue.now).admin_comment
        assert comment
        queue.look(comment)
        assert queue.site.free() == 0
        (hold,) = queue.site.keeper.balances.holds.values()
        with queue.site.store.transaction():
            queue.site.upkeep.release(hold.id, "over", None, queue.now)


def test_a_queue_that_was_long_unseen_is_one_look(queue: Queue) -> None:
    queue.fill()
    queue.now += 3_600_000_000
    queue.look()
    assert queue.fill() == 10


def test_doubt_is_about_one_user_and_one_purse(tmp_path: Path) -> None:
    child = account("lab", 0, number=2, payer="chem", allocations=())
    site = GateCore(tmp_path, account("chem", 100), child, account("phys", 100, number=3))
    queue = Queue(site)
    for _ in range(4):
        queue.fill()
        queue.look()
    assert site.submit(job(49, account="lab"), at_us=queue.now).say, "chem pays for it as well"
    assert not site.submit(job(49, account="phys"), at_us=queue.now).say
    assert not queue.ask(49, BOB)
    site.ground.put_rules(rules("observe"))
    assert site.submit(job(40), at_us=queue.now).ok


def test_changes_that_never_show_count_and_what_the_queue_shows_is_not_bound(queue: Queue) -> None:
    site = queue.site
    comment = site.submit(job(9), at_us=queue.now).admin_comment
    queue.look(comment)

    def change(minutes: int) -> bool:
        wanted: JobRequest = job(minutes, uid=-1, job_id=7)
        ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=wanted, by=ALICE)
        with site.store.transaction():
            return site.keeper.modify(ask, "", queue.now, is_lenient=False).ok

    held = []
    as_before = HoldRequest(cluster=CLUSTER, job_id=7, description=job(9))
    for number in range(12):
        if change(99):
            held.append(number)
        queue.look(comment)
        with site.store.transaction():
            assert site.upkeep.place_hold(as_before, "alice", queue.now).is_paid
    assert held == [0, 1, 2, 4]
    assert change(14)
    with site.store.transaction():
        claim = HoldRequest(cluster=CLUSTER, job_id=7, description=job(59))
        assert site.upkeep.place_hold(claim, "alice", queue.now).is_paid


def test_the_part_bounds_what_is_held(tmp_path: Path) -> None:
    queue = Queue(GateCore(tmp_path, account("chem", 100)))
    queue.site.keeper.vain_holds.share = 0.5
    for _ in range(4):
        queue.fill()
        queue.look()
    assert queue.fill() == 5
