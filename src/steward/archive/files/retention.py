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
from steward.core.principals import RETENTION

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

    def list_contents(self) -> list[tuple[int, int]]:
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
_SELECT_OF_HOLDER = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script INDEXED BY script_holder LEFT JOIN ordered USING (cluster, key) "
    "WHERE holder = ? AND mtime_ns < ? AND (mtime_ns, script.key, script.cluster) > (?, ?, ?) "
    "ORDER BY mtime_ns, script.key, script.cluster LIMIT ?"
)
_SELECT_PENDING = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script INDEXED BY script_holder LEFT JOIN ordered USING (cluster, key) "
    "WHERE holder = ? AND (at_s > ? OR script_length + env_length > ?)"
)


def iterate_oldest(
    records: FilesRecords, holders: Sequence[int], before_ns: int = LAST_NS
) -> Iterator[RetainedScript]:
    """Yield the scripts of some holders that are older than ``before_ns``, oldest first."""
    iterators = [_iterate_oldest_of_holder(records, holder, before_ns) for holder in holders]
    return heapq.merge(*iterators, key=lambda script: script.position)


def _iterate_oldest_of_holder(
    records: FilesRecords, holder: int, before_ns: int
) -> Iterator[RetainedScript]:
    """Yield the scripts of one holder, oldest first, page by page."""
    position: HolderPosition = (-1, "", "")
    while True:
        page = records.query(_SELECT_OF_HOLDER, holder, before_ns, *position, records.page_rows)
        for row in page:
            script = RetainedScript(*row)
            position = script.position
            yield script
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
        max_bytes: The limit, in bytes.
        since_s: Purges ordered after this time, in s since the epoch, are pending.
    """

    def __init__(
        self, records: FilesRecords, holders: Sequence[int], size: int, max_bytes: int, since_s: int
    ) -> None:
        self.size = size
        self._records = records
        self._holders = holders
        self._max_bytes = max_bytes
        self._since_s = since_s
        self._uses_left: dict[int, int] = {}
        self._freed_contents: set[int] = set()
        self._last_position: HolderPosition = (-1, "", "")
        self._steps = self._iterate_steps()
        self._next_step: _EvictionStep | None = None
        self._too_large_position: HolderPosition = (-1, "", "")
        self._subtract_pending()

    def _subtract_pending(self) -> None:
        """Subtract scripts with a pending purge, and scripts larger than the limit."""
        pending_uses: Counter[int] = Counter()
        lengths: dict[int, int] = {}
        for holder in self._holders:
            for row in self._records.query(_SELECT_PENDING, holder, self._since_s, self._max_bytes):
                script = RetainedScript(*row)
                if script.length > self._max_bytes:
                    self._too_large_position = max(self._too_large_position, script.position)
                if not script.shared:
                    self.size -= script.length
                    continue
                for number, length in script.list_contents():
                    pending_uses[number] += 1
                    lengths[number] = length
        self._load_uses(pending_uses)
        for number, count in pending_uses.items():
            self._uses_left[number] -= count
            if self._uses_left[number] <= 0:
                self.size -= lengths[number]

    def _load_uses(self, numbers: Iterable[int]) -> None:
        """Load how many scripts use each content."""
        unknown = [number for number in dict.fromkeys(numbers) if number not in self._uses_left]
        for first in range(0, len(unknown), _CHUNK):
            chunk = unknown[first : first + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            sql = f"SELECT number, uses FROM content WHERE number IN ({marks})"  # noqa: S608 - question marks alone
            self._uses_left.update(dict.fromkeys(chunk, 0))
            self._uses_left.update(self._records.query(sql, *chunk))

    def _is_removed_anyway(self, script: RetainedScript) -> bool:
        """Return whether a script is too large, or has a pending purge."""
        return script.length > self._max_bytes or (
            script.ordered_s is not None and script.ordered_s > self._since_s
        )

    def _iterate_steps(self) -> Iterator["_EvictionStep"]:
        """Yield the steps at which removal in order of age frees bytes."""
        rows = (
            script
            for script in iterate_oldest(self._records, self._holders)
            if not self._is_removed_anyway(script)
        )
        while page := list(itertools.islice(rows, self._records.page_rows)):
            self._load_uses(
                number for script in page if script.shared for number, _ in script.list_contents()
            )
            for script in page:
                freed = 0 if script.shared else script.length
                numbers: list[int] = []
                for number, length in script.list_contents() if script.shared else ():
                    self._uses_left[number] -= 1
                    # An empty file frees no bytes.
                    if not self._uses_left[number] and length:
                        freed += length
                        numbers.append(number)
                if freed:
                    yield _EvictionStep(script.position, freed, numbers)

    def propose_step(self) -> HolderPosition | None:
        """Return the position up to which the next step removes scripts; None if none is left."""
        self._next_step = next(self._steps, None)
        return self._next_step.position if self._next_step else None

    def accept_step(self) -> int:
        """Accept the last offer; return the number of bytes it frees."""
        assert self._next_step is not None, "no next step"
        self._last_position = self._next_step.position
        self._freed_contents.update(self._next_step.contents)
        self.size -= self._next_step.bytes
        return self._next_step.bytes

    def iterate_chosen(self) -> Iterator[RetainedScript]:
        """Yield the scripts to remove without a pending purge, oldest first."""
        for script in iterate_oldest(self._records, self._holders):
            if script.position > max(self._last_position, self._too_large_position):
                return
            if script.ordered_s is not None and script.ordered_s > self._since_s:
                continue
            if script.length > self._max_bytes or self._is_accepted(script):
                yield script

    def _is_accepted(self, script: RetainedScript) -> bool:
        """Return whether removing a script frees bytes that are part of an accepted offer."""
        if script.position > self._last_position:
            return False
        if not script.shared:
            return script.length > 0
        return any(number in self._freed_contents for number, _ in script.list_contents())


def select_evictions(
    records: FilesRecords, users: Sequence[tuple[Sequence[int], int]], max_bytes: int, since_s: int
) -> Iterator[RetainedScript]:
    """Yield the scripts to evict so that the total of some users fits a limit.

    Args:
        records: The sink's database.
        users: Numbers of each user's holders, and the size of their scripts in bytes.
        max_bytes: The limit, in bytes.
        since_s: Purges ordered after this time, in s since the epoch, are pending.
    """
    if sum(size for _, size in users) <= max_bytes:
        return
    candidates = [
        _EvictionCandidate(records, holders, size, max_bytes, since_s) for holders, size in users
    ]
    excess = sum(candidate.size for candidate in candidates) - max_bytes
    offers: list[tuple[int, HolderPosition, int]] = []

    def ask(index: int) -> None:
        position = candidates[index].propose_step() if excess > 0 else None
        if position is not None:
            heapq.heappush(offers, (-candidates[index].size, position, index))

    for index in range(len(candidates)):
        ask(index)
    while excess > 0 and offers:
        _, _, index = heapq.heappop(offers)
        excess -= candidates[index].accept_step()
        ask(index)
    yield from heapq.merge(
        *(candidate.iterate_chosen() for candidate in candidates),
        key=lambda script: script.position,
    )


log = logging.getLogger(__name__)

_CHECK_EVERY_S = 60.0
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


_SELECT_OLDEST = (
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
        max_scripts: Maximum number of scripts per batch of purge orders.
    """

    def __init__(
        self,
        records: FilesRecords,
        sink: str,
        settings: FilesSinkSettings,
        *,
        max_scripts: int = 500,
    ) -> None:
        self._max_scripts = max_scripts
        self._records = records
        self._sink = sink
        self._retention_days = settings.retention_days
        self._limits = settings.limit
        self._next_check_s = 0.0
        with records.writing() as connection:
            connection.execute(HOLDER_INDEX if self._limits else NO_HOLDER_INDEX)

    def order_purges(self, append: Append) -> None:
        """Append archive.purge events for scripts that have to go and have no pending purge."""
        now = time.monotonic()
        if (not self._retention_days and not self._limits) or now < self._next_check_s:
            return
        now_s = int(time.time())
        # A dead letter that was fixed since is ordered again after some time.
        since_s = now_s - _REORDER_AFTER_S
        pending = self._records.query("SELECT count(*) FROM ordered WHERE at_s > ?", since_s)
        orders: dict[tuple[str, str], _PurgeOrder] = {}
        if pending[0][0] < _MAX_PENDING:
            for script, reason in self._iterate_due(since_s):
                orders.setdefault((script.cluster, script.key), (script, reason))
                if len(orders) >= self._max_scripts:
                    break
        if not orders:
            self._next_check_s = now + _CHECK_EVERY_S
            return
        append(self._make_events(list(orders.values()), now_s // _REORDER_AFTER_S))
        with self._records.writing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO ordered VALUES (?, ?, ?)",
                [(*ref, now_s) for ref in orders],
            )
        self._log_orders(orders.values())

    def _log_orders(self, orders: Iterable[_PurgeOrder]) -> None:
        """Log one line per reason: no script is removed silently."""
        sizes: dict[str, list[int]] = {}
        for script, reason in orders:
            sizes.setdefault(reason, []).append(script.script_length + script.env_length)
        for reason, lengths in sizes.items():
            log.info(
                "archive.%s removes %d scripts (%d bytes with their environments): %s",
                *(self._sink, len(lengths), sum(lengths), reason),
            )

    def _iterate_due(self, since_s: int) -> Iterator[_PurgeOrder]:
        """Yield scripts to purge without a pending purge, limit by limit, oldest first."""
        now_ns = time.time_ns()
        if self._retention_days:
            yield from self._iterate_old(
                now_ns - self._retention_days * _DAY_NS, since_s, self._retention_days
            )
        if not self._limits:
            return
        rows = self._records.query("SELECT number, uid, user, account, bytes FROM holder")
        holders = [_Holder(*row) for row in rows]
        for name, limit in self._limits.items():
            matching = [holder for holder in holders if _matches_limit(holder, limit)]
            if limit.days and not limit.users and not limit.accounts:
                yield from self._iterate_old(now_ns - limit.days * _DAY_NS, since_s, limit.days)
            elif limit.days:
                reason = f"older than {limit.days} days (limit {name})"
                numbers = [holder.number for holder in matching]
                for script in iterate_oldest(self._records, numbers, now_ns - limit.days * _DAY_NS):
                    if script.ordered_s is None or script.ordered_s <= since_s:
                        yield script, reason
            if limit.max_bytes:
                yield from self._iterate_excess(name, limit, matching, since_s)

    def _iterate_old(self, before_ns: int, since_s: int, days: int) -> Iterator[_PurgeOrder]:
        """Yield old scripts of all owners, also of unknown ones."""
        for row in self._records.query(_SELECT_OLDEST, before_ns, since_s, self._max_scripts):
            yield RetainedScript(*row), f"older than {days} days"

    def _iterate_excess(
        self, name: str, limit: LimitSettings, matching: Sequence[_Holder], since_s: int
    ) -> Iterator[_PurgeOrder]:
        """Yield the scripts to evict for one size limit."""
        groups = _group_holders(
            matching, lambda holder: holder.account if limit.accounts else holder.name
        )
        for group_name, group in groups.items():
            reason = f"more than {limit.max_bytes} bytes of {group_name} (limit {name})"
            users = [
                ([holder.number for holder in user], sum(holder.bytes for holder in user))
                for user in _group_holders(group, lambda holder: holder.name).values()
            ]
            for script in select_evictions(self._records, users, limit.max_bytes, since_s):
                yield script, reason

    def _make_events(self, orders: Sequence[_PurgeOrder], order_period: int) -> list[Event]:
        """Make the archive.purge events, one per directory and reason."""
        # One event per directory: one that cannot be purged now must not delay the others.
        keys: dict[tuple[str, int, str], list[str]] = {}
        for script, reason in orders:
            keys.setdefault((script.cluster, script.directory, reason), []).append(script.key)
        at = datetime.now(UTC)
        return [
            self._make_event(cluster, script_keys, reason, at, order_period)
            for (cluster, _, reason), script_keys in keys.items()
        ]

    def _make_event(
        self, cluster: str, keys: list[str], reason: str, at: datetime, order_period: int
    ) -> Event:
        RETENTION.require("archive.erase")
        digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:24]
        return Event(
            kind=ARCHIVE_PURGE,
            cluster=cluster,
            key=f"retention:{self._sink}:{order_period}:{digest}",
            at=at,
            seen_at=at,
            source=f"archive.{self._sink}",
            body=ArchivePurge(
                script_keys=tuple(keys), sink=self._sink, asked_by=RETENTION.name, reason=reason
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
