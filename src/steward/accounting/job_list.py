"""Job lists: the actions that list jobs and count them by state, within permissions.

:func:`jobs` returns one page of jobs or arrays with their resources and usage, :func:`job_states`
the counts. The requests and replies are in :mod:`steward.accounting.job_list_requests`; the web
pages of jobs show them.
"""

import base64
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.accounting.context import AccountingRoom
from steward.accounting.errors import AccountingUsage
from steward.accounting.job_list_requests import (
    JobRow,
    JobsAnswer,
    JobsRequest,
    JobStatesAnswer,
    JobStatesRequest,
)
from steward.accounting.job_page.job_efficiency import cpu_used_s, elapsed_s, share_of, tres
from steward.archive.requests import Selection
from steward.archive.selection import Span, job_filter
from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.records import JobRecord, Line
from steward.core.timestamps import micros
from steward.jobs import Job, JobFilter
from steward.jobs.queries import Array, Listed, ListPlace
from steward.slurm.job_states import FINISHED
from steward.slurm.times import parse_time, zone_called

MOST_ROWS: Final = 1000
_LONGEST_PAGE: Final = 100_000
_NUMBER_BOUND: Final = 2**62


def jobs(room: AccountingRoom, asker: Asker, request: JobsRequest) -> JobsAnswer:
    """Return one page of jobs.

    Raises:
        UsageError: The request is malformed.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    if not 1 <= request.limit <= MOST_ROWS:
        raise AccountingUsage(f"a limit is from 1 to {MOST_ROWS}", request.limit)
    wanted = _filter(room, asker, request)
    place = _place(request.page)
    together = request.arrays == "together" and request.order.endswith("submit")
    with room.jobs.snapshot():
        listed, following = room.jobs.listed(
            wanted, request.order, request.limit, place, together=together
        )
        found = room.jobs.by_numbers(one.number for one in listed)
        single = [found[one.number] for one in listed if one.array is None]
        lines = room.jobs.last_lines(single)
        arrays = room.jobs.states_of_tasks(one.array for one in listed if one.array is not None)
    now = room.now()
    now_us = micros(now)
    rows = tuple(_row(one, found[one.number], lines, arrays, now_us) for one in listed)
    return JobsAnswer(
        jobs=rows,
        now=now,
        next=_page(following) if following is not None else "",
        zones={row.cluster: room.zone(row.cluster) for row in rows},
    )


def job_states(room: AccountingRoom, asker: Asker, request: JobStatesRequest) -> JobStatesAnswer:
    """Count jobs by state.

    Raises:
        UsageError: The request is malformed.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    found, is_all = room.jobs.states_of(_filter(room, asker, request))
    states = dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
    return JobStatesAnswer(states=states, total=sum(states.values()), is_all=is_all)


def _filter(room: AccountingRoom, asker: Asker, request: Selection) -> JobFilter:
    """Build the job filter of a request, within what the requester may see."""
    clusters = request.clusters or (room.main_cluster,)
    zone = zone_called(request.zone or room.zone(clusters[0]))
    now = room.now()
    when = Span(
        since=parse_time(request.since, now, zone) if request.since else None,
        until=parse_time(request.until, now, zone) if request.until else None,
    )
    return job_filter(request, when, room.scopes(asker))


def _row(
    listed: Listed,
    job: Job,
    lines: Mapping[int, Line],
    arrays: Mapping[Array, dict[str, int]],
    now_us: int,
) -> JobRow:
    """Build a row for a job or an array."""
    record = job.record
    row = JobRow(
        cluster=job.cluster,
        job=job.label,
        job_id=job.job_id,
        array_job_id=record.array_job_id,
        name=record.name,
        user=record.user,
        uid=record.uid,
        account=record.account,
        partition=record.partition,
        qos=record.qos,
        state=record.state,
        verified=job.verified,
        submit=job.first_submit,
        limit_s=record.time_limit_s,
    )
    if listed.array is not None:
        tasks = arrays.get(listed.array, {})
        return msgspec.structs.replace(row, job=str(listed.array[1]), tasks=tasks)
    return _single(row, job, lines.get(job.number), now_us)


def _single(row: JobRow, job: Job, line: Line | None, now_us: int) -> JobRow:
    """Complete the row of a single job with times, usage and efficiency."""
    record = job.record
    given = tres(record.tres_allocated or record.tres_requested)
    is_over = record.state in FINISHED
    elapsed = elapsed_s(line, now_us) if line is not None else _elapsed_s(record, now_us)
    used = cpu_used_s(line) if line is not None else None
    peak = (line.peak_bytes or line.max_rss_bytes) if line is not None else None
    per_node = given.get("mem", 0) // max(record.nodes or 1, 1)
    allowed = (line.peak_allocated_bytes if line is not None else None) or per_node
    return msgspec.structs.replace(
        row,
        reason=record.reason if record.reason != "None" else "",
        eligible=record.eligible,
        start=record.start if line is None or line.start_us else None,
        end=record.end if is_over else None,
        elapsed_s=elapsed,
        waited_s=_waited_s(record, line, now_us),
        nodes=record.nodes,
        nodelist=record.nodelist,
        cpus=record.cpus,
        memory_bytes=given.get("mem"),
        tres=record.tres_allocated or record.tres_requested,
        cpu_used_s=used,
        cpu=share_of(used, elapsed * record.cpus) if is_over and elapsed and record.cpus else None,
        peak_bytes=peak,
        memory=share_of(peak, allowed),
        exit_code=record.exit_code,
        exit_signal=record.exit_signal,
        restarts=record.restarts,
    )


def _elapsed_s(record: JobRecord, now_us: int) -> float | None:
    """Return the elapsed seconds of a job without an accounting line."""
    if record.start is None or record.nodelist == "":
        return None
    end_us = micros(record.end) if record.end is not None and record.state in FINISHED else now_us
    elapsed = (end_us - micros(record.start)) / 1e6 - (record.suspended_s or 0)
    return max(0.0, elapsed)


def _waited_s(record: JobRecord, line: Line | None, now_us: int) -> float | None:
    """Return the seconds from eligible time to start, end or now."""
    since = record.eligible or record.submit
    if since is None:
        return None
    started_us = line.start_us if line is not None else 0
    if not started_us:
        if record.state in FINISHED and record.end is None:
            return None
        started_us = micros(record.end) if record.state in FINISHED and record.end else now_us
    return max(0.0, (started_us - micros(since)) / 1e6)


def _page(place: ListPlace) -> str:
    """Encode a list position as an opaque page token."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode("ascii").rstrip("=")


def _place(page: str) -> ListPlace | None:
    """Decode a page token; None for the first page."""
    if not page:
        return None
    wrong = AccountingUsage("no answer gave such a page: begin with the first", page[:100])
    if len(page) > _LONGEST_PAGE:
        raise wrong
    padded = page.encode("ascii", "replace") + b"=" * (-len(page) % 4)
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=ListPlace)
    except (ValueError, msgspec.MsgspecError) as error:
        raise wrong from error
    numbers = (place.at_us, place.job_id, place.number)
    if any(abs(number) >= _NUMBER_BOUND for number in numbers):
        raise wrong
    return place


JOBS: Final = Action(
    name="accounting.jobs",
    help="List jobs with what they were given and used.",
    request=JobsRequest,
    answer=JobsAnswer,
    run=jobs,
    only_reads=True,
)
JOB_STATES: Final = Action(
    name="accounting.job_states",
    help="Count jobs by state.",
    request=JobStatesRequest,
    answer=JobStatesAnswer,
    run=job_states,
    only_reads=True,
)
