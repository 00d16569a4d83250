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
from steward.archive.context import ArchiveContext, make_run_line
from steward.archive.errors import ArchiveUnavailable, NotArchived
from steward.archive.messages import EncodedContent
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
    check_limit,
    make_hits_page_token,
    make_job_filter,
    make_list_page_token,
    make_use_filter,
    parse_hits_page_token,
    parse_list_page_token,
    resolve_selection_span,
)
from steward.core.access import Asker
from steward.core.errors import StewardError, UsageError
from steward.core.journal import JournalReader
from steward.core.redaction import REDACTED
from steward.jobs import Job, Script, parse_job_name
from steward.slurm.environment import split_entries

log = logging.getLogger(__name__)


def list_jobs(library: ArchiveContext, asker: Asker, request: JobListRequest) -> JobListReply:
    """List jobs, newest first."""
    when = resolve_selection_span(library, request)
    wanted = make_job_filter(request, when, library.scopes(asker))
    limit = check_limit(request.limit)
    before = parse_list_page_token(request.page)
    with library.jobs.snapshot():
        # One row more than requested shows whether there is a next page.
        jobs = library.jobs.list(wanted, limit + 1, before)
        more = len(jobs) > limit
        jobs = jobs[:limit]
        scripts = _find_scripts(library, jobs)
        lines = tuple(
            library.line(asker, job, scripts.get((job.cluster, job.script_key))) for job in jobs
        )
    return JobListReply(
        jobs=lines,
        since=when.since,
        until=when.until,
        default_days=when.default_days,
        next=make_list_page_token(jobs[-1].position) if more else "",
        zones=library.zones([job.cluster for job in jobs]),
    )


def search_scripts(library: ArchiveContext, asker: Asker, request: SearchRequest) -> SearchReply:
    """Find jobs whose scripts contain all terms, newest first."""
    sink = resolve_searchable_sink(library.settings, request.sink) if request.sink else ""
    matcher = TermMatcher(request.terms, case=request.case, words=request.words)
    when = resolve_selection_span(library, request, default=False)
    wanted = make_use_filter(library, asker, request, when)
    allowed = _make_use_filter(library, asker)
    if request.jobs or request.states:
        filter_ = make_job_filter(request, when, library.scopes(asker, scripts=True))
        if request.jobs:
            wanted = msgspec.structs.replace(
                wanted, keys=_list_script_keys(library.jobs.list(filter_, -1))
            )
        else:
            allowed = _make_state_filter(library, allowed, frozenset(filter_.states))
    searcher = library.searcher_in(sink) if sink else library.searcher
    try:
        page = searcher.page(
            matcher,
            wanted,
            allowed,
            limit=check_limit(request.limit),
            lines=max(0, min(request.lines, 1000)),
            after=parse_hits_page_token(request.page),
        )
        count = searcher.count(matcher, wanted, allowed) if request.count else None
    except ArchiveUnavailable as error:
        # The server's address and messages are for operators only.
        if not sink or library.is_operator(asker):
            raise
        log.warning("a search in sink %s by uid %s failed: %s", sink, asker.uid, error)
        raise ArchiveUnavailable(
            f"the server of sink {sink!r} could not answer this search: an operator finds the "
            "reason in Steward's log",
            sink,
        ) from None
    return SearchReply(
        hits=_make_hits(library, asker, page.hits),
        count=count,
        next=make_hits_page_token(page.after) if page.after else "",
        complete=page.complete,
        behind=_count_events_behind(library, f"archive.{sink}" if sink else "catalogue"),
        zones=library.zones([found.use.cluster for found in page.hits]),
    )


def _find_scripts(library: ArchiveContext, jobs: Sequence[Job]) -> dict[tuple[str, str], Script]:
    """Return the scripts of these jobs, by cluster and key."""
    found: dict[tuple[str, str], Script] = {}
    for job in jobs:
        ref = (job.cluster, job.script_key)
        if job.script_key and ref not in found:
            script = library.jobs.script_of(job)
            if script is not None:
                found[ref] = script
    return found


