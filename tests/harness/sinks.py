"""A sink on another machine, fed from a real journal, and what it was sent."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness import archive
from harness.events import NOVEMBER, NOVEMBER_NS, make_event
from harness.journal import JournaledSite
from harness.site import ADA, ROOT
from steward.archive.remote.document import Document, Refusal
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.archive.sink_answers import ResendAnswer, SinkLine
from steward.core.access import Asker
from steward.core.config import ArchiveSettings
from steward.core.errors import Unavailable
from steward.core.events import ARCHIVE_RESEND, ArchiveResend, Event, Resent
from steward.core.incoming import STATE_STORE
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.slurm.settings import ClusterSettings


class Elsewhere:
    """A destination that keeps what it is sent; it can be away, and refuse jobs.

    Attributes:
        sent: Every document that it took, in order.
        expired: Every time that it was to expire documents before.
        batches: How many documents came at once.
    """

    def __init__(self) -> None:
        self.is_away = False
        self.refuses: set[int] = set()
        self.sent: list[Document] = []
        self.expired: list[datetime] = []
        self.batches: list[int] = []

    def send(self, documents: Sequence[Document]) -> list[Refusal]:
        self._answer()
        self.batches.append(len(documents))
        refused = [one for one in documents if one.job_id in self.refuses]
        self.sent += [one for one in documents if one.job_id not in self.refuses]
        return [Refusal(document=one, why=f"job {one.job_id} is not taken") for one in refused]

    def expire(self, before: datetime) -> None:
        self._answer()
        self.expired.append(before)

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        if self.is_away:
            raise Unavailable("the other end is away")

    def users(self) -> list[str]:
        """Whose each document was, "" for nobody's."""
        return [one.identity.record.user if one.identity else "" for one in self.sent]


class RemoteSite(JournaledSite):
    """A cluster ``alpha`` with a sink ``files``, which may be opened, and one ``there``, which is.

    Attributes:
        elsewhere: What ``there`` sends to.
    """

    def __init__(self, directory: Path, *, slurm: bool = True, **sink: Any) -> None:
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
        return RemoteSink(self.settings, "there", stores, lambda: elsewhere, batch_bytes=1 << 20)

    @property
    def sink(self) -> RemoteSink:
        return self.consumer(RemoteSink)

    def turn(self, turns: int = 20) -> None:
        """Feed ``there``."""
        for _ in range(turns):
            self.clock.now_s += 60.0
            self.feeds["archive.there"].turn()

    def submit(
        self,
        job_id: int,
        script: bytes = archive.SCRIPT,
        environment: bytes | None = archive.ENVIRONMENT,
        *,
        append: bool = True,
        mtime_ns: int = 0,
    ) -> Event:
        """Bytes written to the store, and their event appended."""
        given: dict[str, Any] = {"environment": environment, "store": STATE_STORE, "name": ""}
        mtime_ns = mtime_ns or NOVEMBER_NS + job_id
        event = archive.script(self, job_id, script, mtime_ns=mtime_ns, **given)
        if append:
            self.append([event])
        return event

    def job(self, job_id: int, script: bytes = archive.SCRIPT, *, who: Asker = ADA) -> Event:
        """A script and what Slurm shows of its job."""
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
            Resent(script_key=one.key, script=one.body, identity=archive.identity(one).body)
            for one in scripts
        ]
        body = ArchiveResend(sink=sink, scripts=tuple(resent))
        key = f"resend:{self.writer.head()}"
        self.append([make_event(ARCHIVE_RESEND, key, body, cluster="alpha")])

    def trim(self) -> None:
        """Have the journal let go of all that it has for ``there`` by now."""
        self.writer.trim(self.reader.read(0, self.sink.kinds, 1000)[0])

    def passed(self) -> int:
        """Up to where the journal may trim for ``there``."""
        (status,) = [one for one in self.reader.consumers() if one.name == self.sink.name]
        return status.position

    def ask(self, name: str, asker: Asker = ROOT, /, **request: Any) -> Any:
        self.now += timedelta(milliseconds=1)  # no order is given twice at one time
        return super().ask(name, asker, **request)

    def order(self, **request: Any) -> ResendAnswer:
        """The answer to an order to send again, to ``there`` unless another is named."""
        *_, answer = self.ask("archive.resend", **{"sink": "there", **request})
        assert isinstance(answer, ResendAnswer)
        return answer

    def sinks(self) -> dict[str, SinkLine]:
        """How the sinks stand."""
        return {line.name: line for line in self.ask("archive.sinks").sinks}

    def sent_ids(self) -> list[int]:
        """Job ids of what came to ``there``, in order, with the sign of a purge."""
        return [one.job_id * (-1 if one.deleted else 1) for one in self.elsewhere.sent]
