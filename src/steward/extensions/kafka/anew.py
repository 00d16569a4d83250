"""Notices that a topic was deleted and made anew under its name, and goes back to its beginning.

A group's offsets belong to a name. In another topic of that name they point into
its midst, and librdkafka goes on there without a word. So the topic's id
(KIP-516, brokers from 2.8) is asked for now and then, and is written beside each
offset that is committed: a consumer that was away finds out, too. What is read
twice by it is harmless.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from steward.extensions.kafka.client import KafkaUnavailable, Reached

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
