"""Questions to jobs.db, for views: read-only, index-driven, one consistent snapshot each."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.core.config import Settings
from steward.core.events import JobScript
from steward.core.records import JobRecord, Line
from steward.core.sqlite import SqliteUnavailable, open_reader, translated
from steward.core.timestamps import micros, micros_or_0, moment
from steward.jobs.filters import Job, JobFilter, Position, Run, Script, called, conditions
from steward.jobs.identity import PROMPT_US, SLACK_US
from steward.jobs.job_ids import parse
from steward.jobs.lines import COLUMNS, line_of
from steward.jobs.retention import leader_of
from steward.jobs.run_queries import Accounts
from steward.jobs.tables import database_path, unpack
from steward.slurm.arrays import count_tasks, covers

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
                found[cluster, array_id][state or ""] += count_tasks(expression) - 1
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


_COLUMNS: Final = (
    "job.number, job.cluster, job.job_id, job.first_submit, job.verified, job.purged, "
    "job.ended, job.script_key, job.name, job.record"
)

_decode_record = msgspec.json.Decoder(JobRecord).decode
_decode_body = msgspec.json.Decoder(JobScript).decode


def clusters_of(settings: Settings) -> list[str]:
    """The clusters that there may be jobs of: the configuration's, then those that others tell of.

    Whoever asks for everything must be allowed to on each of them.

    Returns:
        At least one: where nothing is known a name that no cluster has.
    """
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteUnavailable:
        # Not made yet: there are no jobs either.
        known = []
    else:
        try:
            known = jobs.clusters()
        finally:
            jobs.close()
    return list(dict.fromkeys((*settings.cluster, *known))) or [""]


class Jobs(Listings):
    """jobs.db, opened for reading; to be used by one thread at a time.

    Args:
        path: The database file, ``state_dir/jobs.db``.

    Raises:
        SqliteUnavailable: There is none yet, or it cannot be read now.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, open_reader(path, made=True))
        self._connection.create_function("holds_task", 2, _holds_task, deterministic=True)
        self._in_snapshot = False

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all questions inside see the database as it is at the first of them."""
        if self._in_snapshot:
            yield
            return
        with translated(self._path):
            self._connection.execute("BEGIN")
            self._in_snapshot = True
            try:
                yield
            finally:
                self._in_snapshot = False
                self._connection.execute("ROLLBACK")

    def find(self, text: str, cluster: str = "") -> list[Job]:
        """All jobs that were called so, newest first.

        Args:
            text: A job as Slurm names it: 123, 123_7, 123+1, a raw id, a SLUID. A task
                that has no record of its own yet is found as its array.
            cluster: Only of this cluster; "" for any.

        Raises:
            JobNameError: The text names no job.
        """
        name = parse(text)
        where = "job.cluster = :cluster AND " if cluster else ""
        with self.snapshot():
            for is_exact in (True, False):
                condition, values = called(name, is_exact=is_exact)
                jobs = self._select(where + condition, {"cluster": cluster, **values})
                if jobs:
                    return jobs
        return []

    def by_numbers(self, numbers: Iterable[int]) -> dict[int, Job]:
        """Jobs by their rows."""
        rows = self._select(
            "job.number IN (SELECT value FROM json_each(:numbers))",
            {"numbers": _json(list(numbers))},
        )
        return {job.number: job for job in rows}

    def by_script(self, keys: Iterable[str], cluster: str = "") -> dict[str, Job]:
        """The jobs that these scripts belong to, by the key of the job.script event."""
        statement = (
            f"SELECT script.key, {_COLUMNS} FROM script JOIN job ON job.number = script.job "  # noqa: S608 -- our own columns
            "WHERE script.key IN (SELECT value FROM json_each(:keys)) AND script.purged = 0 "
            "AND (:cluster = '' OR script.cluster = :cluster)"
        )
        values = {"keys": _json(list(keys)), "cluster": cluster}
        with translated(self._path):
            rows = self._connection.execute(statement, values).fetchall()
        return {row[0]: _job(row[1:]) for row in rows}

    def script_of(self, job: Job) -> Script | None:
        """The script that the job ran: its own, its array's or its het leader's."""
        if not job.script_key:
            return None
        scripts = self._scripts("key = ? AND cluster = ?", (job.script_key, job.cluster))
        return scripts[0] if scripts else None

    def scripts_of(self, job: Job) -> list[Script]:
        """All scripts that were kept of the job itself, oldest first."""
        return self._scripts(
            "cluster = ? AND job_id = ? AND job = ?", (job.cluster, job.job_id, job.number)
        )

    def runs_of(self, job: Job) -> list[Run]:
        """The job's runs, first to last."""
        with translated(self._path):
            rows = self._connection.execute(
                "SELECT facts FROM run WHERE cluster = ? AND job_id = ? AND job = ? "
                "ORDER BY submit, restarts",
                (job.cluster, job.job_id, job.number),
            ).fetchall()
        # While a requeued job completes, Slurm shows its new restart count with the old
        # submit time: of the same count the later submit time is the run's.
        return list({run.restarts: run for run in map(_run, rows)}.values())

    def clusters(self) -> list[str]:
        """Every cluster that something is known of."""
        # One step in an index for each, however many jobs it has.
        statement = (
            "WITH RECURSIVE known (name) AS (SELECT min(cluster) FROM {0} UNION ALL "
            "SELECT (SELECT min(cluster) FROM {0} WHERE cluster > name) FROM known "
            "WHERE name IS NOT NULL) SELECT name FROM known WHERE name IS NOT NULL"
        )
        found: set[str] = set()
        with translated(self._path):
            for table in ("run", "script"):
                rows = self._connection.execute(statement.format(table)).fetchall()
                found.update(name for (name,) in rows)
        return sorted(found)

    def unfinished(self, cluster: str) -> list[JobRecord]:
        """The latest records of a cluster's jobs that are not over as far as is known."""
        with translated(self._path):
            rows = self._connection.execute(
                "SELECT record FROM job WHERE cluster = ? AND ended = 0 AND verified = 1 "
                "AND record IS NOT NULL",
                (cluster,),
            ).fetchall()
        return [_decode_record(record) for (record,) in rows]

    def unfinished_jobs(self, cluster: str, leaders: Iterable[int] | None = None) -> list[Job]:
        """A cluster's jobs that are not over as far as is known, newest first.

        Args:
            cluster: The cluster's name.
            leaders: Only jobs of these raw ids, and the tasks of arrays of these ids.
        """
        condition = "job.cluster = :cluster AND job.ended = 0 AND job.verified = 1"
        values: dict[str, Any] = {"cluster": cluster}
        if leaders is not None:
            among = "(SELECT value FROM json_each(:leaders))"
            condition += f" AND (job.job_id IN {among} OR job.array_job_id IN {among})"
            values["leaders"] = _json(sorted(leaders))
        return self._select(condition, values)

    def unconfirmed(
        self, since: datetime, until: datetime, cluster: str = "", limit: int = 1000
    ) -> list[Job]:
        """Jobs whose script was seen in a time, but which Slurm never showed; newest first."""
        return self._select(
            "job.verified = 0 AND job.purged = 0 AND job.first_submit >= :since "
            "AND job.first_submit < :until AND (:cluster = '' OR job.cluster = :cluster)",
            {"since": micros(since), "until": micros(until), "cluster": cluster},
            limit,
        )

    def parts_of(self, job: Job) -> list[Job]:
        """The tasks of an array, or the components of a het job, that have records of their own.

        Newest first; the array or leader itself is not among them.
        """
        found = self._select(
            "job.cluster = :cluster AND (job.array_job_id = :id OR job.het_job_id = :id) "
            "AND job.job_id <> :id",
            {"cluster": job.cluster, "id": job.job_id},
        )
        return [part for part in found if part.record.uid == job.record.uid]

    def is_purged(self, cluster: str, key: str) -> bool | None:
        """Whether a script was purged, by the key of its event; None if there never was one."""
        with translated(self._path):
            row = self._connection.execute(
                "SELECT purged FROM script WHERE key = ? AND cluster = ?", (key, cluster)
            ).fetchone()
        return None if row is None else bool(row[0])

    def has_script(self, cluster: str, job_id: int, submit: datetime) -> bool:
        """Whether there is a script of a submission, or was one that is purged.

        Args:
            cluster: The cluster's name.
            job_id: Raw id; of an array the array's, of a het job its leader's.
            submit: Submit time of one of its runs.
        """
        submit_us = micros(submit)
        with translated(self._path):
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
        """Position in the journal up to which events are taken in."""
        with translated(self._path):
            (position,) = self._connection.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def plan(self, wanted: JobFilter) -> str:
        """How SQLite would answer ``list``, a step a line."""
        condition, values = conditions(wanted)
        values |= {"limit": 1}
        with translated(self._path):
            rows = self._connection.execute(f"EXPLAIN QUERY PLAN {_list(condition)}", values)
            return "\n".join(row[3] for row in rows)

    def _select(self, condition: str, values: dict[str, Any], limit: int = -1) -> list[Job]:
        with self.snapshot():
            rows = self._connection.execute(_list(condition), {**values, "limit": limit})
            return self._with_leaders([_job(row) for row in rows])

    def _scripts(self, condition: str, values: tuple[object, ...]) -> list[Script]:
        with translated(self._path):
            rows = self._connection.execute(
                f"SELECT key, cluster, body, job FROM script WHERE {condition} "  # noqa: S608 -- our own conditions
                "AND purged = 0 ORDER BY spool_mtime_ns",
                values,
            ).fetchall()
        return [
            Script(key=key, cluster=cluster, body=_decode_body(body), job_number=number)
            for key, cluster, body, number in rows
        ]

    def _with_leaders(self, jobs: list[Job]) -> list[Job]:
        """Give tasks and components the key of the script that they run."""
        wanted: dict[str, set[int]] = {}
        for job in jobs:
            leader = leader_of(job.record)
            if leader != job.job_id and not job.script_key:
                wanted.setdefault(job.cluster, set()).add(leader)
        if not wanted:
            return jobs
        kept: dict[tuple[str, int, int], list[tuple[int, str, bool]]] = {}
        for cluster, leaders in wanted.items():
            # Of the same uid: of a re-used id the script may be somebody else's.
            rows = self._connection.execute(
                "SELECT script.job_id, job.uid, script.spool_mtime_ns / 1000, script.key, "
                "script.purged FROM script JOIN job ON job.number = script.job "
                "WHERE script.cluster = ? AND script.job_id IN (SELECT value FROM json_each(?)) "
                "AND job.verified ORDER BY script.spool_mtime_ns",
                (cluster, _json(sorted(leaders))),
            )
            for leader, uid, mtime_us, key, purged in rows:
                kept.setdefault((cluster, leader, uid), []).append((mtime_us, key, bool(purged)))
        return [self._with_leader(job, kept) for job in jobs]

    @staticmethod
    def _with_leader(
        job: Job, kept: dict[tuple[str, int, int], list[tuple[int, str, bool]]]
    ) -> Job:
        leader, uid = leader_of(job.record), job.record.uid
        if job.script_key or leader == job.job_id or uid is None:
            return job
        latest_us = micros(job.first_submit) + PROMPT_US
        keys = [
            "" if purged else key
            for mtime_us, key, purged in kept.get((job.cluster, leader, uid), ())
            if mtime_us <= latest_us
        ]
        return msgspec.structs.replace(job, script_key=keys[-1]) if keys else job

    # The last method: below it, ``list`` is not the type any more.
    def list(
        self,
        wanted: JobFilter,
        limit: int = 1000,
        before: Position | None = None,
    ) -> list[Job]:
        """Jobs by first submit time, newest first; of one second, the highest id first.

        Args:
            wanted: Which.
            limit: How many at most.
            before: Only what comes after this ``Job.position`` in the list.

        Raises:
            JobNameError: ``wanted.jobs`` holds a text that names no job.
        """
        condition, values = conditions(wanted)
        if before is not None:
            condition += (
                " AND (job.first_submit, job.job_id, job.number) "
                "< (:before_us, :before_id, :before_number)"
            )
            when, job_id, number = before
            values |= {"before_us": micros(when), "before_id": job_id, "before_number": number}
        return self._select(condition, values, limit)


def _list(condition: str) -> str:
    return (
        f"SELECT {_COLUMNS} FROM job WHERE {condition} "  # noqa: S608 -- values are bound
        "ORDER BY job.first_submit DESC, job.job_id DESC, job.number DESC LIMIT :limit"
    )


def _job(row: tuple[Any, ...]) -> Job:
    number, cluster, job_id, first_submit_us, verified, purged, ended, key, name, record = row
    return Job(
        number=number,
        cluster=cluster,
        job_id=job_id,
        first_submit=moment(first_submit_us),
        verified=bool(verified),
        purged=bool(purged),
        ended=bool(ended),
        script_key=key or "",
        record=_decode_record(record) if record else JobRecord(job_id=job_id, name=name or ""),
    )


def _run(row: tuple[bytes]) -> Run:
    facts = unpack(row[0])
    late = facts.late_end_us
    return Run(
        restarts=facts.restarts,
        submit=moment(facts.submit_us),
        ended=facts.ending is not None,
        record=facts.merged(),
        late_end=moment(late) if late >= 0 and late != facts.end_us else None,
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _holds_task(expression: str | None, task: int) -> bool:
    return expression is not None and covers(expression, task)
