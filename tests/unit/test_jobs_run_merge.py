from itertools import permutations
from typing import Any

import msgspec
import pytest

from harness.events import at
from harness.jobs import record
from steward.core.events import JOB_END, Event
from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros
from steward.jobs.run_merge import RunFacts, merge_runs, remove_private_text
from steward.slurm.job_states import FORGOTTEN

SUBMIT_US = to_micros(at(0))


def run_of(*events: Event, restarts: int = 0) -> RunFacts:
    run = RunFacts(SUBMIT_US, restarts)
    for event in events:
        run.add(event)
    return run


def test_microseconds_and_times_are_the_same() -> None:
    assert from_micros(to_micros(at(0.123456))) == at(0.123456)


def test_the_latest_look_counts_and_a_whole_record_fills_what_it_does_not_show() -> None:
    run = run_of(
        record(7, 0, "RUNNING", seen=9, reason="None"),
        record(7, 0, seen=5, whole=True, submit_line="sbatch x", reason="Priority"),
        record(7, 0, seen=1, comment="long gone"),
    )
    shown = run.merge_record()
    assert (shown.state, shown.reason, shown.submit_line) == ("RUNNING", "None", "sbatch x")
    assert shown.comment == ""


def test_a_reason_that_is_gone_is_gone() -> None:
    run = run_of(
        record(7, 0, seen=5, whole=True, reason="Priority"), record(7, 0, "RUNNING", seen=9)
    )
    assert run.merge_record().reason == ""


def test_of_two_ends_the_earlier_is_the_runs_and_the_later_is_noted() -> None:
    ends = (
        record(7, 0, "FAILED", seen=10, end=9, exit_code=3),
        record(7, 0, "FAILED", seen=40, end=39, exit_code=0),
    )
    for order in permutations(ends):
        run = run_of(*order)
        assert run.merge_record().end == at(9)
        assert run.merge_record().exit_code == 3
        assert (run.end_us, run.late_end_us) == (to_micros(at(9)), to_micros(at(39)))


def test_a_run_whose_requeue_slurmctld_forgot_ends_when_it_does() -> None:
    requeued = record(7, 0, "REQUEUED", seen=10, end=10, source="jobcomp")
    other = record(7, 0, "REQUEUED", seen=10, end=9)
    ended = record(7, 0, "FAILED", seen=90, end=90, source="jobcomp")
    for order in permutations([requeued, other, ended]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us, run.is_over) == (
            "FAILED",
            to_micros(at(90)),
            True,
        )
    # The end with which it was requeued may have either state.
    ended = record(7, 0, "FAILED", seen=10, end=10)
    for order in permutations([requeued, ended]):
        assert run_of(*order).merge_record().state == "REQUEUED"
    # What it was told to end by may come a second after slurmctld is back.
    ended = record(7, 0, "FAILED", seen=11, end=11, source="jobcomp")
    for order in permutations([requeued, other, ended]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us, run.is_over) == (
            "FAILED",
            to_micros(at(11)),
            True,
        )
    # Requeued, it ran to its end, and was requeued again: its end is reported once more.
    ended = record(7, 0, "COMPLETED", seen=16, end=16, start=at(16), source="jobcomp")
    last = record(7, 0, "REQUEUED", seen=20, end=20, start=at(16), source="jobcomp")
    for order in permutations([requeued, ended, last]):
        assert (run_of(*order).merge_record().state, run_of(*order).end_us) == (
            "COMPLETED",
            to_micros(at(16)),
        )
    assert not run_of(requeued).is_over
    again = record(7, 0, "REQUEUED", seen=20, end=20, source="jobcomp")
    for order in permutations([requeued, other, again]):
        assert run_of(*order).end_us == to_micros(at(20))


def test_a_run_whose_preemption_slurmctld_forgot_ends_when_it_does() -> None:
    preempted = record(7, 0, "PREEMPTED", seen=10, end=10, source="jobcomp")
    again = record(7, 0, "PREEMPTED", seen=20, end=20, source="jobcomp")
    ended = record(7, 0, "COMPLETED", seen=90, end=90, source="jobcomp")
    for order in permutations([preempted, again, ended]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us, run.is_over) == (
            "COMPLETED",
            to_micros(at(90)),
            True,
        )
    for order in permutations([preempted, again]):
        assert run_of(*order).end_us == to_micros(at(20))
    # When an ended run is requeued, its end is reported once more.
    requeued = record(7, 0, "REQUEUED", seen=90, end=90, source="jobcomp")
    for order in permutations([preempted, requeued]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us) == ("PREEMPTED", to_micros(at(10)))
    run = run_of(record(7, 0, "PREEMPTED", seen=10, end=10, comment="mine"))
    run.blank_private_text()
    assert run.merge_record().comment == ""


