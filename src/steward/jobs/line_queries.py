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

MAX_NAMED_JOBS: Final = 20_000
"""Maximum number of jobs and steps named in one query."""

KEY: Final = ("cluster", "job_id", "submit_us", "restarts", "piece_us", "rank", "step")
"""Columns that define sacct's order; ``rank`` puts a run before its steps."""

EXPRESSION: Final = "(instr(array_task, '-') + instr(array_task, ',') + instr(array_task, '%')) > 0"
"""Condition that a line stands for several array tasks, under one task expression."""

_MOST_LETTERS: Final = 4_000_000
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
    eligible_only: bool = True
    whole_hetjob: bool | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether an index finds the few matching lines faster than a scan."""
        return bool(self.jobs or self.users or self.uids or self.accounts)


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

    def one_of(self, column: str, values: Iterable[object]) -> str:
        """Return the condition that a column has one of these values."""
        chosen = [str(value) if type(value) is int else self.bind(value) for value in values]
        return (
            f"{column} = {chosen[0]}" if len(chosen) == 1 else f"{column} IN ({_join_list(chosen)})"
        )


def build_statement(
    wanted: LineFilter,
    columns: Sequence[str],
    *,
    table: str = "line",
    steps: bool = True,
    by_index: bool = True,
    only: str = "",
    holds: TaskCondition,
) -> LineQuery:
    """Build the query for a filter, in sacct's order: the mark, then the columns.

    Args:
        wanted: The filter.
        columns: SQL of each column after the mark.
        table: A table, or a source that DuckDB reads.
        steps: Include lines of steps.
        by_index: Find the runs by an index first, then their steps. Otherwise scan every row,
            which is faster if most match.
        only: Additional condition without text values.
        holds: Builds the source's condition for array tasks.

    Raises:
        UsageError: Too many jobs are named.
    """
    values = _NamedBinder()
    where = _build_scope(wanted, values)
    run, shown = _build_run_condition(wanted, values, table, holds)
    if by_index:
        where.append(f"job_id IN ({_select_candidates(wanted, values, table)})")
    if only:
        where.append(only)
    if not steps:
        # Without steps, rows need no mark to follow their run.
        where += [_IS_RUN, run]
    order = _join_list(KEY)
    sql = (
        f"SELECT {_join_list([_build_mark(run, shown), *columns])} FROM {table} "  # noqa: S608 -- bound values
        f"WHERE {_join_and(where)} ORDER BY {order}"
    )
    if len(sql) > _MOST_LETTERS:
        raise UsageError("more jobs and steps are named than can be looked for at once")
    return LineQuery(sql=sql, values=values.bound)


def build_candidates(wanted: LineFilter, *, table: str = "line") -> LineQuery:
    """Build the query for a superset of the matching job ids."""
    values = _NamedBinder()
    found = _select_candidates(wanted, values, table)
    return LineQuery(
        sql=f"SELECT DISTINCT job_id FROM ({found}) ORDER BY job_id",  # noqa: S608 -- bound values
        values=values.bound,
    )


def _build_mark(run: str, shown: str) -> str:
    """Return the SQL of a row's mark."""

    def either(yes: int, no: int) -> str:
        return str(yes) if shown == _ALWAYS else f"CASE WHEN {shown} THEN {yes} ELSE {no} END"

    return (
        f"CASE WHEN {_IS_RUN} THEN CASE WHEN NOT coalesce({run}, {NOTHING}) THEN {HIDDEN_RUN} "
        f"WHEN piece_us <> 0 THEN {either(SHOWN_PIECE, UNNAMED_PIECE)} "
        f"ELSE {either(SHOWN_RUN, UNNAMED_RUN)} END ELSE {either(SHOWN_STEP, HIDDEN_STEP)} END"
    )


_IS_RUN: Final = "step = ''"
_ALWAYS: Final = "1 = 1"


def _build_scope(wanted: LineFilter, values: _NamedBinder) -> list[str]:
    """Return the conditions that apply to runs and steps alike."""
    parts = []
    if wanted.clusters:
        parts.append(values.one_of("cluster", wanted.clusters))
    if wanted.scopes is not None:
        parts.append(build_scope_condition(wanted.scopes, values))
    return parts


