"""Queries on accounting lines: a filter as SQL for both SQLite and DuckDB.

:class:`LineFilter` says which lines; :func:`build_statement` builds the SELECT,
:func:`build_candidates` a cheap superset of job ids. ``steward sacct`` and reports use them on
jobs.db and on Parquet files.

The filter is decided on a run's own line; its steps follow it. So each row carries a *mark*
(:data:`HIDDEN_RUN` to :data:`HIDDEN_STEP`) with that decision, and rows come in sacct's order: the
reader skips the steps of a skipped run. Values are bound; only numbers are written into the SQL
text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from steward.core.errors import UsageError
from steward.jobs.filters import NOTHING, JobScope, build_scope_condition, join_or
from steward.slurm.job_states import PENDING, WAITING

HIDDEN_RUN: Final = 0
SHOWN_RUN: Final = 1
UNNAMED_RUN: Final = 2
"""Mark of a run that matches only because one of its steps was named."""
SHOWN_PIECE: Final = 3
UNNAMED_PIECE: Final = 4
SHOWN_STEP: Final = 5
HIDDEN_STEP: Final = 6

_COMMON_STATES: Final = frozenset({"PENDING", "RUNNING", "SUSPENDED", "COMPLETED"})
"""States without an index: those of the window, see :func:`_match_state`, and the commonest."""

MAX_NAMED_JOBS: Final = 20_000
"""Maximum number of jobs and steps named in one query."""

ORDER_COLUMNS: Final = ("cluster", "job_id", "submit_us", "restarts", "piece_us", "rank", "step")
"""Columns that define sacct's order; ``rank`` puts a run before its steps."""

HAS_EXPRESSION: Final = (
    "(instr(array_task, '-') + instr(array_task, ',') + instr(array_task, '%')) > 0"
)
"""Condition that a line stands for several array tasks, under one task expression."""

_MAX_STATEMENT_CHARS: Final = 4_000_000
"""Maximum length of a statement, in characters; a longer one would need too much memory."""

Tasks = Mapping[int, frozenset[int]]
"""Array tasks by the array's job id."""

TaskCondition = Callable[[Tasks], str]
"""Builds the condition that a line is one of these tasks or has an expression with one."""


class NamedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job or step named by a user.

    Attributes:
        job_id: Number before any sign; 0 for a SLUID.
        tasks: Array tasks; empty for the job or the whole array.
        offset: Het component, or None.
        sluid: The SLUID; "" for a number.
        step: The step; "" for the job with all steps.
    """

    job_id: int = 0
    tasks: tuple[int, ...] = ()
    offset: int | None = None
    sluid: str = ""
    step: str = ""


class NumberRange(msgspec.Struct, frozen=True):
    """Range of numbers, both ends included."""

    least: int
    most: int


class LineFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of lines. Several values of one kind mean any of them; several kinds must all match.

    Attributes:
        clusters: Cluster names.
        scopes: Visible lines by cluster; None for everyone's.
        jobs: Named jobs and steps; None for any.
        users: User names, combined with ``uids`` by OR.
        uids: Uids.
        groups: Group names, combined with ``gids`` by OR.
        gids: Gids.
        names: Exact job names.
        reasons: Last pending reasons.
        constraints: Features that were all requested.
        flags: Job flags, of which a job has at least one.
        nodes: Range of the number of nodes.
        cpus: Range of the number of CPUs.
        time_limit_s: Range of time limits, in seconds.
        since_us: Begin of the time window, µs since the epoch.
        until_us: End of the time window.
        states: States at some time of the window; any if empty.
        node_names: Nodes of which a run had at least one: they narrow the candidates only, the
            reader tests each row's node list.
        eligible_only: Skip jobs that were never eligible, unless states are given.
        whole_hetjob: Show all components (True) or only the named ones (False) of a het job; None
            shows all if the leader was named.
    """

    clusters: tuple[str, ...] = ()
    scopes: Mapping[str, JobScope] | None = None
    jobs: tuple[NamedJob, ...] | None = None
    users: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    gids: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    wckeys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    nodes: NumberRange | None = None
    cpus: NumberRange | None = None
    time_limit_s: NumberRange | None = None
    since_us: int = 0
    until_us: int = 0
    states: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    eligible_only: bool = True
    whole_hetjob: bool | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether an index finds the few matching lines faster than a scan."""
        owners = self.users or self.uids or self.accounts
        return bool(self.jobs or owners or self.node_names) or self.has_rare_states

    @property
    def has_rare_states(self) -> bool:
        """Whether only runs in states of the index of states match, as most runs complete."""
        return bool(self.states) and not _COMMON_STATES.intersection(self.states)


class LineQuery(msgspec.Struct, frozen=True, kw_only=True):
    """SQL statement with its values, bound as ``$name``."""

    sql: str
    values: dict[str, Any]


class _NamedBinder:
    """Binder for SQLite and DuckDB; numbers are written into the SQL."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self._names: dict[object, str] = {}

    def bind(self, value: object) -> str:
        """Return the name of a value; equal values are bound once, as their number is limited."""
        name = self._names.setdefault(value, f"v{len(self.bound)}")
        self.bound[name] = value
        return f"${name}"

    def match_any(self, column: str, values: Iterable[object]) -> str:
        """Return the condition that a column has one of these values."""
        placeholders = [str(value) if type(value) is int else self.bind(value) for value in values]
        return (
            f"{column} = {placeholders[0]}"
            if len(placeholders) == 1
            else f"{column} IN ({_join_list(placeholders)})"
        )


