"""Where lines come from: jobs.db, closed days as Parquet, a job log. All give the same rows.

A source is asked with a filter and the columns that are wanted, and gives
batches of rows in sacct's order, each with its mark (see
``steward.jobs.line_queries``), so that whoever prints need not know which it was.
"""

import heapq
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, get_type_hints

import msgspec

from steward.accounting.context import AccountingRoom
from steward.accounting.errors import AccountingError, AccountingUnavailable
from steward.accounting.job_log import job_log
from steward.core.drivers import PARQUET
from steward.core.records import FIELDS, Line
from steward.core.sqlite import Connection, SqliteError, open_reader, open_scratch, translated
from steward.jobs import database_path
from steward.jobs.line_queries import (
    EXPRESSION,
    KEY,
    Holds,
    LineFilter,
    Tasks,
    candidates,
    statement,
)
from steward.slurm.arrays import covers_any

_BATCH: Final = 2000
_PARQUET_BATCH: Final = 10_000
_MEMORY: Final = "256MB"
_FEW: Final = 1000
"""So many jobs are looked for by their ids."""
_KEYED: Final = frozenset({"cluster", "job_id"})
_HINTS: Final = get_type_hints(Line)
_ALWAYS_THERE: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(Line)
    # By times and keys a file says which of its rows need not be read: those stay as they are.
    if isinstance(field.default, int) and field.name not in ("end_us", "eligible_us")
} | {"step": "''", "label": "''"}
_ROWS_AT_ONCE: Final = 30_000
_DAY_US: Final = 86_400_000_000

Row = tuple[Any, ...]


