"""Disordered topics: early, duplicate and oversized messages, and a re-created topic."""

import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from file_tree import files_below
from job_submission import wait_until
from kafka_consumer import Consumer, Source
from kafka_jobs import VERSION, Topic, document, ended, identity

from servers.kafka import Kafka
from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import JOB_SCRIPT, Event
from steward.core.journal import JournalError
from steward.extensions.kafka.messages import MAX_SCRIPT_MESSAGE_BYTES, encode_script_message

pytestmark = pytest.mark.servers


@pytest.fixture
def topic(kafka: Kafka) -> Topic:
    return Topic(kafka, partitions=2, max_message_bytes="16777216")


@pytest.fixture
def consumer(topic: Topic, tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(topic, tmp_path)
    yield consumer
    consumer.stop(signal.SIGKILL)


def send(topic: Topic, *values: bytes, partition: int = 0) -> None:
    """Send a message that no destination of Steward's would send there."""
    from confluent_kafka import Producer

    of = {"bootstrap.servers": topic.kafka.bootstrap, "compression.type": "zstd"}
    producer = Producer({**of, "message.max.bytes": 100_000_000})
    for value in values:
        producer.produce(topic.name, value, partition=partition)
    assert producer.flush(60) == 0


def purge_of(script: ArchivedDocument) -> bytes:
    version = script.version + 9
    return encode_script_message(
        ArchivedDocument(cluster=script.cluster, key=script.key, version=version, deleted=True)
    )


def test_a_purge_that_overtakes_its_script_counts(topic: Topic, consumer: Consumer) -> None:
    first, second = (document(job, b"zq-secret", identity=ended(job)) for job in (1, 2))
    send(topic, purge_of(first), partition=1)
    consumer.once()
    send(topic, encode_script_message(first), purge_of(second), encode_script_message(second))
    consumer.once()
    send(topic, encode_script_message(document(3, b"three", identity=ended(3))))
    consumer.once()
    assert consumer.files() == {3: b"three"}
    jobs = consumer.jobs()
    assert [jobs["hpc1", job]["script_key"] for job in (1, 2)] == ["", ""]
    assert [jobs["hpc1", job]["name"] for job in (1, 2)] == ["", ""]
    assert consumer.ask("verify")["problems"] == []
    below = files_below(consumer.archive)
    assert not any(b"zq-secret" in path.read_bytes() for path in below)


def test_other_bytes_of_one_script_do_not_overwrite_the_first(
    topic: Topic, consumer: Consumer
) -> None:
    old, new = b"#!/bin/sh\nAAAA\n", b"#!/bin/sh\nBBBB\n"
    later = document(1, new, version=VERSION + 5, identity=ended(1))
    send(
        topic,
        encode_script_message(document(1, old, identity=ended(1))),
        encode_script_message(later),
    )
    send(topic, encode_script_message(document(2, old, identity=ended(2))))
    consumer.once()
    send(topic, encode_script_message(document(2, new, version=VERSION + 5, identity=ended(2))))
    consumer.once()
    assert consumer.files() == {1: new, 2: old}
    assert consumer.ask("verify")["problems"] == []


def test_a_message_of_much_in_little_does_not_stall_the_rest(
    topic: Topic, consumer: Consumer
) -> None:
    names = ("user", "name", "submit_line", "command", "work_dir", "stdin", "stdout", "stderr")
    much = dict.fromkeys((*names, "comment", "admin_comment"), "\x01" * (1 << 20))
    # Two documents for each job: of its first run, and of its last.
    most = {field: text[: 1 << 17] for field, text in much.items()}
    large = encode_script_message(document(2, b"large", identity=identity(2, restarts=1, **most)))
    largest = large
    for field, text in most.items():
        # As an encoder without our limit makes it.
        written, more = (f'"{field}":"' + "\\u0001" * len(one) for one in (text, much[field]))
        largest = largest.replace(written.encode(), more.encode())
    assert 60_000_000 < len(largest) <= MAX_SCRIPT_MESSAGE_BYTES
    send(topic, largest, large, encode_script_message(document(3, b"good", identity=ended(3))))
    consumer.start()
    wait_until(lambda: set(consumer.files()) == {2, 3}, 60.0)
    consumer.stop()
    assert "skips the message at offset 0 of partition 0" in consumer.log_path.read_text()


class Refusing(Source):
    """Member of a group whose journal never accepts events about job 2."""

    def append(self, events: Sequence[Event]) -> None:
        if any(event.key.startswith("script:2:") for event in events):
            raise JournalError("too large")
        super().append(events)


def test_a_message_that_the_journal_refuses_is_passed_over(topic: Topic, tmp_path: Path) -> None:
    send(topic, *(encode_script_message(document(job, b"x")) for job in (1, 2, 3)))
    consumer = Consumer(topic, tmp_path)
    member = Refusing(topic, consumer.group, tmp_path / "store")
    wait_until(lambda: sum(consumer.committed().values()) == 3, 30.0)
    member.end()
    assert [event.body.job_id for event in member.events if event.kind == JOB_SCRIPT] == [1, 3]
    assert (member.source.imported_count, member.source.refused) == (2, 1)
    names = {path.name.split(".")[1] for path in (tmp_path / "store").iterdir()}
    assert names == {"1", "3"}


def test_a_topic_made_anew_is_taken_in_from_its_beginning(topic: Topic, tmp_path: Path) -> None:
    send(topic, *(encode_script_message(document(job, b"old")) for job in range(1, 101)))
    member = Source(topic, str(uuid.uuid4()), tmp_path, check_every_s=0.5)
    wait_until(lambda: len(set(member.scripts())) == 100, 30.0)
    admin = topic.kafka.admin()
    admin.delete_topics([topic.name], operation_timeout=20)[topic.name].result(20)
    topic.kafka.create_topic(topic.name, 2)
    send(topic, *(encode_script_message(document(job, b"new")) for job in range(101, 401)))
    wait_until(lambda: len(set(member.scripts())) == 400, 60.0)
    member.end()


@pytest.mark.parametrize(("topic_id", "taken"), [("of another", 9), ("", 5)])
def test_an_offset_that_was_committed_in_another_topic_does_not_count(
    topic: Topic, tmp_path: Path, topic_id: str, taken: int
) -> None:
    from confluent_kafka import Consumer as Client
    from confluent_kafka import TopicPartition

    send(topic, *(encode_script_message(document(job, b"x")) for job in range(1, 10)))
    consumer = Consumer(topic, tmp_path)
    client = Client({"bootstrap.servers": topic.kafka.bootstrap, "group.id": consumer.group})
    client.commit(offsets=[TopicPartition(topic.name, 0, 4, topic_id)], asynchronous=False)
    client.close()
    member = Source(topic, consumer.group, tmp_path / "store")
    wait_until(lambda: consumer.committed()[0] == 9, 30.0)
    member.end()
    assert len(member.scripts()) == taken
