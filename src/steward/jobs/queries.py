"""Job queries on jobs.db for views: find, list, count, and read runs and scripts.

:class:`Jobs` is the read-only interface to jobs.db. It inherits :class:`ListQueries` (pages of
lists, and counts), which inherits :class:`steward.jobs.run_queries.RunQueries` (runs and steps).
Every query uses an index and sees one consistent snapshot. :func:`list_clusters` lists the clusters
that may have jobs.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.events import JobScript
from steward.core.logs import LogLimit
from steward.core.records import JobRecord, UsageLine
from steward.core.sqlite import (
    SqliteError,
    SqliteMissing,
    SqliteUnavailable,
    open_reader,
    translate_errors,
)
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.jobs.compression import decompress_json
from steward.jobs.filters import (
    Job,
    JobFilter,
    ListPosition,
    Run,
    Script,
    build_conditions,
    match_name,
)
from steward.jobs.identity import PROMPT_US, SLACK_US
from steward.jobs.job_ids import parse_job_name
from steward.jobs.lines import COLUMNS, list_stored_clusters, row_to_line
from steward.jobs.retention import get_leader_id
from steward.jobs.run_queries import RunQueries
from steward.jobs.tables import database_path, unpack_run
from steward.slurm.arrays import count_tasks, includes_task

log = logging.getLogger(__name__)

Order = Literal["-submit", "submit", "-end", "end"]
"""Sort order: by first submit time, or by end for ended jobs; ``-`` puts the latest first."""

_SORT_COLUMNS: Final = {"submit": "job.first_submit", "end": "job.end_time"}
_ENDED: Final = "job.ended = 1 AND job.end_time IS NOT NULL"

Array = tuple[str, int]
"""Cluster and job id of an array."""


class PageStart(msgspec.Struct, frozen=True, array_like=True):
    """Position at which the next page of a list begins.

    Attributes:
        at_us: Sort key of the last job, µs since the epoch.
        job_id: Raw id of the last job.
        number: Row number of the last job.
        told: Arrays already listed that may have more tasks to come.
    """

    at_us: int
    job_id: int
    number: int
    told: tuple[Array, ...] = ()


class ListRow(msgspec.Struct, frozen=True):
    """Row of a list: a job or an array.

    Attributes:
        number: Row of the job in jobs.db; for an array, of its first task found.
        array: The array this row stands for; None for a single job.
    """

    number: int
    array: Array | None = None


class ListQueries(RunQueries):
    """List and count queries of :class:`Jobs`."""

    def list_page(
        self,
        job_filter: JobFilter,
        order: Order,
        limit: int,
        after: PageStart | None = None,
        *,
        group_arrays: bool = True,
    ) -> tuple[list[ListRow], PageStart | None]:
        """Return one page of a list, and where the next begins; None on the last page.

        Args:
            job_filter: The filter. An array is listed if one of its tasks matches.
            order: Sort order.
            limit: Maximum number of rows.
            after: Where the page begins; None for the first page.
            group_arrays: List an array as one row, at the place of its first task.

        Raises:
            JobNameError: ``job_filter.jobs`` contains an invalid job name.
        """
        condition, values = build_conditions(job_filter)
        if after is not None:
            sort_column, sign = (
                _SORT_COLUMNS[order.removeprefix("-")],
                "<" if order.startswith("-") else ">",
            )
            condition += (
                f" AND ({sort_column}, job.job_id, job.number) {sign} (:at_us, :id, :number)"
            )
            values |= {"at_us": after.at_us, "id": after.job_id, "number": after.number}
        rows: list[ListRow] = []
        listed_arrays: dict[Array, int] = dict.fromkeys(after.told, after.at_us) if after else {}
        position: PageStart | None = None
        with translate_errors(self._path):
            cursor = self._connection.execute(_build_list_query(condition, order), values)
            try:
                for number, cluster, job_id, at_us, array_id in cursor:
                    array = (cluster, array_id) if array_id and group_arrays else None
                    if array is None or array not in listed_arrays:
                        if len(rows) == limit:
                            return rows, _keep_listed_arrays(position, listed_arrays)
                        rows.append(ListRow(number, array))
                    if array is not None:
                        listed_arrays[array] = at_us
                    position = PageStart(at_us, job_id, number)
            finally:
                cursor.close()
        return rows, None

    def count_task_states(self, arrays: Iterable[Array]) -> dict[Array, dict[str, int]]:
        """Count the tasks of each array by state."""
        array_set = set(arrays)
        array_ids = msgspec.json.encode(sorted({array_id for _, array_id in array_set})).decode()
        counts: dict[Array, dict[str, int]] = {}
        with translate_errors(self._path):
            rows = self._connection.execute(
                "SELECT cluster, array_job_id, state, count(*) FROM job "
                "WHERE array_job_id IN (SELECT value FROM json_each(?)) "
                "GROUP BY array_job_id, cluster, state",
                (array_ids,),
            ).fetchall()
            # Tasks that Slurm has not split off share one record, under the array's own id.
            shared_rows = self._connection.execute(
                "SELECT cluster, array_job_id, state, array_task FROM job "
                "WHERE job_id IN (SELECT value FROM json_each(?)) AND array_job_id = job_id",
                (array_ids,),
            ).fetchall()
        for cluster, array_id, state, tasks in rows:
            if (cluster, array_id) in array_set:
                counts.setdefault((cluster, array_id), {})[state or ""] = tasks
        for cluster, array_id, state, expression in shared_rows:
            if (cluster, array_id) in array_set and not (expression or "0").isdecimal():
                counts[cluster, array_id][state or ""] += count_tasks(expression) - 1
        return counts

    def count_states(
        self, job_filter: JobFilter, *, limit: int = 20_000
    ) -> tuple[dict[str, int], bool]:
        """Count jobs by state; also return True if all were counted.

        Args:
            job_filter: The filter.
            limit: Maximum number of jobs to count if the filter must be applied to each job.

        Raises:
            JobNameError: ``job_filter.jobs`` contains an invalid job name.
        """
        condition, values = build_conditions(job_filter)
        # Without filters on people or names the index alone gives the counts.
        is_narrow = bool(
            job_filter.users or job_filter.accounts or job_filter.names or job_filter.jobs
        )
        is_narrow |= any(not scope.everything for scope in (job_filter.scopes or {}).values())
        limited_rows = f"(SELECT job.state FROM job WHERE {condition} LIMIT {limit:d})"  # noqa: S608 -- values are bound
        all_rows = f"job WHERE {condition}"
        statement = (
            f"SELECT state, count(*) FROM {limited_rows if is_narrow else all_rows} GROUP BY state"  # noqa: S608 -- values are bound
        )
        with translate_errors(self._path):
            rows = self._connection.execute(statement, values).fetchall()
        counts = {state or "": jobs for state, jobs in rows}
        return counts, not is_narrow or sum(counts.values()) < limit

    def read_last_lines(self, jobs: Sequence[Job]) -> dict[int, UsageLine]:
        """Return the accounting line of each job's last run, by row number; omit jobs without."""
        statement = (
            f"SELECT {COLUMNS} FROM line WHERE cluster = ? AND job_id = ? AND submit_us = ? "  # noqa: S608 -- our own columns
            "AND restarts = ? AND piece_us = 0 AND step = ''"
        )
        lines: dict[int, UsageLine] = {}
        with translate_errors(self._path):
            for job in jobs:
                key = (*(job.cluster, job.job_id), to_micros_or_zero(job.record.submit))
                row: Any = self._connection.execute(
                    statement, (*key, job.record.restarts)
                ).fetchone()
                if row is not None:
                    lines[job.number] = row_to_line(row)
        return lines

    def explain_page(self, job_filter: JobFilter, order: Order) -> str:
        """Return SQLite's query plan of ``listed``, one step per line."""
        condition, values = build_conditions(job_filter)
        with translate_errors(self._path):
            plan = f"EXPLAIN QUERY PLAN {_build_list_query(condition, order)}"
            return "\n".join(row[3] for row in self._connection.execute(plan, values))


