"""Noise band of benchmarks: prints the median and the range of each figure over several runs.

Write the output of each run of one benchmark into a file, then::

    python scripts/noise_band.py gate_bench.1 gate_bench.2 gate_bench.3

Prints the lines of the outputs, each number that differs as ``median (lowest to highest)``. Lines
that only some of the runs printed are left out.
"""

import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Final

NUMBER: Final = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")


def read_figures(output: str) -> dict[tuple[str, int], list[str]]:
    """Read the numbers of each line, by the line's text without them and its occurrence."""
    occurrences: Counter[str] = Counter()
    figures = {}
    for line in output.splitlines():
        text = " ".join(NUMBER.sub("#", line).split())
        occurrences[text] += 1
        figures[text, occurrences[text]] = NUMBER.findall(line)
    return figures


def describe_band(numbers: tuple[str, ...]) -> str:
    """Describe the numbers that several runs printed in one place."""
    if len(set(numbers)) == 1:
        return numbers[0]
    values = sorted(float(number.replace(",", "")) for number in numbers)
    return f"{statistics.median(values):g} ({values[0]:g} to {values[-1]:g})"


def main() -> None:
    """Print the noise band of the outputs that the arguments name."""
    runs = [read_figures(Path(name).read_text()) for name in sys.argv[1:]]
    for key, first in runs[0].items():
        if not first or not all(key in run for run in runs):
            continue
        numbers = zip(*(run[key] for run in runs), strict=True)
        bands = [*map(describe_band, numbers), ""]
        pieces = key[0].split("#")
        print("".join(piece + band for piece, band in zip(pieces, bands, strict=True)))


if __name__ == "__main__":
    main()
