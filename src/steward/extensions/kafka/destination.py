"""Kafka sink: sends archived scripts to a topic and checks the delivery of every message.

:class:`KafkaDestination` implements the archive's ``Destination`` for sinks of kind "kafka";
:data:`SINK_KIND` registers it. The producer is idempotent: a message that librdkafka retries, after
a broker's restart for example, is in the topic once. A message that Steward sends again, because
its delivery is unknown, comes twice, with the same id and version.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from steward.archive.remote.destination import ArchivedDocument, RefusedDocument, SinkKind
from steward.extensions.kafka.client import BROKER_TIMEOUT_S, KafkaConnection, KafkaUnavailable
from steward.extensions.kafka.messages import SCHEMA, encode_sarchive, encode_script_message
from steward.extensions.kafka.settings import KafkaSinkSettings

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 16 << 20
"""Size of the largest message, in bytes: above any script that Slurm takes by default (4 MiB), and
what the documentation sets for the topic. The option ``message.max.bytes`` replaces it."""
_QUEUE_KIB: Final = 32 * 1024
"""Queue of the producer, in KiB: space for the largest message twice, or for many of usual size."""
_CLOSE_FLUSH_S: Final = 2.0
"""Time limit of the last flush, in seconds."""
_SLACK_S: Final = 10.0
"""Time beyond the brokers' time-out to wait for delivery reports, in seconds."""
_POLL_S: Final = 0.1


