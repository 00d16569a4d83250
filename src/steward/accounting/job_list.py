"""Job lists: the actions that list jobs and count them by state, within permissions.

:func:`list_job_rows` returns one page of jobs or arrays with their resources and usage,
:func:`count_job_states` the counts. The requests and replies are in
:mod:`steward.accounting.job_list_requests`; the web pages of jobs show them.
"""

import base64
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.errors import AccountingUsage
from steward.accounting.job_list_requests import (
    JobRow,
    JobsAnswer,
    JobsRequest,
    JobStatesAnswer,
    JobStatesRequest,
)
from steward.accounting.job_page.job_efficiency import (
    compute_cpu_used_s,
    compute_elapsed_s,
    compute_share,
    parse_tres_bytes,
)
from steward.archive.requests import JobSelection
from steward.archive.selection import SelectionSpan, make_job_filter
from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.records import JobRecord, UsageLine
from steward.core.timestamps import to_micros
from steward.jobs import Job, JobFilter
from steward.jobs.queries import Array, ListRow, PageStart
from steward.slurm.job_states import FINISHED
from steward.slurm.times import load_zone, parse_time

_LONGEST_PAGE: Final = 100_000
_NUMBER_BOUND: Final = 2**62


@action(
    "accounting.jobs",
    scope="read",
    routes=(route("GET /jobs", "List jobs.", cursor=("page", "next")),),
    only_reads=True,
)
def list_job_rows(context: AccountingContext, asker: Caller, request: JobsRequest) -> JobsAnswer:
    """List jobs with their allocated and used resources.

    Raises:
        UsageError: The request is malformed.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    job_filter = _build_filter(context, asker, request)
    position = _decode_page(request.page)
    together = request.arrays == "together" and request.order.endswith("submit")
    with context.jobs.snapshot():
        items, next_page = context.jobs.list_page(
            job_filter, request.order, request.limit, position, group_arrays=together
        )
        jobs_by_number = context.jobs.find_by_numbers(item.number for item in items)
        single_jobs = [jobs_by_number[item.number] for item in items if item.array is None]
        lines = context.jobs.read_last_lines(single_jobs)
        arrays = context.jobs.count_task_states(
            item.array for item in items if item.array is not None
        )
    now = context.now()
    now_us = to_micros(now)
    rows = tuple(
        _build_row(item, jobs_by_number[item.number], lines, arrays, now_us) for item in items
    )
    return JobsAnswer(
        jobs=rows,
        now=now,
        next=_encode_page(next_page) if next_page is not None else "",
        zones={row.cluster: context.get_zone(row.cluster) for row in rows},
    )


@action(
    "accounting.job_states",
    scope="read",
    routes=(route("GET /job-states"),),
    only_reads=True,
)
def count_job_states(
    context: AccountingContext, asker: Caller, request: JobStatesRequest
) -> JobStatesAnswer:
    """Count jobs by state.

    Raises:
        UsageError: The request is malformed.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    counts, is_all = context.jobs.count_states(_build_filter(context, asker, request))
    states = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return JobStatesAnswer(states=states, total=sum(states.values()), is_all=is_all)


def _build_filter(context: AccountingContext, asker: Caller, request: JobSelection) -> JobFilter:
    """Build the job filter of a request, within what the requester may see."""
    context.check_clusters(request.clusters)
    clusters = request.clusters or (context.main_cluster,)
    zone = load_zone(request.zone or context.get_zone(clusters[0]))
    now = context.now()
    span = SelectionSpan(
        since=parse_time(request.since, now, zone) if request.since else None,
        until=parse_time(request.until, now, zone) if request.until else None,
    )
    return make_job_filter(request, span, context.get_scopes(asker))


def _build_row(
    item: ListRow,
    job: Job,
    lines: Mapping[int, UsageLine],
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
    if item.array is not None:
        tasks = arrays.get(item.array, {})
        return msgspec.structs.replace(row, job=str(item.array[1]), tasks=tasks)
    return _fill_row(row, job, lines.get(job.number), now_us)


def _fill_row(row: JobRow, job: Job, line: UsageLine | None, now_us: int) -> JobRow:
    """Complete the row of a single job with times, usage and efficiency."""
    record = job.record
    tres_amounts = parse_tres_bytes(record.tres_allocated or record.tres_requested)
    has_ended = record.state in FINISHED
    elapsed = (
        compute_elapsed_s(line, now_us) if line is not None else _compute_elapsed_s(record, now_us)
    )
    used = compute_cpu_used_s(line) if line is not None else None
    peak = (line.peak_bytes or line.max_rss_bytes) if line is not None else None
    per_node = tres_amounts.get("mem", 0) // max(record.nodes or 1, 1)
    allocated_bytes = (line.peak_allocated_bytes if line is not None else None) or per_node
    return msgspec.structs.replace(
        row,
        reason=record.reason if record.reason != "None" else "",
        eligible=record.eligible,
        start=record.start if line is None or line.start_us else None,
        end=record.end if has_ended else None,
        elapsed_s=elapsed,
        waited_s=_compute_waited_s(record, line, now_us),
        nodes=record.nodes,
        nodelist=record.nodelist,
        cpus=record.cpus,
        memory_bytes=tres_amounts.get("mem"),
        tres=record.tres_allocated or record.tres_requested,
        cpu_used_s=used,
        cpu=compute_share(used, elapsed * record.cpus)
        if has_ended and elapsed and record.cpus
        else None,
        peak_bytes=peak,
        memory=compute_share(peak, allocated_bytes),
        exit_code=record.exit_code,
        exit_signal=record.exit_signal,
        restarts=record.restarts,
    )


def _compute_elapsed_s(record: JobRecord, now_us: int) -> float | None:
    """Return the elapsed seconds of a job without an accounting line."""
    if record.start is None or record.nodelist == "":
        return None
    end_us = (
        to_micros(record.end) if record.end is not None and record.state in FINISHED else now_us
    )
    elapsed = (end_us - to_micros(record.start)) / 1e6 - (record.suspended_s or 0)
    return max(0.0, elapsed)


def _compute_waited_s(record: JobRecord, line: UsageLine | None, now_us: int) -> float | None:
    """Return the seconds from eligible time to start, end or now."""
    since = record.eligible or record.submit
    if since is None:
        return None
    started_us = line.start_us if line is not None else 0
    if not started_us:
        if record.state in FINISHED and record.end is None:
            return None
        started_us = to_micros(record.end) if record.state in FINISHED and record.end else now_us
    return max(0.0, (started_us - to_micros(since)) / 1e6)


def _encode_page(position: PageStart) -> str:
    """Encode a list position as an opaque page token."""
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode("ascii").rstrip("=")


def _decode_page(page: str) -> PageStart | None:
    """Decode a page token; None for the first page."""
    if not page:
        return None
    usage_error = AccountingUsage("invalid page token: begin with the first page", page[:100])
    if len(page) > _LONGEST_PAGE:
        raise usage_error
    padded = page.encode("ascii", "replace") + b"=" * (-len(page) % 4)
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=PageStart)
    except (ValueError, msgspec.MsgspecError) as error:
        raise usage_error from error
    numbers = (position.at_us, position.job_id, position.number)
    if any(abs(number) >= _NUMBER_BOUND for number in numbers):
        raise usage_error
    return position
