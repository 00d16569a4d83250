"""A journal with everything that sinks need around it: jobs.db, an archive of files, an asker."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from library_site import ROOT
from remote_site import NOON_NS, RemoteSite

from steward.archive.actions import ACTIONS
from steward.archive.files.sink import FilesSink
from steward.archive.library import Library
from steward.archive.sink_answers import ResendAnswer, SinkLine
from steward.core.access import Access, Asker, Standing
from steward.core.actions import Registry
from steward.core.consumers import Consumer, Feed
from steward.core.events import JOB_SEEN, Event, JobFacts
from steward.core.records import JobRecord
from steward.daemon.once import DirectLink
from steward.jobs import JobsConsumer

SUBMIT = datetime.fromtimestamp(NOON_NS // 10**9, UTC)


class SinksSite(RemoteSite):
    """As a RemoteSite, with the sink ``files`` and jobs.db fed as well, and with the actions."""

    def __init__(self, directory: Path, **sink: Any) -> None:
        super().__init__(directory, **sink)
        files = FilesSink(self.settings, "files", self.stores)
        files.prepare()
        jobs = JobsConsumer(self.settings)
        self.others: dict[str, Feed] = {"jobs": self._feed(jobs), "files": self._feed(files)}
        access = Access(self.settings.access, 0, lambda cluster: Standing())
        self.library = Library(
            self.settings,
            access=access,
            order=lambda new: self.append(*new),
            refilled=self.journal.refilled,
            now=lambda: datetime.now(UTC) + timedelta(seconds=1),
        )
        self.registry = Registry(ACTIONS, {"archive": lambda: self.library})

    def _feed(self, consumer: Consumer) -> Feed:
        return Feed(consumer, self.reader, DirectLink(self.journal))

    def run_all(self, *only: str) -> None:
        """Feed all, or the named ones of jobs, files and there, until nothing is left to do."""
        for _ in range(3):
            for name, feed in self.others.items():
                if not only or name in only:
                    while feed.turn():
                        pass
            if not only or "there" in only:
                self.run(6)

    def job(self, job_id: int, script: bytes = b"#!/bin/sh\n", *, user: str = "ada") -> Event:
        """A script and what Slurm shows of its job."""
        event = self.submit(job_id, script)
        uid = {"ada": 4001, "bela": 4002}[user]
        shown = JobRecord(
            job_id=job_id,
            name="run",
            uid=uid,
            user=user,
            account="physics",
            state="RUNNING",
            submit=SUBMIT,
            batch=True,
        )
        self.append(self.event(JOB_SEEN, f"seen:{job_id}", JobFacts(record=shown)))
        return event

    def ask(self, name: str, asker: Asker = ROOT, **request: Any) -> Any:
        """The answer to a request, or the stream."""
        action = f"archive.{name}"
        return self.registry.call(action, asker, self.registry.decode(action, request))

    def order(self, **request: Any) -> ResendAnswer:
        """The answer to an order to send again, to ``there`` unless another is named."""
        *_, answer = self.ask("resend", **{"sink": "there", **request})
        assert isinstance(answer, ResendAnswer)
        return answer

    def sinks(self) -> dict[str, SinkLine]:
        """How the sinks stand."""
        return {line.name: line for line in self.ask("sinks").sinks}

    def sent_ids(self) -> list[int]:
        """Job ids of what came to ``there``, in order, with the sign of a purge."""
        return [
            int(one.id.split("/")[1].split(":")[0]) * (-1 if one.deleted else 1)
            for one in self.lines.sent()
        ]

    def filed(self) -> set[int]:
        """Jobs whose script is in the archive of files."""
        root = Path(self.settings.sink_path("files"))
        return {int(path.name.split("-")[0]) for path in root.rglob("[0-9]*.sh")}
