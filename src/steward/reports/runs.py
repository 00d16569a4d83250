"""Job runs for reports: read from the job records, and divided among reporting periods.

:func:`read_runs` yields each run once, as :data:`RunPieces`: a sequence of :class:`RunPiece`, more
than one if the job was resized. :class:`Periods` computes how many seconds of a piece fall into
each period. Times ending in ``_us`` are µs since the
epoch; 0 means unknown or not yet.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from steward.jobs.line_queries import SHOWN_PIECE, SHOWN_RUN, LineFilter
from steward.jobs.line_sources import LineSource
from steward.jobs.lines import TEXT_FIELDS
from steward.slurm.tres import count_gpus

_US: Final = 1_000_000


class RunPiece(NamedTuple):
    """A run, or the part of a resized run that had one size; fields are named as in job lines."""

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
        """Return the number of allocated GPUs."""
        return count_gpus(self.tres_allocated)

    @property
    def is_run(self) -> bool:
        """Return whether this is a run's last size, which carries the run's end."""
        return not self.piece_us


ALL_FIELDS: Final = len(RunPiece._fields)
FIELDS_WITHOUT_USE: Final = RunPiece._fields.index("user_us")
"""Number of leading fields without a run's measured use, which only the waste report needs."""
CAPACITY_FIELDS: Final = RunPiece._fields.index("account")
"""Number of leading fields of what a run occupied and when, without account, user and partition."""

_COLUMNS: Final = tuple(
    f"coalesce(\"{name}\", '')" if name in TEXT_FIELDS else f'"{name}"' for name in RunPiece._fields
)
_RUN_KEY: Final = slice(1, 5)
"""Columns of a row that identify its run: after the row mark, before the piece number."""

RunPieces = Sequence[RunPiece]
"""The pieces of one run, in order of start."""


def read_runs(source: LineSource, line_filter: LineFilter, fields: int) -> Iterator[RunPieces]:
    """Yield the runs that match a filter, each once.

    Args:
        source: The job records.
        line_filter: Filter for the runs.
        fields: Number of leading fields to read; the others are None. Reading a field takes longer
            than counting with it.
    """
    pieces: list[RunPiece] = []
    run_key: tuple[object, ...] = ()
    make_piece, unread = RunPiece._make, (None,) * (ALL_FIELDS - fields)
    for batch in source.rows(line_filter, _COLUMNS[:fields], steps=False):
        for row in batch:
            if row[0] not in (SHOWN_RUN, SHOWN_PIECE):
                continue
            # Rows are ordered by cluster, job and run: the pieces of a run follow each other.
            row_key = row[_RUN_KEY]
            if row_key != run_key:
                if pieces:
                    yield _sort_pieces(pieces)
                pieces, run_key = [], row_key
            pieces.append(make_piece(row[1:] + unread))
    if pieces:
        yield _sort_pieces(pieces)


def _sort_pieces(pieces: list[RunPiece]) -> RunPieces:
    if len(pieces) > 1:
        pieces.sort(key=lambda piece: (piece.start_us or piece.end_us, piece.piece_us))
    return pieces


class Periods:
    """Assignment of times to reporting periods.

    Args:
        bounds_us: Start of each period and end of the last, µs since the epoch.
        parts: For each of these periods, which may be parts of a report's: the index of the
            report's period, and whether runs count in it, as sums may cover it. Default: all.
    """

    def __init__(
        self, bounds_us: Sequence[int], parts: Sequence[tuple[int, bool]] | None = None
    ) -> None:
        self._bounds = bounds_us
        self._since_us, self._until_us = bounds_us[0], bounds_us[-1]
        self.count = len(bounds_us) - 1
        self.parts = parts or [(number, True) for number in range(self.count)]

    def find_period(self, at_us: int) -> int | None:
        """Return the index of the period that contains a moment; None if outside."""
        index = bisect_right(self._bounds, at_us) - 1
        return index if 0 <= index < self.count else None

    def find_end_period(self, run: RunPieces) -> int | None:
        """Return the index of the period in which a started run ended; None if there is none.

        A run that ends exactly at the end of a period belongs to that period, in which it ran, not
        to the next.
        """
        last = run[-1]
        if not (last.is_run and last.end_us and run[0].start_us):
            return None
        return self.find_period(max(last.start_us, last.end_us - 1))

    def count_run(self, run: RunPieces, counts: list[int]) -> None:
        """Increment the count of each period in which the run was active."""
        if len(run) == 1:
            for index, _ in self.split_seconds(run[0]):
                counts[index] += 1
            return
        for index in {index for piece in run for index, _ in self.split_seconds(piece)}:
            counts[index] += 1

    def split_seconds(self, piece: RunPiece) -> Iterable[tuple[int, int]]:
        """Return the periods in which a piece ran, with its seconds in each, less suspended time.

        Slurm reports whole seconds: a piece that ended within one second ran for 0 s in one period.
        The moments of a suspension are unknown, only its length: each period loses a proportional
        share.
        """
        start_us, end_us = piece.start_us, piece.end_us
        if not start_us or start_us >= self._until_us:
            return ()
        if end_us and end_us <= start_us:
            index = self.find_period(start_us)
            return () if index is None else ((index, 0),)
        if not end_us or end_us > self._until_us:
            end_us = self._until_us
        begin_us = max(start_us, self._since_us)
        first = bisect_right(self._bounds, begin_us) - 1
        if not piece.suspended_s and end_us <= self._bounds[first + 1]:
            return ((first, (end_us - begin_us) // _US),) if begin_us < end_us else ()
        return [(index, seconds) for index, _, seconds in self._split_piece(piece, first, end_us)]

    def iter_spans(self, piece: RunPiece) -> Iterator[tuple[int, int]]:
        """Yield when a piece began in each period (s since the epoch) and how many seconds it ran.

        Suspended time is taken off the ends, as in :meth:`split_seconds`.
        """
        if not piece.start_us or piece.start_us >= self._until_us:
            return
        end_us = min(piece.end_us or self._until_us, self._until_us)
        first = bisect_right(self._bounds, max(piece.start_us, self._since_us)) - 1
        for _, begin_us, seconds in self._split_piece(piece, first, end_us):
            yield begin_us // _US, seconds

    def _split_piece(
        self, piece: RunPiece, first: int, end_us: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield for each period its number, when the piece began in it (µs), and its seconds."""
        bounds = self._bounds
        lasted_us = max(1, (piece.end_us or end_us) - piece.start_us)
        for index in range(first, self.count):
            begin = max(piece.start_us, bounds[index])
            until = min(end_us, bounds[index + 1])
            if begin >= end_us:
                return
            if begin < until:
                off_us = min(piece.suspended_s * _US, lasted_us) * (until - begin) // lasted_us
                yield index, begin, (until - begin - off_us) // _US