def build_statement(
    line_filter: LineFilter,
    columns: Sequence[str],
    *,
    table: str = "line",
    steps: bool = True,
    by_index: bool = True,
    extra_condition: str = "",
    match_tasks: TaskCondition,
) -> LineQuery:
    """Build the query for a filter, in sacct's order: the mark, then the columns.

    Args:
        line_filter: The filter.
        columns: SQL of each column after the mark.
        table: A table, or a source that DuckDB reads.
        steps: Include lines of steps.
        by_index: Find the runs by an index first, then their steps. Otherwise scan every row,
            which is faster if most match.
        extra_condition: Additional condition without text values.
        match_tasks: Builds the source's condition for array tasks.

    Raises:
        UsageError: Too many jobs are named.
    """
    binder = _NamedBinder()
    conditions = _build_scope(line_filter, binder)
    run_condition, shown_condition = _build_run_condition(line_filter, binder, table, match_tasks)
    if by_index:
        conditions.append(f"job_id IN ({_select_candidates(line_filter, binder, table)})")
    if extra_condition:
        conditions.append(extra_condition)
    if not steps:
        # Without steps, rows need no mark to follow their run.
        conditions += [_IS_RUN, run_condition]
    order = _join_list(ORDER_COLUMNS)
    selected = _join_list([_build_mark(run_condition if steps else "", shown_condition), *columns])
    sql = (
        f"SELECT {selected} FROM {table} "  # noqa: S608 -- bound values
        f"WHERE {_join_and(conditions)} ORDER BY {order}"
    )
    if len(sql) > _MAX_STATEMENT_CHARS:
        raise UsageError("too many jobs and steps for one request: name fewer")
    return LineQuery(sql=sql, values=binder.bound)


def build_columns_condition(line_filter: LineFilter) -> LineQuery:
    """Build the condition on cluster, owner, account, partition and QOS, without times."""
    binder = _NamedBinder()
    parts = [*_build_scope(line_filter, binder), *_match_line_columns(line_filter, binder)]
    return LineQuery(sql=_join_and(parts), values=binder.bound)


def build_candidates(line_filter: LineFilter, *, table: str = "line") -> LineQuery:
    """Build the query for a superset of the matching job ids."""
    binder = _NamedBinder()
    candidates = _select_candidates(line_filter, binder, table)
    return LineQuery(
        sql=f"SELECT DISTINCT job_id FROM ({candidates}) ORDER BY job_id",  # noqa: S608 -- bound values
        values=binder.bound,
    )