def _build_list_query(condition: str, order: Order) -> str:
    """Return the SELECT of a job list in an order."""
    sort_column = _SORT_COLUMNS[order.removeprefix("-")]
    direction = "DESC" if order.startswith("-") else "ASC"
    ended = f" AND {_ENDED}" if sort_column == _SORT_COLUMNS["end"] else ""
    return (
        f"SELECT job.number, job.cluster, job.job_id, {sort_column}, job.array_job_id FROM job "  # noqa: S608 -- values are bound
        f"WHERE {condition}{ended} "
        f"ORDER BY {sort_column} {direction}, job.job_id {direction}, job.number {direction}"
    )


def _keep_listed_arrays(
    position: PageStart | None, listed_arrays: dict[Array, int]
) -> PageStart | None:
    """Return a position with the arrays whose remaining tasks share its sort key."""
    if position is None:
        return None
    remaining = tuple(array for array, at_us in listed_arrays.items() if at_us == position.at_us)
    return msgspec.structs.replace(position, told=remaining)


_COLUMNS: Final = (
    "job.number, job.cluster, job.job_id, job.first_submit, job.verified, job.purged, "
    "job.ended, job.script_key, job.name, job.record"
)

_decode_record = msgspec.json.Decoder(JobRecord).decode
_decode_body = msgspec.json.Decoder(JobScript).decode


