"""The pack's sensor: reports every change of a node's state, and Slurm's triggers, to StackStorm.

Steward compares what Slurm shows with what it showed before. The sensor asks Steward for
new events every few seconds and whenever a trigger fires. StackStorm's datastore keeps one
record: the sensor's UUID, the position in Steward's journal, and the states reported last.
Changes whose events Steward has forgotten while the sensor was away are found by comparing
that record with Steward's own, not with Slurm: what Slurm shows now may change again before
Steward looks, so that no event would follow.
"""

import contextlib
import queue
import signal
import sys
import threading
import time
import uuid as uuids
from pathlib import Path
from typing import Any, Final

import msgspec
from st2reactor.sensor.base import Sensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from listening import Heard, Listener

from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.events import NODE_STATE
from steward.daemon.registry import get_action
from steward.reports.events import EventsReply, EventsRequest
from steward.reports.history.requests import NodeSnapshot, NodesReply, NodesRequest
from steward.slurm.node_states import strip_use_flags
from steward.slurm.nodelists import expand_nodelist, fold_nodelist

_PORT: Final = 32000
_POLL_S: Final = 5.0
_MOST: Final = 500
_KEY: Final = "record"
_POSITION_S: Final = 600.0
"""Longest time before a position is written though no state changed, in seconds."""
_PROGRAM: Final = "/usr/libexec/steward/slurm-trigger-notify"


class Record(msgspec.Struct, kw_only=True):
    """The sensor's record in StackStorm's datastore.

    Attributes:
        uuid: First part of the paths that Slurm's triggers call.
        position: Position in Steward's journal; None before the first answer.
        states: For each cluster node lists by the state that was reported last.
    """

    uuid: str
    position: int | None = None
    states: dict[str, dict[str, str]] = {}


