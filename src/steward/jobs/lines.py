"""Accounting lines in jobs.db: the table ``line``, and the sums of launches it is made of.

A line (:class:`steward.core.records.UsageLine`) is what sacct shows of a run or step. Lines are
made when events arrive, not when somebody asks. :func:`sum_launch` and :func:`sum_reports` make the
:class:`LaunchUsage` of one launch; the second half of the module creates, reads and writes the
table.

The primary key is sacct's order: by job id, each run before its steps. So a complete listing is
one scan without a sort.
"""

import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from steward.core.records import USAGE_LINE_FIELDS, UsageLine
from steward.core.sqlite import Connection
from steward.core.usage import StepEnd, StepStart, StepUsage, TaskUsage

MAX_INTEGER: Final = 2**63 - 1
"""Largest integer of SQLite and Parquet; larger sums are cut to it."""

Maximum = tuple[int | None, str, int | None]
"""Maximum: value (None if unknown), node and task."""


class LaunchUsage(msgspec.Struct, frozen=True, array_like=True):
    """Resources that one launch used.

    Attributes:
        node: NodeName.
        launched_us: Launch time, µs since the epoch.
        ended_us: End time, µs since the epoch; None if not reported.
        lacks_start: Whether no start was reported.
        name: Name of the program.
        started: Number of tasks to run on the node; 0 if unknown.
        ended_tasks: Number of ended tasks by the node's own count; 0 if unknown.
        known: Number of tasks with reported usage.
        cpus: CPUs allocated to it.
        memory_bytes: Memory limit; None if not set.
        status: Highest wait status of a task; None if unknown.
        user_us: User CPU time of the tasks, µs; None if unknown.
        system_us: System CPU time of the tasks, µs.
        cgroup_us: User and system CPU time of the cgroup, µs, if it exceeds the tasks'.
        min_cpu_us: Minimum CPU time of a task, µs.
        min_cpu_task: The task with that CPU time.
        max_rss_bytes: Largest peak memory of a process.
        max_rss_task: The task with that peak; None if it is unknown which.
        rss_sum: Sum of the known peaks of tasks.
        rss_known: Number of those peaks.
        peak_bytes: Peak of all processes together. Without a cgroup: the largest process's, a
            lower bound.
        minor_faults: Page faults without I/O.
        max_pages: Maximum of page faults with I/O in a task.
        max_pages_task: The task with that maximum.
        pages_sum: Sum of page faults with I/O.
        max_read: Maximum bytes read by a task.
        max_read_task: The task with that maximum.
        task_read_sum: Bytes read by all tasks.
        read_bytes: Bytes read by the cgroup if that is more, else by all tasks.
        max_written: Maximum bytes written by a task.
        max_written_task: The task with that maximum.
        task_written_sum: Bytes written by all tasks.
        written_bytes: Bytes written by the cgroup if that is more, else by all tasks.
        lost: Lines that the node could not write.
        uid: Uid of its user as the node reported it, or None.
    """

    node: str
    launched_us: int
    ended_us: int | None = None
    lacks_start: bool = False
    name: str = ""
    started: int = 0
    ended_tasks: int = 0
    known: int = 0
    cpus: int = 0
    memory_bytes: int | None = None
    status: int | None = None
    user_us: int | None = None
    system_us: int | None = None
    cgroup_us: tuple[int, int] | None = None
    min_cpu_us: int | None = None
    min_cpu_task: int | None = None
    max_rss_bytes: int | None = None
    max_rss_task: int | None = None
    rss_sum: int = 0
    rss_known: int = 0
    peak_bytes: int | None = None
    minor_faults: int | None = None
    max_pages: int | None = None
    max_pages_task: int | None = None
    pages_sum: int = 0
    max_read: int | None = None
    max_read_task: int | None = None
    task_read_sum: int = 0
    read_bytes: int | None = None
    max_written: int | None = None
    max_written_task: int | None = None
    task_written_sum: int = 0
    written_bytes: int | None = None
    lost: int = 0
    uid: int | None = None

    @property
    def cpu_time_us(self) -> tuple[int | None, int | None]:
        """User and system CPU time: the cgroup's if it exceeds the tasks', else the tasks'."""
        return self.cgroup_us or (self.user_us, self.system_us)

    def get_maximum(self, name: str) -> tuple[int | None, int | None]:
        """Return a maximum and its task; `name` is a maximum such as ``max_rss``."""
        value = self.max_rss_bytes if name == "max_rss" else getattr(self, name)
        return value, getattr(self, f"{name}_task")


def sum_launch(launch: StepUsage) -> LaunchUsage:
    """Sum up what a launch used."""
    return sum_reports(
        launch.node, launch.launched_us, launch.ended_us, launch.start, launch.tasks, launch.end
    )


