"""A remote sink fed from a real journal, and a destination that keeps what it is sent in a file."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from builders import Clock, environment_bytes

from steward.archive.files.sink import FilesSink
from steward.archive.remote.document import Document, Refusal
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.consumers import Feed
from steward.core.errors import Unavailable
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    ArchivePurge,
    ArchiveResend,
    Event,
    JobIdentity,
    JobScript,
    Resent,
    script_event,
)
from steward.core.incoming import STATE_STORE, kept_filename, stores_of
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import rows_of
from steward.core.records import JobRecord
from steward.daemon.once import DirectLink
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.slurm.settings import ClusterSettings

NOON_NS = 1_795_262_400 * 10**9
ENVIRONMENT = environment_bytes(b"HOME=/home/ada")


class Sent(msgspec.Struct):
    """One document as the file has it."""

    id: str
    version: int
    script: bytes | None
    environment: bytes | None
    user: str
    partial: bool
    deleted: bool
    corrects: bool


class Lines:
    """A destination on this machine: a line of JSON a document; it can be away, and refuse."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_away = False
        self.refuses: set[int] = set()
        self.batches: list[int] = []

    def send(self, documents: Sequence[Document]) -> list[Refusal]:
        if self.is_away:
            raise Unavailable("the other end is away")
        self.batches.append(len(documents))
        with self.path.open("ab") as out:
            for document in documents:
                if document.job_id not in self.refuses:
                    out.write(msgspec.json.encode(_sent(document)) + b"\n")
        return [
            Refusal(document=document, why=f"job {document.job_id} is not taken")
            for document in documents
            if document.job_id in self.refuses
        ]

    def expire(self, before: datetime) -> None:
        if self.is_away:
            raise Unavailable("the other end is away")
        with self.path.open("ab") as out:
            out.write(b'{"expire": "%s"}\n' % before.isoformat().encode())

    def close(self) -> None:
        pass

    def sent(self) -> list[Sent]:
        """All that came, in order."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Sent) for line in lines if b'"expire"' not in line]


def _sent(document: Document) -> Sent:
    return Sent(
        id=document.id,
        version=document.version,
        script=document.script,
        environment=document.environment,
        user=document.identity.record.user if document.identity else "",
        partial=document.partial,
        deleted=document.deleted,
        corrects=document.corrects,
    )


class RemoteSite:
    """A journal, a store, and the remote sink ``there`` behind its feed."""

    def __init__(self, directory: Path, *, slurm: bool = True, **sink: Any) -> None:
        self.settings = Settings(
            state_dir=str(directory / "state"),
            cluster={"alpha": ClusterSettings(slurm=slurm, spool="/spool")},
            archive=ArchiveSettings(
                sink={
                    "files": FilesSinkSettings(path=str(directory / "archive")),
                    "there": KafkaSinkSettings(broker=KafkaSettings(servers=("k:1",)), **sink),
                }
            ),
        )
        os.makedirs(self.settings.state_dir)
        self.stores = stores_of(self.settings)
        self.journal = Journal(self.settings.state_dir)
        self.reader = JournalReader(self.settings.state_dir)
        FilesSink(self.settings, "files", self.stores).close()
        self.lines = Lines(directory / "there.jsonl")
        self.clock = Clock()
        self.restart()

    def restart(self) -> None:
        """As after a crash: nothing is closed in order."""
        self.sink = RemoteSink(
            self.settings,
            "there",
            self.stores,
            lambda: self.lines,
            batch_bytes=1 << 20,
        )
        self.feed = Feed(self.sink, self.reader, DirectLink(self.journal), clock=self.clock)

    def run(self, turns: int = 20) -> None:
        """Feed until nothing is left to do now."""
        for _ in range(turns):
            self.clock.now_s += 60.0  # every back-off is over, and every tick due
            self.feed.turn()

    def submit(
        self,
        job_id: int,
        script: bytes = b"#!/bin/sh\n",
        environment: bytes | None = ENVIRONMENT,
        *,
        append: bool = True,
        mtime_ns: int = 0,
    ) -> Event:
        """Bytes written to the store, and their event appended."""
        store = self.stores.get(STATE_STORE)
        mtime_ns = mtime_ns or NOON_NS + job_id
        name = kept_filename("alpha", job_id, mtime_ns, len(script), "script")
        body = JobScript(
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            script=store.write(name, script),
            store=STATE_STORE,
        )
        if environment is not None:
            name = kept_filename("alpha", job_id, mtime_ns, len(environment), "env")
            kept = store.write(name, environment)
            body = msgspec.structs.replace(body, environment=kept)
        event = script_event("alpha", "spool", body)
        if append:
            self.append(event)
        return event

    def append(self, *events: Event) -> None:
        self.journal.append(rows_of(events))

    def identify(self, script: Event, user: str = "ada", why: str = "bound") -> Event:
        event = self.event(
            JOB_IDENTITY, f"identity:{script.key}:{user}:{why}", identity(script, user, why)
        )
        self.append(event)
        return event

    def purge(self, *scripts: Event, sink: str = "") -> None:
        keys = tuple(script.key for script in scripts)
        body = ArchivePurge(script_keys=keys, sink=sink)
        self.append(self.event(ARCHIVE_PURGE, f"purge:{keys}:{sink}", body))

    def resend(self, *scripts: Event, user: str = "ada", sink: str = "there") -> None:
        body = ArchiveResend(
            sink=sink,
            scripts=tuple(
                Resent(
                    script_key=script.key,
                    script=script.body,
                    identity=identity(script, user, "bound"),
                )
                for script in scripts
            ),
        )
        self.append(self.event(ARCHIVE_RESEND, f"resend:{self.journal.head()}", body))

    def event(self, kind: str, key: str, body: Any) -> Event:
        now = datetime.now(UTC)
        return Event(
            kind=kind, cluster="alpha", key=key, at=now, seen_at=now, source="test", body=body
        )

    def lose_bytes(self) -> None:
        """Empty the store, as trimming does when all have passed."""
        store = self.stores.get(STATE_STORE)
        store.unlink([name.filename for name in store.names()])

    def trim(self) -> None:
        """Have the journal let go of all that it has for a sink by now."""
        self.journal.trim(self.reader.read(0, self.sink.kinds, 1000)[0])

    def passed(self) -> int:
        """Up to where the journal may trim for this sink."""
        (status,) = [one for one in self.reader.consumers() if one.name == "archive.there"]
        return status.position


def identity(script: Event, user: str, why: str) -> JobIdentity:
    return JobIdentity(
        script_key=script.key,
        job_id=script.body.job_id,
        first_submit=datetime.fromtimestamp(script.body.spool_mtime_ns / 1e9, UTC),
        record=JobRecord(job_id=script.body.job_id, name="run", uid=4001, user=user),
        why=why,
    )
