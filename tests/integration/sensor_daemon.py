"""``steward serve`` whose sensor watches a sandbox, with the helper that slurmctld starts."""

import re
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from job_submission import wait_until
from sandbox_daemon import STEWARD, Daemon

from steward.capture.sensor.triggers import TRIGGER_EVENTS
from steward.capture.settings import HELPER_NAME, SensorSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    Event,
    NodeState,
)
from steward.core.journal import JournalReader
from steward.core.sqlite import SqliteUnavailable
from steward.sandbox import Sandbox
from steward.slurm.node_states import format_node_state, parse_node_state

SYSTEM_PYTHON = "/usr/bin/python3"
_NAMES = {NODE_STATE: "node", PARTITION_STATE: "partition", RESERVATION_STATE: "reservation"}


def python_of(cluster: Sandbox, home: Path) -> str:
    """Return a Python for slurmctld's root directory, if that is not the host's."""
    if not cluster.plan.root:
        return SYSTEM_PYTHON
    where = home / "python"
    real = Path(SYSTEM_PYTHON).resolve()
    library = Path("/usr/lib") / real.name
    if not where.exists():
        (where / "bin").mkdir(parents=True)
        shutil.copy(real, where / "bin")
        leave = shutil.ignore_patterns("test", "*-packages", "idlelib", "ensurepip", "lib2to3")
        shutil.copytree(library, where / "lib" / real.name, ignore=leave)
        for name in ("libexpat.so.1", "libz.so.1"):
            shutil.copy(f"/usr/lib/x86_64-linux-gnu/{name}", where / "lib")
        python = where / "python"
        python.write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH={where}/lib exec {where}/bin/{real.name} "$@"\n'
        )
        python.chmod(0o755)
    return str(where / "python")


class Front:
    """strigger program in front of the real one; it passes on reports of some events only.

    Args:
        directory: Directory of the program.
        events: Names of the events, or shell patterns.
    """

    def __init__(self, directory: Path, *events: str) -> None:
        self._real = directory / "real"
        self.helper = directory / HELPER_NAME
        passed_on = f'case "$6" in\n{"|".join(events)}) exec {self._real} "$@" ;;\nesac\n'
        self.helper.write_text(f"#!/bin/sh\n{passed_on}")
        self.helper.chmod(0o755)

    def open(self, watching: "Watching") -> None:
        """Pass on from now on; earlier reports are lost."""
        self._real.symlink_to(watching.helper)


