"""Jobs: a list to look through, and scripts by what stands in them."""

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
"""What is offered; any other may be typed into the address."""


@get("/jobs", include_in_schema=False)
async def jobs(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """The list, or, for a part of it, the rows that follow."""
    view = View.of(request)
    if view.text:
        return await _search(view, visit, pages)
    # How far somebody has come is in the address, for when they come back; where the rows
    # that follow begin is in the link to them alone.
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
    """How many jobs of a view are in each state."""
    view = View.of(request)
    answer: JobStatesAnswer = await visit.ask("accounting.job_states", view.counted())
    return pages.either("job_counts.html", visit, here="/jobs", view=view, answer=answer)


async def _search(view: View, visit: Visit, pages: Renderer) -> Response[Any]:
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
    """What cells need beside their rows; what jobs cost only where that is shown."""
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
    """The columns that who chooses none is shown, in their order."""
    several = len(visit.me.clusters) > 1
    return [one.key for one in View().shown(several_clusters=several, bank=visit.me.bank)]


def _rows_before(request: Ask) -> int:
    given = str(request.query_params.get("before", ""))
    return int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0


def _offered(view: View) -> list[str]:
    others = [one for one in view.states if one.upper() not in _STATES]
    known = [one for one in others if SHORT.get(one.upper(), one.upper()) in NAMES]
    return [*_STATES, *known]


ROUTES: Final = (jobs, counts)