def _select_candidates(wanted: LineFilter, values: _NamedBinder, table: str) -> str:
    """Build the SELECT for a superset of the matching job ids, one index for each part."""
    if wanted.jobs is not None:
        parts = _named_ids(wanted.jobs, values)
        if wanted.whole_hetjob:
            ids = [named.job_id for named in wanted.jobs] or [0]
            leaders = f"SELECT het_job_id FROM {table} WHERE {values.one_of('job_id', ids)}"  # noqa: S608 -- bound values
            parts.append(f"het_job_id <> 0 AND het_job_id IN ({leaders})")
    else:
        people = {"uid": wanted.uids, '"user"': wanted.users}
        parts = [values.one_of(column, of) for column, of in people.items() if of]
        if not parts and wanted.accounts:
            parts = [values.one_of("account", wanted.accounts)]
        # Whatever the state: jobs that ended before the window or came after it are outside.
        in_time = (f"end_us >= {wanted.since_us}", "end_us = 0")
        parts = [
            f"{part} AND {ended} AND eligible_us <= {wanted.until_us}"
            for part in parts or [_ALWAYS]
            for ended in in_time
        ]
    return " UNION ALL ".join(
        f"SELECT job_id FROM {table} WHERE {_IS_RUN} AND {part}"  # noqa: S608 -- bound values
        for part in parts
    )


def _named_ids(jobs: Sequence[NamedJob], values: _NamedBinder) -> list[str]:
    """Return conditions that select the ids of named jobs, one index each."""
    ids = sorted({named.job_id for named in jobs if not named.sluid})
    sluids = sorted({named.sluid for named in jobs if named.sluid})
    parts = [values.one_of("sluid", sluids)] if sluids else []
    if ids:
        parts.append(values.one_of("job_id", ids))
        parts += [
            f"{column} <> 0 AND {values.one_of(column, ids)}"
            for column in ("array_job_id", "het_job_id")
        ]
    return parts or [NOTHING]


def _build_run_condition(
    wanted: LineFilter, values: _NamedBinder, table: str, holds: TaskCondition
) -> tuple[str, str]:
    """Return two conditions: a run matches, by its own line; and one of its lines is shown."""
    parts = [
        *_match_line_columns(wanted, values),
        *_match_numbers(wanted),
        _match_window(wanted, values),
    ]
    shown = _ALWAYS
    if wanted.jobs is not None:
        whole = [named for named in wanted.jobs if not named.step]
        stepped: dict[str, list[NamedJob]] = {}
        for named in wanted.jobs:
            if named.step:
                stepped.setdefault(named.step, []).append(named)
        if len(wanted.jobs) > MAX_NAMED_JOBS:
            raise UsageError(
                f"{len(wanted.jobs)} jobs are too many to name at once: give at most "
                f"{MAX_NAMED_JOBS}"
            )
        names = _NameConditions(wanted, values, table, holds)
        by_name = names.any_of(whole)
        by_step = [
            f"({names.any_of(of)} AND step = {values.bind(step)})" for step, of in stepped.items()
        ]
        parts.append(names.any_of(wanted.jobs))
        shown = join_or([by_name, *by_step]) if stepped else shown
    return _join_and(parts), shown


class _NameConditions:
    """Builder of conditions for named jobs."""

    def __init__(
        self, wanted: LineFilter, values: _NamedBinder, table: str, holds: TaskCondition
    ) -> None:
        self._table = table
        self._whole_hetjob = wanted.whole_hetjob
        self._values = values
        self._holds = holds

    def any_of(self, named: Sequence[NamedJob]) -> str:
        """Return the condition that a job is one of these; no job if there are none."""
        ids = sorted({name.job_id for name in named if _is_whole(name)})
        parts = []
        if ids:
            parts += [
                self._values.one_of("job_id", ids),
                f"(array_job_id <> 0 AND {self._values.one_of('array_job_id', ids)})",
            ]
            if self._whole_hetjob is not False:
                parts.append(f"(het_job_id <> 0 AND {self._values.one_of('het_job_id', ids)})")
            if self._whole_hetjob:
                parts.append(self._whole(self._values.one_of("job_id", ids)))
        sluids = sorted({name.sluid for name in named if name.sluid})
        if sluids:
            parts.append(self._values.one_of("sluid", sluids))
        parts += self._components(named)
        arrays: dict[int, set[int]] = {}
        for name in named:
            if name.tasks:
                arrays.setdefault(name.job_id, set()).update(name.tasks)
        if arrays:
            # One condition for all tasks: 20,000 conditions would take gigabytes.
            held = self._holds({job_id: frozenset(tasks) for job_id, tasks in arrays.items()})
            parts.append(f"({self._values.one_of('array_job_id', sorted(arrays))} AND {held})")
        return join_or(parts) if parts else NOTHING

    def _components(self, named: Sequence[NamedJob]) -> list[str]:
        """Return conditions for named het components."""
        by_offset: dict[int, set[int]] = {}
        for name in named:
            if name.offset is not None:
                by_offset.setdefault(name.offset, set()).add(name.job_id)
        if by_offset and self._whole_hetjob:
            return [self._values.one_of("het_job_id", sorted(set().union(*by_offset.values())))]
        return [
            f"({self._values.one_of('het_job_id', sorted(ids))} AND het_offset = {offset})"
            for offset, ids in by_offset.items()
        ]

    def _whole(self, condition: str) -> str:
        """Return the condition for all components of matching het jobs."""
        leaders = f"SELECT het_job_id FROM {self._table} WHERE {condition} AND het_job_id <> 0"  # noqa: S608 -- bound values
        return f"(het_job_id <> 0 AND het_job_id IN ({leaders}))"