def test_an_end_without_a_time_gives_way_to_one_with() -> None:
    ends = (record(7, 0, "FAILED", seen=10), record(7, 0, "FAILED", seen=9, end=8))
    for order in permutations(ends):
        assert run_of(*order).end_us == to_micros(at(8))
    assert run_of(ends[0]).end_us == -1
    assert run_of(ends[0]).is_over


def test_a_job_that_went_while_it_waited_again_has_ended() -> None:
    requeued = record(7, 0, "REQUEUED", seen=10, end=9, source="jobcomp")
    gone = record(7, 0, "UNKNOWN", seen=20)
    for order in permutations([record(7, 0, "RUNNING", seen=5), requeued, gone]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us, run.is_over) == (
            "UNKNOWN",
            to_micros(at(9)),
            True,
        )
    # It was not gone, or only its later run was.
    for other in (
        record(7, 0, "PENDING", seen=30),
        record(7, 0, "UNKNOWN", seen=8, reason=FORGOTTEN),
    ):
        events = [requeued, other] if other.body.record.reason else [requeued, gone, other]
        for order in permutations(events):
            assert (run_of(*order).merge_record().state, run_of(*order).is_over) == (
                "REQUEUED",
                False,
            )


def test_a_job_that_was_gone_and_is_back_has_not_ended() -> None:
    gone = record(7, 0, "UNKNOWN", seen=10)
    assert run_of(record(7, 0, "RUNNING", seen=5), gone).is_over
    for order in permutations([gone, record(7, 0, "RUNNING", seen=20)]):
        run = run_of(*order)
        assert not run.is_over
        assert run.merge_record().state == "RUNNING"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "RESIZING", "PENDING", ""])
def test_an_expected_end_is_no_end(state: str) -> None:
    ended = record(7, 0, "FAILED", seen=10, end=9)
    body = msgspec.structs.replace(
        ended.body, record=msgspec.structs.replace(ended.body.record, state=state)
    )
    run = run_of(msgspec.structs.replace(ended, body=body))
    assert run.final is None
    assert not run.is_over


