"""The pack's sensor: tells StackStorm of every change of a node's state, and of Slurm's triggers.

What happened is Steward's to say: it compares what Slurm shows with what it showed
before, so that nothing is missed. Here it is asked for what is new, every few
seconds and whenever a trigger fires. How far it was told, and the states told last,
are kept in StackStorm's datastore; what Steward has forgotten when the sensor was
away for long is found by comparing.
"""

import contextlib
import json
import queue
import sys
import uuid as uuids
from pathlib import Path
from typing import Any, Final

from st2reactor.sensor.base import Sensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from listening import Heard, Listener

from steward.automation.actions import RunAnswer, RunRequest
from steward.client.asking import action, call
from steward.client.place import Place
from steward.errors import StewardError
from steward.events import NODE_STATE
from steward.journal.telling import EventsAnswer, EventsRequest
from steward.slurm.node_states import parse, shown

_PORT: Final = 32000
_POLL_S: Final = 5.0
_MOST: Final = 500
_PROGRAM: Final = "/usr/libexec/steward/slurm-trigger-notify"


class TriggerSensor(Sensor):
    """Dispatches slurm.node.state, and slurm.sensor.trigger.up, .down and .triggered."""

    def __init__(self, sensor_service: Any, config: dict[str, Any] | None = None) -> None:
        super().__init__(sensor_service=sensor_service, config=config)
        mine = config or {}
        path = mine.get("config") or ""
        self._place = Place(config=path, socket="" if path else mine.get("socket") or "")
        self._cluster: str = mine.get("cluster") or ""
        self._ip: str = mine.get("trigger_sensor_ip") or "127.0.0.1"
        port = mine.get("trigger_sensor_port")
        self._port = _PORT if port is None else int(port)
        self._program: str = mine.get("trigger_program") or _PROGRAM
        self._poll_s = float(mine.get("poll_interval") or _POLL_S)
        self._log = sensor_service.get_logger(name=type(self).__name__)
        self._listener: Listener | None = None
        self._uuid = ""
        self._states: dict[str, str] = {}
        self._said = ""
        self._is_ending = False

    def setup(self) -> None:
        """Listen, under the name of the time before: triggers that are set go on to be heard."""
        self._uuid = self.sensor_service.get_value("uuid") or str(uuids.uuid4())
        self.sensor_service.set_value("uuid", self._uuid)
        self._states = json.loads(self.sensor_service.get_value("states") or "{}")
        self._listener = Listener(self._ip, self._port, self._uuid)
        self._listener.start()

    def run(self) -> None:
        """Tell what happens until :meth:`cleanup`."""
        assert self._listener is not None
        self.sensor_service.dispatch(trigger="slurm.sensor.trigger.up", payload=self._where())
        has_compared = False
        while not self._is_ending:
            try:
                self._tell_news()
                if not has_compared:
                    self._compare()
                    has_compared = True
                self._said = ""
            except StewardError as error:
                # Asked again at the next turn; what happens meanwhile is told then.
                if str(error) != self._said:
                    self._said = str(error)
                    self._log.warning("Steward cannot be asked for news: %s", error)
            # Where nothing is heard for so long it is time to ask again all the same.
            with contextlib.suppress(queue.Empty):
                self._hear(self._listener.heard.get(timeout=self._poll_s))

    def cleanup(self) -> None:
        """Stop; StackStorm ends the process after it."""
        self._is_ending = True
        if self._listener is not None:
            self._listener.stop()
        self.sensor_service.dispatch(trigger="slurm.sensor.trigger.down", payload=self._where())

    def add_trigger(self, trigger: Any) -> None:
        """Rules that want our triggers need nothing."""

    def update_trigger(self, trigger: Any) -> None:
        """As above."""

    def remove_trigger(self, trigger: Any) -> None:
        """As above."""

    def _where(self) -> dict[str, Any]:
        port = self._listener.port if self._listener else self._port
        return {
            "uuid": self._uuid,
            "ip": self._ip,
            "port": port,
            "url": f"http://{self._ip}:{port}/{self._uuid}",
            "program": self._program,
        }

    def _hear(self, heard: Heard | None) -> None:
        if heard is None:
            return
        where = self._where()
        payload = {name: where[name] for name in ("uuid", "url", "program")}
        payload |= {"class": heard.kind, "type": heard.type, "nodes": heard.nodes}
        self.sensor_service.dispatch(trigger="slurm.sensor.trigger.triggered", payload=payload)

    def _tell_news(self) -> None:
        kept = self.sensor_service.get_value("position")
        position = int(kept) if kept else None
        while True:
            answer = self._events(position)
            # Whoever begins is told of what comes, not of what was.
            told = [] if position is None else answer.events
            for event in told:
                self._tell({**event.body, "cluster": event.cluster, "at": event.at.isoformat()})
            if answer.position == position:
                return
            position = answer.position
            self._keep(position)

    def _events(self, position: int | None) -> EventsAnswer:
        clusters = (self._cluster,) if self._cluster else ()
        request = EventsRequest(kinds=(NODE_STATE,), clusters=clusters, after=position, limit=_MOST)
        answer: EventsAnswer = call(self._place, action("events.list"), request)
        return answer

    def _tell(self, payload: dict[str, Any]) -> None:
        self._states[payload["node"]] = payload["state"]
        self.sensor_service.dispatch(trigger="slurm.node.state", payload=payload)

    def _compare(self) -> None:
        """Tell what changed while nobody listened and is not among Steward's events any more."""
        request = RunRequest(
            action="slurm.node.get", parameters={"nodes": "ALL"}, cluster=self._cluster
        )
        answer: RunAnswer = call(self._place, action("automation.run"), request)
        if answer.status != "succeeded":
            raise StewardError(answer.message)
        for node, details in answer.result.items():
            state = shown(*parse(details["state"]))
            before = self._states.get(node)
            self._states[node] = state
            if before is not None and before != state:
                self._tell(_found(node, state, before, details, answer))
        self._keep(None)

    def _keep(self, position: int | None) -> None:
        if position is not None:
            self.sensor_service.set_value("position", str(position))
        self.sensor_service.set_value("states", json.dumps(self._states))


def _found(
    node: str, state: str, before: str, details: dict[str, Any], answer: RunAnswer
) -> dict[str, Any]:
    """What is told of a node that was found in another state than it was told to be in."""
    return {
        "cluster": answer.cluster,
        "node": node,
        "state": state,
        "old_state": before,
        "reason": details.get("reason") or "",
        "reason_uid": None,
        "source": "start",
        "at": answer.started.isoformat(),
        "failed": False,
        "partitions": list(details.get("partitions") or ()),
    }
