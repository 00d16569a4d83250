"""Kafka between Stewards: the receiver archives each script once, despite kills."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from job_submission import wait_until
from kafka_consumer import Consumer, Source, make_source
from kafka_jobs import SECOND, SUBMIT, UID, VERSION, Topic, document, ended, identity
from sink_contents import ids_of
from spool_daemon import Daemon, archived, chance_of, journalled, settings_in, submit

from servers.kafka import Kafka
from steward.core.config import ArchiveSettings
from steward.core.events import JOB_SCRIPT, Event
from steward.core.redaction import REDACTED
from steward.extensions.kafka.settings import ConsumeSettings, KafkaSinkSettings

pytestmark = pytest.mark.servers

ENVIRONMENT = b"\2\0\0\0HOME=/home/ada\0RAW=\xff\n=\0"


@pytest.fixture
def topic(kafka: Kafka) -> Topic:
    return Topic(kafka, partitions=3, max_message_bytes="16777216")


@pytest.fixture
def consumer(topic: Topic, tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(topic, tmp_path)
    yield consumer
    consumer.stop(signal.SIGKILL)


def eventually(found: Callable[[], bool]) -> None:
    wait_until(found, 45.0)


def test_two_clusters_feed_one_archive(topic: Topic, consumer: Consumer) -> None:
    script = b"#!/bin/sh\nsrun \xff gmx\n"
    topic.send(
        document(7, script, environment=ENVIRONMENT, identity=ended(7)),
        document(7, b"#!/bin/sh\nother\n", cluster="hpc2", identity=identity(7, uid=UID + 1)),
        document(8, b"#!/bin/sh\nnobody's\n", cluster="hpc2"),
    )
    assert "Archived 3 messages" in consumer.once()
    jobs = consumer.jobs()
    assert set(jobs) == {("hpc1", 7), ("hpc2", 7), ("hpc2", 8)}
    first = jobs["hpc1", 7]
    assert (first["name"], first["uid"], first["state"]) == ("job7", UID, "COMPLETED")
    assert first["verified"]
    assert first["submit"] == SUBMIT.isoformat().replace("+00:00", "Z")
    assert jobs["hpc2", 7]["uid"] == UID + 1
    assert not jobs["hpc2", 8]["verified"]
    shown = consumer.ask("show", "7", "-M", "hpc1")
    assert shown["content"]["encoding"] == "base64"
    assert shown["script"]["environment_length"] == len(ENVIRONMENT)
    names = [one["name"] for one in consumer.ask("env", "7", "-M", "hpc1")["variables"]]
    assert names == ["HOME", "RAW"]
    hits = consumer.ask("search", "gmx", "-S", "2026-01-01")["hits"]
    assert [(hit["job"]["cluster"], hit["job"]["job_id"]) for hit in hits] == [("hpc1", 7)]
    assert consumer.ask("verify")["problems"] == []
    assert sorted(consumer.committed().values()) != [0, 0, 0]


def test_slurms_largest_script_arrives(topic: Topic, consumer: Consumer) -> None:
    scripts = {1: os.urandom(4 << 20), 2: b"\x01" * (4 << 20), 3: b""}
    topic.send(*(document(job, script, identity=ended(job)) for job, script in scripts.items()))
    consumer.once()
    assert consumer.files() == scripts


def test_a_correction_and_a_purge_arrive(topic: Topic, consumer: Consumer) -> None:
    topic.send(
        document(1, b"one", version=VERSION),
        document(2, b"two", version=VERSION, identity=identity(2)),
        document(3, b"three", version=VERSION, identity=identity(3)),
    )
    consumer.once()
    assert {job: line["verified"] for (_, job), line in consumer.jobs().items()} == {
        1: False,
        2: True,
        3: True,
    }
    topic.send(
        document(1, b"one", version=VERSION + SECOND, identity=ended(1)),
        document(2, b"two", version=VERSION + 1, identity=identity(2, state="RUNNING")),
        document(2, b"two", version=VERSION + SECOND, identity=ended(2, state="FAILED")),
        document(2, b"two", version=VERSION, identity=identity(2, state="PENDING")),
        document(3, b"", version=VERSION + SECOND, deleted=True),
    )
    consumer.once()
    jobs = consumer.jobs()
    assert (jobs["hpc1", 1]["verified"], jobs["hpc1", 1]["state"]) == (True, "COMPLETED")
    assert jobs["hpc1", 2]["state"] == "FAILED"
    assert jobs["hpc1", 3]["script_key"] == ""
    assert consumer.files() == {1: b"one", 2: b"two"}
    assert not any(b"three" in data for data in bytes_below(consumer.archive))


def bytes_below(directory: Path) -> Iterator[bytes]:
    return (path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_a_requeued_job_has_its_first_submit_time(topic: Topic, consumer: Consumer) -> None:
    again = SUBMIT + timedelta(days=2)
    topic.send(document(5, b"x", identity=identity(5, submit=again, restarts=2)))
    consumer.once()
    (job,) = consumer.jobs().values()
    assert (job["verified"], job["restarts"]) == (True, 2)
    assert job["submit"] == SUBMIT.isoformat().replace("+00:00", "Z")


def test_a_secret_that_a_sender_left_in_is_taken_out(topic: Topic, consumer: Consumer) -> None:
    line = "sbatch --export=API_TOKEN=hunter2hunter2 x"
    secret = b"\1\0\0\0API_TOKEN=hunter2hunter2\0"
    topic.send(document(5, b"x", environment=secret, identity=identity(5, submit_line=line)))
    consumer.once()
    assert consumer.files("env") == {5: b"\1\0\0\0API_TOKEN=" + REDACTED + b"\0"}
    assert not any(b"hunter2" in data for data in bytes_below(consumer.archive))


def test_what_is_no_message_is_told_of_and_passed_over(topic: Topic, consumer: Consumer) -> None:
    good = document(5, b"x", identity=identity(5))
    topic.send(good)
    hostile = [b"", b"\xff", b"{}", b"[" * 100_000, b'{"schema":"steward.job/1"}', os.urandom(999)]
    topic.send_raw([*hostile, topic.values()[0].replace(b'"hpc1"', b'"../x"')])
    topic.send(document(6, b"y", identity=identity(6)))
    said = consumer.once()
    assert said.count("skips the message at offset") == len(hostile) + 1
    assert topic.name in said
    assert consumer.files() == {5: b"x", 6: b"y"}
    assert sum(consumer.committed().values()) == len(hostile) + 3


def test_only_the_clusters_that_are_wanted(topic: Topic, consumer: Consumer) -> None:
    topic.send(*(document(number, b"x", cluster=f"hpc{number}") for number in (1, 2, 3)))
    consumer.once("--clusters", "hpc1,hpc3")
    assert {cluster for cluster, _ in consumer.jobs()} == {"hpc1", "hpc3"}


def test_a_topic_that_is_not_there_is_an_error(kafka: Kafka, tmp_path: Path) -> None:
    consumer = Consumer(Topic(kafka, partitions=0), tmp_path)
    assert "kafka-topics.sh" in consumer.once(code=1)


def test_a_topic_read_again_from_its_beginning_adds_nothing(
    topic: Topic, consumer: Consumer
) -> None:
    topic.send(*(document(job, b"x", identity=ended(job)) for job in range(1, 30)))
    consumer.once()
    before = consumer.jobs()
    consumer.group = str(uuid.uuid4())
    consumer.once()
    assert consumer.jobs() == before
    assert len(consumer.files()) == 29


def test_killed_at_any_moment_it_loses_nothing_and_doubles_nothing(
    topic: Topic, tmp_path: Path
) -> None:
    chance = chance_of("STEWARD_KILL_SEED")
    scripts = {job: b"#!/bin/sh\n# %d\n" % job for job in range(1, 3001)}
    topic.send(*(document(job, script, identity=ended(job)) for job, script in scripts.items()))
    consumer = Consumer(topic, tmp_path)
    # Known to the group by name, it is given its partitions again at once.
    broker = topic.broker(options={"group.instance.id": "the one", "group.id": consumer.group})
    consume = {"all": ConsumeSettings(broker=broker)}
    settings = settings_in(tmp_path, cluster={}, consume=consume)
    consumer.place = ("--config", str(tmp_path / "steward.toml"))
    with Daemon(settings, tmp_path) as daemon:
        for goal in sorted(chance.randrange(len(scripts)) for _ in range(6)):
            daemon.wait(lambda goal=goal: len(journalled(settings)) >= goal)  # type: ignore[misc]
            time.sleep(chance.uniform(0.0, 0.2))
            daemon.kill()
            assert sum(consumer.committed().values()) <= len(journalled(settings))
            daemon.start()
        daemon.wait(lambda: daemon.is_quiet(len(scripts)), 60.0)
        daemon.wait(lambda: sum(consumer.committed().values()) == len(scripts))
        assert daemon.stop() == 0
    assert {job: files["sh"] for job, files in archived(settings).items()} == scripts
    assert len(consumer.jobs()) == len(scripts)
    found = consumer.ask("search", "sh", "-S", "2026-01-01", "--count", "--limit", "1")
    assert found["count"] == len(scripts)


def test_a_daemon_follows_the_topic_through_the_brokers_restart(tmp_path: Path) -> None:
    with Kafka(tmp_path / "kafka") as broker:
        topic = Topic(broker, partitions=3)
        consumer = Consumer(topic, tmp_path)
        consumer.start()
        try:
            topic.send(document(1, b"one", identity=ended(1)))
            eventually(lambda: consumer.files() == {1: b"one"})
            broker.kill()
            broker.start()
            topic.send(document(2, b"two", identity=ended(2)))
            eventually(lambda: consumer.files() == {1: b"one", 2: b"two"})
            eventually(lambda: sum(consumer.committed().values()) == 2)
            consumer.stop()
        finally:
            consumer.stop(signal.SIGKILL)


def test_an_empty_topic_is_soon_done_with(topic: Topic, consumer: Consumer) -> None:
    assert "Archived 0 messages" in consumer.once()


def test_what_a_daemon_sends_another_archive_has(
    topic: Topic, consumer: Consumer, tmp_path: Path
) -> None:
    home = tmp_path / "sender"
    home.mkdir()
    settings = settings_in(home)
    sinks = {**settings.archive.sink, "out": KafkaSinkSettings(broker=topic.broker())}
    settings = settings_in(home, archive=ArchiveSettings(sink=sinks))
    with Daemon(settings, home) as daemon:
        submit(home, range(1, 51))
        daemon.wait(lambda: daemon.is_quiet(50))
        daemon.wait(lambda: len(set(ids_of(topic.values()))) == 50)
        assert daemon.stop() == 0
    consumer.once()
    there = {job: (files["sh"], files["env"]) for job, files in archived(settings).items()}
    scripts, environments = consumer.files(), consumer.files("env")
    assert {job: (script, environments[job]) for job, script in scripts.items()} == there
    assert {cluster for cluster, _ in consumer.jobs()} == {"c1"}


def test_members_that_come_and_go_share_without_gap_or_double(topic: Topic, tmp_path: Path) -> None:
    group = str(uuid.uuid4())
    jobs = iter(range(1, 2001))
    sending = threading.Event()

    def send() -> None:
        for _ in range(40):
            topic.send(*(document(next(jobs), b"x") for _ in range(50)))
        sending.set()

    sender = threading.Thread(target=send)
    sender.start()
    members = [Source(topic, group, tmp_path / "0")]
    wait_until(lambda: bool(members[0].events), 30.0)
    for number in (1, 2):
        members.append(Source(topic, group, tmp_path / str(number)))
        wait_until(lambda: bool(members[-1].events) or sending.is_set(), 30.0)
    members[0].end()
    wait_until(lambda: len({key for one in members for key in one.scripts()}) == 2000, 60.0)
    for member in members[1:]:
        member.end()
    sender.join()
    taken = [key for member in members for key in member.scripts()]
    assert len(taken) == len(set(taken)) == 2000


def test_a_member_that_closes_while_it_is_assigned_partitions_ends_without_error(
    topic: Topic, tmp_path: Path
) -> None:
    from confluent_kafka import ConsumerGroupState

    group = str(uuid.uuid4())
    topic.send(document(1, b"x"))
    events: list[Event] = []
    source = make_source(topic, group, tmp_path, events.extend)
    assert not source.import_batch(lambda: None)

    def is_assigned() -> bool:
        admin = topic.kafka.admin()
        (described,) = admin.describe_consumer_groups([group], request_timeout=10).values()
        return bool(described.result(10).state == ConsumerGroupState.STABLE)

    # The client joins in the background; without a poll the assignment waits for its callback.
    eventually(is_assigned)
    time.sleep(1)
    source.close()
    assert events == []
    eventually(lambda: source.import_batch(lambda: None))
    source.close()
    assert [event.kind for event in events].count(JOB_SCRIPT) == 1


def test_a_member_whose_name_another_takes_waits_and_joins_again(
    topic: Topic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = str(uuid.uuid4())
    options = {"group.instance.id": "one"}
    first = Source(topic, group, tmp_path / "0", options=options)
    topic.send(document(1, b"x"))
    eventually(lambda: bool(first.scripts()))
    second = Source(topic, group, tmp_path / "1", options=options)
    eventually(lambda: "fenced" in caplog.text.lower())
    second.end()
    topic.send(document(2, b"x"))
    eventually(lambda: len(first.scripts() + second.scripts()) == 2)
    assert first.is_alive()
    first.end()


def test_what_is_captured_here_is_not_a_topics_to_say(topic: Topic, tmp_path: Path) -> None:
    topic.send(document(1, b"forged", cluster="mine"), document(2, b"x", cluster="theirs"))
    source = Source(topic, str(uuid.uuid4()), tmp_path, own="mine")
    wait_until(lambda: bool(source.events), 30.0)
    source.end()
    assert {event.cluster for event in source.events} == {"theirs"}
