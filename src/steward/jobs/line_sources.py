"""Line sources: read accounting lines from jobs.db, Parquet files, or a job log.

Each :class:`LineSource` takes a filter and columns and yields batches of rows in sacct's order,
each row with its mark (see ``steward.jobs.line_queries``). So sacct and reports need not know the
source. :class:`DatabaseSource` reads SQLite, :class:`ParquetSource` files by DuckDB,
:class:`MergedSource` merges them. :func:`open_line_source` chooses for Steward's own data,
:func:`open_file_source` for a file.

A job log (plugin jobacct/log) is a directory with one file of records per day. Closing a day packs
its records and writes its accounting lines to a Parquet file. :func:`load_job_log` loads the
extension's functions by their entry point.
"""

import heapq
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import msgspec

from steward.core.config import Settings
from steward.core.databases import JOBS
from steward.core.drivers import PARQUET
from steward.core.errors import StewardError, Unavailable
from steward.core.extensions import load_offer
from steward.core.records import USAGE_LINE_FIELDS, UsageLine
from steward.core.sqlite import Connection, SqliteError, open_reader, open_scratch, translate_errors
from steward.core.timestamps import from_micros
from steward.jobs.capacity_sums import CapacitySums, open_capacity_sums
from steward.jobs.day_sum_queries import DaySums, open_day_sums
from steward.jobs.day_sums import list_complete_clusters
from steward.jobs.line_queries import (
    HAS_EXPRESSION,
    ORDER_COLUMNS,
    LineFilter,
    LineQuery,
    TaskCondition,
    Tasks,
    build_candidates,
    build_statement,
)
from steward.jobs.lines import (
    STEP_RANKS,
    TABLE,
    TEXT_FIELDS,
    list_stored_clusters,
    put_lines,
)
from steward.slurm.arrays import includes_any_task

_BATCH: Final = 2000
_PARQUET_BATCH: Final = 10_000
_MEMORY: Final = "256MB"
_FEW: Final = 1000
"""Up to this many jobs and nodes are looked up by an index."""
_KEYED: Final = frozenset({"cluster", "job_id"})
_ALWAYS_THERE: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(UsageLine)
    # The Parquet file's statistics on these columns let DuckDB skip rows, so they stay unchanged.
    if isinstance(field.default, int) and field.name not in ("end_us", "eligible_us")
} | {"step": "''", "label": "''"}
_ROWS_AT_ONCE: Final = 30_000
_DAY_US: Final = 86_400_000_000

Row = tuple[Any, ...]

_NAMED_RANKS: Final = " ".join(f"WHEN '{step}' THEN {rank}" for step, rank in STEP_RANKS.items())
_RANK: Final = (
    f"CASE step {_NAMED_RANKS} ELSE coalesce(TRY_CAST(split_part(step, '+', 1) AS BIGINT), -1) END"
)
"""SQL of a step's rank, see :func:`steward.jobs.lines.rank_step`."""


class LineSourceError(StewardError):
    """A file has no accounting lines that can be used."""


