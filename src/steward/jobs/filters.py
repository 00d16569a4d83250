"""Job filters, and the structs that queries of jobs.db return: Job, Run and Script.

:class:`JobFilter` says which jobs to list; :func:`build_conditions` turns it into a WHERE clause
with bound values. :func:`build_scope_condition` adds the condition on permissions;
:func:`match_name` the condition for a job named by a user. Limits on patterns keep one query from
blocking others. The first types are those of request fields that select jobs, with the words and
letters of sacct's options.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Protocol

import msgspec

from steward.core.actions import argument, option
from steward.core.errors import UsageError
from steward.core.events import JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.jobs.job_ids import JobName, format_job_name, parse_job_name

Clusters = Annotated[
    tuple[str, ...], option("Only jobs of these clusters.", "--clusters", "-M", metavar="NAME,…")
]
Users = Annotated[
    tuple[str, ...],
    option("Only jobs of these users; names or uids.", "--user", "-u", metavar="NAME,…"),
]
Accounts = Annotated[
    tuple[str, ...], option("Only jobs of these accounts.", "--accounts", "-A", metavar="NAME,…")
]
Partitions = Annotated[
    tuple[str, ...], option("Only jobs in these partitions.", "--partition", "-r", metavar="NAME,…")
]
Jobs = Annotated[
    tuple[str, ...], option("Only these jobs: 123, 123_7, 123+1.", "--jobs", "-j", metavar="ID,…")
]
Names = Annotated[
    tuple[str, ...],
    option(
        "Only jobs with these names; *, ? and […] match as in a shell.", "--name", metavar="NAME,…"
    ),
]
States = Annotated[
    tuple[str, ...],
    option("Only jobs in these states: FAILED, or F.", "--state", "-s", metavar="STATE,…"),
]
Since = Annotated[
    str,
    option(
        "Earliest submit time: now-1day, 2026-11-21T08:00.",
        "--starttime",
        "--since",
        "-S",
        metavar="TIME",
    ),
]
Until = Annotated[
    str,
    option(
        "Latest submit time, exclusive.",
        "--endtime",
        "--until",
        "-E",
        metavar="TIME",
        default="now",
    ),
]
JobId = Annotated[str, argument("Id of the job: 123, 123_7, 123+1.", "JOB")]
Cluster = Annotated[
    str,
    option(
        "Cluster of the job, if several clusters have a job with this id.",
        "--cluster",
        "-M",
        metavar="NAME",
    ),
]


class JobScope(Protocol):
    """Jobs of one cluster that a person may see, see ``steward.core.access.VisibleJobs``."""

    @property
    def everything(self) -> bool:
        """Whether all jobs are visible; the other attributes then do not matter."""

    @property
    def uid(self) -> int | None:
        """Uid whose jobs are visible."""

    @property
    def user(self) -> str:
        """Restricts that uid's jobs to those submitted under this name; "" for any name."""

    @property
    def accounts(self) -> frozenset[str]:
        """Accounts whose jobs are visible in addition."""


ListPosition = tuple[datetime, int, int]
"""Position in a job list: first submit time (whole seconds), job id and row number."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Job: (cluster, job id, first submit time), however often it ran.

    Attributes:
        number: Row number in jobs.db. Not permanent: use it only with the open database.
        cluster: Cluster name.
        job_id: Raw id; for an array task, its own.
        first_submit: Submit time of the first run, UTC. If Slurm has not confirmed the job, or its
            first run was missed, the script's time.
        verified: Whether Slurm has shown this job. If not, only ``name`` is known, as the
            environment claims it.
        purged: Whether its script and private text were purged.
        ended: Whether its last run ended without a requeue.
        record: Latest known record. ``user`` is the name of the uid when the job was first seen;
            state and times are those of the last run.
        script_key: Key of the job.script event: for an array task its array's script, for a het
            component its leader's. "" if there is none.
    """

    number: int
    cluster: str
    job_id: int
    first_submit: datetime
    verified: bool
    record: JobRecord
    purged: bool = False
    ended: bool = False
    script_key: str = ""

    @property
    def label(self) -> str:
        """Job name as Slurm prints it: 123, 123_7, 123_[1-9%2], 123+1."""
        return format_job_name(self.record)

    @property
    def position(self) -> "ListPosition":
        """Position in a list, newest first; pass it to ``Jobs.list`` as ``before``."""
        return self.first_submit, self.job_id, self.number


