"""Kafka: archive sinks that write scripts to a topic, and sources that consume such a topic."""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.extensions.kafka.client import KafkaUnavailable, Reached, check_settings
    from steward.extensions.kafka.destination import SINK_KIND
    from steward.extensions.kafka.events import LatelyPurged, Taking
    from steward.extensions.kafka.settings import ConsumeSettings, KafkaSettings, KafkaSinkSettings
    from steward.extensions.kafka.source import KafkaSource
else:
    __getattr__ = lazy_exports(
        __name__,
        client=(
            "KafkaUnavailable",
            "Reached",
            "check_settings",
        ),
        destination=("SINK_KIND",),
        events=(
            "Taking",
            "LatelyPurged",
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
    "KafkaSettings",
    "KafkaSinkSettings",
    "KafkaSource",
    "KafkaUnavailable",
    "LatelyPurged",
    "Reached",
    "Taking",
    "check_settings",
]
