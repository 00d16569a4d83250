"""Efficiency of a job: memory, time, and the ends of its tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.job_page import GIB, S, T, answer_of, drawn, kinds, launch, run_line, run_of, task
from steward.accounting.job_page import job_efficiency
from steward.accounting.job_page.job_efficiency import compute_cpu_used_s
from steward.accounting.job_page.page import build_run_part


def test_efficiency_is_used_over_given() -> None:
    run = run_of(run_line(600), launch(task(cpu_s=1800), peak_bytes=GIB))
    used = run.efficiency
    assert used.cpu == 1800 / (600 * 4)
    assert used.memory == 0.25
    assert used.memory_node == "n1"
    assert used.time == 0.5
    assert (used.cpu_used_s, used.cpu_allocated_s, used.elapsed_s) == (1800, 2400, 600)


def test_suspended_time_was_not_given() -> None:
    run = run_of(run_line(600, suspended_s=300), launch(task(cpu_s=600)))
    assert run.efficiency.elapsed_s == 300
    assert run.efficiency.cpu == 0.5
    assert run.efficiency.time == 0.25


def test_a_cgroup_that_used_more_counts() -> None:
    line = run_line(100, user_us=10 * S, system_us=0, cgroup_user_us=200 * S, cgroup_system_us=S)
    assert compute_cpu_used_s(line) == 201


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
    assert "at least 43.0 MiB on n1, none allocated" in drawn(answer_of(run))
    # With a cgroup, and of one task, it is known.
    assert not run_of(run_line(), launch(*first, peak_bytes=GIB)).efficiency.memory_at_least
    assert not run_of(run_line(), small).efficiency.memory_at_least


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
    run = build_run_part(last, [], now_us=T, pieces=[piece])
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
    assert job_efficiency.parse_tres_bytes(text) == wanted


@given(st.integers(-(2**70), 2**70))
def test_any_status_has_an_outcome(status: int) -> None:
    code, number, _ = job_efficiency.decode_wait_status(status)
    assert 0 <= code <= 255
    assert 0 <= number < 127


def test_outcomes_are_those_of_wait() -> None:
    assert job_efficiency.decode_wait_status(3 << 8) == (3, 0, False)
    assert job_efficiency.decode_wait_status(9) == (0, 9, False)
    assert job_efficiency.decode_wait_status(11 | 0x80) == (0, 11, True)
