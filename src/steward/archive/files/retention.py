"""Retention and quotas of a files sink: orders the purge of old scripts, or of excess ones.

A holder is a user with an account on a cluster, for whom bytes are counted.
:func:`select_evictions` selects scripts for eviction: largest users first, oldest scripts first.
:class:`RetentionWorker` appends archive.purge events for this sink only, which the sink and its
mover apply as any other purge; other sinks and the catalog keep the scripts. Orders are stored in
the sink's database: for an hour they are not repeated, and their scripts count as gone when sizes
are compared.
"""

import hashlib
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from steward.archive.files.index import (
    HOLDER_INDEX,
    MOVED,
    NO_HOLDER_INDEX,
    FilesRecords,
    compute_content_number,
)
from steward.archive.settings import FilesSinkSettings, LimitSettings
from steward.core.consumers import Append
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, Event

_CHUNK = 400
LAST_NS = 2**63 - 1

HolderPosition = tuple[int, str, str]
"""Spool time in ns, key and cluster: sort position of a script within its holder."""


class RetainedScript(msgspec.Struct, frozen=True):
    """Script that may have to go; ``ordered_s`` is the time of its purge order, None for none."""

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
    def position(self) -> HolderPosition:
        """Return the sort position within its holder."""
        return self.mtime_ns, self.key, self.cluster

    @property
    def length(self) -> int:
        """Return the size of script and environment in bytes."""
        return self.script_length + self.env_length

    def contents(self) -> list[tuple[int, int]]:
        """Return content number and length of each file that may be shared with other scripts."""
        files = (
            (self.script_sha, self.script_length, False),
            (self.env_sha, self.env_length, True),
        )
        return [
            (
                compute_content_number(
                    self.holder, sha, environment=environment, moved=self.state == MOVED
                ),
                length,
            )
            for sha, length, environment in files
            if sha is not None
        ]


COLUMNS = ", ".join(
    [f"script.{name}" for name in RetainedScript.__struct_fields__[:-1]] + ["ordered.at_s"]
)
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


def iterate_oldest(
    records: FilesRecords, holders: Sequence[int], before_ns: int = LAST_NS
) -> Iterator[RetainedScript]:
    """Yield the scripts of some holders that are older than ``before_ns``, oldest first."""
    of_each = [_iterate_oldest_of_holder(records, holder, before_ns) for holder in holders]
    return heapq.merge(*of_each, key=lambda kept: kept.position)


def _iterate_oldest_of_holder(
    records: FilesRecords, holder: int, before_ns: int
) -> Iterator[RetainedScript]:
    """Yield the scripts of one holder, oldest first, page by page."""
    last: HolderPosition = (-1, "", "")
    while True:
        page = records.query(_OF_HOLDER, holder, before_ns, *last, records.page_rows)
        for row in page:
            kept = RetainedScript(*row)
            last = kept.position
            yield kept
        if len(page) < records.page_rows:
            return


class _EvictionStep(msgspec.Struct, frozen=True):
    """Eviction step: the bytes and contents freed if all scripts up to a position are removed."""

    position: HolderPosition
    bytes: int
    contents: list[int]


