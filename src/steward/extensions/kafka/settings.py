"""The settings of Kafka: how a cluster is reached, sinks, and topics that are consumed."""

from typing import ClassVar, Literal

import msgspec

from steward.archive.settings import SinkSettings
from steward.core.section import Section


class KafkaSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.broker], [consume.NAME.broker]: how a Kafka cluster is reached.

    Attributes:
        servers: Some of its brokers: ``kafka1:9092``.
        topic: The topic.
        tls: Whether connections are encrypted.
        ca_file: Certificates that the brokers' are checked against; the system's if empty.
        certificate_file: Our own certificate, where the brokers ask for one.
        key_file: The key of that certificate.
        sasl: ``PLAIN``, ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``; "" for none.
        user: For SASL.
        password_file: A file that holds the password for SASL.
        options: Further settings of librdkafka, as its CONFIGURATION.md names them.
        timeout_s: How long a broker may take to answer, in seconds.
    """

    servers: tuple[str, ...] = ()
    topic: str = "steward-jobs"
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    sasl: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    user: str = ""
    password_file: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_s: float = 30.0


class KafkaSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="kafka"):
    """[archive.sink.NAME] with kind = "kafka": a topic, one message a script.

    Attributes:
        broker: How it is reached.
        message: ``steward``, or ``sarchive`` for what SArchive sends.
        environments: Whether environments are sent, too.
        compression: How messages are compressed.
        max_message_bytes: Size of the largest message, in bytes; the topic's
            ``max.message.bytes`` has to allow it.
    """

    broker: KafkaSettings = KafkaSettings()
    message: Literal["steward", "sarchive"] = "steward"
    environments: bool = True
    compression: Literal["zstd", "lz4", "gzip", "snappy", "none"] = "zstd"
    max_message_bytes: int = 16 * 1024**2
    batch_bytes: ClassVar[int] = 8 * 1024**2
    """How much is read at once, in bytes; librdkafka cuts what it sends."""


class ConsumeSettings(Section, frozen=True, kw_only=True):
    """[consume.NAME]: a Kafka topic that other Stewards' sinks fill, taken in here.

    Attributes:
        broker: How it is reached.
        group: The consumer group that its offsets are kept for.
        clusters: The clusters whose jobs are taken in; if empty, every cluster but those that
            have a table ``[cluster.NAME]`` here.
    """

    broker: KafkaSettings = KafkaSettings()
    group: str = "steward"
    clusters: tuple[str, ...] = ()