def build_identity(job: Job, script_key: str) -> JobIdentity | None:
    """Return the identity of a script's job, as the jobs consumer published it.

    Args:
        job: The job that owns the script, see ``Jobs.find_by_scripts``.
        script_key: Key of the job.script event.

    Returns:
        The job's identity, or None while Slurm has not shown the job.
    """
    if not job.verified:
        return None
    return JobIdentity(
        script_key=script_key,
        job_id=job.job_id,
        first_submit=job.first_submit,
        record=job.record,
    )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Run of a job: (job, restart count).

    Attributes:
        restarts: Restart count; 0 for the first run.
        submit: Submit time, UTC; a requeue changes it.
        ended: Whether the run ended.
        record: Latest known record of the run. Its ``end`` is the first one reported as final.
        late_end: End time, UTC, of a second end record, which Slurm before 25.11 writes when a
            finished job is requeued; recorded but never used. None if there is none.
    """

    restarts: int
    submit: datetime
    ended: bool
    record: JobRecord
    late_end: datetime | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Stored script of a job.

    Attributes:
        key: Key of the job.script event.
        cluster: Cluster name.
        body: Body of the job.script event.
    """

    key: str
    cluster: str
    body: JobScript


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of a job list; an empty tuple or None does not restrict.

    Attributes:
        clusters: Cluster names.
        users: User names at submit time, or uids in digits.
        accounts: Accounts, in lower case as Slurm keeps them.
        partitions: Partitions; a job submitted to several ("a,b") matches each.
        names: Job names as shell patterns (``*``, ``?``, ``[…]``), case-sensitive.
        states: States as Slurm spells them ("FAILED"), in any case.
        jobs: Jobs as Slurm names them ("123" with all tasks of an array and all
            components of a het job, "123_7", "123+1", a SLUID).
        since: Earliest first submit time.
        until: First submit before this time.
        with_script: Only jobs with (True) or without (False) a script of their own.
        scopes: What the requester may see, by cluster; other clusters are hidden. None for
            everything.
    """

    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    with_script: bool | None = None
    scopes: Mapping[str, JobScope] | None = None


NOTHING: Final = "1 = 0"
"""SQL condition that holds for no row."""


class ValueBinder(Protocol):
    """Binder of SQL values, in the syntax of the queried database."""

    def bind(self, value: object) -> str:
        """Bind a value and return its placeholder."""
        ...

    def match_any(self, column: str, values: Iterable[object]) -> str:
        """Return the condition that a column has one of these values."""
        ...


def build_scope_condition(
    scopes: Mapping[str, JobScope], binder: ValueBinder, table: str = ""
) -> str:
    """Return the condition that a person may see a row.

    Args:
        scopes: Visible jobs by cluster; rows of other clusters are hidden.
        binder: Binds the compared values.
        table: Prefix of each column, including its dot.
    """
    parts = []
    for cluster, scope in scopes.items():
        cluster_condition = f"{table}cluster = {binder.bind(cluster)}"
        if scope.everything:
            parts.append(cluster_condition)
            continue
        conditions = []
        if scope.uid is not None:
            owner_condition = f"{table}uid = {binder.bind(scope.uid)}"
            if scope.user:
                owner_condition = (
                    f'({owner_condition} AND {table}"user" = {binder.bind(scope.user)})'
                )
            conditions.append(owner_condition)
        if scope.accounts:
            account_condition = binder.match_any(f"{table}account", sorted(scope.accounts))
            conditions.append(f"({table}uid IS NOT NULL AND {account_condition})")
        if conditions:
            parts.append(f"({cluster_condition} AND {join_or(conditions)})")
    return join_or(parts) if parts else NOTHING


def join_or(parts: Iterable[str]) -> str:
    """Join conditions with OR; there must be at least one."""
    alternatives = list(parts)
    if len(alternatives) == 1:
        return alternatives[0]
    # Halved rather than chained: databases limit the depth of expressions.
    half = len(alternatives) // 2
    return f"({join_or(alternatives[:half])} OR {join_or(alternatives[half:])})"


MAX_PATTERNS: Final = 1000
"""Maximum number of patterns of one kind, or of named job parts, in a filter."""

MAX_PATTERN_CHARS: Final = 1024
MAX_WILDCARDS: Final = 32
MAX_PATTERN_TOTAL_CHARS: Final = 20_000
"""Limits on one pattern and on all patterns of a filter, because matching costs time."""

_STARS: Final = re.compile(r"\*{2,}")
_WILD: Final = re.compile(r"[*?\[]")

_EVERYTHING: Final = "1"


class _SqliteBinder:
    """Binder for SQLite: each value gets a name, a list becomes one JSON value."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}

    def bind(self, value: object) -> str:
        """Bind a value and return its placeholder."""
        name = f"v{len(self.bound)}"
        self.bound[name] = value
        return f":{name}"

    def match_any(self, column: str, values: Iterable[object]) -> str:
        """Return the condition that a column has one of these values."""
        chosen = list(values)
        if len(chosen) == 1:
            # With "=" the index also delivers the order, so nothing is sorted.
            return f"{column} = {self.bind(chosen[0])}"
        placeholder = self.bind(msgspec.json.encode(chosen).decode())
        return f"{column} IN (SELECT value FROM json_each({placeholder}))"  # noqa: S608 -- a bound value


