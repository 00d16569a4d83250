"""Kafka source: consumes a topic that another Steward's Kafka sink fills ([consume.NAME]).

:class:`TopicRecreationGuard` with :class:`TopicIdLookup` detects a topic that was deleted and
recreated, and rewinds to its beginning. A group's offsets belong to a name: in a new topic of that
name they point into its middle, where librdkafka silently continues. So the topic's id (KIP-516,
brokers from 2.8) is requested now and then and written beside each committed offset; a consumer
that was stopped meanwhile finds out, too. Messages that are read twice do no harm.

:class:`KafkaSource` turns messages into events and stored bytes (``events.MessageConverter``). It
commits the consumer group's offsets only when both are durable here: after a crash the uncommitted
messages come again, and their keys make that harmless.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable
from typing import Any, Final, NamedTuple

from steward.core.consumers import Append
from steward.core.errors import StewardError, Unavailable
from steward.core.events import JOB_SCRIPT, Event
from steward.core.journal import JournalError
from steward.core.script_stores import IncomingStore, IncomingStores
from steward.core.waits import Backoff, Stop
from steward.extensions.kafka.client import KafkaConnection, KafkaUnavailable
from steward.extensions.kafka.events import MessageConverter
from steward.extensions.kafka.messages import MessageError, ScriptMessage, decode_script_message
from steward.extensions.kafka.settings import ConsumeSettings

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 30.0
"""Time between two requests for the topic's id, in seconds."""
_IDLE_TIMEOUT_S: Final = 20.0
"""Longest time that ``run_once`` waits for messages: a group waits 15 s for a killed member."""
_REQUEST_TIMEOUT_S: Final = 10.0
"""Time limit of a request to the brokers, in seconds."""


class TopicIdLookup:
    """Lookup of the topic's id, which changes when the topic is recreated.

    Args:
        connection: Access to the cluster, with the topic.
        interval_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(self, connection: KafkaConnection, interval_s: float) -> None:
        self._connection = connection
        self._interval_s = interval_s
        self._admin: Any = None
        self._future: Any = None
        self._next_request_at = 0.0

    def poll_topic_id(self, wait_s: float = 0.0) -> str:
        """Return the topic's id; "" where no new answer has arrived.

        Args:
            wait_s: How long to wait for the answer, in seconds; 0 to collect it in a later call.
        """
        now = time.monotonic()
        if self._future is None and (wait_s or now >= self._next_request_at):
            self._next_request_at = now + self._interval_s
            self._future = self._request_description()
        if self._future is None or not (wait_s or self._future.done()):
            return ""
        future, self._future = self._future, None
        try:
            topic_id = future.result(wait_s).topic_id
        except (self._connection.lib.KafkaException, TimeoutError) as error:
            # The poll for messages reports the problem; the id is requested again.
            log.debug("cannot read the id of %s: %s", self._connection.describe_topic(), error)
            return ""
        has_id = topic_id.get_most_significant_bits() or topic_id.get_least_significant_bits()
        return str(topic_id) if has_id else ""

    def _request_description(self) -> Any:
        """Request the topic's description; return the future."""
        from confluent_kafka.admin import AdminClient

        topic = self._connection.settings.topic
        if self._admin is None:
            # The consumer's own log reports problems; options of consumers do not apply to this
            # client.
            self._admin = AdminClient(self._connection.build_client_config({"log_level": 0}))
        topics = self._connection.lib.TopicCollection([topic])
        return self._admin.describe_topics(topics, request_timeout=_REQUEST_TIMEOUT_S)[topic]


