"""The nodes of a made-up cluster: what became of them in a quarter of a year, told as by a sensor.

A sensor that tells no use, as is the default: a node is heard of when it fails, is drained
or comes back, and on a cluster of thousands that is hundreds of times a day.
"""

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    ControllerState,
    Event,
    NodeState,
    PartitionState,
    ReservationState,
)

NODES: Final = 5000
PARTITIONS: Final = ("batch", "gpu", "debug")
_TROUBLES: Final = (
    ("DOWN+NOT_RESPONDING", "Not responding", "slurm", 2.0),
    ("IDLE+DRAIN", "Kill task failed", "root", 8.0),
    ("MIXED+DRAIN", "bad DIMM in slot B2", "carol", 70.0),
    ("IDLE+DRAIN", "IB link at half its width", "health", 30.0),
    ("IDLE+DRAIN+MAINTENANCE", "firmware", "dan", 12.0),
)
"""What befalls a node: its state then, the reason, who gave it, and for how many hours."""
_MOST_TROUBLES: Final = 8
_RESERVATIONS: Final = 40
_RESTARTS: Final = 12


def name(number: int) -> str:
    """A node's name."""
    return f"n{number:04}"


def partitions(number: int) -> tuple[str, ...]:
    """The partitions that a node is in."""
    if number < NODES // 50:
        return ("batch", "debug")
    return ("gpu",) if number % 10 == 0 else ("batch",)


def events(cluster: str, begin: datetime, now: datetime, random_: random.Random) -> list[Event]:
    """All that is told, in the order in which it happened.

    Args:
        cluster: The cluster's name.
        begin: When the sensor was first started.
        now: When it looked last.
        random_: What decides.
    """
    made = [
        *_partitions(begin),
        *_reservations(begin, now, random_),
        *_restarts(begin, now, random_),
    ]
    for number in range(NODES):
        made += _of_node(number, begin, now, random_)
    made.sort(key=lambda one: one[1])
    return [
        Event(
            kind=kind,
            cluster=cluster,
            key=f"{kind}:bench:{place}",
            at=at,
            seen_at=at,
            source="bench",
            body=body,
        )
        for place, (kind, at, body) in enumerate(made)
    ]


_Made = tuple[str, datetime, Any]


def _of_node(
    number: int, begin: datetime, now: datetime, random_: random.Random
) -> Iterator[_Made]:
    shown = NodeState(
        node=name(number),
        state="IDLE",
        source="start",
        partitions=partitions(number),
        cpus=64,
        memory_bytes=256 << 30,
        gpus=4 if "gpu" in partitions(number) else 0,
    )
    yield NODE_STATE, begin, shown
    free_at = begin
    span_s = (now - begin).total_seconds()
    starts = sorted(random_.random() * span_s for _ in range(random_.randint(0, _MOST_TROUBLES)))
    for start_s in starts:
        at = begin + timedelta(seconds=start_s)
        if at <= free_at:
            continue  # the trouble before is not over
        state, reason, user, hours = random_.choice(_TROUBLES)
        bad = msgspec.structs.replace(
            shown,
            state=state,
            old_state=shown.state,
            reason=reason,
            reason_user=user,
            reason_at=at,
            old_reason="",
            source="trigger",
            failed=state.startswith("DOWN"),
        )
        yield NODE_STATE, at, bad
        shown = msgspec.structs.replace(
            bad,
            state=random_.choice(("IDLE", "MIXED", "ALLOCATED")),
            old_state=state,
            reason="",
            reason_user="",
            reason_at=None,
            old_reason=reason,
            source="interval",
            failed=False,
        )
        free_at = at + timedelta(hours=random_.expovariate(1 / hours))
        if free_at >= now:
            return
        yield NODE_STATE, free_at, shown


def _partitions(begin: datetime) -> Iterator[_Made]:
    for partition in PARTITIONS:
        yield PARTITION_STATE, begin, PartitionState(partition=partition, state="UP")


def _reservations(begin: datetime, now: datetime, random_: random.Random) -> Iterator[_Made]:
    """Windows of maintenance for some nodes each; the last one has begun and is not over."""
    each = (now - begin) / _RESERVATIONS
    for number in range(_RESERVATIONS):
        start = begin + each * (number + 0.5)
        first = random_.randrange(NODES - 100)
        made = ReservationState(
            reservation=f"maint{number}",
            state="ACTIVE",
            nodes=f"n[{first:04}-{first + 99:04}]",
            start=start,
            end=start + each,
            users=("root",),
            flags=("MAINT",),
        )
        yield RESERVATION_STATE, start, made
        if start + each < now:
            gone = msgspec.structs.replace(made, state="REMOVED", old_state="ACTIVE")
            yield RESERVATION_STATE, start + each, gone


def _restarts(begin: datetime, now: datetime, random_: random.Random) -> Iterator[_Made]:
    for _ in range(_RESTARTS):
        at = begin + (now - begin) * random_.random()
        yield CONTROLLER_STATE, at, ControllerState(up=False, message="Connection refused")
        back = at + timedelta(minutes=2)
        yield CONTROLLER_STATE, min(back, now), ControllerState(up=True, restarted=True)
