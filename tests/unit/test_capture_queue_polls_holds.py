"""Complete polls of the queue are reported to the bank, and come early for a waiting hold."""

from datetime import datetime, timedelta

import pytest

from harness.events import NOON
from harness.site import Clock
from harness.slurm import Scripted, clock, journal, record, slurm
from steward.capture.queue_polls import QueuePoller
from steward.core.events import (
    HOLD_CONFIRMED,
    HOLD_PLACED,
    JOB_SEEN,
    QUEUE_POLLED,
    Event,
    HoldFact,
    utc_now,
)
from steward.slurm.settings import ClusterSettings

__all__ = ["clock", "journal", "slurm"]


def test_a_whole_look_is_told_behind_the_jobs_that_it_showed(
    slurm: Scripted, journal: list[Event]
) -> None:
    telling = QueuePoller("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, report_polls=True)
    slurm.jobs[1] = record(1)
    telling.tick(journal.extend)
    told = [event.kind for event in journal if event.kind in (JOB_SEEN, QUEUE_POLLED)]
    assert told[:2] == [JOB_SEEN, QUEUE_POLLED]
    (looked,) = (event.body for event in journal if event.kind == QUEUE_POLLED)
    assert looked.began == NOON
    # Not each of them: they are events.
    telling.tick(journal.extend)
    assert sum(event.kind == QUEUE_POLLED for event in journal) == 1


def test_a_look_that_was_not_whole_is_none(slurm: Scripted, journal: list[Event]) -> None:
    telling = QueuePoller("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, report_polls=True)
    slurm.passed_over = 1
    telling.tick(journal.extend)
    assert QUEUE_POLLED not in {event.kind for event in journal}


def hold(kind: str, at: datetime, job_id: int = 0, name: str = "h") -> Event:
    return Event(
        kind=kind,
        cluster="c1",
        key=f"{kind}:{name}",
        at=at,
        seen_at=at,
        source="gate",
        body=HoldFact(hold=name, account="physics", amount=1, job_id=job_id),
    )


def test_the_queue_is_looked_at_soon_where_a_hold_waits_for_that(
    slurm: Scripted, journal: list[Event], clock: Clock
) -> None:
    settings = ClusterSettings(snapshot_interval_s=300.0)
    telling = QueuePoller("c1", settings, slurm, report_polls=True, clock=clock)
    assert telling.tick(journal.extend) == pytest.approx(300)
    telling.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(6, abs=1)
    clock.now_s += 6.1
    assert telling.tick(journal.extend) == pytest.approx(300)
    assert slurm.looks == 2
    assert sum(event.kind == QUEUE_POLLED for event in journal) == 2
    # One that is shown, one that is long ago, and one whose job is known already.
    telling.apply(
        [
            hold(HOLD_PLACED, utc_now(), name="shown"),
            hold(HOLD_CONFIRMED, utc_now(), 1, name="shown"),
            hold(HOLD_PLACED, utc_now() - timedelta(hours=1), name="old"),
            hold(HOLD_PLACED, utc_now(), 5, name="found"),
        ],
        2,
        journal.extend,
    )
    assert telling.tick(journal.extend) == pytest.approx(300)


def test_a_hold_that_waits_does_not_burden_slurmctld(
    slurm: Scripted, journal: list[Event], clock: Clock
) -> None:
    slurm.cost_s = 2.0
    settings = ClusterSettings(snapshot_interval_s=300.0)
    telling = QueuePoller("c1", settings, slurm, report_polls=True, clock=clock)
    telling.tick(journal.extend)
    telling.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(40, abs=1)
    slurm.passed_over = 1
    clock.now_s += 41
    telling.tick(journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(40, abs=1), "it was not seen whole"
    silent = QueuePoller("c1", settings, slurm, clock=clock)
    silent.tick(journal.extend)
    silent.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert silent.tick(journal.extend) == pytest.approx(300), "there is no bank to tell"
