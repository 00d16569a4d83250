"""What a cluster's CPUs and GPUs did, counted as slurmdbd counts for ``sreport cluster``.

Down is a node that is DOWN, or drained with no job left. A reservation's nodes are
allocated, or planned to be down where it is for maintenance, whatever runs there;
but for what is down in it. CPUs that idle while jobs wait that may begin are
*planned*. All this is weighed against each other hour by hour: what is more than
there is is cut off, which is why the hours cannot be put together before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, Literal

import msgspec

from steward.reports.history.spans import (
    OPEN_US,
    REMOVED,
    NodesAlike,
    NodeSpan,
    ReservationSpan,
    is_down,
    is_put_away,
)
from steward.reports.runs import Periods, Piece, Run
from steward.slurm.arrays import count_tasks
from steward.slurm.node_states import parse_node_state
from steward.slurm.nodelists import NodeListError, expand

HOUR_S = 3600


def hours(bounds_s: Iterable[int], since_s: int) -> list[int]:
    """The bounds with every full hour since some time, in order.

    Args:
        bounds_s: Seconds since the epoch.
        since_s: Where the full hours begin.
    """
    bounds = sorted(set(bounds_s))
    first = -(-max(since_s, bounds[0]) // HOUR_S) * HOUR_S
    return sorted({*bounds, *range(first, bounds[-1], HOUR_S)})


class Hours:
    """Sums of amounts times seconds, one for each bucket of time.

    To add takes as long for a month as for a minute.

    Args:
        bounds_s: Where each bucket begins, and where the last ends; seconds since the epoch.
    """

    def __init__(self, bounds_s: Sequence[int]) -> None:
        self._bounds = bounds_s
        self._begin_s, self._end_s = bounds_s[0], bounds_s[-1]
        self._full = [0] * len(bounds_s)
        self._part = [0] * (len(bounds_s) - 1)

    def add(self, begin_s: int, end_s: int, amount: int) -> None:
        """Add an amount from one time to another, as far as there are buckets."""
        bounds = self._bounds
        # Thousands are added: to compare takes a fraction of the time that min and max do.
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

    def sums(self) -> list[int]:
        """The sum of each bucket."""
        whole = accumulate(self._full)
        return [
            part + amount * (until - begin)
            for part, amount, (begin, until) in zip(
                self._part, whole, pairwise(self._bounds), strict=False
            )
        ]


_US: Final = 1_000_000
_MAINT: Final = "MAINT"
"""A reservation's flag; nodes have another word for it."""
_MAINTAINED: Final = "MAINTENANCE"
_IGNORES: Final = "IGNORE_JOBS"

_Kind = Literal["", "down", "planned_down", "maintained"]

Span = tuple[int, int]
"""From when to when, seconds since the epoch."""

Reserved = tuple[ReservationSpan, Sequence[NodeSpan]]
"""A reservation while it was active, and its nodes' spans, also those that begin and end beside."""


