"""Cluster capacity over time: CPU and GPU seconds allocated, down, planned or idle.

The rules are slurmdbd's for ``sreport cluster``:

- *Down*: nodes that are DOWN, or drained with no job left.
- Nodes of a reservation count as allocated, whatever runs on them, unless they are down. With the
  flag MAINT they count as planned down, also those that are down.
- *Planned*: CPUs that are idle while eligible jobs wait.

Amounts are capped hour by hour: a part that exceeds the remaining capacity is cut off. Hours
therefore cannot be summed first.

:class:`Capacity` takes nodes, reservations, and runs or their sums. It keeps one
:class:`ResourceCounter` for CPUs and one for GPUs. A counter holds five :class:`BucketSums` (a sum
for each bucket of time) and returns the capped :class:`ResourceParts` of each bucket. Used by
``reports.cluster``.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, Literal

import msgspec

from steward.jobs.capacity_sums import CapacityRow
from steward.jobs.sum_tables import QUARTER_S
from steward.reports.history.spans import (
    OPEN_US,
    REMOVED,
    NodeGroupSpan,
    NodeSpan,
    ReservationSpan,
    is_node_down,
    is_planned_down,
)
from steward.reports.runs import Periods, RunPiece, RunPieces
from steward.slurm.arrays import count_tasks
from steward.slurm.node_states import parse_node_state
from steward.slurm.nodelists import NodeListError, expand_nodelist

HOUR_S = 3600
"""Longest bucket of time in which amounts are capped, in seconds."""


def add_full_hours(bounds_s: Iterable[int], since_s: int) -> list[int]:
    """Add every full hour after a given time to a list of bounds; return them in order.

    Args:
        bounds_s: Seconds since the epoch.
        since_s: Time after which full hours are added.
    """
    bounds = sorted(set(bounds_s))
    first = -(-max(since_s, bounds[0]) // HOUR_S) * HOUR_S
    return sorted({*bounds, *range(first, bounds[-1], HOUR_S)})


class BucketSums:
    """Sums of amount times seconds for each bucket of time.

    Adding an interval of a month takes as long as adding one of a minute.

    Args:
        bounds_s: Start of each bucket and end of the last, seconds since the epoch.
    """

    def __init__(self, bounds_s: Sequence[int]) -> None:
        self._bounds = bounds_s
        self._begin_s, self._end_s = bounds_s[0], bounds_s[-1]
        self._full = [0] * len(bounds_s)
        self._part = [0] * (len(bounds_s) - 1)

    def add(self, begin_s: int, end_s: int, amount: int) -> None:
        """Add an amount for an interval, clipped to the buckets."""
        bounds = self._bounds
        # This runs thousands of times: comparing takes a fraction of the time of min() and max().
        if begin_s < self._begin_s:
            begin_s = self._begin_s
        if end_s > self._end_s:
            end_s = self._end_s
        if not amount or begin_s >= end_s:
            return
        first = bisect_right(bounds, begin_s)
        following_s = bounds[first]
        part = self._part
        if end_s <= following_s:
            part[first - 1] += amount * (end_s - begin_s)
            return
        last = bisect_left(bounds, end_s, first) - 1
        part[first - 1] += amount * (following_s - begin_s)
        part[last] += amount * (end_s - bounds[last])
        self._full[first] += amount
        self._full[last] -= amount

    def add_seconds(self, at_s: int, seconds: int) -> None:
        """Add an amount times seconds to the bucket that contains a time."""
        self._part[bisect_right(self._bounds, at_s) - 1] += seconds

    def compute_sums(self) -> list[int]:
        """Return the sum of each bucket."""
        running = accumulate(self._full)
        return [
            part + amount * (until - begin)
            for part, amount, (begin, until) in zip(
                self._part, running, pairwise(self._bounds), strict=False
            )
        ]


_US: Final = 1_000_000
_MAINT: Final = "MAINT"
"""Flag of a maintenance reservation."""
_MAINTAINED: Final = "MAINTENANCE"
"""State flag of a node inside an active maintenance reservation."""
_IGNORES: Final = "IGNORE_JOBS"
"""Flag of a reservation that was created over running jobs."""

_Kind = Literal["", "down", "planned_down", "maintained"]

Span = tuple[int, int]
"""Begin and end, seconds since the epoch."""

ReservationNodes = tuple[ReservationSpan, Sequence[NodeSpan]]
"""An active reservation and its nodes' spans, which may begin before it or end after it."""


