"""A cluster: its nodes as a map, what is wrong with them, partitions and reservations."""

import asyncio
from typing import Any, Final

from litestar import Request, Response, get
from litestar.params import FromPath

from steward.admin.credentials.shapes import ClusterRole
from steward.reports.history.shapes import (
    NodesAnswer,
    NodesRequest,
    NodeThen,
    PartitionsAnswer,
    PartitionsRequest,
    ReservationsAnswer,
    ReservationsRequest,
)
from steward.web import query
from steward.web.errors import NoSuchPage
from steward.web.known_nodes import KnownNodes
from steward.web.nodes import counts, node_map, said
from steward.web.rendering import Renderer
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]
_AT_ONCE: Final = 30


@get("/cluster", include_in_schema=False)
async def first(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes
) -> Response[Any]:
    """The cluster, or the first of several."""
    if not visit.me.clusters:
        raise NoSuchPage("there is no cluster here")
    return await _page(request, visit, pages, known_nodes, visit.me.clusters[0])


@get("/cluster/{name:str}", include_in_schema=False)
async def named(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes, name: FromPath[str]
) -> Response[Any]:
    """One of several."""
    return await _page(request, visit, pages, known_nodes, role_on(visit, name))


def role_on(visit: Visit, cluster: str) -> ClusterRole:
    """What the visitor is on a cluster.

    Raises:
        NoSuchPage: There is no such cluster.
    """
    role = visit.role(cluster)
    if role is None:
        raise NoSuchPage(f"there is no cluster {cluster!r}")
    return role


async def _page(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes, role: ClusterRole
) -> Response[Any]:
    at, word = query.text(request, "at"), query.text(request, "state")
    partition, offset = query.text(request, "partition"), query.number(request, "offset")
    by = "partition" if query.text(request, "by") == "partition" else "name"
    if not role.sees_nodes:
        return pages.page("cluster_hidden.html", visit, here="/cluster", role=role)
    nodes: NodesAnswer
    partitions: PartitionsAnswer
    reservations: ReservationsAnswer
    nodes, partitions, reservations = await asyncio.gather(
        _then(visit, role, at) if at else known_nodes.of(visit, role.cluster),
        visit.ask("history.partitions", PartitionsRequest(cluster=role.cluster)),
        visit.ask("history.reservations", ReservationsRequest(cluster=role.cluster)),
    )
    chosen = [
        node
        for node in nodes.nodes
        if (not word or said(node.state).word == word)
        and (not partition or partition in node.partitions)
    ]
    listed = chosen if word or partition else [node for node in chosen if _needs_a_look(node)]
    context: dict[str, Any] = {
        "role": role,
        "asked": {"at": at, "state": word, "partition": partition, "by": by},
        "listed": listed[offset : offset + _AT_ONCE],
        "more": offset + _AT_ONCE if len(listed) > offset + _AT_ONCE else 0,
    }
    if visit.is_part:
        return pages.page("_cluster_nodes.html", visit, **context)
    return pages.page(
        "cluster.html",
        visit,
        here="/cluster",
        answer=nodes,
        counts=counts(nodes.nodes),
        groups=node_map(chosen, "partition" if by == "partition" else "name"),
        total=len(listed),
        partitions=_partitions(nodes, partitions),
        reservations=reservations.reservations,
        offset=offset,
        **context,
    )


async def _then(visit: Visit, role: ClusterRole, at: str) -> NodesAnswer:
    """How its nodes were at a time."""
    request = NodesRequest(cluster=role.cluster, at=at, zone=role.zone)
    answer: NodesAnswer = await visit.ask("history.nodes", request)
    return answer


def _needs_a_look(node: NodeThen) -> bool:
    return bool(node.reason) or said(node.state).tone == "bad"


def _partitions(nodes: NodesAnswer, told: PartitionsAnswer) -> list[dict[str, Any]]:
    """The partitions with their nodes by state, also those whose own state nobody tells."""
    states = {one.partition: one for one in told.partitions}
    members: dict[str, list[NodeThen]] = {name: [] for name in states}
    for node in nodes.nodes:
        for name in node.partitions:
            members.setdefault(name, []).append(node)
    found = []
    for name, within in sorted(members.items()):
        found.append(
            {
                "name": name,
                "state": states.get(name),
                "nodes": len(within),
                "cpus": sum(node.cpus for node in within),
                "gpus": sum(node.gpus for node in within),
                "counts": counts(within),
            }
        )
    return found


ROUTES: Final = (first, named)
