"""What the history can be asked of what is there: partitions, reservations, and one node's past."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import UsageError
from steward.core.events import PARTITION_STATE, RESERVATION_STATE, Event
from steward.core.moments import micros, moment
from steward.reports.history.room import HistoryRoom
from steward.reports.history.shapes import (
    NodeAnswer,
    NodeCount,
    NodeCountsAnswer,
    NodeCountsRequest,
    NodePast,
    NodeRequest,
    PartitionNow,
    PartitionsAnswer,
    PartitionsRequest,
    ReservationNow,
    ReservationsAnswer,
    ReservationsRequest,
)
from steward.reports.history.spans import OPEN_US, REMOVED, NodeSpan, cut, is_down, is_put_away
from steward.slurm.nodelists import expand

_USUAL: Final = timedelta(days=30)
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC) + _USUAL
_MOST: Final = 10_000
_MICROS: Final = 1_000_000


def node_counts(room: HistoryRoom, asker: Asker, request: NodeCountsRequest) -> NodeCountsAnswer:
    """How many nodes are in which state.

    Raises:
        Refused: The cluster that is named shows its nodes to operators alone.
        UsageError: There is no such cluster.
    """
    clusters = room.nodes_seen(asker, request.cluster)
    with room.reader() as reader:
        found = reader.node_counts(clusters) if reader else []
        silent_since = reader.silent_since(clusters) if reader else {}
    return NodeCountsAnswer(
        counts=tuple(
            NodeCount(cluster=cluster, state=state, nodes=nodes) for cluster, state, nodes in found
        ),
        silent_since=silent_since,
    )


def partitions(room: HistoryRoom, asker: Asker, request: PartitionsRequest) -> PartitionsAnswer:
    """Which partitions there are.

    Raises:
        UsageError: There is no such cluster.
    """
    found = _present(room, asker, PARTITION_STATE, "partitions", request.cluster)
    return PartitionsAnswer(
        partitions=tuple(
            PartitionNow(
                cluster=event.cluster,
                partition=event.body.partition,
                state=event.body.state,
                since=event.at,
            )
            for event in found
        )
    )


def reservations(
    room: HistoryRoom, asker: Asker, request: ReservationsRequest
) -> ReservationsAnswer:
    """Which reservations there are.

    Raises:
        UsageError: There is no such cluster.
    """
    found = _present(room, asker, RESERVATION_STATE, "reservations", request.cluster)
    return ReservationsAnswer(
        reservations=tuple(
            ReservationNow(
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


def _present(
    room: HistoryRoom, asker: Asker, kind: str, word: str, cluster: str
) -> Iterable[Event]:
    """What is there of a kind, on clusters whose PrivateData does not hide it by this word."""
    named = [room.cluster_asked(cluster)] if cluster else room.clusters
    seen = [name for name in named if room.access.may_see_all(asker, name, word)]
    with room.reader() as reader:
        return reader.present(kind, seen) if reader else []


def node(room: HistoryRoom, asker: Asker, request: NodeRequest) -> NodeAnswer:
    """What became of one node.

    Raises:
        Refused: The cluster shows its nodes to operators alone.
        UsageError: The cluster, the node or a time cannot be understood.
    """
    cluster = room.cluster_asked(request.cluster)
    room.nodes_seen(asker, cluster)
    named = expand(request.node)
    if len(named) != 1:
        raise UsageError("give one node", request.node)
    zone = room.zone(request.zone, cluster)
    until = room.time(request.until, zone) or room.now()
    since = room.time(request.since, zone) or max(until, _EARLIEST) - _USUAL
    if until < since:
        raise UsageError("the time that is asked for ends before it begins")
    with room.reader() as reader:
        spans = (
            reader.node_between(cluster, named[0], micros(since), micros(until)) if reader else []
        )
    known = down = planned = 0
    for span, begin, end in cut(spans, micros(since), micros(until)):
        if span.state == REMOVED:
            continue
        known += end - begin
        if is_down(span.state):
            down += end - begin
            planned += end - begin if is_put_away(span.state) else 0
    limit = max(1, min(request.limit, _MOST))
    return NodeAnswer(
        spans=tuple(map(_past, spans[::-1][:limit])),
        since=since,
        until=until,
        known_s=known / _MICROS,
        down_s=down / _MICROS,
        planned_down_s=planned / _MICROS,
        is_all=len(spans) <= limit,
        sensor=room.has_sensor([cluster]),
    )


def _past(span: NodeSpan) -> NodePast:
    return NodePast(
        state=span.state,
        since=moment(span.from_us),
        until=None if span.until_us == OPEN_US else moment(span.until_us),
        reason=span.reason,
        reason_user=span.reason_user,
    )


ACTIONS: Final = (
    Action(
        name="history.node_counts",
        help="How many nodes are in which state.",
        request=NodeCountsRequest,
        answer=NodeCountsAnswer,
        run=node_counts,
        only_reads=True,
    ),
    Action(
        name="history.partitions",
        help="Which partitions there are.",
        request=PartitionsRequest,
        answer=PartitionsAnswer,
        run=partitions,
        only_reads=True,
    ),
    Action(
        name="history.reservations",
        help="Which reservations there are.",
        request=ReservationsRequest,
        answer=ReservationsAnswer,
        run=reservations,
        only_reads=True,
    ),
    Action(
        name="history.node",
        help="What became of one node.",
        request=NodeRequest,
        answer=NodeAnswer,
        run=node,
        only_reads=True,
    ),
)