class TriggerSensor(Sensor):
    """Dispatches slurm.node.state, and slurm.sensor.trigger.up, .down and .triggered."""

    def __init__(self, sensor_service: Any, config: dict[str, Any] | None = None) -> None:
        super().__init__(sensor_service=sensor_service, config=config)
        mine = config or {}
        path = mine.get("config") or ""
        self._place = ClientPlace(config=path, socket="" if path else mine.get("socket") or "")
        self._cluster: str = mine.get("cluster") or ""
        self._ip: str = mine.get("trigger_sensor_ip") or "127.0.0.1"
        port = mine.get("trigger_sensor_port")
        self._port = _PORT if port is None else int(port)
        self._program: str = mine.get("trigger_program") or _PROGRAM
        self._poll_s = float(mine.get("poll_interval") or _POLL_S)
        self._log = sensor_service.get_logger(name=type(self).__name__)
        self._listener: Listener | None = None
        self._uuid = ""
        self._position: int | None = None
        self._states: dict[tuple[str, str], str] = {}
        self._is_dirty = False
        self._written = 0.0
        self._is_up = False
        self._has_compared = False
        self._heard: Heard | None = None
        self._warned: dict[str, str] = {}
        self._is_stopped = False
        self._ending = threading.Event()

    def setup(self) -> None:
        """Have an orderly stop reach :meth:`cleanup`: StackStorm ends sensors with SIGTERM.

        Everything that can fail is left to :meth:`run`, which tries again.
        """
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> None:
        """Report events until :meth:`cleanup`."""
        while not self._is_ending() and not self._try("read the datastore", self._read):
            self._ending.wait(self._poll_s)
        while not self._is_ending():
            self._try(f"listen on {self._ip}:{self._port}", self._listen)
            self._try("report a trigger of Slurm", self._report_heard)
            self._try("report changes of nodes", self._report_news)
            self._try("write the datastore", self._write)
            self._wait()

    def _stop(self, *_: object) -> None:
        # What is raised here ends nothing where a finalizer is at work.
        self._is_stopped = True
        sys.exit(0)

    def _is_ending(self) -> bool:
        return self._is_stopped or self._ending.is_set()

    def cleanup(self) -> None:
        """Stop; StackStorm ends the process after it."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._listener is not None:
            self._listener.stop()
        # The process may have ended between a report and the write after it.
        self._try("write the datastore", self._write)
        if self._is_up:
            self._try(
                "report the end",
                lambda: self.sensor_service.dispatch(
                    trigger="slurm.sensor.trigger.down", payload=self._where()
                ),
            )

    def _try(self, task: str, work: Any) -> bool:
        """Do a part of the turn; log its failure once, and log that it works again.

        StackStorm's API, its message queue and Steward can each be away for a while. What
        they raise is not one family of exceptions, and a sensor that ends is not restarted.
        """
        try:
            work()
        except Exception as error:
            if self._warned.get(task) != str(error):
                self._warned[task] = str(error)
                self._log.warning("cannot %s: %s; the sensor tries again", task, error)
            return False
        if self._warned.pop(task, ""):
            self._log.warning("the sensor can %s again", task)
        return True

    def _wait(self) -> None:
        if self._listener is None or self._heard is not None:
            self._ending.wait(self._poll_s)
            return
        with contextlib.suppress(queue.Empty):
            self._heard = self._listener.heard.get(timeout=self._poll_s)

    def _read(self) -> None:
        # Not get_value(): it answers None for a key that cannot be read, too.
        found = [
            pair
            for pair in self.sensor_service.list_values(prefix=_KEY)
            if pair.name.rpartition(":")[2] == _KEY
        ]
        if not found:
            self._uuid = str(uuids.uuid4())
            self._is_dirty = True
            return
        try:
            record = msgspec.json.decode(found[0].value, type=Record)
        except msgspec.DecodeError as error:
            self._log.warning("the record in the datastore is not ours and is replaced: %s", error)
            record = Record(uuid=str(uuids.uuid4()))
            self._is_dirty = True
        self._uuid, self._position = record.uuid, record.position
        self._states = {
            (cluster, node): state
            for cluster, lists in record.states.items()
            for state, nodes in lists.items()
            for node in expand_nodelist(nodes)
        }

    def _write(self) -> None:
        is_late = time.monotonic() - self._written >= _POSITION_S
        if not self._is_dirty and not (is_late and self._position is not None):
            return
        named: dict[str, dict[str, list[str]]] = {}
        for (cluster, node), state in sorted(self._states.items()):
            named.setdefault(cluster, {}).setdefault(state, []).append(node)
        record = Record(
            uuid=self._uuid,
            position=self._position,
            states={
                cluster: {state: fold_nodelist(nodes) for state, nodes in sorted(lists.items())}
                for cluster, lists in named.items()
            },
        )
        self.sensor_service.set_value(_KEY, msgspec.json.encode(record).decode())
        self._is_dirty = False
        self._written = time.monotonic()

    def _listen(self) -> None:
        if self._listener is None:
            listener = Listener(self._ip, self._port, self._uuid)
            listener.start()
            self._listener = listener
        if not self._is_up:
            self.sensor_service.dispatch(trigger="slurm.sensor.trigger.up", payload=self._where())
            self._is_up = True

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

    def _report_heard(self) -> None:
        if self._heard is None:
            return
        where = self._where()
        payload = {name: where[name] for name in ("uuid", "url", "program")}
        payload |= {
            "class": self._heard.kind,
            "type": self._heard.type,
            "nodes": self._heard.nodes,
        }
        self.sensor_service.dispatch(trigger="slurm.sensor.trigger.triggered", payload=payload)
        self._heard = None

    def _report_news(self) -> None:
        self._report_events()
        if self._has_compared:
            return
        request = NodesRequest(cluster=self._cluster)
        answer: NodesReply = call_action(self._place, get_action("history.nodes"), request)
        reported = self._position or 0
        if any(event.id <= reported for event in self._events(answer.position).events):
            return  # The answer has not all that was reported: the next turn asks again.
        # What came since then is in the answer or not; its own events tell it.
        self._compare(answer, self._report_events())
        self._has_compared = True

    def _report_events(self) -> set[tuple[str, str]]:
        """Report what is behind the position; the nodes of which that tells."""
        told: set[tuple[str, str]] = set()
        while True:
            answer = self._events(self._position)
            # The first answer gives the position to begin at, and no earlier events.
            if self._position is None:
                self._is_dirty = True
            else:
                for event in answer.events:
                    # Over a socket it is a mapping already; read here it is a NodeState.
                    body = msgspec.to_builtins(event.body)
                    self._report({**body, "cluster": event.cluster, "at": event.at.isoformat()})
                    told.add((event.cluster, body["node"]))
                    # Each counts once it is reported: a failure at the next repeats none.
                    self._position = event.id
                    self._is_dirty = True
            is_last = answer.position == self._position
            self._position = answer.position
            if is_last or not answer.events:
                return told

    def _events(self, position: int | None) -> EventsReply:
        clusters = (self._cluster,) if self._cluster else ()
        request = EventsRequest(kinds=(NODE_STATE,), clusters=clusters, after=position, limit=_MOST)
        answer: EventsReply = call_action(self._place, get_action("events.list"), request)
        return answer

    def _report(self, payload: dict[str, Any]) -> None:
        self.sensor_service.dispatch(trigger="slurm.node.state", payload=payload)
        self._remember((payload["cluster"], payload["node"]), payload["state"])

    def _remember(self, key: tuple[str, str], state: str) -> None:
        if self._states.get(key) != state:
            self._states[key] = state
            self._is_dirty = True

    def _compare(self, answer: NodesReply, told: set[tuple[str, str]]) -> None:
        """Report changes whose events Steward no longer holds; jobs on a node are none.

        Args:
            answer: The nodes as Steward knows them.
            told: Nodes that later events told of.
        """
        nodes = {(one.cluster, one.node): one for one in answer.nodes}
        for key, node in nodes.items():
            before = self._states.get(key)
            if before is None:
                self._remember(key, node.state)
            elif key not in told and strip_use_flags(before) != strip_use_flags(node.state):
                self._report(_found(node, before))
        for key in self._states.keys() - nodes.keys() - told:
            del self._states[key]
            self._is_dirty = True


def _found(node: NodeSnapshot, before: str) -> dict[str, Any]:
    """What is told of a node that was found in another state than it was told to be in."""
    return {
        "cluster": node.cluster,
        "node": node.node,
        "state": node.state,
        "old_state": before,
        "reason": node.reason,
        "reason_uid": node.reason_uid,
        "source": "start",
        "at": node.since.isoformat(),
        "failed": False,
        "partitions": list(node.partitions),
    }