def build_conditions(job_filter: JobFilter) -> tuple[str, dict[str, Any]]:
    """Return the WHERE clause of a filter and its bound values.

    Raises:
        JobNameError: ``job_filter.jobs`` contains an invalid job name.
        UsageError: There are more than :data:`MAX_PATTERNS` patterns of a kind, or array tasks,
            het components and SLUIDs, or a pattern is too expensive.
    """
    binder = _SqliteBinder()
    parts = [
        *_match_times(job_filter, binder),
        *_match_job_columns(job_filter, binder),
        *_match_patterns(job_filter, binder),
    ]
    if job_filter.scopes is not None:
        parts.append(build_scope_condition(job_filter.scopes, binder, "job."))
    if job_filter.jobs:
        parts.append(_match_names(job_filter.jobs, binder))
    return " AND ".join(parts) or _EVERYTHING, binder.bound


def _match_names(jobs: Iterable[str], binder: _SqliteBinder) -> str:
    """Return the condition that a job has one of these names."""
    names = [parse_job_name(text) for text in jobs]
    ids = sorted({name.job_id for name in names if name.is_whole})
    columns = ("job.job_id", "job.array_job_id", "job.het_job_id") if ids else ()
    conditions = [binder.match_any(column, ids) for column in columns]
    partial_names = [name for name in names if not name.is_whole]
    check_patterns(partial_names, "array tasks, het components and SLUIDs")
    for index, name in enumerate(partial_names):
        condition, bound = match_name(name, is_exact=False, prefix=f"j{index}_")
        conditions.append(condition)
        binder.bound |= bound
    return join_or(conditions)


def check_patterns(patterns: Sequence[object], plural: str) -> None:
    """Reject more patterns than each job can be tested against.

    Args:
        patterns: All patterns of one kind.
        plural: Plural noun for the error message.

    Raises:
        UsageError: There are more than :data:`MAX_PATTERNS`.
    """
    if len(patterns) > MAX_PATTERNS:
        raise UsageError(
            f"{len(patterns)} {plural} are too many for one request: give at most {MAX_PATTERNS}",
            plural,
        )