class Source(Protocol):
    """Gives lines."""

    def rows(
        self, wanted: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """Batches of rows in sacct's order: the mark, then the columns.

        Args:
            wanted: Which lines.
            columns: SQL for each column.
            steps: Whether lines of steps are wanted.
        """


class Database:
    """The lines in a SQLite database.

    Args:
        connection: The database.
        name: What it is called in errors.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def rows(
        self, wanted: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """See :class:`Source`."""
        with translated(self._name):
            narrow = wanted.is_narrow or wanted.since_us > self._earliest_end()
            tasks = _TasksAsked()
            query = statement(wanted, columns, steps=steps, by_index=narrow, holds=tasks.condition)
            if tasks.sets:
                self._connection.create_function("holds_task", 3, tasks.hold, deterministic=True)
            cursor = self._connection.execute(query.sql, query.values)
            while batch := cursor.fetchmany(_BATCH):
                yield batch

    def expired(self) -> int:
        """Before when ended jobs may have left it, µs since the epoch; 0 if none have."""
        try:
            with translated(self._name):
                found = self._connection.execute("SELECT max(before) FROM expired").fetchone()
        except SqliteError:
            return 0  # made by a Steward that let nothing expire
        return int(found[0] or 0)

    def holds_all(self, wanted: LineFilter) -> bool:
        """Whether every job that was named, by its number alone, is here."""
        ids = {named.job_id for named in wanted.jobs or ()}
        if not ids or any(named.sluid for named in wanted.jobs or ()):
            return False
        listed = ", ".join(map(str, ids))
        statements = [
            f"SELECT {column} FROM line WHERE {column} IN ({listed}) AND step = ''"  # noqa: S608 -- numbers
            for column in ("job_id", "array_job_id", "het_job_id")
        ]
        with translated(self._name):
            found = self._connection.execute(" UNION ".join(statements)).fetchall()
        return ids <= {job_id for (job_id,) in found}

    def _earliest_end(self) -> int:
        (earliest,) = self._connection.execute(
            "SELECT min(end_us) FROM line WHERE step = '' AND end_us > 0"
        ).fetchone()
        return int(earliest or 0)


class _TasksAsked:
    """The array tasks that a statement asks for, kept outside of it for there may be many."""

    def __init__(self) -> None:
        self.sets: list[Tasks] = []

    def condition(self, tasks: Tasks) -> str:
        """The condition that a line is of one of these."""
        self.sets.append(tasks)
        return f"holds_task(array_job_id, array_task, {len(self.sets) - 1})"

    def hold(self, array: int | None, expression: str | None, which: int) -> bool:
        """What that condition calls."""
        tasks = self.sets[which].get(array or 0)
        return bool(tasks and expression) and covers_any(expression or "", tasks or frozenset())


class Parquet:
    """The lines in Parquet files, by DuckDB.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def rows(
        self, wanted: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """See :class:`Source`.

        Raises:
            AccountingError: A file is no Parquet, or not one of ours.
            AccountingUnavailable: A file cannot be read now, or DuckDB is not installed.
        """
        try:
            import duckdb
        except ImportError as error:
            raise AccountingUnavailable(
                f"{self._paths[0]} cannot be read: {PARQUET.missing}", self._paths[0]
            ) from error

        try:
            with duckdb.connect(config={"memory_limit": _MEMORY, "threads": 1}) as connection:
                self._make_view(connection)
                holds = self._holds(connection, wanted)
                for only in self._parts(connection, wanted):
                    query = statement(
                        wanted, columns, steps=steps, by_index=False, only=only, holds=holds
                    )
                    cursor = connection.execute(query.sql, query.values)
                    while batch := cursor.fetchmany(_PARQUET_BATCH):
                        yield batch
        except duckdb.IOException as error:
            raise AccountingUnavailable(f"{self._paths[0]} …: {_first_line(error)}") from error
        except duckdb.Error as error:
            raise AccountingError(
                f"{', '.join(self._paths[:3])}: no Parquet of lines: {_first_line(error)}",
                self._paths,
            ) from error

    @staticmethod
    def _parts(connection: Any, wanted: LineFilter) -> Iterator[str]:
        """Conditions on numbers, one after the other in sacct's order, each of few rows.

        DuckDB passes over what a file says that it does not hold, and sorts no more at a
        time than there is room for.
        """
        counted = connection.execute(
            "SELECT cluster, min(job_id), max(job_id), count(job_id) FROM line "
            "WHERE cluster IS NOT NULL GROUP BY cluster HAVING count(job_id) > 0 ORDER BY cluster"
        ).fetchall()
        meant = [of for of in counted if not wanted.clusters or of[0] in wanted.clusters]
        ids: list[int] | None = None
        if wanted.is_narrow or wanted.since_us:
            query = candidates(wanted)
            ids = [job_id for (job_id,) in connection.execute(query.sql, query.values).fetchall()]
        for cluster, least, most, count in meant:
            here = f"cluster = {_quoted(cluster)} AND job_id"
            width = max(1, (most - least + 1) * _ROWS_AT_ONCE // count)
            if ids is not None and len(ids) <= _FEW:
                if ids:
                    listed = ", ".join(map(str, ids))
                    yield f"{here} BETWEEN {ids[0]} AND {ids[-1]} AND job_id IN ({listed})"
                continue
            first, last = (ids[0], ids[-1]) if ids is not None else (least, most)
            for begin in range(first, last + 1, width):
                yield f"{here} BETWEEN {begin} AND {begin + width - 1}"

    @staticmethod
    def _holds(connection: Any, wanted: LineFilter) -> Holds:
        """What holds a task, found out beforehand: DuckDB knows no functions of ours."""
        arrays = {named.job_id for named in wanted.jobs or () if named.tasks}
        if not arrays:
            return lambda _: "1 = 0"
        rows = connection.execute(
            f"SELECT DISTINCT array_job_id, array_task FROM line WHERE {EXPRESSION} "  # noqa: S608 -- numbers
            f"AND array_job_id IN ({', '.join(map(str, arrays))})"
        ).fetchall()

        def holds(tasks: Tasks) -> str:
            names = [f"{array}_{task}" for array, of in tasks.items() for task in of]
            names += [
                f"{array}_{text}"
                for array, text in rows
                if array in tasks and covers_any(text, tasks[array])
            ]
            return f"concat(array_job_id, '_', array_task) IN ({', '.join(map(_quoted, names))})"

        return holds

    def _make_view(self, connection: Any) -> None:
        """Name the files' rows as jobs.db does: their columns, and their rank."""
        listed = ", ".join(_quoted(path) for path in self._paths)
        files = f"read_parquet([{listed}], union_by_name = true)"
        described = connection.execute(f"DESCRIBE SELECT * FROM {files}").fetchall()  # noqa: S608 -- quoted paths
        there = {row[0] for row in described}
        if not there >= _KEYED:
            raise AccountingError(
                f"{', '.join(self._paths[:3])}: no Parquet of lines: "
                "each has a cluster and a job_id",
                self._paths,
            )
        rank = (
            "CASE step WHEN '' THEN -1000000 WHEN 'interactive' THEN -6 "
            "WHEN 'batch' THEN -5 WHEN 'extern' THEN -4 "
            "ELSE coalesce(TRY_CAST(split_part(step, '+', 1) AS BIGINT), -1) END"
        )
        columns = ", ".join(_column(field, there) for field in FIELDS)
        connection.execute(
            f"CREATE TEMP VIEW line AS SELECT *, {rank} AS rank "  # noqa: S608 -- our own names
            f"FROM (SELECT {columns} FROM {files})"
        )


def _column(field: str, there: Collection[str]) -> str:
    """A column of the type that a line's has, and a value where a line always has one."""
    kind = "VARCHAR" if _HINTS[field] is str else "BIGINT"
    value = f'CAST("{field}" AS {kind})' if field in there else f"CAST(NULL AS {kind})"
    if field in _ALWAYS_THERE:
        value = f"coalesce({value}, {_ALWAYS_THERE[field]})"
    return f'{value} AS "{field}"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class Both:
    """What is in the database, and what has left it for the job log's closed days.

    Args:
        database: The database: what it holds goes before.
        parquet: The closed days.
    """

    def __init__(self, database: Source, parquet: Source) -> None:
        self._database = database
        self._parquet = parquet

    def rows(
        self, wanted: LineFilter, columns: Sequence[str], *, steps: bool
    ) -> Iterator[list[Row]]:
        """See :class:`Source`."""
        keyed = [*KEY, *columns]
        streams = [
            _flat(source.rows(wanted, keyed, steps=steps), number)
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


def _flat(batches: Iterable[list[Row]], number: int) -> Iterator[tuple[Row, int, Row]]:
    """Each row with its key in front, which ``heapq.merge`` compares."""
    end = 1 + len(KEY)
    for batch in batches:
        for row in batch:
            yield row[1:end], number, (row[0], *row[end:])


def books(room: AccountingRoom, wanted: LineFilter, *, duplicates: bool) -> Source:
    """What a Steward knows: jobs.db, and closed days where it does not reach back so far.

    Args:
        room: Knows where they lie.
        wanted: What will be asked.
        duplicates: Whether former jobs of an id are wanted, too.

    Raises:
        SqliteUnavailable: There is no jobs.db yet.
    """
    path = database_path(room.settings.state_dir)
    database = Database(open_reader(path), path)
    expired = database.expired()
    if wanted.since_us >= expired or (not duplicates and database.holds_all(wanted)):
        return database
    paths = closed_days(joblog_of(room), wanted.since_us, expired)
    return Both(database, Parquet(paths)) if paths else database


def joblog_of(room: AccountingRoom) -> str:
    """The directory of the job log."""
    settings = room.settings
    return settings.accounting.location or f"{settings.state_dir}/joblog"


def closed_days(directory: str, since_us: int, before_us: int) -> list[str]:
    """The Parquet files of the days that may hold what ended between two times.

    Args:
        directory: Of the job log.
        since_us: µs since the epoch.
        before_us: Likewise.

    Raises:
        AccountingUnavailable: They cannot be read now, or DuckDB is not installed.
    """
    from steward.core.timestamps import moment

    # A day's name is that of the cluster's zone: a day more on either side holds any zone's.
    first = str(moment(max(0, since_us - _DAY_US)).date())
    last = str(moment(before_us + _DAY_US).date())
    days = [day for day in job_log().days_in(directory) if first <= day.day <= last]
    if days and not PARQUET.is_installed:
        raise AccountingUnavailable(
            f"{directory}: the closed days {days[0].day} to {days[-1].day} cannot be read: "
            f"{PARQUET.missing}",
            directory,
        )
    return [day.parquet for day in days if day.parquet]


def file_source(path: str) -> Source:
    """The lines of a file: Parquet, or a job log (a day of it, or its whole directory).

    Raises:
        AccountingUnavailable: It cannot be read.
        AccountingError: It is no job log.
    """
    if not os.path.exists(path):
        raise AccountingUnavailable(f"{path}: there is no such file", path)
    if path.endswith(".parquet"):
        return Parquet([path])
    return scratch_of(job_log().read_lines(path, None), path)


def scratch_of(lines: Iterable[Line], name: str) -> Database:
    """Lines put in order in a database that is gone with the process.

    Args:
        lines: Of a run the last that comes counts.
        name: What they are called in errors.
    """
    from steward.jobs.lines import TABLE, put_lines

    connection = open_scratch(TABLE)
    with translated(name):
        put_lines(connection, lines)
    return Database(connection, name)
