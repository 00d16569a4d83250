import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from builders import script_event

from steward.bank_facts import HoldFact
from steward.capture.cancelled import Cancelled
from steward.capture.lines.jobcomp import Told, end_event
from steward.capture.snapshots import Allowance, Snapshots
from steward.config import ClusterSettings
from steward.errors import Unavailable
from steward.events import (
    CONTROLLER_STATE,
    HOLD_CONFIRMED,
    HOLD_PLACED,
    JOB_END,
    JOB_SEEN,
    JOB_STATE,
    QUEUE_LOOKED,
    Event,
    utc_now,
)
from steward.records import JobRecord
from steward.slurm import Queue, Slurm, SlurmDown, SlurmUnavailable

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def record(job_id: int, **fields: object) -> JobRecord:
    values = {"name": f"job{job_id}", "uid": 1000, "state": "PENDING", "submit": NOON, **fields}
    return JobRecord(job_id=job_id, **values)  # type: ignore[arg-type] # fields of every type


class Scripted(Slurm):
    """A Slurm whose answers the test writes: what matters here is what is made of them."""

    def __init__(self) -> None:
        super().__init__("c1", ClusterSettings())
        self.jobs: dict[int, JobRecord] = {}
        self.told: list[JobRecord] | None = None
        self.away = False
        self.down = False
        self.cost_s = 0.0
        self.asked: list[int] = []
        self.looks = 0
        self.passed_over = 0

    def queue(self, previous: Mapping[int, int] | None = None) -> Queue:
        self.looks += 1
        if self.down:
            raise SlurmDown("cluster c1: 'squeue' failed: connect failure")
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        rows = {job_id: hash(str(job)) for job_id, job in self.jobs.items()}
        new = tuple(job for i, job in self.jobs.items() if (previous or {}).get(i) != rows[i])
        return Queue(
            records=new,
            rows=rows,
            taken_at=NOON,
            cost_s=self.cost_s,
            passed_over=self.passed_over,
        )

    def job(self, job_id: int, *, apart: bool = False) -> list[JobRecord]:
        self.asked.append(job_id)
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        return [self.jobs[job_id]] if job_id in self.jobs else []

    def has_accounting(self) -> bool:
        return self.told is not None

    def accounted_end(self, job_id: int) -> list[JobRecord]:
        return self.accounted(job_id)

    def accounted(self, job_id: int) -> list[JobRecord]:
        assert self.told is not None
        return [job for job in self.told if job.job_id == job_id]


@pytest.fixture
def slurm() -> Scripted:
    return Scripted()


@pytest.fixture
def snapshots(slurm: Scripted) -> Snapshots:
    return Snapshots("c1", ClusterSettings(snapshot_interval_s=0.0), slurm)


@pytest.fixture
def journal() -> list[Event]:
    return []


def kinds(journal: list[Event]) -> list[str]:
    return [event.kind for event in journal if event.kind != CONTROLLER_STATE]


