"""Cluster and node pages: node map, node history, and node operations (drain, resume, reserve).

``NODE_VERBS`` lists the operations offered to operators and administrators;
:func:`build_run_request` turns a form into an operation, first as a dry run, and
:func:`list_result_lines` shows its result. The handlers show the cluster now or at a past time, one
node, and the change form.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.admin.credentials.requests import ClusterRole
from steward.automation.actions import RunOperationRequest
from steward.automation.runner import OperationOutcome
from steward.core.errors import StewardError, Unavailable, UsageError
from steward.core.layouts import Column, Layout
from steward.reports.history.requests import (
    HistoryEventsReply,
    HistoryEventsRequest,
    NodeJobsReply,
    NodeJobsRequest,
    NodeReply,
    NodeRequest,
    NodeSnapshot,
    NodesReply,
    NodesRequest,
    PartitionsReply,
    PartitionsRequest,
    PartitionStatus,
    ReservationsReply,
    ReservationsRequest,
)
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.node_map import NodeCache, build_node_map, count_node_states, describe_state
from steward.web.renderer import Renderer

RequiredRole = Literal["operator", "administrator"]
"""Role that a page offers an operation to."""


class NodeVerb(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on nodes that a page offers.

    Attributes:
        name: Name in addresses and on buttons.
        description: Effect, in one sentence.
        operation: Name of the automation operation.
        required_role: Role that is offered it; the operation itself checks permission.
        fields: Form fields, by the operation's parameter names.
        is_grave: Whether jobs may be lost.
        overrides: Whether it can override what others set on the nodes.
    """

    name: str
    description: str
    operation: str
    required_role: RequiredRole = "administrator"
    fields: tuple[str, ...] = ()
    is_grave: bool = False
    overrides: bool = True


NODE_VERBS: Final[dict[str, NodeVerb]] = {
    verb.name: verb
    for verb in (
        NodeVerb(
            name="drain",
            description="Running jobs continue; no new jobs start on these nodes.",
            operation="slurm.node.drain",
            fields=("reason",),
        ),
        NodeVerb(
            name="resume",
            description="Return drained, down or failing nodes to service.",
            operation="slurm.node.resume",
        ),
        NodeVerb(
            name="down",
            description="Set nodes down: Slurm ends the jobs that run on them.",
            operation="slurm.node.down",
            fields=("reason",),
            is_grave=True,
        ),
        NodeVerb(
            name="reserve",
            description="Add nodes to a reservation; Steward creates it if none has this name.",
            operation="slurm.node.reserve",
            required_role="operator",
            fields=("reservation_name", "start_time", "duration", "users", "flags"),
            overrides=False,
        ),
        NodeVerb(
            name="unreserve",
            description="Remove nodes from a reservation; without nodes it is deleted.",
            operation="slurm.node.unreserve",
            required_role="operator",
            fields=("reservation_name",),
            overrides=False,
        ),
    )
}
"""Operations by name."""

_RESERVATION_FIELDS: Final = ("start_time", "duration", "users", "flags")
"""Optional fields of a reservation, sent as ``props``."""
_LONGEST_FIELD: Final = 2000
"""Most characters of a field."""


def list_verbs(role: ClusterRole) -> tuple[NodeVerb, ...]:
    """Return the operations offered to a role on a cluster."""
    return tuple(
        verb
        for verb in NODE_VERBS.values()
        if (role.administrator if verb.required_role == "administrator" else role.operator)
    )


def build_run_request(
    verb: NodeVerb, cluster: str, form_fields: Mapping[str, str], *, dry_run: bool
) -> RunOperationRequest:
    """Build the request of an operation from a form.

    Args:
        verb: The operation.
        cluster: The cluster.
        form_fields: Values of the form's fields.
        dry_run: Whether only to report what would change.

    Raises:
        UsageError: A field is missing or too long.
    """
    values = {name: form_fields.get(name, "").strip() for name in ("nodes", *verb.fields)}
    for name, value in values.items():
        if len(value) > _LONGEST_FIELD:
            raise UsageError(
                f"{_describe_field(name)} is longer than {_LONGEST_FIELD} characters: shorten it",
                name,
            )
        if not value and name not in _RESERVATION_FIELDS:
            raise UsageError(f"{_describe_field(name)} is missing", name)
    props = {name: values.pop(name) for name in _RESERVATION_FIELDS if name in values}
    parameters: dict[str, Any] = dict(values)
    if any(props.values()):
        parameters["props"] = {name: value for name, value in props.items() if value}
    return RunOperationRequest(
        action=verb.operation,
        parameters=parameters,
        cluster=cluster,
        dry_run=dry_run,
        force=verb.overrides and bool(form_fields.get("force")),
    )


