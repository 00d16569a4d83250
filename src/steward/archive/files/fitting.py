"""What goes so that what is kept of somebody fits a limit: enough, never more than needed.

1. A script that together with its environment is larger than the limit goes itself:
   it could never be kept, and nothing else must make room for it.
2. Of the rest goes what was used longest ago, until it fits. Identical files that are
   stored once are as old as the last script that they are of, since nothing is free
   before that one goes; with them go all the scripts that they are of.
3. Where a limit is for several users together, whoever has the most at the time gives.

What was ordered to go before counts as gone. Rows are read twice, piece by piece:
first to find what is to go, then to name it; so memory is needed for numbers alone.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from steward.archive.files.counting import content
from steward.archive.files.records import MOVED, Records

_CHUNK = 400
LAST_NS = 2**63 - 1

Position = tuple[int, str, str]
"""Time in the spool in ns, key and cluster: where a script stands among those of its holder."""


class Kept(msgspec.Struct, frozen=True):
    """A script that may have to go; ``ordered_s`` is when it was ordered to, None for never."""

    mtime_ns: int
    cluster: str
    key: str
    directory: int
    holder: int
    state: int
    shared: int
    script_sha: bytes | None
    script_length: int
    env_sha: bytes | None
    env_length: int
    ordered_s: int | None

    @property
    def position(self) -> Position:
        """Where it stands among those of its holder."""
        return self.mtime_ns, self.key, self.cluster

    @property
    def length(self) -> int:
        """Bytes of script and environment."""
        return self.script_length + self.env_length

    def contents(self) -> list[tuple[int, int]]:
        """Number and length of each of its files that may be one with others."""
        files = (
            (self.script_sha, self.script_length, False),
            (self.env_sha, self.env_length, True),
        )
        return [
            (content(self.holder, sha, environment=environment, moved=self.state == MOVED), length)
            for sha, length, environment in files
            if sha is not None
        ]


COLUMNS = ", ".join([f"script.{name}" for name in Kept.__struct_fields__[:-1]] + ["ordered.at_s"])
_OF_HOLDER = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script INDEXED BY script_holder LEFT JOIN ordered USING (cluster, key) "
    "WHERE holder = ? AND mtime_ns < ? AND (mtime_ns, script.key, script.cluster) > (?, ?, ?) "
    "ORDER BY mtime_ns, script.key, script.cluster LIMIT ?"
)
_GOING = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script INDEXED BY script_holder LEFT JOIN ordered USING (cluster, key) "
    "WHERE holder = ? AND (at_s > ? OR script_length + env_length > ?)"
)


def oldest(records: Records, holders: Sequence[int], before_ns: int = LAST_NS) -> Iterator[Kept]:
    """What is kept of some holders and older than ``before_ns``, the oldest first."""
    of_each = [_oldest_of(records, holder, before_ns) for holder in holders]
    return heapq.merge(*of_each, key=lambda kept: kept.position)


def _oldest_of(records: Records, holder: int, before_ns: int) -> Iterator[Kept]:
    last: Position = (-1, "", "")
    while True:
        page = records.query(_OF_HOLDER, holder, before_ns, *last, records.page_rows)
        for row in page:
            kept = Kept(*row)
            last = kept.position
            yield kept
        if len(page) < records.page_rows:
            return


class _Step(msgspec.Struct, frozen=True):
    """Where something becomes free if what is as old goes: how many bytes, of which contents."""

    position: Position
    bytes: int
    contents: list[int]


class _Giver:
    """One user of those that a limit is for, and what goes of theirs.

    Args:
        records: The sink's database.
        holders: The user's numbers.
        size: What is kept of them, in bytes.
        most: The limit, in bytes.
        since_s: What was ordered after that, in s since the epoch, is about to go.
    """

    def __init__(
        self, records: Records, holders: Sequence[int], size: int, most: int, since_s: int
    ) -> None:
        self.size = size
        self._records = records
        self._holders = holders
        self._most = most
        self._since_s = since_s
        self._left: dict[int, int] = {}
        self._freed: set[int] = set()
        self._last: Position = (-1, "", "")
        self._steps = self._walk()
        self._next: _Step | None = None
        self._too_large: Position = (-1, "", "")
        self._forget_what_goes()

    def _forget_what_goes(self) -> None:
        """Take off what was ordered already, and what is too large to be kept at all."""
        gone: Counter[int] = Counter()
        lengths: dict[int, int] = {}
        for holder in self._holders:
            for row in self._records.query(_GOING, holder, self._since_s, self._most):
                kept = Kept(*row)
                if kept.length > self._most:
                    self._too_large = max(self._too_large, kept.position)
                if not kept.shared:
                    self.size -= kept.length
                    continue
                for number, length in kept.contents():
                    gone[number] += 1
                    lengths[number] = length
        self._look_up(gone)
        for number, times in gone.items():
            self._left[number] -= times
            if self._left[number] <= 0:
                self.size -= lengths[number]

    def _look_up(self, numbers: Iterable[int]) -> None:
        """How often contents are used."""
        unknown = [number for number in dict.fromkeys(numbers) if number not in self._left]
        for first in range(0, len(unknown), _CHUNK):
            some = unknown[first : first + _CHUNK]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT number, uses FROM content WHERE number IN ({marks})"  # noqa: S608 - question marks alone
            self._left.update(dict.fromkeys(some, 0))
            self._left.update(self._records.query(sql, *some))

    def _goes_anyway(self, kept: Kept) -> bool:
        return kept.length > self._most or (
            kept.ordered_s is not None and kept.ordered_s > self._since_s
        )

    def _walk(self) -> Iterator["_Step"]:
        rows = (
            kept for kept in oldest(self._records, self._holders) if not self._goes_anyway(kept)
        )
        while page := list(itertools.islice(rows, self._records.page_rows)):
            self._look_up(number for kept in page if kept.shared for number, _ in kept.contents())
            for kept in page:
                freed = 0 if kept.shared else kept.length
                numbers: list[int] = []
                for number, length in kept.contents() if kept.shared else ():
                    self._left[number] -= 1
                    # A file of no bytes frees none.
                    if not self._left[number] and length:
                        freed += length
                        numbers.append(number)
                if freed:
                    yield _Step(kept.position, freed, numbers)

    def offer(self) -> Position | None:
        """Up to where is to go what comes next; None where nothing is left."""
        self._next = next(self._steps, None)
        return self._next.position if self._next else None

    def give(self) -> int:
        """Let go what was offered last; how many bytes it frees."""
        assert self._next is not None, "it was offered"
        self._last = self._next.position
        self._freed.update(self._next.contents)
        self.size -= self._next.bytes
        return self._next.bytes

    def chosen(self) -> Iterator[Kept]:
        """All that goes and was not ordered yet, the oldest first."""
        for kept in oldest(self._records, self._holders):
            if kept.position > max(self._last, self._too_large):
                return
            if kept.ordered_s is not None and kept.ordered_s > self._since_s:
                continue
            if kept.length > self._most or self._is_given(kept):
                yield kept

    def _is_given(self, kept: Kept) -> bool:
        if kept.position > self._last:
            return False
        if not kept.shared:
            return kept.length > 0
        return any(number in self._freed for number, _ in kept.contents())


def fitting(
    records: Records, users: Sequence[tuple[Sequence[int], int]], most: int, since_s: int
) -> Iterator[Kept]:
    """What has to go so that what is kept of some users together fits a limit.

    Args:
        records: The sink's database.
        users: The numbers of each one's holders, and what is kept of them in bytes.
        most: The limit, in bytes.
        since_s: What was ordered after that, in s since the epoch, is about to go.
    """
    if sum(size for _, size in users) <= most:
        return
    givers = [_Giver(records, holders, size, most, since_s) for holders, size in users]
    excess = sum(giver.size for giver in givers) - most
    offers: list[tuple[int, Position, int]] = []

    def ask(index: int) -> None:
        position = givers[index].offer() if excess > 0 else None
        if position is not None:
            heapq.heappush(offers, (-givers[index].size, position, index))

    for index in range(len(givers)):
        ask(index)
    while excess > 0 and offers:
        _, _, index = heapq.heappop(offers)
        excess -= givers[index].give()
        ask(index)
    yield from heapq.merge(*(giver.chosen() for giver in givers), key=lambda kept: kept.position)
