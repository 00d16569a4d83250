"""Base classes of sensors, as StackStorm's page on writing sensors describes them."""

from typing import Any


class Sensor:
    """Sensor: set up, run, then cleaned up."""

    def __init__(self, sensor_service: Any, config: dict[str, Any] | None = None) -> None:
        self.sensor_service = sensor_service
        self.config = config or {}
