"""``make bench``: run every benchmark, print figures beside bars and baselines, list missed bars.

    python bench/suite.py [PROGRAM [ARGUMENT ...]]

Without arguments it runs all programs, each to its end even if another fails. The exit code is 1
if a program fails or a bar is missed by more than 10 %. With STEWARD_BENCH_SCALE below 1, a missed
bar is printed without effect on the exit code. ``--bars`` prints the bars as a table for the
documentation instead.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bars import VERDICTS_VARIABLE, Bar, compute_exit_code, format_table, load_verdicts

HERE: Final = Path(__file__).parent
PROGRAMS: Final = (
    *("run.py", "queue_cost.py", "search_bench.py", "archive_bench.py", "sacct_bench.py"),
    *("imports_bench.py", "commands_bench.py", "reports_bench.py", "shim_bench.py"),
    *("sinks_bench.py", "nodes_bench.py", "controllers_bench.py", "gate_bench.py", "gpu.py"),
    *("sensor_bench.py", "sbatch_bench.py", "web_bench.py"),
)
"""Benchmarks, in their order."""


def run_suite(programs: Sequence[str], arguments: Sequence[str] = ()) -> int:
    """Run programs of a directory, print the table of verdicts, and return the exit code."""
    with tempfile.NamedTemporaryFile(prefix="steward-bench-") as file:
        environment = {**os.environ, VERDICTS_VARIABLE: file.name}
        failed = []
        for program in programs:
            print(f"== {program}", flush=True)
            size = os.path.getsize(file.name)
            command = [sys.executable, str(HERE / program), *arguments]
            if code := subprocess.run(command, env=environment, check=False).returncode:
                failed.append(f"{program} ended with exit code {code}")
            elif size == os.path.getsize(file.name) and "Bar(" in (HERE / program).read_text():
                failed.append(f"{program} compared no figure with its bars")
        verdicts = load_verdicts(file.name)
    print(f"\n{format_table(verdicts)}")
    print("".join(f"{line}\n" for line in failed), end="")
    return 1 if failed else compute_exit_code(verdicts)


def format_bars() -> str:
    """Return every declared bar as a row of a Markdown table."""
    lines = ["| figure | bar | baseline of the same run | program |", "|---|---|---|---|"]
    for program in PROGRAMS:
        module = importlib.import_module(program.removesuffix(".py"))
        bars = [value for value in vars(module).values() if isinstance(value, Bar)]
        lines += [
            f"| {bar.name} | {bar.format_limit()} | {bar.baseline or '-'} | `{program}` |"
            for bar in bars
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name, and return the exit code."""
    if arguments[:1] == ["--bars"]:
        print(format_bars())
        return 0
    if not arguments:
        return run_suite(PROGRAMS)
    return run_suite(arguments[:1], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
