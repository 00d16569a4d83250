"""Bars of benchmarks: the limit of a figure, the verdict on a measurement, the exit code.

A benchmark declares each :class:`Bar` once and calls :func:`check` with the measured value, then
:func:`finish`. `bench/suite.py` runs every benchmark, collects the verdicts from the file that
STEWARD_BENCH_VERDICTS names and prints one table.
"""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from scale import SCALE

TOLERANCE: Final = 0.1
"""Part of a bar by which a figure may miss it without failing the benchmark."""
VERDICTS_VARIABLE: Final = "STEWARD_BENCH_VERDICTS"


class Bar(msgspec.Struct, frozen=True):
    """Limit of one figure.

    Attributes:
        name: What is measured.
        unit: Unit of figure, limit and baseline.
        limit: Greatest permitted figure; the least one with ``is_least``.
        baseline: What is measured beside it in the same run, in the same unit; "" for nothing.
        is_least: Whether the figure should be at least the limit.
    """

    name: str
    unit: str
    limit: float
    baseline: str = ""
    is_least: bool = False

    def format_limit(self) -> str:
        """Return the limit with its unit, as in ``<= 1.5 s``."""
        return f"{'>=' if self.is_least else '<='} {self.limit:g} {self.unit}"


class Verdict(msgspec.Struct, frozen=True):
    """A figure compared with its bar."""

    bar: Bar
    value: float
    baseline: float | None = None

    @property
    def missed_by(self) -> float:
        """Part of the limit by which the figure misses it; 0 if it meets it, infinite if NaN."""
        if math.isnan(self.value):
            return math.inf
        excess = self.value - self.bar.limit
        return max(0.0, -excess if self.bar.is_least else excess) / self.bar.limit

    @property
    def is_failure(self) -> bool:
        """Whether the figure misses its bar by more than the tolerance."""
        return self.missed_by > TOLERANCE

    def format_result(self) -> str:
        """Return ``met``, or by how much the figure misses its bar."""
        return f"missed by {self.missed_by:.0%}" if self.missed_by else "met"


_verdicts: list[Verdict] = []


def check(bar: Bar, value: float, baseline: float | None = None) -> None:
    """Compare a figure with its bar, for :func:`finish`.

    Args:
        bar: The bar.
        value: The figure, in the bar's unit.
        baseline: The baseline's figure, in the bar's unit.
    """
    _verdicts.append(Verdict(bar, value, baseline))


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Return a table of verdicts, and below it those that miss their bar."""
    lines = [f"{'':62} {'figure':>9} {'bar':>17}  {'verdict':14} baseline"]
    for verdict in verdicts:
        bar, value = verdict.bar, verdict.baseline
        baseline = "" if value is None else f"{value:.3f} {bar.unit} ({bar.baseline})"
        lines.append(
            f"{bar.name:62} {verdict.value:9.3f} {bar.format_limit():>17}  "
            f"{verdict.format_result():14} {baseline}".rstrip()
        )
    missed = [verdict for verdict in verdicts if verdict.missed_by]
    lines.append(f"{len(missed)} of {len(verdicts)} bars missed" + (":" if missed else ""))
    lines += [
        f"  {verdict.bar.name}: {verdict.value:.3f} {verdict.bar.unit}, {verdict.format_result()}"
        for verdict in missed
    ]
    return "\n".join(lines)


def compute_exit_code(verdicts: Iterable[Verdict], scale: float = SCALE) -> int:
    """Return 1 if a bar is missed by more than the tolerance at full size, else 0."""
    return int(scale >= 1 and any(verdict.is_failure for verdict in verdicts))


def finish() -> None:
    """Print the verdicts; exit with 1 if a bar is missed. In the suite, leave both to it.

    Raises:
        SystemExit: A bar is missed by more than the tolerance, at full size.
    """
    verdicts = list(_verdicts)
    _verdicts.clear()
    if path := os.environ.get(VERDICTS_VARIABLE):
        with open(path, "ab") as file:
            file.writelines(msgspec.json.encode(verdict) + b"\n" for verdict in verdicts)
        return
    print(f"\n{format_table(verdicts)}")
    if code := compute_exit_code(verdicts):
        raise SystemExit(code)


def load_verdicts(path: str) -> list[Verdict]:
    """Return the verdicts that benchmarks wrote into a file."""
    with open(path, "rb") as file:
        return [msgspec.json.decode(line, type=Verdict) for line in file]
