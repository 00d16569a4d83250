"""What a job's page says: efficiency, balance, notes, and what stands on it."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_site import GIB, NOW, S, T, answer_of, launch, run_line, run_of, step_line, task

from steward.accounting.page import formulas
from steward.accounting.page.array import array_part
from steward.accounting.page.gathering import without_private
from steward.accounting.page.notes import duration, size
from steward.accounting.page.parts import run_part, step_part
from steward.accounting.page.shapes import PageAnswer, Waiting
from steward.cli.drawing import ASCII, Pens, Span, line_of_time, plain, width_of
from steward.cli.job import rows_of
from steward.config import NotesSettings
from steward.records import JobRecord


def kinds(run: Any) -> list[str]:
    return [note.kind for note in run.notes]


def test_efficiency_is_used_over_given() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=1800), peak_bytes=GIB))
    used = run.efficiency
    assert used.cpu == 1800 / (600 * 4)
    assert used.memory == 0.25
    assert used.memory_node == "n1"
    assert used.time == 0.5
    assert (used.cpu_used_s, used.cpu_given_s, used.elapsed_s) == (1800, 2400, 600)


def test_suspended_time_was_not_given() -> None:
    run = run_of(run_line(600, suspended_s=300), launch(task(cpu_s=600)))
    assert run.efficiency.elapsed_s == 300
    assert run.efficiency.cpu == 0.5
    assert run.efficiency.time == 0.25


def test_a_cgroup_that_used_more_counts() -> None:
    line = run_line(100, user_us=10 * S, system_us=0, cgroup_user_us=200 * S, cgroup_system_us=S)
    assert formulas.cpu_used_s(line) == 201


def test_memory_is_that_of_the_node_where_least_was_left() -> None:
    # The one with the higher peak had four times the memory.
    run = run_of(
        run_line(nodes=2),
        launch(task(), node="big", memory_bytes=8 * GIB, peak_bytes=4 * GIB),
        launch(task(1), node="small", memory_bytes=2 * GIB, peak_bytes=int(1.9 * GIB)),
    )
    assert run.efficiency.memory_node == "small"
    assert run.efficiency.memory == pytest.approx(0.95)


def test_memory_without_a_cgroup_is_the_largest_task() -> None:
    run = run_of(run_line(), launch(task(max_rss_bytes=GIB), max_rss_bytes=2 * GIB))
    assert run.efficiency.memory == 0.5


def test_memory_of_several_tasks_without_a_cgroup_is_the_least_that_it_can_have_been() -> None:
    first = [task(n, max_rss_bytes=rss) for n, rss in enumerate((None, 3000, 43 * 2**20))]
    big = launch(*first, node="n1", memory_bytes=None)
    small = launch(task(3, max_rss_bytes=2**20), node="n2", memory_bytes=None)
    run = run_of(run_line(nodes=2, tres_allocated="cpu=4,node=2"), big, small)
    used = run.efficiency
    assert (used.memory_used_bytes, used.memory_node) == (43 * 2**20, "n1")
    assert used.memory_at_least
    assert "at least 43.0 MiB on n1, none was allocated" in drawn(answer_of(run))
    # With a cgroup, and of one task, it is known.
    assert not run_of(run_line(), launch(*first, peak_bytes=GIB)).efficiency.memory_at_least
    assert not run_of(run_line(), small).efficiency.memory_at_least


def test_nobody_is_told_to_ask_for_less_memory_where_its_peak_is_not_known() -> None:
    tasks = [task(n, cpu_s=1150, max_rss_bytes=2**20) for n in range(2)]
    assert kinds(run_of(run_line(600), launch(*tasks))) == []


def test_a_job_that_ended_within_its_second_has_said_all() -> None:
    year = {"time_limit_s": 365 * 86400}
    line = run_line(0, start_us=T, end_us=T, state="FAILED", exit_code=3, **year)
    run = run_of(line, launch(task(cpu_s=0.24), peak_bytes=GIB))
    shown = drawn(answer_of(run))
    assert "so far" not in shown
    assert re.search(r"CPU .* \?  0\.24 s\n", shown)
    assert "less than 1 s of 365d\n" in shown
    assert "It failed within a second, with exit code 3:" in shown
    assert "\n\n\n" not in shown
    short = drawn(answer_of(run_of(run_line(3, **year), launch(task()))))
    assert "<1%  3 s of 365d\n" in short


def test_of_array_tasks_that_ran_alike_none_ran_longest() -> None:
    def whys(*seconds: float) -> list[str]:
        lines = [
            run_line(lasted, label=f"7_{place}", job_id=7 + place, cpus=0)
            for place, lasted in enumerate(seconds)
        ]
        part = array_part("7", lines, NotesSettings(), now_us=T)
        return [member.why for member in part.worst]

    assert whys(0, 0, 0) == []
    assert whys(5, 9, 7) == ["ran longest", "ran second longest"]


def test_memory_of_which_no_launch_tells_is_shared_out_from_tres() -> None:
    run = run_of(
        run_line(nodes=2, tres_allocated="cpu=4,mem=8192M,node=2"),
        launch(task(), memory_bytes=None, peak_bytes=GIB),
    )
    assert run.efficiency.memory == 0.25


def test_nothing_known_is_nothing_said() -> None:
    run = run_of(run_line(600, time_limit_s=None, tres_allocated=""))
    used = run.efficiency
    assert (used.cpu, used.memory, used.time) == (None, None, None)
    assert kinds(run) == []


def test_a_job_without_time_is_no_division() -> None:
    run = run_of(run_line(0, cpus=0, time_limit_s=0), launch(task(cpu_s=0)))
    assert run.efficiency.cpu is None
    assert run.efficiency.time is None


def test_a_resized_run_was_given_what_all_its_sizes_were() -> None:
    piece = run_line(100, cpus=8, piece_us=T + 160 * S)
    last = run_line(0, cpus=2, start_us=T + 160 * S, end_us=T + 260 * S, user_us=500 * S)
    run = run_part(last, [], NotesSettings(), now_us=T, pieces=[piece])
    assert run.efficiency.cpu == 500 / (100 * 8 + 100 * 2)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cpu=4,mem=16G,node=2", {"cpu": 4, "mem": 16 * GIB, "node": 2}),
        ("mem=1000", {"mem": 1000 * 1024**2}),
        ("mem=1.5G,gres/gpu:a100=2", {"mem": 3 * GIB // 2, "gres/gpu:a100": 2}),
        ("", {}),
        ("mem=,cpu=x,=3,energy=18446744073709551614", {"energy": 18446744073709551614}),
    ],
)
def test_tres(text: str, wanted: dict[str, int]) -> None:
    assert formulas.tres(text) == wanted


@given(st.integers(-(2**70), 2**70))
def test_any_status_has_an_outcome(status: int) -> None:
    code, number, _ = formulas.outcome(status)
    assert 0 <= code <= 255
    assert 0 <= number < 127


def test_outcomes_are_those_of_wait() -> None:
    assert formulas.outcome(3 << 8) == (3, 0, False)
    assert formulas.outcome(9) == (0, 9, False)
    assert formulas.outcome(11 | 0x80) == (0, 11, True)


# ------------------------------------------------------------------ notes


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
    assert kinds(run_of(run_line(60), steps)) == ["memory-low", "serial", "time-low"]


def test_thresholds_are_the_sites() -> None:
    steps = launch(task(cpu_s=2300), peak_bytes=2 * GIB)
    assert kinds(run_of(run_line(600), steps, cpu_low=0.99)) == ["cpu-low"]
    assert kinds(run_of(run_line(600), steps, memory_low=0.6)) == ["memory-low"]


def test_lost_facts_are_no_reason_to_tell_anybody_to_ask_for_less() -> None:
    line = run_line(600, doubts="no-end")
    run = run_of(line, launch(task(cpu_s=10), ended=False))
    assert run.efficiency.at_least
    assert kinds(run) == []


def test_a_run_that_goes_on_is_not_judged() -> None:
    run = run_of(run_line(0, end_us=0, state="RUNNING"), launch(task(cpu_s=1)))
    assert run.efficiency.cpu is None
    assert kinds(run) == []


# ------------------------------------------------------------------ steps and tasks


def test_the_tasks_that_are_told_are_the_notable_ones() -> None:
    tasks = [
        task(number, cpu_s=500 if number == 77 else 10, status=9 if number == 5 else 0)
        for number in range(1000)
    ]
    tasks[300] = task(300, cpu_s=10, max_rss_bytes=GIB)
    tasks[400] = task(400, cpu_s=1)
    step = step_part(step_line(run_line()), [launch(*tasks)], now_us=T, tasks=4)
    assert [one.task for one in step.tasks] == [5, 77, 300, 400]
    assert step.all_tasks == 1000
    assert step.signals == {9: 1}
    assert step.codes == {}


def test_the_nodes_that_are_told_are_the_notable_ones() -> None:
    launches = [launch(task(n), node=f"n{n}", peak_bytes=n) for n in range(50)]
    launches.append(launch(task(99), node="lost", ended=False))
    step = step_part(step_line(run_line()), launches, now_us=T, nodes=2)
    assert [one.node for one in step.nodes] == ["lost", "n49"]
    assert step.all_nodes == 51


# ------------------------------------------------------------------ arrays


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
    part = array_part("7", lines, NotesSettings(), now_us=T, waiting="10-19%2", waiting_tasks=10)
    assert part.states == {"PENDING": 10, "COMPLETED": 9, "FAILED": 1}
    assert part.cpu is not None
    assert part.cpu.most == 1.0
    assert part.cpu.least < 0.01
    assert part.elapsed_s is not None
    assert part.elapsed_s.middle == 104.5
    assert part.worst[0].job == "7_3"
    assert part.worst[0].why == "exit code 2"
    assert "least CPU efficiency" in next(one.why for one in part.worst if one.job == "7_5")
    assert "most memory, 1.0 GiB; ran longest" in [one.why for one in part.worst]
    assert part.notes["memory-low"] == 8
    text = plain(rows_of(answer_of(run_of(lines[0]), array=part), ASCII))
    assert "Not started yet: 10-19%2" in text
    assert "7_3   FAILED" in text


# ------------------------------------------------------------------ drawing


def drawn(answer: PageAnswer, pens: Pens = ASCII) -> str:
    return plain(rows_of(answer, pens))


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
        ". could not start for 30 s   - waited 30 s   = ran 9m 00s",
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
    run = run_part(line, [(evil, [])], NotesSettings(), now_us=T)
    text = drawn(answer_of(run, record=record))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "/a\\nb" in text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_page_keeps_to_its_width(width: int) -> None:
    tasks = [task(n, cpu_s=500.0 * n, read_bytes=GIB, written_bytes=GIB) for n in range(3)]
    run = run_of(run_line(900, state="TIMEOUT"), launch(*tasks, peak_bytes=2 * GIB))
    rows = rows_of(answer_of(run), Pens(width=width))
    assert max(map(width_of, rows)) <= width + 10
    assert {"Step", "Tasks"} <= set(re.split(r"\W+", plain(rows)))


def test_a_waiting_job_says_why() -> None:
    run = run_of(run_line(0, start_us=0, end_us=0, state="PENDING", nodelist=""))
    why = Waiting(
        reason="Dependency",
        words="It waits for another job, as it asked to.",
        behind=("until job 5 has ended well (it is RUNNING)",),
        expected_start=NOW,
        priority=17,
        asked=True,
    )
    text = drawn(answer_of(run, waiting=why))
    assert "It waits for another job, as it asked to. (Dependency)" in text
    assert "until job 5 has ended well (it is RUNNING)" in text
    assert "Expected start  2026" in text
    assert "Efficiency" not in text
    assert "waited" in text


def test_what_was_short_is_seen_in_a_line_of_time() -> None:
    spans = [Span(86400, "-", "", "waited"), Span(0.01, "=", "", "ran"), Span(0, "~", "", "no")]
    bar_, key = line_of_time(spans, ASCII)
    assert width_of(bar_) == 80
    assert plain([bar_]).count("=") == 1
    assert plain([key]) == "  - waited   = ran\n"


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=6), st.integers(60, 110))
def test_a_line_of_time_fills_its_width(lengths: list[float], width: int) -> None:
    spans = [Span(seconds, "=", "", f"{place}") for place, seconds in enumerate(lengths)]
    rows = line_of_time(spans, Pens(width=width))
    assert width - 2 <= width_of(rows[0]) <= width + len(lengths)


def test_what_is_private_is_left_out_for_others() -> None:
    record = JobRecord(
        job_id=7, name="n", submit_line="sbatch --x", work_dir="/home", comment="c", stdout="/o"
    )
    shown = without_private(record)
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
    assert duration(seconds) == wanted


def test_sizes() -> None:
    assert [size(812), size(1258291), size(GIB * 2048)] == ["812 bytes", "1.2 MiB", "2.0 TiB"]