class TopicRecreationGuard:
    """Guard against continuing at old offsets in a topic that was deleted and recreated.

    Args:
        name: Name of the source, for the log.
        connection: Access to the cluster, with the topic.
        check_every_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(
        self, name: str, connection: KafkaConnection, *, check_every_s: float = CHECK_EVERY_S
    ) -> None:
        self._name = name
        self._connection = connection
        self._id_lookup = TopicIdLookup(connection, check_every_s)
        self._rewind_partitions: set[int] = set()
        self.id = ""

    def check_offsets(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Check whether the committed offsets of new partitions belong to this topic id.

        Raises:
            KafkaUnavailable: The committed offsets cannot be read now.
        """
        lib = self._connection.lib
        assigned_partitions = list(partitions)
        self._rewind_partitions -= {partition.partition for partition in assigned_partitions}
        self.id = self.id or self._id_lookup.poll_topic_id(_REQUEST_TIMEOUT_S)
        if not self.id or not assigned_partitions:
            return
        try:
            committed = consumer.committed(assigned_partitions, timeout=_REQUEST_TIMEOUT_S)
        except lib.KafkaException as error:
            raise KafkaUnavailable(
                f"cannot read the position in {self._connection.describe_topic()}: "
                f"{self._connection.describe_error(error.args[0])}"
            ) from error
        # Offsets committed by other programs carry no topic id and are trusted.
        recreated = {one.partition for one in committed if one.metadata and one.metadata != self.id}
        if recreated:
            self._log_rewind()
        self._rewind_partitions |= recreated

    def detect_recreation(self, consumer: Any) -> None:
        """Detect a recreated topic and rewind its partitions; called between batches.

        Raises:
            KafkaUnavailable: The committed offsets cannot be read now.
        """
        topic_id = self._id_lookup.poll_topic_id()
        if topic_id and topic_id != self.id:
            previous_id, self.id = self.id, topic_id
            if previous_id:
                self._log_rewind()
                self._rewind_partitions |= {
                    assigned.partition for assigned in consumer.assignment()
                }
            else:
                self.check_offsets(consumer, consumer.assignment())
        lib, topic = self._connection.lib, self._connection.settings.topic
        for partition in sorted(self._rewind_partitions):
            try:
                consumer.seek(lib.TopicPartition(topic, partition, lib.OFFSET_BEGINNING))
            except lib.KafkaException as error:
                # The partition is not being fetched yet; the next turn tries again.
                log.debug("cannot seek in partition %d: %s", partition, error)
            else:
                self._rewind_partitions.discard(partition)

    def needs_rewind(self, partition: int) -> bool:
        """Return True if the partition is still to be rewound, so its messages come again."""
        return partition in self._rewind_partitions

    def _log_rewind(self) -> None:
        log.warning(
            "consume.%s reads topic %s from the beginning: it was deleted and created again",
            self._name,
            self._connection.describe_topic(),
        )


_POLL_S: Final = 0.5
_BATCH_MESSAGES: Final = 500
"""Most messages of one batch."""
_BATCH_BYTES: Final = 16 << 20
"""Size at which a batch ends, in bytes."""
_MAX_LOGGED_IN_A_ROW: Final = 20
"""Bad messages in a row that are logged singly; a topic full of them must not fill the disk."""


class _MessagePosition(NamedTuple):
    """Position of a message in the topic."""

    partition: int
    offset: int


