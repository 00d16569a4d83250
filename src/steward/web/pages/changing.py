"""Having something done to nodes: a form, what would be done, and what was done."""

import secrets
from collections.abc import Mapping
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.automation.actions import RunAnswer
from steward.core.errors import StewardError, Unavailable
from steward.web import query
from steward.web.changing import VERBS, Verb, lines_of, run_request
from steward.web.errors import NoSuchPage
from steward.web.pages.cluster import role_on
from steward.web.rendering import Renderer
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]


@get("/cluster/{cluster:str}/change", include_in_schema=False)
async def form(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """What is to be filled in."""
    role_on(visit, cluster)
    verb = _verb(query.text(request, "verb"))
    given = {"nodes": query.text(request, "nodes")}
    return _form(visit, pages, cluster, verb, given)


@post("/cluster/{cluster:str}/change", include_in_schema=False, status_code=200)
async def change(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """Say what would be done, and when that was confirmed do it."""
    role_on(visit, cluster)
    given = {name: str(value) for name, value in (await request.form()).multi_items()}
    verb = _verb(given.get("verb", ""))
    if given.get("back"):
        return _form(visit, pages, cluster, verb, given)
    is_sure = given.get("sure") == "yes"
    try:
        answer: RunAnswer = await visit.ask(
            "automation.run",
            run_request(verb, cluster, given, dry_run=not is_sure),
            key=given.get("key", "") if is_sure else "",
        )
    except Unavailable:
        raise
    except StewardError as error:
        # What was filled in is not lost: it is mended where it was wrong.
        return _form(visit, pages, cluster, verb, given, str(error))
    if answer.id:
        return pages.redirect(f"/actions/{answer.id}", visit)
    return pages.page(
        "change_sure.html",
        visit,
        here="/cluster",
        cluster=cluster,
        verb=verb,
        given=_kept(verb, given),
        answer=answer,
        lines=lines_of(answer.result),
        # However often that button is clicked, it is done once.
        key=secrets.token_urlsafe(16),
    )


def _form(
    visit: Visit,
    pages: Renderer,
    cluster: str,
    verb: Verb,
    given: Mapping[str, str],
    error: str = "",
) -> Response[Any]:
    return pages.page(
        "change.html",
        visit,
        status=400 if error else 200,
        here="/cluster",
        cluster=cluster,
        verb=verb,
        given=given,
        error=error,
    )


def _kept(verb: Verb, given: Mapping[str, str]) -> dict[str, str]:
    """What the confirmation hands on."""
    names = ("nodes", *verb.fields, *(("force",) if verb.overrides else ()))
    return {name: given[name] for name in names if given.get(name)}


def _verb(name: str) -> Verb:
    if name not in VERBS:
        raise NoSuchPage(f"nodes can be had {', '.join(VERBS)}, not {name[:60]!r}")
    return VERBS[name]


ROUTES: Final = (form, change)