def _make_use_filter(library: ArchiveContext, asker: Asker) -> Callable[[ScriptUse], bool]:
    """Make a permission check for script uses that caches its answer by owner and account."""
    decided: dict[tuple[str, int | None, str, str], bool] = {}

    def allowed(use: ScriptUse) -> bool:
        who = (use.cluster, use.uid, use.user, use.account)
        if who not in decided:
            decided[who] = library.access.may_read_script(
                asker, use.cluster, uid=use.uid, user_at_submit=use.user, account=use.account
            )
        return decided[who]

    return allowed


def _make_state_filter(
    library: ArchiveContext, allowed: Callable[[ScriptUse], bool], states: frozenset[str]
) -> Callable[[ScriptUse], bool]:
    """Make a filter for permitted uses whose job is in one of these states."""

    def is_in_state(use: ScriptUse) -> bool:
        if not allowed(use):
            return False
        job = library.jobs.by_script([use.key], use.cluster).get(use.key)
        return job is not None and job.record.state in states

    return is_in_state


def _list_script_keys(jobs: Sequence[Job]) -> frozenset[tuple[str, str]]:
    return frozenset((job.cluster, job.script_key) for job in jobs if job.script_key)


def _make_hits(
    library: ArchiveContext, asker: Asker, found: Sequence[ScriptHit]
) -> tuple[SearchHit, ...]:
    keys: dict[str, list[str]] = {}
    for hit in found:
        keys.setdefault(hit.use.cluster, []).append(hit.use.key)
    jobs = {
        (cluster, key): job
        for cluster, of_cluster in keys.items()
        for key, job in library.jobs.by_script(of_cluster, cluster).items()
    }
    lines = [_make_hit_line(library, asker, hit.use, jobs) for hit in found]
    return tuple(
        SearchHit(job=line, lines=hit.lines, more_lines=hit.more_lines)
        for hit, line in zip(found, lines, strict=True)
    )


def _make_hit_line(
    library: ArchiveContext, asker: Asker, use: ScriptUse, jobs: dict[tuple[str, str], Job]
) -> JobLine:
    """Make the reply row of a hit."""
    job = jobs.get((use.cluster, use.key))
    if job is not None:
        line = library.line(asker, job)
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


def _count_events_behind(library: ArchiveContext, consumer: str) -> int | None:
    """Return how many events a consumer is behind; None if unknown."""
    try:
        reader = JournalReader(library.settings.state_dir)
        try:
            of = [status for status in reader.consumers() if status.name == consumer]
        finally:
            reader.close()
    except StewardError as error:
        # The hits are valid without this number.
        log.debug("how far %s is behind is not known: %s", consumer, error)
        return None
    return of[0].behind if of else None


_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MOST_CONTEXT = 1000


def show_job(library: ArchiveContext, asker: Asker, request: ShowRequest) -> ShowReply:
    """Show one job, its runs and its script.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: A resubmission script was requested, and no script is archived.
        UsageError: A resubmission script was requested for a job that is not Slurm's.
    """
    with library.jobs.snapshot():
        job, others = library.find(asker, request.job, request.cluster)
        script = library.jobs.script_of(job)
        runs = library.jobs.runs_of(job)
        tasks = _find_named_tasks(library, job, request.job)
    has_bytes = script is not None and script.body.script is not None
    data = library.content(script, "script") if script is not None and has_bytes else None
    if request.sbatch and data is None:
        raise _make_not_archived_error(job)
    if request.sbatch and library.scheduler(job.cluster) != "slurm":
        raise UsageError(
            f"job {job.label} of cluster {job.cluster} is not Slurm's, so no sbatch submits it "
            f"again: 'steward archive show {job.label} --script' prints its script",
            job,
        )
    sbatch = ""
    if request.sbatch and data is not None and script is not None:
        environment = library.environment(script)
        sbatch = write_resubmission_script(library.with_submit_line(job), data, tasks, environment)
    return ShowReply(
        job=library.line(asker, job, script),
        record=job.record,
        runs=tuple(make_run_line(run) for run in runs),
        script=library.script_line(script) if script is not None else None,
        content=EncodedContent.of(data) if data is not None else None,
        script_of=_get_script_owner_id(job, script),
        others=tuple(library.line(asker, other) for other in others),
        sbatch=sbatch,
        zone=library.zone(job.cluster),
    )