_UNREADABLE_LIMIT: Final = LogLimit()
"""Limit of the warning that jobs.db cannot be read, which each request would repeat."""


def list_clusters(settings: Settings) -> list[str]:
    """Return all clusters that may have jobs: the configured ones, then others found in jobs.db.

    A request for all clusters requires permission on each of them. If jobs.db cannot be read, these
    are the configured ones: status and health checks must work then.

    Returns:
        At least one name; if none is known, "", which no cluster has.
    """
    stored: list[str] = []
    try:
        with closing(Jobs(database_path(settings.state_dir))) as jobs:
            stored = jobs.read_clusters()
    except SqliteMissing:
        pass  # no jobs.db yet, so no jobs
    except (SqliteError, SqliteUnavailable) as error:
        log.log(
            _UNREADABLE_LIMIT.choose_level(logging.WARNING, settings.state_dir),
            "cannot list the clusters in jobs.db, using only the configured ones: %s; run "
            "'steward doctor --only state'",
            error,
        )
    else:
        _UNREADABLE_LIMIT.reset(settings.state_dir)
    return list(dict.fromkeys((*settings.cluster, *stored))) or [""]


def check_clusters(names: Iterable[str], clusters: Sequence[str]) -> None:
    """Check that requested clusters are among these, the result of :func:`list_clusters`.

    Raises:
        UsageError: A cluster is not; the message names those that are.
    """
    for name in names:
        if name not in clusters:
            raise UsageError(f"unknown cluster {name!r}: use one of {', '.join(clusters)}", name)