def sum_reports(
    node: str,
    launched_us: int,
    ended_us: int | None,
    start: StepStart | None,
    tasks: Sequence[TaskUsage],
    end: StepEnd | None,
) -> LaunchUsage:
    """Sum up a launch from its parts: reports of its start, its tasks and its end."""
    usage = LaunchUsage(
        node=node,
        launched_us=launched_us,
        ended_us=ended_us if end is not None else None,
        lacks_start=start is None,
        name=start.name if start else "",
        started=start.tasks if start else 0,
        ended_tasks=end.tasks if end else 0,
        known=len(tasks),
        cpus=start.cpus if start else 0,
        memory_bytes=start.memory_bytes if start else None,
        lost=end.lost if end else 0,
        uid=start.uid if start else None,
    )
    changes = _sum_tasks(tasks) if tasks else {}
    if end is not None:
        changes |= _sum_node(end, tasks, changes)
    return msgspec.structs.replace(usage, **changes) if changes else usage


def _sum_tasks(tasks: Sequence[TaskUsage]) -> dict[str, object]:
    """Sum up the usage of tasks."""
    peaks = [(task.max_rss_bytes, "", task.task) for task in tasks if task.max_rss_bytes]
    rss, _, rss_task = find_maximum(peaks)
    pages, _, pages_task = find_maximum((task.major_faults, "", task.task) for task in tasks)
    read, _, read_task = find_maximum((task.read_bytes, "", task.task) for task in tasks)
    written, _, written_task = find_maximum((task.written_bytes, "", task.task) for task in tasks)
    cpu, _, cpu_task = find_minimum(
        (sum_known((task.user_us, task.system_us)), "", task.task) for task in tasks
    )
    total_read = sum_known(task.read_bytes for task in tasks)
    total_written = sum_known(task.written_bytes for task in tasks)
    return {
        "status": max(task.status for task in tasks),
        "user_us": sum_known(task.user_us for task in tasks),
        "system_us": sum_known(task.system_us for task in tasks),
        "min_cpu_us": cpu,
        "min_cpu_task": cpu_task,
        "max_rss_bytes": rss,
        "max_rss_task": rss_task,
        "rss_sum": sum_known(peak for peak, _, _ in peaks) or 0,
        "rss_known": len(peaks),
        "peak_bytes": rss,
        "minor_faults": sum_known(task.minor_faults for task in tasks),
        "max_pages": pages,
        "max_pages_task": pages_task,
        "pages_sum": sum_known(task.major_faults for task in tasks),
        "max_read": read,
        "max_read_task": read_task,
        "task_read_sum": total_read,
        "read_bytes": total_read,
        "max_written": written,
        "max_written_task": written_task,
        "task_written_sum": total_written,
        "written_bytes": total_written,
    }


def _sum_node(
    end: StepEnd, tasks: Sequence[TaskUsage], task_sums: dict[str, object]
) -> dict[str, object]:
    """Return what the end report adds: the node's peak and the cgroup's totals."""
    changes: dict[str, object] = {}
    rss = task_sums.get("max_rss_bytes")
    is_only = end.tasks == 1 and len(tasks) == 1
    if end.max_rss_bytes is not None and (not isinstance(rss, int) or end.max_rss_bytes > rss):
        changes["max_rss_bytes"] = end.max_rss_bytes
        changes["max_rss_task"] = tasks[0].task if is_only else None
        if is_only:
            changes["rss_sum"], changes["rss_known"] = end.max_rss_bytes, 1
    # Without a cgroup, the peak of all processes is unknown; the largest one's is a lower bound.
    largest = changes.get("max_rss_bytes", rss)
    changes["peak_bytes"] = end.peak_bytes if end.peak_bytes is not None else largest
    if end.cgroup_user_us is not None and end.cgroup_system_us is not None:
        task_cpu_us = sum(task.user_us + task.system_us for task in tasks)
        if end.cgroup_user_us + end.cgroup_system_us > task_cpu_us:
            changes["cgroup_us"] = (end.cgroup_user_us, end.cgroup_system_us)
    for name, cgroup_bytes in (
        ("read_bytes", end.cgroup_read_bytes),
        ("written_bytes", end.cgroup_written_bytes),
    ):
        task_bytes = task_sums.get(name)
        if cgroup_bytes is not None and (
            not isinstance(task_bytes, int) or cgroup_bytes > task_bytes
        ):
            changes[name] = cgroup_bytes
    return changes


def find_maximum(values: Iterable[Maximum]) -> Maximum:
    """Return the largest value; of equal ones the lowest task, on the first node."""
    best: Maximum = (None, "", None)
    for candidate in values:
        if candidate[0] is not None and (best[0] is None or _sort_key(candidate) < _sort_key(best)):
            best = candidate
    return best