class _EvictionCandidate:
    """Eviction candidate: one user under a limit, with the scripts to remove.

    Args:
        records: The sink's database.
        holders: Numbers of the user's holders.
        size: Size of the user's scripts, in bytes.
        most: The limit, in bytes.
        since_s: Purges ordered after this time, in s since the epoch, are pending.
    """

    def __init__(
        self, records: FilesRecords, holders: Sequence[int], size: int, most: int, since_s: int
    ) -> None:
        self.size = size
        self._records = records
        self._holders = holders
        self._most = most
        self._since_s = since_s
        self._left: dict[int, int] = {}
        self._freed: set[int] = set()
        self._last: HolderPosition = (-1, "", "")
        self._steps = self._walk()
        self._next: _EvictionStep | None = None
        self._too_large: HolderPosition = (-1, "", "")
        self._forget_what_goes()

    def _forget_what_goes(self) -> None:
        """Subtract scripts with a pending purge, and scripts larger than the limit."""
        gone: Counter[int] = Counter()
        lengths: dict[int, int] = {}
        for holder in self._holders:
            for row in self._records.query(_GOING, holder, self._since_s, self._most):
                kept = RetainedScript(*row)
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
        """Load how many scripts use each content."""
        unknown = [number for number in dict.fromkeys(numbers) if number not in self._left]
        for first in range(0, len(unknown), _CHUNK):
            some = unknown[first : first + _CHUNK]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT number, uses FROM content WHERE number IN ({marks})"  # noqa: S608 - question marks alone
            self._left.update(dict.fromkeys(some, 0))
            self._left.update(self._records.query(sql, *some))

    def _goes_anyway(self, kept: RetainedScript) -> bool:
        """Return whether a script is too large, or has a pending purge."""
        return kept.length > self._most or (
            kept.ordered_s is not None and kept.ordered_s > self._since_s
        )

    def _walk(self) -> Iterator["_EvictionStep"]:
        """Yield the steps at which removal in order of age frees bytes."""
        rows = (
            kept
            for kept in iterate_oldest(self._records, self._holders)
            if not self._goes_anyway(kept)
        )
        while page := list(itertools.islice(rows, self._records.page_rows)):
            self._look_up(number for kept in page if kept.shared for number, _ in kept.contents())
            for kept in page:
                freed = 0 if kept.shared else kept.length
                numbers: list[int] = []
                for number, length in kept.contents() if kept.shared else ():
                    self._left[number] -= 1
                    # An empty file frees no bytes.
                    if not self._left[number] and length:
                        freed += length
                        numbers.append(number)
                if freed:
                    yield _EvictionStep(kept.position, freed, numbers)

    def offer(self) -> HolderPosition | None:
        """Return the position up to which the next step removes scripts; None if none is left."""
        self._next = next(self._steps, None)
        return self._next.position if self._next else None

    def give(self) -> int:
        """Accept the last offer; return the number of bytes it frees."""
        assert self._next is not None, "it was offered"
        self._last = self._next.position
        self._freed.update(self._next.contents)
        self.size -= self._next.bytes
        return self._next.bytes

    def chosen(self) -> Iterator[RetainedScript]:
        """Yield the scripts to remove without a pending purge, oldest first."""
        for kept in iterate_oldest(self._records, self._holders):
            if kept.position > max(self._last, self._too_large):
                return
            if kept.ordered_s is not None and kept.ordered_s > self._since_s:
                continue
            if kept.length > self._most or self._is_given(kept):
                yield kept

    def _is_given(self, kept: RetainedScript) -> bool:
        """Return whether removing a script frees bytes that are part of an accepted offer."""
        if kept.position > self._last:
            return False
        if not kept.shared:
            return kept.length > 0
        return any(number in self._freed for number, _ in kept.contents())


def select_evictions(
    records: FilesRecords, users: Sequence[tuple[Sequence[int], int]], most: int, since_s: int
) -> Iterator[RetainedScript]:
    """Yield the scripts to evict so that the total of some users fits a limit.

    Args:
        records: The sink's database.
        users: Numbers of each user's holders, and the size of their scripts in bytes.
        most: The limit, in bytes.
        since_s: Purges ordered after this time, in s since the epoch, are pending.
    """
    if sum(size for _, size in users) <= most:
        return
    givers = [_EvictionCandidate(records, holders, size, most, since_s) for holders, size in users]
    excess = sum(giver.size for giver in givers) - most
    offers: list[tuple[int, HolderPosition, int]] = []

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


log = logging.getLogger(__name__)

_EVERY_S = 60.0
_REORDER_AFTER_S = 3600
_MAX_PENDING = 5000
_DAY_NS = 86400 * 10**9


class _Holder(msgspec.Struct, frozen=True):
    """User with an account on a cluster, and the bytes of their scripts."""

    number: int
    uid: int
    user: str
    account: str
    bytes: int

    @property
    def name(self) -> str:
        """Return the user name, or the uid if it has none."""
        return self.user or str(self.uid)


_OLDEST = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script LEFT JOIN ordered USING (cluster, key) "
    "WHERE state IN (0, 1, 2, 3) AND mtime_ns < ? AND (at_s IS NULL OR at_s <= ?) "
    "ORDER BY mtime_ns LIMIT ?"
)

_PurgeOrder = tuple[RetainedScript, str]
"""Script to purge, and the reason."""


