"""Queue polls: events, intervals, and queries of single jobs."""

from collections.abc import Sequence

import pytest

from harness.events import NOON, script_event
from harness.site import Clock
from harness.slurm import Scripted, clock, journal, kinds, record, slurm, snapshots
from steward.capture.queue_polls import QueuePoller
from steward.core.errors import Unavailable
from steward.core.events import (
    CONTROLLER_STATE,
    JOB_END,
    JOB_SEEN,
    JOB_STATE,
    Event,
)
from steward.core.poll_status import PollStatus
from steward.core.rate_limits import TokenBuckets
from steward.slurm.settings import ClusterSettings
from steward.slurm.state_files import StateStamp

__all__ = ["clock", "journal", "slurm", "snapshots"]


def test_a_look_appends_what_is_new(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs[1] = record(1)
    snapshots.tick(journal.extend)
    # Complete records are queried as well, while queries are few.
    assert kinds(journal) == [JOB_SEEN, JOB_SEEN]
    assert [event.body.whole for event in journal[1:]] == [False, True]
    snapshots.tick(journal.extend)
    assert len(journal) == 3
    slurm.jobs[1] = record(1, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    slurm.jobs[1] = record(1, state="FAILED", start=NOON, end=NOON, exit_code=1)
    snapshots.tick(journal.extend)
    # Fields of complete records alone are queried once more.
    assert kinds(journal)[2:] == [JOB_STATE, JOB_END, JOB_END]
    assert [event.body.whole for event in journal[-2:]] == [False, True]
    assert {event.cluster for event in journal} == {"c1"}


def test_a_new_script_is_asked_for_singly(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    slurm.jobs[5] = record(5)
    snapshots.apply([script_event(5)], 3, journal.extend)
    assert slurm.asked == [5]
    assert kinds(journal) == [JOB_SEEN]
    assert journal[-1].body.record.uid == 1000
    assert snapshots.cursor() == 3
    looks = slurm.looks
    snapshots.apply([script_event(5)], 4, journal.extend)
    assert slurm.asked == [5], "it is known"
    assert slurm.looks == looks


def test_scripts_of_other_clusters_are_not_ours(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    other = QueuePoller("c2", ClusterSettings(), slurm)
    other.tick(journal.extend)
    other.apply([script_event(5)], 1, journal.extend)
    assert slurm.asked == []


def test_many_scripts_are_left_to_the_next_look(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    slurm.jobs = {i: record(i, array_job_id=100, array_task=str(i)) for i in range(1, 30)}
    snapshots.apply([script_event(i) for i in range(1, 30)], 29, journal.extend)
    assert slurm.asked == []
    snapshots.tick(journal.extend)
    assert {event.body.record.job_id for event in journal[1:]} == set(range(1, 30))


def test_single_questions_are_rationed(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    for job_id in range(1, 40):
        snapshots.apply([script_event(job_id)], job_id, journal.extend)
    assert 8 <= len(slurm.asked) <= 12


def test_slurm_being_away_is_said_once_and_nothing_is_raised(
    slurm: Scripted,
    snapshots: QueuePoller,
    journal: list[Event],
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    slurm.jobs[1] = record(1)
    snapshots.tick(journal.extend)
    slurm.away = True
    for _ in range(3):
        clock.now_s += 60.0
        assert snapshots.tick(journal.extend) > 0.5, "it backs off"
        snapshots.apply([script_event(9)], 1, journal.extend)
    slurm.away = False
    clock.now_s += 60.0
    snapshots.tick(journal.extend)
    states = [event.body.up for event in journal if event.kind == CONTROLLER_STATE]
    assert states == [True, False, True]
    said = [entry.getMessage() for entry in caplog.records]
    assert said == [
        "cluster c1: 'squeue' failed: Unable to contact",
        "cluster c1: Slurm answers again",
    ]
    assert kinds(journal) == [JOB_SEEN, JOB_SEEN]


def test_who_is_not_there_is_asked_every_few_seconds_and_who_is_busy_seldom(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event], clock: Clock
) -> None:
    waits = {}
    for slurm.down in (True, False):
        slurm.away = not slurm.down
        for _ in range(8):
            clock.now_s += 60.0
            waits[slurm.down] = snapshots.tick(journal.extend)
    assert waits[True] <= 5.0
    assert waits[False] > 50.0


def test_a_look_is_at_most_a_twentieth_of_the_time(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.cost_s = 3.0
    assert 59 < snapshots.tick(journal.extend) <= 60
    snapshots.tick(journal.extend)
    assert slurm.looks == 1
    assert snapshots.cost_s == 3.0


def test_polls_that_take_long_are_told_once_and_when_they_are_over(
    slurm: Scripted, journal: list[Event], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    looks: list[PollStatus] = []
    settings = ClusterSettings(snapshot_interval_s=0.0)
    snapshots = QueuePoller("c1", settings, slurm, on_poll=looks.append, clock=clock)
    for cost_s in (11.0, 11.0, 0.0):
        slurm.cost_s = cost_s
        clock.now_s += 220.0
        snapshots.tick(journal.extend)
    assert [round(look.interval_s) for look in looks] == [220, 220, 0]
    assert caplog.text.count("squeue took 11.0 s, so the next poll of the queue is in 220 s") == 1
    assert caplog.text.count("polls of the queue are 0 s apart") == 1


def test_an_unchanged_queue_is_polled_again_only_when_it_may_have_changed(
    slurm: Scripted, journal: list[Event], clock: Clock
) -> None:
    stamp: StateStamp | None = (("job_state", 1, 1),)
    settings = ClusterSettings(snapshot_interval_s=5.0)
    poller = QueuePoller("c1", settings, slurm, clock=clock, read_stamp=lambda: stamp)

    def count_polls(seconds: float) -> int:
        before, end_s = slurm.looks, clock.now_s + seconds
        while clock.now_s < end_s:
            assert poller.tick(journal.extend) <= 5.0
            clock.now_s += 1.0
        return slurm.looks - before

    slurm.jobs[1] = record(1, state="RUNNING", start=NOON)
    assert count_polls(60) == 2
    stamp = None
    assert count_polls(60) == 12, "slurmctld saved a change just now"
    stamp = (("job_state", 1, 2),)
    slurm.jobs[2] = record(2)
    journal.clear()
    assert count_polls(5) == 1
    assert kinds(journal) == [JOB_SEEN, JOB_SEEN]
    assert count_polls(60) == 12, "slurmctld does not save all changes of a pending job"
    slurm.jobs[2] = record(2, state="CANCELLED")
    count_polls(5)
    assert count_polls(60) == 2
    slurm.passed_over = 1
    clock.now_s += 30
    count_polls(1)
    assert count_polls(60) == 12, "a poll that was not complete shows no rest"
    slurm.passed_over = 0
    count_polls(5)
    poller.apply([script_event(i) for i in range(100, 130)], 30, journal.extend)
    assert count_polls(6) == 1, "scripts wait for their owners"


def test_a_skipped_poll_is_reported_as_current(
    slurm: Scripted, journal: list[Event], clock: Clock
) -> None:
    polls: list[PollStatus] = []
    poller = QueuePoller(
        "c1",
        ClusterSettings(snapshot_interval_s=5.0),
        slurm,
        on_poll=polls.append,
        clock=clock,
        read_stamp=lambda: (("job_state", 1, 1),),
    )
    for _ in range(3):
        poller.tick(journal.extend)
        clock.now_s += 5.0
    assert slurm.looks == 1
    first, second, third = polls
    assert first.current_at == first.at == second.at == third.at
    assert first.at < second.current_at < third.current_at
    assert {poll.interval_s for poll in polls} == {5.0}


def test_a_poll_that_the_journal_did_not_take_is_repeated_at_once(
    slurm: Scripted, journal: list[Event], clock: Clock
) -> None:
    def fail(_new: Sequence[Event]) -> None:
        raise Unavailable("full")

    stamp: StateStamp = (("job_state", 1, 1),)
    settings = ClusterSettings(snapshot_interval_s=5.0)
    poller = QueuePoller("c1", settings, slurm, clock=clock, read_stamp=lambda: stamp)
    poller.tick(journal.extend)
    slurm.jobs[1] = record(1, state="RUNNING", start=NOON)
    clock.now_s += 31
    with pytest.raises(Unavailable):
        poller.tick(fail)
    poller.tick(journal.extend)
    assert slurm.looks == 3
    assert JOB_SEEN in kinds(journal)


def test_what_the_journal_did_not_take_is_said_again(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs[1] = record(1, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    slurm.jobs[1] = record(1, state="COMPLETED", start=NOON, end=NOON)

    def full(_new: Sequence[Event]) -> None:
        raise Unavailable("the journal's disk is full")

    with pytest.raises(Unavailable):
        snapshots.tick(full)
    snapshots.tick(journal.extend)
    assert JOB_END in kinds(journal)


def test_an_allowance_comes_back_with_time(clock: Clock) -> None:
    allowance = TokenBuckets(1.0, 2, clock)
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    clock.now_s += 1.0
    assert not allowance.take(reserve=1.0)
    assert allowance.take()
    clock.now_s += 100.0
    assert [allowance.take() for _ in range(3)] == [True, True, False]


def test_a_suspension_is_told_with_its_time(
    slurm: Scripted, snapshots: QueuePoller, journal: list[Event]
) -> None:
    slurm.jobs[8] = record(8, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    journal.clear()
    first, second = NOON.replace(minute=1), NOON.replace(minute=2)
    slurm.jobs[8] = record(8, state="SUSPENDED", start=NOON, suspended_at=first)
    snapshots.tick(journal.extend)
    slurm.jobs[8] = record(8, state="RUNNING", start=NOON, suspended_at=second, suspended_s=60)
    snapshots.tick(journal.extend)
    told = [(event.body.record.state, event.body.whole) for event in journal]
    assert told == [
        *(("SUSPENDED", False), ("SUSPENDED", True)),
        *(("RUNNING", False), ("RUNNING", True)),
    ]
    since = [event for event in journal if event.body.whole]
    assert [event.at for event in since] == [first, second]
    assert [event.key.rpartition(":since:")[2] for event in since] == [
        str(int(time.timestamp())) for time in (first, second)
    ]
    snapshots.tick(journal.extend)
    assert len(journal) == 4
