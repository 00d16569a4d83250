"""Bars of benchmarks: verdicts, the table, and the exit code of a benchmark and of the suite."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from bars import Bar, Verdict, compute_exit_code, format_table

BENCH = Path(__file__).parents[2] / "bench"
SPEED = Bar("polls", "s", 2.0, "squeue")
SHARE = Bar("kept", "%", 99.0, is_least=True)
PROGRAM = """
import sys
sys.path.insert(0, {bench!r})
import bars
bars.check(bars.Bar("polls", "s", 2.0, "squeue"), {value}, 1.5)
bars.finish()
"""


@pytest.mark.parametrize(
    ("bar", "value", "result", "code"),
    [
        (SPEED, 2.0, "met", 0),
        (SPEED, 2.19, "missed by 9%", 0),
        (SPEED, 2.5, "missed by 25%", 1),
        (SHARE, 99.5, "met", 0),
        (SHARE, 90.0, "missed by 9%", 0),
        (SHARE, 49.5, "missed by 50%", 1),
        (SPEED, math.nan, "missed by inf%", 1),
        (SHARE, math.nan, "missed by inf%", 1),
    ],
)
def test_a_figure_is_compared_with_its_bar(bar: Bar, value: float, result: str, code: int) -> None:
    verdict = Verdict(bar, value)
    assert verdict.format_result() == result
    assert compute_exit_code([verdict], 1.0) == code
    assert compute_exit_code([verdict], 0.5) == 0


def test_the_table_shows_the_baseline_and_ends_with_missed_bars() -> None:
    lines = format_table([Verdict(SPEED, 2.5, 1.5), Verdict(SHARE, 100.0)]).splitlines()
    assert "1.500 s (squeue)" in lines[1]
    assert "<= 2 s" in lines[1]
    assert lines[-2:] == ["1 of 2 bars missed:", "  polls: 2.500 s, missed by 25%"]


@pytest.mark.parametrize(("value", "scale", "code"), [(3, "1", 1), (3, "0.9", 0), (1, "1", 0)])
def test_a_benchmark_ends_with_1_if_it_misses_a_bar(
    tmp_path: Path, value: int, scale: str, code: int
) -> None:
    program = tmp_path / "one.py"
    program.write_text(PROGRAM.format(bench=str(BENCH), value=value))
    for command in ([str(program)], [str(BENCH / "suite.py"), str(program)]):
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "STEWARD_BENCH_SCALE": scale},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert f"{value:.3f}" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(7)", "exit code 7"),
        ("from bars import Bar\nBar('polls', 's', 2.0)", "compared no figure with its bars"),
    ],
)
def test_the_suite_fails_with_a_program_that_fails(tmp_path: Path, text: str, message: str) -> None:
    program = tmp_path / "one.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(BENCH / "suite.py"), str(program)],
        env={**os.environ, "PYTHONPATH": str(BENCH)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert message in done.stdout


def test_the_documentation_lists_every_bar() -> None:
    tests = BENCH.parent / "tests"
    done = subprocess.run(
        [sys.executable, str(BENCH / "suite.py"), "--bars"],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests / 'integration'}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    page = (BENCH.parent / "docs/bench.md").read_text()
    table = re.search(r"^\| figure \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    assert table, "docs/bench.md has no table of bars"
    assert table[0].strip() == done.stdout.strip(), "run 'python bench/suite.py --bars'"
