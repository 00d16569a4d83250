"""Job page: steps, tasks and arrays, and how it shows them."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.job_page import (
    GIB,
    NOW,
    S,
    T,
    answer_of,
    drawn,
    launch,
    run_line,
    run_of,
    step_line,
    task,
)
from steward.accounting.job_page.notes import format_duration, format_size
from steward.accounting.job_page.page import (
    build_array_part,
    build_run_part,
    build_step_part,
    strip_private_fields,
)
from steward.accounting.job_page.requests import PageAnswer, Waiting
from steward.cli.charts import (
    ASCII,
    ChartSigns,
    TimelineSpan,
    draw_timeline,
    measure_row,
    render_plain,
)
from steward.cli.job import layout_reply
from steward.core.records import JobRecord


def test_a_job_that_ended_within_its_second_has_said_all() -> None:
    year = {"time_limit_s": 365 * 86400}
    line = run_line(0, start_us=T, end_us=T, state="FAILED", exit_code=3, **year)
    run = run_of(line, launch(task(cpu_s=0.24), peak_bytes=GIB))
    shown = drawn(answer_of(run))
    assert "so far" not in shown
    assert re.search(r"CPU .* \?  0\.24 s\n", shown)
    assert "less than 1 s of 365d\n" in shown
    assert "The job failed within a second, with exit code 3:" in shown
    assert "\n\n\n" not in shown
    short = drawn(answer_of(run_of(run_line(3, **year), launch(task()))))
    assert "<1%  3 s of 365d\n" in short


def test_an_output_that_did_not_open_is_no_signal() -> None:
    unopened = run_line(0, state="FAILED", exit_signal=53)
    record = JobRecord(job_id=7, name="train", uid=1000, state="FAILED", exit_signal=53)
    shown = drawn(answer_of(run_of(unopened), record=record))
    assert "output could not be opened" in shown
    assert "signal 53" not in shown
    assert "the end of its output" not in shown
    members = [msgspec.structs.replace(unopened, label="7_1"), run_line(5, label="7_2")]
    part = build_array_part("7", members, now_us=T)
    assert "output not opened" in [member.reason for member in part.worst]


def test_of_array_tasks_that_ran_alike_none_ran_longest() -> None:
    def whys(*seconds: float) -> list[str]:
        lines = [
            run_line(lasted, label=f"7_{place}", job_id=7 + place, cpus=0)
            for place, lasted in enumerate(seconds)
        ]
        part = build_array_part("7", lines, now_us=T)
        return [member.reason for member in part.worst]

    assert whys(0, 0, 0) == []
    assert whys(5, 9, 7) == ["ran longest", "ran second longest"]


def test_the_tasks_that_are_told_are_the_notable_ones() -> None:
    tasks = [
        task(number, cpu_s=500 if number == 77 else 10, status=9 if number == 5 else 0)
        for number in range(1000)
    ]
    tasks[300] = task(300, cpu_s=10, max_rss_bytes=GIB)
    tasks[400] = task(400, cpu_s=1)
    step = build_step_part(step_line(run_line()), [launch(*tasks)], now_us=T, tasks=4)
    assert [one.task for one in step.tasks] == [5, 77, 300, 400]
    assert step.all_tasks == 1000
    assert step.signals == {9: 1}
    assert step.codes == {}


def test_the_nodes_that_are_told_are_the_notable_ones() -> None:
    launches = [launch(task(n), node=f"n{n}", peak_bytes=n) for n in range(50)]
    launches.append(launch(task(99), node="lost", ended=False))
    step = build_step_part(step_line(run_line()), launches, now_us=T, nodes=2)
    assert [one.node for one in step.nodes] == ["lost", "n49"]
    assert step.all_nodes == 51


def test_an_array_is_summed_up() -> None:
    lines = [
        run_line(
            100 + number,
            label=f"7_{number}",
            job_id=7 + number,
            state="FAILED" if number == 3 else "COMPLETED",
            exit_code=2 if number == 3 else 0,
            user_us=(100 + number) * 4 * S if number != 5 else S,
            system_us=0,
            peak_bytes=GIB * (number + 1) // 10,
        )
        for number in range(10)
    ]
    part = build_array_part("7", lines, now_us=T, waiting="10-19%2", waiting_tasks=10)
    assert part.states == {"PENDING": 10, "COMPLETED": 9, "FAILED": 1}
    assert part.cpu is not None
    assert part.cpu.maximum == 1.0
    assert part.cpu.minimum < 0.01
    assert part.elapsed_s is not None
    assert part.elapsed_s.median == 104.5
    assert part.worst[0].job == "7_3"
    assert part.worst[0].reason == "exit code 2"
    assert "least CPU efficiency" in next(one.reason for one in part.worst if one.job == "7_5")
    assert "most memory, 1.0 GiB; ran longest" in [one.reason for one in part.worst]
    assert part.notes["memory-low"] == 8
    text = render_plain(layout_reply(answer_of(run_of(lines[0]), array=part), ASCII))
    assert "Not started yet: 10-19%2" in text
    assert "7_3   FAILED" in text


def test_a_page_shows_it_all() -> None:
    first = run_of(run_line(10, state="NODE_FAIL"))
    second = run_of(
        run_line(600, restarts=1, suspended_s=60, eligible_us=T + 30 * S),
        launch(
            task(0, cpu_s=1000, read_bytes=GIB, major_faults=3, minor_faults=7),
            task(1, cpu_s=1000, status=11 | 0x80),
            peak_bytes=2 * GIB,
        ),
    )
    text = drawn(answer_of(first, second))
    for wanted in (
        "Job 7  train  on cluster c1",
        "Run 1 of 2",
        "Run 2 of 2",
        ". not eligible for 30 s   - waited 30 s   = ran 9m 00s",
        "~ was suspended for 1m 00s",
        "33m 20s of 36m 00s",
        "2.0 GiB of 4.0 GiB on n1",
        "9m 00s of 20m 00s",
        "SIGSEGV",
        "core dumped",
        "7+3",
        "A node failed",
        "SIGSEGV ended 1 task.",
    ):
        assert wanted in text, text
    assert text.isascii()


def test_hostile_names_are_made_safe() -> None:
    record = JobRecord(
        job_id=7, name="\x1b]0;owned\x07\n\u202eevil", uid=1, state="COMPLETED", work_dir="/a\nb"
    )
    line = run_line(1, nodelist="n1\x1b[2J", name="x\ny")
    step = step_line(line)
    evil = msgspec.structs.replace(step, name="\x1b[31mred", step="0\n1")
    run = build_run_part(line, [(evil, [])], now_us=T)
    text = drawn(answer_of(run, record=record))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "/a\\nb" in text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_page_keeps_to_its_width(width: int) -> None:
    tasks = [task(n, cpu_s=500.0 * n, read_bytes=GIB, written_bytes=GIB) for n in range(3)]
    run = run_of(run_line(900, state="TIMEOUT"), launch(*tasks, peak_bytes=2 * GIB))
    rows = layout_reply(answer_of(run), ChartSigns(width=width))
    assert max(map(measure_row, rows)) <= width + 10
    assert {"Step", "Tasks"} <= set(re.split(r"\W+", render_plain(rows)))


def test_a_waiting_job_says_why() -> None:
    run = run_of(run_line(0, start_us=0, end_us=0, state="PENDING", nodelist=""))
    why = Waiting(
        reason="Dependency",
        explanation="It waits for another job, as it asked to.",
        details=("until job 5 has ended well (it is RUNNING)",),
        expected_start=NOW,
        priority=17,
        queried=True,
    )
    text = drawn(answer_of(run, waiting=why))
    assert "It waits for another job, as it asked to. (Dependency)" in text
    assert "until job 5 has ended well (it is RUNNING)" in text
    assert "Expected start  2026" in text
    assert "Efficiency" not in text
    assert "waited" in text


def test_what_was_short_is_seen_in_a_line_of_time() -> None:
    spans = [
        TimelineSpan(86400, "-", "", "waited"),
        TimelineSpan(0.01, "=", "", "ran"),
        TimelineSpan(0, "~", "", "no"),
    ]
    bar_, key = draw_timeline(spans, ASCII)
    assert measure_row(bar_) == 80
    assert render_plain([bar_]).count("=") == 1
    assert render_plain([key]) == "  - waited   = ran\n"


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=6), st.integers(60, 110))
def test_a_line_of_time_fills_its_width(lengths: list[float], width: int) -> None:
    spans = [TimelineSpan(seconds, "=", "", f"{place}") for place, seconds in enumerate(lengths)]
    rows = draw_timeline(spans, ChartSigns(width=width))
    assert width - 2 <= measure_row(rows[0]) <= width + len(lengths)


def test_what_is_private_is_left_out_for_others() -> None:
    record = JobRecord(
        job_id=7, name="n", submit_line="sbatch --x", work_dir="/home", comment="c", stdout="/o"
    )
    shown = strip_private_fields(record)
    assert shown == JobRecord(job_id=7, name="n")


def test_an_answer_survives_the_wire() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=10, status=9), peak_bytes=GIB))
    answer = answer_of(run)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=PageAnswer) == answer


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0.05, "50.0 ms"),
        (0.35, "0.35 s"),
        (12.34, "12.3 s"),
        (320, "5m 20s"),
        (11100, "3h 05m"),
        (187200, "2d 04h"),
        (365 * 86400, "365d"),
        (3, "3 s"),
    ],
)
def test_durations(seconds: float, wanted: str) -> None:
    assert format_duration(seconds) == wanted


def test_sizes() -> None:
    assert [format_size(812), format_size(1258291), format_size(GIB * 2048)] == [
        "812 bytes",
        "1.2 MiB",
        "2.0 TiB",
    ]
