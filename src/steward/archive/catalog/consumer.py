"""Catalog consumer: indexes each distinct script once, in one SQLite file per month.

It is a consumer separate from the sinks, so that archiving never waits for indexing. Every step can
be repeated: an existing use is left as it is, and the cursor moves when all months of a batch are
durable. :func:`make_spooled_use` and :func:`make_identified_use` convert events to
:class:`ScriptUse`.
"""

import logging
import os
from collections.abc import Sequence

from steward.archive.catalog.generations import CatalogCursor, CatalogGenerations
from steward.archive.catalog.month import (
    CatalogUnavailable,
    MonthWriter,
    ScriptUse,
    get_month,
    make_month_path,
)
from steward.archive.contents import ScriptContents
from steward.archive.errors import NotArchived
from steward.core.consumers import Append, Rejected
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchivePurge,
    Event,
    JobIdentity,
    JobScript,
)

log = logging.getLogger(__name__)

_OPEN_MONTHS = 3
_LONGEST_KEY_NS = 2**63


class CatalogConsumer:
    """Consumer ``catalog``: writes the search index.

    Args:
        directory: ``state_dir/catalog``; created if needed.
        contents: Reads scripts, including those of resent events.

    Raises:
        CatalogUnavailable: The catalog is damaged, or cannot be opened now.
    """

    name = "catalog"
    kinds = frozenset({JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_PURGE})
    batch_events = 200
    gather_s = 0.5

    def __init__(self, directory: str, contents: ScriptContents) -> None:
        self._generations = CatalogGenerations(directory)
        self._contents = contents
        self._directory = ""
        self._cursor: CatalogCursor | None = None
        self._writers: dict[str, MonthWriter] = {}

    def cursor(self) -> int:
        """Return the position of the last applied event."""
        with self._generations.lock():
            return self._open().load_position()

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Index new scripts, add their owners, and remove purged ones.

        Raises:
            Unavailable: The catalog or a store cannot be used now.
            Rejected: The bytes of a script are gone.
        """
        with self._generations.lock():
            catalog_cursor = self._open()
            purged = _list_purged_keys(events)
            purged_keys = {(cluster, key) for cluster, key, _ in purged}
            purged_keys |= catalog_cursor.find_purged({_get_script_key(event) for event in events})
            by_month = _group_by_month(events)
            for month in sorted({*by_month, *(_get_key_month(key) for _, key in purged_keys)}):
                self._apply_month(month, by_month.get(month, ()), purged_keys)
            catalog_cursor.advance(upto, purged)

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's shape
        """Do nothing; return seconds until the next call."""
        return 3600.0

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None
        self._directory = ""

    def _open(self) -> CatalogCursor:
        """Open the cursor of the current generation, which changes after a rebuild."""
        directory = self._generations.ensure_current()
        if directory != self._directory or self._cursor is None:
            self.close()
            self._cursor = CatalogCursor(directory)
            self._directory = directory
        return self._cursor

    def _get_writer(self, month: str) -> MonthWriter:
        """Return a month's writer; at most three stay open."""
        writer = self._writers.pop(month, None)
        if writer is None:
            writer = MonthWriter(make_month_path(self._directory, month))
        self._writers[month] = writer  # The one used last stands last.
        while len(self._writers) > _OPEN_MONTHS:
            self._writers.pop(next(iter(self._writers))).close()
        return writer

    def _apply_month(
        self, month: str, events: Sequence[Event], purged_keys: set[tuple[str, str]]
    ) -> None:
        """Apply the events of one month in one transaction."""
        if not events and not os.path.exists(make_month_path(self._directory, month)):
            return
        writer = self._get_writer(month)
        with writer.writing():
            remaining = [event for event in events if _get_script_key(event) not in purged_keys]
            self._index_scripts(writer, [event for event in remaining if event.kind == JOB_SCRIPT])
            writer.update_uses(
                make_identified_use(event.cluster, event.body, event.id)
                for event in remaining
                if event.kind == JOB_IDENTITY
            )
            removed = [
                writer.remove_use(*key) for key in purged_keys if _get_key_month(key[1]) == month
            ]
        if any(removed):
            writer.shrink_log()

    def _index_scripts(self, writer: MonthWriter, events: Sequence[Event]) -> None:
        """Index the new scripts of some job.script events, and store their uses."""
        known = writer.find_uses([(event.cluster, event.key) for event in events])
        new = [
            (event, bytes.fromhex(event.body.script.sha256))
            for event in events
            if event.body.script is not None and (event.cluster, event.key) not in known
        ]
        numbers = writer.find_scripts([digest for _, digest in new])
        for event, digest in new:
            if digest not in numbers:
                numbers[digest] = writer.add_script(digest, self._read_script(event, event.body))
        writer.add_uses(
            make_spooled_use(event, event.body, numbers[digest]) for event, digest in new
        )

    def _read_script(self, event: Event, body: JobScript) -> bytes:
        """Read the script of an event."""
        try:
            script = self._contents.read(event.cluster, event.key, body, "script")
        except NotArchived as error:
            raise Rejected(f"the script of {event.key} is missing: {error}", event) from error
        assert script is not None, "no script"
        return script


def make_spooled_use(event: Event, body: JobScript, script: int) -> ScriptUse:
    """Convert a job.script event to a use without an owner."""
    return ScriptUse(
        cluster=event.cluster,
        key=event.key,
        job_id=body.job_id,
        at=max(0, body.spool_mtime_ns // 1000),
        name=body.claimed_name,
        event=event.id,
        script=script,
    )


def make_identified_use(cluster: str, body: JobIdentity, event: int) -> ScriptUse:
    """Convert a job.identity event to a use with owner, account, partition and name."""
    record = body.record
    return ScriptUse(
        cluster=cluster,
        key=body.script_key,
        job_id=body.job_id,
        at=0,
        uid=record.uid,
        user=record.user,
        account=record.account,
        partition=record.partition,
        name=record.name,
        event=event,
    )


def parse_spool_time(key: str) -> int:
    """Parse the spool time in a script's key, microseconds since the epoch.

    Raises:
        ValueError: The text is not a script's key.
    """
    kind, _, rest = key.partition(":")
    nanoseconds = int(rest.rpartition(":")[2])
    if kind != "script" or not 0 <= nanoseconds < _LONGEST_KEY_NS:
        raise ValueError(f"invalid script key {key!r}")
    return nanoseconds // 1000


def _get_key_month(key: str) -> str:
    return get_month(parse_spool_time(key))


def _get_script_key(event: Event) -> tuple[str, str]:
    """Return cluster and script key of an event."""
    key = event.body.script_key if isinstance(event.body, JobIdentity) else event.key
    return event.cluster, key


def _group_by_month(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Group events by the month of their scripts."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event.body, ArchivePurge):
            continue
        try:
            month = _get_key_month(_get_script_key(event)[1])
        except ValueError as error:
            raise Rejected(str(error), event) from error
        groups.setdefault(month, []).append(event)
    return groups


def _list_purged_keys(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """Return cluster, key and event of every script purged from all sinks."""
    purged = []
    for event in events:
        # A purge of one sink concerns that sink only.
        if isinstance(event.body, ArchivePurge) and not event.body.sink:
            for key in event.body.script_keys:
                try:
                    parse_spool_time(key)
                except ValueError as error:
                    raise Rejected(str(error), event) from error
                purged.append((event.cluster, key, event.id))
    return purged


__all__ = [
    "CatalogConsumer",
    "CatalogUnavailable",
    "make_identified_use",
    "make_spooled_use",
    "parse_spool_time",
]
