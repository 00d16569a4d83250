"""Archive queries: the actions ``archive.list``, ``.search``, ``.show``, ``.env`` and ``.diff``.

``list`` and ``show`` read jobs.db, ``search`` the catalog or a searchable sink, and ``show``,
``env`` and ``diff`` read script bytes. All go through :class:`ArchiveContext`, which checks
permissions.
"""

import difflib
import fnmatch
import logging
import re
from collections.abc import Callable, Sequence

import msgspec

from steward.archive.catalog.matches import TermMatcher
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import ScriptHit
from steward.archive.contents import EncodedContent
from steward.archive.context import ArchiveContext, make_run_line
from steward.archive.errors import ArchiveUnavailable, NotArchived
from steward.archive.remote.destination import resolve_searchable_sink
from steward.archive.requests import (
    DiffReply,
    DiffRequest,
    EnvironmentReply,
    EnvironmentRequest,
    EnvironmentVariable,
    JobLine,
    JobListReply,
    JobListRequest,
    SearchHit,
    SearchReply,
    SearchRequest,
    ShowReply,
    ShowRequest,
)
from steward.archive.resubmission import write_resubmission_script
from steward.archive.selection import (
    make_hits_page_token,
    make_job_filter,
    make_list_page_token,
    make_use_filter,
    parse_hits_page_token,
    parse_list_page_token,
    resolve_selection_span,
)
from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.errors import StewardError, UsageError
from steward.core.journal import JournalReader
from steward.core.redaction import REDACTED
from steward.jobs import Job, Script, parse_job_name
from steward.slurm.environment import split_entries

log = logging.getLogger(__name__)


@action(
    "archive.list",
    scope="read",
    command="archive list",
    rows="jobs",
)
def list_jobs(context: ArchiveContext, caller: Caller, request: JobListRequest) -> JobListReply:
    """List jobs, newest first.

    Without -S or -j, the command lists the jobs of the last seven days. It marks
    jobs without a script (salloc, srun).

    Raises:
        TimeError, StateError, PageError: A filter or the page token is invalid.
    """
    span = resolve_selection_span(context, request)
    job_filter = make_job_filter(request, span, context.get_visible_jobs(caller))
    position = parse_list_page_token(request.page)
    with context.jobs.snapshot():
        # One row more than requested shows whether there is a next page.
        jobs = context.jobs.list(job_filter, request.limit + 1, position)
        has_more = len(jobs) > request.limit
        jobs = jobs[: request.limit]
        scripts = _find_scripts(context, jobs)
        lines = tuple(
            context.make_job_line(caller, job, scripts.get((job.cluster, job.script_key)))
            for job in jobs
        )
    return JobListReply(
        jobs=lines,
        since=span.since,
        until=span.until,
        default_days=span.default_days,
        next=make_list_page_token(jobs[-1].position) if has_more else "",
        zones=context.get_time_zones(request.clusters or context.list_clusters()),
    )


