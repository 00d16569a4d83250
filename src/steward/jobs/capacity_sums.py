"""Queries on sums of allocated and awaited CPUs by quarter of an hour, for capacity reports.

A row of ``capacity_sum`` holds two kinds of amounts: seconds within its quarter, of runs that began
or ended in it, and *changes*, which hold from its begin on. So a run of a month writes as few rows
as one of a minute. Every zone's midnights and every full hour begin a quarter. A bound of a report
that does not *cuts* its quarter: lines replace the seconds of that quarter.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from steward.core.sqlite import Connection
from steward.jobs.line_queries import LineQuery
from steward.jobs.lines import FullRunKey
from steward.jobs.sum_tables import CAPACITY, QUARTER_S, is_complete

_US: Final = 1_000_000
_MAX_CUTS: Final = 10
"""Maximum number of cut quarters; a report with more reads all lines."""

CapacityRow = tuple[int, int, int, int, int, int, int]
"""Begin of a quarter, s since the epoch; seconds and change of CPUs, GPUs and awaited CPUs."""


class CapacitySums:
    """Sums of one cluster for a report.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        bounds_s: Bounds of the report, in order, seconds since the epoch.
    """

    def __init__(self, connection: Connection, cluster: str, bounds_s: Sequence[int]) -> None:
        self._connection = connection
        self._cluster = cluster
        self._since_s, self._until_s = bounds_s[0], bounds_s[-1]
        self.cuts = sorted({at_s - at_s % QUARTER_S for at_s in bounds_s if at_s % QUARTER_S})
        """Begins of the cut quarters."""

    def list_rows(self) -> Iterator[CapacityRow]:
        """Yield the changes before the report as one row, then the quarters, in order."""
        amounts = CAPACITY.amounts
        earlier = ", ".join(
            "0" if name.endswith("_s") else f"coalesce(sum({name}), 0)" for name in amounts
        )
        yield from self._connection.execute(
            f"SELECT ?, {earlier} FROM capacity_sum WHERE cluster = ? AND begin_s < ?",  # noqa: S608 -- our own columns
            (self._since_s, self._cluster, self._since_s),
        )
        for begin_s, *values in self._connection.execute(
            f"SELECT begin_s, {', '.join(amounts)} FROM capacity_sum "  # noqa: S608 -- our own columns
            "WHERE cluster = ? AND begin_s >= ? AND begin_s < ? ORDER BY begin_s",
            (self._cluster, self._since_s, self._until_s),
        ):
            if begin_s in self.cuts:
                values[::2] = (0, 0, 0)
            cpu_s, cpus, gpu_s, gpus, planned_cpu_s, planned_cpus = values
            yield begin_s, cpu_s, cpus, gpu_s, gpus, planned_cpu_s, planned_cpus

    def select_jobs(self) -> LineQuery:
        """Return the query for a superset of the job ids whose lines complete the sums."""
        of_lines = (
            "SELECT job_id FROM line INDEXED BY line_by_end "
            "WHERE step = '' AND cluster = $of_cluster"
        )
        since_us, until_us = self._since_s * _US, self._until_s * _US
        parts = [
            f"{of_lines} AND end_us = 0",
            (
                "SELECT job_id FROM irregular "  # noqa: S608 -- numbers
                f"WHERE cluster = $of_cluster AND end_us >= {since_us} AND since_us < {until_us}"
            ),
        ]
        for begin_s in self.cuts:
            begin_us, end_us = begin_s * _US, (begin_s + QUARTER_S) * _US
            parts.append(
                f"{of_lines} AND end_us >= {begin_us} AND (end_us < {end_us} "
                f"OR (start_us >= {begin_us} AND start_us < {end_us}) "
                f"OR (eligible_us >= {begin_us} AND eligible_us < {end_us}))"
            )
        return LineQuery(sql=" UNION ALL ".join(parts), values={"of_cluster": self._cluster})

    def list_irregular(self) -> set[FullRunKey]:
        """Return the ended runs of the report that these sums leave out."""
        rows = self._connection.execute(
            "SELECT job_id, submit_us, restarts FROM irregular "
            "WHERE cluster = ? AND end_us >= ? AND since_us < ?",
            (self._cluster, self._since_s * _US, self._until_s * _US),
        )
        return set(rows.fetchall())


def open_capacity_sums(
    connection: Connection, cluster: str, bounds_s: Sequence[int]
) -> CapacitySums | None:
    """Return a cluster's sums for a report with these bounds; None if all lines must be read.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        bounds_s: Bounds of the report, in order, seconds since the epoch.
    """
    sums = CapacitySums(connection, cluster, bounds_s)
    return sums if len(sums.cuts) <= _MAX_CUTS and is_complete(connection, cluster) else None
