"""What jobs.db answers with, and how it is asked: the structs that other rooms build on."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from steward.core.errors import UsageError
from steward.core.events import JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.core.timestamps import micros
from steward.jobs.job_ids import JobName, display, parse


class ScopeLike(Protocol):
    """Whose jobs of one cluster somebody may see; ``steward.core.access.Scope`` is one."""

    @property
    def everything(self) -> bool:
        """All of them; the other attributes then do not matter."""

    @property
    def uid(self) -> int | None:
        """Those of this uid."""

    @property
    def user(self) -> str:
        """Of those only what was submitted under this name; "" for any name."""

    @property
    def accounts(self) -> frozenset[str]:
        """Beside these, all that were charged to one of these accounts."""


Position = tuple[datetime, int, int]
"""First submit time, job id and number: submit times are in whole seconds."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job: (cluster, job id, first submit time), however often it ran.

    Attributes:
        number: Its row in jobs.db; not lasting, only to be used with the database at hand.
        cluster: The cluster's name.
        job_id: The raw id (of an array task: its own).
        first_submit: Submit time of the first run, UTC; of a job that Slurm has not
            confirmed, and of one whose first run was never seen, the script's time.
        verified: Whether Slurm has shown this job. If not, only ``name`` is known, and
            that is what the environment claims.
        purged: Whether its script was purged, and its private text with it.
        ended: Whether its last run is over (and was not requeued).
        record: The latest that is known. ``user`` is the name that the uid resolved to
            when the job was first seen; state and times are those of the last run.
        script_key: Key of the job.script event; of an array task that of its array's
            script, of a het component that of its leader's. "" if there is none.
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
        """The job's name as Slurm prints it: 123, 123_7, 123_[1-9%2], 123+1."""
        return display(self.record)

    @property
    def position(self) -> "Position":
        """Where it stands in a list, newest first: what ``Jobs.list`` takes as ``before``."""
        return self.first_submit, self.job_id, self.number


def identity_of(job: Job, script_key: str) -> JobIdentity | None:
    """What the consumer ``jobs`` has said of a script's job.

    Args:
        job: The job that the script itself belongs to, see ``Jobs.by_script``.
        script_key: Key of the job.script event.

    Returns:
        Whose it is; None while Slurm has not shown the job.
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
    """One run of a job: (job, restart count).

    Attributes:
        restarts: Restart count; 0 for the first run.
        submit: Its submit time, UTC (a requeue changes it).
        ended: Whether it is over.
        record: The latest that is known of this run; its ``end`` is the first that was
            reported as final.
        late_end: End time, UTC, of a second end record, as Slurm before 25.11 writes one
            when a finished job is requeued: recorded, never to be used. None if there is none.
    """

    restarts: int
    submit: datetime
    ended: bool
    record: JobRecord
    late_end: datetime | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One kept script.

    Attributes:
        key: Key of the job.script event.
        cluster: The cluster's name.
        body: What the event said.
        job_number: ``Job.number`` of the job that it belongs to.
    """

    key: str
    cluster: str
    body: JobScript
    job_number: int


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list; an empty tuple or None does not restrict.

    Attributes:
        clusters: Names of clusters.
        users: Names at submit, or uids in digits.
        accounts: Accounts, in lower case as Slurm keeps them.
        partitions: Partitions; a job submitted to several ("a,b") matches each.
        names: Job names as shell patterns (``*``, ``?``, ``[…]``), case-sensitive.
        states: States as Slurm spells them ("FAILED"), in any case.
        jobs: Jobs as Slurm names them ("123" with all tasks of an array and all
            components of a het job, "123_7", "123+1", a SLUID).
        since: First submit at this time or later.
        until: First submit before this time.
        with_script: Only jobs with (True) or without (False) a script of their own.
        scopes: Who asks may see these, by cluster; a cluster that is not in it is not
            shown. None for everything.
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
    scopes: Mapping[str, ScopeLike] | None = None


NOTHING: Final = "1 = 0"
"""The condition that holds for no row."""


class Values(Protocol):
    """Binds values, in the way of the database that is asked."""

    def bind(self, value: object) -> str:
        """What stands for a value in the statement."""
        ...

    def one_of(self, column: str, values: Iterable[object]) -> str:
        """The condition that a column has one of these values."""
        ...


