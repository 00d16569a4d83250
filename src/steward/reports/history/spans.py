"""Node and reservation spans: periods in one state, built event by event, and their tables.

The spans of a node touch and never overlap; each event ends one and begins the next. Times are µs
since the epoch.

:class:`NodeSpan`, :class:`ReservationSpan` and :class:`NodeGroupSpan` are rows;
:func:`make_next_node_span`, :func:`make_reservation_span` and :func:`get_reservation_end_us` fold
an event into spans (called by the consumer); :func:`is_node_down` and :func:`is_planned_down`
classify states as slurmdbd does. ``MIGRATIONS`` is the schema of history.db.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.core.events import Event, NodeState, ReservationState
from steward.core.storage import Cursor, Index, Rows, Table
from steward.core.timestamps import to_micros
from steward.slurm.node_states import parse_node_state

OPEN_US: Final = 2**62
"""End of a span that has not ended."""

REMOVED: Final = "REMOVED"
"""State of a node that no longer exists."""

_ACTIVE: Final = "ACTIVE"


class NodeSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A node in one state with one reason; times are µs since the epoch.

    Attributes:
        cluster: The cluster's name.
        node: NodeName.
        from_us: Begin.
        until_us: End; OPEN_US while it lasts.
        state: The state, as in node.state events.
        since_us: Time since the node has this state, whatever its reason.
        is_known: True if ``since_us`` is the time of the change, False if it is the first
            observation.
        partitions: Comma-separated names.
    """

    cluster: str
    node: str
    from_us: int
    until_us: int = OPEN_US
    state: str
    since_us: int
    is_known: bool = True
    reason: str = ""
    reason_user: str = ""
    reason_uid: int | None = None
    reason_us: int | None = None
    partitions: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0


class ReservationSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reservation while it was active; times are µs since the epoch.

    Attributes:
        cluster: The cluster's name.
        name: The reservation's name.
        from_us: Begin.
        until_us: End; OPEN_US while it lasts.
        nodes: Node list.
        flags: Comma-separated flags.
    """

    cluster: str
    name: str
    from_us: int
    until_us: int = OPEN_US
    nodes: str = ""
    flags: str = ""


class NodeGroupSpan(msgspec.Struct, frozen=True, array_like=True):
    """A group of nodes that entered and left one state at the same times.

    Attributes:
        from_us: Begin, or begin of the queried interval; µs since the epoch.
        until_us: End, or end of the queried interval.
        state: The state, as in node.state events.
        cpus: Number of CPUs of the group.
        gpus: Number of GPUs of the group.
        nodes: Number of nodes.
    """

    from_us: int
    until_us: int
    state: str
    cpus: int
    gpus: int
    nodes: int


def make_next_node_span(previous: NodeSpan | None, event: Event) -> NodeSpan:
    """Return the span that a node.state event begins.

    Args:
        previous: The span that it ends; None for a node not seen before.
        event: A node.state event.
    """
    body: NodeState = event.body
    at_us = to_micros(event.at)
    if previous is not None:
        # Slurm dates reasons to the second: an event may be dated before the last observation.
        at_us = max(at_us, previous.from_us)
    since_us, is_known = at_us, _is_state_change(previous, body)
    if previous is not None and previous.state == body.state:
        since_us, is_known = previous.since_us, previous.is_known
    cpus, memory_bytes, gpus = body.cpus, body.memory_bytes, body.gpus
    if not cpus and previous is not None:
        cpus, memory_bytes, gpus = previous.cpus, previous.memory_bytes, previous.gpus
    return NodeSpan(
        cluster=event.cluster,
        node=body.node,
        from_us=at_us,
        state=body.state,
        since_us=since_us,
        is_known=is_known,
        reason=body.reason,
        reason_user=body.reason_user,
        reason_uid=body.reason_uid,
        reason_us=None if body.reason_at is None else to_micros(body.reason_at),
        partitions=",".join(body.partitions),
        cpus=cpus,
        memory_bytes=memory_bytes,
        gpus=gpus,
    )


def _is_state_change(previous: NodeSpan | None, body: NodeState) -> bool:
    """Return whether the state changed at this event; False if it may have changed long before."""
    if body.old_state:
        return body.old_state != body.state
    return previous is not None or body.source != "start"


def make_reservation_span(event: Event) -> ReservationSpan | None:
    """Return the span that a reservation event begins; None if the reservation is not active."""
    body: ReservationState = event.body
    if body.state != _ACTIVE:
        return None
    # The sensor observes a reservation a little after it began.
    began = event.at if body.start is None else min(body.start, event.at)
    return ReservationSpan(
        cluster=event.cluster,
        name=body.reservation,
        from_us=to_micros(began),
        nodes=body.nodes,
        flags=",".join(body.flags),
    )


def get_reservation_end_us(previous: ReservationSpan, event: Event) -> int:
    """Return when a reservation ceased to be active, from the event that reports it."""
    end = event.body.end
    at_us = to_micros(event.at)
    if end is not None and previous.from_us <= to_micros(end) <= at_us:
        return to_micros(end)
    return max(at_us, previous.from_us)


def clip_spans(
    spans: Iterable[NodeSpan], since_us: int, until_us: int
) -> Iterator[tuple[NodeSpan, int, int]]:
    """Clip spans to an interval; yield each with its begin and end, and skip those outside.

    Args:
        spans: The spans.
        since_us: Begin of the interval, µs since the epoch.
        until_us: End of the interval.
    """
    for span in spans:
        begin, end = max(span.from_us, since_us), min(span.until_us, until_us)
        if begin < end:
            yield span, begin, end


def is_node_down(state: str) -> bool:
    """Return whether slurmdbd counts the state as down: DOWN, or drained with no job left."""
    base, flags = parse_node_state(state)
    if base in ("DOWN", "ERROR"):
        return True
    is_left = not {"DRAIN", "FAIL"}.isdisjoint(flags)
    return is_left and base == "IDLE" and "COMPLETING" not in flags


def is_planned_down(state: str) -> bool:
    """Return whether a node's down time is planned: powered down, or a future node."""
    base, flags = parse_node_state(state)
    return base == "FUTURE" or "POWERED_DOWN" in flags


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event of the history.

    Attributes:
        number: Number in the history.
        at_us: Time of the event.
        kind: Kind of event.
        cluster: The cluster's name.
        subject: Node, partition, reservation, rule, account or daemon concerned.
        failed: Whether a node failed.
        key: Key of the event.
        data: The encoded event.
    """

    number: int = 0
    at_us: int
    kind: str
    cluster: str
    subject: str
    failed: bool
    key: str
    data: bytes


class PresentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Last event about a subject that exists."""

    cluster: str
    kind: str
    subject: str
    key: str
    data: bytes