def find_minimum(values: Iterable[Maximum]) -> Maximum:
    """Return the smallest value; of equal ones the lowest task, on the first node."""
    value, node, task = find_maximum(
        (None if candidate[0] is None else -candidate[0], *candidate[1:]) for candidate in values
    )
    return (None if value is None else -value), node, task


def sum_known(values: Iterable[int | None]) -> int | None:
    """Sum the known values, at most :data:`MAX_INTEGER`; None if none is known."""
    known = [value for value in values if value is not None]
    return min(sum(known), MAX_INTEGER) if known else None


def _sort_key(maximum: Maximum) -> tuple[int, int, str]:
    """Return the sort key of a maximum: largest value, lowest task, first node."""
    value, node, task = maximum
    return -(value or 0), -1 if task is None else task, node


RUN_RANK: Final = -1_000_000
"""Rank of a run's own line: before all its steps."""

STEP_RANKS: Final = {"": RUN_RANK, "interactive": -6, "batch": -5, "extern": -4}
"""Ranks of steps without a number, see :func:`rank_step`."""

TEXT_FIELDS: Final = frozenset(
    name for name, hint in typing.get_type_hints(UsageLine).items() if hint is str
)
"""Fields of a UsageLine that are text; all others are integers."""

_NUMBERED: Final = re.compile(r"([0-9]{1,10})(?:\+[0-9]{1,10})?")
_KEY: Final = ("cluster", "job_id", "submit_us", "restarts", "piece_us", "rank", "step")
_TEXTS: Final = tuple(field in TEXT_FIELDS and field not in _KEY for field in USAGE_LINE_FIELDS)

COLUMNS: Final = ", ".join(f'"{field}"' for field in USAGE_LINE_FIELDS)
"""All fields of a UsageLine in order, for a SELECT that :func:`row_to_line` reads."""


def _declare_column(field: str) -> str:
    """Return the SQL declaration of a column."""
    sql_type = "TEXT" if field in TEXT_FIELDS else "INTEGER"
    constraint = " NOT NULL" if field in _KEY else ""
    return f'"{field}" {sql_type}{constraint}'


TABLE: Final = f"""
    CREATE TABLE line (
        rank INTEGER NOT NULL,
        {", ".join(map(_declare_column, USAGE_LINE_FIELDS))},
        PRIMARY KEY ({", ".join(_KEY)})
    ) WITHOUT ROWID;
    CREATE INDEX line_by_end ON line (end_us, start_us, eligible_us, source) WHERE step = '';
    CREATE INDEX line_by_uid ON line (uid, end_us) WHERE step = '';
    CREATE INDEX line_by_user ON line (user, end_us) WHERE step = '';
    CREATE INDEX line_by_account ON line (account, end_us) WHERE step = '';
    CREATE INDEX line_by_id ON line (job_id) WHERE step = '';
    CREATE INDEX line_by_array ON line (array_job_id) WHERE array_job_id <> 0 AND step = '';
    CREATE INDEX line_by_het ON line (het_job_id) WHERE het_job_id <> 0 AND step = '';
"""
"""Schema of the table. Indexes cover only lines of runs; steps lie next to them."""

STATE_INDEX: Final = """
    CREATE INDEX line_by_state ON line (state, end_us) WHERE step = '' AND state <> 'COMPLETED';
"""
"""Index of a later migration. Most runs complete, and the index of ends finds these as fast."""

_PUT: Final = (
    f"INSERT OR REPLACE INTO line (rank, {COLUMNS}) "  # noqa: S608 -- our own column names
    f"VALUES ({', '.join('?' * (len(USAGE_LINE_FIELDS) + 1))})"
)

_FIRST_USED: Final = USAGE_LINE_FIELDS.index("user_us")
_LAST_USED: Final = USAGE_LINE_FIELDS.index("minor_faults") + 1
_UNUSED: Final = msgspec.structs.astuple(UsageLine(cluster="", job_id=0, label=""))[
    _FIRST_USED:_LAST_USED
]
_COLUMNS_WITHOUT_USAGE: Final = (*USAGE_LINE_FIELDS[:_FIRST_USED], *USAGE_LINE_FIELDS[_LAST_USED:])
_QUOTED_WITHOUT_USAGE: Final = ", ".join(f'"{field}"' for field in _COLUMNS_WITHOUT_USAGE)
_PUT_WITHOUT_USAGE: Final = (
    f"INSERT OR REPLACE INTO line (rank, {_QUOTED_WITHOUT_USAGE}) "  # noqa: S608 -- our own column names
    f"VALUES ({', '.join('?' * (len(_COLUMNS_WITHOUT_USAGE) + 1))})"
)
"""Statement for lines without usage, such as pending jobs: it omits all usage columns."""