def test_a_look_appends_what_is_new(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    slurm.jobs[1] = record(1)
    snapshots.tick(journal.extend)
    # The whole record is asked for as well, while questions are few.
    assert kinds(journal) == [JOB_SEEN, JOB_SEEN]
    assert [event.body.whole for event in journal[1:]] == [False, True]
    snapshots.tick(journal.extend)
    assert len(journal) == 3
    slurm.jobs[1] = record(1, state="RUNNING", start=NOON)
    snapshots.tick(journal.extend)
    slurm.jobs[1] = record(1, state="FAILED", start=NOON, end=NOON, exit_code=1)
    snapshots.tick(journal.extend)
    # What stands in a whole record alone is asked for once more.
    assert kinds(journal)[2:] == [JOB_STATE, JOB_END, JOB_END]
    assert [event.body.whole for event in journal[-2:]] == [False, True]
    assert {event.cluster for event in journal} == {"c1"}


def test_a_new_script_is_asked_for_singly(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    other = Snapshots("c2", ClusterSettings(), slurm)
    other.tick(journal.extend)
    other.apply([script_event(5)], 1, journal.extend)
    assert slurm.asked == []


def test_many_scripts_are_left_to_the_next_look(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    slurm.jobs = {i: record(i, array_job_id=100, array_task=str(i)) for i in range(1, 30)}
    snapshots.apply([script_event(i) for i in range(1, 30)], 29, journal.extend)
    assert slurm.asked == []
    snapshots.tick(journal.extend)
    assert {event.body.record.job_id for event in journal[1:]} == set(range(1, 30))


def test_single_questions_are_rationed(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    for job_id in range(1, 40):
        snapshots.apply([script_event(job_id)], job_id, journal.extend)
    assert 8 <= len(slurm.asked) <= 12


def test_slurm_being_away_is_said_once_and_nothing_is_raised(
    slurm: Scripted,
    snapshots: Snapshots,
    journal: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    slurm.jobs[1] = record(1)
    snapshots.tick(journal.extend)
    slurm.away = True
    for _ in range(3):
        snapshots._due = 0.0
        assert snapshots.tick(journal.extend) > 0.5, "it backs off"
        snapshots.apply([script_event(9)], 1, journal.extend)
    slurm.away = False
    snapshots._due = 0.0
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
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    waits = {}
    for slurm.down in (True, False):
        slurm.away = not slurm.down
        for _ in range(8):
            snapshots._due = 0.0
            waits[slurm.down] = snapshots.tick(journal.extend)
    assert waits[True] <= 5.0
    assert waits[False] > 50.0


def test_a_look_is_at_most_a_twentieth_of_the_time(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    slurm.cost_s = 3.0
    assert 59 < snapshots.tick(journal.extend) <= 60
    snapshots.tick(journal.extend)
    assert slurm.looks == 1
    assert snapshots.cost_s == 3.0


def test_a_job_that_went_without_an_end_is_ended(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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
    snapshots = Snapshots("c1", settings, slurm, lambda: known)
    slurm.jobs = {2: known[1]}
    snapshots.tick(journal.extend)
    ends = [event.body.record for event in journal if event.kind == JOB_END]
    assert [(end.job_id, end.state) for end in ends] == [(1, "UNKNOWN")]


def test_nothing_is_ended_by_a_row_that_was_not_understood(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    slurm.jobs = {1: record(1, state="RUNNING", start=NOON)}
    snapshots.tick(journal.extend)
    slurm.jobs, slurm.passed_over = {}, 1
    before = len(journal)
    snapshots.tick(journal.extend)
    assert len(journal) == before


def test_what_the_journal_did_not_take_is_said_again(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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


def test_an_allowance_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    allowance = Allowance(most=2, per_s=1.0)
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    now += 1.0
    assert not allowance.take(reserve=1.0)
    assert allowance.take()
    now += 100.0
    assert [allowance.take() for _ in range(3)] == [True, True, False]


def jobcomp(ended: JobRecord) -> Event:
    said = Told(ended, NOON)
    return end_event("c1", said, ended)


OVER = record(5, state="COMPLETED", start=NOON, end=NOON, exit_code=0)


def test_what_jobcomp_tells_is_asked_for_while_slurm_has_it(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
) -> None:
    snapshots.tick(journal.extend)
    slurm.jobs[5] = OVER
    snapshots.apply([jobcomp(OVER)], 2, journal.extend)
    looks = slurm.looks
    snapshots._due = 1e12  # no look at the queue meanwhile
    snapshots.tick(journal.extend)
    assert (slurm.asked, slurm.looks) == ([5], looks)
    assert [event.body.whole for event in journal if event.kind == JOB_END] == [True]
    snapshots.apply([jobcomp(OVER)], 3, journal.extend)
    snapshots.tick(journal.extend)
    assert slurm.asked == [5]


def test_a_run_whose_end_jobcomp_told_is_not_lost(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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


def test_who_cancelled_a_job(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(snapshots, "_cancelled", Cancelled("c1", lambda: clock[0]))
    cancelled = record(7, state="CANCELLED", start=NOON, end=NOON, exit_signal=15)
    slurm.jobs[7] = cancelled
    slurm.told = []
    snapshots.tick(journal.extend)
    journal.clear()
    clock[0] += 5
    snapshots.tick(journal.extend)
    slurm.told = [
        record(7, state="CANCELLED", submit=NOON.replace(hour=1), cancelled_by=5),
        record(7, state="CANCELLED", end=NOON, cancelled_by=1000, exit_code=0, exit_signal=0),
    ]
    snapshots.tick(journal.extend)
    assert kinds(journal) == [], "asked again later"
    clock[0] += 60
    snapshots.tick(journal.extend)
    (event,) = journal
    told = event.body.record
    assert (event.kind, event.source, event.body.whole) == (JOB_END, "sacct", False)
    assert (told.cancelled_by, told.exit_code, told.exit_signal) == (1000, 0, 0)
    assert (told.end, told.submit) == (NOON, NOON)
    clock[0] += 600
    snapshots.tick(journal.extend)
    assert len(journal) == 1


def test_nobody_is_asked_who_cancelled_where_there_is_no_slurmdbd(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(snapshots, "_cancelled", Cancelled("c1", lambda: clock[0]))
    slurm.jobs[7] = record(7, state="CANCELLED", end=NOON)
    snapshots.tick(journal.extend)
    clock[0] += 60
    snapshots.tick(journal.extend)
    assert all(event.source != "sacct" for event in journal)


def test_a_suspension_is_told_with_its_time(
    slurm: Scripted, snapshots: Snapshots, journal: list[Event]
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


def test_a_whole_look_is_told_behind_the_jobs_that_it_showed(
    slurm: Scripted, journal: list[Event]
) -> None:
    telling = Snapshots("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, tells_looks=True)
    slurm.jobs[1] = record(1)
    telling.tick(journal.extend)
    told = [event.kind for event in journal if event.kind in (JOB_SEEN, QUEUE_LOOKED)]
    assert told[:2] == [JOB_SEEN, QUEUE_LOOKED]
    (looked,) = (event.body for event in journal if event.kind == QUEUE_LOOKED)
    assert looked.began == NOON
    # Not each of them: they are events.
    telling.tick(journal.extend)
    assert sum(event.kind == QUEUE_LOOKED for event in journal) == 1


def test_a_look_that_was_not_whole_is_none(slurm: Scripted, journal: list[Event]) -> None:
    telling = Snapshots("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, tells_looks=True)
    slurm.passed_over = 1
    telling.tick(journal.extend)
    assert QUEUE_LOOKED not in {event.kind for event in journal}


class Clock:
    """Time that goes by as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: self.now)


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
    slurm: Scripted, journal: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    telling = Snapshots("c1", ClusterSettings(snapshot_interval_s=300.0), slurm, tells_looks=True)
    assert telling.tick(journal.extend) == pytest.approx(300)
    telling.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(6, abs=1)
    clock.now += 6.1
    assert telling.tick(journal.extend) == pytest.approx(300)
    assert slurm.looks == 2
    assert sum(event.kind == QUEUE_LOOKED for event in journal) == 2
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
    slurm: Scripted, journal: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    slurm.cost_s = 2.0
    telling = Snapshots("c1", ClusterSettings(snapshot_interval_s=300.0), slurm, tells_looks=True)
    telling.tick(journal.extend)
    telling.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(40, abs=1)
    slurm.passed_over = 1
    clock.now += 41
    telling.tick(journal.extend)
    assert telling.tick(journal.extend) == pytest.approx(40, abs=1), "it was not seen whole"
    silent = Snapshots("c1", ClusterSettings(snapshot_interval_s=300.0), slurm)
    silent.tick(journal.extend)
    silent.apply([hold(HOLD_PLACED, utc_now())], 1, journal.extend)
    assert silent.tick(journal.extend) == pytest.approx(300), "there is no bank to tell"