class KafkaSource:
    """Source that imports one Kafka topic.

    Args:
        name: Name of the [consume.NAME] section.
        settings: That section.
        local_clusters: Clusters captured here; their messages are skipped unless ``clusters``
            names them.
        stores: Stores for script bytes, the preferred one first.
        converter: Converts messages to events.
        append: Appends events durably; may block.
        once: Whether to stop at the present end of the topic.
        check_every_s: Time between two checks for a recreated topic, in seconds.
    """

    def __init__(
        self,
        name: str,
        settings: ConsumeSettings,
        local_clusters: Container[str],
        stores: IncomingStores,
        converter: MessageConverter,
        append: Append,
        *,
        once: bool = False,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        self.imported_count = 0
        self.refused = 0
        self._name = name
        self._settings = settings
        self._local_clusters = local_clusters
        self._stores = stores
        self._converter = converter
        self._append = append
        self._once = once
        self._check_every_s = check_every_s
        self._connection: KafkaConnection | None = None
        self._consumer: Any = None
        self._recreation_guard: TopicRecreationGuard | None = None
        self._batch: list[tuple[_MessagePosition, ScriptMessage]] = []
        self._batch_stores: dict[str, IncomingStore] = {}
        self._batch_bytes = 0
        # Offsets to commit: by partition, the offset of the next message.
        self._offsets: dict[int, int] = {}
        self._ended_partitions: set[int] = set()
        self._last_problem = ""
        self._consecutive_bad = 0

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Import messages until ``stop`` is raised; call ``beat`` as the heartbeat."""
        backoff = Backoff()
        while not stop.is_set():
            beat()
            try:
                if self.import_batch(beat):
                    backoff.reset()
            except Unavailable as error:
                self._log_problem(str(error))
                # The messages in memory come again: none of their offsets is committed.
                self.close()
                stop.wait(backoff.next_s())
        self.close()

    def run_once(self, beat: Callable[[], None]) -> None:
        """Import the messages that are in the topic now; return when they are durable here.

        Raises:
            Unavailable: The brokers, the topic, the stores or the journal are away.
        """
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        try:
            while True:
                beat()
                ended_count = len(self._ended_partitions)
                if self.import_batch(beat) or len(self._ended_partitions) > ended_count:
                    deadline = time.monotonic() + _IDLE_TIMEOUT_S
                    continue
                assert self._connection is not None, "no connection before the first turn"
                if self._is_done(self._connection):
                    return
                if time.monotonic() > deadline:
                    reason = self._last_problem or "another member of the group may consume it"
                    raise KafkaUnavailable(
                        f"cannot receive from {self._connection.describe_topic()}: {reason}"
                    )
        finally:
            self.close()

    def _is_done(self, connection: KafkaConnection) -> bool:
        """Return True if every message of the topic was consumed, here or by other group members.

        This member's partitions may be only a part: killed members keep theirs for a while.
        """
        lib, topic = connection.lib, self._settings.broker.topic
        try:
            partitions = (
                self._consumer.list_topics(topic, timeout=_REQUEST_TIMEOUT_S)
                .topics[topic]
                .partitions
            )
            others = [
                lib.TopicPartition(topic, partition)
                for partition in partitions
                if partition not in self._ended_partitions
            ]
            for committed in (
                self._consumer.committed(others, timeout=_REQUEST_TIMEOUT_S) if others else ()
            ):
                low, high = self._consumer.get_watermark_offsets(
                    committed, timeout=_REQUEST_TIMEOUT_S
                )
                if max(committed.offset, low) < high:
                    return False
        except lib.KafkaException as error:
            # This request fails for the reason that was logged already, if there is one.
            if not self._last_problem:
                self._log_problem(connection.describe_error(error.args[0]))
            return False
        return bool(partitions)

    def import_batch(self, beat: Callable[[], None]) -> bool:
        """Import one batch; return True if it held any message.

        Raises:
            Unavailable: The brokers, the topic, the stores or the journal are away.
        """
        self._ensure_consumer().detect_recreation(self._consumer)
        wait_s = _POLL_S
        count = 0
        while count < _BATCH_MESSAGES and self._batch_bytes < _BATCH_BYTES:
            message = self._consumer.poll(wait_s)
            if message is None:
                break
            wait_s = 0.0
            if message.error() is not None:
                self._handle_client_message(message)
                continue
            beat()
            self._add_message(message)
            count += 1
        self._persist_batch()
        self._report_client_errors(has_messages=count > 0)
        return count > 0

    def _add_message(self, message: Any) -> None:
        """Decode one message into the batch, and note its offset."""
        if self._needs_rewind(message):
            return
        value: bytes = message.value() or b""
        self._batch_bytes += len(value)
        position = _MessagePosition(message.partition(), message.offset())
        try:
            script_message = decode_script_message(value)
        except MessageError as error:
            self._skip_message(position, error)
        else:
            if self._is_imported(script_message.cluster):
                self._batch.append((position, script_message))
            self._consecutive_bad = 0
        self._offsets[position.partition] = position.offset + 1

    def _needs_rewind(self, message: Any) -> bool:
        return self._recreation_guard is not None and self._recreation_guard.needs_rewind(
            message.partition()
        )

    def _is_imported(self, cluster: str) -> bool:
        """Return True if jobs of this cluster are imported."""
        if self._settings.clusters:
            return cluster in self._settings.clusters
        return cluster not in self._local_clusters

    def _skip_message(self, position: _MessagePosition, error: StewardError) -> None:
        """Skip a message that cannot be imported; it stays in the topic for inspection."""
        self.refused += 1
        self._consecutive_bad += 1
        if self._consecutive_bad > _MAX_LOGGED_IN_A_ROW:
            return
        log.warning(
            "consume.%s skips the message at offset %d of partition %d of topic %s: %s%s",
            self._name,
            position.offset,
            position.partition,
            self._settings.broker.topic,
            error,
            "; further bad messages are not logged"
            if self._consecutive_bad == _MAX_LOGGED_IN_A_ROW
            else "",
        )

    def _get_batch_store(self) -> IncomingStore:
        """Return the store for this batch."""
        if not self._batch_stores:
            store = self._stores.find_usable()
            self._batch_stores[store.name] = store
        return next(iter(self._batch_stores.values()))

    def _persist_batch(self) -> None:
        """Make the batch durable, and only then commit its offsets."""
        event_lists = self._converter.convert_messages(
            [message for _, message in self._batch], self._get_batch_store
        )
        for store in self._batch_stores.values():
            store.sync()
        self._append_events(event_lists)
        offsets = self._offsets
        self._clear_batch()
        if offsets:
            self._commit(offsets)

    def _append_events(self, event_lists: list[list[Event]]) -> None:
        """Append a batch's events; singly if the journal rejects one."""
        rejected = 0
        try:
            self._append([event for events in event_lists for event in events])
        except JournalError:
            # The journal rejected at least one event; append the messages singly to save the
            # others.
            for (position, _), events in zip(self._batch, event_lists, strict=True):
                rejected += not self._append_message(position, events)
        self.imported_count += len(event_lists) - rejected

    def _append_message(self, position: _MessagePosition, events: list[Event]) -> bool:
        """Append one message's events; on rejection remove its bytes and return False."""
        try:
            self._append(events)
        except JournalError as error:
            self._skip_message(position, error)
            for body in (event.body for event in events if event.kind == JOB_SCRIPT):
                self._stores.get(body.store).unlink(
                    stored.path for stored in (body.script, body.environment) if stored is not None
                )
            return False
        return True

    def _clear_batch(self) -> None:
        self._batch, self._batch_stores, self._offsets, self._batch_bytes = [], {}, {}, 0

    def _commit(self, offsets: dict[int, int]) -> None:
        """Commit offsets to the consumer group; a failure is only logged."""
        assert self._connection is not None, "no consumer"
        lib, topic = self._connection.lib, self._settings.broker.topic
        topic_id = self._recreation_guard.id if self._recreation_guard is not None else ""
        requested = [
            lib.TopicPartition(topic, *partition, topic_id) for partition in offsets.items()
        ]
        try:
            committed = self._consumer.commit(offsets=requested, asynchronous=False)
        except lib.KafkaException as error:
            failures = [error.args[0]]
        else:
            failures = [partition.error for partition in committed if partition.error is not None]
        for failure in failures:
            # The messages come again, here or to the member that has the partition now.
            log.info(
                "consume.%s cannot commit: %s", self._name, self._connection.describe_error(failure)
            )

    def _handle_client_message(self, message: Any) -> None:
        """Handle an error or end-of-partition message of the client."""
        assert self._connection is not None, "no consumer"
        error, codes = message.error(), self._connection.lib.KafkaError
        if error.code() == codes._PARTITION_EOF:
            if not self._needs_rewind(message):
                self._ended_partitions.add(message.partition())
            return
        fatal_codes = {
            codes.UNKNOWN_TOPIC_OR_PART,
            codes.TOPIC_AUTHORIZATION_FAILED,
            codes.GROUP_AUTHORIZATION_FAILED,
            codes._MAX_POLL_EXCEEDED,
            # Such as a static member whose group.instance.id another consumer took.
            codes._FATAL,
        }
        problem = (
            f"cannot receive from {self._connection.describe_topic()}: "
            f"{self._connection.describe_error(error)}"
        )
        if error.code() in fatal_codes:
            raise KafkaUnavailable(problem)
        # The client recovers alone.
        self._log_problem(problem)

    def _report_client_errors(self, *, has_messages: bool) -> None:
        """Log a new error of the client, or its end."""
        assert self._connection is not None, "no consumer"
        last_error = self._connection.take_last_error()
        if has_messages:
            if self._last_problem:
                log.info("consume.%s continues after: %s", self._name, self._last_problem)
            self._last_problem = ""
        elif last_error:
            self._log_problem(
                f"cannot receive from {self._connection.describe_topic()}: {last_error}"
            )

    def _log_problem(self, problem: str) -> None:
        """Log why the source waits, once until the reason changes."""
        if problem != self._last_problem:
            self._last_problem = problem
            log.error("consume.%s is waiting: %s", self._name, problem)

    def _ensure_consumer(self) -> TopicRecreationGuard:
        """Create the consumer and subscribe it, where there is none."""
        if self._recreation_guard is not None:
            return self._recreation_guard
        self._connection = KafkaConnection(self._settings.broker, f"consume.{self._name}")
        self._consumer = self._connection.create_client("Consumer", self._build_consumer_config())
        self._recreation_guard = TopicRecreationGuard(
            self._name, self._connection, check_every_s=self._check_every_s
        )
        self._ended_partitions = set()
        self._consumer.subscribe(
            [self._settings.broker.topic],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        log.info(
            "consume.%s reads %s as group %s",
            self._name,
            self._connection.describe_topic(),
            self._settings.group,
        )
        return self._recreation_guard

    def _build_consumer_config(self) -> dict[str, Any]:
        """Return the consumer's librdkafka settings."""
        return {
            "group.id": self._settings.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": self._once,
            # After a crash the group waits this long for the dead member.
            "session.timeout.ms": 10_000,
            # Prefetched messages take memory; one message may be larger than the limit.
            "queued.max.messages.kbytes": _BATCH_BYTES // 1024,
            "fetch.max.bytes": _BATCH_BYTES,
            # Retry a full queue after this time; the default is a second.
            "fetch.queue.backoff.ms": 20,
        }

    # librdkafka calls these three from within poll and close. ``close`` needs none of them.

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        if self._recreation_guard is not None:
            self._recreation_guard.check_offsets(consumer, partitions)

    def _on_revoke(self, _consumer: Any, partitions: list[Any]) -> None:
        del partitions
        if self._consumer is not None:
            # The last moment to commit these partitions.
            self._persist_batch()

    def _on_lost(self, _consumer: Any, partitions: list[Any]) -> None:
        for partition in partitions:
            # Another member owns the partition now; the imported messages are durable here all the
            # same.
            self._offsets.pop(partition.partition, None)

    def close(self) -> None:
        """Leave the consumer group; messages in memory are dropped and come again."""
        self._clear_batch()
        consumer, self._consumer, self._recreation_guard = self._consumer, None, None
        if consumer is not None:
            consumer.close()
