"""Jobs page: list of jobs with filters, counts by state, and search in scripts.

``web/job_list.py`` defines the columns and parses the address.
"""

from typing import Any, Final

from litestar import Request, Response, get

from steward.accounting.job_list_requests import JobsAnswer, JobStatesAnswer
from steward.archive.requests import SearchAnswer
from steward.bank.actions.jobs import ChargedAnswer, ChargedJob, ChargedRequest
from steward.slurm.job_states import NAMES, SHORT
from steward.web.authentication import Visit
from steward.web.formats import marked
from steward.web.job_list import COLUMNS, MOST_ROWS, ROWS, Column, Shown, View
from steward.web.rendering import Renderer

Ask = Request[Any, Any, Any]

_STATES: Final = (
    *("PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"),
    *("OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "SUSPENDED"),
)
"""States offered as filters; the address accepts any other."""


@get("/jobs", include_in_schema=False)
async def jobs(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Show the job list; for htmx, only the next rows."""
    view = View.of(request)
    if view.text:
        return await _search(view, visit, pages)
    # The address holds how many rows are loaded, for when the user returns; only the link to the
    # next rows holds their cursor.
    come = _rows_before(request)
    answer: JobsAnswer = await visit.ask("accounting.jobs", view.listed())
    columns = view.shown(several_clusters=len(visit.me.clusters) > 1, bank=visit.me.bank)
    shown = await _shown(visit, answer, columns)
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
            there = view.query(page=begun, rows=max(ROWS, come + len(answer.jobs)))
            headers = {"HX-Replace-Url": pages.url("/jobs", **there)}
        return pages.page("_job_rows.html", visit, headers=headers, **context)
    return pages.page(
        "jobs.html",
        visit,
        all_columns=[one for one in COLUMNS.values() if visit.me.bank or not one.of_bank],
        states=_offered(view),
        usual=_usual(visit),
        **context,
    )


@get("/jobs/counts", include_in_schema=False)
async def counts(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Show the number of jobs of a view in each state."""
    view = View.of(request)
    answer: JobStatesAnswer = await visit.ask("accounting.job_states", view.counted())
    return pages.either("job_counts.html", visit, here="/jobs", view=view, answer=answer)


async def _search(view: View, visit: Visit, pages: Renderer) -> Response[Any]:
    """Return the page of search hits."""
    answer: SearchAnswer = await visit.ask("archive.search", view.searched())
    return pages.either(
        "job_hits.html",
        visit,
        here="/jobs",
        view=view,
        answer=answer,
        states=_offered(view),
        zones={role.cluster: role.zone for role in visit.me.clusters},
        marked=marked,
        usual=(),
        all_columns=(),
        columns=(),
    )


async def _shown(visit: Visit, answer: JobsAnswer, columns: tuple[Column, ...]) -> Shown:
    """Return the data that cells need; fetch charges only if a column shows them."""
    zones = {role.cluster: role.zone for role in visit.me.clusters}
    wanted = tuple(
        ChargedJob(cluster=row.cluster, job_id=row.job_id, first_submit=row.submit)
        for row in answer.jobs
        if not row.tasks
    )
    if not wanted or not any(column.of_bank for column in columns):
        return Shown(zones)
    charged: ChargedAnswer = await visit.ask("bank.charged", ChargedRequest(jobs=wanted))
    costs = {(one.cluster, one.job_id): one.amount for one in charged.jobs}
    return Shown(zones, costs, charged.unit, charged.decimals)


def _usual(visit: Visit) -> list[str]:
    """Return the keys of the default columns, in display order."""
    several = len(visit.me.clusters) > 1
    return [one.key for one in View().shown(several_clusters=several, bank=visit.me.bank)]


def _rows_before(request: Ask) -> int:
    """Read how many rows precede the requested ones; 0 if absent or invalid."""
    given = str(request.query_params.get("before", ""))
    return int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0


def _offered(view: View) -> list[str]:
    """Return the states offered as filters, including those of the view."""
    others = [one for one in view.states if one.upper() not in _STATES]
    known = [one for one in others if SHORT.get(one.upper(), one.upper()) in NAMES]
    return [*_STATES, *known]


ROUTES: Final = (jobs, counts)
