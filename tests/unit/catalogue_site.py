"""A small site for the catalogue's tests: a store of real files, and events by hand."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from steward.archive.catalog.consumer import Catalogue
from steward.archive.catalog.matching import Matcher
from steward.archive.catalog.month import Use
from steward.archive.catalog.search import Found, Searcher
from steward.archive.catalog.walking import Wanted
from steward.archive.contents import Contents
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchivePurge,
    Event,
    JobIdentity,
    JobScript,
)
from steward.core.incoming import Store, Stores, kept_filename
from steward.core.records import JobRecord

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 10**9 + moment.microsecond * 1000


class Site:
    """Where scripts come in and are searched for."""

    def __init__(self, root: Path) -> None:
        self.incoming = root / "incoming"
        self.directory = root / "catalogue"
        self.store = Store("state", str(self.incoming))
        self.store.prepare()
        self.catalogue = Catalogue(str(self.directory), Contents(Stores([self.store])))
        self.searcher = Searcher(str(self.directory))
        self.position = 0

    def event(self, kind: str, key: str, body: object, cluster: str = "one") -> Event:
        self.position += 1
        return Event(
            kind=kind,
            cluster=cluster,
            key=key,
            at=NOON,
            seen_at=NOON,
            source="test",
            body=body,
            id=self.position,
        )

    def script(
        self,
        job_id: int,
        data: bytes,
        at: datetime = NOON,
        cluster: str = "one",
        name: str = "job",
    ) -> Event:
        mtime_ns = nanoseconds(at)
        name_in_store = kept_filename(cluster, job_id, mtime_ns, len(data), "script")
        body = JobScript(
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            script=self.store.write(name_in_store, data),
            store="state",
            claimed_name=name,
        )
        return self.event(JOB_SCRIPT, f"script:{job_id}:{mtime_ns}", body, cluster)

    def identity(self, script: Event, uid: int, user: str, account: str = "physics") -> Event:
        body = JobIdentity(
            script_key=script.key,
            job_id=script.body.job_id,
            first_submit=NOON,
            record=JobRecord(
                job_id=script.body.job_id,
                uid=uid,
                user=user,
                account=account,
                name=script.body.claimed_name,
            ),
        )
        return self.event(JOB_IDENTITY, f"identity:{script.key}:{uid}", body, script.cluster)

    def purge(self, *scripts: Event, sink: str = "") -> Event:
        body = ArchivePurge(script_keys=tuple(script.key for script in scripts), sink=sink)
        return self.event(ARCHIVE_PURGE, f"purge:{self.position}", body, scripts[0].cluster)

    def take(self, *events: Event) -> None:
        self.catalogue.apply(events, self.position, lambda _: None)

    def keep(self, job_id: int, text: str | bytes, uid: int = 1001, user: str = "ada") -> Event:
        """One script with its identity; the higher the id, the later."""
        data = text if isinstance(text, bytes) else text.encode()
        script = self.script(job_id, data, NOON + timedelta(seconds=job_id))
        self.take(script, self.identity(script, uid, user))
        return script

    def hits(self, *terms: str, case: bool = False, words: bool = False) -> list[Found]:
        matcher = Matcher(terms, case=case, words=words)
        return self.searcher.page(matcher, Wanted(), anybody, limit=1000).hits

    def found(self, *terms: str, case: bool = False, words: bool = False) -> list[int]:
        return [hit.use.job_id for hit in self.hits(*terms, case=case, words=words)]


def anybody(use: Use) -> bool:
    return True


def everything_below(directory: Path) -> bytes:
    """All bytes of all files, to look for what should not be there."""
    parts: Sequence[bytes] = [
        Path(folder, name).read_bytes() for folder, _, names in os.walk(directory) for name in names
    ]
    return b"".join(parts)


__all__ = ["NOON", "Site", "anybody", "everything_below", "nanoseconds"]
