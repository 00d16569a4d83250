"""Sends scripts to a Kafka topic, and looks at the outcome of every message.

The producer is idempotent: what it repeats by itself, after a broker's restart
say, is in the topic once. What *we* send again, since we cannot know what became
of it, comes twice, with the same id and version.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from steward.archive.messages import SCHEMA, encode, encode_sarchive
from steward.archive.remote.destination import Document, Refusal, SinkKind
from steward.extensions.kafka.client import KafkaUnavailable, Reached
from steward.extensions.kafka.settings import KafkaSinkSettings

log = logging.getLogger(__name__)

_LEAST_QUEUE_KIB: Final = 16 * 1024
_LAST_WORDS_S: Final = 2.0
_SLACK_S: Final = 10.0
_POLL_S: Final = 0.1


class KafkaDestination:
    """A topic; see ``steward.archive.remote.destination.Destination``.

    ``expire`` does nothing: how long a topic keeps its messages is the topic's setting
    ``retention.ms``. ``send`` takes up to ``broker.timeout_s`` seconds and some more before it
    says that the brokers are away.

    Args:
        settings: The sink's settings.
        name: The sink's name, for the log.

    Raises:
        KafkaUnavailable: The password's file cannot be read now, or the package confluent-kafka
            is not there.
    """

    def __init__(self, settings: KafkaSinkSettings, name: str = "kafka") -> None:
        self._settings = settings
        self._reached = Reached(settings.broker, f"archive.{name}")
        self._name = name
        self._producer: Any = None

    def send(self, documents: Sequence[Document]) -> list[Refusal]:
        """Send documents, in their order; on return each is acknowledged by all replicas.

        A message that is too large for the topic, or for ``max_message_bytes``, is refused.

        Raises:
            KafkaUnavailable: The brokers, the topic or the right to write to it are not there;
                nothing is known of any of the documents.
        """
        wanted = [(document, self._encoded(document)) for document in documents]
        errors = self._deliver((doc, value) for doc, value in wanted if value is not None)
        large = {doc.id for doc, error in errors if self._is_too_large(error)}
        self._check(error for _, error in errors if not self._is_too_large(error))
        refusals: dict[str, Refusal] = {}
        for document, value in wanted:
            # A topic refuses a batch as a whole: alone each shows whether it is too large
            # itself. What is newer of the same script goes again, to come after it.
            if document.id not in large or value is None:
                continue
            alone = self._deliver([(document, value)])
            self._check(error for _, error in alone if not self._is_too_large(error))
            if alone:
                refusals[f"{document.id} {document.version}"] = Refusal(
                    document=document, why=self._too_large(len(value), alone[0][1])
                )
        return list(refusals.values())

    def expire(self, before: datetime) -> None:
        """Nothing: the topic's own retention removes what is old."""

    def close(self) -> None:
        """Let go of the connections."""
        if self._producer is not None:
            # Nothing is under way between two calls of send, unless it failed.
            self._producer.purge()
            self._producer.flush(_LAST_WORDS_S)
            self._producer = None

    def _encoded(self, document: Document) -> bytes | None:
        if not self._settings.environments and document.environment is not None:
            import msgspec

            document = msgspec.structs.replace(document, environment=None)
        if self._settings.message == "steward":
            return encode(document)
        # Such a message tells nothing that a correction could change.
        return None if document.corrects else encode_sarchive(document)

    def _deliver(self, messages: Iterable[tuple[Document, bytes]]) -> list[tuple[Document, Any]]:
        """Have messages sent, and wait until something is known of each.

        Returns:
            Those that failed, each with its KafkaError.
        """
        producer = self._opened()
        self._reached.take_last()
        until = time.monotonic() + self._settings.broker.timeout_s + _SLACK_S
        failed: list[tuple[Document, Any]] = []
        count = 0

        def on_delivery(document: Document, error: Any, _message: Any) -> None:
            nonlocal count
            count -= 1
            if error is not None:
                failed.append((document, error))

        for document, value in messages:
            error = self._produce(producer, document, value, partial(on_delivery, document), until)
            if error is None:
                count += 1
            else:
                failed.append((document, error))
        while count > 0 and time.monotonic() < until:
            producer.flush(_POLL_S)
        if count > 0:
            self._give_up("no answer came in time")
        return failed

    def _produce(
        self, producer: Any, document: Document, value: bytes, on_delivery: Any, until: float
    ) -> Any:
        """Queue one message; the error if the client itself does not take it."""
        headers = None
        if self._settings.message == "steward":
            headers = {"schema": SCHEMA, "version": str(document.version)}
        while True:
            try:
                producer.produce(
                    self._settings.broker.topic,
                    value,
                    key=f"{document.cluster}/{document.job_id}",
                    headers=headers,
                    on_delivery=on_delivery,
                )
            except BufferError:
                if time.monotonic() > until:
                    self._give_up("its queue stays full")
                producer.poll(_POLL_S)
            except self._reached.lib.KafkaException as error:
                return error.args[0]
            else:
                # Reports are taken while more is queued: their number is not bounded else.
                producer.poll(0)
                return None

    def _check(self, errors: Iterable[Any]) -> None:
        """Raise what is wrong with the cluster, if something is."""
        for error in errors:
            self._give_up(self._reached.told(error))

    def _give_up(self, why: str) -> None:
        # A producer that failed may hold messages still, and after a fatal error takes none.
        # The next one also reads the password's file again.
        last = self._reached.take_last()
        self.close()
        if last and last not in why:
            why = f"{why} ({last})"
        raise KafkaUnavailable(f"nothing can be sent to {self._reached.where()}: {why}")

    def _is_too_large(self, error: Any) -> bool:
        codes = self._reached.lib.KafkaError
        return error.code() in {codes.MSG_SIZE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE}

    def _too_large(self, size: int, error: Any) -> str:
        of = self._settings
        if size >= of.max_message_bytes:
            return (
                f"a message of {size} bytes is larger than max_message_bytes = "
                f"{of.max_message_bytes} of the sink: raise it, and the topic's max.message.bytes"
            )
        return (
            f"a message of {size} bytes, less by compression, is larger than topic "
            f"{of.broker.topic} takes: raise its max.message.bytes (kafka-configs.sh --alter "
            f"--entity-type topics --entity-name {of.broker.topic} --add-config "
            f"max.message.bytes={of.max_message_bytes}), or the brokers' message.max.bytes "
            f"({self._reached.hidden(error.str())})"
        )

    def _opened(self) -> Any:
        if self._producer is None:
            # Made anew with each producer, for the password may have been changed.
            self._reached = Reached(self._settings.broker, f"archive.{self._name}")
            self._producer = self._reached.make("Producer", self._role())
        return self._producer

    def _role(self) -> dict[str, Any]:
        of = self._settings
        timeout_ms = max(1000, int(of.broker.timeout_s * 1000))
        return {
            "enable.idempotence": True,
            "acks": "all",
            "compression.type": of.compression,
            "message.max.bytes": of.max_message_bytes,
            # How long it tries, whatever happens; then each message's report says why not.
            "message.timeout.ms": timeout_ms,
            "topic.metadata.propagation.max.ms": timeout_ms // 2,
            # Room for one of the largest, or for many of the usual size.
            "queue.buffering.max.kbytes": max(_LEAST_QUEUE_KIB, 2 * of.max_message_bytes // 1024),
        }


SINK_KIND: Final = SinkKind(destination=KafkaDestination)
"""What [archive.sink.NAME] with kind = "kafka" is."""
