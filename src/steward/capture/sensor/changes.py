"""Two pictures of a cluster compared: what is to be told, so that it can be replayed exactly.

Nothing here asks Slurm or remembers anything. Whoever starts with no picture and
takes each change in turn has, after the last, the states of the last picture; where
use is no news, but for the jobs that nodes have.
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
    Noticed,
    PartitionState,
    ReservationState,
)
from steward.slurm.node_states import (
    FLAGS_OF_USE,
    UNKNOWN,
    is_available,
    is_failing,
    is_silent,
    is_taken,
    parse_node_state,
    saves_power,
    without_use,
)

REMOVED: Final = "REMOVED"
"""The state of what is not there any more."""


class NodeShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is compared of a node; most fields are those of :class:`NodeState`.

    Attributes:
        is_resuming: Whether it was away, and its slurmd has not answered since it is back.
            That alone is no failure; that it is DOWN after all is one.
        has_failed: Whether it had failed before, and has not taken jobs since: what is shown of
            one that was drained or resumed then does not tell.
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
        """Whether it fails now, or has not taken jobs since it did."""
        return self.has_failed or (is_failing(self.state) and not self.is_resuming)

    @property
    def capacity(self) -> tuple[int, int, int]:
        """What it has for jobs: CPUs, memory, GPUs."""
        return self.cpus, self.memory_bytes, self.gpus


class PartitionShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is compared of a partition."""

    state: str


class ReservationShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is compared of a reservation; the fields are those of :class:`ReservationState`."""

    state: str
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


Shown = NodeShown | PartitionShown | ReservationShown

SHOWN: Final[dict[str, type[Shown]]] = {
    NODE_STATE: NodeShown,
    PARTITION_STATE: PartitionShown,
    RESERVATION_STATE: ReservationShown,
}
"""What there is a picture of, by the kind of event that tells of it."""

Picture = Mapping[str, Mapping[str, Shown]]
"""For each kind what was shown, by name; a kind that is missing was not looked at."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one thing.

    Attributes:
        kind: The event's kind.
        name: The thing's name.
        shown: What it is now; None if it is gone.
        at: When that happened, as far as it can be known.
        body: What is to be told; None for a change that is nobody's news.
    """

    kind: str
    name: str
    shown: Shown | None
    at: datetime
    body: NodeState | PartitionState | ReservationState | None = None


def compare(
    before: Picture,
    after: Picture,
    *,
    source: Noticed,
    at: datetime,
    since: datetime | None = None,
    usage: bool = True,
) -> list[Change]:
    """What changed between two pictures.

    Args:
        before: What is known.
        after: What is shown now; of the kinds that are missing nothing has changed.
        source: What made us look.
        at: When the second was taken.
        since: When the first was; None if there was none.
        usage: Whether it is news that jobs come to a node, or leave it.
    """
    changes: list[Change] = []
    for kind, now in after.items():
        old = before.get(kind, {})
        for name, shown in now.items():
            previous = old.get(name)
            one = _with_memory(previous, shown)
            if one != previous and (usage or not _is_not_known_yet(previous, one)):
                changes.append(_changed(kind, name, previous, one, source, at, since, usage))
        changes += [
            Change(kind=kind, name=name, shown=None, at=at, body=_removed(name, one, source))
            for name, one in old.items()
            if name not in now
        ]
    return changes


def _changed(
    kind: str,
    name: str,
    old: Shown | None,
    new: Shown,
    source: Noticed,
    at: datetime,
    since: datetime | None,
    usage: bool,
) -> Change:
    body: NodeState | PartitionState | ReservationState | None = None
    if isinstance(new, NodeShown):
        before = _of(NodeShown, old)
        if _has_news(before, new, usage):
            body = _node(name, before, new, source)
            at = _happened(before, new, at, since)
    elif old is None or old.state != new.state:
        was = old.state if old else ""
        body = (
            _reservation(name, new, new.state, was, source)
            if isinstance(new, ReservationShown)
            else PartitionState(partition=name, state=new.state, old_state=was, source=source)
        )
    return Change(kind=kind, name=name, shown=new, at=at, body=body)


def _removed(
    name: str, old: Shown, source: Noticed
) -> NodeState | PartitionState | ReservationState:
    if isinstance(old, NodeShown):
        return NodeState(
            node=name,
            state=REMOVED,
            old_state=old.state,
            old_reason=old.reason,
            source=source,
            partitions=old.partitions,
            cpus=old.cpus,
            memory_bytes=old.memory_bytes,
            gpus=old.gpus,
        )
    if isinstance(old, ReservationShown):
        return _reservation(name, old, REMOVED, old.state, source)
    return PartitionState(partition=name, state=REMOVED, old_state=old.state, source=source)


def _has_news(old: NodeShown | None, new: NodeShown, usage: bool) -> bool:
    # A uid goes and comes with the directory service; the partitions of a node are no state.
    if old is None or _why(old) != _why(new):
        return True
    if old.capacity != new.capacity:
        return True
    if old.state == new.state:
        return False
    return usage or without_use(old.state) != without_use(new.state)


def _is_not_known_yet(old: Shown | None, new: Shown) -> bool:
    """Whether a slurmctld that has just started only waits for what the node will say."""
    if not isinstance(old, NodeShown) or not isinstance(new, NodeShown):
        return False
    base, flags = parse_node_state(new.state)
    return (
        base == UNKNOWN
        and frozenset(flags) - FLAGS_OF_USE == without_use(old.state)[1]
        and (old.reason, old.reason_user) == (new.reason, new.reason_user)
    )


def _with_memory(old: Shown | None, new: Shown) -> Shown:
    """What is shown now, with what only the picture before knows of it."""
    if not isinstance(old, NodeShown) or not isinstance(new, NodeShown):
        return new
    if not new.cpus and old.cpus:
        # A node that Slurm hides while it is off still has them.
        cpus, memory_bytes, gpus = old.capacity
        new = msgspec.structs.replace(new, cpus=cpus, memory_bytes=memory_bytes, gpus=gpus)
    if _is_resuming(old, new):
        new = msgspec.structs.replace(new, is_resuming=True)
    if old.is_failed and not new.is_failed and not _is_back(new.state):
        new = msgspec.structs.replace(new, has_failed=True)
    return new


def _is_back(state: str) -> bool:
    # One that is off, or boots, has yet to show that it works: it may be DOWN after that again.
    return is_available(state) and not saves_power(state)


def _is_resuming(old: NodeShown, new: NodeShown) -> bool:
    if not is_silent(new.state):
        return False
    # One that falls silent while it works fails, whatever its jobs do meanwhile.
    if is_silent(old.state):
        return old.is_resuming
    return is_taken(old.state) or is_failing(old.state)


def _has_failed(old: NodeShown | None, new: NodeShown) -> bool:
    # Of one that was not known before nobody can say that it worked.
    if old is None or new.is_resuming or not is_failing(new.state):
        return False
    return old.is_resuming or not is_failing(old.state)


def _node(name: str, old: NodeShown | None, new: NodeShown, source: Noticed) -> NodeState:
    return NodeState(
        node=name,
        state=new.state,
        old_state=old.state if old else "",
        reason=new.reason,
        reason_uid=new.reason_uid,
        reason_user=new.reason_user,
        reason_at=new.reason_at,
        old_reason=old.reason if old else "",
        source=source,
        failed=_has_failed(old, new),
        recovered=old is not None and old.is_failed and _is_back(new.state),
        partitions=new.partitions,
        cpus=new.cpus,
        memory_bytes=new.memory_bytes,
        gpus=new.gpus,
        resized=old is not None and (old.state, _why(old)) == (new.state, _why(new)),
    )


def _why(shown: NodeShown) -> tuple[str, str]:
    return shown.reason, shown.reason_user


def _happened(
    old: NodeShown | None, new: NodeShown, at: datetime, since: datetime | None
) -> datetime:
    """When it happened: Slurm dates reasons, and nothing else."""
    told = new.reason_at
    if told is None or since is None or (old is not None and told == old.reason_at):
        return at
    return told if since <= told <= at else at


def _reservation(
    name: str, shown: ReservationShown, state: str, was: str, source: Noticed
) -> ReservationState:
    return ReservationState(
        reservation=name,
        state=state,
        old_state=was,
        nodes=shown.nodes,
        start=shown.start,
        end=shown.end,
        users=shown.users,
        flags=shown.flags,
        source=source,
    )


Kind = TypeVar("Kind", bound=Shown)


def _of(kind: type[Kind], shown: Shown | None) -> Kind | None:
    return shown if isinstance(shown, kind) else None


def boundaries(picture: Picture) -> Iterator[datetime]:
    """When reservations begin and end, each a moment at which a state changes by itself."""
    for one in picture.get(RESERVATION_STATE, {}).values():
        if isinstance(one, ReservationShown):
            yield from (moment for moment in (one.start, one.end) if moment)