class Jobs(ListQueries):
    """Read-only interface to jobs.db. Use it from one thread at a time.

    Args:
        path: Path of the database, ``state_dir/jobs.db``.

    Raises:
        SqliteUnavailable: The database does not exist yet, or cannot be read now.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, open_reader(path, migrated=True))
        self._connection.create_function("holds_task", 2, _holds_task, deterministic=True)
        self._in_snapshot = False

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Give all queries inside the same consistent view of the database."""
        if self._in_snapshot:
            yield
            return
        with translate_errors(self._path):
            self._connection.execute("BEGIN")
            self._in_snapshot = True
            try:
                yield
            finally:
                self._in_snapshot = False
                self._connection.execute("ROLLBACK")

    def find(self, text: str, cluster: str = "") -> list[Job]:
        """Return all jobs with this name, newest first.

        Args:
            text: Job name: 123, 123_7, 123+1, a raw id or a SLUID. A task without a record of its
                own finds its array.
            cluster: Cluster name; "" for any.

        Raises:
            JobNameError: The text is not a job name.
        """
        name = parse_job_name(text)
        cluster_condition = "job.cluster = :cluster AND " if cluster else ""
        with self.snapshot():
            for is_exact in (True, False):
                condition, values = match_name(name, is_exact=is_exact)
                jobs = self._query_jobs(
                    cluster_condition + condition, {"cluster": cluster, **values}
                )
                if jobs:
                    return jobs
        return []

    def find_by_numbers(self, numbers: Iterable[int]) -> dict[int, Job]:
        """Return jobs by row number."""
        rows = self._query_jobs(
            "job.number IN (SELECT value FROM json_each(:numbers))",
            {"numbers": _encode_json(list(numbers))},
        )
        return {job.number: job for job in rows}

    def find_by_scripts(self, keys: Iterable[str], cluster: str = "") -> dict[str, Job]:
        """Return the jobs that own these scripts, by key of the job.script event."""
        statement = (
            f"SELECT script.key, {_COLUMNS} FROM script JOIN job ON job.number = script.job "  # noqa: S608 -- our own columns
            "WHERE script.key IN (SELECT value FROM json_each(:keys)) AND script.purged = 0 "
            "AND (:cluster = '' OR script.cluster = :cluster)"
        )
        values = {"keys": _encode_json(list(keys)), "cluster": cluster}
        with translate_errors(self._path):
            rows = self._connection.execute(statement, values).fetchall()
        return {row[0]: _row_to_job(row[1:]) for row in rows}

    def find_script(self, job: Job) -> Script | None:
        """Return the script that a job ran: its own, its array's or its het leader's."""
        if not job.script_key:
            return None
        scripts = self._query_scripts("key = ? AND cluster = ?", (job.script_key, job.cluster))
        return scripts[0] if scripts else None

    def list_scripts(self, job: Job) -> list[Script]:
        """Return all scripts stored for the job itself, oldest first."""
        return self._query_scripts(
            "cluster = ? AND job_id = ? AND job = ?", (job.cluster, job.job_id, job.number)
        )

    def list_runs(self, job: Job) -> list[Run]:
        """Return the runs of a job, first to last."""
        with translate_errors(self._path):
            rows = self._connection.execute(
                "SELECT facts FROM run WHERE cluster = ? AND job_id = ? AND job = ? "
                "ORDER BY submit, restarts",
                (job.cluster, job.job_id, job.number),
            ).fetchall()
        # While a requeued job completes, Slurm shows its new restart count with the old submit
        # time. Of two runs with the same count, the one with the later submit time is real.
        return list({run.restarts: run for run in map(_row_to_run, rows)}.values())

    def read_clusters(self) -> list[str]:
        """Return every cluster with runs or scripts."""
        with translate_errors(self._path):
            names = [list_stored_clusters(self._connection, table) for table in ("run", "script")]
        return sorted({*names[0], *names[1]})

    def list_unfinished_records(self, cluster: str) -> list[JobRecord]:
        """Return the latest records of a cluster's jobs that have not ended, as far as known."""
        with translate_errors(self._path):
            rows = self._connection.execute(
                "SELECT record FROM job WHERE cluster = ? AND ended = 0 AND verified = 1 "
                "AND record IS NOT NULL",
                (cluster,),
            ).fetchall()
        return [_decode_record(decompress_json(record)) for (record,) in rows]

    def list_unfinished_jobs(self, cluster: str, leaders: Iterable[int] | None = None) -> list[Job]:
        """Return a cluster's jobs that have not ended, as far as known, newest first.

        Args:
            cluster: Cluster name.
            leaders: Only jobs with these raw ids, and tasks of arrays with these ids.
        """
        condition = "job.cluster = :cluster AND job.ended = 0 AND job.verified = 1"
        values: dict[str, Any] = {"cluster": cluster}
        if leaders is not None:
            leader_ids = "(SELECT value FROM json_each(:leaders))"
            condition += f" AND (job.job_id IN {leader_ids} OR job.array_job_id IN {leader_ids})"
            values["leaders"] = _encode_json(sorted(leaders))
        return self._query_jobs(condition, values)

    def list_unconfirmed(
        self, since: datetime, until: datetime, cluster: str = "", limit: int = 1000
    ) -> list[Job]:
        """Return jobs of a period with a captured script that Slurm never showed, newest first."""
        return self._query_jobs(
            "job.verified = 0 AND job.purged = 0 AND job.first_submit >= :since "
            "AND job.first_submit < :until AND (:cluster = '' OR job.cluster = :cluster)",
            {"since": to_micros(since), "until": to_micros(until), "cluster": cluster},
            limit,
        )

    def list_parts(self, job: Job) -> list[Job]:
        """Return the array tasks or het components that have records of their own, newest first.

        The array or leader itself is not included.
        """
        parts = self._query_jobs(
            "job.cluster = :cluster AND (job.array_job_id = :id OR job.het_job_id = :id) "
            "AND job.job_id <> :id",
            {"cluster": job.cluster, "id": job.job_id},
        )
        return [part for part in parts if part.record.uid == job.record.uid]

    def is_purged(self, cluster: str, key: str) -> bool | None:
        """Return True if a script was purged, by its event's key; None if it never existed."""
        with translate_errors(self._path):
            row = self._connection.execute(
                "SELECT purged FROM script WHERE key = ? AND cluster = ?", (key, cluster)
            ).fetchone()
        return None if row is None else bool(row[0])

    def has_script(self, cluster: str, job_id: int, submit: datetime) -> bool:
        """Return True if a submission has a script, or had one that was purged.

        Args:
            cluster: Cluster name.
            job_id: Raw id: for an array the array's, for a het job its leader's.
            submit: Submit time of one of its runs.
        """
        submit_us = to_micros(submit)
        with translate_errors(self._path):
            row = self._connection.execute(
                "SELECT 1 FROM script WHERE cluster = :cluster AND job_id = :id AND ("
                "spool_mtime_ns BETWEEN :first AND :last OR job IN (SELECT job FROM run "
                "WHERE cluster = :cluster AND job_id = :id AND submit = :submit)) LIMIT 1",
                {
                    "cluster": cluster,
                    "id": job_id,
                    "submit": submit_us,
                    "first": (submit_us - SLACK_US) * 1000,
                    "last": (submit_us + PROMPT_US) * 1000,
                },
            ).fetchone()
        return row is not None

    def cursor(self) -> int:
        """Return the journal position up to which events are applied."""
        with translate_errors(self._path):
            (position,) = self._connection.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def explain(self, job_filter: JobFilter) -> str:
        """Return SQLite's query plan of ``list``, one step per line."""
        condition, values = build_conditions(job_filter)
        values |= {"limit": 1}
        with translate_errors(self._path):
            rows = self._connection.execute(
                f"EXPLAIN QUERY PLAN {_build_select(condition)}", values
            )
            return "\n".join(row[3] for row in rows)

    def _query_jobs(self, condition: str, values: dict[str, Any], limit: int = -1) -> list[Job]:
        """Return the jobs that match a condition, newest first."""
        with self.snapshot():
            rows = self._connection.execute(_build_select(condition), {**values, "limit": limit})
            return self._fill_script_keys([_row_to_job(row) for row in rows])

    def _query_scripts(self, condition: str, values: tuple[object, ...]) -> list[Script]:
        """Return the scripts that match a condition and are not purged."""
        with translate_errors(self._path):
            rows = self._connection.execute(
                f"SELECT key, cluster, body FROM script WHERE {condition} "  # noqa: S608 -- our own conditions
                "AND purged = 0 ORDER BY spool_mtime_ns",
                values,
            ).fetchall()
        return [
            Script(key=key, cluster=cluster, body=_decode_body(decompress_json(body)))
            for key, cluster, body in rows
        ]

    def _fill_script_keys(self, jobs: list[Job]) -> list[Job]:
        """Fill in the script key of array tasks and het components from their leader."""
        leaders_by_cluster: dict[str, set[int]] = {}
        for job in jobs:
            leader = get_leader_id(job.record)
            if leader != job.job_id and not job.script_key:
                leaders_by_cluster.setdefault(job.cluster, set()).add(leader)
        if not leaders_by_cluster:
            return jobs
        scripts: dict[tuple[str, int, int], list[tuple[int, str, bool]]] = {}
        for cluster, leaders in leaders_by_cluster.items():
            # The uid must match: with a reused id the script may be another user's.
            rows = self._connection.execute(
                "SELECT script.job_id, job.uid, script.spool_mtime_ns / 1000, script.key, "
                "script.purged FROM script JOIN job ON job.number = script.job "
                "WHERE script.cluster = ? AND script.job_id IN (SELECT value FROM json_each(?)) "
                "AND job.verified ORDER BY script.spool_mtime_ns",
                (cluster, _encode_json(sorted(leaders))),
            )
            for leader, uid, mtime_us, key, purged in rows:
                scripts.setdefault((cluster, leader, uid), []).append((mtime_us, key, bool(purged)))
        return [self._fill_script_key(job, scripts) for job in jobs]

    @staticmethod
    def _fill_script_key(
        job: Job, scripts: dict[tuple[str, int, int], list[tuple[int, str, bool]]]
    ) -> Job:
        """Fill in the script key of one job: its leader's latest script before the job."""
        leader, uid = get_leader_id(job.record), job.record.uid
        if job.script_key or leader == job.job_id or uid is None:
            return job
        latest_us = to_micros(job.first_submit) + PROMPT_US
        keys = [
            "" if purged else key
            for mtime_us, key, purged in scripts.get((job.cluster, leader, uid), ())
            if mtime_us <= latest_us
        ]
        return msgspec.structs.replace(job, script_key=keys[-1]) if keys else job

    # Keep this method last: below it, ``list`` is no longer the builtin type.
    def list(
        self,
        job_filter: JobFilter,
        limit: int = 1000,
        before: ListPosition | None = None,
    ) -> list[Job]:
        """Return jobs by first submit time, newest first; within a second, highest id first.

        Args:
            job_filter: The filter.
            limit: Maximum number of jobs.
            before: Return only jobs after this ``Job.position`` in the list.

        Raises:
            JobNameError: ``job_filter.jobs`` contains an invalid job name.
        """
        condition, values = build_conditions(job_filter)
        if before is not None:
            condition += (
                " AND (job.first_submit, job.job_id, job.number) "
                "< (:before_us, :before_id, :before_number)"
            )
            submit, job_id, number = before
            values |= {"before_us": to_micros(submit), "before_id": job_id, "before_number": number}
        return self._query_jobs(condition, values, limit)