class Watching(Daemon):
    """Daemon with a sensor, run by SlurmUser as on real sites.

    Args:
        cluster: Cluster of the daemon.
        home: Directory of the daemon.
        sensor: Settings of the sensor that differ.
    """

    def __init__(self, cluster: Sandbox, home: Path, **sensor: Any) -> None:
        super().__init__(cluster, home, user=cluster.plan.slurm_user)
        # root installs only into its own directories, and the home is the user's.
        plugins = home.with_name(f"{home.name}-plugins")
        plugins.mkdir(mode=0o755, exist_ok=True)
        self.helper = plugins / "libexec" / "steward-trigger"
        self.secret = plugins / "etc" / "trigger.secret"
        settings = {
            "enabled": True,
            "interval_s": 0.5,
            "usage": True,
            "helper": str(self.helper),
            "secret_file": str(self.secret),
            **sensor,
        }
        self.settings = msgspec.structs.replace(self.settings, sensor=SensorSettings(**settings))
        self.config.write_text(render_config(LoadedConfig(self.settings)))
        cluster.run(["chown", self._user, str(home)], user="root")

    def install(self) -> None:
        """Install the strigger program and its secret where slurmctld and the sensor look."""
        self.cluster.run(
            [
                *(STEWARD, "plugins", "install", "--trigger"),
                *("--helper", str(self.helper), "--secret", str(self.secret)),
                *("--python", python_of(self.cluster, self.home), "--user", self._user),
            ],
            user="root",
        )

    def events(self, *kinds: str) -> list[Event]:
        """Return the journal's events of these kinds; of all states by default."""
        try:
            reader = JournalReader(str(self.state))
        except SqliteUnavailable:
            return []
        try:
            found: list[Event] = []
            position = 0
            while position < reader.head():
                some, position = reader.read(position, kinds or (*_NAMES, CONTROLLER_STATE), 500)
                found += some
            return found
        finally:
            reader.close()

    def of_node(self, name: str) -> list[NodeState]:
        """Return the events of a node."""
        return [event.body for event in self.events(NODE_STATE) if event.body.node == name]

    def replayed(self, kind: str = NODE_STATE) -> dict[str, str]:
        """Return the states after applying all events in order."""
        shown: dict[str, str] = {}
        for event in self.events(kind):
            name = getattr(event.body, _NAMES[kind])
            assert event.body.old_state == shown.get(name, ""), (event, shown.get(name))
            if event.body.state == "REMOVED":
                del shown[name]
            else:
                shown[name] = event.body.state
        return shown

    def bring_back(self, node: str) -> None:
        """Start a node's slurmd that was killed, and wait until the node is IDLE."""
        self.cluster.start_service(f"slurmd.{node}")

        def is_idle() -> bool:
            # slurmctld 24.11 now and then writes "Not responding : Not responding", and with
            # ReturnToService=1 takes such a node for one that was set down by hand.
            words = ["sinfo", "-h", "-N", "-p", "main", "-n", node, "-o", "%E"]
            if str(self.cluster.run(words).stdout).count("Not responding") > 1:
                words = ["scontrol", "update", f"nodename={node}", "state=resume"]
                self.cluster.run(words, user="root", check=False)
            return self.replayed()[node] == "IDLE"

        wait_until(is_idle, 120)

    def down_delay_s(self, node: str) -> float:
        """Kill a node's slurmd; return the seconds from slurmctld's DOWN log line to the event.

        The node is started again, and is IDLE when this returns.
        """
        log = Path(self.cluster.directory) / "log" / "slurmctld.log"
        before, size = len(self.of_node(node)), log.stat().st_size
        self.cluster.stop_service(f"slurmd.{node}", signal.SIGKILL)
        wait_until(lambda: self.replayed()[node].startswith("DOWN"), 120)
        events = [event for event in self.events(NODE_STATE) if event.body.node == node][before:]
        down = next(event for event in events if event.body.state.startswith("DOWN"))
        with log.open() as lines:
            lines.seek(size)
            line = next(line for line in lines if "not responding, setting DOWN" in line)
        known_at = datetime.fromisoformat(line[1 : line.index("]")]).astimezone(UTC)
        self.bring_back(node)
        return (down.seen_at - known_at).total_seconds()

    def shown(self) -> dict[str, str]:
        """Return the states that Slurm shows now."""
        out = self.cluster.run(["scontrol", "-a", "-o", "show", "node"]).stdout
        states = {}
        for line in out.splitlines():
            # The first of each: a reason may contain more of them.
            name, state = (re.search(rf"\b{key}=(\S+)", line) for key in ("NodeName", "State"))
            if name and state:
                states[name[1]] = format_node_state(*parse_node_state(state[1]))
        return states

    def settle(self) -> None:
        """Wait until the events, replayed, give the states that Slurm shows."""
        wait_until(lambda: self.replayed() == self.shown(), 60)

    def all_triggers(self) -> list[str]:
        """Return the rows of Steward's triggers, once the last of them is set."""
        last = next(event for event in reversed(TRIGGER_EVENTS) if "slurmdbd" not in event)

        def is_last(row: str) -> bool:
            return self.settings.sensor.helper in row and row.rstrip().endswith(f" {last}")

        wait_until(lambda: any(map(is_last, self.triggers())))
        return self.triggers()

    def triggers(self) -> list[str]:
        """Return the rows of Steward's triggers, without their numbers."""
        out = self.cluster.run(["strigger", "--get", "--noheader"]).stdout
        rows = [line.split(None, 1)[1] for line in out.splitlines() if "steward-trigger" in line]
        return sorted(rows)
