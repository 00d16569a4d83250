"""Rules Sites: rules in a directory, a scripted handler of actions, a journal in memory."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from harness.events import NOON, make_event
from harness.site import Site
from steward.automation.rules.consumer import RulesConsumer
from steward.automation.rules.execution import NodeAvailability, RecoveredOutcome
from steward.automation.rules.store import Execution, RulesStore
from steward.automation.runner import OperationOutcome
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.core.events import NODE_STATE, Event, NodeState
from steward.slurm.settings import ClusterSettings

SOON_S = 0.1

DRAIN = """
name: drain
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed:
    type: equals
    pattern: true
action:
  ref: slurm.node.drain
  parameters:
    nodes: "{{ trigger.node }}"
    reason: "failed: {{ trigger.reason }}"
context:
  steward:
    rate_limit: 100000/1h
"""

MAIL = """
name: mail
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed:
    type: equals
    pattern: true
action:
  ref: notify.email
  parameters:
    to: [root]
    subject: "{{ trigger.node }}"
context:
  steward:
    rate_limit: 100000/1h
"""


def failure(number: int, node: str = "n1", **more: Any) -> Event:
    """Return a node failure, ``number`` seconds after noon, with ``number`` as its id."""
    at = more.pop("at", NOON + timedelta(seconds=number))
    body = {"node": node, "state": "DOWN", "old_state": "IDLE", "failed": True, **more}
    key = f"node.state:{node}:{number}"
    event = make_event(NODE_STATE, key, NodeState(**body), at, source="sensor")
    return msgspec.structs.replace(event, id=number)


class Killed(BaseException):
    """Simulated SIGKILL; a BaseException, so that error handlers do not catch it."""


class World:
    """The cluster that actions change; it survives every restart of the consumer."""

    def __init__(self, nodes: int = 100) -> None:
        self.nodes = {f"n{number}" for number in range(1, nodes + 1)}
        self.drained: set[str] = set()
        self.done: list[tuple[str, str, dict[str, Any]]] = []
        """Executed actions: rule, action and parameters of each."""
        self.acted: list[tuple[str, str]] = []
        """Executed actions: rule and event of each."""
        self.over: set[tuple[int, int]] = set()
        """Executions whose action has ended, by id and try."""
        self.ran: Callable[[Execution], OperationOutcome | None] = lambda _one: None
        self.checked: Callable[[Execution], bool | None] = lambda _one: None
        self.found: Callable[[Execution], RecoveredOutcome] = lambda _one: RecoveredOutcome(
            state="unseen"
        )
        self.lock = threading.Lock()


class WorldsHand:
    """Handler that runs actions on a World: an :class:`ActionPerformer`."""

    def __init__(self, world: World, clock: Callable[[], datetime]) -> None:
        self._world = world
        self._clock = clock

    def query_nodes(self, execution: Execution) -> NodeAvailability:
        world = self._world
        with world.lock:
            return NodeAvailability(
                to_take=frozenset(str(execution.parameters["nodes"]).split(",")),
                partition_nodes={"debug": frozenset(world.nodes)},
                available=frozenset(world.nodes - world.drained),
                names=frozenset(world.nodes),
                queried_at=self._clock(),
            )

    def run(self, execution: Execution, timeout_s: float | None) -> OperationOutcome:
        try:
            result = self._world.ran(execution)
            with self._world.lock:
                if result is None and not execution.dry_run:
                    self._world.done.append(
                        (execution.rule, execution.action, execution.parameters)
                    )
                    self._world.acted.append((execution.rule, execution.event))
                    if execution.action == "slurm.node.drain":
                        self._world.drained |= set(execution.parameters["nodes"].split(","))
            return result or ran(execution)
        finally:
            self._world.over.add((execution.id, execution.attempts))

    def check(self, execution: Execution) -> bool | None:
        return self._world.checked(execution)

    def find(self, execution: Execution) -> RecoveredOutcome:
        return self._world.found(execution)


def ran(one: Execution, **more: Any) -> OperationOutcome:
    """Return the result of an action; ``more`` sets other fields."""
    now = datetime.now(UTC)
    values: dict[str, Any] = {"id": 1, "started": now, "ended": now, "dry_run": one.dry_run, **more}
    return OperationOutcome(
        action=one.action, cluster=one.cluster, parameters=one.parameters, **values
    )


class RulesSite(Site):
    """A Site with the consumer of rules, which a test can kill and start again.

    Attributes:
        engine: The consumer of rules.
    """

    def __init__(self, directory: Path, *rules: str, world: World | None = None, **of: Any) -> None:
        self.rules = directory / "rules.d"
        self.rules.mkdir(exist_ok=True)
        for number, text in enumerate(rules):
            (self.rules / f"{number}.yaml").write_text(text)
        keys = {"mode": "on", "directories": (str(self.rules),), **of}
        super().__init__(
            directory,
            clusters={"c1": ClusterSettings()},
            rules=RulesSettings(**keys),
            actions=ActionsSettings(timeout_s=0.5),
        )
        self.world = world or World()
        self.kill_at_append = False
        self.start()

    def start(self) -> None:
        def clock() -> datetime:
            return self.now

        self.store = RulesStore(self.settings.state_dir)
        self.engine = RulesConsumer(
            self.settings, lambda: WorldsHand(self.world, clock), clock, store=self.store
        )

    def restart(self) -> None:
        """Start a new consumer, as after SIGKILL of the old one."""
        self.store.close()
        self.start()

    @property
    def said(self) -> dict[str, Event]:
        """Events that the consumer appended, by key; the journal keeps the first of each key."""
        return {event.key: event for event in reversed(self.journal)}

    def kill(self) -> None:
        """Wait until started actions have ended, then restart before the consumer sees that."""
        until = time.monotonic() + 60
        while self.is_acting() and time.monotonic() < until:
            time.sleep(0.001)
        self.restart()

    def is_acting(self) -> bool:
        started = {
            (execution.id, execution.attempts) for execution in self.store.list_by_phase("started")
        }
        return not started <= self.world.over

    def append(self, new: Sequence[Event]) -> None:
        super().append(new)
        if self.kill_at_append:
            raise Killed

    def give(self, *events: Event) -> None:
        self.engine.apply(events, events[-1].id, self.append)

    def settle(self) -> None:
        """Run timed work until no execution is running or due."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            # tick() returns a short delay while an execution is running or due.
            if self.engine.tick(self.append) > SOON_S:
                return
            time.sleep(0.002)
        executions = self.open_()
        raise AssertionError(f"{len(executions)} are still open, such as {executions[:3]}")

    def open_(self) -> list[Execution]:
        return [execution for execution in self.history() if execution.phase != "ended"]

    def history(self) -> list[Execution]:
        store = RulesStore(self.settings.state_dir, read_only=True)
        try:
            return store.list_executions(limit=100_000)[::-1]
        finally:
            store.close()

    def statuses(self) -> list[str]:
        return [execution.status or execution.phase for execution in self.history()]


def with_care(rule: str, **care: Any) -> str:
    """Return a rule with these keys in its section ``context.steward``."""
    keys = {"rate_limit": "1000/1h", **care}
    lines = "".join(
        f"    {key}: {msgspec.json.encode(value).decode()}\n" for key, value in keys.items()
    )
    return f"{rule.partition('context:')[0]}context:\n  steward:\n{lines}"
