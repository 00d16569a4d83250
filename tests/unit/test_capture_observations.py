from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON
from steward.capture.observations import QueueObserver
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event
from steward.core.records import JobRecord
from steward.slurm.job_states import FORGOTTEN

LATER = NOON + timedelta(seconds=5)
JOB = JobRecord(job_id=7, name="ok", uid=1000, state="PENDING", submit=NOON, batch=True)


def changed(record: JobRecord, **changes: object) -> JobRecord:
    return msgspec.structs.replace(record, **changes)


RUNNING = changed(JOB, state="RUNNING", start=LATER, nodelist="n1")
OVER = changed(RUNNING, state="COMPLETED", end=LATER, exit_code=0, exit_signal=0)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_job_from_queue_to_end() -> None:
    observed = QueueObserver("c1")
    assert kinds(observed.observe([JOB], NOON)) == [JOB_SEEN]
    assert observed.observe([JOB], LATER) == []
    assert kinds(observed.observe([RUNNING], LATER)) == [JOB_STATE]
    (end,) = observed.observe([OVER], LATER)
    assert (end.kind, end.at, end.body.record) == (JOB_END, LATER, OVER)
    assert observed.observe([OVER], LATER) == []


def test_a_run_that_slurmctld_forgot_as_it_crashed_is_told_to_be_none() -> None:
    observed = QueueObserver("c1")
    observed.observe([OVER], NOON)
    again = changed(JOB, submit=LATER, restarts=1)
    observed.observe([again], LATER)
    gone = observed.observe([OVER], LATER)[0]
    record = gone.body.record
    assert (gone.kind, record.restarts, record.state, record.end) == (JOB_END, 1, "UNKNOWN", None)
    assert record.reason == FORGOTTEN
    # While a requeued job completes it has the new count with the old time: that is no run.
    early = changed(JOB, restarts=1)
    observed.observe([early], LATER)
    assert JOB_END not in kinds(observed.observe([RUNNING], LATER))


def test_a_requeue_that_slurmctld_forgot_as_the_job_completed_makes_no_run() -> None:
    observed = QueueObserver("c1")
    observed.observe([JOB], NOON)
    observed.observe([RUNNING], NOON)
    observed.record_end(changed(RUNNING, state="REQUEUED", end=LATER))
    completing = changed(RUNNING, state="COMPLETING", restarts=1, reason="launch failed requeued")
    assert observed.observe([completing], LATER) == []
    # slurmctld was killed, and the first run continues.
    assert all(one.body.record.restarts == 0 for one in observed.observe([RUNNING, OVER], LATER))
    # Otherwise the next run has another time.
    observed.observe([completing], LATER)
    again = observed.observe([changed(JOB, submit=LATER, restarts=1)], LATER)
    assert {one.body.record.restarts for one in again} == {1}


def test_what_happened_while_nobody_looked_is_all_said() -> None:
    assert kinds(QueueObserver("c1").observe([RUNNING], LATER)) == [JOB_SEEN, JOB_STATE]
    assert kinds(QueueObserver("c1").observe([OVER], LATER)) == [JOB_SEEN, JOB_END]


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_who_forgets_repeats_the_same_keys(forgets: list[bool]) -> None:
    lasting, forgetful = QueueObserver("c1"), QueueObserver("c1")
    once, again = set(), set()
    for record, forget in zip([JOB, JOB, RUNNING, RUNNING, OVER, OVER], forgets, strict=True):
        once |= {event.key for event in lasting.observe([record], NOON)}
        if forget:
            forgetful.clear()
        again |= {event.key for event in forgetful.observe([record], LATER)}
    assert again == once


def test_a_changed_fact_is_seen_again_and_a_changed_guess_is_not() -> None:
    observed = QueueObserver("c1")
    (first,) = observed.observe([JOB], NOON)
    (second,) = observed.observe([changed(JOB, time_limit_s=60)], LATER)
    assert (second.kind, second.key != first.key) == (JOB_SEEN, True)
    named = changed(JOB, time_limit_s=60, user="ada")
    assert kinds(observed.observe([named], LATER)) == [JOB_SEEN], "the uid resolves now"
    guess = changed(named, reason="Priority", dependency="")
    assert observed.observe([guess], LATER) == []


