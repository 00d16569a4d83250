"""sacct selection: turn a request into a LineFilter of time window, jobs, users and states.

:func:`resolve_clusters` and :func:`resolve_zone` apply the defaults of the configuration,
:func:`parse_window` sacct's default time window. :func:`build_line_filter` builds the filter;
:func:`parse_named_jobs` and :func:`parse_limit_s` parse job names and time limits.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo
from typing import Final

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.errors import AccountingUsage
from steward.accounting.sacct.requests import SacctRequest
from steward.core.access import Caller, VisibleJobs
from steward.core.timestamps import to_micros
from steward.jobs.job_ids import MAX_JOB_ID, JobNameError, parse_job_name
from steward.jobs.line_queries import MAX_NAMED_JOBS, LineFilter, NamedJob, NumberRange
from steward.slurm.job_states import expand_state
from steward.slurm.nodelists import expand_nodelist
from steward.slurm.times import load_zone, parse_time

_STEPPED: Final = re.compile(r"(.+?)\.(batch|extern|interactive|[0-9]{1,10}(?:\+[0-9]{1,10})?)")
_TASKS: Final = re.compile(r"([0-9]{1,10})_\[([0-9,:-]{1,4096})(?:%[0-9]{1,10})?\]")
_TASK_RANGE: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
_RANGE: Final = re.compile(r"([0-9]{1,10}[kKmM]?)(?:-([0-9]{1,10}[kKmM]?))?")
_LIMIT: Final = re.compile(
    r"(?:(?P<days>\d{1,6})-(?P<dh>\d{1,3})(?::(?P<dm>\d{1,3})(?::(?P<ds>\d{1,3}))?)?"
    r"|(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,9})(?::(?P<s>\d{1,3}))?)"
)
_WORD: Final = re.compile(r"[^.]+\.[^.]*")
_MOST_TASKS: Final = 10_000
_MOST_WORDS: Final = 1000
_FOREVER: Final = 2**62


class TimeWindow(msgspec.Struct, frozen=True):
    """Time window in µs since the epoch; 0 for an open begin."""

    since_us: int
    until_us: int


def resolve_clusters(context: AccountingContext, request: SacctRequest) -> tuple[str, ...]:
    """Return the requested clusters; empty for all.

    Raises:
        UsageError: A cluster does not exist.
    """
    if request.all_clusters or "all" in request.clusters:
        return ()
    if not request.clusters:
        return (context.main_cluster,)
    context.check_clusters(request.clusters)
    return request.clusters


def resolve_zone(
    context: AccountingContext, request: SacctRequest, clusters: tuple[str, ...]
) -> tzinfo:
    """Return the time zone of typed times.

    Raises:
        TimeError: The zone does not exist.
    """
    return load_zone(
        request.zone or context.get_zone(clusters[0] if clusters else context.main_cluster)
    )


def parse_window(request: SacctRequest, now: datetime, zone: tzinfo) -> TimeWindow:
    """Return the time window, with the defaults of sacct(1), DEFAULT TIME WINDOW.

    Raises:
        TimeError: A time is malformed.
        AccountingUsage: The window ends before it begins.
    """
    since = parse_time(request.starttime, now, zone) if request.starttime else None
    until = parse_time(request.endtime, now, zone) if request.endtime else None
    since_us = to_micros(since) if since is not None else 0
    if since is None and not request.jobs:
        midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
        since_us = to_micros(now if request.states else midnight)
    if until is not None:
        until_us = to_micros(until)
    elif request.states and since is not None:
        until_us = since_us
    else:
        until_us = to_micros(now)
    if until_us < since_us:
        raise AccountingUsage(
            "invalid period: the end is before the start. Correct --starttime or --endtime"
        )
    return TimeWindow(since_us, until_us)


def build_line_filter(
    asker: Caller,
    request: SacctRequest,
    window: TimeWindow,
    clusters: tuple[str, ...],
    scopes: Mapping[str, VisibleJobs] | None,
) -> LineFilter:
    """Build the filter of lines, within what the requester may see.

    Args:
        asker: The requester.
        request: What the user typed.
        window: Time window.
        clusters: Requested clusters; empty for all.
        scopes: What the requester may see, by cluster; None for everything.

    Raises:
        UsageError: A job, state, number or limit is malformed.
    """
    users, uids = _split_numbers(request.users)
    groups, gids = _split_numbers(request.groups)
    is_own = not users and not uids and not request.all_users and asker.uid != 0
    if is_own and not request.jobs and not request.nodelist:
        uids = (asker.uid,)
    # Named jobs are shown whatever their time.
    is_any_time = bool(request.jobs) and not request.starttime and not request.endtime
    return LineFilter(
        clusters=clusters,
        scopes=scopes,
        jobs=parse_named_jobs(request.jobs) if request.jobs else None,
        users=users,
        uids=uids,
        groups=groups,
        gids=gids,
        accounts=_normalize_texts(account.lower() for account in request.accounts),
        partitions=_normalize_texts(request.partitions),
        qos=_normalize_texts(request.qos),
        wckeys=_normalize_texts(request.wckeys),
        names=_normalize_texts(request.names),
        reasons=_normalize_texts(request.reasons),
        constraints=_normalize_texts(request.constraints),
        flags=_normalize_texts(request.flags),
        nodes=_parse_range(request.nnodes, "--nnodes"),
        cpus=_parse_range(request.ncpus, "--ncpus"),
        time_limit_s=_parse_limits(request),
        since_us=window.since_us,
        until_us=_FOREVER if is_any_time else window.until_us,
        node_names=tuple(expand_nodelist(request.nodelist)) if request.nodelist else (),
        states=_normalize_texts(expand_state(state) for state in request.states),
        eligible_only=not request.jobs,
        whole_hetjob={"": None, "yes": True, "no": False}[request.whole_hetjob],
    )


def parse_named_jobs(texts: Iterable[str]) -> tuple[NamedJob, ...]:
    """Parse job and step names.

    Raises:
        JobNameError: A text is not a job name.
        AccountingUsage: They name too many array tasks.
    """
    named_jobs: dict[NamedJob, None] = {}
    tasks = 0
    # Counted while parsing: a short text may name thousands of tasks.
    for text in texts:
        named_job = _parse_named_job(text)
        if named_job in named_jobs:
            continue
        named_jobs[named_job] = None
        tasks += len(named_job.tasks)
        if max(tasks, len(named_jobs)) > MAX_NAMED_JOBS:
            raise AccountingUsage(
                f"--jobs names more than {MAX_NAMED_JOBS} jobs or array tasks: name whole arrays, "
                "or select by time"
            )
    return tuple(named_jobs)


def _parse_named_job(text: str) -> NamedJob:
    """Parse the name of a job or step."""
    step_match = _STEPPED.fullmatch(text.strip())
    job, step = step_match.groups() if step_match else (text.strip(), "")
    if not step_match and _WORD.fullmatch(job):
        # This may be a Torque server's name, but a mistyped step must not show the whole job.
        raise JobNameError(
            f"invalid step {text!r}: give 1.0, 1.batch, 1.extern or 1.interactive", text
        )
    tasks_match = _TASKS.fullmatch(job)
    if tasks_match:
        job_id = int(tasks_match[1])
        if 0 < job_id <= MAX_JOB_ID:
            return NamedJob(job_id=job_id, tasks=_parse_tasks(tasks_match[2], text), step=step)
    name = parse_job_name(job)
    tasks = () if name.task is None else (name.task,)
    return NamedJob(
        job_id=name.job_id, tasks=tasks, offset=name.offset, sluid=name.sluid, step=step
    )


def _parse_tasks(expression: str, text: str) -> tuple[int, ...]:
    """Expand the array tasks of a name."""
    tasks: dict[int, None] = {}
    for part in expression.split(","):
        match = _TASK_RANGE.fullmatch(part)
        if match is None:
            raise JobNameError(f"invalid array tasks {text!r}: give 123_[1-3,7]", text)
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1 or len(tasks) + (last - first) // step >= _MOST_TASKS:
            raise JobNameError(
                f"invalid array tasks {text!r}, or more than {_MOST_TASKS}: give 123_[1-3,7]", text
            )
        tasks |= dict.fromkeys(range(first, last + 1, step))
    return tuple(tasks)


def _split_numbers(texts: Iterable[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split texts into names and numbers."""
    unique = _normalize_texts(texts)
    numbers = tuple(int(text) for text in unique if text.isdecimal() and len(text) <= 10)
    return tuple(text for text in unique if not text.isdecimal()), numbers


