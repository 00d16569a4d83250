"""Unfinished runs that a controller stores, to detect ends during a restart."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.events import NOON
from steward.capture.jobcomp import JobcompRecord, make_end_event
from steward.capture.observations import QueueObserver
from steward.capture.run_store import UnfinishedRuns, read_unfinished_runs
from steward.core.config import Settings
from steward.core.events import Event
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.records import JobRecord
from steward.daemon.source_workers import list_unfinished
from steward.extensions.controllers.settings import ForwardSettings
from steward.jobs import JobsConsumer


def nothing(_: object) -> None:
    pytest.fail("nothing is appended")


def record(job_id: int, state: str = "RUNNING", **fields: Any) -> JobRecord:
    return JobRecord(job_id=job_id, state=state, submit=NOON, start=NOON, uid=1000, **fields)


def events_of(observed: QueueObserver, *records: JobRecord) -> list[Event]:
    return observed.observe(records, NOON + timedelta(minutes=1))


def test_only_what_has_not_ended_is_remembered(tmp_path: Path) -> None:
    runs, observed = UnfinishedRuns(str(tmp_path), "c1"), QueueObserver("c1")
    assert read_unfinished_runs(str(tmp_path), "c1")[0] == []
    runs.apply(events_of(observed, record(1), record(2), record(3, "PENDING")), 6, nothing)
    assert [run.job_id for run in read_unfinished_runs(str(tmp_path), "c1")[0]] == [1, 2, 3]
    ended = record(2, "COMPLETED", end=NOON)
    runs.apply(events_of(observed, record(1), ended, record(3)), 9, nothing)
    assert {run.job_id: run.state for run in read_unfinished_runs(str(tmp_path), "c1")[0]} == {
        1: "RUNNING",
        3: "RUNNING",
    }
    runs.close()
    again = UnfinishedRuns(str(tmp_path), "c1")
    assert again.cursor() == 9
    again.close()


def test_what_ended_while_nobody_looked_is_told(tmp_path: Path) -> None:
    runs = UnfinishedRuns(str(tmp_path), "c1")
    runs.apply(events_of(QueueObserver("c1"), record(1), record(2)), 4, nothing)
    runs.close()
    fresh = QueueObserver("c1")
    fresh.remember(read_unfinished_runs(str(tmp_path), "c1")[0])
    lost, _ = fresh.find_absent({2: 0})
    assert lost == [1]
    (end,) = fresh.observe([record(2, "FAILED", end=NOON)], NOON)
    assert (end.kind, end.body.record.job_id) == ("job.end", 2)


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_what_was_not_taken_in_before_a_crash_is_remembered(
    tmp_path: Path, is_forwarded: bool
) -> None:
    forward = ForwardSettings(to="archive:1") if is_forwarded else ForwardSettings()
    settings = Settings(state_dir=str(tmp_path), forward=forward)
    assert list_unfinished(settings, "c1") == []
    keeper = UnfinishedRuns(str(tmp_path), "c1") if is_forwarded else JobsConsumer(settings)
    observed = QueueObserver("c1")
    journal = Journal(str(tmp_path))
    early = events_of(observed, record(1), record(2), record(3))
    journal.append(encode_rows(early))
    keeper.apply(early, journal_head(tmp_path), lambda _: None)
    keeper.close()
    # The host went down here: the keeper has not seen the rest, and never will before the look.
    journal.append(encode_rows(events_of(observed, record(4), record(2, "COMPLETED", end=NOON))))
    assert sorted(run.job_id for run in list_unfinished(settings, "c1")) == [1, 3, 4]
    fresh = QueueObserver("c1")
    fresh.remember(list_unfinished(settings, "c1"))
    assert fresh.find_absent({1: 0, 3: 0})[0] == [4]


def journal_head(state_dir: Path) -> int:
    with closing(JournalReader(str(state_dir))) as reader:
        return reader.head()


def test_a_piece_or_a_requeue_that_jobcomp_tells_of_is_no_end(tmp_path: Path) -> None:
    runs = UnfinishedRuns(str(tmp_path), "c1")
    runs.apply(events_of(QueueObserver("c1"), record(1), record(2), record(3)), 6, nothing)
    ended = [record(1, "RESIZING", end=NOON), record(2, "REQUEUED", end=NOON)]
    ended.append(record(3, "FAILED", end=NOON))
    told = [make_end_event("c1", JobcompRecord(one, NOON), one) for one in ended]
    runs.apply(told, 9, nothing)
    assert [run.job_id for run in read_unfinished_runs(str(tmp_path), "c1")[0]] == [1, 2]
    # Polls say more; but a run that began and was requeued between two of them is known by this.
    (requeued,) = (
        make_end_event("c1", JobcompRecord(one, NOON), one)
        for one in [record(4, "REQUEUED", end=NOON)]
    )
    runs.apply([requeued], 10, nothing)
    known = {run.job_id: run.state for run in read_unfinished_runs(str(tmp_path), "c1")[0]}
    assert known == {1: "RUNNING", 2: "RUNNING", 4: "REQUEUED"}
    runs.close()


def test_another_clusters_jobs_are_not_ours(tmp_path: Path) -> None:
    runs = UnfinishedRuns(str(tmp_path), "c1")
    runs.apply(events_of(QueueObserver("c2"), record(1)), 2, nothing)
    assert runs.cursor() == 2
    assert read_unfinished_runs(str(tmp_path), "c1")[0] == []
    runs.close()


def test_before_the_first_start_nothing_is_known(tmp_path: Path) -> None:
    assert read_unfinished_runs(str(tmp_path), "c1")[0] == []


def test_two_observers_give_the_same_keys() -> None:
    """Active and backup controller poll at different times, and one starts late."""
    first, second = QueueObserver("c1"), QueueObserver("c1")
    early, late = NOON + timedelta(seconds=10), NOON + timedelta(seconds=13)
    shown = [
        [record(1, "PENDING"), record(2, "PENDING")],
        [record(1), record(2, "PENDING", partition="debug")],
        [record(1, "COMPLETED", end=NOON), record(2)],
        [record(1, "COMPLETED", end=NOON), record(2, "TIMEOUT", end=NOON)],
    ]
    one = {event.key for look in shown for event in first.observe(look, early)}
    two = {event.key for look in shown[1:] for event in second.observe(look, late)}
    assert len(two) == 7
    assert two <= one
