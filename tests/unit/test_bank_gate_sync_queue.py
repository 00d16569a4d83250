"""One SU hold for each job, in whatever order the gate learns of it: queue, events and tokens."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from harness.gate import CLUSTER, GateCore, account, job, now_us
from steward.bank.gate.requests import HoldReply, HoldRequest, ShownJob
from steward.bank.gate.sync import rebuild_holds
from steward.bank.money import MICRO
from steward.bank.records import Hold, JobRequest
from steward.core.records import JobRecord

JOB_ID = 5
SECOND_US = 1_000_000


@pytest.fixture
def site(tmp_path: Path) -> GateCore:
    return GateCore(tmp_path, account("chem", 100))


def claim_hold(
    site: GateCore, description: JobRequest, *, submit_us: int = 0, job_id: int = JOB_ID
) -> HoldReply:
    """Claim the hold of a job that jobs.db shows in the queue."""
    claim = HoldRequest(
        cluster=CLUSTER,
        job_id=job_id,
        description=description,
        first_submit_us=submit_us or now_us(),
    )
    with site.store.transaction():
        return site.upkeep.place_hold(claim, "alice", now_us())


def confirm_job(site: GateCore, comment: str, *, uid: int = 1000, job_id: int = JOB_ID) -> Hold:
    """Confirm a job as an event shows it; return its hold."""
    shown = ShownJob(cluster=CLUSTER, job_id=job_id, uid=uid, admin_comment=comment)
    with site.store.transaction():
        (hold,) = site.upkeep.confirm([shown], now_us())
    assert hold is not None
    return hold


def list_holds(site: GateCore) -> list[str]:
    """Return the ids of the open holds, after a restart of the gate."""
    before = list(site.keeper.balances.holds)
    site.keeper.load()
    assert list(site.keeper.balances.holds) == before, "memory and database agree"
    return before


def test_a_job_that_jobs_db_shows_before_its_event_is_confirmed_has_one_hold(
    site: GateCore,
) -> None:
    comment = site.submit(job(9)).admin_comment
    (token_hold,) = list_holds(site)
    # A sweep reads the job from jobs.db, which is ahead of the bank in the journal.
    reply = claim_hold(site, job(9, admin_comment=comment))
    assert reply.is_paid
    assert reply.hold is not None
    assert (reply.hold.id, reply.hold.confirmed, reply.hold.job_id) == (token_hold, True, JOB_ID)
    assert site.free() == 90
    assert confirm_job(site, comment).id == token_hold
    assert list_holds(site) == [token_hold]
    site.look(after_s=60)
    assert site.free() == 90, "the job keeps its hold after the poll"


def test_a_claim_enlarges_the_hold_of_the_jobs_token(site: GateCore) -> None:
    comment = site.submit(job(9)).admin_comment
    reply = claim_hold(site, job(19, admin_comment=comment))
    assert reply.hold is not None
    assert reply.hold.remaining == 20 * MICRO
    assert len(list_holds(site)) == 1
    assert site.free() == 80


def test_a_job_that_cannot_be_priced_keeps_the_hold_of_its_token(site: GateCore) -> None:
    comment = site.submit(job(9)).admin_comment
    reply = claim_hold(site, job(9, partition="nothing", admin_comment=comment))
    assert not reply.is_paid
    assert reply.hold is not None
    assert list_holds(site) == [reply.hold.id]
    assert confirm_job(site, comment).id == reply.hold.id


def test_a_copied_token_gives_a_claim_no_hold(site: GateCore) -> None:
    comment = site.submit(job(9)).admin_comment
    copied = claim_hold(site, job(9, uid=1001, admin_comment=comment), job_id=6)
    assert copied.hold is not None
    own = confirm_job(site, comment)
    again = claim_hold(site, job(9, admin_comment=comment), job_id=7)
    assert again.hold is not None
    assert len({own.id, copied.hold.id, again.hold.id}) == 3
    assert site.free() == 70


def test_a_token_that_is_shown_after_the_job_was_found_in_the_queue_adds_no_hold(
    site: GateCore,
) -> None:
    comment = site.submit(job(9)).admin_comment
    # The first record of the job came without its admin_comment.
    reply = claim_hold(site, job(9), submit_us=now_us() // SECOND_US * SECOND_US)
    assert reply.hold is not None
    assert site.free() == 80, "the gate cannot know yet that both are for one job"
    assert confirm_job(site, comment).id == reply.hold.id
    assert site.free() == 90
    assert list_holds(site) == [reply.hold.id]
    assert confirm_job(site, comment).id == reply.hold.id


def test_a_job_whose_id_was_used_before_keeps_the_hold_of_its_token(site: GateCore) -> None:
    old = claim_hold(site, job(9), submit_us=now_us() - 60 * SECOND_US)
    assert old.hold is not None
    comment = site.submit(job(9)).admin_comment
    assert confirm_job(site, comment).id != old.hold.id
    assert len(list_holds(site)) == 2
    assert site.free() == 80


def test_recovery_restores_no_second_hold_of_a_job(site: GateCore) -> None:
    comment = site.submit(job(9)).admin_comment
    first = confirm_job(site, comment)
    with site.store.transaction():
        site.upkeep.release(first.id, "its job has ended", None, now_us())
    # The requeued job keeps its token and has a hold from the queue.
    requeued = claim_hold(site, job(9, admin_comment=comment))
    assert requeued.hold is not None
    shown = JobRecord(
        job_id=JOB_ID,
        uid=1000,
        user="alice",
        account="chem",
        partition="main",
        state="PENDING",
        submit=datetime.now(UTC),
        restarts=1,
        admin_comment=comment,
    )
    other = msgspec.structs.replace(shown, job_id=JOB_ID + 1, restarts=0)
    with site.store.transaction():
        assert rebuild_holds(site.keeper, CLUSTER, [shown], now_us()) == 0
    assert site.free() == 90
    with site.store.transaction():
        assert rebuild_holds(site.keeper, CLUSTER, [other], now_us()) == 1, "it has none yet"
    assert site.free() == 80
