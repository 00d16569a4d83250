"""A node: how it is and was, what runs and ran there, and what operators do about it."""

import asyncio
from typing import Any, Final

from litestar import Request, Response, get
from litestar.params import FromPath

from steward.reports.history.shapes import (
    EventsAnswer,
    EventsRequest,
    NodeAnswer,
    NodeJobsAnswer,
    NodeJobsRequest,
    NodeRequest,
    NodesAnswer,
    NodesRequest,
)
from steward.web import query
from steward.web.changing import verbs_of
from steward.web.errors import NoSuchPage
from steward.web.events import rows_of
from steward.web.pages.cluster import role_on
from steward.web.rendering import Renderer
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]
_EVENTS: Final = 20
_SPANS: Final = 50
_JOBS: Final = 200


@get("/nodes/{cluster:str}/{node:str}", include_in_schema=False)
async def node_page(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str], node: FromPath[str]
) -> Response[Any]:
    """One node."""
    role = role_on(visit, cluster)
    if not role.sees_nodes:
        return pages.page("cluster_hidden.html", visit, here="/cluster", role=role)
    at = query.text(request, "at")
    where: dict[str, Any] = {"cluster": cluster, "zone": role.zone}
    now: NodesAnswer
    past: NodeAnswer
    jobs: NodeJobsAnswer
    events: EventsAnswer
    now, past, jobs, events = await asyncio.gather(
        visit.ask("history.nodes", NodesRequest(nodes=node, at=at, **where)),
        visit.ask("history.node", NodeRequest(node=node, until=at, limit=_SPANS, **where)),
        visit.ask("history.node_jobs", NodeJobsRequest(node=node, at=at, limit=_JOBS, **where)),
        visit.ask(
            "history.events",
            EventsRequest(clusters=(cluster,), nodes=node, until=at, limit=_EVENTS, zone=role.zone),
        ),
    )
    if not now.nodes and not past.spans and not jobs.jobs:
        raise NoSuchPage(f"nothing is known of a node {node!r} of {cluster}")
    return pages.page(
        "node.html",
        visit,
        here="/cluster",
        role=role,
        node=node,
        now=now.nodes[0] if now.nodes else None,
        at=at,
        answer=now,
        past=past,
        jobs=jobs,
        rows=rows_of(visit, events.events),
        verbs=verbs_of(role) if not at else (),
    )


ROUTES: Final = (node_page,)
