"""Runs of jobs as reports count them: read from the books once, and shared out over periods."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from steward.accounting.sacct.sources import Source
from steward.jobs.line_queries import SHOWN_PIECE, SHOWN_RUN, LineFilter
from steward.slurm.tres import parse_tres

_US: Final = 1_000_000
_GPU: Final = "gres/gpu"
_MIB: Final = 1 << 20


class Piece(NamedTuple):
    """A run, or of one that was resized what it had for a while; named after lines' fields."""

    cluster: str
    job_id: int
    submit_us: int
    restarts: int
    piece_us: int
    cpus: int
    requested_cpus: int
    tres_allocated: str
    reservation: str
    array_task: str
    eligible_us: int
    start_us: int
    end_us: int
    suspended_s: int
    account: str
    user: str
    uid: int | None
    partition: str
    state: str
    nodes: int
    time_limit_s: int | None
    user_us: int | None
    system_us: int | None
    cgroup_user_us: int | None
    cgroup_system_us: int | None
    peak_bytes: int | None
    peak_allocated_bytes: int | None

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return gpus_of(self.tres_allocated)

    @property
    def is_run(self) -> bool:
        """Whether it is a run's last size, which has the run's end."""
        return not self.piece_us


_TEXTS: Final = frozenset(
    name for name, kind in Piece.__annotations__.items() if kind is str or kind == "str"
)

ALL: Final = len(Piece._fields)
WITHOUT_USED: Final = Piece._fields.index("user_us")
"""So many fields come before what a run used, of which only waste is told."""
OF_CAPACITY: Final = Piece._fields.index("account")
"""So many say what was taken of a cluster and when, and not by whom."""

_COLUMNS: Final = tuple(
    f"coalesce(\"{name}\", '')" if name in _TEXTS else f'"{name}"' for name in Piece._fields
)
_OF_RUN: Final = slice(1, 5)
"""Where a row says of which run it is: the mark stands before it, the piece behind it."""

Run = Sequence[Piece]
"""The pieces of one run, by when they began."""


def runs(source: Source, wanted: LineFilter, fields: int) -> Iterator[Run]:
    """The runs that were there in a time, each once.

    Args:
        source: The books.
        wanted: Which of them.
        fields: How many of a piece's fields are read; the others are None. To fetch them takes
            longer than to count them.
    """
    pieces: list[Piece] = []
    key: tuple[object, ...] = ()
    make, unread = Piece._make, (None,) * (ALL - fields)
    for batch in source.rows(wanted, _COLUMNS[:fields], steps=False):
        for row in batch:
            if row[0] not in (SHOWN_RUN, SHOWN_PIECE):
                continue
            # Rows lie by cluster, job and run: a run's pieces one behind the other.
            own = row[_OF_RUN]
            if own != key:
                if pieces:
                    yield _in_order(pieces)
                pieces, key = [], own
            pieces.append(make(row[1:] + unread))
    if pieces:
        yield _in_order(pieces)


def _in_order(pieces: list[Piece]) -> Run:
    if len(pieces) > 1:
        pieces.sort(key=lambda piece: (piece.start_us or piece.end_us, piece.piece_us))
    return pieces


class Periods:
    """Finds which periods a time falls into.

    Args:
        bounds_us: Where each begins, and where the last ends; µs since the epoch.
    """

    def __init__(self, bounds_us: Sequence[int]) -> None:
        self._bounds = bounds_us
        self._since_us, self._until_us = bounds_us[0], bounds_us[-1]
        self.count = len(bounds_us) - 1

    def of(self, at_us: int) -> int | None:
        """The period that a moment is in; None for none."""
        number = bisect_right(self._bounds, at_us) - 1
        return number if 0 <= number < self.count else None

    def of_end(self, run: Run) -> int | None:
        """The period that a run ended in which had begun; None for none.

        At the end of a period it is that one, in which it ran, and not the next.
        """
        last = run[-1]
        if not (last.is_run and last.end_us and run[0].start_us):
            return None
        return self.of(max(last.start_us, last.end_us - 1))

    def tally(self, run: Run, counts: list[int]) -> None:
        """Add one to the count of each period that a run ran in."""
        if len(run) == 1:
            for number, _ in self.shares(run[0]):
                counts[number] += 1
            return
        for number in {number for piece in run for number, _ in self.shares(piece)}:
            counts[number] += 1

    def shares(self, piece: Piece) -> Iterable[tuple[int, int]]:
        """The periods that a piece ran in, and for how many seconds, without suspension.

        Slurm tells whole seconds: what was over within one ran for none, in one period. When it
        was suspended is not known, only how long: it is taken off each period in proportion.
        """
        start_us, end_us = piece.start_us, piece.end_us
        if not start_us or start_us >= self._until_us:
            return ()
        if end_us and end_us <= start_us:
            number = self.of(start_us)
            return () if number is None else ((number, 0),)
        if not end_us or end_us > self._until_us:
            end_us = self._until_us
        begin_us = max(start_us, self._since_us)
        first = bisect_right(self._bounds, begin_us) - 1
        if not piece.suspended_s and end_us <= self._bounds[first + 1]:
            return ((first, (end_us - begin_us) // _US),) if begin_us < end_us else ()
        return [(number, seconds) for number, _, seconds in self._parts(piece, first, end_us)]

    def spans(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """Yield where a piece began in each period, and for how long it ran, as in shares.

        Both in seconds, the first since the epoch; suspended time is taken off the ends.
        """
        if not piece.start_us or piece.start_us >= self._until_us:
            return
        end_us = min(piece.end_us or self._until_us, self._until_us)
        first = bisect_right(self._bounds, max(piece.start_us, self._since_us)) - 1
        for _, begin_us, seconds in self._parts(piece, first, end_us):
            yield begin_us // _US, seconds

    def _parts(self, piece: Piece, first: int, end_us: int) -> Iterator[tuple[int, int, int]]:
        """Yield each period's number, where the piece began in it, and for how long it ran."""
        bounds = self._bounds
        lasted_us = max(1, (piece.end_us or end_us) - piece.start_us)
        for number in range(first, self.count):
            begin = max(piece.start_us, bounds[number])
            until = min(end_us, bounds[number + 1])
            if begin >= end_us:
                return
            if begin < until:
                off_us = min(piece.suspended_s * _US, lasted_us) * (until - begin) // lasted_us
                yield number, begin, (until - begin - off_us) // _US


@lru_cache(maxsize=8192)
def gpus_of(text: str) -> int:
    """How many GPUs TRES hold; typed ones where those alone are counted."""
    if _GPU not in text:
        return 0
    found = parse_tres(text)
    typed = sum(amount for name, amount in found.items() if name.startswith(f"{_GPU}:"))
    return found.get(_GPU, typed)


@lru_cache(maxsize=8192)
def memory_of(text: str) -> int:
    """How much memory TRES hold, in bytes; 0 where they say nothing of it."""
    return parse_tres(text).get("mem", 0) * _MIB
