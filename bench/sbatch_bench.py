"""What the gate costs those who submit: sbatch with the submit plugin and without it, paired.

``python bench/sbatch_bench.py [--jobs 400] [--slurm VERSION]``. Two clusters are up at
once, each with a daemon of its own; one has the plugin, and a gate that it asks. Single
sbatch go to them in turn, so that what disturbs the machine disturbs both.
"""

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bank_cluster import ACCOUNTS, BankSite, bank_site

from bars import Bar, check, finish
from scale import scaled
from steward.bank.money import MICRO

_MORE = Bar("submit plugin: additional time of an sbatch", "ms", 0.4, "an sbatch without it")
WARM = scaled(20)
"""Number of submits before the measured ones."""
# Runs inside of one of them, where it is told whose turn it is; each line is one sbatch.
LOOP = """
import subprocess, sys, time
argv = ["sbatch", "--parsable", "--hold", "--time=5", "--account", sys.argv[1], "--wrap", "true"]
argv += ["--output=/dev/null"]
for line in sys.stdin:
    began = time.perf_counter_ns()
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    print(time.perf_counter_ns() - began, flush=True)
"""


def submitter(site: BankSite) -> Any:
    """A program inside that submits once for each line that it is given."""
    words = [sys.executable, "-c", LOOP, ACCOUNTS[0]]
    return site.cluster.popen(
        words, user=site.user, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def once(program: Any) -> int:
    """Submit once; the nanoseconds that it took."""
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(400, 4))
    parser.add_argument("--slurm", default="")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(
            bank_site(options.slurm, bank={"enabled": False}, cluster="plain", job_submit=())
        )
        gated = stack.enter_context(bank_site(options.slurm, cluster="gated"))
        plain.daemon.start()
        gated.open({ACCOUNTS[0]: 1_000_000_000 * MICRO})
        gated.start()
        programs = {"without it": submitter(plain), "with it": submitter(gated)}
        times: dict[str, list[int]] = {name: [] for name in programs}
        for number in range(options.jobs + WARM):
            # Each is first as often as the other.
            order = list(programs) if number % 2 else list(programs)[::-1]
            for name in order:
                took = once(programs[name])
                if number >= WARM:
                    times[name].append(took)
        for program in programs.values():
            program.stdin.close()
            program.wait(120)
        held = len(gated.holds())
    base, asked = times["without it"], times["with it"]
    print(f"{options.jobs} sbatch each, in turn; the gate holds {held} jobs at the end:")
    for name, found in times.items():
        print(f"  median {statistics.median(found) / 1e6:.2f} ms {name}")
    pairs = list(zip(base, asked, strict=True))
    low, high = between(
        [more_of(random.Random(n).choices(pairs, k=len(pairs))) for n in range(500)]
    )
    print(
        f"  median of the differences of pairs: {more_of(pairs):.1%} of an sbatch ("
        f"19 times in 20 it is between {low:.1%} and {high:.1%})"
    )
    ratio = statistics.median(asked) / statistics.median(base)
    print(f"  ratio of the medians {ratio:.3f}")
    base_ms = statistics.median(base) / 1e6
    check(_MORE, more_of(pairs) * base_ms, base_ms)
    finish()


def more_of(pairs: Sequence[tuple[int, int]]) -> float:
    """What asking costs, as a part of an sbatch that does not ask."""
    more = statistics.median(asked - base for base, asked in pairs)
    return more / statistics.median(base for base, _ in pairs)


def between(found: Sequence[float]) -> tuple[float, float]:
    """Where 95 of 100 lie."""
    order = sorted(found)
    return order[len(order) // 40], order[-1 - len(order) // 40]


if __name__ == "__main__":
    main()