@action(
    "archive.search",
    scope="scripts",
    command="archive search",
    rows="hits",
    routes=(route("GET /scripts", cursor=("page", "next")),),
)
def search_scripts(context: ArchiveContext, caller: Caller, request: SearchRequest) -> SearchReply:
    """Search scripts for text, newest jobs first.

    The search matches each TEXT verbatim, blanks included, so it finds paths and
    module names as well as words. Without -S, it covers jobs of all time.

    Raises:
        UsageError: A term, a filter or the page token is invalid.
        ArchiveUnavailable: The catalog or the sink's server does not answer.
    """
    sink = resolve_searchable_sink(context.settings, request.sink) if request.sink else ""
    matcher = TermMatcher(request.terms, case=request.case, words=request.words)
    span = resolve_selection_span(context, request, default=False)
    use_filter = make_use_filter(context, caller, request, span)
    is_allowed = _make_read_check(context, caller)
    if request.jobs or request.states:
        job_filter = make_job_filter(request, span, context.get_visible_jobs(caller, scripts=True))
        if request.jobs:
            use_filter = msgspec.structs.replace(
                use_filter, keys=_list_script_keys(context.jobs.list(job_filter, -1))
            )
        else:
            is_allowed = _make_state_filter(context, is_allowed, frozenset(job_filter.states))
    searcher = context.get_sink_searcher(sink) if sink else context.searcher
    try:
        page = searcher.find_page(
            matcher,
            use_filter,
            is_allowed,
            limit=request.limit,
            lines=request.lines,
            after=parse_hits_page_token(request.page),
        )
        counts = request.count and not request.page
        count = searcher.count(matcher, use_filter, is_allowed) if counts else None
    except ArchiveUnavailable as error:
        # The server's address and messages are for operators only.
        if not sink or context.is_operator(caller):
            raise
        log.warning("a search in sink %s by uid %s failed: %s", sink, caller.uid, error)
        raise ArchiveUnavailable(
            f"the server of sink {sink!r} failed on this search: ask an operator to look in "
            "Steward's log for the reason",
            sink,
        ) from None
    return SearchReply(
        hits=_make_hits(context, caller, page.hits),
        count=count,
        next=make_hits_page_token(page.after) if page.after else "",
        complete=page.complete,
        lag=_count_events_behind(context, f"archive.{sink}" if sink else "catalog"),
        zones=context.get_time_zones(request.clusters or context.list_clusters()),
    )


def _find_scripts(context: ArchiveContext, jobs: Sequence[Job]) -> dict[tuple[str, str], Script]:
    """Return the scripts of these jobs, by cluster and key."""
    scripts: dict[tuple[str, str], Script] = {}
    for job in jobs:
        ref = (job.cluster, job.script_key)
        if job.script_key and ref not in scripts:
            script = context.jobs.find_script(job)
            if script is not None:
                scripts[ref] = script
    return scripts


def _make_read_check(context: ArchiveContext, caller: Caller) -> Callable[[ScriptUse], bool]:
    """Make a permission check for script uses that caches its answer by owner and account."""
    decisions: dict[tuple[str, int | None, str, str], bool] = {}

    def is_allowed(use: ScriptUse) -> bool:
        owner = (use.cluster, use.uid, use.user, use.account)
        if owner not in decisions:
            decisions[owner] = context.access.can_read_script(
                caller, use.cluster, uid=use.uid, user_at_submit=use.user, account=use.account
            )
        return decisions[owner]

    return is_allowed


def _make_state_filter(
    context: ArchiveContext, is_allowed: Callable[[ScriptUse], bool], states: frozenset[str]
) -> Callable[[ScriptUse], bool]:
    """Make a filter for permitted uses whose job is in one of these states."""

    def is_in_state(use: ScriptUse) -> bool:
        if not is_allowed(use):
            return False
        job = context.jobs.find_by_scripts([use.key], use.cluster).get(use.key)
        return job is not None and job.record.state in states

    return is_in_state


def _list_script_keys(jobs: Sequence[Job]) -> frozenset[tuple[str, str]]:
    return frozenset((job.cluster, job.script_key) for job in jobs if job.script_key)


def _make_hits(
    context: ArchiveContext, caller: Caller, hits: Sequence[ScriptHit]
) -> tuple[SearchHit, ...]:
    keys: dict[str, list[str]] = {}
    for hit in hits:
        keys.setdefault(hit.use.cluster, []).append(hit.use.key)
    jobs = {
        (cluster, key): job
        for cluster, cluster_keys in keys.items()
        for key, job in context.jobs.find_by_scripts(cluster_keys, cluster).items()
    }
    lines = [_make_hit_line(context, caller, hit.use, jobs) for hit in hits]
    return tuple(
        SearchHit(job=line, lines=hit.lines, more_lines=hit.more_lines)
        for hit, line in zip(hits, lines, strict=True)
    )


