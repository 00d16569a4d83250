"""Tests of the sensor, in StackStorm's own form."""

import contextlib
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import trigger_sensor
from st2tests.base import BaseSensorTestCase
from trigger_sensor import TriggerSensor

from steward.core.actions import Action
from steward.reports.events import EventItem, EventsReply
from steward.reports.history.requests import NodesReply

_CONFIG = {
    "socket": "/nonexistent/steward.sock",
    "trigger_sensor_port": 0,
    "trigger_program": "/opt/notify",
    "poll_interval": 1,
}


class TriggerSensorTestCase(BaseSensorTestCase):
    """The sensor comes up, hears of triggers whatever becomes of Steward, and goes."""

    sensor_cls = TriggerSensor

    def setUp(self) -> None:
        super().setUp()
        self.sensor = self.get_sensor_instance(config=_CONFIG)
        self.sensor.setup()
        self.thread = threading.Thread(target=self.sensor.run)
        self.thread.start()
        self._until(lambda: bool(self.get_dispatched_triggers()))

    def tearDown(self) -> None:
        self.sensor.cleanup()
        self.thread.join(30)
        self.assertFalse(self.thread.is_alive())
        self.assertTriggerDispatched("slurm.sensor.trigger.down", self.where)

    @property
    def where(self) -> dict[str, object]:
        first = self.get_dispatched_triggers()[0]
        self.assertEqual(first["trigger"], "slurm.sensor.trigger.up")
        payload: dict[str, object] = first["payload"]
        return payload

    def test_a_trigger_is_told(self) -> None:
        self._call(f"{self.where['url']}/node/down", b"n[1-3],gpu7")
        self._until(lambda: len(self.get_dispatched_triggers()) > 1)
        self.assertTriggerDispatched(
            "slurm.sensor.trigger.triggered",
            {
                "uuid": self.where["uuid"],
                "url": self.where["url"],
                "program": "/opt/notify",
                "class": "node",
                "type": "down",
                "nodes": "n[1-3],gpu7",
            },
        )

    def test_strangers_are_not_heard(self) -> None:
        url = str(self.where["url"])
        base = url.rpartition("/")[0]
        for path, body, code in (
            (f"{base}/00000000-0000-0000-0000-000000000000/node/down", b"", 404),
            (f"{url}/node", b"", 404),
            (f"{url}/node/{'x' * 100}", b"", 404),
            (f"{url}/node/..%2Fdown", b"", 404),
            (f"{url}/node/down", b"n1; reboot", 400),
            (f"{url}/node/down", b"n" * 70000, 413),
        ):
            with self.assertRaises(urllib.error.HTTPError) as caught:
                self._call(path, body)
            self.assertEqual(caught.exception.code, code)
            caught.exception.close()
        self.assertEqual(len(self.get_dispatched_triggers()), 1)

    def test_it_ends_though_an_exception_got_lost(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.sensor.setup()

        class Finalized:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGTERM)

        with mock.patch.object(sys, "unraisablehook") as lost:
            Finalized()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.assertIs(lost.call_args.args[0].exc_type, SystemExit)
        self.thread.join(30)
        self.assertFalse(self.thread.is_alive())

    def test_its_name_stays(self) -> None:
        uuid = self.where["uuid"]
        self._until(lambda: "record" in self.sensor_service.values)
        with self._running():
            self._until(lambda: len(self._ups()) > 1)
        last = self._ups()[-1]
        self.assertEqual(last["payload"]["uuid"], uuid)

    def test_a_datastore_that_cannot_be_read_is_not_an_empty_one(self) -> None:
        uuid = self.where["uuid"]
        self._until(lambda: "record" in self.sensor_service.values)
        kept = self.sensor_service.values["record"]
        failures = []

        def fail(*_: object, **__: object) -> list[object]:
            failures.append(1)
            raise OSError("500 of the API")

        away = mock.patch.object(self.sensor_service, "list_values", fail)
        away.start()
        with self._running():
            self._until(lambda: len(failures) > 1)
            self.assertEqual(len(self._ups()), 1)
            self.assertEqual(self.sensor_service.values["record"], kept)
            away.stop()
            self._until(lambda: len(self._ups()) > 1)
        self.assertEqual(self._ups()[-1]["payload"]["uuid"], uuid)

    def test_a_record_that_is_not_ours_is_replaced(self) -> None:
        self._until(lambda: "record" in self.sensor_service.values)
        self.sensor_service.values["record"] = '{"uuid": "x", "states": {"IDLE": "n1"}}'
        with self._running():
            self._until(lambda: len(self._ups()) > 1)
            self._until(lambda: '"states":{}' in self.sensor_service.values["record"])
        self.assertNotIn(self._ups()[-1]["payload"]["uuid"], ("x", self.where["uuid"]))

    def test_a_datastore_that_cannot_be_written_is_written_later(self) -> None:
        self._until(lambda: "record" in self.sensor_service.values)
        self.sensor_service.values.clear()
        write = self.sensor_service.set_value
        failures = []

        def fail(*_: object, **__: object) -> None:
            failures.append(1)
            raise OSError("500 of the API")

        away = mock.patch.object(self.sensor_service, "set_value", fail)
        away.start()
        with self._running():
            self._until(lambda: len(failures) > 1)
            self.assertEqual(self.sensor_service.values, {})
            away.stop()
            self.assertEqual(self.sensor_service.set_value, write)
            self._until(lambda: "record" in self.sensor_service.values)
            # Nothing is told twice for it.
            self.assertEqual(len(self._ups()), 2)

    def test_a_queue_that_is_away_loses_no_trigger(self) -> None:
        url = str(self.where["url"])
        failures = []

        def fail(*_: object, **__: object) -> None:
            failures.append(1)
            raise OSError("no message queue")

        with mock.patch.object(self.sensor_service, "dispatch", fail):
            self._call(f"{url}/node/down", b"n1")
            self._until(lambda: len(failures) > 1)
            self.assertTrue(self.thread.is_alive())
        self._until(lambda: len(self.get_dispatched_triggers()) > 1)
        self.assertEqual(self.get_dispatched_triggers()[-1]["payload"]["nodes"], "n1")

    def test_a_port_that_is_taken_stops_nothing_else(self) -> None:
        port = self.where["port"]
        written = []
        write = self.sensor_service.set_value

        def keep(name: str, value: str) -> None:
            written.append(name)
            write(name, value)

        self.sensor_service.values.clear()
        with (
            mock.patch.object(self.sensor_service, "set_value", keep),
            self._running(trigger_sensor_port=port),
        ):
            self._until(lambda: bool(written))
            self.assertEqual(len(self._ups()), 1)

    def test_a_change_is_told_once_whenever_the_sensor_is_restarted(self) -> None:
        self.sensor.cleanup()
        self.thread.join(30)
        events: list[EventItem] = []

        def happen(state: str, reason: str) -> None:
            body = {"node": "n1", "state": state, "reason": reason}
            now = datetime.now(UTC)
            events.append(
                EventItem(
                    id=len(events) + 1,
                    kind="node.state",
                    cluster="c1",
                    key=str(len(events)),
                    at=now,
                    seen_at=now,
                    source="sensor",
                    body=body,
                )
            )
            self._until(lambda: len(told()) == len(events))

        def told() -> list[str]:
            return [
                one["payload"]["reason"]
                for one in self.get_dispatched_triggers()
                if one["trigger"] == "slurm.node.state"
            ]

        def answer(_place: object, action: Action, request: Any) -> object:
            if action.name == "history.nodes":
                return NodesReply(nodes=(), at=datetime.now(UTC), sensor=True, position=len(events))
            after = len(events) if request.after is None else request.after
            return EventsReply(events=tuple(events[after:]), position=len(events))

        with mock.patch.object(trigger_sensor, "call_action", answer):
            with self._running():
                self._until(lambda: '"position":0' in self.sensor_service.values["record"])
                happen("DOWN", "a fan")
                # The state stays, so that only the position shows that this was told.
                happen("DOWN", "two fans")
            with self._running():
                happen("IDLE", "")
        self.assertEqual(told(), ["a fan", "two fans", ""])

    @contextlib.contextmanager
    def _running(self, **config: object) -> Iterator[None]:
        """Another sensor, with the same datastore."""
        another = self.get_sensor_instance(config={**_CONFIG, **config})
        another.setup()
        thread = threading.Thread(target=another.run)
        thread.start()
        try:
            yield
        finally:
            another.cleanup()
            thread.join(30)
            self.assertFalse(thread.is_alive())

    def _ups(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self.get_dispatched_triggers()
        return [one for one in told if one["trigger"] == "slurm.sensor.trigger.up"]

    def _call(self, url: str, body: bytes) -> None:
        request = urllib.request.Request(url, data=body, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            self.assertEqual(answer.status, 204)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
