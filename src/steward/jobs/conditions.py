"""How a filter becomes SQL: every value bound, every condition one that an index can serve.

However much is asked for, the statement stays small: values go in as one list,
and what each job must be tried with by itself is limited.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from steward.core.errors import UsageError
from steward.core.moments import micros
from steward.jobs.names import JobName, parse
from steward.jobs.records import JobFilter
from steward.jobs.scoping import any_of, scoped

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
