from typing import Any

import msgspec

from harness.events import at
from harness.jobs import record
from steward.core.events import JOB_END, Event, JobFacts
from steward.core.timestamps import to_micros
from steward.jobs.identity import ResolvedJob, StoredScriptFacts, resolve_jobs
from steward.jobs.run_merge import RunFacts
from steward.jobs.run_views import build_run_views
from steward.slurm.job_states import FORGOTTEN


def runs(*events: Event) -> list[RunFacts]:
    found: dict[tuple[int, int], RunFacts] = {}
    for event in events:
        shown = event.body.record
        key = (to_micros(shown.submit), shown.restarts)
        found.setdefault(key, RunFacts(*key)).add(event)
    return list(found.values())


def kept(seconds: float) -> StoredScriptFacts:
    return StoredScriptFacts(f"script:7:{seconds}", to_micros(at(seconds)) * 1000)


def shape(jobs: list[ResolvedJob]) -> list[tuple[float, int, int]]:
    noon_us = to_micros(at(0))
    return [
        ((job.first_submit_us - noon_us) / 1e6, len(job.runs), len(job.scripts)) for job in jobs
    ]


def test_a_submit_time_has_whole_seconds_and_the_script_comes_a_little_later() -> None:
    assert shape(resolve_jobs(runs(record(7, 5)), [kept(5.9)])) == [(5, 1, 1)]
    assert shape(resolve_jobs(runs(record(7, 5)), [kept(7.2)])) == [(5, 1, 1)]


def test_a_spool_whose_clock_is_a_second_slow_is_allowed_for() -> None:
    assert shape(resolve_jobs(runs(record(7, 5)), [kept(3.5)])) == [(5, 1, 1)]
    assert shape(resolve_jobs(runs(record(7, 5)), [kept(2.5)])) == [(2, 0, 1), (5, 1, 0)]


def test_of_two_jobs_of_one_id_each_gets_the_script_of_its_time() -> None:
    jobs = resolve_jobs(runs(record(7, 0), record(7, 100)), [kept(0.5), kept(100.5)])
    assert shape(jobs) == [(0, 1, 1), (100, 1, 1)]


def test_a_second_script_within_the_minute_is_another_jobs() -> None:
    # The state was lost and ids started over: within seconds another job has the id.
    assert shape(resolve_jobs(runs(record(7, 0)), [kept(0.5), kept(9.5)])) == [(0, 1, 1), (9, 0, 1)]


def test_an_interactive_job_takes_no_script() -> None:
    assert shape(resolve_jobs(runs(record(7, 0, batch=False)), [kept(0.5)])) == [
        (0, 1, 0),
        (0, 0, 1),
    ]


def test_tasks_take_no_script_under_their_own_id_but_components_a_stand_in() -> None:
    task = record(7, 0, array_job_id=3, array_task="1")
    assert shape(resolve_jobs(runs(task), [kept(0.5)])) == [(0, 1, 0), (0, 0, 1)]
    component = record(7, 0, het_job_id=6, het_offset=1)
    assert shape(resolve_jobs(runs(component), [kept(0.5)])) == [(0, 1, 1)]
    leader = record(7, 0, het_job_id=7)
    assert shape(resolve_jobs(runs(leader), [kept(0.5)])) == [(0, 1, 1)]


def test_powering_up_changes_the_start_and_makes_no_new_job() -> None:
    jobs = resolve_jobs(
        runs(
            record(7, 0, "RUNNING", seen=5, start=at(4)),
            record(7, 0, "RUNNING", seen=90, start=at(80)),
        ),
        [],
    )
    assert shape(jobs) == [(0, 1, 0)]
    assert jobs[0].record is not None
    assert jobs[0].record.start == at(80)


def test_each_run_of_a_scrontab_job_is_a_run_of_the_same_job() -> None:
    events = [record(7, 3600 * number, restarts=number) for number in range(5)]
    assert shape(resolve_jobs(runs(*events), [kept(0.5)])) == [(0, 5, 1)]


def test_a_restart_count_that_falls_is_another_job() -> None:
    events = [record(7, 0), record(7, 10, restarts=3), record(7, 500, restarts=1)]
    assert shape(resolve_jobs(runs(*events), [])) == [(0, 2, 0), (500, 1, 0)]