def _describe_field(name: str) -> str:
    """Describe a form field in an error message."""
    return {"nodes": "the list of nodes", "reservation_name": "the reservation's name"}.get(
        name, f"the {name.replace('_', ' ')}"
    )


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an operation, or of its dry run, on one node or reservation.

    Attributes:
        name: Node or reservation name.
        changes: Whether it was, or would be, changed.
        details: Details in words.
        error: Error message; "" if none.
    """

    name: str
    changes: bool
    details: str = ""
    error: str = ""


def _describe_changes(line: ResultLine, _: object) -> str:
    return "yes" if line.changes else "no" if line.error else "no: already in this state"


RESULT_LAYOUT: Final[Layout] = (
    Column("Name", "name"),
    Column("Changed", _describe_changes),
    Column("Status", lambda line, _: "failed" if line.error else None, "state", show="filled"),
    Column("Error", "error", "prose", show="filled"),
    Column("Details", "details", "prose"),
)
"""Columns of the results of an operation."""


def list_result_lines(result: Any) -> list[ResultLine]:
    """Return an operation's result, line by line."""
    if not isinstance(result, dict):
        return []
    if "reservation_name" in result:
        return [_make_result_line(str(result["reservation_name"]), result)]
    return [
        _make_result_line(str(name), outcome)
        for name, outcome in result.items()
        if isinstance(outcome, dict)
    ]


def _make_result_line(name: str, outcome: Mapping[str, Any]) -> ResultLine:
    """Describe the result of an operation on one node or reservation."""
    fields = {
        key: value
        for key, value in outcome.items()
        if key not in ("changed", "would_change", "message", "reservation_name")
    }
    before, after = fields.pop("old_state", ""), fields.pop("state", "")
    states = f"{before} \N{RIGHTWARDS ARROW} {after}" if before and after != before else after
    texts = [str(states)] if states else []
    texts += [
        str(key) if value is True else f"{key}: {value}"
        for key, value in fields.items()
        if value not in (None, "", False, [], {})
    ]
    return ResultLine(
        name=name,
        changes=bool(outcome.get("changed") or outcome.get("would_change")),
        details="; ".join(texts),
        error=str(outcome.get("message") or ""),
    )


HttpRequest = Request[Any, Any, Any]
_NODES_PER_PAGE: Final = 30
"""Nodes listed on a page."""


@get("/cluster", include_in_schema=False)
async def first(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, known_nodes: NodeCache
) -> Response[Any]:
    """Show the cluster, or the first of several."""
    if not auth.me.clusters:
        raise PageNotFound("no cluster is configured")
    return await _make_cluster_page(request, auth, pages, known_nodes, auth.me.clusters[0])


@get("/cluster/{name:str}", include_in_schema=False)
async def show_cluster(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    known_nodes: NodeCache,
    name: FromPath[str],
) -> Response[Any]:
    """Show a cluster by name."""
    return await _make_cluster_page(request, auth, pages, known_nodes, require_role(auth, name))


def require_role(auth: AuthenticatedRequest, cluster: str) -> ClusterRole:
    """Return the user's role on a cluster.

    Raises:
        PageNotFound: The cluster is unknown.
    """
    role = auth.find_role(cluster)
    if role is None:
        raise PageNotFound(f"unknown cluster {cluster!r}")
    return role


