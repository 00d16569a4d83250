"""Base classes of sensors, as StackStorm's page on writing sensors describes them."""

from typing import Any


class Sensor:
    """A sensor: set up, run until it is cleaned up."""

    def __init__(self, sensor_service: Any, config: dict[str, Any] | None = None) -> None:
        self.sensor_service = sensor_service
        self.config = config or {}
