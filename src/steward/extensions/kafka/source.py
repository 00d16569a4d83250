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
from steward.core.incoming import IncomingStore, IncomingStores
from steward.core.journal import JournalError
from steward.core.waits import Backoff, Stop
from steward.extensions.kafka.client import KafkaConnection, KafkaUnavailable
from steward.extensions.kafka.events import MessageConverter
from steward.extensions.kafka.messages import MessageError, ScriptMessage, decode_script_message
from steward.extensions.kafka.settings import ConsumeSettings

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 30.0
"""Time between two requests for the topic's id, in seconds."""
_REQUEST_TIMEOUT_S: Final = 10.0
"""Time limit of a request to the brokers, in seconds."""


class TopicIdLookup:
    """Lookup of the topic's id, which changes when the topic is recreated.

    Args:
        reached: Access to the cluster, with the topic.
        every_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(self, reached: KafkaConnection, every_s: float) -> None:
        self._reached = reached
        self._every_s = every_s
        self._admin: Any = None
        self._answer: Any = None
        self._ask_at = 0.0

    def look(self, wait_s: float = 0.0) -> str:
        """Return the topic's id; "" where no new answer has arrived.

        Args:
            wait_s: How long to wait for the answer, in seconds; 0 to collect it in a later call.
        """
        now = time.monotonic()
        if self._answer is None and (wait_s or now >= self._ask_at):
            self._ask_at = now + self._every_s
            self._answer = self._ask()
        if self._answer is None or not (wait_s or self._answer.done()):
            return ""
        answer, self._answer = self._answer, None
        try:
            told = answer.result(wait_s).topic_id
        except (self._reached.lib.KafkaException, TimeoutError) as error:
            # The poll for messages reports the problem; the id is requested again.
            log.debug("the id of %s is not known: %s", self._reached.where(), error)
            return ""
        is_one = told.get_most_significant_bits() or told.get_least_significant_bits()
        return str(told) if is_one else ""

    def _ask(self) -> Any:
        """Request the topic's description; return the future."""
        from confluent_kafka.admin import AdminClient

        topic = self._reached.settings.topic
        if self._admin is None:
            # The consumer's own log reports problems; options of consumers do not apply to this
            # client.
            self._admin = AdminClient(self._reached.configured({"log_level": 0}))
        wanted = self._reached.lib.TopicCollection([topic])
        return self._admin.describe_topics(wanted, request_timeout=_REQUEST_TIMEOUT_S)[topic]