def _build_mark(run_condition: str, shown_condition: str) -> str:
    """Return the SQL of a row's mark; without a condition, all rows are runs that match."""

    def either(yes: int, no: int) -> str:
        return (
            str(yes)
            if shown_condition == _ALWAYS
            else f"CASE WHEN {shown_condition} THEN {yes} ELSE {no} END"
        )

    mark = (
        f"CASE WHEN piece_us <> 0 THEN {either(SHOWN_PIECE, UNNAMED_PIECE)} "
        f"ELSE {either(SHOWN_RUN, UNNAMED_RUN)} END"
    )
    if not run_condition:
        return mark
    return (
        f"CASE WHEN {_IS_RUN} THEN CASE WHEN coalesce({run_condition}, {NOTHING}) THEN {mark} "
        f"ELSE {HIDDEN_RUN} END ELSE {either(SHOWN_STEP, HIDDEN_STEP)} END"
    )


_IS_RUN: Final = "step = ''"
_ALWAYS: Final = "1 = 1"


def _build_scope(line_filter: LineFilter, binder: _NamedBinder) -> list[str]:
    """Return the conditions that apply to runs and steps alike."""
    parts = []
    if line_filter.clusters:
        parts.append(binder.match_any("cluster", line_filter.clusters))
    if line_filter.scopes is not None:
        parts.append(build_scope_condition(line_filter.scopes, binder))
    return parts


def _select_candidates(line_filter: LineFilter, binder: _NamedBinder, table: str) -> str:
    """Build the SELECT for a superset of the matching job ids, one index for each part."""
    if line_filter.jobs is not None:
        parts = _match_named_ids(line_filter.jobs, binder)
        if line_filter.whole_hetjob:
            ids = [named.job_id for named in line_filter.jobs] or [0]
            leaders = f"SELECT het_job_id FROM {table} WHERE {binder.match_any('job_id', ids)}"  # noqa: S608 -- bound values
            parts.append(f"het_job_id <> 0 AND het_job_id IN ({leaders})")
    else:
        user_columns = {"uid": line_filter.uids, '"user"': line_filter.users}
        parts = [
            binder.match_any(column, chosen) for column, chosen in user_columns.items() if chosen
        ]
        if not parts and line_filter.accounts:
            parts = [binder.match_any("account", line_filter.accounts)]
        # Whatever the state: jobs that ended before the window or came after it are outside.
        ends = f"end_us >= {line_filter.since_us}"
        if not parts and line_filter.node_names:
            return _select_candidates_of_nodes(line_filter, binder, table)
        if not parts and line_filter.has_rare_states:
            states = binder.match_any("state", line_filter.states)
            parts = [f"state <> 'COMPLETED' AND {states}"]
            ends = f"end_us BETWEEN {line_filter.since_us} AND {line_filter.until_us}"
        parts = [
            f"{part} AND {end_condition} AND eligible_us <= {line_filter.until_us}"
            for part in parts or [_ALWAYS]
            for end_condition in (ends, "end_us = 0")
        ]
    return " UNION ALL ".join(
        f"SELECT job_id FROM {table} WHERE {_IS_RUN} AND {part}"  # noqa: S608 -- bound values
        for part in parts
    )


def _select_candidates_of_nodes(line_filter: LineFilter, binder: _NamedBinder, table: str) -> str:
    """Build the SELECT for the job ids of nodes: ended runs by the node index, and unended ones."""
    conditions = [binder.match_any("name", line_filter.node_names)]
    if line_filter.clusters:
        conditions.append(binder.match_any("cluster", line_filter.clusters))
    nodes = f"SELECT number FROM node WHERE {_join_and(conditions)}"  # noqa: S608 -- bound values
    return (
        f"SELECT job_id FROM node_run WHERE node IN ({nodes}) "  # noqa: S608 -- bound values
        f"AND end_s >= {line_filter.since_us // 1_000_000} UNION ALL "
        f"SELECT job_id FROM {table} WHERE {_IS_RUN} AND end_us = 0 AND start_us > 0"
    )


def _match_named_ids(jobs: Sequence[NamedJob], binder: _NamedBinder) -> list[str]:
    """Return conditions that select the ids of named jobs, one index each."""
    ids = sorted({named.job_id for named in jobs if not named.sluid})
    sluids = sorted({named.sluid for named in jobs if named.sluid})
    parts = [binder.match_any("sluid", sluids)] if sluids else []
    if ids:
        parts.append(binder.match_any("job_id", ids))
        parts += [
            f"{column} <> 0 AND {binder.match_any(column, ids)}"
            for column in ("array_job_id", "het_job_id")
        ]
    return parts or [NOTHING]