def test_nobody_goes_on_with_somebody_elses_job() -> None:
    events = [record(7, 0, uid=11), record(7, 500, uid=12, restarts=1)]
    assert shape(resolve_jobs(runs(*events), [])) == [(0, 1, 0), (500, 1, 0)]


def test_while_a_requeued_job_completes_its_count_is_ahead_of_its_submit_time() -> None:
    events = [record(7, 0), record(7, 0, restarts=1, seen=9), record(7, 10, restarts=1)]
    assert shape(resolve_jobs(runs(*events), [kept(0.5)])) == [(0, 3, 1)]


def test_a_first_look_at_a_later_run_dates_the_job_by_its_script() -> None:
    assert shape(resolve_jobs(runs(record(7, 900, restarts=2)), [kept(3.7)])) == [(3, 1, 1)]
    assert shape(resolve_jobs(runs(record(7, 4, restarts=1)), [kept(3.7)])) == [(3, 1, 1)]


def test_a_component_whose_later_run_shows_no_script_has_it_all_the_same() -> None:
    of_het: dict[str, Any] = {"het_job_id": 6, "het_offset": 1}
    again = {**of_het, "restarts": 1, "batch": False}
    events = [record(7, 0, **of_het), record(7, 0, seen=9, **again), record(7, 10, **again)]
    assert shape(resolve_jobs(runs(*events), [kept(0.5)])) == [(0, 3, 1)]


def test_a_run_that_slurmctld_forgot_is_none_of_its_job() -> None:
    first = record(7, 0, "RUNNING", start=at(1))
    again = record(7, 60, restarts=1, seen=61)
    told = record(7, 60, "UNKNOWN", restarts=1, seen=70, reason=FORGOTTEN)
    gone = msgspec.structs.replace(told, kind=JOB_END)
    (job,) = resolve_jobs(runs(first, again, gone), [])
    assert ([run.restarts for run in job.runs], job.latest.is_over) == ([0], False)
    # Shown again after that, or begun before, it was one.
    back = record(7, 60, restarts=1, seen=80)
    (job,) = resolve_jobs(runs(first, again, gone, back), [])
    assert len(job.runs) == 2
    began = msgspec.structs.replace(gone.body.record, start=at(62))
    gone = msgspec.structs.replace(gone, body=JobFacts(record=began))
    (job,) = resolve_jobs(runs(first, again, gone), [])
    assert ([run.restarts for run in job.runs], job.latest.is_over) == ([0, 1], True)


def test_a_job_whose_id_another_one_has_is_over() -> None:
    of_array: dict[str, Any] = {"array_job_id": 7, "array_task": "0-2"}
    array = record(7, 0, **of_array)
    # No source saw the other job's first run: slurmctld and Steward were killed.
    other = (
        record(7, 20, "REQUEUED", seen=30, end=30, start=at(21), source="jobcomp"),
        record(7, 30, restarts=1, seen=40),
    )
    former, latter = resolve_jobs(runs(array, *other), [])
    assert (former.is_over, former.latest.is_over, latter.is_over) == (True, False, False)
    assert former.record is not None
    assert former.record.state == "UNKNOWN", "what is told with its script says so, too"
    (view,) = build_run_views(former)
    assert (view.is_over, view.has_reported_end, view.record.state) == (True, False, "UNKNOWN")
    assert [view.is_over for view in build_run_views(latter)] == [True, False]
    # Its end is reported at last.
    told = record(7, 0, "COMPLETED", seen=9, end=8, start=at(6), **of_array)
    (view,) = build_run_views(resolve_jobs(runs(array, *other, told), [])[0])
    assert (view.has_reported_end, view.record.state) == (True, "COMPLETED")
    # It waited to run again.
    told = record(7, 0, "REQUEUED", seen=9, end=8, start=at(6), source="jobcomp", **of_array)
    (view,) = build_run_views(resolve_jobs(runs(array, *other, told), [])[0])
    assert (view.has_reported_end, view.record.state, view.record.end) == (True, "UNKNOWN", at(8))
    # Another crash brought it back.
    former = resolve_jobs(runs(array, *other, record(7, 0, seen=60, **of_array)), [])[0]
    assert (former.is_over, build_run_views(former)[0].is_over) == (False, False)
