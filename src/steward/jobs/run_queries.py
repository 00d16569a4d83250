"""Run and step queries on jobs.db: accounting lines, launches, and missing data.

:class:`RunQueries` is the base class of :class:`steward.jobs.queries.Jobs` with these queries. The
job page, ``steward accounting gaps`` and the bank's billing and reconciliation use them.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.records import UsageLine
from steward.core.sqlite import Connection, translate_errors
from steward.core.timestamps import from_micros, to_micros
from steward.core.usage import RunEvent, StepUsage
from steward.jobs.filters import Job
from steward.jobs.identity import resolve_jobs
from steward.jobs.launches import LAUNCHES, row_to_launch
from steward.jobs.lines import COLUMNS, row_to_line
from steward.jobs.retention import count_expirable
from steward.jobs.run_views import build_run_views
from steward.jobs.tables import (
    MissedJob,
    NodeLoss,
    count_missed,
    list_gaps,
    list_missed,
    load_groups,
)
from steward.slurm.job_states import LOST

_ALL_TIME: Final = 2**62


class StoredLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Launch as stored in jobs.db.

    Attributes:
        cluster: Cluster name.
        is_attributed: Whether its run is known. If not, ``first_submit`` and ``restarts`` of
            ``usage`` are meaningless.
        usage: Reported usage.
    """

    cluster: str
    is_attributed: bool
    usage: StepUsage


