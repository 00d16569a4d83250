"""Node and reservation spans: periods in one state, built event by event, and their tables.

The spans of a node touch and never overlap; each event ends one and begins the next. Times are µs
since the epoch.

:class:`NodeSpan`, :class:`ReservationSpan` and :class:`NodeGroupSpan` are rows;
:func:`make_next_node_span`, :func:`make_reservation_span` and :func:`get_reservation_end_us` fold
an event into spans (called by the consumer); :func:`is_node_down` and :func:`is_planned_down`
classify states as slurmdbd does. ``MIGRATIONS`` is the schema of history.db;
:func:`build_span_insert` and :func:`convert_spans` write spans as rows and read them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.core.events import Event, NodeState, ReservationState
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


NODE_COLUMNS: Final = ", ".join(NodeSpan.__struct_fields__)
RESERVATION_COLUMNS: Final = ", ".join(ReservationSpan.__struct_fields__)

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL);
    INSERT INTO cursor VALUES (0);
    CREATE TABLE mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

    CREATE TABLE event (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL,
        cluster TEXT NOT NULL,
        subject TEXT NOT NULL,
        failed INTEGER NOT NULL,
        key TEXT NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (key, cluster)
    );
    CREATE INDEX event_by_time ON event (at_us, number);
    CREATE INDEX event_by_subject ON event (subject, kind, at_us, number);
    CREATE INDEX event_failed ON event (at_us, number) WHERE failed = 1;

    CREATE TABLE node_span (
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        from_us INTEGER NOT NULL,
        until_us INTEGER NOT NULL,
        state TEXT NOT NULL,
        since_us INTEGER NOT NULL,
        is_known INTEGER NOT NULL,
        reason TEXT NOT NULL,
        reason_user TEXT NOT NULL,
        reason_uid INTEGER,
        reason_us INTEGER,
        partitions TEXT NOT NULL,
        cpus INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        gpus INTEGER NOT NULL
    );
    CREATE INDEX node_span_by_node ON node_span (cluster, node, from_us);
    CREATE INDEX node_span_by_end ON node_span (until_us, from_us);
    CREATE UNIQUE INDEX node_span_open ON node_span (cluster, node)
        WHERE until_us = 4611686018427387904;

    CREATE TABLE reservation_span (
        cluster TEXT NOT NULL,
        name TEXT NOT NULL,
        from_us INTEGER NOT NULL,
        until_us INTEGER NOT NULL,
        nodes TEXT NOT NULL,
        flags TEXT NOT NULL
    );
    CREATE INDEX reservation_span_by_end ON reservation_span (until_us, from_us);
    CREATE UNIQUE INDEX reservation_span_open ON reservation_span (cluster, name)
        WHERE until_us = 4611686018427387904;
    """,
    """
    CREATE TABLE present (
        cluster TEXT NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        key TEXT NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (cluster, kind, subject)
    ) WITHOUT ROWID;
    CREATE INDEX node_span_by_begin ON node_span (cluster, from_us);
    CREATE INDEX event_by_kind ON event (kind, at_us, number);
    INSERT OR REPLACE INTO present
        SELECT cluster, kind, subject, key, data FROM event
        WHERE kind IN ('partition.state', 'reservation.state') ORDER BY at_us, number;
    """,
)

Span = TypeVar("Span", NodeSpan, ReservationSpan, NodeGroupSpan)


def convert_spans(kind: type[Span], rows: Sequence[Sequence[Any]]) -> list[Span]:
    """Convert rows with all fields, in order, to spans."""
    # Not strict, because SQLite returns 0 and 1 for False and True. The kind is a runtime value.
    return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]


def build_span_insert(table: str, kind: type[msgspec.Struct]) -> str:
    """Build the INSERT statement for a span."""
    fields = kind.__struct_fields__
    marks = ", ".join("?" * len(fields))
    return f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks})"  # noqa: S608 -- our own names
