"""Queries on day sums: sums of whole days and months, and the runs that must be read besides them.

:func:`open_day_sums` divides the periods of a report into *inner* days, which the sums cover, and
*edges*: parts of days at the ends of a period. :meth:`DaySums.list_shares` reads the inner days,
from the sums of months where it can. :meth:`DaySums.select_jobs` selects the jobs whose lines
complete them: runs at the edges, running runs and irregular ones. Sums and lines must be read in
one snapshot of the database.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

from steward.core.sqlite import Connection
from steward.jobs.line_queries import LineFilter, LineQuery, build_columns_condition
from steward.jobs.lines import FullRunKey
from steward.jobs.sum_tables import UNKNOWN_UID, Cube, is_complete
from steward.jobs.zone_days import ZoneDay

Day = tuple[int, int]
"""Begin and end of a day, or of several, µs since the epoch."""

_MONTH_US: Final = 33 * 86_400_000_000
"""More than a month: the days of a month are looked for so far from any of them."""
_MAX_EDGES: Final = 200
"""Maximum number of separate edges; a report with more reads all lines."""
_ABSENT: Final = {"uid": "NULL", "cpus": "0"}
"""SQL of fields of a share that are not grouped by, where it is not an empty text."""


class UsageShare(NamedTuple):
    """Usage of a group of runs within one period of a report.

    Attributes:
        period: Index of the period.
        jobs: Number of runs that no earlier share of the period and group counts.
    """

    period: int
    cluster: str
    account: str
    user: str
    uid: int | None
    partition: str
    jobs: int
    cpu_s: int
    gpu_s: int
    node_s: int
    completed: int
    failed: int


class WaitShare(NamedTuple):
    """Runs of a group that started in one period of a report, after the same wait.

    Attributes:
        period: Index of the period.
        cpus: Number of CPUs; of sums, the largest power of two up to it.
    """

    period: int
    cluster: str
    account: str
    user: str
    partition: str
    cpus: int
    wait_s: int
    runs: int


class CountShare(NamedTuple):
    """Runs of an account, state and size in one period of a report, and their usage.

    Attributes:
        period: Index of the period.
        cpus: Number of CPUs.
        jobs: Number of runs that no earlier share of the period counts.
    """

    period: int
    cluster: str
    account: str
    state: str
    cpus: int
    jobs: int
    cpu_s: int
    gpu_s: int


class WasteShare(NamedTuple):
    """Waste of a group of runs that ended in one period of a report: then the fields of Waste.

    Attributes:
        period: Index of the period.
    """

    period: int
    cluster: str
    account: str
    user: str
    uid: int | None
    ended: int
    measured: int
    measured_cpu_s: int
    used_cpu_ms: int
    memory_measured: int
    memory_mib_s: int
    used_memory_mib_s: int
    limited: int
    limit_s: int
    elapsed_s: int


class DaySums:
    """Day sums of one cluster for the periods of a report.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        bounds_us: Start of each period and end of the last, µs since the epoch.
        days: Days with sums, in order, of every month from a day before the first period.
    """

    def __init__(
        self,
        connection: Connection,
        cluster: str,
        bounds_us: Sequence[int],
        days: Sequence[ZoneDay],
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self.bounds_us = bounds_us
        self._days = days
        self._begins = [day.begin_us for day in days]
        self._ends = [day.end_us for day in days]
        self._months = [day.month_us for day in days]
        self.inner: list[Day | None] = [
            self._find_inner(since_us, until_us) for since_us, until_us in pairwise(bounds_us)
        ]
        """For each period the time from its first to its last whole day, or None."""
        self.edges = self._list_edges()
        """Parts of days outside these, adjacent ones as one."""

    def _find_inner(self, since_us: int, until_us: int) -> Day | None:
        first = bisect_left(self._begins, since_us)
        last = bisect_right(self._ends, until_us) - 1
        return (self._begins[first], self._ends[last]) if first <= last else None

    def _list_edges(self) -> list[Day]:
        edges: list[Day] = []
        for (since_us, until_us), inner in zip(pairwise(self.bounds_us), self.inner, strict=True):
            begin_us, end_us = inner or (until_us, until_us)
            for edge in ((since_us, begin_us), (end_us, until_us)):
                if edge[0] >= edge[1]:
                    continue
                if edges and edges[-1][1] == edge[0]:
                    edges[-1] = (edges[-1][0], edge[1])
                else:
                    edges.append(edge)
        return edges

    def _divide_inner(self, inner: Day) -> list[tuple[bool, int, int]]:
        """Divide inner days into months and days: whether months, and their first and last begin.

        A month is used if the inner days are all of its days with sums.
        """
        first, last = bisect_left(self._begins, inner[0]), bisect_left(self._ends, inner[1])
        parts: list[tuple[bool, int, int]] = []
        for month_us, days in groupby(range(first, last + 1), self._months.__getitem__):
            indexes = list(days)
            is_whole = (
                bisect_left(self._months, month_us) == indexes[0]
                and bisect_right(self._months, month_us) - 1 == indexes[-1]
            )
            first_us = month_us if is_whole else self._begins[indexes[0]]
            last_us = month_us if is_whole else self._begins[indexes[-1]]
            if parts and parts[-1][0] == is_whole:
                first_us = parts.pop()[1]
            parts.append((is_whole, first_us, last_us))
        return parts

    def list_shares(
        self, share: type[Any], cube: Cube[Any], line_filter: LineFilter, group: Sequence[str]
    ) -> Iterator[Any]:
        """Yield the sums of the inner days by period and group.

        Args:
            share: Share to return: the fields that are neither amounts of the cube nor grouped by
                are empty, and ``jobs`` is the number of runs that were active in the period.
            cube: The table to read.
            line_filter: Filter of columns that the table has.
            group: Columns to group by.
        """
        condition = build_columns_condition(line_filter)
        # UNKNOWN_UID stands for NULL.
        keys = [f"nullif(uid, {UNKNOWN_UID}) AS uid" if key == "uid" else key for key in cube.keys]
        source = f"(SELECT {', '.join((*keys, *cube.amounts))} FROM {cube.name})"  # noqa: S608 -- our own columns
        for period, (since_us, inner) in enumerate(zip(self.bounds_us, self.inner, strict=False)):
            if inner is None:
                continue
            for number, (is_month, first_us, last_us) in enumerate(self._divide_inner(inner)):
                # A run that was active before the first inner day counts where it was: at the edge.
                counted = f"CASE WHEN begin_us = {first_us} THEN touched ELSE began END"
                jobs = "began" if since_us < inner[0] or number else counted
                amounts = {name: f"sum({name})" for name in cube.amounts} | {"jobs": f"sum({jobs})"}
                columns = (
                    name if name in group else amounts.get(name) or _ABSENT.get(name, "''")
                    for name in share._fields[2:]
                )
                sql = (
                    f"SELECT {period}, cluster, {', '.join(columns)} FROM {source} "  # noqa: S608 -- our own columns, numbers
                    f"WHERE cluster = $cluster AND is_month = {int(is_month)} "
                    f"AND begin_us >= {first_us} AND begin_us <= {last_us} AND {condition.sql} "
                    f"GROUP BY {', '.join(group) or 'cluster'}"
                )
                values = {"cluster": self._cluster, **condition.values}
                yield from map(share._make, self._connection.execute(sql, values))

    def select_jobs(self) -> LineQuery:
        """Return the query for a superset of the job ids whose lines complete the sums."""
        since_us, until_us = self.bounds_us[0], self.bounds_us[-1]
        # Else SQLite, without statistics, reads all lines of the cluster.
        of_lines = (
            "SELECT job_id FROM line INDEXED BY line_by_end "
            "WHERE step = '' AND cluster = $of_cluster"
        )
        parts = [
            f"{of_lines} AND end_us = 0 AND start_us > 0 AND start_us < {until_us}",
            (
                "SELECT job_id FROM irregular "  # noqa: S608 -- numbers
                f"WHERE cluster = $of_cluster AND end_us >= {since_us} AND since_us < {until_us} "
                "AND is_daily = 0"
            ),
        ]
        for begin_us, end_us in self.edges:
            # Runs that touch an edge end in it, later on its last day, or cross one of its days.
            last_us = self._find_day(end_us - 1, end_us)[1]
            first_us = self._find_day(begin_us, begin_us)[0]
            parts += [
                f"{of_lines} AND end_us >= {begin_us} AND end_us <= {last_us}",
                (
                    "SELECT job_id FROM crossing WHERE cluster = $of_cluster "  # noqa: S608 -- numbers
                    f"AND begin_us >= {first_us} AND begin_us < {end_us}"
                ),
            ]
        return LineQuery(sql=" UNION ALL ".join(parts), values={"of_cluster": self._cluster})

    def _find_day(self, at_us: int, absent_us: int) -> Day:
        """Return the day with sums that contains a time; ``absent_us`` twice if there is none."""
        index = bisect_right(self._begins, at_us) - 1
        if index >= 0 and self._ends[index] > at_us:
            return self._begins[index], self._ends[index]
        return absent_us, absent_us

    def list_irregular(self) -> set[FullRunKey]:
        """Return the ended runs of the periods that no sum includes."""
        rows = self._connection.execute(
            "SELECT job_id, submit_us, restarts FROM irregular "
            "WHERE cluster = ? AND end_us >= ? AND since_us < ? AND is_daily = 0",
            (self._cluster, self.bounds_us[0], self.bounds_us[-1]),
        )
        return set(rows.fetchall())


def open_day_sums(connection: Connection, cluster: str, bounds_us: Sequence[int]) -> DaySums | None:
    """Return a cluster's day sums for some periods; None if all lines must be read.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        bounds_us: Start of each period and end of the last, µs since the epoch.
    """
    if not is_complete(connection, cluster):
        return None
    rows = connection.execute(
        "SELECT begin_us, end_us, month_us FROM summed_day "
        "WHERE cluster = ? AND begin_us > ? AND begin_us < ? ORDER BY begin_us",
        (cluster, bounds_us[0] - _MONTH_US, bounds_us[-1] + _MONTH_US),
    )
    days = list(map(ZoneDay._make, rows))
    sums = DaySums(connection, cluster, bounds_us, days)
    has_few_edges = len(sums.edges) <= _MAX_EDGES
    return sums if has_few_edges and any(sums.inner) else None