class HistoryCursor(Cursor, frozen=True, kw_only=True):
    """Cursor, and the time up to which the history was purged, µs since the epoch."""

    purged_us: int = 0


_OPEN: Final = f"until_us = {OPEN_US}"
CURSOR: Final = Table(HistoryCursor, "cursor", has_one_row=True)
EVENTS: Final = Table(
    StoredEvent,
    "event",
    key="number",
    autoincrement=True,
    indexes={
        "by_key": Index("key, cluster", is_unique=True),
        "by_time": Index("at_us, number"),
        "by_kind": Index("kind, at_us, number"),
        "by_subject": Index("subject, kind, at_us, number"),
        "failed": Index("at_us, number", where="failed = 1"),
    },
)
NODE_SPANS: Final = Table(
    NodeSpan,
    "node_span",
    indexes={
        "by_node": Index("cluster, node, from_us"),
        "by_begin": Index("cluster, from_us"),
        "by_end": Index("until_us, from_us"),
        "open": Index("cluster, node", where=_OPEN, is_unique=True),
    },
)
RESERVATION_SPANS: Final = Table(
    ReservationSpan,
    "reservation_span",
    indexes={
        "by_end": Index("until_us, from_us"),
        "open": Index("cluster, name", where=_OPEN, is_unique=True),
    },
)
PRESENT_EVENTS: Final = Table(PresentEvent, "present", key="cluster, kind, subject")
NODE_GROUPS: Final = Rows(NodeGroupSpan)
_FILL_PRESENT: Final = """
    INSERT OR REPLACE INTO present
        SELECT cluster, kind, subject, key, data FROM event
        WHERE kind IN ('partition.state', 'reservation.state') ORDER BY at_us, number;
"""
MIGRATIONS: Final = (
    CURSOR.schema + EVENTS.schema + NODE_SPANS.schema + RESERVATION_SPANS.schema,
    PRESENT_EVENTS.schema + _FILL_PRESENT,
)