class RunQueries:
    """Run and step queries of :class:`steward.jobs.queries.Jobs`.

    Args:
        path: Path of jobs.db.
        connection: Read-only connection to it.
    """

    def __init__(self, path: str, connection: Connection) -> None:
        self._path = path
        self._connection = connection

    def list_lines(self, job: Job) -> list[UsageLine]:
        """Return the lines of a job: runs in order, each run or piece before its steps."""
        return self._query_lines(
            "JOIN run ON run.cluster = line.cluster AND run.job_id = line.job_id "
            "AND run.submit = line.submit_us AND run.restarts = line.restarts "
            "WHERE line.cluster = ? AND line.job_id = ? AND run.job = ? "
            "ORDER BY line.submit_us, line.restarts, line.piece_us = 0, line.piece_us, "
            "line.rank, line.step",
            (job.cluster, job.job_id, job.number),
        )

    def list_launches(self, job: Job, restarts: int | None = None) -> list[StepUsage]:
        """Return the launches of a job's steps, by launch time.

        Args:
            job: The job.
            restarts: Only those of this run.
        """
        launches = self._query_launches(
            "run.job = :job AND launch.cluster = :cluster AND launch.job_id = :job_id "
            "AND (:restarts IS NULL OR launch.restarts = :restarts)",
            {
                "job": job.number,
                "cluster": job.cluster,
                "job_id": job.job_id,
                "restarts": restarts,
            },
        )
        return [launch.usage for launch in launches]

    def list_unattributed(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        cluster: str = "",
        limit: int = 1000,
    ) -> list[StoredLaunch]:
        """Return launches whose run is unknown, oldest first.

        Args:
            since: Earliest launch time.
            until: Launched before this time.
            cluster: Cluster name; "" for any.
            limit: Maximum number.
        """
        return self._query_launches(
            "launch.submit IS NULL AND launch.launched >= :since AND launch.launched < :until "
            "AND (:cluster = '' OR launch.cluster = :cluster)",
            {**_bind_window(since, until), "cluster": cluster},
            limit,
        )

    def list_unended_launches(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        cluster: str = "",
        limit: int = 1000,
    ) -> list[StoredLaunch]:
        """Return launches of ended runs whose own end was never reported; oldest first.

        Args:
            since: Earliest launch time.
            until: Launched before this time.
            cluster: Cluster name; "" for any.
            limit: Maximum number.
        """
        return self._query_launches(
            "launch.ended = 0 AND launch.launched >= :since AND launch.launched < :until "
            "AND (:cluster = '' OR launch.cluster = :cluster) "
            "AND EXISTS (SELECT 1 FROM line WHERE line.cluster = launch.cluster "
            "AND line.job_id = launch.job_id AND line.submit_us = launch.submit "
            "AND line.restarts = launch.restarts AND line.piece_us = 0 AND line.step = '' "
            "AND line.end_us > 0)",
            {**_bind_window(since, until), "cluster": cluster},
            limit,
        )

    def list_stepless_runs(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        cluster: str = "",
        limit: int = 1000,
    ) -> list[UsageLine]:
        """Return ended runs without any known step; oldest end first.

        Args:
            since: Earliest end time.
            until: Ended before this time.
            cluster: Cluster name; "" for any.
            limit: Maximum number.
        """
        return self._query_lines(
            "WHERE line.step = '' AND line.end_us > 0 AND line.start_us > 0 "
            "AND line.piece_us = 0 AND line.end_us >= :since AND line.end_us < :until "
            "AND (:cluster = '' OR line.cluster = :cluster) "
            "AND NOT EXISTS (SELECT 1 FROM line AS part WHERE part.cluster = line.cluster "
            "AND part.job_id = line.job_id AND part.submit_us = line.submit_us "
            "AND part.restarts = line.restarts AND part.step <> '') "
            "ORDER BY line.end_us, line.job_id LIMIT :limit",
            {**_bind_window(since, until), "cluster": cluster, "limit": limit},
        )

    def list_ended_runs(
        self,
        since: datetime,
        until: datetime,
        cluster: str,
        *,
        limit: int = 1000,
        after: tuple[int, int] = (0, 0),
    ) -> list[UsageLine]:
        """Return started runs, and pieces of runs, that ended in a period, oldest end first.

        Args:
            since: Earliest end time.
            until: Ended before this time.
            cluster: Cluster name.
            limit: Maximum number.
            after: Return only lines after this (end_us, job_id).
        """
        return self._query_lines(
            "WHERE line.step = '' AND line.end_us > 0 AND line.start_us > 0 "
            "AND line.end_us >= :since AND line.end_us < :until AND line.cluster = :cluster "
            "AND (line.end_us, line.job_id) > (:after_us, :after_id) "
            "ORDER BY line.end_us, line.job_id LIMIT :limit",
            {
                **_bind_window(since, until),
                "cluster": cluster,
                "limit": limit,
                "after_us": after[0],
                "after_id": after[1],
            },
        )

    def count_observed_runs(self, since: datetime, until: datetime, cluster: str) -> int:
        """Count started runs that Steward itself observed and that ended in a period.

        Args:
            since: Earliest end time.
            until: Ended before this time.
            cluster: Cluster name.
        """
        # The index covers all columns: there may be millions of imported runs.
        with translate_errors(self._path):
            (count,) = self._connection.execute(
                "SELECT count(*) FROM line INDEXED BY line_by_end WHERE step = '' "
                "AND piece_us = 0 AND start_us > 0 AND end_us >= :since AND end_us < :until "
                "AND source IS NULL AND cluster = :cluster",
                {**_bind_window(since, until), "cluster": cluster},
            ).fetchone()
        return int(count)

    def list_run_events(self, cluster: str, job_ids: Iterable[int]) -> list[RunEvent]:
        """Return the ended runs, and pieces of runs, under some raw ids, as run.end publishes them.

        Args:
            cluster: Cluster name.
            job_ids: The ids; some hundreds at most.
        """
        events: list[RunEvent] = []
        with translate_errors(self._path):
            groups = load_groups(self._connection, cluster, sorted(set(job_ids)))
        for job_id, group in groups.items():
            for job in resolve_jobs(list(group.runs.values()), list(group.scripts.values())):
                for view in build_run_views(job):
                    events += [view.make_event(job_id, piece) for piece in view.additional_records]
                    if view.is_over:
                        events.append(view.make_event(job_id))
        return events

    def list_runs_without_end(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        cluster: str = "",
        limit: int = 1000,
    ) -> list[UsageLine]:
        """Return runs that disappeared from Slurm without a reported end; oldest first.

        Args:
            since: Earliest submit time.
            until: Submitted before this time.
            cluster: Cluster name; "" for any.
            limit: Maximum number.
        """
        return self._query_lines(
            "WHERE line.step = '' AND line.state = :lost "
            "AND line.submit_us >= :since AND line.submit_us < :until "
            "AND (:cluster = '' OR line.cluster = :cluster) "
            "ORDER BY line.submit_us, line.job_id LIMIT :limit",
            {**_bind_window(since, until), "lost": LOST, "cluster": cluster, "limit": limit},
        )

    def list_doubtful_steps(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        cluster: str = "",
        limit: int = 1000,
    ) -> list[UsageLine]:
        """Return steps with missing data (``doubts``), or with more cgroup than task CPU time.

        Args:
            since: Earliest end time of their run.
            until: The run ended before this time.
            cluster: Cluster name; "" for any.
            limit: Maximum number.
        """
        return self._query_lines(
            "WHERE line.step <> '' AND (line.doubts <> '' OR line.cgroup_user_us IS NOT NULL) "
            "AND (line.cluster, line.job_id, line.submit_us, line.restarts, line.piece_us) IN "
            "(SELECT cluster, job_id, submit_us, restarts, piece_us FROM line AS run "
            "WHERE run.step = '' AND run.end_us > 0 AND run.end_us >= :since "
            "AND run.end_us < :until AND (:cluster = '' OR run.cluster = :cluster) "
            "AND (run.doubts <> '' OR run.cgroup_user_us IS NOT NULL)) LIMIT :limit",
            {**_bind_window(since, until), "cluster": cluster, "limit": limit},
        )

    def list_node_losses(
        self, since: datetime | None = None, until: datetime | None = None, cluster: str = ""
    ) -> list[NodeLoss]:
        """Return the losses that nodes reported in a period, oldest first."""
        with translate_errors(self._path):
            return list_gaps(self._connection, since, until, cluster)

    def list_missed_jobs(
        self, since: datetime, until: datetime, cluster: str, limit: int
    ) -> list[MissedJob]:
        """Return jobs whose scripts capture missed in a period, oldest first."""
        with translate_errors(self._path):
            return list_missed(self._connection, since, until, cluster, limit)

    def count_missed(self, cluster: str) -> int:
        """Count the jobs of a cluster that capture missed and jobs.db still remembers."""
        with translate_errors(self._path):
            return count_missed(self._connection, cluster)

    def count_expirable_jobs(self, before: datetime, cluster: str = "") -> int:
        """Count the jobs that ended before a time and would be deleted; of all clusters for ""."""
        with translate_errors(self._path):
            clusters: Iterable[str] = [cluster]
            if not cluster:
                rows = self._connection.execute("SELECT DISTINCT cluster FROM job").fetchall()
                clusters = [name for (name,) in rows]
            return sum(count_expirable(self._connection, name, before) for name in clusters)

    def _query_lines(
        self, condition: str, values: Sequence[Any] | dict[str, Any]
    ) -> list[UsageLine]:
        """Return the lines that match a condition."""
        columns = ", ".join(f"line.{name}" for name in COLUMNS.split(", "))
        with translate_errors(self._path):
            rows = self._connection.execute(f"SELECT {columns} FROM line {condition}", values)  # noqa: S608 -- our own conditions
            return [row_to_line(row) for row in rows]

    def _query_launches(
        self, condition: str, values: dict[str, Any], limit: int = -1
    ) -> list[StoredLaunch]:
        """Return the launches that match a condition, by launch time."""
        statement = (
            f"SELECT job.first_submit, run.end_time, {LAUNCHES.select_list} FROM launch "  # noqa: S608 -- our own conditions
            "LEFT JOIN run ON run.cluster = launch.cluster AND run.job_id = launch.job_id "
            "AND run.submit = launch.submit AND run.restarts = launch.restarts "
            f"LEFT JOIN job ON job.number = run.job WHERE {condition} "
            "ORDER BY launch.launched, launch.node LIMIT :limit"
        )
        with translate_errors(self._path):
            rows = self._connection.execute(statement, {**values, "limit": limit}).fetchall()
        return [_row_to_stored_launch(row) for row in rows]


def _row_to_stored_launch(values: tuple[Any, ...]) -> StoredLaunch:
    """Convert a row to a stored launch."""
    first_submit_us, end_us, *columns = values
    job_id, row = row_to_launch(columns)
    facts = row.facts
    step, node, launched_us = row.key
    is_attributed = row.run is not None and first_submit_us is not None
    usage = StepUsage(
        job_id=job_id,
        first_submit=from_micros(launched_us if first_submit_us is None else first_submit_us),
        restarts=row.run[1] if row.run is not None else 0,
        step=step,
        node=node,
        launched_us=launched_us,
        ended_us=facts.ended_us,
        run_end=None if end_us is None else from_micros(end_us),
        start=facts.start,
        tasks=tuple(facts.tasks.values()),
        end=facts.end,
    )
    return StoredLaunch(cluster=columns[0], is_attributed=is_attributed, usage=usage)


def _bind_window(since: datetime | None, until: datetime | None) -> dict[str, int]:
    """Return the bound values of a time window."""
    return {
        "since": -_ALL_TIME if since is None else to_micros(since),
        "until": _ALL_TIME if until is None else to_micros(until),
    }