def scoped(scopes: Mapping[str, ScopeLike], values: Values, table: str = "") -> str:
    """The condition that a row may be seen.

    Args:
        scopes: Whose rows may be seen, by cluster; of other clusters none.
        values: Binds what is compared with.
        table: Put before each column, with its dot.
    """
    parts = []
    for cluster, scope in scopes.items():
        here = f"{table}cluster = {values.bind(cluster)}"
        if scope.everything:
            parts.append(here)
            continue
        mine = []
        if scope.uid is not None:
            own = f"{table}uid = {values.bind(scope.uid)}"
            if scope.user:
                own = f'({own} AND {table}"user" = {values.bind(scope.user)})'
            mine.append(own)
        if scope.accounts:
            charged = values.one_of(f"{table}account", sorted(scope.accounts))
            mine.append(f"({table}uid IS NOT NULL AND {charged})")
        if mine:
            parts.append(f"({here} AND {any_of(mine)})")
    return any_of(parts) if parts else NOTHING


def any_of(parts: Iterable[str]) -> str:
    """The condition that one of these holds; there is at least one."""
    alternatives = list(parts)
    if len(alternatives) == 1:
        return alternatives[0]
    # Halved, not chained: how deep an expression may be is limited.
    half = len(alternatives) // 2
    return f"({any_of(alternatives[:half])} OR {any_of(alternatives[half:])})"


MOST_PATTERNS: Final = 1000
"""So many patterns of a kind, or names of parts of jobs, a filter may have."""

LONGEST_PATTERN: Final = 1024
MOST_WILDCARDS: Final = 32
MOST_PATTERN_LETTERS: Final = 20_000
"""Bounds of one pattern, and of all of a filter together: what a name is tried with costs."""

_STARS: Final = re.compile(r"\*{2,}")
_WILD: Final = re.compile(r"[*?\[]")

_EVERYTHING: Final = "1"


class _Values:
    """Hands out a name for each bound value."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}

    def bind(self, value: object) -> str:
        name = f"v{len(self.bound)}"
        self.bound[name] = value
        return f":{name}"

    def one_of(self, column: str, values: Iterable[object]) -> str:
        chosen = list(values)
        if len(chosen) == 1:
            # With an equation the index gives its order, too: nothing is to be sorted.
            return f"{column} = {self.bind(chosen[0])}"
        listed = self.bind(msgspec.json.encode(chosen).decode())
        return f"{column} IN (SELECT value FROM json_each({listed}))"  # noqa: S608 -- a bound value


def conditions(wanted: JobFilter) -> tuple[str, dict[str, Any]]:
    """The WHERE clause of a filter, and the values bound in it.

    Raises:
        JobNameError: ``wanted.jobs`` holds a text that names no job.
        UsageError: There are more than :data:`MOST_PATTERNS` patterns of a kind, or array
            tasks, het components and SLUIDs, or one that would cost too much.
    """
    values = _Values()
    parts = [
        *_times(wanted, values),
        *_columns(wanted, values),
        *_patterns(wanted, values),
    ]
    if wanted.scopes is not None:
        parts.append(scoped(wanted.scopes, values, "job."))
    if wanted.jobs:
        parts.append(_named(wanted.jobs, values))
    return " AND ".join(parts) or _EVERYTHING, values.bound


def _named(jobs: Iterable[str], values: _Values) -> str:
    names = [parse(text) for text in jobs]
    ids = sorted({name.job_id for name in names if name.is_whole})
    columns = ("job.job_id", "job.array_job_id", "job.het_job_id") if ids else ()
    named = [values.one_of(column, ids) for column in columns]
    others = [name for name in names if not name.is_whole]
    check_patterns(others, "array tasks, het components and SLUIDs")
    for number, name in enumerate(others):
        condition, bound = called(name, is_exact=False, prefix=f"j{number}_")
        named.append(condition)
        values.bound |= bound
    return any_of(named)


def check_patterns(patterns: Sequence[object], what: str) -> None:
    """Refuse more patterns than each job can be tried with.

    Args:
        patterns: All of one kind.
        what: What they are, in the plural.

    Raises:
        UsageError: There are more than :data:`MOST_PATTERNS`.
    """
    if len(patterns) > MOST_PATTERNS:
        raise UsageError(
            f"{len(patterns)} {what} are too many to look for at once: "
            f"give at most {MOST_PATTERNS}",
            what,
        )


def name_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Patterns for jobs' names, each once and in its shortest form, if they may be looked for.

    Args:
        patterns: As a shell has them.

    Raises:
        UsageError: They are too many, too long, or have too many wildcards.
    """
    # Any number of stars mean what one means, and cost a server what they are.
    found = tuple(dict.fromkeys(_STARS.sub("*", pattern) for pattern in patterns))
    check_patterns(found, "job names")
    for pattern in found:
        if len(pattern) > LONGEST_PATTERN:
            raise UsageError(
                f"a job name to look for has {len(pattern)} letters: "
                f"give at most {LONGEST_PATTERN}",
                pattern,
            )
        wildcards = sum(map(pattern.count, "*?["))
        if wildcards > MOST_WILDCARDS:
            raise UsageError(
                f"a job name to look for has {wildcards} wildcards: give at most {MOST_WILDCARDS}",
                pattern,
            )
    letters = sum(map(len, found))
    if letters > MOST_PATTERN_LETTERS:
        raise UsageError(
            f"job names to look for have {letters} letters together: "
            f"give at most {MOST_PATTERN_LETTERS}",
            found,
        )
    return found


