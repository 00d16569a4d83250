"""Rules of a directory, a hand that does as it is told, and a journal in memory."""

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
from steward.automation.rules.hand import Found, Look
from steward.automation.rules.store import Store
from steward.automation.rules.tables import Execution
from steward.automation.running import Ran
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.core.events import NODE_STATE, Event
from steward.core.state_facts import NodeState
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
    """The number-th event of a day: a node fails."""
    at = more.pop("at", NOON + timedelta(seconds=number))
    body = {"node": node, "state": "DOWN", "old_state": "IDLE", "failed": True, **more}
    key = f"node.state:{node}:{number}"
    event = make_event(NODE_STATE, key, NodeState(**body), at, source="sensor")
    return msgspec.structs.replace(event, id=number)


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches errors may catch it."""


class World:
    """What actions work on: it outlives every process."""

    def __init__(self, nodes: int = 100) -> None:
        self.nodes = {f"n{number}" for number in range(1, nodes + 1)}
        self.drained: set[str] = set()
        self.done: list[tuple[str, str, dict[str, Any]]] = []
        """Each time that something was done: the rule, the action, its parameters."""
        self.acted: list[tuple[str, str]] = []
        """The same by rule and event."""
        self.over: set[tuple[int, int]] = set()
        """Executions whose action is over, by id and try."""
        self.ran: Callable[[Execution], Ran | None] = lambda _one: None
        self.checked: Callable[[Execution], bool | None] = lambda _one: None
        self.found: Callable[[Execution], Found] = lambda _one: Found(traces="unseen")
        self.lock = threading.Lock()


class WorldsHand:
    """See :class:`steward.automation.rules.hand.Hand`."""

    def __init__(self, world: World, clock: Callable[[], datetime]) -> None:
        self._world = world
        self._clock = clock

    def look(self, one: Execution) -> Look:
        world = self._world
        with world.lock:
            return Look(
                wanted=frozenset(str(one.parameters["nodes"]).split(",")),
                members={"debug": frozenset(world.nodes)},
                available=frozenset(world.nodes - world.drained),
                names=frozenset(world.nodes),
                seen=self._clock(),
            )

    def run(self, one: Execution, timeout_s: float | None) -> Ran:
        try:
            told = self._world.ran(one)
            with self._world.lock:
                if told is None and not one.dry_run:
                    self._world.done.append((one.rule, one.action, one.parameters))
                    self._world.acted.append((one.rule, one.event))
                    if one.action == "slurm.node.drain":
                        self._world.drained |= set(one.parameters["nodes"].split(","))
            return told or ran(one)
        finally:
            self._world.over.add((one.id, one.tries))

    def check(self, one: Execution) -> bool | None:
        return self._world.checked(one)

    def find(self, one: Execution) -> Found:
        return self._world.found(one)


def ran(one: Execution, **more: Any) -> Ran:
    """How an action went."""
    now = datetime.now(UTC)
    given: dict[str, Any] = {"id": 1, "started": now, "ended": now, "dry_run": one.dry_run, **more}
    return Ran(ref=one.action, cluster=one.cluster, parameters=one.parameters, **given)


class RulesSite(Site):
    """The consumer of rules, which can be killed and started again.

    Attributes:
        engine: The consumer; it is given events by the ids that they have.
    """

    def __init__(self, directory: Path, *rules: str, world: World | None = None, **of: Any) -> None:
        self.rules = directory / "rules.d"
        self.rules.mkdir(exist_ok=True)
        for number, text in enumerate(rules):
            (self.rules / f"{number}.yaml").write_text(text)
        given = {"enabled": True, "directories": (str(self.rules),), "shipped": False, **of}
        super().__init__(
            directory,
            clusters={"c1": ClusterSettings()},
            rules=RulesSettings(**given),
            actions=ActionsSettings(timeout_s=0.5),
        )
        self.world = world or World()
        self.kill_at_append = False
        self.start()

    def start(self) -> None:
        def clock() -> datetime:
            return self.now

        self.store = Store(self.settings.state_dir)
        self.engine = RulesConsumer(
            self.settings, lambda: WorldsHand(self.world, clock), clock, store=self.store
        )

    def restart(self) -> None:
        """As after SIGKILL: nothing is said goodbye to."""
        self.store.close()
        self.start()

    @property
    def said(self) -> dict[str, Event]:
        """What the consumer appended: the journal keeps the first of a key."""
        return {event.key: event for event in reversed(self.journal)}

    def kill(self) -> None:
        """As SIGKILL, when actions are over and nobody has heard of it; and start again."""
        until = time.monotonic() + 60
        while self.is_acting() and time.monotonic() < until:
            time.sleep(0.001)
        self.restart()

    def is_acting(self) -> bool:
        started = {(one.id, one.tries) for one in self.store.open_("started")}
        return not started <= self.world.over

    def append(self, new: Sequence[Event]) -> None:
        super().append(new)
        if self.kill_at_append:
            raise Killed

    def give(self, *events: Event) -> None:
        self.engine.apply(events, events[-1].id, self.append)

    def settle(self) -> None:
        """Turn until nothing is under way, or due now."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            # It asks to be called soon while anything is under way or due.
            if self.engine.tick(self.append) > SOON_S:
                return
            time.sleep(0.002)
        left = self.open_()
        raise AssertionError(f"{len(left)} are still open, such as {left[:3]}")

    def open_(self) -> list[Execution]:
        return [one for one in self.history() if one.phase != "ended"]

    def history(self) -> list[Execution]:
        store = Store(self.settings.state_dir, read_only=True)
        try:
            return store.history(limit=100_000)[::-1]
        finally:
            store.close()

    def statuses(self) -> list[str]:
        return [one.status or one.phase for one in self.history()]


def with_care(rule: str, **care: Any) -> str:
    """A rule with other keys of Steward's."""
    keys = {"rate_limit": "1000/1h", **care}
    lines = "".join(
        f"    {key}: {msgspec.json.encode(one).decode()}\n" for key, one in keys.items()
    )
    return f"{rule.partition('context:')[0]}context:\n  steward:\n{lines}"