@pytest.mark.parametrize("state", ["CANCELLED by 1000", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_the_ways_to_end(state: str) -> None:
    assert run_of(record(7, 0, state, seen=9, end=8)).is_over


def test_a_state_that_a_later_slurm_invents_is_final_if_it_is_told_as_an_end() -> None:
    ended = record(7, 0, "FAILED", seen=10, end=9)
    invented = msgspec.structs.replace(ended.body.record, state="EVAPORATED")
    body = msgspec.structs.replace(ended.body, record=invented)
    assert run_of(msgspec.structs.replace(ended, body=body)).is_over


def test_a_requeued_run_is_final_but_the_job_is_not_over() -> None:
    run = run_of(record(7, 0, "REQUEUED", seen=9, end=8))
    assert run.ending is not None
    assert not run.is_over


def test_a_later_run_keeps_what_only_an_earlier_one_told() -> None:
    first = run_of(record(7, 0, whole=True, submit_line="sbatch x", start=at(3), user="ada"))
    second = run_of(record(7, 0, restarts=1, seen=90, user="renamed"), restarts=1)
    job = merge_runs([first, second])
    assert (job.submit_line, job.restarts, job.start, job.user) == ("sbatch x", 1, None, "ada")


def test_what_is_blanked_holds_nothing_that_a_person_wrote() -> None:
    private: dict[str, Any] = {
        "name": "confidential1",
        "submit_line": "confidential2",
        "command": "confidential3",
        "work_dir": "confidential4",
        "stdin": "confidential5",
        "stdout": "confidential6",
        "stderr": "confidential7",
        "comment": "confidential8",
        "admin_comment": "confidential9",
        "dependency": "confidential10",
        "submit_host": "confidential11",
    }
    events = (
        record(7, 0, whole=True, account="a", **private),
        record(7, 0, "RUNNING", seen=4, **private),
        record(7, 0, "FAILED", seen=9, end=8, **private),
    )
    run = run_of(*events)
    assert b"confidential" in msgspec.json.encode(run)
    run.blank_private_text()
    assert b"confidential" not in msgspec.json.encode(run)
    assert run.merge_record() == remove_private_text(run_of(*events).merge_record())
    assert (run.merge_record().account, run.merge_record().end, run.merge_record().uid) == (
        "a",
        at(8),
        1000,
    )


@pytest.mark.parametrize("source", ["scontrol", "jobcomp"])
def test_a_job_that_never_began_was_not_ended_by_a_signal(source: str) -> None:
    def told(**fields: Any) -> JobRecord:
        said = {"exit_code": 0, "exit_signal": 1, "reason": "BadConstraints", **fields}
        return run_of(
            record(7, 0, "FAILED", end=0, start=at(0), source=source, **said)
        ).merge_record()

    refused = told()
    assert (refused.exit_code, refused.exit_signal, refused.reason) == (1, 0, "BadConstraints")
    # A run may have been ended by SIGHUP, even in its first second.
    assert (told(nodelist="n1").exit_code, told(nodelist="n1").exit_signal) == (0, 1)


@pytest.mark.parametrize("count", [3, 200])
def test_how_long_a_run_was_suspended_by_the_end_of_each_of_its_sizes(count: int) -> None:
    """A run was suspended for a second of every ten, and resized; events come in any order."""
    halts = [
        record(
            *(7, 0, "RUNNING"),
            seen=10 * (n + 1) + 1,
            whole=True,
            start=at(1),
            suspended_at=at(10 * (n + 1)),
            suspended_s=n + 1,
        )
        for n in range(count)
    ]
    piece = record(7, 0, "RESIZING", seen=25, end=25, start=at(1), nodelist="n[1-2]")
    piece = msgspec.structs.replace(piece, at=at(25))
    for order in ([piece, *halts], [*halts[:2], piece, *halts[2:]]):
        run = run_of(*order)
        assert [run.count_suspended_s(to_micros(at(s))) for s in (5, 25)] == [0, 2]
        assert run.count_suspended_s(to_micros(at(99_999))) == count
        assert len(run.suspensions) <= 70


@pytest.mark.parametrize("former", ["COMPLETED", "NODE_FAIL", "REQUEUED", "PREEMPTED"])
@pytest.mark.parametrize("latter", ["COMPLETED", "NODE_FAIL", "REQUEUED", "PREEMPTED"])
def test_both_times_of_a_run_are_kept_however_they_ended(former: str, latter: str) -> None:
    ends = [
        msgspec.structs.replace(
            record(7, 0, state, seen=end, end=end, start=at(start), nodelist="n1"), kind=JOB_END
        )
        for state, start, end in ((former, 10, 30), (latter, 50, 90))
    ]
    for order in permutations(ends):
        run = run_of(*order)
        (other,) = run.repeated_ends.values()
        times = [(one.start, one.end, one.state) for one in (run.merge_record(), other.record)]
        assert sorted(times) == [(at(10), at(30), former), (at(50), at(90), latter)]


def test_a_requeue_of_a_run_that_ended_in_its_first_second_is_no_time_of_its_own() -> None:
    end = record(7, 0, "COMPLETED", seen=10, end=10, start=at(10), nodelist="n1")
    requeue = record(7, 0, "REQUEUED", seen=16, end=16, start=at(10), nodelist="n1")
    for order in permutations([end, requeue]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us) == ("COMPLETED", to_micros(at(10)))
        assert not run.repeated_ends


def test_what_began_anew_after_its_end_is_told_beside_that() -> None:
    """slurmctld was killed, had forgotten the end, and ran the job twice more."""
    first = record(7, 0, "COMPLETED", seen=30, end=30, start=at(10), nodelist="n1")
    once = record(7, 0, "COMPLETED", seen=31, end=31, start=at(10), nodelist="n1")
    second = record(7, 0, "FAILED", seen=90, end=90, start=at(50), nodelist="n1")
    third = record(7, 0, "COMPLETED", seen=200, end=200, start=at(100), nodelist="n1")
    for order in permutations([first, once, second, third]):
        run = run_of(*order)
        assert (run.merge_record().state, run.end_us) == ("COMPLETED", to_micros(at(30)))
        assert [(seen.record.start, seen.record.end) for seen in run.repeated_ends.values()] == [
            (at(50), at(90)),
            (at(100), at(200)),
        ]
    # A job cancelled while pending ran on no node.
    waiting = record(7, 0, "CANCELLED", seen=60, end=60, start=at(60))
    assert not run_of(first, waiting).repeated_ends