class KafkaDestination:
    """Kafka topic as an archive destination; see ``archive.remote.destination.Destination``.

    ``expire`` does nothing: the topic's setting ``retention.ms`` limits the age of messages.
    ``send`` waits ``timeout_s`` and a little more before it reports that the brokers are away.

    Args:
        settings: The sink's settings.
        name: The sink's name, for the log.
        timeout_s: Longest time to wait for a broker's answer, in seconds.

    Raises:
        KafkaUnavailable: The password's file cannot be read now, or the package confluent-kafka
            is missing.
    """

    def __init__(
        self,
        settings: KafkaSinkSettings,
        name: str = "kafka",
        timeout_s: float = BROKER_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._name = name
        self._timeout_s = timeout_s
        self._connection = self._connect()
        self._producer: Any = None

    def send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents, in their order; on return all replicas have acknowledged each.

        A message too large for the topic, or for the option ``message.max.bytes``, is returned as a
        refusal.

        Raises:
            KafkaUnavailable: The brokers, the topic or the permission to write to it is missing;
                the delivery of every document is unknown.
        """
        encoded = [(document, self._encode_document(document)) for document in documents]
        failures = self._deliver_messages(
            (doc, value) for doc, value in encoded if value is not None
        )
        large_ids = {doc.id for doc, error in failures if self._is_too_large(error)}
        self._raise_first(error for _, error in failures if not self._is_too_large(error))
        refusals: dict[str, RefusedDocument] = {}
        for document, value in encoded:
            # A topic refuses a batch as a whole: sent alone, each message shows whether it is too
            # large. Newer versions of the same script are sent again, so that they come last.
            if document.id not in large_ids or value is None:
                continue
            failed_again = self._deliver_messages([(document, value)])
            self._raise_first(error for _, error in failed_again if not self._is_too_large(error))
            if failed_again:
                refusals[f"{document.id} {document.version}"] = RefusedDocument(
                    document=document, why=self._explain_too_large(len(value), failed_again[0][1])
                )
        return list(refusals.values())

    def expire(self, before: datetime) -> None:
        """Do nothing: the topic's own retention removes old messages."""

    def close(self) -> None:
        """Close the connections."""
        if self._producer is not None:
            # No message is in flight between two calls of send, unless one failed.
            self._producer.purge()
            self._producer.flush(_CLOSE_FLUSH_S)
            self._producer = None

    def _encode_document(self, document: ArchivedDocument) -> bytes | None:
        """Encode a document; None for a correction in SArchive's format."""
        if not self._settings.environments and document.environment is not None:
            import msgspec

            document = msgspec.structs.replace(document, environment=None)
        if self._settings.message == "steward":
            return encode_script_message(document)
        # SArchive's format has no field that a correction could change.
        return None if document.corrects else encode_sarchive(document)

    def _deliver_messages(
        self, messages: Iterable[tuple[ArchivedDocument, bytes]]
    ) -> list[tuple[ArchivedDocument, Any]]:
        """Send messages and wait for the delivery report of each.

        Returns:
            The failed ones, each with its KafkaError.
        """
        producer = self._open_producer()
        self._connection.take_last_error()
        deadline = time.monotonic() + self._timeout_s + _SLACK_S
        failed: list[tuple[ArchivedDocument, Any]] = []
        pending_count = 0

        def on_delivery(document: ArchivedDocument, error: Any, _message: Any) -> None:
            nonlocal pending_count
            pending_count -= 1
            if error is not None:
                failed.append((document, error))

        for document, value in messages:
            error = self._produce(
                producer, document, value, partial(on_delivery, document), deadline
            )
            if error is None:
                pending_count += 1
            else:
                failed.append((document, error))
        while pending_count > 0 and time.monotonic() < deadline:
            producer.flush(_POLL_S)
        if pending_count > 0:
            self._give_up("the brokers did not answer in time")
        return failed

    def _produce(
        self,
        producer: Any,
        document: ArchivedDocument,
        value: bytes,
        on_delivery: Any,
        deadline: float,
    ) -> Any:
        """Queue one message; return the error if the client itself rejects it."""
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
                if time.monotonic() > deadline:
                    self._give_up("its send queue stays full")
                producer.poll(_POLL_S)
            except self._connection.lib.KafkaException as error:
                return error.args[0]
            else:
                # Collect delivery reports while queueing: their number is otherwise unbounded.
                producer.poll(0)
                return None

    def _raise_first(self, errors: Iterable[Any]) -> None:
        """Raise KafkaUnavailable for the first error, if there is one."""
        for error in errors:
            self._give_up(self._connection.describe_error(error))

    def _give_up(self, reason: str) -> None:
        """Drop the producer and raise KafkaUnavailable."""
        # A failed producer may still hold messages, and after a fatal error accepts none. The next
        # one also reads the password's file again.
        last_error = self._connection.take_last_error()
        self.close()
        if last_error and last_error not in reason:
            reason = f"{reason} ({last_error})"
        raise KafkaUnavailable(f"cannot send to {self._connection.describe_topic()}: {reason}")

    def _is_too_large(self, error: Any) -> bool:
        codes = self._connection.lib.KafkaError
        return error.code() in {codes.MSG_SIZE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE}

    def _explain_too_large(self, size: int, error: Any) -> str:
        """Build the reason for refusing a message that is too large."""
        broker = self._settings.broker
        max_bytes = int(broker.options.get("message.max.bytes", _MAX_MESSAGE_BYTES))
        if size >= max_bytes:
            return (
                f"message of {size} bytes is larger than the sink's message.max.bytes = "
                f"{max_bytes}: raise it in [archive.sink.{self._name}.broker.options], and "
                "the topic's max.message.bytes"
            )
        return (
            f"message of {size} bytes (before compression) is larger than topic "
            f"{broker.topic} accepts: raise its max.message.bytes (kafka-configs.sh --alter "
            f"--entity-type topics --entity-name {broker.topic} --add-config "
            f"max.message.bytes={max_bytes}), or the brokers' message.max.bytes "
            f"({self._connection.mask_secrets(error.str())})"
        )

    def _open_producer(self) -> Any:
        """Return the producer, creating it where there is none."""
        if self._producer is None:
            # Created with each producer, because the password may have changed.
            self._connection = self._connect()
            self._producer = self._connection.create_client(
                "Producer", self._build_producer_config()
            )
        return self._producer

    def _connect(self) -> KafkaConnection:
        return KafkaConnection(self._settings.broker, f"archive.{self._name}", self._timeout_s)

    def _build_producer_config(self) -> dict[str, Any]:
        """Return the producer's librdkafka settings."""
        timeout_ms = max(1000, int(self._timeout_s * 1000))
        return {
            "enable.idempotence": True,
            "acks": "all",
            "compression.type": "zstd",
            "message.max.bytes": _MAX_MESSAGE_BYTES,
            # Total time for retries; then the message's report gives the reason.
            "message.timeout.ms": timeout_ms,
            "topic.metadata.propagation.max.ms": timeout_ms // 2,
            "queue.buffering.max.kbytes": _QUEUE_KIB,
        }


SINK_KIND: Final = SinkKind(destination=KafkaDestination)
"""Sink kind behind [archive.sink.NAME] with kind = "kafka"."""
