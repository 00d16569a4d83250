"""The actions that find jobs: list by what Slurm says of them, search by what they ran."""

import logging
from collections.abc import Callable, Sequence

import msgspec

from steward.archive.answers import (
    Hit,
    ListAnswer,
    ListRequest,
    SearchAnswer,
    SearchRequest,
)
from steward.archive.catalog.matching import Matcher
from steward.archive.catalog.month import Use
from steward.archive.catalog.search import Found
from steward.archive.errors import ArchiveUnavailable
from steward.archive.library import Library
from steward.archive.remote.kinds import sink_called
from steward.archive.selecting import (
    hits_after,
    hits_place,
    job_filter,
    limited,
    list_position,
    page_after,
    span,
    uses_wanted,
)
from steward.archive.shapes import JobLine
from steward.core.access import Asker
from steward.core.errors import StewardError
from steward.core.journal import JournalReader
from steward.jobs import Job, Script

log = logging.getLogger(__name__)


def list_jobs(library: Library, asker: Asker, request: ListRequest) -> ListAnswer:
    """Jobs, newest first."""
    when = span(library, request)
    wanted = job_filter(request, when, library.scopes(asker))
    limit = limited(request.limit)
    before = list_position(request.page)
    with library.jobs.snapshot():
        # One more than asked for tells whether anything follows.
        jobs = library.jobs.list(wanted, limit + 1, before)
        more = len(jobs) > limit
        jobs = jobs[:limit]
        scripts = _scripts(library, jobs)
        lines = tuple(
            library.line(asker, job, scripts.get((job.cluster, job.script_key))) for job in jobs
        )
    return ListAnswer(
        jobs=lines,
        since=when.since,
        until=when.until,
        default_days=when.default_days,
        next=page_after(jobs[-1].position) if more else "",
        zones=library.zones([job.cluster for job in jobs]),
    )


def search(library: Library, asker: Asker, request: SearchRequest) -> SearchAnswer:
    """Jobs in whose scripts all terms stand, newest first."""
    sink = sink_called(library.settings, request.sink) if request.sink else ""
    matcher = Matcher(request.terms, case=request.case, words=request.words)
    when = span(library, request, default=False)
    wanted = uses_wanted(library, asker, request, when)
    allowed = _allowed(library, asker)
    if request.jobs or request.states:
        filter_ = job_filter(request, when, library.scopes(asker, scripts=True))
        if request.jobs:
            wanted = msgspec.structs.replace(wanted, keys=_keys(library.jobs.list(filter_, -1)))
        else:
            allowed = _in_state(library, allowed, frozenset(filter_.states))
    searcher = library.searcher_in(sink) if sink else library.searcher
    try:
        page = searcher.page(
            matcher,
            wanted,
            allowed,
            limit=limited(request.limit),
            lines=max(0, min(request.lines, 1000)),
            after=hits_place(request.page),
        )
        count = searcher.count(matcher, wanted, allowed) if request.count else None
    except ArchiveUnavailable as error:
        # Where the server is and what it says of itself is not for everybody.
        if not sink or library.is_operator(asker):
            raise
        log.warning("a search in sink %s by uid %s failed: %s", sink, asker.uid, error)
        raise ArchiveUnavailable(
            f"the server of sink {sink!r} could not answer this search: an operator finds the "
            "reason in Steward's log",
            sink,
        ) from None
    return SearchAnswer(
        hits=_hits(library, asker, page.hits),
        count=count,
        next=hits_after(page.after) if page.after else "",
        complete=page.complete,
        behind=_behind(library, f"archive.{sink}" if sink else "catalogue"),
        zones=library.zones([found.use.cluster for found in page.hits]),
    )


def _scripts(library: Library, jobs: Sequence[Job]) -> dict[tuple[str, str], Script]:
    """The scripts of these jobs, by cluster and key."""
    found: dict[tuple[str, str], Script] = {}
    for job in jobs:
        ref = (job.cluster, job.script_key)
        if job.script_key and ref not in found:
            script = library.jobs.script_of(job)
            if script is not None:
                found[ref] = script
    return found


def _allowed(library: Library, asker: Asker) -> Callable[[Use], bool]:
    """Decides on uses; of each owner and account once."""
    decided: dict[tuple[str, int | None, str, str], bool] = {}

    def allowed(use: Use) -> bool:
        who = (use.cluster, use.uid, use.user, use.account)
        if who not in decided:
            decided[who] = library.access.may_read_script(
                asker, use.cluster, uid=use.uid, user_at_submit=use.user, account=use.account
            )
        return decided[who]

    return allowed


def _in_state(
    library: Library, allowed: Callable[[Use], bool], states: frozenset[str]
) -> Callable[[Use], bool]:
    def is_in_state(use: Use) -> bool:
        if not allowed(use):
            return False
        job = library.jobs.by_script([use.key], use.cluster).get(use.key)
        return job is not None and job.record.state in states

    return is_in_state


def _keys(jobs: Sequence[Job]) -> frozenset[tuple[str, str]]:
    return frozenset((job.cluster, job.script_key) for job in jobs if job.script_key)


def _hits(library: Library, asker: Asker, found: Sequence[Found]) -> tuple[Hit, ...]:
    keys: dict[str, list[str]] = {}
    for hit in found:
        keys.setdefault(hit.use.cluster, []).append(hit.use.key)
    jobs = {
        (cluster, key): job
        for cluster, of_cluster in keys.items()
        for key, job in library.jobs.by_script(of_cluster, cluster).items()
    }
    lines = [_line(library, asker, hit.use, jobs) for hit in found]
    return tuple(
        Hit(job=line, lines=hit.lines, more_lines=hit.more_lines)
        for hit, line in zip(found, lines, strict=True)
    )


def _line(library: Library, asker: Asker, use: Use, jobs: dict[tuple[str, str], Job]) -> JobLine:
    job = jobs.get((use.cluster, use.key))
    if job is not None:
        line = library.line(asker, job)
        # The array is meant, not the task that happens to have its id.
        is_array = job.record.array_job_id == use.job_id
        return msgspec.structs.replace(line, job=str(use.job_id)) if is_array else line
    # The catalogue was made again from files that jobs.db does not know (any more).
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


def _behind(library: Library, consumer: str) -> int | None:
    """How many events a consumer has still to look at."""
    try:
        reader = JournalReader(library.settings.state_dir)
        try:
            of = [status for status in reader.consumers() if status.name == consumer]
        finally:
            reader.close()
    except StewardError as error:
        # The hits are right without it.
        log.debug("how far %s is behind is not known: %s", consumer, error)
        return None
    return of[0].behind if of else None
