"""What changed between the run that worked and the one that failed."""

from typing import Any, Final

from litestar import Request, Response, get
from litestar.params import FromPath

from steward.accounting.page.shapes import PageAnswer, PageRequest
from steward.web import query
from steward.web.comparing import choice_of, compare, diff_lines
from steward.web.job_facts import address_of, checked
from steward.web.pages.job import address
from steward.web.rendering import Renderer
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]


@get("/jobs/{cluster:str}/{job:str}/compare", include_in_schema=False)
async def comparison(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """A job beside another: one that was named, or the last of its name that went otherwise."""
    checked(job)
    page: PageAnswer = await visit.ask(
        "accounting.job", PageRequest(job=job, cluster=cluster, tasks=0, nodes=0)
    )
    choices, first = await choice_of(visit, page)
    other = query.text(request, "with") or first
    if other:
        checked(other)
    found = await compare(visit, page, other) if other else None
    return pages.page(
        "job_compare.html",
        visit,
        here="/jobs",
        base=address(cluster, job),
        page=page,
        other=other,
        choices=choices,
        found=found,
        addresses=[address(cluster, address_of(one)) for one in (found.left, found.right)]
        if found
        else [],
        diff=diff_lines(found.script.answer) if found and found.script.answer else None,
    )


ROUTES: Final = (comparison,)