class RetentionWorker:
    """Retention worker of a sink: orders the purge of scripts that are too old or too large.

    Args:
        records: The sink's database.
        sink: The sink's name.
        settings: Settings of the sink: ``retention_days`` and ``limit``.
        at_once: Maximum number of scripts per batch of purge orders.
    """

    def __init__(
        self, records: FilesRecords, sink: str, settings: FilesSinkSettings, *, at_once: int = 500
    ) -> None:
        self._at_once = at_once
        self._records = records
        self._sink = sink
        self._days = settings.retention_days
        self._limits = settings.limit
        self._next_at = 0.0
        with records.writing() as connection:
            connection.execute(HOLDER_INDEX if self._limits else NO_HOLDER_INDEX)

    def ask(self, append: Append) -> None:
        """Append archive.purge events for scripts that have to go and have no pending purge."""
        now = time.monotonic()
        if (not self._days and not self._limits) or now < self._next_at:
            return
        now_s = int(time.time())
        # A dead letter that was fixed since is ordered again after some time.
        since_s = now_s - _REORDER_AFTER_S
        on_the_way = self._records.query("SELECT count(*) FROM ordered WHERE at_s > ?", since_s)
        orders: dict[tuple[str, str], _PurgeOrder] = {}
        if on_the_way[0][0] < _MAX_PENDING:
            for kept, why in self._due(since_s):
                orders.setdefault((kept.cluster, kept.key), (kept, why))
                if len(orders) >= self._at_once:
                    break
        if not orders:
            self._next_at = now + _EVERY_S
            return
        append(self._events(list(orders.values()), now_s // _REORDER_AFTER_S))
        with self._records.writing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO ordered VALUES (?, ?, ?)",
                [(*ref, now_s) for ref in orders],
            )
        self._say(orders.values())

    def _say(self, orders: Iterable[_PurgeOrder]) -> None:
        """Log one line per reason: no script is removed silently."""
        sizes: dict[str, list[int]] = {}
        for kept, why in orders:
            sizes.setdefault(why, []).append(kept.script_length + kept.env_length)
        for why, of in sizes.items():
            log.info(
                "archive.%s removes %d scripts, with environments %d bytes: %s",
                *(self._sink, len(of), sum(of), why),
            )

    def _due(self, since_s: int) -> Iterator[_PurgeOrder]:
        """Yield scripts to purge without a pending purge, limit by limit, oldest first."""
        now_ns = time.time_ns()
        if self._days:
            yield from self._old(now_ns - self._days * _DAY_NS, since_s, self._days)
        if not self._limits:
            return
        rows = self._records.query("SELECT number, uid, user, account, bytes FROM holder")
        holders = [_Holder(*row) for row in rows]
        for name, limit in self._limits.items():
            meant = [holder for holder in holders if _matches_limit(holder, limit)]
            if limit.days and not limit.users and not limit.accounts:
                yield from self._old(now_ns - limit.days * _DAY_NS, since_s, limit.days)
            elif limit.days:
                why = f"older than {limit.days} days (limit {name})"
                numbers = [holder.number for holder in meant]
                for kept in iterate_oldest(self._records, numbers, now_ns - limit.days * _DAY_NS):
                    if kept.ordered_s is None or kept.ordered_s <= since_s:
                        yield kept, why
            if limit.max_bytes:
                yield from self._large(name, limit, meant, since_s)

    def _old(self, before_ns: int, since_s: int, days: int) -> Iterator[_PurgeOrder]:
        """Yield old scripts of all owners, also of unknown ones."""
        for row in self._records.query(_OLDEST, before_ns, since_s, self._at_once):
            yield RetainedScript(*row), f"older than {days} days"

    def _large(
        self, name: str, limit: LimitSettings, meant: Sequence[_Holder], since_s: int
    ) -> Iterator[_PurgeOrder]:
        """Yield the scripts to evict for one size limit."""
        groups = _group_holders(
            meant, lambda holder: holder.account if limit.accounts else holder.name
        )
        for whose, group in groups.items():
            why = f"more than {limit.max_bytes} bytes of {whose} (limit {name})"
            users = [
                ([holder.number for holder in user], sum(holder.bytes for holder in user))
                for user in _group_holders(group, lambda holder: holder.name).values()
            ]
            for kept in select_evictions(self._records, users, limit.max_bytes, since_s):
                yield kept, why

    def _events(self, orders: Sequence[_PurgeOrder], turn: int) -> list[Event]:
        """Make the archive.purge events, one per directory and reason."""
        # One event per directory: one that cannot be purged now must not delay the others.
        keys: dict[tuple[str, int, str], list[str]] = {}
        for kept, why in orders:
            keys.setdefault((kept.cluster, kept.directory, why), []).append(kept.key)
        at = datetime.now(UTC)
        return [
            self._event(cluster, members, why, at, turn)
            for (cluster, _, why), members in keys.items()
        ]

    def _event(self, cluster: str, keys: list[str], why: str, at: datetime, turn: int) -> Event:
        digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:24]
        return Event(
            kind=ARCHIVE_PURGE,
            cluster=cluster,
            key=f"retention:{self._sink}:{turn}:{digest}",
            at=at,
            seen_at=at,
            source=f"archive.{self._sink}",
            body=ArchivePurge(
                script_keys=tuple(keys), sink=self._sink, asked_by="retention", reason=why
            ),
        )


def _group_holders(
    holders: Iterable[_Holder], key: Callable[[_Holder], str]
) -> dict[str, list[_Holder]]:
    groups: dict[str, list[_Holder]] = {}
    for holder in holders:
        groups.setdefault(key(holder), []).append(holder)
    return groups


def _matches_limit(holder: _Holder, limit: LimitSettings) -> bool:
    return (not limit.users or holder.name in limit.users) and (
        not limit.accounts or holder.account in limit.accounts
    )
