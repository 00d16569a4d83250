"""Jobs page: list of jobs with filters, counts by state, and search in scripts.

``web/job_list.py`` defines the columns and parses the address.
"""

from typing import Any, Final

from litestar import Request, Response, get

from steward.accounting.job_list_requests import JobsAnswer, JobStatesAnswer
from steward.archive.requests import SearchReply
from steward.bank.actions.jobs import ChargedJob, ChargedReply, ChargedRequest
from steward.slurm.job_states import SHORT_STATES, STATE_NAMES
from steward.web.authentication import AuthenticatedRequest
from steward.web.formats import mark_matches
from steward.web.job_list import (
    COLUMNS,
    DEFAULT_ROWS,
    MOST_ROWS,
    CellContext,
    JobColumn,
    JobListView,
)
from steward.web.rendering import Renderer

HttpRequest = Request[Any, Any, Any]

_STATES: Final = (
    *("PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"),
    *("OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "SUSPENDED"),
)
"""States offered as filters; the address accepts any other."""


@get("/jobs", include_in_schema=False)
async def jobs(request: HttpRequest, visit: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the job list; for htmx, only the next rows."""
    view = JobListView.of(request)
    if view.text:
        return await _make_search_page(view, visit, pages)
    # The address holds how many rows are loaded, for when the user returns; only the link to the
    # next rows holds their cursor.
    come = _read_rows_before(request)
    answer: JobsAnswer = await visit.ask("accounting.jobs", view.listed())
    columns = view.shown(several_clusters=len(visit.me.clusters) > 1, bank=visit.me.bank)
    shown = await _make_cell_context(visit, answer, columns)
    context: dict[str, Any] = {
        "here": "/jobs",
        "view": view,
        "columns": columns,
        "answer": answer,
        "shown": shown,
        "come": come + len(answer.jobs),
        "begin": str(request.query_params.get("begin", "")) if come else view.page,
        "is_tasks": request.query_params.get("part") == "tasks",
    }
    if visit.is_part:
        headers = {}
        if come and come + len(answer.jobs) <= MOST_ROWS:
            begun = str(request.query_params.get("begin", ""))
            there = view.query(page=begun, rows=max(DEFAULT_ROWS, come + len(answer.jobs)))
            headers = {"HX-Replace-Url": pages.url("/jobs", **there)}
        return pages.page("_job_rows.html", visit, headers=headers, **context)
    return pages.page(
        "jobs.html",
        visit,
        all_columns=[one for one in COLUMNS.values() if visit.me.bank or not one.of_bank],
        states=_list_offered_states(view),
        usual=_list_default_columns(visit),
        **context,
    )


@get("/jobs/counts", include_in_schema=False)
async def counts(
    request: HttpRequest, visit: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Show the number of jobs of a view in each state."""
    view = JobListView.of(request)
    answer: JobStatesAnswer = await visit.ask("accounting.job_states", view.counted())
    return pages.either("job_counts.html", visit, here="/jobs", view=view, answer=answer)


async def _make_search_page(
    view: JobListView, visit: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Return the page of search hits."""
    answer: SearchReply = await visit.ask("archive.search", view.searched())
    return pages.either(
        "job_hits.html",
        visit,
        here="/jobs",
        view=view,
        answer=answer,
        states=_list_offered_states(view),
        zones={role.cluster: role.zone for role in visit.me.clusters},
        marked=mark_matches,
        usual=(),
        all_columns=(),
        columns=(),
    )


async def _make_cell_context(
    visit: AuthenticatedRequest, answer: JobsAnswer, columns: tuple[JobColumn, ...]
) -> CellContext:
    """Return the data that cells need; fetch charges only if a column shows them."""
    zones = {role.cluster: role.zone for role in visit.me.clusters}
    wanted = tuple(
        ChargedJob(cluster=row.cluster, job_id=row.job_id, first_submit=row.submit)
        for row in answer.jobs
        if not row.tasks
    )
    if not wanted or not any(column.of_bank for column in columns):
        return CellContext(zones)
    charged: ChargedReply = await visit.ask("bank.charged", ChargedRequest(jobs=wanted))
    costs = {(one.cluster, one.job_id): one.amount for one in charged.jobs}
    return CellContext(zones, costs, charged.unit, charged.decimals)


def _list_default_columns(visit: AuthenticatedRequest) -> list[str]:
    """Return the keys of the default columns, in display order."""
    several = len(visit.me.clusters) > 1
    return [one.key for one in JobListView().shown(several_clusters=several, bank=visit.me.bank)]


def _read_rows_before(request: HttpRequest) -> int:
    """Read how many rows precede the requested ones; 0 if absent or invalid."""
    given = str(request.query_params.get("before", ""))
    return int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0


def _list_offered_states(view: JobListView) -> list[str]:
    """Return the states offered as filters, including those of the view."""
    others = [one for one in view.states if one.upper() not in _STATES]
    known = [one for one in others if SHORT_STATES.get(one.upper(), one.upper()) in STATE_NAMES]
    return [*_STATES, *known]


ROUTES: Final = (jobs, counts)