class TopicRecreationGuard:
    """Guard against continuing at old offsets in a topic that was deleted and recreated.

    Args:
        name: Name of the source, for the log.
        reached: Access to the cluster, with the topic.
        check_every_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(
        self, name: str, reached: KafkaConnection, *, check_every_s: float = CHECK_EVERY_S
    ) -> None:
        self._name = name
        self._reached = reached
        self._topic_id = TopicIdLookup(reached, check_every_s)
        self._back: set[int] = set()
        self.id = ""

    def assigned(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Check whether the committed offsets of new partitions belong to this topic id.

        Raises:
            KafkaUnavailable: The committed offsets cannot be read now.
        """
        lib = self._reached.lib
        asked = list(partitions)
        self._back -= {place.partition for place in asked}
        self.id = self.id or self._topic_id.look(_REQUEST_TIMEOUT_S)
        if not self.id or not asked:
            return
        try:
            found = consumer.committed(asked, timeout=_REQUEST_TIMEOUT_S)
        except lib.KafkaException as error:
            raise KafkaUnavailable(
                f"cannot look up how far {self._reached.where()} was taken in: "
                f"{self._reached.told(error.args[0])}"
            ) from error
        # Offsets committed by other programs carry no topic id and are trusted.
        others = {one.partition for one in found if one.metadata and one.metadata != self.id}
        if others:
            self._tell()
        self._back |= others

    def look(self, consumer: Any) -> None:
        """Detect a recreated topic and rewind its partitions; called between batches.

        Raises:
            KafkaUnavailable: The committed offsets cannot be read now.
        """
        found = self._topic_id.look()
        if found and found != self.id:
            known, self.id = self.id, found
            if known:
                self._tell()
                self._back |= {place.partition for place in consumer.assignment()}
            else:
                self.assigned(consumer, consumer.assignment())
        lib, topic = self._reached.lib, self._reached.settings.topic
        for partition in sorted(self._back):
            try:
                consumer.seek(lib.TopicPartition(topic, partition, lib.OFFSET_BEGINNING))
            except lib.KafkaException as error:
                # The partition is not being fetched yet; the next turn tries again.
                log.debug("cannot go back in partition %d: %s", partition, error)
            else:
                self._back.discard(partition)

    def is_to_come_again(self, partition: int) -> bool:
        """Return True if the partition is still to be rewound, so its messages come again."""
        return partition in self._back

    def _tell(self) -> None:
        log.warning(
            "consume.%s takes in %s from its beginning: it was deleted and made anew",
            self._name,
            self._reached.where(),
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
        own: Clusters captured here; their messages are skipped unless ``clusters`` names them.
        stores: Stores for script bytes, the preferred one first.
        taking: Converts messages to events.
        append: Appends events durably; may block.
        once: Whether to stop at the present end of the topic.
        check_every_s: Time between two checks for a recreated topic, in seconds.
    """

    def __init__(
        self,
        name: str,
        settings: ConsumeSettings,
        own: Container[str],
        stores: IncomingStores,
        taking: MessageConverter,
        append: Append,
        *,
        once: bool = False,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        self.taken = 0
        self.refused = 0
        self._name = name
        self._settings = settings
        self._own = own
        self._stores = stores
        self._taking = taking
        self._append = append
        self._once = once
        self._check_every_s = check_every_s
        self._reached: KafkaConnection | None = None
        self._consumer: Any = None
        self._anew: TopicRecreationGuard | None = None
        self._told: list[tuple[_MessagePosition, ScriptMessage]] = []
        self._touched: dict[str, IncomingStore] = {}
        self._size = 0
        # Offsets to commit: by partition, the offset of the next message.
        self._offsets: dict[int, int] = {}
        self._ended: set[int] = set()
        self._said = ""
        self._bad_in_a_row = 0

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Import messages until ``stop`` is raised; call ``beat`` as the heartbeat."""
        backoff = Backoff()
        while not stop.is_set():
            beat()
            try:
                if self.turn(beat):
                    backoff.reset()
            except Unavailable as error:
                self._say(str(error))
                # The messages in memory come again: none of their offsets is committed.
                self.close()
                stop.wait(backoff.next_s())
        self.close()

    def run_once(self, beat: Callable[[], None]) -> None:
        """Import the messages that are in the topic now; return when they are durable here.

        Raises:
            Unavailable: The brokers, the topic, the stores or the journal are away.
        """
        until = time.monotonic() + self._patience_s()
        try:
            while True:
                beat()
                before = len(self._ended)
                if self.turn(beat) or len(self._ended) > before:
                    until = time.monotonic() + self._patience_s()
                    continue
                assert self._reached is not None, "the turn has made it"
                if self._is_done(self._reached):
                    return
                if time.monotonic() > until:
                    why = self._said or "another member of the group may have it"
                    raise KafkaUnavailable(f"nothing comes from {self._reached.where()}: {why}")
        finally:
            self.close()

    def _is_done(self, reached: KafkaConnection) -> bool:
        """Return True if every message of the topic was consumed, here or by other group members.

        This member's partitions may be only a part: killed members keep theirs for a while.
        """
        lib, topic = reached.lib, self._settings.broker.topic
        try:
            listed = (
                self._consumer.list_topics(topic, timeout=_REQUEST_TIMEOUT_S)
                .topics[topic]
                .partitions
            )
            others = [lib.TopicPartition(topic, one) for one in listed if one not in self._ended]
            for place in (
                self._consumer.committed(others, timeout=_REQUEST_TIMEOUT_S) if others else ()
            ):
                low, high = self._consumer.get_watermark_offsets(place, timeout=_REQUEST_TIMEOUT_S)
                if max(place.offset, low) < high:
                    return False
        except lib.KafkaException as error:
            # This request fails for the reason that was logged already, if there is one.
            if not self._said:
                self._say(reached.told(error.args[0]))
            return False
        return bool(listed)

    def _patience_s(self) -> float:
        # The group waits this long for a killed member: its session time-out.
        return max(15.0, self._settings.broker.timeout_s)

    def turn(self, beat: Callable[[], None]) -> bool:
        """Import one batch; return True if it held any message.

        Raises:
            Unavailable: The brokers, the topic, the stores or the journal are away.
        """
        self._open().look(self._consumer)
        wait_s = _POLL_S
        count = 0
        while count < _BATCH_MESSAGES and self._size < _BATCH_BYTES:
            message = self._consumer.poll(wait_s)
            if message is None:
                break
            wait_s = 0.0
            if message.error() is not None:
                self._heed(message)
                continue
            beat()
            self._take(message)
            count += 1
        self._settle()
        self._look_at_errors(is_well=count > 0)
        return count > 0

    def _take(self, message: Any) -> None:
        """Decode one message into the batch, and note its offset."""
        if self._is_to_come_again(message):
            return
        value: bytes = message.value() or b""
        self._size += len(value)
        place = _MessagePosition(message.partition(), message.offset())
        try:
            told = decode_script_message(value)
        except MessageError as error:
            self._refuse(place, error)
        else:
            if self._is_wanted(told.cluster):
                self._told.append((place, told))
            self._bad_in_a_row = 0
        self._offsets[place.partition] = place.offset + 1

    def _is_to_come_again(self, message: Any) -> bool:
        return self._anew is not None and self._anew.is_to_come_again(message.partition())

    def _is_wanted(self, cluster: str) -> bool:
        """Return True if jobs of this cluster are imported."""
        if self._settings.clusters:
            return cluster in self._settings.clusters
        return cluster not in self._own

    def _refuse(self, place: _MessagePosition, error: StewardError) -> None:
        """Skip a message that cannot be imported; it stays in the topic for inspection."""
        self.refused += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row > _MAX_LOGGED_IN_A_ROW:
            return
        log.warning(
            "consume.%s passes over the message at offset %d of partition %d of topic %s: %s%s",
            self._name,
            place.offset,
            place.partition,
            self._settings.broker.topic,
            error,
            "; more like it are not told of" if self._bad_in_a_row == _MAX_LOGGED_IN_A_ROW else "",
        )

    def _store(self) -> IncomingStore:
        """Return the store for this batch."""
        if not self._touched:
            store = self._stores.find_usable()
            self._touched[store.name] = store
        return next(iter(self._touched.values()))

    def _settle(self) -> None:
        """Make the batch durable, and only then commit its offsets."""
        taken = self._taking.take([message for _, message in self._told], self._store)
        for store in self._touched.values():
            store.sync()
        self._append_all(taken)
        offsets = self._offsets
        self._forget()
        if offsets:
            self._commit(offsets)

    def _append_all(self, taken: list[list[Event]]) -> None:
        """Append a batch's events; singly if the journal rejects one."""
        refused = 0
        try:
            self._append([event for events in taken for event in events])
        except JournalError:
            # The journal rejected at least one event; append the messages singly to save the
            # others.
            for (place, _), events in zip(self._told, taken, strict=True):
                refused += not self._is_appended(place, events)
        self.taken += len(taken) - refused

    def _is_appended(self, place: _MessagePosition, events: list[Event]) -> bool:
        """Append one message's events; on rejection remove its bytes and return False."""
        try:
            self._append(events)
        except JournalError as error:
            self._refuse(place, error)
            for body in (event.body for event in events if event.kind == JOB_SCRIPT):
                self._stores.get(body.store).unlink(
                    kept.path for kept in (body.script, body.environment) if kept is not None
                )
            return False
        return True

    def _forget(self) -> None:
        self._told, self._touched, self._offsets, self._size = [], {}, {}, 0

    def _commit(self, offsets: dict[int, int]) -> None:
        """Commit offsets to the consumer group; a failure is only logged."""
        assert self._reached is not None, "there is a consumer"
        lib, topic = self._reached.lib, self._settings.broker.topic
        topic_id = self._anew.id if self._anew is not None else ""
        wanted = [lib.TopicPartition(topic, *place, topic_id) for place in offsets.items()]
        try:
            done = self._consumer.commit(offsets=wanted, asynchronous=False)
        except lib.KafkaException as error:
            failures = [error.args[0]]
        else:
            failures = [place.error for place in done if place.error is not None]
        for failure in failures:
            # The messages come again, here or to the member that has the partition now.
            log.info("consume.%s cannot commit: %s", self._name, self._reached.told(failure))

    def _heed(self, message: Any) -> None:
        """Handle an error or end-of-partition message of the client."""
        assert self._reached is not None, "there is a consumer"
        error, codes = message.error(), self._reached.lib.KafkaError
        if error.code() == codes._PARTITION_EOF:
            if not self._is_to_come_again(message):
                self._ended.add(message.partition())
            return
        grave = {
            codes.UNKNOWN_TOPIC_OR_PART,
            codes.TOPIC_AUTHORIZATION_FAILED,
            codes.GROUP_AUTHORIZATION_FAILED,
            codes._MAX_POLL_EXCEEDED,
        }
        what = f"nothing comes from {self._reached.where()}: {self._reached.told(error)}"
        if error.fatal() or error.code() in grave:
            raise KafkaUnavailable(what)
        # The client recovers alone.
        self._say(what)

    def _look_at_errors(self, *, is_well: bool) -> None:
        """Log a new error of the client, or its end."""
        assert self._reached is not None, "there is a consumer"
        last = self._reached.take_last()
        if is_well:
            if self._said:
                log.info("consume.%s goes on after: %s", self._name, self._said)
            self._said = ""
        elif last:
            self._say(f"nothing comes from {self._reached.where()}: {last}")

    def _say(self, what: str) -> None:
        """Log why the source waits, once until the reason changes."""
        if what != self._said:
            self._said = what
            log.error("consume.%s waits: %s", self._name, what)

    def _open(self) -> TopicRecreationGuard:
        """Create the consumer and subscribe it, where there is none."""
        if self._anew is not None:
            return self._anew
        self._reached = KafkaConnection(self._settings.broker, f"consume.{self._name}")
        self._consumer = self._reached.make("Consumer", self._role())
        self._anew = TopicRecreationGuard(
            self._name, self._reached, check_every_s=self._check_every_s
        )
        self._ended = set()
        self._consumer.subscribe(
            [self._settings.broker.topic],
            on_assign=self._anew.assigned,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        log.info(
            "consume.%s takes in %s as group %s",
            self._name,
            self._reached.where(),
            self._settings.group,
        )
        return self._anew

    def _role(self) -> dict[str, Any]:
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

    def _on_revoke(self, _consumer: Any, partitions: list[Any]) -> None:
        # Called from within poll and close: the last moment to commit these partitions.
        del partitions
        self._settle()

    def _on_lost(self, _consumer: Any, partitions: list[Any]) -> None:
        for place in partitions:
            # Another member owns the partition now; the imported messages are durable here all the
            # same.
            self._offsets.pop(place.partition, None)

    def close(self) -> None:
        """Leave the consumer group; messages in memory are dropped and come again."""
        self._forget()
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            consumer.close()
            self._anew = None
