"""Cluster and node pages: node map, node history, and node operations (drain, resume, reserve).

``VERBS`` lists the operations offered to operators and administrators; :func:`run_request` turns a
form into an operation, first as a dry run, and :func:`lines_of` shows its result. The handlers show
the cluster now or at a past time, one node, and the change form.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.admin.credentials.requests import ClusterRole
from steward.automation.actions import RunAnswer, RunRequest
from steward.core.errors import StewardError, Unavailable, UsageError
from steward.reports.history.requests import (
    EventsAnswer,
    EventsRequest,
    NodeAnswer,
    NodeJobsAnswer,
    NodeJobsRequest,
    NodeRequest,
    NodesAnswer,
    NodesRequest,
    NodeThen,
    PartitionsAnswer,
    PartitionsRequest,
    ReservationsAnswer,
    ReservationsRequest,
)
from steward.web import query
from steward.web.authentication import Visit
from steward.web.errors import NoSuchPage
from steward.web.event_stream import rows_of
from steward.web.node_map import KnownNodes, counts, node_map, said
from steward.web.rendering import Renderer

Needs = Literal["operator", "administrator"]
"""Role that a page offers an operation to."""


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on nodes that a page offers.

    Attributes:
        name: Name in addresses and on buttons.
        says: Explanation for people.
        operation: Name of the automation operation.
        needs: Role that is offered it; the operation itself checks permission.
        fields: Form fields, by the operation's parameter names.
        is_grave: Whether jobs may be lost.
        overrides: Whether it can override what others set on the nodes.
    """

    name: str
    says: str
    operation: str
    needs: Needs = "administrator"
    fields: tuple[str, ...] = ()
    is_grave: bool = False
    overrides: bool = True


VERBS: Final[dict[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb(
            name="drain",
            says="Jobs on them go on, no new ones start.",
            operation="slurm.node.drain",
            fields=("reason",),
        ),
        Verb(
            name="resume",
            says="Bring them back that are drained, down or failing.",
            operation="slurm.node.resume",
        ),
        Verb(
            name="down",
            says="Set them down: jobs on them are ended.",
            operation="slurm.node.down",
            fields=("reason",),
            is_grave=True,
        ),
        Verb(
            name="reserve",
            says="Put them into a reservation, which is made where there is none of its name.",
            operation="slurm.node.reserve",
            needs="operator",
            fields=("reservation_name", "start_time", "duration", "users", "flags"),
            overrides=False,
        ),
        Verb(
            name="unreserve",
            says="Take them out of a reservation; with the last one it goes.",
            operation="slurm.node.unreserve",
            needs="operator",
            fields=("reservation_name",),
            overrides=False,
        ),
    )
}
"""Operations by name."""

_PROPS: Final = ("start_time", "duration", "users", "flags")
"""Optional fields of a reservation, sent as ``props``."""
_LONGEST: Final = 2000
"""Most characters of a field."""


def verbs_of(role: ClusterRole) -> tuple[Verb, ...]:
    """Return the operations offered to a role on a cluster."""
    return tuple(
        verb
        for verb in VERBS.values()
        if (role.administrator if verb.needs == "administrator" else role.operator)
    )


def run_request(verb: Verb, cluster: str, given: Mapping[str, str], *, dry_run: bool) -> RunRequest:
    """Build the request of an operation from a form.

    Args:
        verb: The operation.
        cluster: The cluster.
        given: Values of the form's fields.
        dry_run: Whether only to report what would change.

    Raises:
        UsageError: A field is missing or too long.
    """
    values = {name: given.get(name, "").strip() for name in ("nodes", *verb.fields)}
    for name, value in values.items():
        if len(value) > _LONGEST:
            raise UsageError(f"{_called(name)} is too long", name)
        if not value and name not in _PROPS:
            raise UsageError(f"{_called(name)} is missing", name)
    props = {name: values.pop(name) for name in _PROPS if name in values}
    parameters: dict[str, Any] = dict(values)
    if any(props.values()):
        parameters["props"] = {name: value for name, value in props.items() if value}
    return RunRequest(
        action=verb.operation,
        parameters=parameters,
        cluster=cluster,
        dry_run=dry_run,
        force=verb.overrides and bool(given.get("force")),
    )


