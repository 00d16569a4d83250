"""The other end of a Kafka sink: takes a topic in, and commits offsets after the effect.

Messages become events and kept bytes. When both are durable here, the consumer
group's offsets are committed, never before: what a crash leaves uncommitted comes
again, and its keys make that harmless.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable
from typing import Any, Final, NamedTuple

from steward.archive.messages import Message, MessageError, decode
from steward.core.consumers import Append
from steward.core.errors import StewardError, Unavailable
from steward.core.events import JOB_SCRIPT, Event
from steward.core.incoming import Store, Stores
from steward.core.journal import JournalError
from steward.core.waits import Backoff, Stop
from steward.extensions.kafka.client import KafkaUnavailable, Reached
from steward.extensions.kafka.events import Taking
from steward.extensions.kafka.settings import ConsumeSettings

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 30.0
"""Time between two requests for the topic's id, in seconds."""
_ASK_S: Final = 10.0


class TopicId:
    """Which topic the name stands for.

    Args:
        reached: The cluster and the topic.
        every_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(self, reached: Reached, every_s: float) -> None:
        self._reached = reached
        self._every_s = every_s
        self._admin: Any = None
        self._answer: Any = None
        self._ask_at = 0.0

    def look(self, wait_s: float = 0.0) -> str:
        """The topic's id; "" where there is no news of it.

        Args:
            wait_s: How long to wait for the answer; 0 to be told by a later call.
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
            # Who waits for messages is told of what is wrong; this is asked again.
            log.debug("the id of %s is not known: %s", self._reached.where(), error)
            return ""
        is_one = told.get_most_significant_bits() or told.get_least_significant_bits()
        return str(told) if is_one else ""

    def _ask(self) -> Any:
        from confluent_kafka.admin import AdminClient

        topic = self._reached.settings.topic
        if self._admin is None:
            # The consumer's own log says what goes wrong; options of consumers are none of this.
            self._admin = AdminClient(self._reached.configured({"log_level": 0}))
        wanted = self._reached.lib.TopicCollection([topic])
        return self._admin.describe_topics(wanted, request_timeout=_ASK_S)[topic]