def _normalize_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Return each text once, as records store it: bytes that are not UTF-8 are escaped."""
    unique = tuple(
        dict.fromkeys(
            text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            for text in texts
        )
    )
    if len(unique) > _MOST_WORDS:
        raise AccountingUsage(f"{len(unique)} names are too many: give at most {_MOST_WORDS}")
    return unique


def _parse_range(text: str, option: str) -> NumberRange | None:
    """Parse a number or a range: ``4-16``."""
    if not text:
        return None
    match = _RANGE.fullmatch(text)
    if match is None:
        raise AccountingUsage(
            f"invalid {option} {text!r}: give one or two numbers, such as 4-16", text
        )
    least = _parse_number(match[1])
    most = _parse_number(match[2]) if match[2] else least
    return NumberRange(least, most)


def _parse_number(text: str) -> int:
    scale = {"k": 1024, "m": 1024 * 1024}.get(text[-1].lower())
    return int(text[:-1]) * scale if scale else int(text)


def _parse_limits(request: SacctRequest) -> NumberRange | None:
    """Return the range of time limits; None if not restricted."""
    if not request.timelimit_min:
        # As in sacct(1), a maximum alone is ignored.
        return None
    least = parse_limit_s(request.timelimit_min)
    return NumberRange(
        least, parse_limit_s(request.timelimit_max) if request.timelimit_max else least
    )


def parse_limit_s(text: str) -> int:
    """Parse a time limit into seconds: minutes, ``1:30:00``, ``1-12``.

    Raises:
        AccountingUsage: The text is malformed.
    """
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise AccountingUsage(f"invalid time limit {text!r}: give minutes, 1:30:00 or 1-12", text)
    parts = {name: int(value or 0) for name, value in match.groupdict().items()}
    if match["days"]:
        return parts["days"] * 86_400 + parts["dh"] * 3600 + parts["dm"] * 60 + parts["ds"]
    if match["h"] and not match["s"]:
        # Two numbers are minutes and seconds.
        return parts["h"] * 60 + parts["m"]
    return parts["h"] * 3600 + parts["m"] * 60 + parts["s"]
