"""Kafka: archive sinks that write scripts to a topic, and sources that consume such a topic.

``client`` connects, for ``destination`` (the sink's producer) and ``source`` (the consumer), which
converts messages with ``events``.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.extensions.kafka.client import KafkaConnection, KafkaUnavailable, check_settings
    from steward.extensions.kafka.destination import SINK_KIND
    from steward.extensions.kafka.events import MessageConverter, RecentPurges
    from steward.extensions.kafka.settings import ConsumeSettings, KafkaSettings, KafkaSinkSettings
    from steward.extensions.kafka.source import KafkaSource
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        client=(
            "KafkaUnavailable",
            "KafkaConnection",
            "check_settings",
        ),
        destination=("SINK_KIND",),
        events=(
            "MessageConverter",
            "RecentPurges",
        ),
        settings=(
            "ConsumeSettings",
            "KafkaSettings",
            "KafkaSinkSettings",
        ),
        source=("KafkaSource",),
    )

__all__ = [
    "SINK_KIND",
    "ConsumeSettings",
    "KafkaConnection",
    "KafkaSettings",
    "KafkaSinkSettings",
    "KafkaSource",
    "KafkaUnavailable",
    "MessageConverter",
    "RecentPurges",
    "check_settings",
]
