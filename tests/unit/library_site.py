"""A whole archive for the tests of its actions: sink, jobs.db and catalogue, fed by hand."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from steward.archive.actions import ACTIONS
from steward.archive.catalog.consumer import Catalogue
from steward.archive.contents import contents_of
from steward.archive.files.sink import FilesSink
from steward.archive.library import Library
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Access, Asker, Standing
from steward.core.actions import Registry
from steward.core.config import ArchiveSettings, Settings
from steward.core.consumers import Consumer
from steward.core.events import JOB_SCRIPT, JOB_SEEN, Event, JobFacts, JobScript, Kept
from steward.core.incoming import kept_filename, stores_of
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED
from steward.jobs import JobsConsumer
from steward.slurm.settings import ClusterSettings

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
ENVIRONMENT = b"\x03\0\0\0HOME=/home/ada\0TEXT=a=b\nc\xff\0API_TOKEN=" + REDACTED + b"\0"

ROOT = Asker(uid=0, user="root")
ADA = Asker(uid=4001, user="ada")
BELA = Asker(uid=4002, user="bela")


class LibrarySite:
    """One cluster called ``alpha``, and everything that is fed from its journal."""

    def __init__(self, directory: Path, *, private: bool = False, **sink: Any) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.state.mkdir()
        self.settings = Settings(
            state_dir=str(self.state),
            cluster={"alpha": ClusterSettings(timezone="UTC")},
            archive=ArchiveSettings(
                sink={"files": FilesSinkSettings(path=str(directory / "archive"), **sink)}
            ),
        )
        self.stores = stores_of(self.settings)
        self.sink = FilesSink(self.settings, "files", self.stores)
        self.sink.prepare()
        self.jobs = JobsConsumer(self.settings)
        self.catalogue = Catalogue(
            str(self.state / "catalogue"), contents_of(self.settings, self.stores)
        )
        self.journal: list[Event] = []
        self.fed = {"sink": 0, "jobs": 0, "catalogue": 0}
        standing = Standing(private_data=frozenset({"jobs"} if private else ()))
        access = Access(self.settings.access, 0, lambda cluster: standing)
        self.library = Library(self.settings, access=access, order=self.append, now=lambda: NOW)
        self.registry = Registry(ACTIONS, {"archive": lambda: self.library})

    def append(self, new: Sequence[Event]) -> None:
        for event in new:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            self.journal.append(Event(**{**fields, "id": len(self.journal) + 1}))

    def feed(self) -> None:
        """Let every consumer put to use what is in the journal, until nothing comes any more."""
        consumers: dict[str, Consumer] = {
            "jobs": self.jobs,
            "sink": self.sink,
            "catalogue": self.catalogue,
        }
        while any(at < len(self.journal) for at in self.fed.values()):
            for name, consumer in consumers.items():
                upto = len(self.journal)
                news = self.journal[self.fed[name] : upto]
                wanted = [event for event in news if event.kind in consumer.kinds]
                if wanted:
                    consumer.apply(wanted, upto, self.append)
                self.fed[name] = upto

    def ask(self, action: str, asker: Asker, **request: Any) -> Any:
        """The answer to a request."""
        return self.registry.call(
            f"archive.{action}", asker, self.registry.decode(f"archive.{action}", request)
        )

    def stream(self, action: str, asker: Asker, **request: Any) -> tuple[list[Any], Any]:
        """The items of a stream, and its answer."""
        *items, answer = self.ask(action, asker, **request)
        return items, answer

    def job(
        self,
        job_id: int,
        script: bytes | None = b"#!/bin/sh\nhostname\n",
        *,
        who: Asker = ADA,
        ago: timedelta = timedelta(hours=1),
        environment: bytes | None = ENVIRONMENT,
        feed: bool = True,
        **record: Any,
    ) -> str:
        """A job that Slurm has shown, and its script; the key of that."""
        submit = NOW - ago
        key = ""
        if script is not None:
            key = self.script(job_id, script, submit, environment)
        shown = JobRecord(
            **{
                "job_id": job_id,
                "name": "run",
                "uid": who.uid,
                "user": who.user,
                "account": "physics",
                "partition": "long",
                "state": "COMPLETED",
                "submit": submit,
                "batch": script is not None or bool(record.get("array_job_id")),
                "submit_line": f"sbatch secret-of-{who.user}.sh",
                **record,
            }
        )
        self.append([self.event(JOB_SEEN, f"seen:{job_id}:{submit}", JobFacts(record=shown))])
        if feed:
            self.feed()
        return key

    def script(
        self, job_id: int, script: bytes, submit: datetime, environment: bytes | None
    ) -> str:
        mtime_ns = int(submit.timestamp()) * 10**9 + 17_000
        body = JobScript(
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            script=self.kept(job_id, mtime_ns, "script", script),
            environment=self.kept(job_id, mtime_ns, "env", environment)
            if environment is not None
            else None,
            store="archive.files",
            claimed_name="run",
            redacted=("API_TOKEN",) if environment is not None else (),
        )
        key = f"script:{job_id}:{mtime_ns}"
        self.append([self.event(JOB_SCRIPT, key, body)])
        return key

    def kept(self, job_id: int, mtime_ns: int, what: str, data: bytes) -> Kept:
        store = self.stores.get("archive.files")
        return store.write(kept_filename("alpha", job_id, mtime_ns, len(data), what), data)

    def trim(self) -> None:
        """Unlink the incoming bytes, as when every consumer has passed."""
        store = self.stores.get("archive.files")
        store.unlink([name.filename for name in store.names()])

    def event(self, kind: str, key: str, body: object) -> Event:
        return Event(
            kind=kind, cluster="alpha", key=key, at=NOW, seen_at=NOW, source="test", body=body
        )

    def close(self) -> None:
        self.library.close()
        self.sink.close()
        self.jobs.close()
        self.catalogue.close()