def _make_hit_line(
    context: ArchiveContext, caller: Caller, use: ScriptUse, jobs: dict[tuple[str, str], Job]
) -> JobLine:
    """Make the reply row of a hit."""
    job = jobs.get((use.cluster, use.key))
    if job is not None:
        line = context.make_job_line(caller, job)
        # The use is the array's, not that of the task which has the array's id.
        is_array = job.record.array_job_id == use.job_id
        return msgspec.structs.replace(line, job=str(use.job_id)) if is_array else line
    # The catalog was rebuilt from files of which jobs.db has no job.
    return JobLine(
        cluster=use.cluster,
        job=str(use.job_id),
        job_id=use.job_id,
        kind="batch",
        name=use.name,
        user=use.user,
        uid=use.uid,
        account=use.account,
        partition=use.partition,
        submit=use.time,
        script_key=use.key,
    )


def _count_events_behind(context: ArchiveContext, consumer: str) -> int | None:
    """Return how many events a consumer is behind; None if unknown."""
    try:
        reader = JournalReader(context.settings.state_dir)
        try:
            statuses = [status for status in reader.list_consumers() if status.name == consumer]
        finally:
            reader.close()
    except StewardError as error:
        # The hits are valid without this number.
        log.debug("cannot read the lag of %s: %s", consumer, error)
        return None
    return statuses[0].lag if statuses else None


_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MAX_CONTEXT_LINES = 1000


@action(
    "archive.show",
    scope="scripts",
    command="archive show",
    routes=(route("GET /jobs/{job}/script"),),
)
def show_job(context: ArchiveContext, caller: Caller, request: ShowRequest) -> ShowReply:
    """Show a job and its script.

    For an array task, the command shows the script of the array; for a component of a
    heterogeneous job, the script of the leader. If Slurm reused the id, it shows the newest job
    and mentions the others.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: A resubmission script was requested, and no script is archived.
        UsageError: A resubmission script was requested for a job that is not Slurm's.
    """
    with context.jobs.snapshot():
        job, others = context.find(caller, request.job, request.cluster)
        script = context.jobs.find_script(job)
        runs = context.jobs.list_runs(job)
        tasks = _find_named_tasks(context, job, request.job)
    has_bytes = script is not None and script.body.script is not None
    data = context.read_content(script, "script") if script is not None and has_bytes else None
    if request.sbatch and data is None:
        raise _make_not_archived_error(job)
    if request.sbatch and context.get_scheduler(job.cluster) != "slurm":
        raise UsageError(
            f"job {job.label} of cluster {job.cluster} is not a Slurm job, so sbatch cannot "
            f"submit it: 'steward archive show {job.label} --script' prints its script",
            job,
        )
    sbatch = ""
    if request.sbatch and data is not None and script is not None:
        environment = context.read_environment(script)
        sbatch = write_resubmission_script(context.add_submit_line(job), data, tasks, environment)
    return ShowReply(
        job=context.make_job_line(caller, job, script),
        record=job.record,
        runs=tuple(make_run_line(run) for run in runs),
        script=context.make_script_line(script) if script is not None else None,
        content=EncodedContent.from_bytes(data) if data is not None else None,
        script_of=_get_script_owner_id(job, script),
        others=tuple(context.make_job_line(caller, other) for other in others),
        sbatch=sbatch,
        zone=context.get_time_zone(job.cluster),
    )


@action(
    "archive.env",
    scope="scripts",
    command="archive env",
    routes=(route("GET /jobs/{job}/environment"),),
)
def show_environment(
    context: ArchiveContext, caller: Caller, request: EnvironmentRequest
) -> EnvironmentReply:
    """Show the environment of a job at submission.

    Steward redacts values that look like secrets before it archives them.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: No environment is archived.
    """
    job, script = _find_job_and_script(context, caller, request.job, request.cluster)
    data = context.read_content(script, "environment")
    variables = []
    for name, value in split_entries(data):
        text = name.decode("utf-8", "backslashreplace")
        if request.names and not any(
            fnmatch.fnmatchcase(text, pattern) for pattern in request.names
        ):
            continue
        content = EncodedContent.from_bytes(value or b"")
        variables.append(EnvironmentVariable(name=text, value=content, redacted=value == REDACTED))
    return EnvironmentReply(
        job=context.make_job_line(caller, job, script),
        variables=tuple(variables),
        redacted=script.body.redacted,
        flags=script.body.flags,
    )