class LineSource(Protocol):
    """Source of accounting lines."""

    def rows(
        self, line_filter: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """Yield batches of rows in sacct's order: the mark, then the columns.

        Args:
            line_filter: Filter of lines.
            columns: SQL of each column.
            steps: Include lines of steps.
        """


class DatabaseSource:
    """Source of lines in a SQLite database.

    Args:
        connection: Connection to it.
        name: Its name in errors.
        among: Query for the job ids to read; None for all.
    """

    def __init__(self, connection: Connection, name: str, among: LineQuery | None = None) -> None:
        self._connection = connection
        self._name = name
        self._among = among

    @contextmanager
    def _open_snapshot(self) -> Iterator[None]:
        with translate_errors(self._name):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def open_sums(self, cluster: str, bounds_us: Sequence[int]) -> Iterator[DaySums | None]:
        """Open day sums, see :func:`open_day_sums`; the body reads one snapshot of the database."""
        with self._open_snapshot():
            yield open_day_sums(self._connection, cluster, bounds_us)

    @contextmanager
    def open_capacity_sums(
        self, cluster: str, bounds_s: Sequence[int]
    ) -> Iterator[CapacitySums | None]:
        """Open sums of capacity, see :func:`open_capacity_sums`, likewise."""
        with self._open_snapshot():
            yield open_capacity_sums(self._connection, cluster, bounds_s)

    def limit_to(self, jobs: LineQuery) -> "DatabaseSource":
        """Return a source of the lines of some jobs only, whose ids a query selects."""
        return DatabaseSource(self._connection, self._name, jobs)

    def rows(
        self, line_filter: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """Implement :class:`LineSource`."""
        with translate_errors(self._name):
            among = self._among
            if line_filter.node_names and not self._has_node_index(line_filter):
                line_filter = msgspec.structs.replace(line_filter, node_names=())
            by_index = among is None and (
                line_filter.is_narrow or line_filter.since_us > self._find_earliest_end()
            )
            tasks = _TaskSets()
            query = build_statement(
                line_filter,
                columns,
                steps=steps,
                by_index=by_index,
                extra_condition=f"job_id IN ({among.sql})" if among else "",
                match_tasks=tasks.add_condition,
            )
            if tasks.sets:
                self._connection.create_function(
                    "holds_task", 3, tasks.includes_task, deterministic=True
                )
            values = query.values | among.values if among else query.values
            cursor = self._connection.execute(query.sql, values)
            while batch := cursor.fetchmany(_BATCH):
                yield batch

    def get_expired_us(self) -> int:
        """Return the time before which ended jobs may be deleted, µs since the epoch; 0 if none."""
        try:
            with translate_errors(self._name):
                row = self._connection.execute("SELECT max(before) FROM expired").fetchone()
        except SqliteError:
            return 0  # created by an older Steward, which never expired jobs
        return int(row[0] or 0)

    def has_all_jobs(self, line_filter: LineFilter) -> bool:
        """Return True if every named job, by its number alone, is in the database."""
        ids = {job.job_id for job in line_filter.jobs or ()}
        if not ids or any(job.sluid for job in line_filter.jobs or ()):
            return False
        ids_sql = ", ".join(map(str, ids))
        statements = [
            f"SELECT {column} FROM line WHERE {column} IN ({ids_sql}) AND step = ''"  # noqa: S608 -- numbers
            for column in ("job_id", "array_job_id", "het_job_id")
        ]
        with translate_errors(self._name):
            rows = self._connection.execute(" UNION ".join(statements)).fetchall()
        return ids <= {job_id for (job_id,) in rows}

    def _has_node_index(self, line_filter: LineFilter) -> bool:
        """Return True if the node index is complete for a filter, and faster than a scan."""
        if len(line_filter.node_names) > _FEW:
            return False
        if not self._connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'node_run'"
        ).fetchone():
            return False  # a job log that is read in, or written by an older Steward
        clusters = set(line_filter.clusters or list_stored_clusters(self._connection, "line"))
        return clusters <= list_complete_clusters(self._connection)

    def _find_earliest_end(self) -> int:
        """Return the earliest end of a run, µs since the epoch; 0 if none ended."""
        (earliest,) = self._connection.execute(
            "SELECT min(end_us) FROM line WHERE step = '' AND end_us > 0"
        ).fetchone()
        return int(earliest or 0)


class _TaskSets:
    """Requested array tasks, kept outside the statement because there may be many."""

    def __init__(self) -> None:
        self.sets: list[Tasks] = []

    def add_condition(self, tasks: Tasks) -> str:
        """Return the condition that a line is one of these tasks."""
        self.sets.append(tasks)
        return f"holds_task(array_job_id, array_task, {len(self.sets) - 1})"

    def includes_task(self, array: int | None, expression: str | None, which: int) -> bool:
        """Implement the SQL function of that condition."""
        tasks = self.sets[which].get(array or 0)
        return bool(tasks and expression) and includes_any_task(
            expression or "", tasks or frozenset()
        )


class ParquetSource:
    """Source of lines in Parquet files, read by DuckDB.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def rows(
        self, line_filter: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """Implement :class:`LineSource`.

        Raises:
            LineSourceError: A file is not Parquet, or has no accounting lines.
            Unavailable: A file cannot be read now, or DuckDB is not installed.
        """
        try:
            import duckdb
        except ImportError as error:
            raise Unavailable(
                f"cannot read {self._paths[0]}: {PARQUET.missing_error}", self._paths[0]
            ) from error

        try:
            # Parquet files have no node index.
            line_filter = msgspec.structs.replace(line_filter, node_names=())
            with duckdb.connect(config={"memory_limit": _MEMORY, "threads": 1}) as connection:
                self._make_view(connection)
                holds = self._make_task_condition(connection, line_filter)
                for only in self._split_rows(connection, line_filter):
                    query = build_statement(
                        line_filter,
                        columns,
                        steps=steps,
                        by_index=False,
                        extra_condition=only,
                        match_tasks=holds,
                    )
                    cursor = connection.execute(query.sql, query.values)
                    while batch := cursor.fetchmany(_PARQUET_BATCH):
                        yield batch
        except duckdb.IOException as error:
            raise Unavailable(f"{self._paths[0]} …: {_get_first_line(error)}") from error
        except duckdb.Error as error:
            raise LineSourceError(
                f"{', '.join(self._paths[:3])}: not a Parquet file of job lines: "
                f"{_get_first_line(error)}",
                self._paths,
            ) from error

    @staticmethod
    def _split_rows(connection: Any, line_filter: LineFilter) -> Iterator[str]:
        """Yield conditions that split the rows into small parts, in sacct's order.

        DuckDB then skips what the file's statistics exclude, and never sorts more rows than fit in
        memory.
        """
        all_ranges = connection.execute(
            "SELECT cluster, min(job_id), max(job_id), count(job_id) FROM line "
            "WHERE cluster IS NOT NULL GROUP BY cluster HAVING count(job_id) > 0 ORDER BY cluster"
        ).fetchall()
        ranges = [
            range_row
            for range_row in all_ranges
            if not line_filter.clusters or range_row[0] in line_filter.clusters
        ]
        ids: list[int] | None = None
        if line_filter.is_narrow or line_filter.since_us:
            query = build_candidates(line_filter)
            ids = [job_id for (job_id,) in connection.execute(query.sql, query.values).fetchall()]
        for cluster, least, most, count in ranges:
            condition = f"cluster = {_quote_sql(cluster)} AND job_id"
            width = max(1, (most - least + 1) * _ROWS_AT_ONCE // count)
            if ids is not None and len(ids) <= _FEW:
                if ids:
                    ids_sql = ", ".join(map(str, ids))
                    yield f"{condition} BETWEEN {ids[0]} AND {ids[-1]} AND job_id IN ({ids_sql})"
                continue
            first, last = (ids[0], ids[-1]) if ids is not None else (least, most)
            for begin in range(first, last + 1, width):
                yield f"{condition} BETWEEN {begin} AND {begin + width - 1}"

    @staticmethod
    def _make_task_condition(connection: Any, line_filter: LineFilter) -> TaskCondition:
        """Build the condition for array tasks in advance: DuckDB cannot call our functions."""
        arrays = {job.job_id for job in line_filter.jobs or () if job.tasks}
        if not arrays:
            return lambda _: "1 = 0"
        rows = connection.execute(
            f"SELECT DISTINCT array_job_id, array_task FROM line WHERE {HAS_EXPRESSION} "  # noqa: S608 -- numbers
            f"AND array_job_id IN ({', '.join(map(str, arrays))})"
        ).fetchall()

        def holds(tasks: Tasks) -> str:
            names = [f"{array}_{task}" for array, task_ids in tasks.items() for task in task_ids]
            names += [
                f"{array}_{text}"
                for array, text in rows
                if array in tasks and includes_any_task(text, tasks[array])
            ]
            return f"concat(array_job_id, '_', array_task) IN ({', '.join(map(_quote_sql, names))})"

        return holds

    def _make_view(self, connection: Any) -> None:
        """Create a view with the columns and rank of jobs.db."""
        paths_sql = ", ".join(_quote_sql(path) for path in self._paths)
        files = f"read_parquet([{paths_sql}], union_by_name = true)"
        schema = connection.execute(f"DESCRIBE SELECT * FROM {files}").fetchall()  # noqa: S608 -- quoted paths
        present = {row[0] for row in schema}
        if not present >= _KEYED:
            raise LineSourceError(
                f"{', '.join(self._paths[:3])}: not a Parquet file of job lines: the columns "
                "cluster and job_id are missing",
                self._paths,
            )
        columns = ", ".join(_build_column(field, present) for field in USAGE_LINE_FIELDS)
        connection.execute(
            f"CREATE TEMP VIEW line AS SELECT *, {_RANK} AS rank "  # noqa: S608 -- our own names
            f"FROM (SELECT {columns} FROM {files})"
        )


def _build_column(field: str, present: Collection[str]) -> str:
    """Return a column with the type of a line's, and a default where a line always has a value."""
    kind = "VARCHAR" if field in TEXT_FIELDS else "BIGINT"
    value = f'CAST("{field}" AS {kind})' if field in present else f"CAST(NULL AS {kind})"
    if field in _ALWAYS_THERE:
        value = f"coalesce({value}, {_ALWAYS_THERE[field]})"
    return f'{value} AS "{field}"'


def _quote_sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _get_first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class MergedSource:
    """Source that merges jobs.db with the closed days of the job log, to which old jobs have moved.

    Args:
        database: The database; it takes precedence for a run in both.
        parquet: The closed days.
    """

    def __init__(self, database: LineSource, parquet: LineSource) -> None:
        self._database = database
        self._parquet = parquet

    def rows(
        self, line_filter: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """Implement :class:`LineSource`: merge both sources by sacct's order, skip doubled runs."""
        keyed = [*ORDER_COLUMNS, *columns]
        streams = [
            _iter_keyed_rows(source.rows(line_filter, keyed, steps=steps), number)
            for number, source in enumerate((self._database, self._parquet))
        ]
        batch: list[Row] = []
        run: Row = ()
        chosen = 0
        for key, number, row in heapq.merge(*streams):
            if key[:5] != run:
                run, chosen = key[:5], number
            if number != chosen:
                continue
            batch.append(row)
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


def _iter_keyed_rows(batches: Iterable[list[Row]], number: int) -> Iterator[tuple[Row, int, Row]]:
    """Yield each row with its sort key first, for ``heapq.merge``."""
    end = 1 + len(ORDER_COLUMNS)
    for batch in batches:
        for row in batch:
            yield row[1:end], number, (row[0], *row[end:])


SkippedLine = Callable[[str, int, str], None]
"""Callback for each malformed line, with file, line number and reason."""


class LogDay(Protocol):
    """Day of a job log."""

    @property
    def day(self) -> str:
        """Date, such as ``2026-11-21``."""

    @property
    def parquet(self) -> str:
        """Path of the day's Parquet file; "" until the day is closed."""


class JobLog(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that read a job log.

    Attributes:
        read_lines: Yields the lines of a day's file or of a directory, each run before its steps.
        days_in: Lists the days in a directory, oldest first.
    """

    read_lines: Callable[[str, SkippedLine | None], Iterator[UsageLine]]
    days_in: Callable[[str], Sequence[LogDay]]


def load_job_log() -> JobLog:
    """Load the functions that read the job log.

    Raises:
        StewardError: No installed package provides them.
    """
    offer: JobLog = load_offer("steward.job_log", "log")
    return offer


def open_line_source(
    settings: Settings, line_filter: LineFilter, *, duplicates: bool
) -> LineSource:
    """Return Steward's own lines: jobs.db, plus closed days where the query reaches further back.

    Args:
        settings: The whole configuration.
        line_filter: Filter of the query.
        duplicates: Whether former jobs with a reused id are shown too.

    Raises:
        SqliteUnavailable: jobs.db does not exist yet.
    """
    path = JOBS.locate(settings.state_dir)
    database = DatabaseSource(open_reader(path), path)
    expired = database.get_expired_us()
    if line_filter.since_us >= expired or (not duplicates and database.has_all_jobs(line_filter)):
        return database
    paths = list_closed_days(locate_job_log(settings), line_filter.since_us, expired)
    return MergedSource(database, ParquetSource(paths)) if paths else database


def locate_job_log(settings: Settings) -> str:
    """Return JobAcctLoc: the directory of the job log, where plugins write."""
    return settings.accounting.location or f"{settings.state_dir}/joblog"


def list_closed_days(directory: str, since_us: int, before_us: int) -> list[str]:
    """Return the Parquet files of days that may have jobs that ended between two times.

    Args:
        directory: Directory of the job log.
        since_us: Begin, µs since the epoch.
        before_us: End, µs since the epoch.

    Raises:
        Unavailable: The files cannot be read now, or DuckDB is not installed.
    """
    # Days are named in the cluster's zone; one more day on either side covers any zone.
    first = str(from_micros(max(0, since_us - _DAY_US)).date())
    last = str(from_micros(before_us + _DAY_US).date())
    days = [day for day in load_job_log().days_in(directory) if first <= day.day <= last]
    if days and not PARQUET.is_installed:
        raise Unavailable(
            f"{directory}: cannot read the closed days {days[0].day} to {days[-1].day}: "
            f"{PARQUET.missing_error}",
            directory,
        )
    return [day.parquet for day in days if day.parquet]


def open_file_source(path: str) -> LineSource:
    """Open a file as a source: Parquet, a day of a job log, or its directory.

    Raises:
        Unavailable: The file cannot be read.
        LineSourceError: The file is not a job log.
    """
    if not os.path.exists(path):
        raise Unavailable(f"{path}: no such file", path)
    if path.endswith(".parquet"):
        return ParquetSource([path])
    return sort_into_scratch(load_job_log().read_lines(path, None), path)


def sort_into_scratch(lines: Iterable[UsageLine], name: str) -> DatabaseSource:
    """Sort lines in a temporary database.

    Args:
        lines: The lines; the last line of a run replaces earlier ones.
        name: Its name in errors.
    """
    connection = open_scratch(TABLE)
    with translate_errors(name):
        put_lines(connection, lines)
    return DatabaseSource(connection, name)