def normalize_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Validate patterns for job names; return each once, in its shortest form.

    Args:
        patterns: Shell patterns.

    Raises:
        UsageError: They are too many, too long, or have too many wildcards.
    """
    # Repeated stars mean the same as one, but cost more to match.
    shortened = tuple(dict.fromkeys(_STARS.sub("*", pattern) for pattern in patterns))
    check_patterns(shortened, "job names")
    for pattern in shortened:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise UsageError(
                f"job name pattern of {len(pattern)} characters is too long: give at most "
                f"{MAX_PATTERN_CHARS}",
                pattern,
            )
        wildcards = sum(map(pattern.count, "*?["))
        if wildcards > MAX_WILDCARDS:
            raise UsageError(
                f"job name pattern with {wildcards} wildcards: give at most {MAX_WILDCARDS}",
                pattern,
            )
    letters = sum(map(len, shortened))
    if letters > MAX_PATTERN_TOTAL_CHARS:
        raise UsageError(
            f"job name patterns have {letters} characters together: give at most "
            f"{MAX_PATTERN_TOTAL_CHARS}",
            shortened,
        )
    return shortened


def match_name(name: JobName, *, is_exact: bool, prefix: str = "") -> tuple[str, dict[str, Any]]:
    """Return the condition that a job has this name.

    Args:
        name: The parsed name.
        is_exact: Match only that raw id or task. Otherwise also all parts of an array or het job,
            and the array record that still contains the task.
        prefix: Prefix for the names of bound values.
    """
    bound: dict[str, Any] = {f"{prefix}id": name.job_id}
    id_placeholder = f":{prefix}id"
    if name.sluid:
        sluid = f":{prefix}sluid"
        run_jobs = f"SELECT job FROM run WHERE sluid = {sluid}"  # noqa: S608 -- a bound value
        condition = f"(job.original_sluid = {sluid} OR job.number IN ({run_jobs}))"
        return condition, {f"{prefix}sluid": name.sluid}
    if name.task is not None:
        bound[f"{prefix}task"] = name.task if not is_exact else str(name.task)
        task = f":{prefix}task"
        task_condition = (
            f"job.array_task = {task}" if is_exact else f"holds_task(job.array_task, {task})"
        )
        return f"(job.array_job_id = {id_placeholder} AND {task_condition})", bound
    if name.offset is not None:
        bound[f"{prefix}offset"] = name.offset
        return f"(job.het_job_id = {id_placeholder} AND job.het_offset = :{prefix}offset)", bound
    if is_exact:
        return f"job.job_id = {id_placeholder}", bound
    return (
        (
            f"(job.job_id = {id_placeholder} OR job.array_job_id = {id_placeholder} OR "
            f"job.het_job_id = {id_placeholder})"
        ),
        bound,
    )


def _match_times(job_filter: JobFilter, binder: _SqliteBinder) -> Iterable[str]:
    """Yield the conditions on the first submit time."""
    if job_filter.since is not None:
        yield f"job.first_submit >= {binder.bind(to_micros(job_filter.since))}"
    if job_filter.until is not None:
        yield f"job.first_submit < {binder.bind(to_micros(job_filter.until))}"


def _match_job_columns(job_filter: JobFilter, binder: _SqliteBinder) -> Iterable[str]:
    """Yield the conditions on columns with exact values."""
    if job_filter.clusters:
        yield binder.match_any("job.cluster", job_filter.clusters)
    if job_filter.users:
        names = [user for user in job_filter.users if not user.isdecimal()]
        uids = [int(user) for user in job_filter.users if user.isdecimal()]
        conditions = [binder.match_any("job.user", names)] if names else []
        conditions += [binder.match_any("job.uid", uids)] if uids else []
        yield join_or(conditions)
    if job_filter.accounts:
        yield binder.match_any("job.account", job_filter.accounts)
    if job_filter.states:
        # For several states, the index would return each separately and all rows would be sorted.
        index_prefix = _disable_index(job_filter) if len(job_filter.states) == 1 else "+"
        yield binder.match_any(
            f"{index_prefix}job.state", (state.upper() for state in job_filter.states)
        )
    if job_filter.with_script is not None:
        yield f"job.script_key IS {'NOT ' if job_filter.with_script else ''}NULL"


def _match_patterns(job_filter: JobFilter, binder: _SqliteBinder) -> Iterable[str]:
    """Yield the conditions on partitions and on job name patterns."""
    if job_filter.partitions:
        check_patterns(job_filter.partitions, "partitions")
        yield join_or(
            f"instr(',' || job.partition || ',', {binder.bind(f',{partition},')}) > 0"
            for partition in job_filter.partitions
        )
    if job_filter.names:
        patterns = normalize_patterns(job_filter.names)
        plain = [pattern for pattern in patterns if not _WILD.search(pattern)]
        conditions = (
            [binder.match_any(f"{_disable_index(job_filter)}job.name", plain)] if plain else []
        )
        # GLOB is the shell's pattern, except for the negation of a set.
        conditions += [
            f"job.name GLOB {binder.bind(pattern.replace('[!', '[^'))}"
            for pattern in patterns
            if _WILD.search(pattern)
        ]
        yield join_or(conditions)


def _disable_index(job_filter: JobFilter) -> str:
    """Return "+", which disables a column's index, if one on users or jobs selects fewer rows."""
    return "+" if job_filter.users or job_filter.accounts or job_filter.jobs else ""
