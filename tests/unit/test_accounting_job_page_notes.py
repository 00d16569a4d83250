"""Notes on a job's resource use, and jobs that get none."""

from typing import Any, get_args

import pytest

from harness.job_page import GIB, kinds, launch, run_line, run_of, task
from steward.accounting.job_page.layouts import NOTE_TITLES
from steward.accounting.job_page.requests import NoteKind


def test_nobody_is_told_to_ask_for_less_memory_where_its_peak_is_not_known() -> None:
    tasks = [task(n, cpu_s=1150, max_rss_bytes=2**20) for n in range(2)]
    assert kinds(run_of(run_line(600), launch(*tasks))) == []


def test_a_job_that_used_what_it_asked_for_has_no_notes() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=2300), peak_bytes=2 * GIB))
    assert kinds(run) == []


def test_memory_that_was_not_used_is_remarked_on() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=2300), peak_bytes=GIB // 10))
    assert kinds(run) == ["memory-low"]
    assert "102.4 MiB of 4.0 GiB (2%) on n1" in run.notes[0].words


def test_memory_that_nearly_ran_out_is_remarked_on() -> None:
    line = run_line(600, max_rss_bytes=GIB)
    run = run_of(line, launch(task(cpu_s=2300), peak_bytes=int(3.9 * GIB)))
    assert kinds(run) == ["memory-high"]
    assert "Cached files may be part" in run.notes[0].words


def test_idle_cpus_are_remarked_on() -> None:
    assert kinds(run_of(run_line(600), launch(task(cpu_s=1000), peak_bytes=2 * GIB))) == ["cpu-low"]


def test_one_busy_cpu_of_many_is_serial() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=600), peak_bytes=2 * GIB))
    assert kinds(run) == ["serial"]
    assert "on 4 CPUs: 1.0 of them" in run.notes[0].words
    # Of two CPUs one is not "many".
    run = run_of(run_line(600, cpus=2), launch(task(cpu_s=500), peak_bytes=2 * GIB))
    assert kinds(run) == ["cpu-low"]


def test_idle_tasks_are_idle_and_not_serial() -> None:
    tasks = [task(number, cpu_s=0.1) for number in range(4)]
    run = run_of(run_line(600), launch(*tasks, peak_bytes=2 * GIB))
    assert "serial" not in kinds(run)
    assert "cpu-low" in kinds(run)


@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL"])
def test_a_failed_node_is_no_failure_of_the_job_and_sent_no_signal(state: str) -> None:
    run = run_of(run_line(10, state=state, exit_signal=1))
    assert kinds(run) == ["node-fail"]
    assert "SIGHUP" not in run.notes[0].words


def test_limits_far_off_and_near_are_remarked_on() -> None:
    steps = launch(task(cpu_s=2300), peak_bytes=2 * GIB)
    assert kinds(run_of(run_line(600, time_limit_s=86400), steps)) == ["time-low"]
    assert kinds(run_of(run_line(600, time_limit_s=610), steps)) == ["time-high"]


def test_imbalance_is_remarked_on() -> None:
    tasks = [task(number, cpu_s=2000.0 if number == 2 else 100.0) for number in range(4)]
    run = run_of(run_line(600), launch(*tasks, peak_bytes=2 * GIB))
    assert kinds(run) == ["imbalance"]
    assert "task 2 used 33m 20s" in run.notes[0].words
    assert run.steps[0].balance is not None
    assert run.steps[0].balance.ratio == pytest.approx(2000 / 575)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"state": "OUT_OF_MEMORY"}, ["out-of-memory"]),
        ({"state": "TIMEOUT"}, ["timeout"]),
        ({"state": "NODE_FAIL", "failed_node": "n1"}, ["node-fail"]),
        ({"state": "FAILED", "exit_code": 3}, []),
        ({"state": "CANCELLED"}, []),
    ],
)
def test_how_it_ended_is_remarked_on(fields: dict[str, Any], wanted: list[str]) -> None:
    line = run_line(1200, **fields)
    assert kinds(run_of(line, launch(task(cpu_s=4700), peak_bytes=2 * GIB))) == wanted


def test_a_short_run_is_not_judged_but_its_failure_is() -> None:
    steps = launch(task(cpu_s=0.1), peak_bytes=1)
    assert kinds(run_of(run_line(59), steps)) == []
    failed = run_of(run_line(2, state="FAILED", exit_code=3), steps)
    assert kinds(failed) == ["failed-early"]
    assert "after 2 s, with exit code 3" in failed.notes[0].words
    assert kinds(run_of(run_line(60), steps)) == ["memory-low", "cpu-low", "time-low"]


def test_lost_facts_are_no_reason_to_tell_anybody_to_ask_for_less() -> None:
    line = run_line(600, doubts="no-end")
    run = run_of(line, launch(task(cpu_s=10), ended=False))
    assert run.efficiency.at_least
    assert kinds(run) == []


def test_a_run_that_goes_on_is_not_judged() -> None:
    run = run_of(run_line(0, end_us=0, state="RUNNING"), launch(task(cpu_s=1)))
    assert run.efficiency.cpu is None
    assert kinds(run) == []


def test_each_kind_has_a_title_for_summaries_of_arrays() -> None:
    assert set(NOTE_TITLES) == set(get_args(NoteKind))
