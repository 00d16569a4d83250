"""Settings of Kafka: broker connection, archive sinks, and consumed topics."""

from typing import Literal

import msgspec

from steward.archive.settings import SinkSettings
from steward.core.section import Section, TlsReference


class KafkaSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.broker], [consume.NAME.broker]: connection to a Kafka cluster.

    Attributes:
        servers: Bootstrap brokers, one or more: ``kafka1:9092``.
        topic: The topic.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption.
        user: User name for SASL, with ``password_file``; if empty, no SASL.
        password_file: File that holds the password for SASL.
        options: Further settings of librdkafka, as its CONFIGURATION.md names them, such as
            ``sasl.mechanism`` (SCRAM-SHA-512 unless set) and, of consumers, ``group.id`` (steward).
    """

    servers: tuple[str, ...] = ()
    topic: str = "steward-jobs"
    tls: TlsReference = None
    user: str = ""
    password_file: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)


class KafkaSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="kafka"):
    """[archive.sink.NAME] with kind = "kafka": a topic that gets one message for each script.

    Attributes:
        broker: Connection to the Kafka cluster.
        message: Message format: ``steward``, or ``sarchive`` for SArchive's.
    """

    broker: KafkaSettings = KafkaSettings()
    message: Literal["steward", "sarchive"] = "steward"


class ConsumeSettings(Section, frozen=True, kw_only=True):
    """[consume.NAME]: a Kafka topic, filled by sinks of other Stewards, that Steward imports.

    Attributes:
        broker: Connection to the Kafka cluster.
        clusters: Clusters whose jobs are imported; if empty, every cluster but those that
            have a table ``[cluster.NAME]`` here.
    """

    broker: KafkaSettings = KafkaSettings()
    clusters: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Return the consumer group that owns the committed offsets."""
        return self.broker.options.get("group.id", "steward")
