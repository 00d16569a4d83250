"""Lists of jobs as people look through them: in an order, from a place on, arrays as one row.

Every list begins with an index that gives its order, and ends as soon as it is
long enough: how many jobs there are does not matter to who looks at the newest.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from steward.core.lines import Line
from steward.core.moments import micros_or_0
from steward.core.sqlite import translated
from steward.jobs.accounts import Accounts
from steward.jobs.conditions import conditions
from steward.jobs.lines import COLUMNS, line_of
from steward.jobs.records import Job, JobFilter
from steward.slurm.arrays import count

Order = Literal["-submit", "submit", "-end", "end"]
"""By first submit time, or by end for jobs that have ended; with ``-`` the latest first."""

_BY: Final = {"submit": "job.first_submit", "end": "job.end_time"}
_ENDED: Final = "job.ended = 1 AND job.end_time IS NOT NULL"

Array = tuple[str, int]
"""A cluster, and the job id of an array."""


class ListPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a list goes on.

    Attributes:
        at_us: What the last job was ordered by, µs since the epoch.
        job_id: Its raw id.
        number: Its row.
        told: Arrays whose tasks may still come, and that were told already.
    """

    at_us: int
    job_id: int
    number: int
    told: tuple[Array, ...] = ()


class Listed(msgspec.Struct, frozen=True):
    """A row of a list.

    Attributes:
        number: The job's row in jobs.db; of an array the first that was found of it.
        array: The array that the row stands for; None for a job of its own.
    """

    number: int
    array: Array | None = None


class Listings(Accounts):
    """The part of ``Jobs`` that lists them."""

    def listed(
        self,
        wanted: JobFilter,
        order: Order,
        limit: int,
        after: ListPlace | None = None,
        *,
        together: bool = True,
    ) -> tuple[list[Listed], ListPlace | None]:
        """Rows of a list, and where it goes on; None where nothing follows.

        Args:
            wanted: Which jobs. An array is listed where one of its tasks is meant.
            order: In which order.
            limit: How many rows at most.
            after: From where on; None from the beginning.
            together: Whether an array is one row, which stands where the first of its tasks
                would.

        Raises:
            JobNameError: ``wanted.jobs`` holds a text that names no job.
        """
        condition, values = conditions(wanted)
        if after is not None:
            by, sign = _BY[order.removeprefix("-")], "<" if order.startswith("-") else ">"
            condition += f" AND ({by}, job.job_id, job.number) {sign} (:at_us, :id, :number)"
            values |= {"at_us": after.at_us, "id": after.job_id, "number": after.number}
        found: list[Listed] = []
        told: dict[Array, int] = dict.fromkeys(after.told, after.at_us) if after else {}
        place: ListPlace | None = None
        with translated(self._path):
            cursor = self._connection.execute(_statement(condition, order), values)
            try:
                for number, cluster, job_id, at_us, array_id in cursor:
                    array = (cluster, array_id) if array_id and together else None
                    if array is None or array not in told:
                        if len(found) == limit:
                            return found, _with_told(place, told)
                        found.append(Listed(number, array))
                    if array is not None:
                        told[array] = at_us
                    place = ListPlace(at_us, job_id, number)
            finally:
                cursor.close()
        return found, None

    def states_of_tasks(self, arrays: Iterable[Array]) -> dict[Array, dict[str, int]]:
        """How many tasks of each array are in each state."""
        wanted = set(arrays)
        listed = msgspec.json.encode(sorted({array_id for _, array_id in wanted})).decode()
        found: dict[Array, dict[str, int]] = {}
        with translated(self._path):
            rows = self._connection.execute(
                "SELECT cluster, array_job_id, state, count(*) FROM job "
                "WHERE array_job_id IN (SELECT value FROM json_each(?)) "
                "GROUP BY array_job_id, cluster, state",
                (listed,),
            ).fetchall()
            # Tasks that were not split off share a record, which has the array's own id.
            shared = self._connection.execute(
                "SELECT cluster, array_job_id, state, array_task FROM job "
                "WHERE job_id IN (SELECT value FROM json_each(?)) AND array_job_id = job_id",
                (listed,),
            ).fetchall()
        for cluster, array_id, state, tasks in rows:
            if (cluster, array_id) in wanted:
                found.setdefault((cluster, array_id), {})[state or ""] = tasks
        for cluster, array_id, state, expression in shared:
            if (cluster, array_id) in wanted and not (expression or "0").isdecimal():
                found[cluster, array_id][state or ""] += count(expression) - 1
        return found

    def states_of(self, wanted: JobFilter, *, limit: int = 20_000) -> tuple[dict[str, int], bool]:
        """How many jobs are in each state, and whether all of them were counted.

        Args:
            wanted: Filter of the jobs.
            limit: Most jobs to count if the filter must be applied to each job.

        Raises:
            JobNameError: ``wanted.jobs`` holds a text that names no job.
        """
        condition, values = conditions(wanted)
        # Without people and names the index alone tells all; else there may be far fewer.
        is_narrow = bool(wanted.users or wanted.accounts or wanted.names or wanted.jobs)
        is_narrow |= any(not scope.everything for scope in (wanted.scopes or {}).values())
        some = f"(SELECT job.state FROM job WHERE {condition} LIMIT {limit:d})"  # noqa: S608 -- values are bound
        whole = f"job WHERE {condition}"
        statement = f"SELECT state, count(*) FROM {some if is_narrow else whole} GROUP BY state"  # noqa: S608 -- values are bound
        with translated(self._path):
            rows = self._connection.execute(statement, values).fetchall()
        found = {state or "": jobs for state, jobs in rows}
        return found, not is_narrow or sum(found.values()) < limit

    def last_lines(self, jobs: Sequence[Job]) -> dict[int, Line]:
        """What sacct shows of the last run of jobs, by their rows; none of what never was."""
        statement = (
            f"SELECT {COLUMNS} FROM line WHERE cluster = ? AND job_id = ? AND submit_us = ? "  # noqa: S608 -- our own columns
            "AND restarts = ? AND piece_us = 0 AND step = ''"
        )
        found: dict[int, Line] = {}
        with translated(self._path):
            for job in jobs:
                key = (*(job.cluster, job.job_id), micros_or_0(job.record.submit))
                row: Any = self._connection.execute(
                    statement, (*key, job.record.restarts)
                ).fetchone()
                if row is not None:
                    found[job.number] = line_of(row)
        return found

    def plan_of_list(self, wanted: JobFilter, order: Order) -> str:
        """How SQLite would answer ``listed``, a step a line."""
        condition, values = conditions(wanted)
        with translated(self._path):
            plan = f"EXPLAIN QUERY PLAN {_statement(condition, order)}"
            return "\n".join(row[3] for row in self._connection.execute(plan, values))


def _statement(condition: str, order: Order) -> str:
    by = _BY[order.removeprefix("-")]
    direction = "DESC" if order.startswith("-") else "ASC"
    ended = f" AND {_ENDED}" if by == _BY["end"] else ""
    return (
        f"SELECT job.number, job.cluster, job.job_id, {by}, job.array_job_id FROM job "  # noqa: S608 -- values are bound
        f"WHERE {condition}{ended} "
        f"ORDER BY {by} {direction}, job.job_id {direction}, job.number {direction}"
    )


def _with_told(place: ListPlace | None, told: dict[Array, int]) -> ListPlace | None:
    """A place with the arrays whose other tasks come next: they have the place's own time."""
    if place is None:
        return None
    still = tuple(array for array, at_us in told.items() if at_us == place.at_us)
    return msgspec.structs.replace(place, told=still)
