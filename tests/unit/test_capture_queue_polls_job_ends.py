"""Job ends after a queue poll: from Slurm, jobcomp, slurmdbd, or unseen."""

from datetime import datetime, timedelta

import msgspec
import pytest

from harness.events import NOON
from harness.site import Clock
from harness.slurm import Scripted, clock, journal, kinds, record, slurm, snapshots
from steward.capture.jobcomp import JobcompRecord, make_end_event
from steward.capture.queue_polls import QueuePoller
from steward.core.events import (
    JOB_END,
    Event,
    utc_now,
)
from steward.core.records import JobRecord
from steward.slurm.settings import ClusterSettings

__all__ = ["clock", "journal", "slurm", "snapshots"]


def test_a_job_that_went_without_an_end_is_ended(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs = {1: record(1, state="RUNNING", start=NOON), 2: record(2)}
    snapshots.tick(journal.extend)
    del slurm.jobs[1]
    snapshots.tick(journal.extend)
    assert (journal[-1].kind, journal[-1].body.record.state) == (JOB_END, "UNKNOWN")
    before = len(journal)
    snapshots.tick(journal.extend)
    assert len(journal) == before


def test_slurmdbd_tells_the_end_that_was_missed(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.told = [record(1, state="TIMEOUT", end=NOON)]
    slurm.jobs = {1: record(1, state="RUNNING", start=NOON)}
    snapshots.tick(journal.extend)
    slurm.jobs.clear()
    snapshots.tick(journal.extend)
    assert (journal[-1].kind, journal[-1].body.record.state) == (JOB_END, "TIMEOUT")
    assert journal[-1].source == "sacct"


def test_a_job_that_vanished_while_nobody_looked_is_ended(
    slurm: Scripted, journal: list[Event]
) -> None:
    known = [record(1, state="RUNNING", start=NOON), record(2)]
    settings = ClusterSettings(snapshot_interval_s=0.0)
    snapshots = QueuePoller("c1", settings, slurm, lambda: known)
    slurm.jobs = {2: known[1]}
    snapshots.tick(journal.extend)
    ends = [event.body.record for event in journal if event.kind == JOB_END]
    assert [(end.job_id, end.state) for end in ends] == [(1, "UNKNOWN")]


def test_nothing_is_ended_by_a_row_that_was_not_understood(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs = {1: record(1, state="RUNNING", start=NOON)}
    snapshots.tick(journal.extend)
    slurm.jobs, slurm.passed_over = {}, 1
    before = len(journal)
    snapshots.tick(journal.extend)
    assert len(journal) == before


def jobcomp(ended: JobRecord, *, seen_at: datetime = NOON) -> Event:
    said = JobcompRecord(ended, NOON)
    return msgspec.structs.replace(make_end_event("c1", said, ended), seen_at=seen_at)


OVER = record(5, state="COMPLETED", start=NOON, end=NOON, exit_code=0)


def test_what_jobcomp_tells_is_asked_for_while_slurm_has_it(
    slurm: Scripted, journal: list[Event]
) -> None:
    snapshots = QueuePoller("c1", ClusterSettings(snapshot_interval_s=300.0), slurm)
    snapshots.tick(journal.extend)
    slurm.jobs[5] = OVER
    snapshots.apply([jobcomp(OVER)], 2, journal.extend)
    looks = slurm.looks
    snapshots.tick(journal.extend)
    assert (slurm.asked, slurm.looks) == ([5], looks)
    assert [event.body.whole for event in journal if event.kind == JOB_END] == [True]
    snapshots.apply([jobcomp(OVER)], 3, journal.extend)
    snapshots.tick(journal.extend)
    assert slurm.asked == [5]


def test_a_run_whose_end_jobcomp_told_is_not_lost(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs[5] = record(5, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    snapshots.apply([jobcomp(OVER)], 2, journal.extend)
    del slurm.jobs[5]
    journal.clear()
    snapshots.tick(journal.extend)
    snapshots.tick(journal.extend)
    assert kinds(journal) == []
    # A piece of a resized job, and a requeue, are no such end.
    slurm.jobs[6] = record(6, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    piece = record(6, state="RESIZING", start=NOON, end=NOON)
    snapshots.apply([jobcomp(piece)], 3, journal.extend)
    del slurm.jobs[6]
    snapshots.tick(journal.extend)
    assert journal[-1].body.record.state == "UNKNOWN"


@pytest.mark.parametrize("state", ["REQUEUED", "RESIZING"])
def test_a_forgotten_run_that_only_jobcomp_reported_is_ended(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event], state: str
) -> None:
    snapshots.tick(journal.extend)
    journal.clear()
    # It ran between two polls, and a killed slurmctld had not saved it.
    interrupted = record(79, state=state, start=NOON, end=NOON, array_job_id=77, array_task="2")
    snapshots.apply([jobcomp(interrupted, seen_at=utc_now())], 2, journal.extend)
    snapshots.tick(journal.extend)
    assert [(event.kind, event.body.record.state) for event in journal] == [(JOB_END, "UNKNOWN")]
    snapshots.tick(journal.extend)
    assert len(journal) == 1


def test_a_requeued_run_that_the_queue_shows_again_is_not_ended(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    requeued = record(79, state="REQUEUED", start=NOON, end=NOON)
    snapshots.apply([jobcomp(requeued, seen_at=utc_now())], 2, journal.extend)
    slurm.jobs[79] = record(79, restarts=1, submit=NOON + timedelta(minutes=1))
    for _ in range(2):
        snapshots.tick(journal.extend)
    assert JOB_END not in kinds(journal)


def test_a_forgotten_later_run_is_ended_too(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs[79] = record(79, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    again = NOON + timedelta(minutes=1)
    requeued = record(79, state="REQUEUED", restarts=1, submit=again, start=again, end=again)
    snapshots.apply([jobcomp(requeued, seen_at=utc_now())], 2, journal.extend)
    slurm.jobs.clear()
    snapshots.tick(journal.extend)
    assert (journal[-1].kind, journal[-1].body.record.restarts) == (JOB_END, 1)
    assert journal[-1].body.record.state == "UNKNOWN"


def test_a_requeue_of_long_ago_is_not_looked_for(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    """The journal is read from its beginning at a start, and jobs.db has the unfinished runs."""
    snapshots.tick(journal.extend)
    journal.clear()
    snapshots.apply([jobcomp(record(79, state="REQUEUED", end=NOON))], 2, journal.extend)
    snapshots.tick(journal.extend)
    assert kinds(journal) == []


def test_who_cancelled_a_job(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event], clock: Clock
) -> None:
    cancelled = record(7, state="CANCELLED", start=NOON, end=NOON, exit_signal=15)
    slurm.jobs[7] = cancelled
    slurm.told = []
    snapshots.tick(journal.extend)
    journal.clear()
    clock.now_s += 5
    snapshots.tick(journal.extend)
    slurm.told = [
        record(7, state="CANCELLED", submit=NOON.replace(hour=1), cancelled_by=5),
        record(7, state="CANCELLED", end=NOON, cancelled_by=1000, exit_code=0, exit_signal=0),
    ]
    snapshots.tick(journal.extend)
    assert kinds(journal) == [], "asked again later"
    clock.now_s += 60
    snapshots.tick(journal.extend)
    (event,) = journal
    told = event.body.record
    assert (event.kind, event.source, event.body.whole) == (JOB_END, "sacct", False)
    assert (told.cancelled_by, told.exit_code, told.exit_signal) == (1000, 0, 0)
    assert (told.end, told.submit) == (NOON, NOON)
    clock.now_s += 600
    snapshots.tick(journal.extend)
    assert len(journal) == 1


def test_nobody_is_asked_who_cancelled_where_there_is_no_slurmdbd(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event], clock: Clock
) -> None:
    slurm.jobs[7] = record(7, state="CANCELLED", end=NOON)
    snapshots.tick(journal.extend)
    clock.now_s += 60
    snapshots.tick(journal.extend)
    assert all(event.source != "sacct" for event in journal)
