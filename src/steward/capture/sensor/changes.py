"""Change detection of the sensor: compares two snapshots of nodes, partitions and reservations.

:class:`NodeFacts`, :class:`PartitionFacts` and :class:`ReservationFacts` hold the compared facts;
an :class:`ObjectChange` carries the body of the event to emit. ``compare_snapshots`` is a pure
function: it queries nothing and remembers nothing. Replaying its changes from an empty snapshot
yields the states of the last one, except that allocation of nodes may be left out (``usage``).
``list_boundaries`` lists when reservations begin and end.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from steward.core.events import (
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    NodeState,
    PartitionState,
    PollCause,
    ReservationState,
)
from steward.slurm.node_states import (
    FLAGS_OF_USE,
    UNKNOWN,
    is_available,
    is_failing,
    is_not_responding,
    is_out_of_service,
    parse_node_state,
    saves_power,
    strip_use_flags,
)

STATE_REMOVED: Final = "REMOVED"
"""State of an object that no longer exists."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compared facts of a node; most fields are those of :class:`NodeState`.

    Attributes:
        is_resuming: Whether it was away and its slurmd has not answered since it came back. That is
            no failure; becoming DOWN afterwards is one.
        has_failed: Whether it failed before and has not accepted jobs since; its present state does
            not show that once it was drained or resumed.
    """

    state: str
    reason: str = ""
    reason_uid: int | None = None
    reason_user: str = ""
    reason_at: datetime | None = None
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    is_resuming: bool = False
    has_failed: bool = False

    @property
    def is_failed(self) -> bool:
        """Whether it fails now, or has not accepted jobs since its failure."""
        return self.has_failed or (is_failing(self.state) and not self.is_resuming)

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Capacity for jobs: CPUs, memory in bytes, GPUs."""
        return self.cpus, self.memory_bytes, self.gpus


class PartitionFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compared facts of a partition."""

    state: str


class ReservationFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compared facts of a reservation; fields as in :class:`ReservationState`."""

    state: str
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


ObjectFacts = NodeFacts | PartitionFacts | ReservationFacts
"""Compared facts of any object."""

FACTS_BY_KIND: Final[dict[str, type[ObjectFacts]]] = {
    NODE_STATE: NodeFacts,
    PARTITION_STATE: PartitionFacts,
    RESERVATION_STATE: ReservationFacts,
}
"""Type of the compared facts, by kind of event."""

ClusterSnapshot = Mapping[str, Mapping[str, ObjectFacts]]
"""Facts by kind of event and name; a missing kind was not queried."""


class ObjectChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of one object.

    Attributes:
        kind: Kind of event.
        name: Name of the object.
        facts: Its present facts; None if it is gone.
        at: Time of the change, as far as known.
        body: Body of the event; None for a change that is not reported.
    """

    kind: str
    name: str
    facts: ObjectFacts | None
    at: datetime
    body: NodeState | PartitionState | ReservationState | None = None


def compare_snapshots(
    before: ClusterSnapshot,
    after: ClusterSnapshot,
    *,
    source: PollCause,
    at: datetime,
    since: datetime | None = None,
    usage: bool = True,
) -> list[ObjectChange]:
    """Return the changes between two snapshots.

    Args:
        before: Known facts.
        after: Present facts; kinds that are missing have not changed.
        source: Cause of the query.
        at: Time of the second snapshot.
        since: Time of the first snapshot; None if there was none.
        usage: Whether jobs starting and ending on a node are reported.
    """
    changes: list[ObjectChange] = []
    for kind, now in after.items():
        old = before.get(kind, {})
        for name, polled in now.items():
            previous = old.get(name)
            facts = _carry_over(previous, polled)
            if facts != previous and (usage or not _is_unregistered_yet(previous, facts)):
                changes.append(_make_change(kind, name, previous, facts, source, at, since, usage))
        changes += [
            ObjectChange(
                kind=kind, name=name, facts=None, at=at, body=_make_removal(name, facts, source)
            )
            for name, facts in old.items()
            if name not in now
        ]
    return changes


def _make_change(
    kind: str,
    name: str,
    old: ObjectFacts | None,
    new: ObjectFacts,
    source: PollCause,
    at: datetime,
    since: datetime | None,
    usage: bool,
) -> ObjectChange:
    """Build the change of an object that is new or differs."""
    body: NodeState | PartitionState | ReservationState | None = None
    if isinstance(new, NodeFacts):
        before = _as_kind(NodeFacts, old)
        if _has_news(before, new, usage):
            body = _make_node_state(name, before, new, source)
            at = _date_change(before, new, at, since)
    elif old is None or old.state != new.state:
        old_state = old.state if old else ""
        body = (
            _make_reservation_state(name, new, new.state, old_state, source)
            if isinstance(new, ReservationFacts)
            else PartitionState(partition=name, state=new.state, old_state=old_state, source=source)
        )
    return ObjectChange(kind=kind, name=name, facts=new, at=at, body=body)


def _make_removal(
    name: str, old: ObjectFacts, source: PollCause
) -> NodeState | PartitionState | ReservationState:
    """Build the event body of an object that is gone."""
    if isinstance(old, NodeFacts):
        return NodeState(
            node=name,
            state=STATE_REMOVED,
            old_state=old.state,
            old_reason=old.reason,
            source=source,
            partitions=old.partitions,
            cpus=old.cpus,
            memory_bytes=old.memory_bytes,
            gpus=old.gpus,
        )
    if isinstance(old, ReservationFacts):
        return _make_reservation_state(name, old, STATE_REMOVED, old.state, source)
    return PartitionState(partition=name, state=STATE_REMOVED, old_state=old.state, source=source)


def _has_news(old: NodeFacts | None, new: NodeFacts, usage: bool) -> bool:
    """Return whether a node's change is reported: reason, capacity or state."""
    # A uid comes and goes with the directory service; a node's partitions are no state.
    if old is None or _reason_key(old) != _reason_key(new):
        return True
    if old.capacity != new.capacity:
        return True
    if old.state == new.state:
        return False
    return usage or strip_use_flags(old.state) != strip_use_flags(new.state)