class ResourceParts(msgspec.Struct):
    """Resource seconds of one kind (CPU or GPU) by use, for one bucket or the sum of several."""

    allocated: int = 0
    down: int = 0
    planned_down: int = 0
    planned: int = 0
    idle: int = 0
    reported: int = 0

    def add(self, other: "ResourceParts") -> None:
        """Add the amounts of another instance to this one."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ResourceCounter:
    """Sums of one kind of resource, by use, for each bucket.

    Args:
        bounds_s: Start of each bucket and end of the last, seconds since the epoch.
    """

    def __init__(self, bounds_s: Sequence[int]) -> None:
        self.allocated, self.down, self.planned_down, self.planned, self.reported = (
            BucketSums(bounds_s) for _ in range(5)
        )

    def compute_parts(self) -> list[ResourceParts]:
        """Return the capped amounts of each bucket."""
        return [
            _cap_parts(
                ResourceParts(
                    allocated=sums[0],
                    down=sums[1],
                    planned_down=sums[2],
                    planned=sums[3],
                    reported=sums[4],
                )
            )
            for sums in zip(
                *(
                    bucket_sums.compute_sums()
                    for bucket_sums in (self.allocated, self.down, self.planned_down)
                ),
                *(self.planned.compute_sums(), self.reported.compute_sums()),
                strict=True,
            )
        ]


def _cap_parts(parts: ResourceParts) -> ResourceParts:
    """Cap the parts so that they add up to the reported total, as slurmdbd does."""
    total = parts.reported
    if not total:
        # Capacity is unknown: only what jobs had allocated is known.
        return ResourceParts(allocated=parts.allocated)
    parts.allocated = min(parts.allocated, total)
    parts.down = max(0, min(parts.down, total - parts.allocated))
    remaining = total - parts.allocated - parts.down
    parts.planned_down = max(0, min(parts.planned_down, remaining))
    remaining -= parts.planned_down
    parts.planned = max(0, min(parts.planned, remaining))
    parts.idle = remaining - parts.planned
    return parts


class Capacity:
    """Counter of how the CPUs and GPUs of one cluster were used.

    Args:
        bounds_s: Bounds of the buckets, at least one per hour; seconds since the epoch.
        nodes: Groups of nodes that entered and left a state at the same times.
        reserved: Active reservations, each with the spans of its nodes.
    """

    def __init__(
        self,
        bounds_s: Sequence[int],
        nodes: Iterable[NodeGroupSpan],
        reserved: Iterable[ReservationNodes],
    ) -> None:
        self.cpus, self.gpus = ResourceCounter(bounds_s), ResourceCounter(bounds_s)
        self._allocate, self._plan = self.cpus.allocated.add, self.cpus.planned.add
        self._end_s = bounds_s[-1]
        self._reserved: dict[str, list[Span]] = {}
        for reservation, spans in reserved:
            self._add_reservation(reservation, spans)
        for group in nodes:
            self._add_nodes(group)

    def _to_seconds(self, from_us: int, until_us: int) -> Span:
        return from_us // _US, self._end_s if until_us >= OPEN_US else until_us // _US

    def _add_nodes(self, group: NodeGroupSpan) -> None:
        """Count a group of nodes as reported, and as down or planned down by its state."""
        begin, end = self._to_seconds(group.from_us, group.until_us)
        kind = _classify_node_state(group.state)
        for counter, amount in ((self.cpus, group.cpus), (self.gpus, group.gpus)):
            if not amount:
                continue
            counter.reported.add(begin, end, amount)
            if kind == "planned_down":
                counter.planned_down.add(begin, end, amount)
            elif kind == "down":
                counter.down.add(begin, end, amount)

    def _add_reservation(self, reservation: ReservationSpan, spans: Iterable[NodeSpan]) -> None:
        """Count the nodes of a reservation as allocated, or as planned down for maintenance."""
        flags = reservation.flags.split(",")
        is_maintenance, is_counted = _MAINT in flags, _IGNORES not in flags
        begin, end = self._to_seconds(reservation.from_us, reservation.until_us)
        if is_counted:
            self._reserved.setdefault(reservation.name, []).append((begin, end))
        for span in spans:
            since, until = self._to_seconds(span.from_us, span.until_us)
            since, until = max(since, begin), min(until, end)
            if since >= until or span.state == REMOVED:
                continue
            if is_maintenance:
                self._add_maintenance(span, since, until, is_counted=is_counted)
            elif is_counted and _classify_node_state(span.state) not in ("down", "planned_down"):
                self.cpus.allocated.add(since, until, span.cpus)
                self.gpus.allocated.add(since, until, span.gpus)

    def _add_maintenance(self, span: NodeSpan, begin: int, end: int, *, is_counted: bool) -> None:
        """Count a node in a maintenance reservation as planned down; move its down time there too.

        If the reservation ignores jobs (IGNORE_JOBS), running jobs cannot be told apart, so only
        the nodes that are down are counted.
        """
        kind = _classify_node_state(span.state)
        for counter, amount in ((self.cpus, span.cpus), (self.gpus, span.gpus)):
            if kind == "down":
                counter.down.add(begin, end, -amount)
                counter.planned_down.add(begin, end, amount)
            elif is_counted and kind != "planned_down":
                counter.planned_down.add(begin, end, amount)

    def add_run(self, run: RunPieces, periods: Periods) -> None:
        """Count the resources of a run, and the CPUs it waited for while eligible.

        Args:
            run: The run.
            periods: Distributes suspended time, whose exact moments are unknown.
        """
        for piece in run:
            start_us, end_us = piece.start_us, piece.end_us
            end = end_us // _US if end_us else self._end_s
            # A job that never started waited until it ended.
            begin = start_us // _US if start_us else end
            if piece.reservation in self._reserved and self._is_reserved(piece, begin, end):
                continue
            if piece is run[0] and piece.eligible_us:
                self._plan(piece.eligible_us // _US, begin, _count_planned_cpus(piece))
            if begin < end:
                spans = (
                    ((begin, end - begin),) if not piece.suspended_s else periods.iter_spans(piece)
                )
                gpus = piece.gpus
                for since, seconds in spans:
                    self._allocate(since, since + seconds, piece.cpus)
                    if gpus:
                        self.gpus.allocated.add(since, since + seconds, gpus)

    def add_sums(self, rows: Iterable[CapacityRow]) -> None:
        """Add sums by quarter of an hour, see :class:`steward.jobs.capacity_sums.CapacitySums`."""
        counted = (self.cpus.allocated, self.gpus.allocated, self.cpus.planned)
        for begin_s, *amounts in rows:
            for bucket_sums, seconds, change in zip(
                counted, amounts[::2], amounts[1::2], strict=True
            ):
                if seconds:
                    bucket_sums.add_seconds(begin_s, seconds)
                if change:
                    bucket_sums.add(begin_s, self._end_s, change)

    def add_cuts(self, run: RunPieces, cuts: Iterable[int]) -> None:
        """Add what :meth:`add_sums` lacks of a run in the quarters that a bound cuts."""
        piece = run[0]
        end_s = piece.end_us // _US
        begin_s = piece.start_us // _US or end_s
        spans = [
            (self.cpus.allocated, begin_s, end_s, piece.cpus),
            (self.gpus.allocated, begin_s, end_s, piece.gpus),
        ]
        if piece.eligible_us:
            planned_cpus = _count_planned_cpus(piece)
            spans.append((self.cpus.planned, piece.eligible_us // _US, begin_s, planned_cpus))
        for cut_s in cuts:
            quarter = range(cut_s, cut_s + QUARTER_S)
            for bucket_sums, since_s, until_s, amount in spans:
                # Others had it all of the quarter, or nothing: that is a change before it.
                if since_s in quarter or until_s in quarter:
                    clipped = max(since_s, quarter.start), min(until_s, quarter.stop)
                    bucket_sums.add(*clipped, amount)

    def _is_reserved(self, piece: RunPiece, begin: int, end: int) -> bool:
        """Return whether the piece ran within a reservation that is already counted."""
        return any(
            since < max(end, begin + 1) and begin < until
            for since, until in self._reserved[piece.reservation]
        )


def _count_planned_cpus(piece: RunPiece) -> int:
    """Return the number of CPUs that a run waited for."""
    tasks = 1 if piece.start_us else max(1, count_tasks(piece.array_task))
    return piece.requested_cpus * tasks


@lru_cache(maxsize=4096)
def _classify_node_state(state: str) -> _Kind:
    """Return what a node's time counts as; "" while it is in service."""
    if _MAINTAINED in parse_node_state(state)[1]:
        return "maintained"  # its reservation is counted
    if is_planned_down(state):
        return "planned_down"
    return "down" if is_node_down(state) else ""


def expand_reservation_nodes(reservation: ReservationSpan) -> list[str]:
    """Return the node names of a reservation; none if it reserves cores or licenses only."""
    try:
        return expand_nodelist(reservation.nodes)
    except NodeListError:
        return []  # a reservation of cores or licenses