@pytest.mark.parametrize(
    "request_",
    [
        {"tres_requested": "cpu=8,mem=100M,node=1,billing=8"},
        {"licenses": "abq:4"},
        {"min_memory_mib": 9000},
        {"tasks": 20},
        {"tres_per_node": "gres/disk:4"},
        {"tres_per_task": "gres/disk:4"},
        {"cpus": 8},
        {"nodes": 3},
        {"array_task": "1-9%5"},
    ],
)
def test_what_a_job_that_waits_asks_for_is_news_each_time_that_it_changes(
    request_: dict[str, Any],
) -> None:
    observed = QueueObserver("c1")
    before = changed(JOB, cpus=1, nodes=1, tres_requested="cpu=1,mem=100M,node=1,billing=1")
    after = changed(before, **request_)
    keys = []
    for number, record in enumerate([before, after, before, after]):
        (event,) = observed.observe([record], NOON + timedelta(seconds=10 * number))
        assert (event.kind, event.body.record) == (JOB_SEEN, record)
        keys.append(event.key)
        dearer = changed(record, tres_requested=record.tres_requested.replace("g=", "g=1"))
        assert observed.observe([dearer], LATER) == [], "weights change for all jobs at once"
    assert len(set(keys)) == 4
    restarted = QueueObserver("c1")
    restarted.remember([before])
    assert kinds(restarted.observe([after], LATER)) == [JOB_SEEN]
    running = changed(RUNNING, **request_, tres_allocated="cpu=9,node=1")
    assert kinds(restarted.observe([running], LATER)) == [JOB_STATE], "that is what it was given"


def test_the_tasks_that_an_array_has_left_are_no_news() -> None:
    observed = QueueObserver("c1")
    array = changed(JOB, array_job_id=7, array_task="1-9%2")
    assert kinds(observed.observe([array], NOON)) == [JOB_SEEN]
    assert observed.observe([changed(array, array_task="3-9%2")], LATER) == []
    last = changed(RUNNING, array_job_id=7, array_task="9")
    assert kinds(observed.observe([last], LATER)) == [JOB_SEEN, JOB_STATE]


def test_a_requeued_job_has_another_run() -> None:
    observed = QueueObserver("c1")
    observed.observe([RUNNING], NOON)
    again = changed(JOB, restarts=1, submit=LATER)
    events = observed.observe([again], LATER)
    assert kinds(events) == [JOB_SEEN, JOB_STATE]
    assert all(":1:" in event.key for event in events)


def test_an_id_that_is_used_again_is_another_job() -> None:
    observed = QueueObserver("c1")
    observed.observe([OVER], NOON)
    assert 7 not in observed
    reused = changed(JOB, name="other", uid=1001, submit=LATER)
    assert kinds(observed.observe([reused], LATER)) == [JOB_SEEN]
    assert 7 in observed


def test_running_again_after_a_suspension_is_news() -> None:
    observed = QueueObserver("c1")
    (_, running) = observed.observe([RUNNING], NOON)
    (suspended,) = observed.observe([changed(RUNNING, state="SUSPENDED")], NOON)
    (resumed,) = observed.observe([RUNNING], LATER)
    assert len({running.key, suspended.key, resumed.key}) == 3
    assert resumed.body.record.state == "RUNNING"


def test_a_resized_job_is_news() -> None:
    observed = QueueObserver("c1")
    observed.observe([RUNNING], NOON)
    (event,) = observed.observe([changed(RUNNING, nodelist="n[1-2]")], LATER)
    assert (event.kind, event.body.record.nodelist) == (JOB_STATE, "n[1-2]")


def test_finished_jobs_are_forgotten_and_others_are_missed() -> None:
    observed = QueueObserver("c1")
    observed.observe([OVER, changed(RUNNING, job_id=8), changed(RUNNING, job_id=9)], NOON)
    assert observed.find_absent({9}) == ([8], [])
    assert observed.find_absent({9}) == ([8], []), "until somebody ends it"
    (event,) = observed.end_lost_run(8, LATER)
    assert (event.kind, event.body.record.state, event.body.record.end) == (
        JOB_END,
        "UNKNOWN",
        None,
    )
    assert event.body.record.name == "ok"
    assert observed.find_absent({9}) == ([], [])


def test_a_run_that_came_back_and_is_lost_again_is_told_again() -> None:
    observed = QueueObserver("c1")
    ends = []
    for minutes in (1, 2):
        observed.observe([RUNNING], NOON)
        ends += observed.end_lost_run(7, NOON + timedelta(minutes=minutes))
    assert len({event.key for event in ends}) == 2


def test_a_lost_end_is_as_slurmdbd_tells_it() -> None:
    observed = QueueObserver("c1")
    observed.observe([RUNNING], NOON)
    former = changed(OVER, submit=NOON - timedelta(days=1), state="FAILED")
    told = changed(OVER, state="CANCELLED")
    (event,) = observed.end_lost_run(7, LATER, [former, told])
    assert (event.body.record, event.source) == (told, "sacct")