def _build_run_condition(
    line_filter: LineFilter, binder: _NamedBinder, table: str, match_tasks: TaskCondition
) -> tuple[str, str]:
    """Return two conditions: a run matches, by its own line; and one of its lines is shown."""
    parts = [
        *_match_line_columns(line_filter, binder),
        *_match_numbers(line_filter),
        _match_window(line_filter, binder),
    ]
    shown_condition = _ALWAYS
    if line_filter.jobs is not None:
        unstepped = [named for named in line_filter.jobs if not named.step]
        jobs_by_step: dict[str, list[NamedJob]] = {}
        for named in line_filter.jobs:
            if named.step:
                jobs_by_step.setdefault(named.step, []).append(named)
        if len(line_filter.jobs) > MAX_NAMED_JOBS:
            raise UsageError(
                f"{len(line_filter.jobs)} jobs are too many for one request: give at most "
                f"{MAX_NAMED_JOBS}"
            )
        conditions = _NameConditions(line_filter, binder, table, match_tasks)
        by_name = conditions.match_any(unstepped)
        by_step = [
            f"({conditions.match_any(step_jobs)} AND step = {binder.bind(step)})"
            for step, step_jobs in jobs_by_step.items()
        ]
        parts.append(conditions.match_any(line_filter.jobs))
        shown_condition = join_or([by_name, *by_step]) if jobs_by_step else shown_condition
    return _join_and(parts), shown_condition


class _NameConditions:
    """Builder of conditions for named jobs."""

    def __init__(
        self, line_filter: LineFilter, binder: _NamedBinder, table: str, match_tasks: TaskCondition
    ) -> None:
        self._table = table
        self._whole_hetjob = line_filter.whole_hetjob
        self._binder = binder
        self._match_tasks = match_tasks

    def match_any(self, jobs: Sequence[NamedJob]) -> str:
        """Return the condition that a job is one of these; no job if there are none."""
        ids = sorted({job.job_id for job in jobs if _is_whole(job)})
        parts = []
        if ids:
            parts += [
                self._binder.match_any("job_id", ids),
                f"(array_job_id <> 0 AND {self._binder.match_any('array_job_id', ids)})",
            ]
            if self._whole_hetjob is not False:
                parts.append(f"(het_job_id <> 0 AND {self._binder.match_any('het_job_id', ids)})")
            if self._whole_hetjob:
                parts.append(self._match_whole_hetjobs(self._binder.match_any("job_id", ids)))
        sluids = sorted({job.sluid for job in jobs if job.sluid})
        if sluids:
            parts.append(self._binder.match_any("sluid", sluids))
        parts += self._match_components(jobs)
        arrays: dict[int, set[int]] = {}
        for job in jobs:
            if job.tasks:
                arrays.setdefault(job.job_id, set()).update(job.tasks)
        if arrays:
            # One condition for all tasks: 20,000 conditions would take gigabytes.
            task_condition = self._match_tasks(
                {job_id: frozenset(tasks) for job_id, tasks in arrays.items()}
            )
            parts.append(
                f"({self._binder.match_any('array_job_id', sorted(arrays))} AND {task_condition})"
            )
        return join_or(parts) if parts else NOTHING

    def _match_components(self, jobs: Sequence[NamedJob]) -> list[str]:
        """Return conditions for named het components."""
        by_offset: dict[int, set[int]] = {}
        for job in jobs:
            if job.offset is not None:
                by_offset.setdefault(job.offset, set()).add(job.job_id)
        if by_offset and self._whole_hetjob:
            return [self._binder.match_any("het_job_id", sorted(set().union(*by_offset.values())))]
        return [
            f"({self._binder.match_any('het_job_id', sorted(ids))} AND het_offset = {offset})"
            for offset, ids in by_offset.items()
        ]

    def _match_whole_hetjobs(self, condition: str) -> str:
        """Return the condition for all components of matching het jobs."""
        leaders = f"SELECT het_job_id FROM {self._table} WHERE {condition} AND het_job_id <> 0"  # noqa: S608 -- bound values
        return f"(het_job_id <> 0 AND het_job_id IN ({leaders}))"