async def _make_cluster_page(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    known_nodes: NodeCache,
    role: ClusterRole,
) -> Response[Any]:
    """Return the page of a cluster, now or at a past time."""
    at, state_word = query.read_text(request, "at"), query.read_text(request, "state")
    partition, offset = query.read_text(request, "partition"), query.read_number(request, "offset")
    grouping = "partition" if query.read_text(request, "by") == "partition" else "name"
    if not role.sees_nodes:
        return pages.render_page("cluster_hidden.html", auth, here="/cluster", role=role)
    nodes_reply: NodesReply
    partitions_reply: PartitionsReply
    reservations_reply: ReservationsReply
    nodes_reply, partitions_reply, reservations_reply = await asyncio.gather(
        _fetch_nodes_at(auth, role, at) if at else known_nodes.fetch_nodes(auth, role.cluster),
        auth.call_action("history.partitions", PartitionsRequest(cluster=role.cluster)),
        auth.call_action("history.reservations", ReservationsRequest(cluster=role.cluster)),
    )
    matching_nodes = [
        node
        for node in nodes_reply.nodes
        if (not state_word or describe_state(node.state).word == state_word)
        and (not partition or partition in node.partitions)
    ]
    listed_nodes = (
        matching_nodes
        if state_word or partition
        else [node for node in matching_nodes if _has_problem(node)]
    )
    context: dict[str, Any] = {
        "role": role,
        "layout": NodesReply.layout,
        "asked": {"at": at, "state": state_word, "partition": partition, "by": grouping},
        "listed": listed_nodes[offset : offset + _NODES_PER_PAGE],
        "more": offset + _NODES_PER_PAGE if len(listed_nodes) > offset + _NODES_PER_PAGE else 0,
    }
    if auth.is_part:
        return pages.render_page("_cluster_nodes.html", auth, **context)
    return pages.render_page(
        "cluster.html",
        auth,
        here="/cluster",
        answer=nodes_reply,
        counts=count_node_states(nodes_reply.nodes),
        groups=build_node_map(matching_nodes, "partition" if grouping == "partition" else "name"),
        total=len(listed_nodes),
        partitions=_list_partitions(role.cluster, nodes_reply, partitions_reply),
        partition_layout=PARTITION_LAYOUT,
        reservations=reservations_reply,
        offset=offset,
        **context,
    )


async def _fetch_nodes_at(auth: AuthenticatedRequest, role: ClusterRole, at: str) -> NodesReply:
    """Return the nodes as they were at a past time."""
    request = NodesRequest(cluster=role.cluster, at=at, zone=role.zone)
    reply: NodesReply = await auth.call_action("history.nodes", request)
    return reply


def _has_problem(node: NodeSnapshot) -> bool:
    """Return True if a node has a reason or is in a bad state."""
    return bool(node.reason) or describe_state(node.state).tone == "bad"


class PartitionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A partition with its nodes.

    Attributes:
        cluster: The cluster's name.
        partition: Partition name.
        status: State of the partition; None if unknown.
        nodes: Number of nodes.
        cpus: Number of CPUs of the nodes.
        gpus: Number of GPUs of the nodes.
        states: Number of nodes by state, worst first.
    """

    cluster: str
    partition: str
    status: PartitionStatus | None
    nodes: int
    cpus: int
    gpus: int
    states: dict[str, int]


PARTITION_LAYOUT: Final[Layout] = (
    Column("Partition", "partition", link="nodes"),
    Column("State", lambda row, _: row.status and row.status.state, "state"),
    Column("Since", lambda row, _: row.status and row.status.since, "time"),
    Column("Nodes", "nodes", "count"),
    Column("CPUs", "cpus", "count"),
    Column("GPUs", "gpus", "count"),
    Column("States", "states", title="Nodes by state"),
)
"""Columns of the partitions of a cluster."""


def _list_partitions(
    cluster: str, nodes_reply: NodesReply, partitions_reply: PartitionsReply
) -> list[PartitionSummary]:
    """Return partitions with their nodes by state, even those without a known state."""
    partition_states = {partition.partition: partition for partition in partitions_reply.partitions}
    nodes_by_partition: dict[str, list[NodeSnapshot]] = {name: [] for name in partition_states}
    for node in nodes_reply.nodes:
        for name in node.partitions:
            nodes_by_partition.setdefault(name, []).append(node)
    return [
        PartitionSummary(
            cluster=cluster,
            partition=name,
            status=partition_states.get(name),
            nodes=len(nodes),
            cpus=sum(node.cpus for node in nodes),
            gpus=sum(node.gpus for node in nodes),
            states={count.word: count.nodes for count in count_node_states(nodes)},
        )
        for name, nodes in sorted(nodes_by_partition.items())
    ]


CLUSTER_ROUTES: Final = (first, show_cluster)


_EVENTS: Final = 20
"""Events shown of a node."""
_SPANS: Final = 50
"""State changes shown of a node."""
_JOBS: Final = 200
"""Jobs shown of a node."""


@get("/nodes/{cluster:str}/{node:str}", include_in_schema=False)
async def node_page(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    cluster: FromPath[str],
    node: FromPath[str],
) -> Response[Any]:
    """Show one node: state, history, jobs and events."""
    role = require_role(auth, cluster)
    if not role.sees_nodes:
        return pages.render_page("cluster_hidden.html", auth, here="/cluster", role=role)
    at = query.read_text(request, "at")
    common_fields: dict[str, Any] = {"cluster": cluster, "zone": role.zone}
    nodes_reply: NodesReply
    node_reply: NodeReply
    jobs_reply: NodeJobsReply
    events_reply: HistoryEventsReply
    nodes_reply, node_reply, jobs_reply, events_reply = await asyncio.gather(
        auth.call_action("history.nodes", NodesRequest(nodes=node, at=at, **common_fields)),
        auth.call_action(
            "history.node", NodeRequest(node=node, until=at, limit=_SPANS, **common_fields)
        ),
        auth.call_action(
            "history.node_jobs", NodeJobsRequest(node=node, at=at, limit=_JOBS, **common_fields)
        ),
        auth.call_action(
            "history.events",
            HistoryEventsRequest(
                clusters=(cluster,), nodes=node, until=at, limit=_EVENTS, zone=role.zone
            ),
        ),
    )
    if not nodes_reply.nodes and not node_reply.spans and not jobs_reply.jobs:
        raise PageNotFound(f"unknown node {node!r}: cluster {cluster} has no record of it")
    return pages.render_page(
        "node.html",
        auth,
        here="/cluster",
        role=role,
        node=node,
        now=nodes_reply.nodes[0] if nodes_reply.nodes else None,
        at=at,
        answer=nodes_reply,
        past=node_reply,
        jobs=jobs_reply,
        events=events_reply,
        verbs=list_verbs(role) if not at else (),
    )


ROUTES: Final = (node_page,)


@get("/cluster/{cluster:str}/change", include_in_schema=False)
async def form(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """Show the form of an operation."""
    require_role(auth, cluster)
    verb = _find_verb(query.read_text(request, "verb"))
    form_fields = {"nodes": query.read_text(request, "nodes")}
    return _make_change_form(auth, pages, cluster, verb, form_fields)


@post("/cluster/{cluster:str}/change", include_in_schema=False, status_code=200)
async def change(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, cluster: FromPath[str]
) -> Response[Any]:
    """Show a dry run of an operation, and perform it once confirmed."""
    require_role(auth, cluster)
    form_fields = {name: str(value) for name, value in (await request.form()).multi_items()}
    verb = _find_verb(form_fields.get("verb", ""))
    if form_fields.get("back"):
        return _make_change_form(auth, pages, cluster, verb, form_fields)
    is_confirmed = form_fields.get("sure") == "yes"
    try:
        reply: OperationOutcome = await auth.call_action(
            "automation.run",
            build_run_request(verb, cluster, form_fields, dry_run=not is_confirmed),
            key=form_fields.get("key", "") if is_confirmed else "",
        )
    except Unavailable:
        raise
    except StewardError as error:
        # Keep the form's values, so that the user corrects them in place.
        return _make_change_form(auth, pages, cluster, verb, form_fields, str(error))
    if reply.id:
        return pages.make_redirect(f"/actions/{reply.id}", auth)
    return pages.render_page(
        "change_sure.html",
        auth,
        here="/cluster",
        cluster=cluster,
        verb=verb,
        given=_select_confirmed(verb, form_fields),
        answer=reply,
        lines=list_result_lines(reply.result),
        line_layout=RESULT_LAYOUT,
        # The idempotency key makes repeated clicks run the operation once.
        key=secrets.token_urlsafe(16),
    )


def _make_change_form(
    auth: AuthenticatedRequest,
    pages: Renderer,
    cluster: str,
    verb: NodeVerb,
    form_fields: Mapping[str, str],
    error: str = "",
) -> Response[Any]:
    """Return the form of an operation, with an error message if given."""
    return pages.render_page(
        "change.html",
        auth,
        status=400 if error else 200,
        here="/cluster",
        cluster=cluster,
        verb=verb,
        given=form_fields,
        error=error,
    )


def _select_confirmed(verb: NodeVerb, form_fields: Mapping[str, str]) -> dict[str, str]:
    """Return the form values that the confirmation passes on."""
    names = ("nodes", *verb.fields, *(("force",) if verb.overrides else ()))
    return {name: form_fields[name] for name in names if form_fields.get(name)}


def _find_verb(name: str) -> NodeVerb:
    """Return an operation by name, or fail."""
    if name not in NODE_VERBS:
        raise PageNotFound(f"unknown operation {name[:60]!r}: use one of {', '.join(NODE_VERBS)}")
    return NODE_VERBS[name]


CHANGE_ROUTES: Final = (form, change)