_WHERE_RUN: Final = "WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"
_USAGE_COLUMNS: Final = (
    *("cluster", "job_id", "label", "step", "piece_us", "tasks", "doubts"),
    *USAGE_LINE_FIELDS[_FIRST_USED:_LAST_USED],
)
_SUMMED_TEXTS: Final = tuple(field in TEXT_FIELDS for field in _USAGE_COLUMNS)
_STEPS: Final = f"SELECT {', '.join(_USAGE_COLUMNS)} FROM line {_WHERE_RUN} AND step <> ''"  # noqa: S608 -- our own columns
_DROP: Final = f"DELETE FROM line {_WHERE_RUN}"  # noqa: S608 -- our own condition

FullRunKey = tuple[int, int, int]
"""Job id, submit time (µs since the epoch) and restart count of a run."""

_to_tuple = msgspec.structs.astuple


def rank_step(step: str) -> int:
    """Return the position of a step within its run, in Slurm's order."""
    rank = STEP_RANKS.get(step)
    if rank is not None:
        return rank
    match = _NUMBERED.fullmatch(step)
    return int(match[1]) if match else -1


def line_to_row(line: UsageLine) -> tuple[Any, ...]:
    """Convert a line to a row: its rank, then its fields."""
    fields = zip(_TEXTS, _to_tuple(line), strict=True)
    return (
        rank_step(line.step),
        *[None if is_text and not value else value for is_text, value in fields],
    )


def row_to_line(row: Sequence[Any]) -> UsageLine:
    """Convert a row with :data:`COLUMNS` to a line."""
    fields: dict[str, Any] = {
        field: "" if is_text and value is None else value
        for field, is_text, value in zip(USAGE_LINE_FIELDS, _TEXTS, row, strict=True)
    }
    return UsageLine(**fields)


def load_step_usage(connection: Connection, cluster: str, run: FullRunKey) -> list[UsageLine]:
    """Read the step lines of a run with their usage fields only, as there may be thousands.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        run: Job id, submit time and restart count of the run.
    """
    lines = []
    for row in connection.execute(_STEPS, (cluster, *run)):
        fields: dict[str, Any] = {
            field: "" if is_text and value is None else value
            for field, is_text, value in zip(_USAGE_COLUMNS, _SUMMED_TEXTS, row, strict=True)
        }
        lines.append(UsageLine(**fields))
    return lines


def drop_lines(connection: Connection, cluster: str, runs: Iterable[FullRunKey]) -> None:
    """Delete the lines of these runs, with their steps and pieces."""
    connection.executemany(_DROP, [(cluster, *run) for run in runs])


def add_missing_columns(connection: Connection) -> None:
    """Add the columns that UsageLine gained since the table was created."""
    existing = {row[1] for row in connection.execute("PRAGMA table_info(line)")}
    for field in USAGE_LINE_FIELDS:
        if field not in existing:
            connection.execute(f"ALTER TABLE line ADD COLUMN {_declare_column(field)}")


def list_stored_clusters(connection: Connection, table: str) -> list[str]:
    """Return the clusters in a table, with one index step for each, however many rows it has."""
    statement = (
        "WITH RECURSIVE known (name) AS (SELECT min(cluster) FROM {0} UNION ALL "
        "SELECT (SELECT min(cluster) FROM {0} WHERE cluster > known.name) FROM known "
        "WHERE name IS NOT NULL) SELECT name FROM known WHERE name IS NOT NULL"
    )
    return [name for (name,) in connection.execute(statement.format(table))]


def put_lines(connection: Connection, lines: Iterable[UsageLine]) -> None:
    """Insert or replace lines, inside a transaction."""
    with_usage: list[tuple[Any, ...]] = []
    without_usage: list[tuple[Any, ...]] = []
    for line in lines:
        row = line_to_row(line)
        if line.user_us is None and _to_tuple(line)[_FIRST_USED:_LAST_USED] == _UNUSED:
            without_usage.append((*row[: _FIRST_USED + 1], *row[_LAST_USED + 1 :]))
        else:
            with_usage.append(row)
    for statement, rows in ((_PUT, with_usage), (_PUT_WITHOUT_USAGE, without_usage)):
        if not rows:
            continue
        try:
            connection.executemany(statement, rows)
        except OverflowError:
            # A number out of range must not cost a job its line.
            connection.executemany(statement, [_clamp_row(row) for row in rows])


def _clamp_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row with its integers cut to the range of SQLite."""
    return tuple(
        max(-MAX_INTEGER, min(value, MAX_INTEGER)) if isinstance(value, int) else value
        for value in row
    )