class Parts(msgspec.Struct):
    """What became of one kind of resource in one bucket, or in several."""

    allocated: int = 0
    down: int = 0
    planned_down: int = 0
    planned: int = 0
    idle: int = 0
    reported: int = 0

    def add(self, other: "Parts") -> None:
        """Add another's."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Ledger:
    """What is counted of one kind of resource.

    Args:
        bounds_s: The buckets.
    """

    def __init__(self, bounds_s: Sequence[int]) -> None:
        self.allocated, self.down, self.planned_down, self.planned, self.reported = (
            Hours(bounds_s) for _ in range(5)
        )

    def parts(self) -> list[Parts]:
        """What became of it in each bucket."""
        return [
            _weighed(
                Parts(
                    allocated=one[0],
                    down=one[1],
                    planned_down=one[2],
                    planned=one[3],
                    reported=one[4],
                )
            )
            for one in zip(
                *(of.sums() for of in (self.allocated, self.down, self.planned_down)),
                *(self.planned.sums(), self.reported.sums()),
                strict=True,
            )
        ]


def _weighed(parts: Parts) -> Parts:
    """The parts so that they add up to what is reported, as slurmdbd has it."""
    total = parts.reported
    if not total:
        # Nothing is known of capacity: only what jobs had is.
        return Parts(allocated=parts.allocated)
    parts.allocated = min(parts.allocated, total)
    parts.down = max(0, min(parts.down, total - parts.allocated))
    left = total - parts.allocated - parts.down
    parts.planned_down = max(0, min(parts.planned_down, left))
    left -= parts.planned_down
    parts.planned = max(0, min(parts.planned, left))
    parts.idle = left - parts.planned
    return parts


class Capacity:
    """Counts what the CPUs and GPUs of one cluster did.

    Args:
        bounds_s: The buckets: every hour at the least; seconds since the epoch.
        nodes: Its nodes, those together that were in a state together.
        reserved: Its reservations that were active, with the spans of their nodes.
    """

    def __init__(
        self,
        bounds_s: Sequence[int],
        nodes: Iterable[NodesAlike],
        reserved: Iterable[Reserved],
    ) -> None:
        self.cpus, self.gpus = Ledger(bounds_s), Ledger(bounds_s)
        self._allocate, self._plan = self.cpus.allocated.add, self.cpus.planned.add
        self._end_s = bounds_s[-1]
        self._reserved: dict[str, list[Span]] = {}
        for reservation, spans in reserved:
            self._add_reservation(reservation, spans)
        for alike in nodes:
            self._add_nodes(alike)

    def _seconds(self, from_us: int, until_us: int) -> Span:
        return from_us // _US, self._end_s if until_us >= OPEN_US else until_us // _US

    def _add_nodes(self, alike: NodesAlike) -> None:
        begin, end = self._seconds(alike.from_us, alike.until_us)
        kind = _kind(alike.state)
        for ledger, amount in ((self.cpus, alike.cpus), (self.gpus, alike.gpus)):
            if not amount:
                continue
            ledger.reported.add(begin, end, amount)
            if kind == "planned_down":
                ledger.planned_down.add(begin, end, amount)
            elif kind == "down":
                ledger.down.add(begin, end, amount)

    def _add_reservation(self, reservation: ReservationSpan, spans: Iterable[NodeSpan]) -> None:
        flags = reservation.flags.split(",")
        is_maintenance, is_counted = _MAINT in flags, _IGNORES not in flags
        begin, end = self._seconds(reservation.from_us, reservation.until_us)
        if is_counted:
            self._reserved.setdefault(reservation.name, []).append((begin, end))
        for span in spans:
            since, until = self._seconds(span.from_us, span.until_us)
            since, until = max(since, begin), min(until, end)
            if since >= until or span.state == REMOVED:
                continue
            if is_maintenance:
                self._maintain(span, since, until, is_counted=is_counted)
            elif is_counted and _kind(span.state) not in ("down", "planned_down"):
                self.cpus.allocated.add(since, until, span.cpus)
                self.gpus.allocated.add(since, until, span.gpus)

    def _maintain(self, span: NodeSpan, begin: int, end: int, *, is_counted: bool) -> None:
        """Count a node that is maintained as down by plan, and what is down of it as nothing else.

        Where the reservation ignores jobs nobody can tell what runs in it: then only what is
        down is counted.
        """
        kind = _kind(span.state)
        for ledger, amount in ((self.cpus, span.cpus), (self.gpus, span.gpus)):
            if kind == "down":
                ledger.down.add(begin, end, -amount)
                ledger.planned_down.add(begin, end, amount)
            elif is_counted and kind != "planned_down":
                ledger.planned_down.add(begin, end, amount)

    def add(self, run: Run, periods: Periods) -> None:
        """Count what a run had, and how many CPUs it waited for.

        Args:
            run: The run.
            periods: Where suspended time is taken off: when it was is not known.
        """
        for piece in run:
            start_us, end_us = piece.start_us, piece.end_us
            end = end_us // _US if end_us else self._end_s
            # What never began waited until it ended.
            begin = start_us // _US if start_us else end
            if piece.reservation in self._reserved and self._is_reserved(piece, begin, end):
                continue
            if piece is run[0] and piece.eligible_us:
                tasks = 1 if start_us else max(1, count_tasks(piece.array_task))
                self._plan(piece.eligible_us // _US, begin, piece.requested_cpus * tasks)
            if begin < end:
                spans = ((begin, end - begin),) if not piece.suspended_s else periods.spans(piece)
                gpus = piece.gpus
                for since, seconds in spans:
                    self._allocate(since, since + seconds, piece.cpus)
                    if gpus:
                        self.gpus.allocated.add(since, since + seconds, gpus)

    def _is_reserved(self, piece: Piece, begin: int, end: int) -> bool:
        """Whether its reservation is counted, which it is a part of."""
        return any(
            since < max(end, begin + 1) and begin < until
            for since, until in self._reserved[piece.reservation]
        )


@lru_cache(maxsize=4096)
def _kind(state: str) -> _Kind:
    """What a node's time counts as; "" while it works."""
    if _MAINTAINED in parse_node_state(state)[1]:
        return "maintained"  # its reservation is counted
    if is_put_away(state):
        return "planned_down"
    return "down" if is_down(state) else ""


def names_of(reservation: ReservationSpan) -> list[str]:
    """The nodes of a reservation."""
    try:
        return expand(reservation.nodes)
    except NodeListError:
        return []  # of cores, or of licenses alone
