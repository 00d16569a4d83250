"""The consumer that makes scripts findable: it indexes each distinct one once, a file a month.

It is a consumer of its own, so that the archive never waits for it. Every
step may be repeated: a use that is there is left as it is, and the cursor is
moved when all months of a batch are durable.
"""

import logging
import os
from collections.abc import Sequence

from steward.archive.catalog.generations import Generations, Progressed
from steward.archive.catalog.month import (
    CatalogueUnavailable,
    MonthWriter,
    Use,
    month_of,
    month_path,
)
from steward.archive.contents import Contents
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


class Catalogue:
    """The consumer named ``catalogue``.

    Args:
        directory: ``state_dir/catalogue``; made if need be.
        contents: Reads scripts, also those of events that are sent again.

    Raises:
        CatalogueUnavailable: The catalogue is damaged, or cannot be opened now.
    """

    name = "catalogue"
    kinds = frozenset({JOB_SCRIPT, JOB_IDENTITY, ARCHIVE_PURGE})
    batch_events = 200

    def __init__(self, directory: str, contents: Contents) -> None:
        self._generations = Generations(directory)
        self._contents = contents
        self._directory = ""
        self._progressed: Progressed | None = None
        self._months: dict[str, MonthWriter] = {}

    def cursor(self) -> int:
        """Position of the last event that was put to use."""
        with self._generations.lock():
            return self._open().position()

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Index new scripts, note whose they are, forget what is purged.

        Raises:
            Unavailable: The catalogue or a store cannot be used now.
            Rejected: The bytes of a script are gone.
        """
        with self._generations.lock():
            progressed = self._open()
            purged = _purged(events)
            gone = {(cluster, key) for cluster, key, _ in purged}
            gone |= progressed.purged(list({_key(event) for event in events}))
            of_month = _by_month(events)
            for month in sorted({*of_month, *(_month(key) for _, key in gone)}):
                self._apply_month(month, of_month.get(month, ()), gone)
            progressed.advance(upto, purged)

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's shape
        """Nothing is due by the clock; returns seconds until the next call."""
        return 3600.0

    def close(self) -> None:
        """Let go of all files."""
        for writer in self._months.values():
            writer.close()
        self._months.clear()
        if self._progressed is not None:
            self._progressed.close()
            self._progressed = None
        self._directory = ""

    def _open(self) -> Progressed:
        """The present generation's cursor; opened anew after a reindexing."""
        directory = self._generations.ensure()
        if directory != self._directory or self._progressed is None:
            self.close()
            self._progressed = Progressed(directory)
            self._directory = directory
        return self._progressed

    def _month(self, month: str) -> MonthWriter:
        writer = self._months.pop(month, None)
        if writer is None:
            writer = MonthWriter(month_path(self._directory, month))
        self._months[month] = writer  # The one used last stands last.
        while len(self._months) > _OPEN_MONTHS:
            self._months.pop(next(iter(self._months))).close()
        return writer

    def _apply_month(self, month: str, events: Sequence[Event], gone: set[tuple[str, str]]) -> None:
        if not events and not os.path.exists(month_path(self._directory, month)):
            return
        writer = self._month(month)
        with writer.writing():
            for event in events:
                if _key(event) not in gone:
                    self._take(writer, event)
            forgotten = [writer.forget(*key) for key in gone if _month(key[1]) == month]
        if any(forgotten):
            writer.shrink_log()

    def _take(self, writer: MonthWriter, event: Event) -> None:
        if isinstance(event.body, JobIdentity):
            writer.identify(identified(event.cluster, event.body, event.id))
        elif isinstance(event.body, JobScript) and event.body.script is not None:
            if writer.has_use(event.cluster, event.key):
                return
            kept = event.body.script
            digest = bytes.fromhex(kept.sha256)
            number = writer.knows(digest)
            if not number:
                number = writer.add_script(digest, self._bytes(event, event.body))
            writer.add_use(spooled(event, event.body, number))

    def _bytes(self, event: Event, body: JobScript) -> bytes:
        try:
            script = self._contents.read(event.cluster, event.key, body, "script")
        except NotArchived as error:
            raise Rejected(f"the script of {event.key} is gone: {error}", event) from error
        assert script is not None, "it was looked at"
        return script


def spooled(event: Event, body: JobScript, script: int) -> Use:
    """The use that a job.script event tells of, its owner unknown."""
    return Use(
        cluster=event.cluster,
        key=event.key,
        job_id=body.job_id,
        at=max(0, body.spool_mtime_ns // 1000),
        name=body.claimed_name,
        event=event.id,
        script=script,
    )


def identified(cluster: str, body: JobIdentity, event: int) -> Use:
    """What a job.identity event tells of a use."""
    record = body.record
    return Use(
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


def spool_time(key: str) -> int:
    """The time in the spool that a script's key tells, microseconds since the epoch.

    Raises:
        ValueError: It is not a script's key.
    """
    kind, _, rest = key.partition(":")
    nanoseconds = int(rest.rpartition(":")[2])
    if kind != "script" or not 0 <= nanoseconds < _LONGEST_KEY_NS:
        raise ValueError(f"{key!r} is not the key of a script")
    return nanoseconds // 1000


def _month(key: str) -> str:
    return month_of(spool_time(key))


def _key(event: Event) -> tuple[str, str]:
    key = event.body.script_key if isinstance(event.body, JobIdentity) else event.key
    return event.cluster, key


def _by_month(events: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event.body, ArchivePurge):
            continue
        try:
            month = _month(_key(event)[1])
        except ValueError as error:
            raise Rejected(str(error), event) from error
        found.setdefault(month, []).append(event)
    return found


def _purged(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    found = []
    for event in events:
        # A purge of one sink is that sink's own affair.
        if isinstance(event.body, ArchivePurge) and not event.body.sink:
            for key in event.body.script_keys:
                try:
                    spool_time(key)
                except ValueError as error:
                    raise Rejected(str(error), event) from error
                found.append((event.cluster, key, event.id))
    return found


__all__ = ["Catalogue", "CatalogueUnavailable", "identified", "spool_time", "spooled"]