def _build_select(condition: str) -> str:
    """Return the SELECT of jobs, newest first."""
    return (
        f"SELECT {_COLUMNS} FROM job WHERE {condition} "  # noqa: S608 -- values are bound
        "ORDER BY job.first_submit DESC, job.job_id DESC, job.number DESC LIMIT :limit"
    )


def _row_to_job(row: tuple[Any, ...]) -> Job:
    """Convert a row to a job."""
    number, cluster, job_id, first_submit_us, verified, purged, ended, key, name, record = row
    return Job(
        number=number,
        cluster=cluster,
        job_id=job_id,
        first_submit=from_micros(first_submit_us),
        verified=bool(verified),
        purged=bool(purged),
        ended=bool(ended),
        script_key=key or "",
        record=_decode_record(decompress_json(record))
        if record
        else JobRecord(job_id=job_id, name=name or ""),
    )


def _row_to_run(row: tuple[bytes]) -> Run:
    """Convert stored facts to a run."""
    facts = unpack_run(row[0])
    late_end_us = facts.late_end_us
    return Run(
        restarts=facts.restarts,
        submit=from_micros(facts.submit_us),
        ended=facts.ending is not None,
        record=facts.merge_record(),
        late_end=from_micros(late_end_us)
        if late_end_us >= 0 and late_end_us != facts.end_us
        else None,
    )


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _holds_task(expression: str | None, task: int) -> bool:
    """Implement the SQL function ``holds_task``."""
    return expression is not None and includes_task(expression, task)
