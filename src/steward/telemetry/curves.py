"""Curves: the samples of a job in a period, by node and series, with a fixed number of points.

:class:`CurveReader` reads telemetry.db. ``draw_curve`` turns the samples of a series into points:
minimum, mean and maximum of each equal part of the period. A counter is shown as its growth per
second. A part without samples is None, never 0.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.databases import TELEMETRY
from steward.core.sqlite import Database
from steward.core.timestamps import to_micros
from steward.telemetry.chunks import Columns, decode_columns, list_samples, merge_samples
from steward.telemetry.store import COARSE_STEP_S, DAY_MS, HOUR_MS, MAXIMUM_SUFFIX, TARGETS, Target

LONGEST_INTERVAL_MS: Final = 150_000
"""Longest time between two samples without a gap, in ms: two of the longest interval, 60 s."""
_LONGEST_COARSE_INTERVAL_MS: Final = 2 * COARSE_STEP_S * 1000 + LONGEST_INTERVAL_MS
"""The same between two five-minute means."""


class TargetSamples(msgspec.Struct, frozen=True):
    """Samples of one target in a period."""

    target: Target
    columns: Columns


class CurvePoints(msgspec.Struct, frozen=True, kw_only=True):
    """Points of a curve, one for each equal part of a period; None where there are no samples."""

    minimum: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    maximum: tuple[float | None, ...]


class CurveReader:
    """Reader of telemetry.db. Use it from one thread at a time.

    Args:
        state_dir: The state directory.

    Raises:
        SqliteMissing: No batch was ever stored.
        SqliteUnavailable: It cannot be read now.
    """

    def __init__(self, state_dir: str) -> None:
        self._database = Database(TELEMETRY.locate(state_dir), (), read_only=True)

    def list_targets(self, cluster: str, job: int) -> list[Target]:
        """List the targets of a job, by node and step.

        Args:
            cluster: Cluster name.
            job: Raw job id; ``batch.NODE_TOTAL`` for nodes themselves.
        """
        return TARGETS.select(
            self._database, "WHERE cluster = ? AND job = ? ORDER BY node, step", cluster, job
        )

    def read_job(
        self, cluster: str, job: int, since: datetime, until: datetime
    ) -> list[TargetSamples]:
        """Read the samples of a job in a period; targets without samples are left out.

        Args:
            cluster: Cluster name.
            job: Raw job id.
            since: Start of the period.
            until: End of the period, not included.

        Raises:
            ChunkError: A chunk is damaged.
            SqliteUnavailable: It cannot be read now.
        """
        read = [
            TargetSamples(target, self.read_target(target, since, until))
            for target in self.list_targets(cluster, job)
        ]
        return [item for item in read if item.columns.times_ms]

    def read_target(self, target: Target, since: datetime, until: datetime) -> Columns:
        """Read the samples of a target in a period, see :meth:`read_job`."""
        since_ms, until_ms = to_micros(since) // 1000, to_micros(until) // 1000
        # One statement, so that a fold between two of them can neither hide nor double samples.
        rows = self._database.fetch(
            "SELECT columns FROM (SELECT columns, start_ms, step_s, 0 AS rank, number FROM chunk "
            "WHERE target = ?1 AND ((step_s = 0 AND start_ms > ?2 AND start_ms < ?4) "
            "OR (step_s > 0 AND start_ms > ?3 AND start_ms < ?4)) "
            "UNION ALL SELECT columns, hour_ms, 0, 1, number FROM tail "
            "WHERE target = ?1 AND hour_ms > ?2 AND hour_ms < ?4) ORDER BY rank, start_ms, number",
            *(target.number, since_ms - HOUR_MS, since_ms - DAY_MS, until_ms),
        )
        return merge_samples(
            sample
            for (data,) in rows
            for sample in list_samples(decode_columns(data))
            if since_ms <= sample[0] < until_ms
        )

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def draw_curve(
    columns: Columns, name: str, *, is_counter: bool, start_ms: int, end_ms: int, count: int
) -> CurvePoints:
    """Draw a series as a number of points.

    A sample stands for the time since the sample before, unless that is a gap.

    Args:
        columns: The samples.
        name: Series.
        is_counter: Whether to draw the growth per second.
        start_ms: Start of the period, ms since the epoch.
        end_ms: End of the period.
        count: Number of points.
    """
    minima: list[float | None] = [None] * count
    maxima: list[float | None] = [None] * count
    sums, weights = [0.0] * count, [0.0] * count
    part_ms = (end_ms - start_ms) / count
    for since_ms, at_ms, value, largest in _list_intervals(columns, name, is_counter=is_counter):
        if at_ms < start_ms or since_ms >= end_ms:
            continue
        first = max(0, int((since_ms - start_ms) // part_ms))
        last = min(count - 1, int((at_ms - start_ms) // part_ms))
        for part in range(first, last + 1):
            left = start_ms + part * part_ms
            weight = min(at_ms, left + part_ms) - max(since_ms, left)
            if weight <= 0 and first != last:
                continue
            weight = max(weight, 1.0)
            sums[part] += value * weight
            weights[part] += weight
            low, high = minima[part], maxima[part]
            minima[part] = value if low is None else min(low, value)
            maxima[part] = largest if high is None else max(high, largest)
    means = tuple(
        total / weight if weight else None for total, weight in zip(sums, weights, strict=True)
    )
    return CurvePoints(minimum=tuple(minima), mean=means, maximum=tuple(maxima))


def _list_intervals(
    columns: Columns, name: str, *, is_counter: bool
) -> list[tuple[int, int, float, float]]:
    """List start, end, value and largest value of the intervals that samples stand for."""
    values = columns.series.get(name, ())
    largest_values: Sequence[int | None] = columns.series.get(name + MAXIMUM_SUFFIX, ())
    intervals: list[tuple[int, int, float, float]] = []
    before_ms, before = -1, 0
    for index, (at_ms, value) in enumerate(zip(columns.times_ms, values, strict=bool(values))):
        if value is None:
            continue
        largest = largest_values[index] if largest_values else None
        longest_ms = LONGEST_INTERVAL_MS if largest is None else _LONGEST_COARSE_INTERVAL_MS
        is_continued = before_ms >= 0 and at_ms - before_ms <= longest_ms
        if is_counter:
            if is_continued and value >= before:
                rate = (value - before) * 1000 / (at_ms - before_ms)
                intervals.append((before_ms, at_ms, rate, max(rate, largest or 0)))
        else:
            since_ms = before_ms if is_continued else at_ms
            number = float(value)
            intervals.append((since_ms, at_ms, number, max(number, largest or 0)))
        before_ms, before = at_ms, value
    return intervals
