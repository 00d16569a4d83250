"""Jobs page: list of jobs with filters, counts by state, and search in scripts.

``web/job_list.py`` defines the columns and parses the address.
"""

from typing import Any, Final

from litestar import Request, Response, get

from steward.accounting.job_list_requests import JobsAnswer, JobStatesAnswer
from steward.archive.requests import SearchReply
from steward.bank.actions.jobs import ChargedJob, ChargedReply, ChargedRequest
from steward.core.layouts import Column
from steward.slurm.job_states import SHORT_STATES, STATE_NAMES
from steward.web.authentication import AuthenticatedRequest
from steward.web.formats import mark_matches
from steward.web.job_list import (
    COLUMNS,
    COST_COLUMN,
    DEFAULT_ROWS,
    JOB_COLUMN,
    MOST_ROWS,
    JobListView,
    make_cost_column,
)
from steward.web.renderer import Renderer

HttpRequest = Request[Any, Any, Any]

_STATES: Final = (
    *("PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"),
    *("OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "SUSPENDED"),
)
"""States offered as filters; the address accepts any other."""


@get("/jobs", include_in_schema=False)
async def jobs(request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the job list; for htmx, only the next rows."""
    view = JobListView.parse(request)
    if view.text:
        return await _make_search_page(view, auth, pages)
    # The address holds how many rows are loaded, for when the user returns; only the link to the
    # next rows holds their cursor.
    rows_before = _read_rows_before(request)
    reply: JobsAnswer = await auth.call_action("accounting.jobs", view.make_jobs_request())
    columns = view.choose_columns(several_clusters=len(auth.me.clusters) > 1, has_bank=auth.me.bank)
    context: dict[str, Any] = {
        "here": "/jobs",
        "view": view,
        "job_column": JOB_COLUMN,
        "columns": await _add_costs(auth, reply, columns),
        "answer": reply,
        "come": rows_before + len(reply.jobs),
        "begin": str(request.query_params.get("begin", "")) if rows_before else view.page,
        "is_tasks": request.query_params.get("part") == "tasks",
    }
    if auth.is_part:
        headers = {}
        if rows_before and rows_before + len(reply.jobs) <= MOST_ROWS:
            first_cursor = str(request.query_params.get("begin", ""))
            parameters = view.query(
                page=first_cursor, rows=max(DEFAULT_ROWS, rows_before + len(reply.jobs))
            )
            headers = {"HX-Replace-Url": pages.make_address("/jobs", **parameters)}
        return pages.render_page("_job_rows.html", auth, headers=headers, **context)
    return pages.render_page(
        "jobs.html",
        auth,
        all_columns={
            key: column
            for key, column in COLUMNS.items()
            if auth.me.bank or column is not COST_COLUMN
        },
        chosen={column.name for column in columns},
        states=_list_offered_states(view),
        usual=_list_default_columns(auth),
        **context,
    )


@get("/jobs/counts", include_in_schema=False)
async def counts(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Show the number of jobs of a view in each state."""
    view = JobListView.parse(request)
    reply: JobStatesAnswer = await auth.call_action(
        "accounting.job_states", view.make_counts_request()
    )
    return pages.render_page_or_part("job_counts.html", auth, here="/jobs", view=view, answer=reply)


async def _make_search_page(
    view: JobListView, auth: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Return the page of search hits."""
    reply: SearchReply = await auth.call_action("archive.search", view.make_search_request())
    return pages.render_page_or_part(
        "job_hits.html",
        auth,
        here="/jobs",
        view=view,
        answer=reply,
        states=_list_offered_states(view),
        marked=mark_matches,
        usual=(),
        all_columns={},
        columns=(),
    )


async def _add_costs(
    auth: AuthenticatedRequest, reply: JobsAnswer, columns: tuple[Column, ...]
) -> list[Column]:
    """Return the columns with the jobs' charges; fetch these only if a column shows them."""
    chargeable = tuple(
        ChargedJob(cluster=row.cluster, job_id=row.job_id, first_submit=row.submit)
        for row in reply.jobs
        if not row.tasks
    )
    if not chargeable or COST_COLUMN not in columns:
        return list(columns)
    charged_reply: ChargedReply = await auth.call_action(
        "bank.charged", ChargedRequest(jobs=chargeable)
    )
    costs = {(job.cluster, job.job_id): job.amount for job in charged_reply.jobs}

    cost_column = make_cost_column(costs, charged_reply.decimals)
    return [cost_column if column is COST_COLUMN else column for column in columns]


def _list_default_columns(auth: AuthenticatedRequest) -> list[str]:
    """Return the keys of the default columns, in display order."""
    several_clusters = len(auth.me.clusters) > 1
    return [
        column.name.lower()
        for column in JobListView().choose_columns(
            several_clusters=several_clusters, has_bank=auth.me.bank
        )
    ]


def _read_rows_before(request: HttpRequest) -> int:
    """Read how many rows precede the requested ones; 0 if absent or invalid."""
    text = str(request.query_params.get("before", ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def _list_offered_states(view: JobListView) -> list[str]:
    """Return the states offered as filters, including those of the view."""
    other_states = [state for state in view.states if state.upper() not in _STATES]
    valid_states = [
        state
        for state in other_states
        if SHORT_STATES.get(state.upper(), state.upper()) in STATE_NAMES
    ]
    return [*_STATES, *valid_states]


ROUTES: Final = (jobs, counts)