def _is_whole(name: NamedJob) -> bool:
    """Return True if a whole job was named, not a task, component or SLUID."""
    return not name.sluid and not name.tasks and name.offset is None


def _match_line_columns(wanted: LineFilter, values: _NamedBinder) -> Iterable[str]:
    """Yield the conditions on text columns."""
    people = [values.one_of("uid", wanted.uids)] if wanted.uids else []
    people += [values.one_of('"user"', wanted.users)] if wanted.users else []
    groups = [values.one_of("gid", wanted.gids)] if wanted.gids else []
    groups += [values.one_of('"group"', wanted.groups)] if wanted.groups else []
    yield from (join_or(either) for either in (people, groups) if either)
    for column, chosen in (
        ("account", wanted.accounts),
        ("qos", wanted.qos),
        ("wckey", wanted.wckeys),
        ("name", wanted.names),
        ("reason", wanted.reasons),
    ):
        if chosen:
            yield values.one_of(column, chosen)
    if wanted.partitions:
        yield join_or([_match_word("partition", word, values) for word in wanted.partitions])
    if wanted.flags:
        yield join_or([f"instr(flags, {values.bind(flag)}) > 0" for flag in wanted.flags])
    for feature in wanted.constraints:
        yield f"instr(constraints, {values.bind(feature)}) > 0"


def _match_word(column: str, word: str, values: _NamedBinder) -> str:
    """Return the condition that a comma-separated column contains a word."""
    return f"instr(',' || {column} || ',', {values.bind(f',{word},')}) > 0"


def _match_numbers(wanted: LineFilter) -> Iterable[str]:
    """Yield the conditions on ranges of numbers."""
    for column, chosen in (
        ("nodes", wanted.nodes),
        ("cpus", wanted.cpus),
        ("time_limit_s", wanted.time_limit_s),
    ):
        if chosen is not None:
            yield f"{column} BETWEEN {chosen.least} AND {chosen.most}"


def _match_window(wanted: LineFilter, values: _NamedBinder) -> str:
    """Return the condition for the time window."""
    since, until = wanted.since_us, wanted.until_us
    if wanted.states:
        return join_or([_match_state(state, since, until, values) for state in wanted.states])
    eligible = f"eligible_us < {until}"
    if wanted.eligible_only:
        # If only the end of a run was reported, its eligible time is unknown; its start is used.
        begun = f"(eligible_us = 0 AND start_us <> 0 AND start_us < {until})"
        eligible = f"((eligible_us <> 0 AND {eligible}) OR {begun})"
    return f"((end_us >= {since} OR end_us = 0) AND {eligible})" if since else eligible


def _match_state(state: str, since: int, until: int, values: _NamedBinder) -> str:
    """Return the condition for a state within the window, as sacct(1) defines --state."""
    if state == "PENDING":
        waiting = f"(start_us = 0 AND end_us = 0 AND {values.one_of('state', sorted(WAITING))})"
        waited = f"(start_us = 0 AND end_us > {since})"
        # slurmctld shows no eligible time for a requeued and held run.
        flags = values.one_of("state", sorted(PENDING - {"PENDING"}))
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
    own = f"state = {values.bind(state)}"
    return f"({own} AND (end_us = 0 OR end_us BETWEEN {since} AND {until}))"


def _join_list(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _join_and(parts: Iterable[str]) -> str:
    return " AND ".join(parts) or "1 = 1"