def _called(name: str) -> str:
    """Describe a form field in an error message."""
    return {"nodes": "the list of nodes", "reservation_name": "the reservation's name"}.get(
        name, f"the {name.replace('_', ' ')}"
    )


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an operation, or of its dry run, on one node or reservation.

    Attributes:
        name: Node or reservation name.
        changes: Whether it was, or would be, changed.
        says: Details in words.
        error: Error message; "" if none.
    """

    name: str
    changes: bool
    says: str = ""
    error: str = ""


def lines_of(result: Any) -> list[Line]:
    """Return an operation's result, line by line."""
    if not isinstance(result, dict):
        return []
    if "reservation_name" in result:
        return [_line(str(result["reservation_name"]), result)]
    return [_line(str(name), one) for name, one in result.items() if isinstance(one, dict)]


def _line(name: str, one: Mapping[str, Any]) -> Line:
    """Describe the result of an operation on one node or reservation."""
    told = {
        key: value
        for key, value in one.items()
        if key not in ("changed", "would_change", "message", "reservation_name")
    }
    before, after = told.pop("old_state", ""), told.pop("state", "")
    states = f"{before} \N{RIGHTWARDS ARROW} {after}" if before and after != before else after
    said = [str(states)] if states else []
    said += [
        str(key) if value is True else f"{key}: {value}"
        for key, value in told.items()
        if value not in (None, "", False, [], {})
    ]
    return Line(
        name=name,
        changes=bool(one.get("changed") or one.get("would_change")),
        says="; ".join(said),
        error=str(one.get("message") or ""),
    )


Ask = Request[Any, Any, Any]
_AT_ONCE: Final = 30
"""Nodes listed on a page."""


@get("/cluster", include_in_schema=False)
async def first(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes
) -> Response[Any]:
    """Show the cluster, or the first of several."""
    if not visit.me.clusters:
        raise NoSuchPage("there is no cluster here")
    return await _page(request, visit, pages, known_nodes, visit.me.clusters[0])


@get("/cluster/{name:str}", include_in_schema=False)
async def named(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes, name: FromPath[str]
) -> Response[Any]:
    """Show a cluster by name."""
    return await _page(request, visit, pages, known_nodes, role_on(visit, name))


def role_on(visit: Visit, cluster: str) -> ClusterRole:
    """Return the user's role on a cluster.

    Raises:
        NoSuchPage: The cluster is unknown.
    """
    role = visit.role(cluster)
    if role is None:
        raise NoSuchPage(f"there is no cluster {cluster!r}")
    return role


async def _page(
    request: Ask, visit: Visit, pages: Renderer, known_nodes: KnownNodes, role: ClusterRole
) -> Response[Any]:
    """Return the page of a cluster, now or at a past time."""
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
    """Return the nodes as they were at a past time."""
    request = NodesRequest(cluster=role.cluster, at=at, zone=role.zone)
    answer: NodesAnswer = await visit.ask("history.nodes", request)
    return answer


def _needs_a_look(node: NodeThen) -> bool:
    """Return True if a node has a reason or is in a bad state."""
    return bool(node.reason) or said(node.state).tone == "bad"


def _partitions(nodes: NodesAnswer, told: PartitionsAnswer) -> list[dict[str, Any]]:
    """Return partitions with their nodes by state, even those without a known state."""
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


CLUSTER_ROUTES: Final = (first, named)


_EVENTS: Final = 20
"""Events shown of a node."""
_SPANS: Final = 50
"""State changes shown of a node."""
_JOBS: Final = 200
"""Jobs shown of a node."""


@get("/nodes/{cluster:str}/{node:str}", include_in_schema=False)
async def node_page(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str], node: FromPath[str]
) -> Response[Any]:
    """Show one node: state, history, jobs and events."""
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


@get("/cluster/{cluster:str}/change", include_in_schema=False)
async def form(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """Show the form of an operation."""
    role_on(visit, cluster)
    verb = _verb(query.text(request, "verb"))
    given = {"nodes": query.text(request, "nodes")}
    return _form(visit, pages, cluster, verb, given)


@post("/cluster/{cluster:str}/change", include_in_schema=False, status_code=200)
async def change(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """Show a dry run of an operation, and perform it once confirmed."""
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
        # Keep the form's values, so that the user corrects them in place.
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
        # The idempotency key makes repeated clicks run the operation once.
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
    """Return the form of an operation, with an error message if given."""
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
    """Return the form values that the confirmation passes on."""
    names = ("nodes", *verb.fields, *(("force",) if verb.overrides else ()))
    return {name: given[name] for name in names if given.get(name)}


def _verb(name: str) -> Verb:
    """Return an operation by name, or fail."""
    if name not in VERBS:
        raise NoSuchPage(f"nodes can be had {', '.join(VERBS)}, not {name[:60]!r}")
    return VERBS[name]


CHANGE_ROUTES: Final = (form, change)
