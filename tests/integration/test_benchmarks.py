"""Benchmarks at their smallest size: those of ``make bench``, and those run by hand."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from suite import PROGRAMS

HERE = Path(__file__).parents[2]
PARTS = {"storm.py", "observing.py"}
"""Programs that benchmarks start."""
SUITE = "suite.py"
"""Program that runs all of PROGRAMS."""
BY_HAND = {"files_bench.py", "million.py", "soak.py"}
"""Benchmarks that `make bench` does not run."""
MARKS = {"sinks_bench.py": pytest.mark.servers}


def cases() -> list[Any]:
    """Return each benchmark with its pytest marks."""
    programs = [*PROGRAMS, *sorted(BY_HAND)]
    return [pytest.param(name, marks=MARKS.get(name, pytest.mark.wide)) for name in programs]


def test_no_benchmark_is_left_out() -> None:
    programs = {
        path.name
        for path in (HERE / "bench").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert programs == {*PROGRAMS, *BY_HAND, *PARTS, SUITE}


def test_make_bench_runs_the_suite() -> None:
    words = ["make", "--dry-run", "--no-print-directory", "bench", "ARGS="]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True)
    assert f"bench/{SUITE}" in done.stdout.splitlines()[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", cases())
def test_a_benchmark_ends_at_its_smallest_size(program: str) -> None:
    environment = {
        **os.environ,
        "STEWARD_BENCH_SCALE": "0",
        "PYTHONPATH": f"{HERE}/tests:{HERE}/tests/integration",
    }
    done = subprocess.run(
        [sys.executable, f"bench/{program}"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout
