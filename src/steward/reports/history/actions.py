"""History actions ``history.*``: node states now or at a past time, events, and jobs on nodes.

Handlers in order: ``count_nodes_by_state`` (node_counts), ``list_present_partitions`` (partitions),
``list_reservations`` (reservations), ``show_node`` (node), ``list_nodes`` (nodes),
``list_history_events`` (events), ``list_node_jobs`` (node_jobs), ``list_job_events`` (job_events).
They read history.db and the job records through a :class:`HistoryContext`, which also checks
permissions. Requests and replies are in :mod:`.requests`.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.errors import NotFound, UsageError
from steward.core.events import NODE_STATE, PARTITION_STATE, RESERVATION_STATE, Event
from steward.core.records import RUN_TIMES, UsageLine
from steward.core.sqlite import SqliteMissing
from steward.core.timestamps import from_micros, to_micros
from steward.jobs.line_queries import SHOWN_PIECE, SHOWN_RUN, LineFilter
from steward.jobs.line_sources import open_line_source
from steward.reports.events import make_event_item
from steward.reports.history.consumer import HISTORY_KINDS
from steward.reports.history.context import HistoryContext
from steward.reports.history.reader import HistoryEventFilter, Position
from steward.reports.history.requests import (
    HistoryEventsReply,
    HistoryEventsRequest,
    JobEventsReply,
    JobEventsRequest,
    NodeCount,
    NodeCountsReply,
    NodeCountsRequest,
    NodeJobRun,
    NodeJobsReply,
    NodeJobsRequest,
    NodeReply,
    NodeRequest,
    NodeSnapshot,
    NodesReply,
    NodesRequest,
    NodeStateSpan,
    PartitionsReply,
    PartitionsRequest,
    PartitionStatus,
    ReservationsReply,
    ReservationsRequest,
    ReservationStatus,
)
from steward.reports.history.spans import (
    OPEN_US,
    REMOVED,
    NodeSpan,
    clip_spans,
    is_node_down,
    is_planned_down,
)
from steward.slurm.node_states import parse_node_state
from steward.slurm.nodelists import NodeListError, expand_nodelist

_DEFAULT_INTERVAL: Final = timedelta(days=30)
_MICROS: Final = 1_000_000


@action(
    "history.node_counts",
    scope="read",
    only_reads=True,
)
def count_nodes_by_state(
    context: HistoryContext, asker: Caller, request: NodeCountsRequest
) -> NodeCountsReply:
    """Count nodes by state.

    Raises:
        PermissionRefused: The requested cluster hides its nodes from this user.
        UsageError: The cluster does not exist.
    """
    clusters = context.list_node_clusters(asker, request.cluster)
    with context.open_reader() as reader:
        counts = reader.count_nodes(clusters) if reader else []
        silent_since = reader.find_silent_since(clusters) if reader else {}
    return NodeCountsReply(
        counts=tuple(
            NodeCount(cluster=cluster, state=state, nodes=nodes) for cluster, state, nodes in counts
        ),
        silent_since=silent_since,
    )


@action(
    "history.partitions",
    scope="read",
    routes=(route("GET /partitions"),),
    only_reads=True,
)
def list_present_partitions(
    context: HistoryContext, asker: Caller, request: PartitionsRequest
) -> PartitionsReply:
    """List present partitions with their states.

    Raises:
        UsageError: The cluster does not exist.
    """
    events = _list_present_events(context, asker, PARTITION_STATE, "partitions", request.cluster)
    return PartitionsReply(
        partitions=tuple(
            PartitionStatus(
                cluster=event.cluster,
                partition=event.body.partition,
                state=event.body.state,
                since=event.at,
            )
            for event in events
        )
    )


@action(
    "history.reservations",
    scope="read",
    routes=(route("GET /reservations"),),
    only_reads=True,
)
def list_reservations(
    context: HistoryContext, asker: Caller, request: ReservationsRequest
) -> ReservationsReply:
    """List present reservations with their states.

    Raises:
        UsageError: The cluster does not exist.
    """
    events = _list_present_events(
        context, asker, RESERVATION_STATE, "reservations", request.cluster
    )
    return ReservationsReply(
        reservations=tuple(
            ReservationStatus(
                cluster=event.cluster,
                reservation=event.body.reservation,
                state=event.body.state,
                nodes=event.body.nodes,
                start=event.body.start,
                end=event.body.end,
                users=event.body.users,
                flags=event.body.flags,
                seen_at=event.at,
            )
            for event in events
        )
    )


def _list_present_events(
    context: HistoryContext, asker: Caller, kind: str, keyword: str, cluster: str
) -> Iterable[Event]:
    """Return the last event per subject of a kind, on clusters whose PrivateData permits it."""
    clusters = [context.resolve_cluster(cluster)] if cluster else context.clusters
    visible = [name for name in clusters if context.access.can_see_all(asker, name, keyword)]
    with context.open_reader() as reader:
        return reader.list_present(kind, visible) if reader else []


@action(
    "history.node",
    scope="read",
    routes=(route("GET /nodes/{node}/history"),),
    only_reads=True,
)
def show_node(context: HistoryContext, asker: Caller, request: NodeRequest) -> NodeReply:
    """Show the states of a node over an interval, and its down time.

    Raises:
        PermissionRefused: The cluster hides its nodes from this user.
        UsageError: The cluster, the node or a time is invalid.
    """
    cluster = context.resolve_cluster(request.cluster)
    context.list_node_clusters(asker, cluster)
    names = expand_nodelist(request.node)
    if len(names) != 1:
        raise UsageError(f"invalid node {request.node!r}: give one node", request.node)
    zone = context.get_zone(request.zone, cluster)
    until = context.parse(request.until, zone) or context.now()
    since = context.parse(request.since, zone) or until - _DEFAULT_INTERVAL
    if until < since:
        raise UsageError("invalid period: the end is before the start. Correct `since` or `until`")
    with context.open_reader() as reader:
        spans = (
            reader.list_node_spans(cluster, names[0], to_micros(since), to_micros(until))
            if reader
            else []
        )
    known_us = down_us = planned_us = 0
    for span, begin, end in clip_spans(spans, to_micros(since), to_micros(until)):
        if span.state == REMOVED:
            continue
        known_us += end - begin
        if is_node_down(span.state):
            down_us += end - begin
            planned_us += end - begin if is_planned_down(span.state) else 0
    return NodeReply(
        spans=tuple(map(_make_state_span, spans[::-1][: request.limit])),
        since=since,
        until=until,
        known_s=known_us / _MICROS,
        down_s=down_us / _MICROS,
        planned_down_s=planned_us / _MICROS,
        is_all=len(spans) <= request.limit,
        sensor=context.has_sensor([cluster]),
        zone=request.zone,
    )


def _make_state_span(span: NodeSpan) -> NodeStateSpan:
    return NodeStateSpan(
        state=span.state,
        since=from_micros(span.from_us),
        until=None if span.until_us == OPEN_US else from_micros(span.until_us),
        reason=span.reason,
        reason_user=span.reason_user,
    )


_POSITION_PATTERN: Final = re.compile(r"(-?[0-9]{1,18})\.([0-9]{1,18})")
_JOB_COLUMNS: Final = tuple(
    f'"{field}_us"' if field in RUN_TIMES else f'"{field}"'
    for field in NodeJobRun.__struct_fields__
)


@action(
    "history.nodes",
    scope="read",
    routes=(
        route("GET /nodes", "List node states, now or at a past time."),
        route(
            "GET /nodes/{node}",
            "Show the state of a node or of a list of nodes.",
            parts={"node": "nodes"},
        ),
    ),
    only_reads=True,
)
def list_nodes(context: HistoryContext, asker: Caller, request: NodesRequest) -> NodesReply:
    """List node states, now or at a past time.

    Raises:
        PermissionRefused: The requested cluster hides its nodes from this user.
        UsageError: The cluster, a node list or a time is invalid.
    """
    clusters = context.list_node_clusters(asker, request.cluster)
    zone = context.get_zone(request.zone, request.cluster)
    requested_at = context.parse(request.at, zone)
    at = requested_at or context.now()
    names = expand_nodelist(request.nodes) if request.nodes else None
    states = {state.upper() for state in request.states}
    partitions = frozenset(request.partitions)

    def is_meant(span: NodeSpan) -> bool:
        if partitions and partitions.isdisjoint(span.partitions.split(",")):
            return False
        if not states:
            return True
        base, flags = parse_node_state(span.state)
        return not states.isdisjoint((base, *flags))

    with context.open_reader() as reader:
        at_us = None if requested_at is None else to_micros(requested_at)
        # Read the position first: an event that arrives meanwhile is reported again, never missed.
        position = reader.get_position() if reader else 0
        tag = reader.get_nodes_tag(clusters) if reader and at_us is None else ""
        is_known = bool(tag) and tag == request.known
        spans = reader.list_nodes_at(at_us, clusters, names) if reader and not is_known else []
        begins_us = reader.find_nodes_begin_us(clusters) if reader else None
        silent_since = reader.find_silent_since(clusters) if reader and at_us is None else {}
    return NodesReply(
        nodes=tuple(
            map(_make_node_snapshot, filter(is_meant, spans) if partitions or states else spans)
        ),
        at=at,
        sensor=context.has_sensor(clusters),
        begins=None if begins_us is None else from_micros(begins_us),
        silent_since=silent_since,
        position=position,
        tag=tag,
        is_known=is_known,
        zone=request.zone,
    )


@lru_cache(maxsize=4096)
def _split_partitions(partitions: str) -> tuple[str, ...]:
    return tuple(filter(None, partitions.split(",")))


def _make_node_snapshot(span: NodeSpan) -> NodeSnapshot:
    return NodeSnapshot(
        cluster=span.cluster,
        node=span.node,
        state=span.state,
        since=from_micros(span.since_us),
        since_is_known=span.is_known,
        reason=span.reason,
        reason_user=span.reason_user,
        reason_uid=span.reason_uid,
        reason_at=None if span.reason_us is None else from_micros(span.reason_us),
        partitions=_split_partitions(span.partitions),
        cpus=span.cpus,
        memory_bytes=span.memory_bytes,
        gpus=span.gpus,
    )


@action(
    "history.events",
    scope="read",
    routes=(route("GET /events", "List state events, newest first.", cursor=("before", "older")),),
    only_reads=True,
)
def list_history_events(
    context: HistoryContext, asker: Caller, request: HistoryEventsRequest
) -> HistoryEventsReply:
    """List state events, newest first.

    Raises:
        UsageError: A kind, a node list, a time or a position is invalid.
    """
    unknown = set(request.kinds) - set(HISTORY_KINDS)
    if unknown:
        raise UsageError(f"unknown kind {min(unknown)!r}: use one of {', '.join(HISTORY_KINDS)}")
    zone = context.get_zone(request.zone)
    since, until = context.parse(request.since, zone), context.parse(request.until, zone)
    clusters = [context.resolve_cluster(name) for name in request.clusters] or context.clusters
    event_filter = HistoryEventFilter(
        visible={name: context.get_visible_events(asker, name) for name in clusters},
        kinds=frozenset(request.kinds or HISTORY_KINDS),
        nodes=expand_nodelist(request.nodes) if request.nodes else None,
        failed=request.failed,
        since_us=None if since is None else to_micros(since),
        until_us=None if until is None else to_micros(until),
        before=_parse_event_position(request.before),
        after=_parse_event_position(request.after),
    )
    with context.open_reader() as reader:
        # Read the position first: an event that arrives meanwhile is reported twice, never missed.
        position = reader.get_position() if reader else 0
        events = (
            reader.list_events(
                event_filter, request.limit + 1, context.make_visibility_check(asker)
            )
            if reader
            else []
        )
        begins = reader.find_begin() if reader else None
    page = events[: request.limit]
    return HistoryEventsReply(
        events=tuple(map(make_event_item, page)),
        older=_format_event_position(page[-1]) if len(events) > request.limit else "",
        newer=_format_event_position(page[0]) if page else request.after,
        sensor=context.has_sensor(),
        begins=begins,
        position=position,
    )


def _parse_event_position(text: str) -> Position | None:
    """Parse a page position; None for an empty text."""
    if not text:
        return None
    match = _POSITION_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"invalid position {text!r}: give `older` or `newer` of a previous reply")
    return int(match[1]), int(match[2])


def _format_event_position(event: Event) -> str:
    return f"{to_micros(event.at)}.{event.id}"


@action(
    "history.node_jobs",
    scope="read",
    routes=(route("GET /nodes/{node}/jobs", "List the jobs that run or ran on a node."),),
    only_reads=True,
)
def list_node_jobs(
    context: HistoryContext, asker: Caller, request: NodeJobsRequest
) -> NodeJobsReply:
    """List the jobs that run or ran on a node and that the user may see.

    Raises:
        UsageError: The cluster, the node or a time is invalid.
    """
    cluster = context.resolve_cluster(request.cluster)
    names = expand_nodelist(request.node)
    if len(names) != 1:
        raise UsageError(f"invalid node {request.node!r}: give one node", request.node)
    name = names[0]
    since, until = _resolve_window(context, request, cluster)
    scope = context.access.get_job_scope(asker, cluster)
    line_filter = LineFilter(
        clusters=(cluster,),
        scopes={cluster: scope},
        since_us=to_micros(since),
        # Include jobs that start at this very moment: the end of the filter is exclusive.
        until_us=to_micros(until) + 1,
        states=("RUNNING",),
        node_names=(name,),
    )
    try:
        source = open_line_source(context.books.settings, line_filter, duplicates=True)
    except SqliteMissing:
        rows: list[Sequence[object]] = []
    else:
        rows = [
            row
            for batch in source.rows(line_filter, _JOB_COLUMNS, steps=False)
            for row in batch
            if row[0] in (SHOWN_RUN, SHOWN_PIECE) and _contains_node(str(row[-1] or ""), name)
        ]
    jobs = [_make_node_job(row[1:]) for row in rows]
    jobs.sort(key=lambda job: (job.start, job.job_id, job.restarts), reverse=True)
    return NodeJobsReply(
        jobs=tuple(jobs[: request.limit]),
        since=since,
        until=until,
        is_all=scope.everything,
        total=len(jobs),
        zone=request.zone,
    )


def _resolve_window(
    context: HistoryContext, request: NodeJobsRequest, cluster: str
) -> tuple[datetime, datetime]:
    """Return begin and end of the requested interval; both equal for a single time."""
    zone = context.get_zone(request.zone, cluster)
    since, until = context.parse(request.since, zone), context.parse(request.until, zone)
    if since is None:
        if until is not None:
            raise UsageError("the start is missing: give `since`, too")
        at = context.parse(request.at, zone) or context.now()
        return at, at
    if request.at:
        raise UsageError("`at` excludes `since` and `until`: give either")
    until = until or context.now()
    if until < since:
        raise UsageError("invalid period: the end is before the start. Correct `since` or `until`")
    return since, until


@lru_cache(maxsize=4096)
def _expand_nodelist(nodelist: str) -> frozenset[str]:
    try:
        return frozenset(expand_nodelist(nodelist))
    except NodeListError:
        return frozenset()


def _contains_node(nodelist: str, name: str) -> bool:
    """Return whether a node list contains a node; look for its letters first, to save expanding."""
    return name.rstrip("0123456789") in nodelist and name in _expand_nodelist(nodelist)


def _make_node_job(row: Sequence[Any]) -> NodeJobRun:
    fields = dict(zip(NodeJobRun.__struct_fields__, row, strict=True))
    for name in ("start", "end"):
        fields[name] = from_micros(int(fields[name])) if fields[name] else None
    return NodeJobRun(**{name: value for name, value in fields.items() if value is not None})


@action(
    "history.job_events",
    scope="read",
    routes=(route("GET /jobs/{job}/events"),),
    only_reads=True,
)
def list_job_events(
    context: HistoryContext, asker: Caller, request: JobEventsRequest
) -> JobEventsReply:
    """List the state events of a job's nodes during its run.

    Raises:
        NotFound: There is no such job, or the user may not see it.
    """
    lines = _find_run_lines(context, asker, request)
    events_by_id: dict[int, Event] = {}
    with context.open_reader() as reader:
        for line in lines if reader else ():
            event_filter = HistoryEventFilter(
                visible={line.cluster: context.get_visible_events(asker, line.cluster)},
                kinds=frozenset({NODE_STATE}),
                nodes=sorted(_expand_nodelist(line.nodelist)),
                since_us=line.start_us,
                until_us=line.end_us or None,
            )
            assert reader is not None
            events = reader.list_events(
                event_filter, request.limit, context.make_visibility_check(asker), oldest_first=True
            )
            events_by_id |= {event.id: event for event in events}
    ordered = sorted(events_by_id.values(), key=lambda event: (event.at, event.id))
    return JobEventsReply(
        events=tuple(map(make_event_item, ordered[: request.limit])), sensor=context.has_sensor()
    )


def _find_run_lines(
    context: HistoryContext, asker: Caller, request: JobEventsRequest
) -> list[UsageLine]:
    """Return the run lines of the newest job of this id that the user may see."""
    jobs = context.books.jobs
    for job in jobs.find(
        request.job, context.resolve_cluster(request.cluster) if request.cluster else ""
    ):
        record = job.record
        if context.access.can_see_job(asker, job.cluster, record.uid, record.account):
            return [line for line in jobs.list_lines(job) if not line.step and line.start_us]
    raise NotFound(f"unknown job {request.job}, or permission denied", request.job)