def _is_unregistered_yet(old: ObjectFacts | None, new: ObjectFacts) -> bool:
    """Return whether a slurmctld that has just started still waits for the node to register."""
    if not isinstance(old, NodeFacts) or not isinstance(new, NodeFacts):
        return False
    base, flags = parse_node_state(new.state)
    return (
        base == UNKNOWN
        and frozenset(flags) - FLAGS_OF_USE == strip_use_flags(old.state)[1]
        and (old.reason, old.reason_user) == (new.reason, new.reason_user)
    )


def _carry_over(old: ObjectFacts | None, new: ObjectFacts) -> ObjectFacts:
    """Add facts that only the previous snapshot knows."""
    if not isinstance(old, NodeFacts) or not isinstance(new, NodeFacts):
        return new
    if not new.cpus and old.cpus:
        # Slurm hides a powered-down node, which still has its capacity.
        cpus, memory_bytes, gpus = old.capacity
        new = msgspec.structs.replace(new, cpus=cpus, memory_bytes=memory_bytes, gpus=gpus)
    if _is_resuming(old, new):
        new = msgspec.structs.replace(new, is_resuming=True)
    if old.is_failed and not new.is_failed and not _is_back(new.state):
        new = msgspec.structs.replace(new, has_failed=True)
    return new


def _is_back(state: str) -> bool:
    """Return whether a node accepts jobs and is powered up."""
    # A node that is powered down or booting may still turn out DOWN.
    return is_available(state) and not saves_power(state)


def _is_resuming(old: NodeFacts, new: NodeFacts) -> bool:
    """Return whether a node came back and its slurmd has not answered yet."""
    if not is_not_responding(new.state):
        return False
    # A node that stops answering while in use fails, whatever its jobs do meanwhile.
    if is_not_responding(old.state):
        return old.is_resuming
    return is_out_of_service(old.state) or is_failing(old.state)


def _has_failed(old: NodeFacts | None, new: NodeFacts) -> bool:
    """Return whether a change is a failure of the node."""
    # Nobody knows whether a new node worked before.
    if old is None or new.is_resuming or not is_failing(new.state):
        return False
    return old.is_resuming or not is_failing(old.state)


def _make_node_state(
    name: str, old: NodeFacts | None, new: NodeFacts, source: PollCause
) -> NodeState:
    """Build the body of a node.state event."""
    facts = msgspec.structs.asdict(new)
    del facts["is_resuming"], facts["has_failed"]
    return NodeState(
        **facts,
        node=name,
        old_state=old.state if old else "",
        old_reason=old.reason if old else "",
        source=source,
        failed=_has_failed(old, new),
        recovered=old is not None and old.is_failed and _is_back(new.state),
        resized=old is not None and (old.state, _reason_key(old)) == (new.state, _reason_key(new)),
    )


def _reason_key(facts: NodeFacts) -> tuple[str, str]:
    """Return the text and author of a node's reason."""
    return facts.reason, facts.reason_user


def _date_change(
    old: NodeFacts | None, new: NodeFacts, at: datetime, since: datetime | None
) -> datetime:
    """Return the time of a change: Slurm records times of reasons only."""
    reason_at = new.reason_at
    if reason_at is None or since is None or (old is not None and reason_at == old.reason_at):
        return at
    return reason_at if since <= reason_at <= at else at


def _make_reservation_state(
    name: str, facts: ReservationFacts, state: str, old_state: str, source: PollCause
) -> ReservationState:
    """Build the body of a reservation.state event."""
    fields = msgspec.structs.asdict(facts) | {"state": state}
    return ReservationState(**fields, reservation=name, old_state=old_state, source=source)


Kind = TypeVar("Kind", bound=ObjectFacts)


def _as_kind(kind: type[Kind], facts: ObjectFacts | None) -> Kind | None:
    """Return facts if they are of this type, else None."""
    return facts if isinstance(facts, kind) else None


def list_boundaries(snapshot: ClusterSnapshot) -> Iterator[datetime]:
    """Return start and end times of reservations, when states change without any command."""
    for facts in snapshot.get(RESERVATION_STATE, {}).values():
        if isinstance(facts, ReservationFacts):
            yield from (moment for moment in (facts.start, facts.end) if moment)