def test_a_job_whose_id_another_got_is_lost() -> None:
    """slurmctld was killed before it saved the first job, and assigned its id again."""
    observed = QueueObserver("c1")
    observed.observe([JOB], NOON)
    other = changed(JOB, submit=LATER)
    end, *rest = observed.observe([other], LATER)
    assert (end.kind, end.body.record.state, end.body.record.submit) == (
        JOB_END,
        "UNKNOWN",
        JOB.submit,
    )
    assert {event.body.record.submit for event in rest} == {LATER}
    again = observed.observe([changed(other, submit=LATER + timedelta(hours=1), restarts=1)], LATER)
    assert JOB_END not in {event.kind for event in again}, "a requeue is none"
    observed.observe([changed(OVER, job_id=8)], NOON)
    third = observed.observe([changed(JOB, job_id=8, submit=LATER)], LATER)
    assert JOB_END not in {event.kind for event in third}, "it was over"


def test_the_whole_record_is_wanted_once_newest_first() -> None:
    observed = QueueObserver("c1")
    task = changed(RUNNING, job_id=9, array_job_id=7, array_task="1")
    observed.observe([JOB, changed(JOB, job_id=8), task], NOON)
    assert observed.find_job_to_query() == 8
    whole = changed(JOB, job_id=8, submit_line="sbatch x")
    (event,) = observed.observe([whole], LATER, whole=True)
    assert event.body.whole
    assert event.key.endswith(":whole")
    assert observed.find_job_to_query() == 7
    observed.drop_query(7)
    assert observed.find_job_to_query() is None
    assert observed.observe([whole], LATER, whole=True) == []


def test_after_clear_everything_is_said_again() -> None:
    observed = QueueObserver("c1")
    first = observed.observe([RUNNING], NOON)
    observed.clear()
    assert [event.key for event in observed.observe([RUNNING], LATER)] == [e.key for e in first]


def test_requeued_tasks_are_folded_into_their_array() -> None:
    observed = QueueObserver("c1")
    array = changed(JOB, array_job_id=7, array_task="3-9%2")
    tasks = [changed(RUNNING, job_id=10 + i, array_job_id=7, array_task=str(i)) for i in (1, 2)]
    observed.observe([array, *tasks], NOON)
    assert observed.find_absent({7}) == ([11, 12], []), "the array says that they are not left"
    observed.observe([changed(array, array_task="2-9")], LATER)
    assert observed.find_absent({7}) == ([11], [12])
    again = changed(JOB, job_id=12, array_job_id=7, array_task="2", restarts=1)
    observed.observe([again], LATER)
    assert observed.find_absent({7}) == ([11], []), "that it is pending is known"
    observed.observe([changed(array, array_task="3-9")], LATER)
    assert observed.find_absent({7}) == ([11, 12], [])


def test_what_an_earlier_process_saw_is_gone_on_with() -> None:
    observed = QueueObserver("c1")
    suspended = changed(RUNNING, state="SUSPENDED")
    observed.remember([suspended, changed(JOB, job_id=8), changed(OVER, job_id=9)])
    assert observed.find_job_to_query() is None
    (event,) = observed.observe([RUNNING], LATER)
    (_, first) = QueueObserver("c1").observe([RUNNING], LATER)
    assert (event.kind, event.key != first.key) == (JOB_STATE, True)
    assert observed.find_absent({7}) == ([8], [])


def test_a_job_that_is_let_go_is_news() -> None:
    observed = QueueObserver("c1")
    held = changed(JOB, reason="JobHeldUser")
    first = observed.observe([held], NOON)
    assert observed.observe([held], NOON) == []
    let_go = observed.observe([changed(JOB, reason="Priority")], NOON)
    assert [event.kind for event in let_go] == [JOB_SEEN]
    assert let_go[0].key != first[0].key
    # A reason that only the scheduler sets does not count.
    assert observed.observe([changed(JOB, reason="Resources")], NOON) == []


def test_former_sizes_of_a_lost_run_are_as_slurmdbd_tells_them() -> None:
    observed = QueueObserver("c1")
    observed.observe([RUNNING], NOON)
    sizes = [changed(OVER, state="RESIZING", end=NOON + timedelta(seconds=n)) for n in (10, 20)]
    events = observed.end_lost_run(7, LATER, [*sizes, OVER])
    assert [event.body.record for event in events] == [*sizes, OVER]
    assert len({event.key for event in events}) == 3
