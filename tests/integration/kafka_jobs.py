"""Kafka messages of jobs as a sink sends them, and a topic for each test."""

import hashlib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sink_contents import messages_of

from servers.kafka import Kafka
from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import IncomingFile, JobIdentity, JobScript, make_script_key
from steward.core.records import JobRecord
from steward.extensions.kafka.destination import KafkaDestination
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings

SUBMIT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MTIME_NS = 1_772_366_400_123_456_789
"""Modification time of every script, a moment after SUBMIT."""
SECOND = 1_000_000
VERSION = MTIME_NS // 1000 + SECOND
UID = 4_000_001
"""Uid of no user."""


class Topic:
    """Topic for one test, and a destination that sends to it."""

    def __init__(self, kafka: Kafka, partitions: int = 1, **settings: str) -> None:
        self.name = f"t-{uuid.uuid4()}"
        self.kafka = kafka
        if partitions:
            kafka.create_topic(self.name, partitions, **settings)

    def broker(self, **settings: Any) -> KafkaSettings:
        fields: dict[str, Any] = {"servers": (self.kafka.bootstrap,)}
        return KafkaSettings(topic=self.name, **{**fields, **settings})

    def destination(
        self, broker: dict[str, Any] | None = None, *, timeout_s: float = 20.0, **settings: Any
    ) -> KafkaDestination:
        sink = KafkaSinkSettings(broker=self.broker(**broker or {}), **settings)
        return KafkaDestination(sink, timeout_s=timeout_s)

    def send(self, *documents: ArchivedDocument) -> None:
        to = self.destination()
        assert to.send(documents) == []
        to.close()

    def send_raw(self, values: Sequence[bytes]) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.kafka.bootstrap})
        for value in values:
            producer.produce(self.name, value)
        assert producer.flush(30) == 0

    def values(self) -> list[bytes]:
        return messages_of(self.kafka, self.name)


def kept(data: bytes | None) -> IncomingFile | None:
    if data is None:
        return None
    return IncomingFile(path="p", length=len(data), sha256=hashlib.sha256(data).hexdigest())


def document(
    job_id: int,
    script: bytes,
    *,
    cluster: str = "hpc1",
    version: int = VERSION,
    environment: bytes | None = None,
    **more: Any,
) -> ArchivedDocument:
    """Return a script message; unverified unless ``identity`` is given."""
    body = JobScript(
        job_id=job_id,
        spool_mtime_ns=MTIME_NS,
        script=kept(script),
        environment=kept(environment),
        claimed_name="claimed",
    )
    return ArchivedDocument(
        cluster=cluster,
        key=make_script_key(job_id, MTIME_NS),
        version=version,
        body=body,
        script=script,
        environment=environment,
        **more,
    )


def identity(job_id: int, why: str = "bound", **record: Any) -> JobIdentity:
    """Return the identity of a script."""
    fields: dict[str, Any] = {
        "uid": UID,
        "account": "acct",
        "name": f"job{job_id}",
        "submit": SUBMIT,
        "state": "RUNNING",
        "batch": True,
        **record,
    }
    return JobIdentity(
        script_key=make_script_key(job_id, MTIME_NS),
        job_id=job_id,
        first_submit=SUBMIT,
        record=JobRecord(job_id=job_id, **fields),
        why=why,
    )


def ended(job_id: int, **record: Any) -> JobIdentity:
    """Return the identity of a script whose job has ended."""
    end = SUBMIT + timedelta(hours=1)
    fields: dict[str, Any] = {"state": "COMPLETED", "start": SUBMIT, "end": end, "exit_code": 0}
    return identity(job_id, "ended", **{**fields, **record})
