"""What became of one node, told event by event, as spans of time that touch and never overlap."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.core.events import Event, NodeState, ReservationState
from steward.core.timestamps import micros
from steward.slurm.node_states import parse_node_state

OPEN_US: Final = 2**62
"""The end of a span that goes on."""

REMOVED: Final = "REMOVED"
"""The state of a node that is not there any more."""

_ACTIVE: Final = "ACTIVE"


class NodeSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A node in one state, with one reason; times are µs since the epoch.

    Attributes:
        cluster: The cluster's name.
        node: NodeName.
        from_us: Where it begins.
        until_us: Where it ends; OPEN_US while it goes on.
        state: The state, as events tell it.
        since_us: Since when the state has been so, whatever became of its reason.
        is_known: Whether that is when it became so; else it is when it was first seen.
        partitions: With commas between.
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
        name: The reservation's.
        from_us: When it began.
        until_us: When it ended; OPEN_US while it goes on.
        nodes: Its node list.
        flags: With commas between.
    """

    cluster: str
    name: str
    from_us: int
    until_us: int = OPEN_US
    nodes: str = ""
    flags: str = ""


class NodesAlike(msgspec.Struct, frozen=True, array_like=True):
    """Nodes that were in one state from one time to another, together.

    Attributes:
        from_us: Where that begins, or the time that is asked for, µs since the epoch.
        until_us: Where it ends, or the time that is asked for.
        state: The state, as events tell it.
        cpus: How many CPUs they have.
        gpus: How many GPUs.
        nodes: How many they are.
    """

    from_us: int
    until_us: int
    state: str
    cpus: int
    gpus: int
    nodes: int


def next_span(before: NodeSpan | None, event: Event) -> NodeSpan:
    """The span that an event begins.

    Args:
        before: The span that it ends; None where nothing was known of the node.
        event: A node.state event.
    """
    body: NodeState = event.body
    at_us = micros(event.at)
    if before is not None:
        # Slurm dates reasons by the second: one may be dated before what was seen last.
        at_us = max(at_us, before.from_us)
    since_us, is_known = at_us, _is_change(before, body)
    if before is not None and before.state == body.state:
        since_us, is_known = before.since_us, before.is_known
    cpus, memory_bytes, gpus = body.cpus, body.memory_bytes, body.gpus
    if not cpus and before is not None:
        cpus, memory_bytes, gpus = before.cpus, before.memory_bytes, before.gpus
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
        reason_us=None if body.reason_at is None else micros(body.reason_at),
        partitions=",".join(body.partitions),
        cpus=cpus,
        memory_bytes=memory_bytes,
        gpus=gpus,
    )


def _is_change(before: NodeSpan | None, body: NodeState) -> bool:
    """Whether the state changed just then; else it may have been so for long."""
    if body.old_state:
        return body.old_state != body.state
    return before is not None or body.source != "start"


def active_span(event: Event) -> ReservationSpan | None:
    """The span that an event about a reservation begins; None where it is not active."""
    body: ReservationState = event.body
    if body.state != _ACTIVE:
        return None
    # It is seen a little after it began.
    began = event.at if body.start is None else min(body.start, event.at)
    return ReservationSpan(
        cluster=event.cluster,
        name=body.reservation,
        from_us=micros(began),
        nodes=body.nodes,
        flags=",".join(body.flags),
    )


def ended_us(before: ReservationSpan, event: Event) -> int:
    """When a reservation ceased to be active, by the event that tells of it."""
    end = event.body.end
    at_us = micros(event.at)
    if end is not None and before.from_us <= micros(end) <= at_us:
        return micros(end)
    return max(at_us, before.from_us)


def cut(
    spans: Iterable[NodeSpan], since_us: int, until_us: int
) -> Iterator[tuple[NodeSpan, int, int]]:
    """The spans with where they begin and end within a time; without those that are outside.

    Args:
        spans: The spans.
        since_us: Where the time begins, µs since the epoch.
        until_us: Where it ends.
    """
    for span in spans:
        begin, end = max(span.from_us, since_us), min(span.until_us, until_us)
        if begin < end:
            yield span, begin, end


def is_down(state: str) -> bool:
    """Whether slurmdbd counts a node's time as down: it is, or is drained of its last job."""
    base, flags = parse_node_state(state)
    if base in ("DOWN", "ERROR"):
        return True
    is_left = not {"DRAIN", "FAIL"}.isdisjoint(flags)
    return is_left and base == "IDLE" and "COMPLETING" not in flags


def is_put_away(state: str) -> bool:
    """Whether a node that is down is so by plan: powered down, or not there yet."""
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

Span = TypeVar("Span", NodeSpan, ReservationSpan, NodesAlike)


def spans_of(kind: type[Span], rows: Sequence[Sequence[Any]]) -> list[Span]:
    """The spans of rows, each with all fields in their order."""
    # Not strict, since SQLite has 0 and 1 for False and True; the kind is known when it runs.
    return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]


def insertion(table: str, kind: type[msgspec.Struct]) -> str:
    """The statement that puts a span into a table."""
    fields = kind.__struct_fields__
    marks = ", ".join("?" * len(fields))
    return f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks})"  # noqa: S608 -- our own names
