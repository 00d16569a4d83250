"""Queries on day sums: usage of whole days, and the runs that must be read besides them.

:func:`open_day_sums` divides the periods of a report into *inner* days, which the sums cover, and
*edges*: parts of days at the ends of a period. :meth:`DaySums.list_shares` reads the inner days.
:meth:`DaySums.select_jobs` selects the jobs whose lines complete them: runs at the edges, running
runs and irregular ones. Sums and lines must be read in one snapshot of the database.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from steward.core.sqlite import Connection
from steward.jobs.day_sums import COMPLETE, UNKNOWN_UID, Day, UsageShare
from steward.jobs.line_queries import LineFilter, LineQuery, build_columns_condition
from steward.jobs.lines import FullRunKey

UsageGroup = tuple[str, ...]
"""Columns that a report groups usage by, besides the cluster."""

_DAY_US: Final = 86_400_000_000
_MAX_EDGES: Final = 200
"""Maximum number of separate edges; a report with more reads all lines."""
_GROUPED: Final = ("account", "user", "uid", "partition")
_SOURCE: Final = (
    f"(SELECT cluster, begin_us, account, user, nullif(uid, {UNKNOWN_UID}) AS uid, partition, qos, "  # noqa: S608 -- our own columns
    "touched, began, cpu_s, gpu_s, node_s, completed, failed FROM day_sum)"
)


class DaySums:
    """Day sums of one cluster for the periods of a report.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        bounds_us: Start of each period and end of the last, µs since the epoch.
        days: Days with sums, in order, from at least a day before the first period.
    """

    def __init__(
        self, connection: Connection, cluster: str, bounds_us: Sequence[int], days: Sequence[Day]
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self.bounds_us = bounds_us
        self._begins = [begin_us for begin_us, _ in days]
        self._ends = [end_us for _, end_us in days]
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

    def list_shares(self, line_filter: LineFilter, group: UsageGroup) -> list[UsageShare]:
        """Return the usage of the inner days by period and group.

        Args:
            line_filter: Filter of cluster, account, user and partition.
            group: Columns to group by; the others are empty in the shares.
        """
        condition = build_columns_condition(line_filter)
        absent = {"uid": "NULL"}
        grouped = ", ".join(name if name in group else absent.get(name, "''") for name in _GROUPED)
        shares: list[UsageShare] = []
        for period, (since_us, inner) in enumerate(zip(self.bounds_us, self.inner, strict=False)):
            if inner is None:
                continue
            begin_us, end_us = inner
            # A run that was active before the first inner day counts where it was: at the edge.
            touched = f"CASE WHEN begin_us = {begin_us} THEN touched ELSE began END"
            sql = (
                f"SELECT {period}, cluster, {grouped}, "  # noqa: S608 -- our own columns, numbers
                f"sum({'began' if since_us < begin_us else touched}), "
                "sum(cpu_s), sum(gpu_s), sum(node_s), sum(completed), sum(failed) "
                f"FROM {_SOURCE} WHERE cluster = $cluster "
                f"AND begin_us >= {begin_us} AND begin_us < {end_us} AND {condition.sql} "
                f"GROUP BY {', '.join(group) or 'cluster'}"
            )
            values = {"cluster": self._cluster, **condition.values}
            shares += map(UsageShare._make, self._connection.execute(sql, values))
        return shares

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
                f"WHERE cluster = $of_cluster AND end_us >= {since_us} AND start_us < {until_us}"
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
            "WHERE cluster = ? AND end_us >= ? AND start_us < ?",
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
    is_complete = connection.execute(
        "SELECT 1 FROM summed WHERE cluster = ? AND upto = ?", (cluster, COMPLETE)
    ).fetchone()
    if is_complete is None:
        return None
    days = connection.execute(
        "SELECT begin_us, end_us FROM summed_day "
        "WHERE cluster = ? AND begin_us > ? AND begin_us < ? ORDER BY begin_us",
        (cluster, bounds_us[0] - 2 * _DAY_US, bounds_us[-1]),
    ).fetchall()
    sums = DaySums(connection, cluster, bounds_us, days)
    has_few_edges = len(sums.edges) <= _MAX_EDGES
    return sums if has_few_edges and any(sums.inner) else None