def called(name: JobName, *, is_exact: bool, prefix: str = "") -> tuple[str, dict[str, Any]]:
    """The condition that a job has this name.

    Args:
        name: What it is called.
        is_exact: Only the job of that raw id or of that one task; else also all parts of
            an array or het job, and the array that still holds the task.
        prefix: Begins the names of the bound values.
    """
    bound: dict[str, Any] = {f"{prefix}id": name.job_id}
    by_id = f":{prefix}id"
    if name.sluid:
        sluid = f":{prefix}sluid"
        of_a_run = f"SELECT job FROM run WHERE sluid = {sluid}"  # noqa: S608 -- a bound value
        condition = f"(job.original_sluid = {sluid} OR job.number IN ({of_a_run}))"
        return condition, {f"{prefix}sluid": name.sluid}
    if name.task is not None:
        bound[f"{prefix}task"] = name.task if not is_exact else str(name.task)
        task = f":{prefix}task"
        holds = f"job.array_task = {task}" if is_exact else f"holds_task(job.array_task, {task})"
        return f"(job.array_job_id = {by_id} AND {holds})", bound
    if name.offset is not None:
        bound[f"{prefix}offset"] = name.offset
        return f"(job.het_job_id = {by_id} AND job.het_offset = :{prefix}offset)", bound
    if is_exact:
        return f"job.job_id = {by_id}", bound
    return (
        f"(job.job_id = {by_id} OR job.array_job_id = {by_id} OR job.het_job_id = {by_id})",
        bound,
    )


def _times(wanted: JobFilter, values: _Values) -> Iterable[str]:
    if wanted.since is not None:
        yield f"job.first_submit >= {values.bind(micros(wanted.since))}"
    if wanted.until is not None:
        yield f"job.first_submit < {values.bind(micros(wanted.until))}"


def _columns(wanted: JobFilter, values: _Values) -> Iterable[str]:
    if wanted.clusters:
        yield values.one_of("job.cluster", wanted.clusters)
    if wanted.users:
        names = [user for user in wanted.users if not user.isdecimal()]
        uids = [int(user) for user in wanted.users if user.isdecimal()]
        either = [values.one_of("job.user", names)] if names else []
        either += [values.one_of("job.uid", uids)] if uids else []
        yield any_of(either)
    if wanted.accounts:
        yield values.one_of("job.account", wanted.accounts)
    if wanted.states:
        # Of several the index has each by itself: all would have to be sorted.
        beside = _beside(wanted) if len(wanted.states) == 1 else "+"
        yield values.one_of(f"{beside}job.state", (state.upper() for state in wanted.states))
    if wanted.with_script is not None:
        yield f"job.script_key IS {'NOT ' if wanted.with_script else ''}NULL"


def _patterns(wanted: JobFilter, values: _Values) -> Iterable[str]:
    if wanted.partitions:
        check_patterns(wanted.partitions, "partitions")
        yield any_of(
            f"instr(',' || job.partition || ',', {values.bind(f',{partition},')}) > 0"
            for partition in wanted.partitions
        )
    if wanted.names:
        patterns = name_patterns(wanted.names)
        plain = [pattern for pattern in patterns if not _WILD.search(pattern)]
        either = [values.one_of(f"{_beside(wanted)}job.name", plain)] if plain else []
        # GLOB is the shell's pattern, but for how a set is negated.
        either += [
            f"job.name GLOB {values.bind(pattern.replace('[!', '[^'))}"
            for pattern in patterns
            if _WILD.search(pattern)
        ]
        yield any_of(either)


def _beside(wanted: JobFilter) -> str:
    """Keeps a column's index from being chosen where a person's, or jobs', finds far fewer."""
    return "+" if wanted.users or wanted.accounts or wanted.jobs else ""
