"""Program that runs a sensor of a pack in a separate process, as StackStorm does.

Usage: sensor_container.py FILE CLASS CONFIG DATASTORE. It writes what the sensor dispatches, one
line of JSON each; the datastore is a file of JSON.
"""

import atexit
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from st2tests.base import SensorService


class PrintingService(SensorService):
    """Writes what a sensor dispatches, and stores values in a file."""

    def __init__(self, datastore: Path) -> None:
        super().__init__()
        self._datastore = datastore
        if datastore.exists():
            self.values = json.loads(datastore.read_text())

    def dispatch(
        self, trigger: str, payload: dict[str, Any] | None = None, trace_tag: str | None = None
    ) -> None:
        print(json.dumps({"trigger": trigger, "payload": payload}), flush=True)

    def set_value(self, name: str, value: str, ttl: int | None = None, local: bool = True) -> None:
        super().set_value(name, value, ttl, local)
        written = self._datastore.with_suffix(".new")
        # A sensor that ran as another user may have been ended before it renamed its file.
        written.unlink(missing_ok=True)
        written.write_text(json.dumps(self.values))
        written.replace(self._datastore)


def main(file: str, kind: str, config: str, datastore: str) -> None:
    """Run one sensor until a signal ends it."""
    spec = importlib.util.spec_from_file_location("sensor", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    service = PrintingService(Path(datastore))
    sensor = getattr(module, kind)(sensor_service=service, config=json.loads(config))

    # StackStorm's wrapper catches no signal: only an orderly exit reaches this.
    atexit.register(sensor.cleanup)
    sensor.setup()
    sensor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
