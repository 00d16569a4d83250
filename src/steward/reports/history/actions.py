"""History actions ``history.*``: node states now or at a past time, events, and jobs on nodes.

Handlers in order: ``count_nodes_by_state`` (node_counts), ``list_present_partitions`` (partitions),
``list_reservations`` (reservations), ``show_node`` (node), ``list_nodes`` (nodes),
``list_history_events`` (events), ``list_node_jobs`` (node_jobs), ``list_job_events`` (job_events).
They read history.db and the job records through a :class:`HistoryContext`, which also checks
permissions. Requests and replies are in :mod:`.requests`.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from steward.accounting.sacct.sources import open_books
from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import NotFound, UsageError
from steward.core.events import NODE_STATE, PARTITION_STATE, RESERVATION_STATE, Event
from steward.core.records import UsageLine
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import moment, to_micros
from steward.jobs.line_queries import SHOWN_PIECE, SHOWN_RUN, LineFilter
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
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC) + _DEFAULT_INTERVAL
_MICROS: Final = 1_000_000


def count_nodes_by_state(
    room: HistoryContext, asker: Asker, request: NodeCountsRequest
) -> NodeCountsReply:
    """Count nodes by state.

    Raises:
        PermissionRefused: The requested cluster hides its nodes from this user.
        UsageError: The cluster does not exist.
    """
    clusters = room.nodes_seen(asker, request.cluster)
    with room.reader() as reader:
        found = reader.node_counts(clusters) if reader else []
        silent_since = reader.silent_since(clusters) if reader else {}
    return NodeCountsReply(
        counts=tuple(
            NodeCount(cluster=cluster, state=state, nodes=nodes) for cluster, state, nodes in found
        ),
        silent_since=silent_since,
    )


def list_present_partitions(
    room: HistoryContext, asker: Asker, request: PartitionsRequest
) -> PartitionsReply:
    """List present partitions with their states.

    Raises:
        UsageError: The cluster does not exist.
    """
    found = _list_present_events(room, asker, PARTITION_STATE, "partitions", request.cluster)
    return PartitionsReply(
        partitions=tuple(
            PartitionStatus(
                cluster=event.cluster,
                partition=event.body.partition,
                state=event.body.state,
                since=event.at,
            )
            for event in found
        )
    )


def list_reservations(
    room: HistoryContext, asker: Asker, request: ReservationsRequest
) -> ReservationsReply:
    """List present reservations with their states.

    Raises:
        UsageError: The cluster does not exist.
    """
    found = _list_present_events(room, asker, RESERVATION_STATE, "reservations", request.cluster)
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
            for event in found
        )
    )


def _list_present_events(
    room: HistoryContext, asker: Asker, kind: str, word: str, cluster: str
) -> Iterable[Event]:
    """Return the last event per subject of a kind, on clusters whose PrivateData permits it."""
    named = [room.cluster_asked(cluster)] if cluster else room.clusters
    seen = [name for name in named if room.access.may_see_all(asker, name, word)]
    with room.reader() as reader:
        return reader.present(kind, seen) if reader else []


def show_node(room: HistoryContext, asker: Asker, request: NodeRequest) -> NodeReply:
    """Show the states of one node over an interval, and its down time.

    Raises:
        PermissionRefused: The cluster hides its nodes from this user.
        UsageError: The cluster, the node or a time is invalid.
    """
    cluster = room.cluster_asked(request.cluster)
    room.nodes_seen(asker, cluster)
    named = expand_nodelist(request.node)
    if len(named) != 1:
        raise UsageError("give one node", request.node)
    zone = room.zone(request.zone, cluster)
    until = room.time(request.until, zone) or room.now()
    since = room.time(request.since, zone) or max(until, _EARLIEST) - _DEFAULT_INTERVAL
    if until < since:
        raise UsageError("the time that is asked for ends before it begins")
    with room.reader() as reader:
        spans = (
            reader.node_between(cluster, named[0], to_micros(since), to_micros(until))
            if reader
            else []
        )
    known = down = planned = 0
    for span, begin, end in clip_spans(spans, to_micros(since), to_micros(until)):
        if span.state == REMOVED:
            continue
        known += end - begin
        if is_node_down(span.state):
            down += end - begin
            planned += end - begin if is_planned_down(span.state) else 0
    limit = max(1, min(request.limit, _MAX_ITEMS))
    return NodeReply(
        spans=tuple(map(_make_state_span, spans[::-1][:limit])),
        since=since,
        until=until,
        known_s=known / _MICROS,
        down_s=down / _MICROS,
        planned_down_s=planned / _MICROS,
        is_all=len(spans) <= limit,
        sensor=room.has_sensor([cluster]),
    )


def _make_state_span(span: NodeSpan) -> NodeStateSpan:
    return NodeStateSpan(
        state=span.state,
        since=moment(span.from_us),
        until=None if span.until_us == OPEN_US else moment(span.until_us),
        reason=span.reason,
        reason_user=span.reason_user,
    )


PRESENT_ACTIONS: Final = (
    Action(
        name="history.node_counts",
        help="How many nodes are in which state.",
        request=NodeCountsRequest,
        answer=NodeCountsReply,
        run=count_nodes_by_state,
        only_reads=True,
    ),
    Action(
        name="history.partitions",
        help="Which partitions there are.",
        request=PartitionsRequest,
        answer=PartitionsReply,
        run=list_present_partitions,
        only_reads=True,
    ),
    Action(
        name="history.reservations",
        help="Which reservations there are.",
        request=ReservationsRequest,
        answer=ReservationsReply,
        run=list_reservations,
        only_reads=True,
    ),
    Action(
        name="history.node",
        help="What became of one node.",
        request=NodeRequest,
        answer=NodeReply,
        run=show_node,
        only_reads=True,
    ),
)


_MAX_ITEMS: Final = 10_000
_POSITION_PATTERN: Final = re.compile(r"(-?[0-9]{1,18})\.([0-9]{1,18})")
_JOB_COLUMNS: Final = (
    *("cluster", "job_id", "label", "restarts", "name", "user", "uid", "account", "partition"),
    *("state", "start_us", "end_us", "cpus", "nodes", "nodelist"),
)


def list_nodes(room: HistoryContext, asker: Asker, request: NodesRequest) -> NodesReply:
    """List node states, now or at a past time.

    Raises:
        PermissionRefused: The requested cluster hides its nodes from this user.
        UsageError: The cluster, a node list or a time is invalid.
    """
    clusters = room.nodes_seen(asker, request.cluster)
    zone = room.zone(request.zone, request.cluster)
    asked = room.time(request.at, zone)
    at = asked or room.now()
    names = expand_nodelist(request.nodes) if request.nodes else None
    words = {word.upper() for word in request.states}
    chosen = frozenset(request.partitions)

    def is_meant(span: NodeSpan) -> bool:
        if chosen and chosen.isdisjoint(span.partitions.split(",")):
            return False
        if not words:
            return True
        base, flags = parse_node_state(span.state)
        return not words.isdisjoint((base, *flags))

    with room.reader() as reader:
        at_us = None if asked is None else to_micros(asked)
        # Read the position first: an event that arrives meanwhile is reported again, never missed.
        position = reader.position() if reader else 0
        tag = reader.nodes_tag(clusters) if reader and at_us is None else ""
        is_known = bool(tag) and tag == request.known
        spans = reader.nodes_at(at_us, clusters, names) if reader and not is_known else []
        begins_us = reader.nodes_begin_us(clusters) if reader else None
        silent_since = reader.silent_since(clusters) if reader and at_us is None else {}
    return NodesReply(
        nodes=tuple(
            map(_make_node_snapshot, filter(is_meant, spans) if chosen or words else spans)
        ),
        at=at,
        sensor=room.has_sensor(clusters),
        begins=None if begins_us is None else moment(begins_us),
        silent_since=silent_since,
        position=position,
        tag=tag,
        is_known=is_known,
    )


@lru_cache(maxsize=4096)
def _split_partitions(partitions: str) -> tuple[str, ...]:
    return tuple(filter(None, partitions.split(",")))


def _make_node_snapshot(span: NodeSpan) -> NodeSnapshot:
    return NodeSnapshot(
        cluster=span.cluster,
        node=span.node,
        state=span.state,
        since=moment(span.since_us),
        since_is_known=span.is_known,
        reason=span.reason,
        reason_user=span.reason_user,
        reason_uid=span.reason_uid,
        reason_at=None if span.reason_us is None else moment(span.reason_us),
        partitions=_split_partitions(span.partitions),
        cpus=span.cpus,
        memory_bytes=span.memory_bytes,
        gpus=span.gpus,
    )


def list_history_events(
    room: HistoryContext, asker: Asker, request: HistoryEventsRequest
) -> HistoryEventsReply:
    """List state events, newest first.

    Raises:
        UsageError: A kind, a node list, a time or a position is invalid.
    """
    unknown = set(request.kinds) - set(HISTORY_KINDS)
    if unknown:
        raise UsageError(f"{min(unknown)!r} is not kept: the kinds are {', '.join(HISTORY_KINDS)}")
    zone = room.zone(request.zone)
    since, until = room.time(request.since, zone), room.time(request.until, zone)
    clusters = [room.cluster_asked(name) for name in request.clusters] or room.clusters
    wanted = HistoryEventFilter(
        visible={name: room.visible(asker, name) for name in clusters},
        kinds=frozenset(request.kinds or HISTORY_KINDS),
        nodes=expand_nodelist(request.nodes) if request.nodes else None,
        failed=request.failed,
        since_us=None if since is None else to_micros(since),
        until_us=None if until is None else to_micros(until),
        before=_parse_event_position(request.before),
        after=_parse_event_position(request.after),
    )
    limit = max(1, min(request.limit, _MAX_ITEMS))
    with room.reader() as reader:
        # Read the position first: an event that arrives meanwhile is reported twice, never missed.
        position = reader.position() if reader else 0
        found = reader.events(wanted, limit + 1, room.shows(asker)) if reader else []
        begins = reader.begins() if reader else None
    shown = found[:limit]
    return HistoryEventsReply(
        events=tuple(map(make_event_item, shown)),
        older=_format_event_position(shown[-1]) if len(found) > limit else "",
        newer=_format_event_position(shown[0]) if shown else request.after,
        sensor=room.has_sensor(),
        begins=begins,
        position=position,
    )


def _parse_event_position(text: str) -> Position | None:
    """Parse a page position; None for an empty text."""
    if not text:
        return None
    match = _POSITION_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no position: give what an answer had as older or newer")
    return int(match[1]), int(match[2])


def _format_event_position(event: Event) -> str:
    return f"{to_micros(event.at)}.{event.id}"


def list_node_jobs(room: HistoryContext, asker: Asker, request: NodeJobsRequest) -> NodeJobsReply:
    """List the jobs that run or ran on a node and that the user may see.

    Raises:
        UsageError: The cluster, the node or a time is invalid.
    """
    cluster = room.cluster_asked(request.cluster)
    named = expand_nodelist(request.node)
    if len(named) != 1:
        raise UsageError("give one node", request.node)
    name = named[0]
    since, until = _resolve_window(room, request, cluster)
    scope = room.access.scope(asker, cluster)
    wanted = LineFilter(
        clusters=(cluster,),
        scopes={cluster: scope},
        since_us=to_micros(since),
        # Include jobs that start at this very moment: the end of the filter is exclusive.
        until_us=to_micros(until) + 1,
        states=("RUNNING",),
    )
    try:
        source = open_books(room.books, wanted, duplicates=True)
    except SqliteUnavailable:
        rows: list[Sequence[object]] = []
    else:
        quoted = [f'"{column}"' for column in _JOB_COLUMNS]
        rows = [
            row
            for batch in source.rows(wanted, quoted, steps=False)
            for row in batch
            if row[0] in (SHOWN_RUN, SHOWN_PIECE) and _contains_node(str(row[-1] or ""), name)
        ]
    found = [_make_node_job(row[1:]) for row in rows]
    found.sort(key=lambda job: (job.start, job.job_id, job.restarts), reverse=True)
    return NodeJobsReply(
        jobs=tuple(found[: max(1, min(request.limit, _MAX_ITEMS))]),
        since=since,
        until=until,
        is_all=scope.everything,
    )


def _resolve_window(
    room: HistoryContext, request: NodeJobsRequest, cluster: str
) -> tuple[datetime, datetime]:
    """Return begin and end of the requested interval; both equal for a single time."""
    zone = room.zone(request.zone, cluster)
    since, until = room.time(request.since, zone), room.time(request.until, zone)
    if since is None:
        if until is not None:
            raise UsageError("give the time's beginning, too")
        at = room.time(request.at, zone) or room.now()
        return at, at
    if request.at:
        raise UsageError("give either a time, or where it begins and ends")
    until = until or room.now()
    if until < since:
        raise UsageError("the time that is asked for ends before it begins")
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
    fields = dict(zip(_JOB_COLUMNS, row, strict=True))
    start_us, end_us = fields.pop("start_us"), fields.pop("end_us")
    known = {name: value for name, value in fields.items() if value is not None}
    return NodeJobRun(
        **known,
        start=moment(int(start_us)),
        end=moment(int(end_us)) if end_us else None,
    )


def list_job_events(
    room: HistoryContext, asker: Asker, request: JobEventsRequest
) -> JobEventsReply:
    """List the state events of a job's nodes during its run.

    Raises:
        NotFound: There is no such job, or the user may not see it.
    """
    lines = _find_run_lines(room, asker, request)
    found: dict[int, Event] = {}
    limit = max(1, min(request.limit, _MAX_ITEMS))
    with room.reader() as reader:
        for line in lines if reader else ():
            wanted = HistoryEventFilter(
                visible={line.cluster: room.visible(asker, line.cluster)},
                kinds=frozenset({NODE_STATE}),
                nodes=sorted(_expand_nodelist(line.nodelist)),
                since_us=line.start_us,
                until_us=line.end_us or None,
            )
            assert reader is not None
            happened = reader.events(wanted, limit, room.shows(asker), oldest_first=True)
            found |= {event.id: event for event in happened}
    ordered = sorted(found.values(), key=lambda event: (event.at, event.id))
    return JobEventsReply(
        events=tuple(map(make_event_item, ordered[:limit])), sensor=room.has_sensor()
    )


def _find_run_lines(
    room: HistoryContext, asker: Asker, request: JobEventsRequest
) -> list[UsageLine]:
    """Return the run lines of the newest job of this id that the user may see."""
    jobs = room.books.jobs
    for job in jobs.find(
        request.job, room.cluster_asked(request.cluster) if request.cluster else ""
    ):
        record = job.record
        if room.access.may_see_job(asker, job.cluster, record.uid, record.account):
            return [line for line in jobs.lines_of(job) if not line.step and line.start_us]
    raise NotFound(f"there is no job {request.job}, or none that you may see", request.job)


def _build_history_actions() -> Iterable[Action]:
    for name, text, request, answer, run in (
        ("nodes", "How nodes are, or were at a time.", NodesRequest, NodesReply, list_nodes),
        (
            "events",
            "What happened, newest first.",
            HistoryEventsRequest,
            HistoryEventsReply,
            list_history_events,
        ),
        ("node_jobs", "Which jobs ran on a node.", NodeJobsRequest, NodeJobsReply, list_node_jobs),
        (
            *("job_events", "What happened to a job's nodes while it ran."),
            *(JobEventsRequest, JobEventsReply, list_job_events),
        ),
    ):
        yield Action(
            name=f"history.{name}",
            help=text,
            request=request,
            answer=answer,
            run=run,
            only_reads=True,
        )


ACTIONS: Final = (*_build_history_actions(), *PRESENT_ACTIONS)
