"""Benchmarks at their smallest size: the lines of ``make bench``, and those run by hand."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2]
PARTS = {"storm.py", "observing.py"}
"""Programs that benchmarks start."""
BY_HAND = {"files_bench.py", "million.py", "soak.py"}
"""Benchmarks that `make bench` does not run."""
MARKS = {"sinks_bench.py": pytest.mark.servers}


def programs_of_make() -> list[str]:
    """Return the programs of ``make bench``, without the set-up before them."""
    words = ["make", "--dry-run", "--no-print-directory", "bench", "ARGS="]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True)
    return [
        word.removeprefix("bench/")
        for line in done.stdout.splitlines()
        for word in line.split()
        if word.startswith("bench/")
    ]


def cases() -> list[Any]:
    """Return each benchmark with its pytest marks."""
    programs = [*programs_of_make(), *sorted(BY_HAND)]
    return [pytest.param(name, marks=MARKS.get(name, pytest.mark.wide)) for name in programs]


def test_no_benchmark_is_left_out() -> None:
    programs = {
        path.name
        for path in (HERE / "bench").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert programs == {*programs_of_make(), *BY_HAND, *PARTS}


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
