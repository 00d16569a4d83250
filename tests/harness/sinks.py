"""Remote sinks: a Site with one, fed from a real journal, and its scripted destination."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness import archive
from harness.events import NOVEMBER, NOVEMBER_NS, make_event
from harness.journal import JournaledSite
from harness.site import ADA, ROOT
from steward.archive.remote.destination import ArchivedDocument, RefusedDocument
from steward.archive.remote.sink import RemoteSink
from steward.archive.requests import ResendReply, SinkLine
from steward.archive.settings import IDENTITY_WAIT_S, FilesSinkSettings
from steward.core.access import Caller
from steward.core.config import ArchiveSettings
from steward.core.errors import Unavailable
from steward.core.events import ARCHIVE_RESEND, ArchiveResend, Event, ResentScript
from steward.core.script_stores import STATE_STORE
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.slurm.settings import ClusterSettings


class Elsewhere:
    """A destination that stores documents in memory; it can be away, and refuse jobs.

    Attributes:
        sent: Every document that it accepted, in order.
        expired: Limit of every request to expire older documents.
        batches: Number of documents in each batch.
    """

    def __init__(self) -> None:
        self.is_away = False
        self.refuses: set[int] = set()
        self.sent: list[ArchivedDocument] = []
        self.expired: list[datetime] = []
        self.batches: list[int] = []

    def send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        self._answer()
        self.batches.append(len(documents))
        self.sent += [document for document in documents if document.job_id not in self.refuses]
        return [
            RefusedDocument(document=document, why=f"job {document.job_id} is not taken")
            for document in documents
            if document.job_id in self.refuses
        ]

    def expire(self, before: datetime) -> None:
        self._answer()
        self.expired.append(before)

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        if self.is_away:
            raise Unavailable("the other end is away")

    def users(self) -> list[str]:
        """Return the user of each document, "" if it has no identity."""
        identities = [document.identity for document in self.sent]
        return [identity.record.user if identity else "" for identity in identities]


class RemoteSite(JournaledSite):
    """A Site of a cluster ``alpha`` with a closed files sink and an open remote sink ``there``.

    Attributes:
        elsewhere: Destination of ``there``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        slurm: bool = True,
        identity_wait_s: float = IDENTITY_WAIT_S,
        **sink: Any,
    ) -> None:
        self.identity_wait_s = identity_wait_s
        sinks: dict[str, Any] = {
            "files": FilesSinkSettings(path=str(directory / "archive")),
            "there": KafkaSinkSettings(broker=KafkaSettings(servers=("k:1",)), **sink),
        }
        clusters = {"alpha": ClusterSettings(slurm=slurm, spool="/spool")}
        super().__init__(directory, clusters=clusters, archive=ArchiveSettings(sink=sinks))
        archive.open_sink(self).close()
        self.elsewhere = Elsewhere()
        self.now = datetime.now(UTC) + timedelta(seconds=1)
        self.open(lambda _site: self._open_sink())

    def _open_sink(self) -> RemoteSink:
        stores, elsewhere = self.stores, self.elsewhere
        return RemoteSink(
            *(self.settings, "there", stores, lambda: elsewhere),
            batch_bytes=1 << 20,
            identity_wait_s=self.identity_wait_s,
        )

    @property
    def sink(self) -> RemoteSink:
        return self.consumer(RemoteSink)

    def turn(self, turns: int = 20) -> None:
        """Feed the sink ``there``, with a minute between turns."""
        for _ in range(turns):
            self.clock.now_s += 60.0
            self.feeds["archive.there"].run_turn()

    def submit(
        self,
        job_id: int,
        script: bytes = archive.SCRIPT,
        environment: bytes | None = archive.ENVIRONMENT,
        *,
        append: bool = True,
        mtime_ns: int = 0,
    ) -> Event:
        """Write a script's bytes to the store and append its job.script, unless told not to."""
        fields: dict[str, Any] = {"environment": environment, "store": STATE_STORE, "name": ""}
        mtime_ns = mtime_ns or NOVEMBER_NS + job_id
        event = archive.script(self, job_id, script, mtime_ns=mtime_ns, **fields)
        if append:
            self.append([event])
        return event

    def job(self, job_id: int, script: bytes = archive.SCRIPT, *, who: Caller = ADA) -> Event:
        """Append a job.script and the job.seen of its job."""
        event = self.submit(job_id, script)
        seen = archive.seen(job_id, NOVEMBER, who=who, state="RUNNING", batch=True)
        self.append([seen])
        return event

    def identify(self, script: Event, user: str = "ada", why: str = "bound") -> None:
        self.append([archive.identity(script, user=user, why=why)])

    def purge(self, *scripts: Event, sink: str = "") -> None:
        self.append([archive.purge(*scripts, sink=sink)])

    def resend(self, *scripts: Event, sink: str = "there") -> None:
        resent = [
            ResentScript(
                script_key=script.key, script=script.body, identity=archive.identity(script).body
            )
            for script in scripts
        ]
        body = ArchiveResend(sink=sink, scripts=tuple(resent))
        key = f"resend:{self.writer.head()}"
        self.append([make_event(ARCHIVE_RESEND, key, body, cluster="alpha")])

    def trim(self) -> None:
        """Trim the journal's events for ``there``."""
        self.writer.trim(self.reader.read(0, self.sink.kinds, 1000)[0])

    def passed(self) -> int:
        """Return the position of the consumer of ``there``, up to which the journal may trim."""
        consumers = self.reader.list_consumers()
        (status,) = [consumer for consumer in consumers if consumer.name == self.sink.name]
        return status.position

    def ask(self, name: str, asker: Caller = ROOT, /, **request: Any) -> Any:
        self.now += timedelta(milliseconds=1)  # no two orders have the same time
        return super().ask(name, asker, **request)

    def order(self, **request: Any) -> ResendReply:
        """Order a resend, by default to ``there``; return the reply."""
        *_, answer = self.ask("archive.resend", **{"sink": "there", **request})
        assert isinstance(answer, ResendReply)
        return answer

    def sinks(self) -> dict[str, SinkLine]:
        """Return the status of each sink, by name."""
        return {line.name: line for line in self.ask("archive.sinks").sinks}

    def sent_ids(self) -> list[int]:
        """Return the job ids of documents sent to ``there``, in order; negative for a purge."""
        return [
            document.job_id * (-1 if document.deleted else 1) for document in self.elsewhere.sent
        ]
