"""Contents of servers: every document of an index, every message of a topic."""

import uuid
from collections import Counter
from typing import Any

import msgspec

from servers.kafka import Kafka
from servers.search import SearchServer

_PAGE = 5000


def documents_of(server: SearchServer, index: str) -> dict[str, dict[str, Any]]:
    """Return every document of an index or alias, by id; fail if an id is in two indices."""
    server.request("POST", f"/{index}/_refresh")
    status, answer = server.request(
        "POST",
        f"/{index}/_search?scroll=1m",
        {"size": _PAGE, "sort": ["_doc"], "_source": {"excludes": ["script*", "environment*"]}},
    )
    assert status == 200, answer
    found: dict[str, dict[str, Any]] = {}
    while hits := answer["hits"]["hits"]:
        for hit in hits:
            assert hit["_id"] not in found, f"{hit['_id']} is in two indices"
            found[hit["_id"]] = hit["_source"]
        status, answer = server.request(
            "POST", "/_search/scroll", {"scroll": "1m", "scroll_id": answer["_scroll_id"]}
        )
        assert status == 200, answer
    return found


def messages_of(kafka: Kafka, topic: str, timeout_s: float = 60.0) -> list[bytes]:
    """Return the value of every message of a topic, in the order of each partition."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": str(uuid.uuid4()),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions
        left = 0
        assigned = []
        for number in partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout_s)
            left += high - low
            assigned.append(TopicPartition(topic, number, low))
        consumer.assign(assigned)
        values: list[bytes] = []
        while len(values) < left:
            message = consumer.poll(timeout_s)
            assert message is not None, f"{len(values)} of {left} messages came"
            assert message.error() is None, message.error()
            values.append(message.value() or b"")
        return values
    finally:
        consumer.close()


def ids_of(messages: list[bytes]) -> Counter[str]:
    """Return how often each document is among messages in Steward's schema."""
    return Counter(msgspec.json.decode(message)["id"] for message in messages)
