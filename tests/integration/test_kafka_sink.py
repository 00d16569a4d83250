"""Scripts sent to a real Kafka: exact and acknowledged, or rejected with the setting to change."""

import os
import random
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import wait_until
from kafka_jobs import MTIME_NS, VERSION, Topic, document
from sink_contents import ids_of

from servers.kafka import Kafka
from steward.core.errors import Unavailable
from steward.extensions.kafka.destination import KafkaDestination
from steward.extensions.kafka.messages import SCHEMA, SArchiveMessage, decode_script_message
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings

pytestmark = pytest.mark.servers

SLURMS_LARGEST = 4 * 1024**2


@pytest.mark.parametrize("compression", ["zstd", "lz4", "gzip", "snappy", "none"])
def test_bytes_arrive_exactly_under_every_compression(kafka: Kafka, compression: str) -> None:
    topic = Topic(kafka)
    scripts = {1: b"", 2: bytes(range(256)) * 9, 3: "#!/bin/sh\necho \u00e9\n".encode(), 4: b"\0"}
    to = topic.destination(broker={"options": {"compression.type": compression}})
    assert to.send([document(job_id, script) for job_id, script in scripts.items()]) == []
    to.close()
    found = {m.job_id: m.script for m in map(decode_script_message, topic.values())}
    assert {job: file.content.data for job, file in found.items() if file and file.content} == (
        scripts
    )


def test_keys_headers_and_partitions(kafka: Kafka) -> None:
    from confluent_kafka import Consumer

    topic = Topic(kafka, partitions=6)
    to = topic.destination()
    to.send([document(job, b"x", version=version) for version in (1, 2, 3) for job in range(1, 40)])
    to.close()
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": str(uuid.uuid4()),
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic.name])
    seen: dict[Any, list[tuple[Any, Any]]] = {}
    for _ in range(3 * 39):
        message = consumer.poll(30.0)
        assert message is not None
        assert message.error() is None
        headers: Any = dict(message.headers() or ())
        assert headers["schema"] == SCHEMA.encode()
        seen.setdefault(message.key(), []).append((message.partition(), headers["version"]))
    consumer.close()
    assert set(seen) == {b"hpc1/%d" % job for job in range(1, 40)}
    for of_job in seen.values():
        assert [version for _, version in of_job] == [b"1", b"2", b"3"]
        assert len({partition for partition, _ in of_job}) == 1
    assert len({of_job[0][0] for of_job in seen.values()}) > 1


def test_a_script_that_the_topic_does_not_take_is_refused_alone(kafka: Kafka) -> None:
    topic = Topic(kafka)
    large = os.urandom(SLURMS_LARGEST)
    to = topic.destination()
    documents = [
        document(1, b"a"),
        document(2, large),
        document(3, b"c"),
        document(2, large, version=VERSION + 1),
    ]
    refusals = to.send(documents)
    assert [(r.document.job_id, r.document.version) for r in refusals] == [
        (2, VERSION),
        (2, VERSION + 1),
    ]
    assert "max.message.bytes" in refusals[0].why
    assert topic.name in refusals[0].why
    assert to.send([document(4, b"d")]) == []
    to.close()
    assert {decode_script_message(value).job_id for value in topic.values()} == {1, 3, 4}


def test_a_script_that_our_own_limit_does_not_take_is_refused(kafka: Kafka) -> None:
    topic = Topic(kafka)
    to = topic.destination(broker={"options": {"message.max.bytes": "100000"}})
    refusals = to.send([document(1, b"x" * 200_000), document(2, b"y")])
    to.close()
    assert [r.document.job_id for r in refusals] == [1]
    assert "message.max.bytes = 100000" in refusals[0].why
    assert [decode_script_message(value).job_id for value in topic.values()] == [2]


def test_slurms_largest_script_goes_where_the_topic_takes_it(kafka: Kafka) -> None:
    topic = Topic(kafka, max_message_bytes="16777216")
    scripts = {1: os.urandom(SLURMS_LARGEST), 2: b"\x01" * SLURMS_LARGEST}
    to = topic.destination()
    assert to.send([document(job, script) for job, script in scripts.items()]) == []
    to.close()
    found = {
        message.job_id: message.script for message in map(decode_script_message, topic.values())
    }
    assert {job: file.content.data for job, file in found.items() if file and file.content} == (
        scripts
    )