@action(
    "archive.diff",
    scope="scripts",
    command="archive diff",
    routes=(route("GET /jobs/{left}/diff/{right}"),),
)
def compare_scripts(context: ArchiveContext, caller: Caller, request: DiffRequest) -> DiffReply:
    """Compare the scripts of two jobs.

    The command prints a unified diff. The exit code is that of diff(1): 0 if they are
    equal, 1 if they differ, 2 if the comparison fails.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: One of the jobs has no archived script.
    """
    left, left_script = _find_job_and_script(context, caller, request.left, request.cluster)
    right, right_script = _find_job_and_script(context, caller, request.right, request.cluster)
    names = (request.left.strip().encode(), request.right.strip().encode())
    context_lines = min(request.context, _MAX_CONTEXT_LINES)
    pieces = [
        _make_unified_diff(
            context.read_content(left_script, "script"),
            context.read_content(right_script, "script"),
            names,
            context_lines,
        )
    ]
    if request.environments:
        pieces.append(
            _make_unified_diff(
                _format_sorted_variables(context.read_content(left_script, "environment")),
                _format_sorted_variables(context.read_content(right_script, "environment")),
                (names[0] + b" environment", names[1] + b" environment"),
                context_lines,
            )
        )
    text = b"".join(pieces)
    return DiffReply(
        left=context.make_job_line(caller, left, left_script),
        right=context.make_job_line(caller, right, right_script),
        identical=not text,
        diff=EncodedContent.from_bytes(text),
    )


def _find_job_and_script(
    context: ArchiveContext, caller: Caller, text: str, cluster: str
) -> tuple[Job, Script]:
    """Find a job and its script, or raise NotArchived."""
    with context.jobs.snapshot():
        job, _ = context.find(caller, text, cluster)
        script = context.jobs.find_script(job)
    if script is None:
        raise _make_not_archived_error(job)
    return job, script


def _make_not_archived_error(job: Job) -> NotArchived:
    """Make the error for a job without an archived script."""
    if job.purged:
        return NotArchived(f"the script of job {job.label} was erased", job)
    if job.record.batch is False:
        return NotArchived(f"job {job.label} is interactive and has no script", job)
    return NotArchived(f"job {job.label} has no archived script", job)


def _get_script_owner_id(job: Job, script: Script | None) -> str:
    """Return the job id that owns the script, if it differs from the job's; else ""."""
    if script is None or script.body.job_id == job.job_id:
        return ""
    return str(script.body.job_id)


def _find_named_tasks(context: ArchiveContext, job: Job, text: str) -> tuple[str, ...]:
    """Return the tasks of an array that was named as a whole, else the named task, if any."""
    record = job.record
    if not record.array_job_id:
        return ()
    if job.job_id != record.array_job_id or parse_job_name(text).task is not None:
        return (record.array_task,)
    parts = [part for part in context.jobs.list_parts(job) if part.record.array_job_id]
    return (record.array_task, *(part.record.array_task for part in parts))


def _format_sorted_variables(environment: bytes) -> bytes:
    lines = sorted(name + b"=" + (value or b"") for name, value in split_entries(environment))
    return b"\n".join(lines) + b"\n" if lines else b""


def _make_unified_diff(
    left: bytes, right: bytes, names: tuple[bytes, bytes], context_lines: int
) -> bytes:
    """Return a unified diff of two texts; b"" if they are equal."""
    if left == right:
        return b""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        _LINE.findall(left),
        _LINE.findall(right),
        fromfile=names[0],
        tofile=names[1],
        n=context_lines,
    )
    no_newline = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + no_newline for line in lines)