def show_environment(
    library: ArchiveContext, asker: Asker, request: EnvironmentRequest
) -> EnvironmentReply:
    """Show the redacted environment that a job was submitted with.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: No environment is archived.
    """
    job, script = _find_job_and_script(library, asker, request.job, request.cluster)
    data = library.content(script, "environment")
    variables = []
    for name, value in split_entries(data):
        text = name.decode("utf-8", "backslashreplace")
        if request.names and not any(fnmatch.fnmatchcase(text, want) for want in request.names):
            continue
        shown = EncodedContent.of(value or b"")
        variables.append(EnvironmentVariable(name=text, value=shown, redacted=value == REDACTED))
    return EnvironmentReply(
        job=library.line(asker, job, script),
        variables=tuple(variables),
        redacted=script.body.redacted,
        flags=script.body.flags,
    )


def compare_scripts(library: ArchiveContext, asker: Asker, request: DiffRequest) -> DiffReply:
    """Compare the scripts of two jobs as a unified diff.

    Raises:
        JobNotFound, JobNotReadable: See :meth:`ArchiveContext.find`.
        NotArchived: One of the jobs has no archived script.
    """
    left, left_script = _find_job_and_script(library, asker, request.left, request.cluster)
    right, right_script = _find_job_and_script(library, asker, request.right, request.cluster)
    names = (request.left.strip().encode(), request.right.strip().encode())
    context = max(0, min(request.context, _MOST_CONTEXT))
    pieces = [
        _make_unified_diff(
            library.content(left_script, "script"),
            library.content(right_script, "script"),
            names,
            context,
        )
    ]
    if request.environments:
        pieces.append(
            _make_unified_diff(
                _format_sorted_variables(library.content(left_script, "environment")),
                _format_sorted_variables(library.content(right_script, "environment")),
                (names[0] + b" environment", names[1] + b" environment"),
                context,
            )
        )
    text = b"".join(pieces)
    return DiffReply(
        left=library.line(asker, left, left_script),
        right=library.line(asker, right, right_script),
        identical=not text,
        diff=EncodedContent.of(text),
    )


def _find_job_and_script(
    library: ArchiveContext, asker: Asker, text: str, cluster: str
) -> tuple[Job, Script]:
    """Find a job and its script, or raise NotArchived."""
    with library.jobs.snapshot():
        job, _ = library.find(asker, text, cluster)
        script = library.jobs.script_of(job)
    if script is None:
        raise _make_not_archived_error(job)
    return job, script


def _make_not_archived_error(job: Job) -> NotArchived:
    """Make the error for a job without an archived script."""
    if job.purged:
        return NotArchived(f"the script of job {job.label} was purged", job)
    if job.record.batch is False:
        return NotArchived(f"job {job.label} is interactive and has no script", job)
    return NotArchived(f"no script of job {job.label} is kept", job)


def _get_script_owner_id(job: Job, script: Script | None) -> str:
    """Return the job id that owns the script, if it differs from the job's; else ""."""
    if script is None or script.body.job_id == job.job_id:
        return ""
    return str(script.body.job_id)


def _find_named_tasks(library: ArchiveContext, job: Job, text: str) -> tuple[str, ...]:
    """Return the tasks of an array that was named as a whole, else the named task, if any."""
    record = job.record
    if not record.array_job_id:
        return ()
    if job.job_id != record.array_job_id or parse_job_name(text).task is not None:
        return (record.array_task,)
    parts = [part for part in library.jobs.parts_of(job) if part.record.array_job_id]
    return (record.array_task, *(part.record.array_task for part in parts))


def _format_sorted_variables(environment: bytes) -> bytes:
    lines = sorted(name + b"=" + (value or b"") for name, value in split_entries(environment))
    return b"\n".join(lines) + b"\n" if lines else b""


def _make_unified_diff(
    left: bytes, right: bytes, names: tuple[bytes, bytes], context: int
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
        n=context,
    )
    no_end = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + no_end for line in lines)
