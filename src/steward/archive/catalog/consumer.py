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
    """Consumer ``catalogue``: writes the search index.

    Args:
        directory: ``state_dir/catalogue``; created if needed.
        contents: Reads scripts, including those of resent events.

    Raises:
        CatalogUnavailable: The catalog is damaged, or cannot be opened now.
    """

    name = "catalogue"
    kinds = frozenset({JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_PURGE})
    batch_events = 200

    def __init__(self, directory: str, contents: ScriptContents) -> None:
        self._generations = CatalogGenerations(directory)
        self._contents = contents
        self._directory = ""
        self._progressed: CatalogCursor | None = None
        self._months: dict[str, MonthWriter] = {}

    def cursor(self) -> int:
        """Return the position of the last applied event."""
        with self._generations.lock():
            return self._open().position()

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Index new scripts, add their owners, and remove purged ones.

        Raises:
            Unavailable: The catalog or a store cannot be used now.
            Rejected: The bytes of a script are gone.
        """
        with self._generations.lock():
            progressed = self._open()
            purged = _list_purged_keys(events)
            gone = {(cluster, key) for cluster, key, _ in purged}
            gone |= progressed.purged(list({_get_script_key(event) for event in events}))
            of_month = _group_by_month(events)
            for month in sorted({*of_month, *(_get_key_month(key) for _, key in gone)}):
                self._apply_month(month, of_month.get(month, ()), gone)
            progressed.advance(upto, purged)

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's shape
        """Do nothing; return seconds until the next call."""
        return 3600.0

    def close(self) -> None:
        """Close all files."""
        for writer in self._months.values():
            writer.close()
        self._months.clear()
        if self._progressed is not None:
            self._progressed.close()
            self._progressed = None
        self._directory = ""

    def _open(self) -> CatalogCursor:
        """Open the cursor of the current generation, which changes after a rebuild."""
        directory = self._generations.ensure()
        if directory != self._directory or self._progressed is None:
            self.close()
            self._progressed = CatalogCursor(directory)
            self._directory = directory
        return self._progressed

    def _month(self, month: str) -> MonthWriter:
        """Return a month's writer; at most three stay open."""
        writer = self._months.pop(month, None)
        if writer is None:
            writer = MonthWriter(make_month_path(self._directory, month))
        self._months[month] = writer  # The one used last stands last.
        while len(self._months) > _OPEN_MONTHS:
            self._months.pop(next(iter(self._months))).close()
        return writer

    def _apply_month(self, month: str, events: Sequence[Event], gone: set[tuple[str, str]]) -> None:
        """Apply the events of one month in one transaction."""
        if not events and not os.path.exists(make_month_path(self._directory, month)):
            return
        writer = self._month(month)
        with writer.writing():
            for event in events:
                if _get_script_key(event) not in gone:
                    self._take(writer, event)
            forgotten = [writer.forget(*key) for key in gone if _get_key_month(key[1]) == month]
        if any(forgotten):
            writer.shrink_log()

    def _take(self, writer: MonthWriter, event: Event) -> None:
        """Index the script of an event, or update its use."""
        if isinstance(event.body, JobIdentity):
            writer.identify(make_identified_use(event.cluster, event.body, event.id))
        elif isinstance(event.body, JobScript) and event.body.script is not None:
            if writer.has_use(event.cluster, event.key):
                return
            kept = event.body.script
            digest = bytes.fromhex(kept.sha256)
            number = writer.knows(digest)
            if not number:
                number = writer.add_script(digest, self._bytes(event, event.body))
            writer.add_use(make_spooled_use(event, event.body, number))

    def _bytes(self, event: Event, body: JobScript) -> bytes:
        """Read the script of an event."""
        try:
            script = self._contents.read(event.cluster, event.key, body, "script")
        except NotArchived as error:
            raise Rejected(f"the script of {event.key} is gone: {error}", event) from error
        assert script is not None, "it was looked at"
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
        raise ValueError(f"{key!r} is not the key of a script")
    return nanoseconds // 1000


def _get_key_month(key: str) -> str:
    return get_month(parse_spool_time(key))


def _get_script_key(event: Event) -> tuple[str, str]:
    """Return cluster and script key of an event."""
    key = event.body.script_key if isinstance(event.body, JobIdentity) else event.key
    return event.cluster, key


def _group_by_month(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Group events by the month of their scripts."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event.body, ArchivePurge):
            continue
        try:
            month = _get_key_month(_get_script_key(event)[1])
        except ValueError as error:
            raise Rejected(str(error), event) from error
        found.setdefault(month, []).append(event)
    return found


def _list_purged_keys(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """Return cluster, key and event of every script purged from all sinks."""
    found = []
    for event in events:
        # A purge of one sink concerns that sink only.
        if isinstance(event.body, ArchivePurge) and not event.body.sink:
            for key in event.body.script_keys:
                try:
                    parse_spool_time(key)
                except ValueError as error:
                    raise Rejected(str(error), event) from error
                found.append((event.cluster, key, event.id))
    return found


__all__ = [
    "CatalogConsumer",
    "CatalogUnavailable",
    "make_identified_use",
    "make_spooled_use",
    "parse_spool_time",
]
