"""Test cases that StackStorm offers packs, as far as Steward's pack uses them."""

import logging
import unittest
from typing import Any, NamedTuple


class KeyValuePair(NamedTuple):
    """Value in the datastore; the name begins with the sensor's."""

    name: str
    value: str


class SensorService:
    """Stores what a sensor dispatches, and its values in the datastore."""

    def __init__(self) -> None:
        self.dispatched: list[dict[str, Any]] = []
        self.values: dict[str, str] = {}

    def get_logger(self, name: str) -> logging.Logger:
        return logging.getLogger(name)

    def dispatch(
        self, trigger: str, payload: dict[str, Any] | None = None, trace_tag: str | None = None
    ) -> None:
        self.dispatched.append({"trigger": trigger, "payload": payload})

    def get_value(self, name: str, local: bool = True) -> str | None:
        """Return the value, or None for a missing key and on a read error, as StackStorm does."""
        try:
            (found,) = self.list_values(local, name)
        except Exception:
            return None
        return found.value

    def list_values(self, local: bool = True, prefix: str | None = None) -> list[KeyValuePair]:
        """List values; raise on a read error, as StackStorm does."""
        return [
            KeyValuePair(f"slurm.TriggerSensor:{name}", value)
            for name, value in self.values.items()
            if name.startswith(prefix or "")
        ]

    def set_value(self, name: str, value: str, ttl: int | None = None, local: bool = True) -> None:
        assert isinstance(value, str), "the datastore keeps texts"
        self.values[name] = value


class BaseActionTestCase(unittest.TestCase):
    """Base of tests of an action."""

    action_cls: Any = None

    def get_action_instance(self, config: dict[str, Any] | None = None) -> Any:
        return self.action_cls(config=config)


class BaseSensorTestCase(unittest.TestCase):
    """Base of tests of a sensor."""

    sensor_cls: Any = None

    def setUp(self) -> None:
        self.sensor_service = SensorService()

    def get_sensor_instance(self, config: dict[str, Any] | None = None) -> Any:
        return self.sensor_cls(sensor_service=self.sensor_service, config=config)

    def get_dispatched_triggers(self) -> list[dict[str, Any]]:
        return self.sensor_service.dispatched

    def assertTriggerDispatched(  # noqa: N802 - StackStorm's name
        self, trigger: str, payload: dict[str, Any] | None = None
    ) -> None:
        for one in self.sensor_service.dispatched:
            if one["trigger"] == trigger and payload in (None, one["payload"]):
                return
        raise AssertionError(f"{trigger} was not dispatched: {self.sensor_service.dispatched}")
