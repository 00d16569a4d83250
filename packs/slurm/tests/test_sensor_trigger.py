"""Tests of the sensor, in StackStorm's own form."""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from st2tests.base import BaseSensorTestCase
from trigger_sensor import TriggerSensor

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

    def test_its_name_stays(self) -> None:
        again = self.get_sensor_instance(config=_CONFIG)
        again.setup()
        again.cleanup()
        last = self.get_dispatched_triggers()[-1]
        self.assertEqual(last["payload"]["uuid"], self.where["uuid"])

    def _call(self, url: str, body: bytes) -> None:
        request = urllib.request.Request(url, data=body, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            self.assertEqual(answer.status, 204)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