class Anew:
    """Keeps a consumer from going on in the midst of a topic that it has never read.

    Args:
        name: Of what uses it, for the log.
        reached: The cluster and the topic.
        check_every_s: Time between two requests for the topic's id, in seconds.
    """

    def __init__(
        self, name: str, reached: Reached, *, check_every_s: float = CHECK_EVERY_S
    ) -> None:
        self._name = name
        self._reached = reached
        self._topic_id = TopicId(reached, check_every_s)
        self._back: set[int] = set()
        self.id = ""

    def assigned(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Look whether the committed offsets of partitions are of this topic.

        Raises:
            KafkaUnavailable: That cannot be known now.
        """
        lib = self._reached.lib
        asked = list(partitions)
        self._back -= {place.partition for place in asked}
        self.id = self.id or self._topic_id.look(_ASK_S)
        if not self.id or not asked:
            return
        try:
            found = consumer.committed(asked, timeout=_ASK_S)
        except lib.KafkaException as error:
            raise KafkaUnavailable(
                f"cannot look up how far {self._reached.where()} was taken in: "
                f"{self._reached.told(error.args[0])}"
            ) from error
        # What another program committed has none, and is taken at its word.
        others = {one.partition for one in found if one.metadata and one.metadata != self.id}
        if others:
            self._tell()
        self._back |= others

    def look(self, consumer: Any) -> None:
        """Between batches: notice a new topic, and go back where that is due.

        Raises:
            KafkaUnavailable: What was committed cannot be looked up now.
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
                # It is not fetched from yet; the next turn tries again.
                log.debug("cannot go back in partition %d: %s", partition, error)
            else:
                self._back.discard(partition)

    def is_to_come_again(self, partition: int) -> bool:
        """Whether what comes of a partition now is from before going back."""
        return partition in self._back

    def _tell(self) -> None:
        log.warning(
            "consume.%s takes in %s from its beginning: it was deleted and made anew",
            self._name,
            self._reached.where(),
        )


_POLL_S: Final = 0.5
_BATCH_MESSAGES: Final = 500
_BATCH_BYTES: Final = 16 << 20
_LOGGED_AT_ONCE: Final = 20
"""Of so many bad messages in a row each is told; a topic full of them must not fill the disk."""


class _Place(NamedTuple):
    """Where a message lies in the topic."""

    partition: int
    offset: int


class KafkaSource:
    """Takes one topic in.

    Args:
        name: As the configuration names it.
        settings: Where the topic is, and what is taken from it.
        own: The clusters that are captured here: what a topic says of them is passed over,
            unless they are named.
        stores: Where bytes may go, the preferred one first.
        taking: Turns messages into events.
        append: Appends events durably; may block.
        once: Whether it is only for what is in the topic now.
        check_every_s: Time between two checks for a recreated topic, in seconds.
    """

    def __init__(
        self,
        name: str,
        settings: ConsumeSettings,
        own: Container[str],
        stores: Stores,
        taking: Taking,
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
        self._reached: Reached | None = None
        self._consumer: Any = None
        self._anew: Anew | None = None
        self._told: list[tuple[_Place, Message]] = []
        self._touched: dict[str, Store] = {}
        self._size = 0
        # What is to be committed: by partition the offset of the next message.
        self._offsets: dict[int, int] = {}
        self._ended: set[int] = set()
        self._said = ""
        self._bad_in_a_row = 0

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Take in what comes until the Stop is raised."""
        backoff = Backoff()
        while not stop.is_set():
            beat()
            try:
                if self.turn(beat):
                    backoff.reset()
            except Unavailable as error:
                self._say(str(error))
                # What is in hand comes again: nothing of it is committed.
                self.close()
                stop.wait(backoff.next_s())
        self.close()

    def run_once(self, beat: Callable[[], None]) -> None:
        """Take in what is in the topic now, and return when it is durable here.

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

    def _is_done(self, reached: Reached) -> bool:
        """Whether all that was in the topic is taken, by us or by others of the group.

        What we were given may be a part of it: members that were killed keep theirs for a while.
        """
        lib, topic = reached.lib, self._settings.broker.topic
        try:
            listed = self._consumer.list_topics(topic, timeout=_ASK_S).topics[topic].partitions
            others = [lib.TopicPartition(topic, one) for one in listed if one not in self._ended]
            for place in self._consumer.committed(others, timeout=_ASK_S) if others else ():
                low, high = self._consumer.get_watermark_offsets(place, timeout=_ASK_S)
                if max(place.offset, low) < high:
                    return False
        except lib.KafkaException as error:
            # What it is asked now fails for the reason that was told already, if there is one.
            if not self._said:
                self._say(reached.told(error.args[0]))
            return False
        return bool(listed)

    def _patience_s(self) -> float:
        # A member of the group that was killed is given up after its session's time-out.
        return max(15.0, self._settings.broker.timeout_s)

    def turn(self, beat: Callable[[], None]) -> bool:
        """Take in a batch; whether there was any.

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
        if self._is_to_come_again(message):
            return
        value: bytes = message.value() or b""
        self._size += len(value)
        place = _Place(message.partition(), message.offset())
        try:
            told = decode(value)
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
        if self._settings.clusters:
            return cluster in self._settings.clusters
        return cluster not in self._own

    def _refuse(self, place: _Place, error: StewardError) -> None:
        """Pass over what cannot be taken in; the topic keeps it, to be looked at."""
        self.refused += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row > _LOGGED_AT_ONCE:
            return
        log.warning(
            "consume.%s passes over the message at offset %d of partition %d of topic %s: %s%s",
            self._name,
            place.offset,
            place.partition,
            self._settings.broker.topic,
            error,
            "; more like it are not told of" if self._bad_in_a_row == _LOGGED_AT_ONCE else "",
        )

    def _store(self) -> Store:
        """The store for this batch."""
        if not self._touched:
            store = self._stores.usable()
            self._touched[store.name] = store
        return next(iter(self._touched.values()))

    def _settle(self) -> None:
        """Make what was taken durable, and only then commit its offsets."""
        taken = self._taking.take([message for _, message in self._told], self._store)
        for store in self._touched.values():
            store.sync()
        self._append_all(taken)
        offsets = self._offsets
        self._forget()
        if offsets:
            self._commit(offsets)

    def _append_all(self, taken: list[list[Event]]) -> None:
        refused = 0
        try:
            self._append([event for events in taken for event in events])
        except JournalError:
            # Of one of them at least; the others are none the worse for it.
            for (place, _), events in zip(self._told, taken, strict=True):
                refused += not self._is_appended(place, events)
        self.taken += len(taken) - refused

    def _is_appended(self, place: _Place, events: list[Event]) -> bool:
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
            # They come again, here or to who has the partition by now.
            log.info("consume.%s cannot commit: %s", self._name, self._reached.told(failure))

    def _heed(self, message: Any) -> None:
        """What the client says in place of a message."""
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
        # The client goes on by itself.
        self._say(what)

    def _look_at_errors(self, *, is_well: bool) -> None:
        assert self._reached is not None, "there is a consumer"
        last = self._reached.take_last()
        if is_well:
            if self._said:
                log.info("consume.%s goes on after: %s", self._name, self._said)
            self._said = ""
        elif last:
            self._say(f"nothing comes from {self._reached.where()}: {last}")

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            log.error("consume.%s waits: %s", self._name, what)

    def _open(self) -> Anew:
        if self._anew is not None:
            return self._anew
        self._reached = Reached(self._settings.broker, f"consume.{self._name}")
        self._consumer = self._reached.make("Consumer", self._role())
        self._anew = Anew(self._name, self._reached, check_every_s=self._check_every_s)
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
        return {
            "group.id": self._settings.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": self._once,
            # After a crash the group waits so long for the one that will not return.
            "session.timeout.ms": 10_000,
            # What is fetched ahead is memory; one message may be larger.
            "queued.max.messages.kbytes": _BATCH_BYTES // 1024,
            "fetch.max.bytes": _BATCH_BYTES,
            # A full queue is looked at again so soon, not after a second.
            "fetch.queue.backoff.ms": 20,
        }

    def _on_revoke(self, _consumer: Any, partitions: list[Any]) -> None:
        # Called from within poll and close: the last moment at which these may be committed.
        del partitions
        self._settle()

    def _on_lost(self, _consumer: Any, partitions: list[Any]) -> None:
        for place in partitions:
            # Somebody else's by now; what was taken of them is durable here all the same.
            self._offsets.pop(place.partition, None)

    def close(self) -> None:
        """Leave the group; what is in hand is forgotten, and comes again."""
        self._forget()
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            consumer.close()
            self._anew = None