def test_small_scripts_are_not_refused_for_the_size_of_their_batch(kafka: Kafka) -> None:
    topic = Topic(kafka, max_message_bytes="60000")
    to = topic.destination(broker={"options": {"linger.ms": "500", "compression.type": "none"}})
    documents = [document(job, os.urandom(6000)) for job in range(1, 60)]
    assert to.send(documents) == []
    to.close()
    assert {decode_script_message(value).job_id for value in topic.values()} == set(range(1, 60))


def test_the_queue_is_bounded_and_its_fullness_waited_for(kafka: Kafka) -> None:
    topic = Topic(kafka, max_message_bytes="16777216")
    options = {"queue.buffering.max.messages": "3"}
    to = topic.destination(broker={"options": options})
    assert to.send([document(job, b"x") for job in range(1, 100)]) == []
    to.close()
    assert len(topic.values()) == 99


def test_a_purge_and_a_correction_without_bytes(kafka: Kafka) -> None:
    topic = Topic(kafka)
    to = topic.destination()
    gone = msgspec.structs.replace(document(1, b"x"), body=None, script=None, deleted=True)
    known = msgspec.structs.replace(document(2, b"x"), body=None, script=None, partial=True)
    assert to.send([gone, known]) == []
    to.close()
    first, second = map(decode_script_message, topic.values())
    assert (first.deleted, first.script) == (True, None)
    assert (second.partial, second.script) == (True, None)


def test_what_sarchive_sends(kafka: Kafka) -> None:
    topic = Topic(kafka)
    to = topic.destination(message="sarchive", environments=False)
    gone = msgspec.structs.replace(document(1, b"x"), body=None, script=None, deleted=True)
    assert to.send([document(1, b"#!/bin/sh\n", environment=b"\1\0\0\0A=1\0"), gone]) == []
    to.close()
    (value,) = topic.values()
    assert msgspec.json.decode(value, type=SArchiveMessage).environment is None
    assert list(msgspec.json.decode(value)) == list(SArchiveMessage.__struct_fields__)


def test_a_topic_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    with Kafka(tmp_path, {"auto.create.topics.enable": "false"}) as broker:
        topic = Topic(broker, partitions=0)
        to = topic.destination(timeout_s=12.0)
        with pytest.raises(Unavailable, match=r"kafka-topics\.sh .*--create") as raised:
            to.send([document(1, b"x")])
        assert topic.name in str(raised.value)
        broker.create_topic(topic.name)
        assert to.send([document(1, b"x")]) == []
        to.close()
        assert len(topic.values()) == 1


def test_brokers_that_are_away_are_named() -> None:
    settings = KafkaSettings(servers=("127.0.0.1:1",), topic="t")
    to = KafkaDestination(KafkaSinkSettings(broker=settings), timeout_s=1.0)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*(refused|timed out)"):
        to.send([document(1, b"x")])
    to.close()


def test_a_broker_that_stands_still_is_not_waited_for_for_ever(kafka: Kafka) -> None:
    topic = Topic(kafka)
    to = topic.destination(timeout_s=10.0)
    assert to.send([document(1, b"x")]) == []
    kafka.pause()
    try:
        with pytest.raises(Unavailable, match="timed out"):
            to.send([document(2, b"x")])
    finally:
        kafka.resume()

    def is_sent() -> bool:
        try:
            return to.send([document(2, b"x")]) == []
        except Unavailable:
            return False

    # The controller may have fenced the broker, which takes no messages until it is back.
    wait_until(is_sent)
    to.close()
    assert set(ids_of(topic.values())) == {f"hpc1/{job}:{MTIME_NS}" for job in (1, 2)}


def test_nothing_is_missing_after_the_broker_was_killed(tmp_path: Path) -> None:
    with Kafka(tmp_path) as broker:
        topic = Topic(broker, partitions=3)
        to = topic.destination(timeout_s=10.0)
        chance = random.Random(os.urandom(8))
        ending = threading.Event()

        def kill() -> None:
            for _ in range(2):
                ending.wait(chance.uniform(0.3, 1.0))
                broker.kill()
                broker.start()

        killer = threading.Thread(target=kill)
        killer.start()
        sent = 0
        while killer.is_alive() or sent < 2000:
            batch = [document(job, b"#!/bin/sh\n") for job in range(sent + 1, sent + 51)]
            try:
                assert to.send(batch) == []
            except Unavailable:
                time.sleep(0.1)
            else:
                sent += len(batch)
        killer.join()
        to.close()
        assert set(ids_of(topic.values())) == {
            f"hpc1/{job}:{MTIME_NS}" for job in range(1, sent + 1)
        }
