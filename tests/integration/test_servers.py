"""Servers for other tests: they start, keep their data, and stop."""

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
from job_submission import wait_until

from packages.wheels import SERVERS, locked, locked_set
from servers.kafka import Kafka
from servers.search import Elasticsearch, OpenSearch, SearchServer
from servers.server import DidNotStart

BIG = b"x" * 4_000_000


def sent(kafka: Kafka, topic: str, value: bytes) -> str:
    """Send a message; return the broker's error if it rejects it."""
    from confluent_kafka import Producer

    reasons = []
    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "enable.idempotence": True,
            "message.max.bytes": 8 << 20,
        }
    )
    producer.produce(
        topic, value, on_delivery=lambda error, _: reasons.append(error.name() if error else "")
    )
    assert producer.flush(60) == 0
    return reasons[0]


def received(kafka: Kafka, topic: str) -> bytes:
    """Return the first message of a topic."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": str(uuid.uuid4()),
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(60)
        assert message is not None
        assert message.error() is None
        value = message.value()
        assert isinstance(value, bytes)
        return value
    finally:
        consumer.close()


def test_kafka_keeps_messages_over_a_kill(kafka: Kafka) -> None:
    kafka.create_topic("kept")
    assert sent(kafka, "kept", b"one") == ""
    before = kafka.bootstrap, kafka.pid
    kafka.kill()
    kafka.start()
    assert (kafka.bootstrap, kafka.pid == before[1]) == (before[0], False)
    assert received(kafka, "kept") == b"one"


def test_kafka_refuses_large_messages_unless_told_otherwise(kafka: Kafka) -> None:
    kafka.create_topic("narrow")
    kafka.create_topic("wide", max_message_bytes=str(8 << 20))
    assert sent(kafka, "narrow", BIG) == "MSG_SIZE_TOO_LARGE"
    assert sent(kafka, "wide", BIG) == ""
    assert received(kafka, "wide") == BIG


def test_search_servers_keep_documents_over_a_kill(search_server: SearchServer) -> None:
    status, _ = search_server.request("PUT", "/kept/_create/1", {"text": "one"})
    assert status == 201
    assert search_server.request("PUT", "/kept/_create/1", {"text": "two"})[0] == 409
    url = search_server.url
    search_server.kill()
    with pytest.raises(OSError, match="refused"):
        search_server.request("GET", "/")
    search_server.start()
    assert search_server.url == url
    assert search_server.documents("kept") == {"1": {"text": "one"}}
    version = search_server.request("GET", "/")[1]["version"]["number"]
    assert version.startswith(f"{search_server.major}.")


@pytest.mark.search
@pytest.mark.servers
@pytest.mark.parametrize("kind", ["elasticsearch", "opensearch"])
def test_search_servers_can_be_made_to_refuse(
    kind: str, majors: dict[str, int], tmp_path: Path
) -> None:
    limits = {"indexing_pressure.memory.limit": "200kb", "http.max_content_length": "300kb"}
    kinds: dict[str, type[Elasticsearch | OpenSearch]] = {
        "elasticsearch": Elasticsearch,
        "opensearch": OpenSearch,
    }
    with kinds[kind](majors[kind], tmp_path, limits) as server:
        assert server.request("PUT", "/i/_doc/1", {"text": "x" * 1_000})[0] == 201
        assert server.request("PUT", "/i/_doc/2", {"text": "x" * 250_000})[0] == 429
        assert server.request("PUT", "/i/_doc/3", {"text": "x" * 400_000})[0] == 413
        assert list(server.documents("i")) == ["1"]


HOLDER = """
    import sys, time
    from pathlib import Path
    from servers.search import OpenSearch
    server = OpenSearch(3, Path(sys.argv[1]))
    server.start()
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.servers
def test_no_server_outlives_the_tests(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=20)
    wait_until(lambda: not has_command(pid), 20)


def has_command(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.servers
def test_the_log_is_shown_where_a_server_does_not_come_up(tmp_path: Path) -> None:
    server = OpenSearch(3, tmp_path, {"no.such.setting": "1"})
    with pytest.raises(DidNotStart, match=r"no\.such\.setting"):
        server.start()
    assert server.pid == 0


def test_a_server_that_stands_still_answers_later(search_server: SearchServer) -> None:
    search_server.pause()
    try:
        with pytest.raises(TimeoutError):
            search_server.request("GET", "/", timeout_s=0.5)
    finally:
        search_server.resume()
    assert search_server.request("GET", "/")[0] == 200


@pytest.mark.servers
def test_the_servers_lock_file_holds_what_they_take() -> None:
    assert {name for name, _ in locked(SERVERS)} == locked_set(SERVERS)