def _is_whole(job: NamedJob) -> bool:
    """Return True if a whole job was named, not a task, component or SLUID."""
    return not job.sluid and not job.tasks and job.offset is None


def _match_line_columns(line_filter: LineFilter, binder: _NamedBinder) -> Iterable[str]:
    """Yield the conditions on text columns."""
    user_conditions = [binder.match_any("uid", line_filter.uids)] if line_filter.uids else []
    user_conditions += [binder.match_any('"user"', line_filter.users)] if line_filter.users else []
    group_conditions = [binder.match_any("gid", line_filter.gids)] if line_filter.gids else []
    group_conditions += (
        [binder.match_any('"group"', line_filter.groups)] if line_filter.groups else []
    )
    yield from (
        join_or(conditions) for conditions in (user_conditions, group_conditions) if conditions
    )
    for column, chosen in (
        ("account", line_filter.accounts),
        ("qos", line_filter.qos),
        ("wckey", line_filter.wckeys),
        ("name", line_filter.names),
        ("reason", line_filter.reasons),
    ):
        if chosen:
            yield binder.match_any(column, chosen)
    if line_filter.partitions:
        yield join_or([_match_word("partition", word, binder) for word in line_filter.partitions])
    if line_filter.flags:
        yield join_or([f"instr(job_flags, {binder.bind(flag)}) > 0" for flag in line_filter.flags])
    for feature in line_filter.constraints:
        yield f"instr(constraints, {binder.bind(feature)}) > 0"


def _match_word(column: str, word: str, binder: _NamedBinder) -> str:
    """Return the condition that a comma-separated column contains a word."""
    return f"instr(',' || {column} || ',', {binder.bind(f',{word},')}) > 0"


def _match_numbers(line_filter: LineFilter) -> Iterable[str]:
    """Yield the conditions on ranges of numbers."""
    for column, limits in (
        ("nodes", line_filter.nodes),
        ("cpus", line_filter.cpus),
        ("time_limit_s", line_filter.time_limit_s),
    ):
        if limits is not None:
            yield f"{column} BETWEEN {limits.least} AND {limits.most}"


def _match_window(line_filter: LineFilter, binder: _NamedBinder) -> str:
    """Return the condition for the time window."""
    since, until = line_filter.since_us, line_filter.until_us
    if line_filter.states:
        return join_or([_match_state(state, since, until, binder) for state in line_filter.states])
    eligible = f"eligible_us < {until}"
    if line_filter.eligible_only:
        # If only the end of a run was reported, its eligible time is unknown; its start is used.
        started = f"(eligible_us = 0 AND start_us <> 0 AND start_us < {until})"
        eligible = f"((eligible_us <> 0 AND {eligible}) OR {started})"
    return f"((end_us >= {since} OR end_us = 0) AND {eligible})" if since else eligible


def _match_state(state: str, since: int, until: int, binder: _NamedBinder) -> str:
    """Return the condition for a state within the window, as sacct(1) defines --state."""
    if state == "PENDING":
        waiting = f"(start_us = 0 AND end_us = 0 AND {binder.match_any('state', sorted(WAITING))})"
        waited = f"(start_us = 0 AND end_us > {since})"
        # slurmctld shows no eligible time for a requeued and held run.
        flags = binder.match_any("state", sorted(PENDING - {"PENDING"}))
        held = (
            f"(eligible_us = 0 AND submit_us < {until} AND start_us = 0 AND end_us = 0 AND {flags})"
        )
        return (
            f"(({held}) OR (eligible_us <> 0 AND eligible_us < {until} "
            f"AND (start_us > {since} OR {waited} OR {waiting})))"
        )
    if state in ("RUNNING", "SUSPENDED"):
        running = f"(start_us <> 0 AND start_us < {until} AND (end_us > {since} OR end_us = 0))"
        if state == "RUNNING":
            return running
        return f"({running} AND (state = 'SUSPENDED' OR suspended_s > 0))"
    has_state = f"state = {binder.bind(state)}"
    return f"({has_state} AND (end_us = 0 OR end_us BETWEEN {since} AND {until}))"


def _join_list(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _join_and(parts: Iterable[str]) -> str:
    return " AND ".join(parts) or "1 = 1"
