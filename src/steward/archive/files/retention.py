"""Removal by age and by size: asked for by archive.purge events, so that all forget alike.

What was ordered and is not gone yet is remembered in the sink's database: it is not
ordered twice, and counts as gone where sizes are looked at (see fitting.py).
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from steward.archive.files.fitting import COLUMNS, Kept, fitting, oldest
from steward.archive.files.records import Records
from steward.archive.files.schema import HOLDER_INDEX, NO_HOLDER_INDEX
from steward.archive.settings import FilesSinkSettings, LimitSettings
from steward.core.consumers import Append
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, Event

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_AGAIN_S = 3600
_MOST_ORDERED = 5000
_DAY_NS = 86400 * 10**9


class _Holder(msgspec.Struct, frozen=True):
    number: int
    uid: int
    user: str
    account: str
    bytes: int

    @property
    def name(self) -> str:
        """The user's name; where a uid has none, its number."""
        return self.user or str(self.uid)


_OLDEST = (
    f"SELECT {COLUMNS} "  # noqa: S608 - our own columns
    "FROM script LEFT JOIN ordered USING (cluster, key) "
    "WHERE state IN (0, 1, 2, 3) AND mtime_ns < ? AND (at_s IS NULL OR at_s <= ?) "
    "ORDER BY mtime_ns LIMIT ?"
)

_Order = tuple[Kept, str]
"""What is to go, and why."""


class Retention:
    """Asks that a sink forget what is older or larger than its site wants to keep.

    Args:
        records: The sink's database.
        sink: The sink's name.
        settings: Of the sink: ``retention_days`` and ``limit``.
        at_once: Most scripts in one batch of purge orders.
    """

    def __init__(
        self, records: Records, sink: str, settings: FilesSinkSettings, *, at_once: int = 500
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
        """Append archive.purge events for what has to go and was not asked for already."""
        now = time.monotonic()
        if (not self._days and not self._limits) or now < self._next_at:
            return
        now_s = int(time.time())
        # What was set aside, and mended since, is asked for again some time.
        since_s = now_s - _AGAIN_S
        on_the_way = self._records.query("SELECT count(*) FROM ordered WHERE at_s > ?", since_s)
        orders: dict[tuple[str, str], _Order] = {}
        if on_the_way[0][0] < _MOST_ORDERED:
            for kept, why in self._due(since_s):
                orders.setdefault((kept.cluster, kept.key), (kept, why))
                if len(orders) >= self._at_once:
                    break
        if not orders:
            self._next_at = now + _EVERY_S
            return
        append(self._events(list(orders.values()), now_s // _AGAIN_S))
        with self._records.writing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO ordered VALUES (?, ?, ?)",
                [(*ref, now_s) for ref in orders],
            )
        self._say(orders.values())

    def _say(self, orders: Iterable[_Order]) -> None:
        """One line a reason: nothing goes without a word."""
        sizes: dict[str, list[int]] = {}
        for kept, why in orders:
            sizes.setdefault(why, []).append(kept.script_length + kept.env_length)
        for why, of in sizes.items():
            log.info(
                "archive.%s removes %d scripts, with environments %d bytes: %s",
                *(self._sink, len(of), sum(of), why),
            )

    def _due(self, since_s: int) -> Iterator[_Order]:
        """What has to go and was not ordered since then, limit by limit, the oldest first."""
        now_ns = time.time_ns()
        if self._days:
            yield from self._old(now_ns - self._days * _DAY_NS, since_s, self._days)
        if not self._limits:
            return
        rows = self._records.query("SELECT number, uid, user, account, bytes FROM holder")
        holders = [_Holder(*row) for row in rows]
        for name, limit in self._limits.items():
            meant = [holder for holder in holders if _is_meant(holder, limit)]
            if limit.days and not limit.users and not limit.accounts:
                yield from self._old(now_ns - limit.days * _DAY_NS, since_s, limit.days)
            elif limit.days:
                why = f"older than {limit.days} days (limit {name})"
                numbers = [holder.number for holder in meant]
                for kept in oldest(self._records, numbers, now_ns - limit.days * _DAY_NS):
                    if kept.ordered_s is None or kept.ordered_s <= since_s:
                        yield kept, why
            if limit.max_bytes:
                yield from self._large(name, limit, meant, since_s)

    def _old(self, before_ns: int, since_s: int, days: int) -> Iterator[_Order]:
        """Of everybody's, also of what has no owner yet."""
        for row in self._records.query(_OLDEST, before_ns, since_s, self._at_once):
            yield Kept(*row), f"older than {days} days"

    def _large(
        self, name: str, limit: LimitSettings, meant: Sequence[_Holder], since_s: int
    ) -> Iterator[_Order]:
        groups = _by(meant, lambda holder: holder.account if limit.accounts else holder.name)
        for whose, group in groups.items():
            why = f"more than {limit.max_bytes} bytes of {whose} (limit {name})"
            users = [
                ([holder.number for holder in user], sum(holder.bytes for holder in user))
                for user in _by(group, lambda holder: holder.name).values()
            ]
            for kept in fitting(self._records, users, limit.max_bytes, since_s):
                yield kept, why

    def _events(self, orders: Sequence[_Order], turn: int) -> list[Event]:
        # One event a directory: one that cannot be purged now must not keep the others.
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


def _by(holders: Iterable[_Holder], key: Callable[[_Holder], str]) -> dict[str, list[_Holder]]:
    groups: dict[str, list[_Holder]] = {}
    for holder in holders:
        groups.setdefault(key(holder), []).append(holder)
    return groups


def _is_meant(holder: _Holder, limit: LimitSettings) -> bool:
    return (not limit.users or holder.name in limit.users) and (
        not limit.accounts or holder.account in limit.accounts
    )
