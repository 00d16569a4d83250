"""A small site for the archive's tests: settings, a store, a sink, and events by hand."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from builders import Clock

from steward.archive.files import acl
from steward.archive.files.manifest import facts
from steward.archive.files.owners import user_name
from steward.archive.files.records import Records
from steward.archive.files.sink import FilesSink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_IDENTITY,
    JOB_SCRIPT,
    ArchivePurge,
    Event,
    JobIdentity,
    JobScript,
)
from steward.core.incoming import Store, Stores, kept_filename, stores_of
from steward.core.records import JobRecord
from steward.slurm.settings import ClusterSettings

NOON = int(datetime(2026, 3, 5, 12, 0, tzinfo=UTC).timestamp()) * 10**9
ENVIRONMENT = b"\x01\0\0\0HOME=/home/ada\0"
SCRIPT = b"#!/bin/sh\nhostname\n"
DAY = "alpha/ada/2026/03/05"


class Site:
    """One sink called ``files`` on one cluster called ``alpha``."""

    def __init__(
        self,
        directory: Path,
        *,
        slurm: bool = True,
        root: Path | None = None,
        page_rows: int = 200,
        **sink: Any,
    ) -> None:
        self.directory = directory
        self.root = root or directory / "archive"
        self.state = directory / "state"
        self.state.mkdir(exist_ok=True)
        self.settings = Settings(
            state_dir=str(self.state),
            cluster={"alpha": ClusterSettings(slurm=slurm, timezone="UTC")},
            archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(self.root), **sink)}),
        )
        self.stores: Stores = stores_of(self.settings)
        self.clock = Clock()
        self.names: dict[int, str] | None = None
        """Of uids, by now; the machine's own where None."""
        self._page_rows = page_rows
        self.reopen()
        self.appended: list[Event] = []
        self.position = 0

    def store(self, name: str = "archive.files") -> Store:
        if name == "archive.files":
            self.sink.prepare()
        return self.stores.get(name)

    def script(
        self,
        job_id: int,
        data: bytes = b"#!/bin/sh\nhostname\n",
        *,
        environment: bytes | None = ENVIRONMENT,
        mtime_ns: int = NOON,
        name: str = "claim",
        store: str = "archive.files",
    ) -> Event:
        """Bytes written to the store, and their event."""
        there = self.store(store)
        kept = there.write(kept_filename("alpha", job_id, mtime_ns, len(data), "script"), data)
        kept_environment = None
        if environment is not None:
            filename = kept_filename("alpha", job_id, mtime_ns, len(environment), "env")
            kept_environment = there.write(filename, environment)
        there.sync()
        return self.event(
            JOB_SCRIPT,
            f"script:{job_id}:{mtime_ns}",
            JobScript(
                job_id=job_id,
                spool_mtime_ns=mtime_ns,
                script=kept,
                environment=kept_environment,
                store=store,
                claimed_name=name,
            ),
        )

    def identity(
        self,
        script: Event,
        uid: int | None = 4001,
        user: str = "ada",
        *,
        name: str = "run",
        why: str = "bound",
        **record: Any,
    ) -> Event:
        body = JobIdentity(
            script_key=script.key,
            job_id=script.body.job_id,
            first_submit=datetime.fromtimestamp(script.body.spool_mtime_ns / 1e9, UTC),
            record=JobRecord(job_id=script.body.job_id, name=name, uid=uid, user=user, **record),
            why=why,
        )
        return self.event(JOB_IDENTITY, f"identity:{script.key}:{why}:{uid}:{user}", body)

    def purge(self, *scripts: Event, sink: str = "", asked_by: str = "root") -> Event:
        keys = tuple(script.key for script in scripts)
        body = ArchivePurge(script_keys=keys, sink=sink, asked_by=asked_by)
        return self.event(ARCHIVE_PURGE, f"purge:{'+'.join(keys)}", body)

    def event(self, kind: str, key: str, body: Any) -> Event:
        now = datetime.now(UTC)
        return Event(
            kind=kind, cluster="alpha", key=key, at=now, seen_at=now, source="spool", body=body
        )

    def apply(self, *events: Event) -> None:
        self.position += len(events)
        self.sink.apply(events, self.position, self.append)

    def append(self, events: Sequence[Event]) -> None:
        self.appended.extend(events)

    def tick(self) -> float:
        return self.sink.tick(self.append)

    def reopen(self) -> None:
        """As after a crash: nothing is closed in order."""
        self.sink = FilesSink(
            self.settings,
            "files",
            self.stores,
            resolve=self._name_of,
            clock=self.clock,
            page_rows=self._page_rows,
        )

    def _name_of(self, uid: int) -> str:
        return user_name(uid) if self.names is None else self.names.get(uid, "")

    def rows(self, sql: str, sink: str = "files") -> list[Any]:
        """What a statement finds in a sink's database."""
        with closing(Records(self.settings, sink, reading=True)) as records:
            return records.query(sql)

    def has_acls(self) -> bool:
        """Whether the tree can have POSIX ACLs."""
        self.sink.prepare()
        fd = os.open(self.root, os.O_RDONLY)
        try:
            return acl.supported(fd)
        finally:
            os.close(fd)

    def files(self) -> dict[str, bytes]:
        """Every archived file, its path below the root and its bytes; no manifests."""
        found = {}
        for base, directories, names in os.walk(self.root):
            if base == str(self.root):
                directories[:] = [name for name in directories if not name.startswith(".")]
            for name in names:
                if name in {".steward-archive", ".steward-keeper"}:
                    continue
                path = os.path.join(base, name)
                relative = os.path.relpath(path, self.root)
                if name != "MANIFEST.jsonl":
                    found[relative] = Path(path).read_bytes()
        return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(site: Site, directory: str) -> list[tuple[str, str]]:
    data = (site.root / directory / "MANIFEST.jsonl").read_bytes()
    return [(fact.fact, fact.key) for fact in facts(data)]
