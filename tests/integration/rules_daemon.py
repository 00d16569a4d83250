"""Daemon with rules on a sandbox, and storms of node events as its sensor would send them."""

import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sensor_daemon import Watching

from steward.accounting.settings import MailSettings
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.capture.sensor.changes import NodeFacts, compare_snapshots
from steward.capture.sensor.store import SensorStore
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import NODE_STATE, RULE_EXECUTION, Event
from steward.core.journal import JournalLink
from steward.core.waits import Stop
from steward.sandbox import Sandbox

CLUSTER = "box"


class Ruling(Watching):
    """Daemon that runs rules as SlurmUser, and a mailer that records its mails.

    Args:
        cluster: Cluster of the daemon.
        home: Directory of the daemon.
        rules: Texts of the rules.
        timeout_s: Time limit of an action, in seconds.
        of: Settings of [rules] that differ.
    """

    def __init__(
        self, cluster: Sandbox, home: Path, *rules: str, timeout_s: float = 20.0, **of: Any
    ) -> None:
        super().__init__(cluster, home, enabled=of.pop("sensor", True))
        self.rules_dir = home / "rules.d"
        self.rules_dir.mkdir(mode=0o755)
        for number, text in enumerate(rules):
            (self.rules_dir / f"{number}.yaml").write_text(text)
        self.mails = home / "mails"
        self.mails.mkdir()
        self.hang = home / "hang"
        """While this file exists, the mailer does not end."""
        mailer = home / "mailer"
        # A file for each mail: two at once must not be taken for one.
        mailer.write_text(
            f'#!/bin/sh\nf=$(mktemp {self.mails}/XXXXXXXX)\n{{ echo "$@"; cat; }} > "$f"\n'
            # So long that a kill may come before its end is known.
            f"sleep 0.1; while [ -e {self.hang} ]; do sleep 0.1; done\n"
        )
        mailer.chmod(0o755)
        shutil.chown(self.mails, cluster.plan.slurm_user)
        given = {"mode": "on", "directories": (str(self.rules_dir),), **of}
        self.settings = msgspec.structs.replace(
            self.settings,
            rules=RulesSettings(**given),
            actions=ActionsSettings(timeout_s=timeout_s),
            mail=MailSettings(program=str(mailer)),
        )
        self.config.write_text(render_config(LoadedConfig(self.settings)))

    def history(self, *words: str) -> list[dict[str, Any]]:
        """Return the executions of rules, oldest first."""
        answer = self.ask_json("rules", "history", "--limit", "100000", *words)
        found: list[dict[str, Any]] = answer["executions"]
        return found[::-1]

    def mailed(self) -> list[str]:
        """Return the sent mails."""
        return [path.read_text() for path in self.mails.iterdir()]

    def told(self) -> list[Event]:
        """Return the ends of executions in the journal."""
        return self.events(RULE_EXECUTION)

    def drained_by_rules(self) -> set[str]:
        """Return the nodes that Slurm shows drained with a rule's reason."""
        out = self.cluster.run(["scontrol", "-a", "-o", "show", "node"]).stdout
        return {
            line.split()[0].removeprefix("NodeName=")
            for line in out.splitlines()
            if "(steward: rule " in line and "DRAIN" in line
        }


def pictures(nodes: list[str], looks: int) -> Iterator[dict[str, dict[str, NodeFacts]]]:
    """Yield snapshots of a cluster whose nodes all fail and return, poll after poll."""
    for look in range(looks + 1):
        state = "DOWN+NOT_RESPONDING" if look % 2 else "IDLE"
        reason = f"look {look}: {{{{ 7 * 7 }}}} $(id)" if look % 2 else ""
        yield {NODE_STATE: {node: NodeFacts(state=state, reason=reason) for node in nodes}}


class Storm:
    """Source that appends the sensor's events of invented snapshots to a daemon's journal.

    Args:
        daemon: Daemon with the journal.
        directory: Directory of the sensor's store.
        nodes: Nodes that flap.
    """

    def __init__(self, daemon: Ruling, directory: Path, nodes: list[str]) -> None:
        self._store = SensorStore(str(directory), CLUSTER)
        self._link = JournalLink(str(daemon.state), Stop())
        self._nodes = nodes
        self._before: dict[str, dict[str, NodeFacts]] = {}
        self.told: Counter[bool] = Counter()
        """Number of events, by whether they report a failure."""

    def rage(self, looks: int) -> Iterator[int]:
        """Append the events of this many snapshots; yield the number of events so far."""
        for picture in pictures(self._nodes, looks):
            now = datetime.now(UTC)
            changes = compare_snapshots(self._before, picture, source="interval", at=now, since=now)
            self._before = picture
            self._store.store_changes(changes, now)
            self._store.send_outbox(self._link.append)
            for change in changes:
                if change.body is not None:
                    self.told[bool(getattr(change.body, "failed", False))] += 1
            yield self.told.total()
        self._store.close()
        self._link.close()
