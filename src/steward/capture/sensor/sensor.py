"""Sensor: polls nodes, partitions, reservations and daemons of a cluster, and emits changes.

It polls at an interval, and at once when one of slurmctld's triggers wakes it. Only the poll
decides what changed: a trigger may be late (slurmctld processes them every 15 s) or lost, and a
poll finds the change nevertheless. Polls take at most a twentieth of the time. While slurmctld's
state files on this host show no change, nodes are polled every 5 s, slurmdbd every 15 s, and all
else once a minute. A state that a trigger reports is recorded even if it is gone by the next poll.
On the host of a standby slurmctld the sensor stores changes but emits no events, because the active
host's sensor does.

- :class:`DaemonMonitor` detects restarts of slurmctld, and outages of slurmdbd. Outages of
  slurmctld are reported by the queue polls.
- :class:`ClusterSensor` polls; ``run_turn`` does one step.
- :class:`ReportedStates` finds states that passed between two polls.
- ``run_sensor`` is the loop of the daemon's sensor worker, with store, triggers and wake-up socket.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from steward.capture.sensor.changes import (
    ClusterSnapshot,
    NodeFacts,
    ObjectFacts,
    PartitionFacts,
    ReservationFacts,
    compare_snapshots,
    list_boundaries,
)
from steward.capture.sensor.store import DaemonState, SensorStore
from steward.capture.sensor.triggers import (
    FiredTrigger,
    StewardTriggers,
    WakeupListener,
    trigger_command,
)
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import (
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    ControllerState,
    PollCause,
    utc_now,
)
from steward.core.poll_status import COST_FACTOR
from steward.core.sqlite import SLICE_S, shrink_databases
from steward.core.waits import Backoff, Stop
from steward.slurm import Slurm, SlurmError, tres
from steward.slurm.cluster import ClusterQueries, Ping
from steward.slurm.cluster_records import NodeRecord, PartitionRecord, ReservationRecord
from steward.slurm.node_states import format_node_state, parse_node_state
from steward.slurm.nodelists import NodeListError, expand_nodelist
from steward.slurm.state_files import StateFiles, StateStamp

# Daemons

SLURMCTLD: Final = "slurmctld"
SLURMDBD: Final = "slurmdbd"


class DaemonMonitor:
    """Detector of daemons' state changes.

    Args:
        store: Stores their states and pending events.
    """

    def __init__(self, store: SensorStore) -> None:
        self._store = store

    def record_slurmctld(self, started_at: datetime, *, silent: bool = False) -> bool:
        """Record slurmctld's start time; return whether it has restarted.

        Args:
            started_at: Its boot time.
            silent: Suppress the event, because another host's sensor emits it.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        previous = self._store.daemons.get(SLURMCTLD)
        restarted = previous is not None and previous.started_at != started_at
        body = ControllerState(
            up=True,
            message=f"started at {started_at:%Y-%m-%dT%H:%M:%SZ}",
            daemon=SLURMCTLD,
            restarted=True,
        )
        # Two sensors that watch the same slurmctld use the same key for one start.
        key = f"started:{int(started_at.timestamp())}"
        self._store.store_daemon(
            DaemonState(name=SLURMCTLD, up=True, started_at=started_at),
            body if restarted and not silent else None,
            key,
        )
        return restarted

    def report_reconfigured(self) -> None:
        """Emit an event that slurmctld has read slurm.conf again.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        state = self._store.daemons.get(SLURMCTLD)
        if state is not None:
            message = "slurmctld reloaded its configuration"
            body = ControllerState(up=True, message=message, reconfigured=True)
            self._store.store_daemon(state, body)

    def record_slurmdbd(self, pings: Iterable[Ping], *, silent: bool = False) -> None:
        """Record whether slurmdbd answers; no event where there is none.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        answers = [ping.up for ping in pings if ping.daemon == SLURMDBD]
        if not answers:
            return
        up = any(answers)
        previous = self._store.daemons.get(SLURMDBD)
        # At the first poll only its absence is reported, not its presence.
        has_changed = previous.up != up if previous is not None else not up
        message = "" if up else "slurmdbd does not answer: slurmctld keeps the records for it"
        body = ControllerState(up=up, message=message, daemon=SLURMDBD)
        self._store.store_daemon(
            DaemonState(name=SLURMDBD, up=up), body if has_changed and not silent else None
        )


def find_active_host(pings: Iterable[Ping]) -> str:
    """Return the host of the active slurmctld, the first that answers; "" if none does."""
    return next((ping.host for ping in pings if ping.daemon == SLURMCTLD and ping.up), "")


def is_standby(pings: Iterable[Ping], own_host: str = "") -> bool:
    """Return whether this host's slurmctld is a standby while another is active.

    Args:
        pings: Answers of the daemons.
        own_host: Name of this host; from the kernel if empty.
    """
    pings = tuple(pings)
    own = _short_hostname(own_host or socket.gethostname())
    hosts = {_short_hostname(ping.host) for ping in pings if ping.daemon == SLURMCTLD}
    active = _short_hostname(find_active_host(pings))
    return own in hosts and bool(active) and active != own


def _short_hostname(host: str) -> str:
    """Return a host name without its domain, in lower case."""
    return host.partition(".")[0].lower()


log = logging.getLogger(__name__)

# Polls

COMPLETE_POLL_S: Final = 15.0
"""Interval of complete polls, in seconds; nodes alone are polled more often."""
_UNCHANGED_POLL_S: Final = 60.0
"""Interval of complete polls while slurmctld's state files do not change, in seconds."""
_UNCHANGED_NODES_S: Final = 5.0
"""Interval of other polls meanwhile, in seconds: slurmctld neither saves nor logs that a node stops
responding, and has no trigger for it.
"""
_AFTER_WAKE_S: Final = 0.5
"""Minimum interval of requested polls, in seconds: slurmctld's triggers arrive in bursts."""
_FIRST_BACKOFF_S: Final = 1.0
"""First pause after a failed poll, in seconds."""
_MAX_SENSOR_BACKOFF_S: Final = 30.0
"""Maximum pause after failed polls, in seconds."""
_RESUME_POLL_S: Final = 5.0
"""Interval of polls while a resumed node has not answered, in seconds: slurmctld has no trigger for
the moment when its slurmd answers.
"""
_TIME_TOLERANCE: Final = timedelta(seconds=1)
"""Slurm's times are whole seconds; a poll in the same second may still show the old state."""
_TRIGGERS_S: Final = 60.0
"""Interval of checks of the triggers, in seconds."""
_MAX_TRIGGER_DELAY_S: Final = 60.0
"""Maximum delay of a trigger after a poll showed its state, in seconds; slurmctld takes 15, and
more on a busy host.
"""
_GPU: Final = "gres/gpu"
"""TRES name of GPUs."""
RECONFIG_EVENT: Final = "reconfig"
"""Trigger for a reloaded configuration or a node changed by hand."""


class SensorQueries(Protocol):
    """Queries of a cluster; implemented by :class:`steward.slurm.cluster.ClusterQueries`."""

    def node_states(self) -> dict[str, NodeRecord]:
        """Return all nodes, by name, of the partitions as last read."""
        ...

    def partitions(self) -> dict[str, PartitionRecord]:
        """Return all partitions, by name."""
        ...

    def reservations(self) -> dict[str, ReservationRecord]:
        """Return all reservations, by name."""
        ...

    def read_start_time(self) -> datetime:
        """Return slurmctld's start time."""
        ...

    def pings(self) -> tuple[Ping, ...]:
        """Return which daemons answer."""
        ...

    def ping_slurmdbd(self) -> Ping:
        """Return whether slurmdbd answers."""
        ...


class TriggerKeeper(Protocol):
    """Keeper of Steward's triggers; ``StewardTriggers`` in ``sensor.triggers`` implements it."""

    def sync(self) -> bool:
        """Set missing triggers and clear useless ones; return whether that is done."""
        ...


class ClusterSensor:
    """Sensor of one cluster.

    Args:
        cluster: Name of the cluster.
        queries: Queries its Slurm.
        store: Last reported states and pending events.
        interval_s: Minimum interval of regular polls, in seconds.
        usage: Whether to report jobs starting and ending on nodes.
        triggers: Keeps Steward's triggers set; None to set none.
        check_standby: Returns whether another host's sensor reports, given the daemons' answers.
        read_stamp: Returns a stamp that differs after every change; None if a change may not show.
    """

    def __init__(
        self,
        cluster: str,
        queries: SensorQueries,
        store: SensorStore,
        *,
        interval_s: float,
        usage: bool = True,
        triggers: TriggerKeeper | None = None,
        check_standby: Callable[[Iterable[Ping]], bool] = lambda _pings: False,
        read_stamp: Callable[[], StateStamp | None] = lambda: None,
    ) -> None:
        self.cost_s = 0.0
        """Duration of the last poll, in seconds."""
        self.poll_count = 0
        """Number of polls."""
        self._cluster = cluster
        self._queries = queries
        self._store = store
        self._daemons = DaemonMonitor(store)
        self._interval_s = interval_s
        self._usage = usage
        self._triggers = triggers
        self._triggers_due = 0.0
        self._trigger_stamp: StateStamp | None = None
        self._check_standby = check_standby
        self._read_stamp = read_stamp
        self._complete_stamp: StateStamp | None = None
        self._unchanged_until = float("-inf")
        self._is_standing_by = self._has_slurmdbd = False
        self._is_first = True
        self._is_unavailable = False
        self._poll_started = float("-inf")
        self._poll_due = 0.0
        self._complete_poll_due = 0.0
        self._reports: dict[FiredTrigger, datetime] = {}
        """Triggers that fired and whose states are not stored yet, with the time of the report."""
        self._wakeups: set[FiredTrigger] = set()
        """Triggers that fired since the last poll began."""
        self._reported = ReportedStates()
        self._last_error = ""
        self._backoff = Backoff(_FIRST_BACKOFF_S, _MAX_SENSOR_BACKOFF_S)

    def wake(self, triggers: Iterable[FiredTrigger]) -> None:
        """Request an early poll, because triggers have fired.

        Args:
            triggers: Triggers that fired.
        """
        new_triggers = set(triggers) - self._wakeups
        if not new_triggers:
            return
        self._wakeups |= new_triggers
        self._reports = dict.fromkeys(new_triggers, utc_now()) | self._reports
        events = {trigger.event for trigger in new_triggers}
        gap_s = max(_AFTER_WAKE_S, COST_FACTOR * self.cost_s)
        self._poll_due = min(self._poll_due, self._poll_started + gap_s)
        if not all(map(_is_node_event, events)) or RECONFIG_EVENT in events:
            self._complete_poll_due = 0.0
        if not all(map(_is_node_event, events)):
            self._triggers_due = 0.0

    def run_turn(self, append: Append) -> float:
        """Poll if a poll is due, and send changes to the journal.

        Returns:
            Seconds until the next call at the latest.

        Raises:
            Unavailable: The journal or the sensor's database is unavailable: call again later.
        """
        self._store.send_outbox(append)
        if time.monotonic() < self._poll_due:
            return self._seconds_left()
        stamp = self._read_stamp() if self._can_skip_polls() else None
        if self._is_unchanged(stamp):
            gap_s = max(_UNCHANGED_NODES_S, self._interval_s, COST_FACTOR * self.cost_s)
            if time.monotonic() < self._poll_started + gap_s:
                soonest = min(self._poll_started + gap_s, self._unchanged_until)
                self._poll_due = min(time.monotonic() + self._interval_s, soonest)
                return self._seconds_left()
        self._poll(stamp)
        self._store.send_outbox(append)
        if not self._is_unavailable:
            self._sync_triggers(stamp)
        return self._seconds_left()

    def _seconds_left(self) -> float:
        """Return seconds until the next poll."""
        return max(0.0, self._poll_due - time.monotonic())

    def _is_unchanged(self, stamp: StateStamp | None) -> bool:
        """Return whether a complete poll covers everything that slurmctld has saved."""
        is_same = stamp is not None and stamp == self._complete_stamp
        return is_same and time.monotonic() < self._unchanged_until

    def _can_skip_polls(self) -> bool:
        """Return whether no change is expected that slurmctld does not save."""
        if self._usage or self._reports or self._is_unavailable or self._awaits_node():
            return False
        # Such a node will be down, or respond again; slurmctld saves neither.
        states = (node.state for node in self._store.snapshot.get(NODE_STATE, {}).values())
        return not any("NOT_RESPONDING" in state and state[:4] != "DOWN" for state in states)

    def _poll(self, stamp: StateStamp | None) -> None:
        """Poll, compare with the stored states, and store the changes.

        Args:
            stamp: Stamp of slurmctld's state files before this poll.
        """
        self._poll_started = began = time.monotonic()
        self.poll_count += 1
        self._wakeups.clear()
        # With a new stamp, a complete poll is valid for as long as the stamp stays the same.
        is_complete = not self._is_unchanged(stamp) and (
            began >= self._complete_poll_due or stamp is not None
        )
        try:
            was_away = is_complete and self._check_daemons()
            if not is_complete and began >= self._complete_poll_due:
                if self._has_slurmdbd:
                    ping = self._queries.ping_slurmdbd()
                    self._daemons.record_slurmdbd([ping], silent=self._is_standing_by)
                self._complete_poll_due = began + COMPLETE_POLL_S
            at = utc_now()
            snapshot = self._query_snapshot(is_complete=is_complete)
        except SlurmError as error:
            self._handle_outage(str(error))
            return
        self.cost_s = time.monotonic() - began
        events = {trigger.event for trigger in self._reports}
        if RECONFIG_EVENT in events and not self._is_standing_by:
            self._daemons.report_reconfigured()
        self._is_unavailable = False
        self._backoff.reset()
        if self._last_error:
            log.info("cluster %s: the sensor receives data again", self._cluster)
            self._last_error = ""
        nodes = snapshot[NODE_STATE]
        since = None if self._store.polled_at is None else self._store.polled_at - _TIME_TOLERANCE
        passed = self._reported.find_passed_states(
            self._reports, self._store.snapshot[NODE_STATE], nodes, began
        )
        try:
            for reported_at, passed_nodes in passed:
                self._store_changes({NODE_STATE: passed_nodes}, "trigger", reported_at, since)
            self._store_changes(snapshot, self._find_cause(events, was_away=was_away), at, since)
        finally:
            # slurmctld reports once: until a poll is stored, the next poll needs the report, too.
            # The store has the poll even if the status file cannot be written after it.
            if self._store.polled_at == at:
                self._reports.clear()
        self._is_first = False
        self._set_due(began, at, is_complete=is_complete)
        if is_complete:
            self._complete_stamp = stamp

    def _store_changes(
        self, snapshot: ClusterSnapshot, source: PollCause, at: datetime, since: datetime | None
    ) -> None:
        """Store the changes between the stored states and a snapshot."""
        changes = compare_snapshots(
            self._store.snapshot,
            snapshot,
            source=source,
            at=at,
            since=since,
            usage=self._usage,
        )
        self._store.store_changes(changes, at, silent=self._is_standing_by)

    def _find_cause(self, events: set[str], *, was_away: bool) -> PollCause:
        """Return the cause of a poll's changes: "interval" after an outage or restart."""
        if self._is_first:
            return "start"
        return "trigger" if any(map(_is_node_event, events)) and not was_away else "interval"

    def _query_snapshot(self, *, is_complete: bool) -> ClusterSnapshot:
        """Query nodes, and partitions and reservations for a complete poll."""
        # Partitions first: they list the nodes, and so need no second query.
        partitions = self._queries.partitions() if is_complete else {}
        snapshot: dict[str, dict[str, NodeFacts | PartitionFacts | ReservationFacts]] = {
            NODE_STATE: {
                name: extract_node_facts(record)
                for name, record in self._queries.node_states().items()
            }
        }
        if is_complete:
            snapshot[PARTITION_STATE] = {
                name: PartitionFacts(state=record.state) for name, record in partitions.items()
            }
            snapshot[RESERVATION_STATE] = {
                name: msgspec.convert(record, ReservationFacts, from_attributes=True)
                for name, record in self._queries.reservations().items()
            }
        return snapshot

    def _check_daemons(self) -> bool:
        """Check the daemons; return whether slurmctld was unavailable or has restarted."""
        was_away = self._is_unavailable
        started_at = self._queries.read_start_time()
        pings = self._queries.pings()
        is_standing_by = self._check_standby(pings)
        if is_standing_by != self._is_standing_by:
            state = "on standby" if is_standing_by else "active"
            log.info(
                "cluster %s: slurmctld on this host is %s, and so is the sensor",
                self._cluster,
                state,
            )
            self._is_standing_by = is_standing_by
        self._has_slurmdbd = any(ping.daemon == SLURMDBD for ping in pings)
        has_restarted = self._daemons.record_slurmctld(started_at, silent=is_standing_by)
        self._daemons.record_slurmdbd(pings, silent=is_standing_by)
        if has_restarted:
            self._triggers_due = 0.0
        return was_away or has_restarted

    def _set_due(self, began: float, at: datetime, *, is_complete: bool) -> None:
        """Schedule the next poll and the next complete poll."""
        gap_s = max(self._interval_s, COST_FACTOR * self.cost_s)
        self._poll_due = began + gap_s
        if self._awaits_node():
            self._poll_due = min(
                self._poll_due, began + max(_RESUME_POLL_S, COST_FACTOR * self.cost_s)
            )
        if not is_complete:
            return
        self._complete_poll_due = began + max(COMPLETE_POLL_S, COST_FACTOR * self.cost_s)
        self._unchanged_until = began + max(_UNCHANGED_POLL_S, COST_FACTOR * self.cost_s)
        # Reservations start and end by the clock, without any report by Slurm.
        boundaries = [
            boundary
            for boundary in list_boundaries(self._store.snapshot)
            if boundary > at - _TIME_TOLERANCE
        ]
        if boundaries:
            until_s = (min(boundaries) + _TIME_TOLERANCE - at).total_seconds()
            boundary_s = began + max(gap_s, until_s)
            self._complete_poll_due = min(self._complete_poll_due, boundary_s)
            self._unchanged_until = min(self._unchanged_until, boundary_s)
        self._poll_due = min(self._poll_due, max(began + gap_s, self._complete_poll_due))

    def _awaits_node(self) -> bool:
        """Return whether a resumed node has not answered yet."""
        nodes = self._store.snapshot.get(NODE_STATE, {}).values()
        return any(isinstance(node, NodeFacts) and node.is_resuming for node in nodes)

    def _handle_outage(self, message: str) -> None:
        """Retry soon, then poll everything."""
        self._is_unavailable = True
        self._complete_poll_due = 0.0
        self._poll_due = time.monotonic() + self._backoff.next_s()
        if message != self._last_error:
            self._last_error = message
            log.warning("cluster %s: the sensor receives no data: %s", self._cluster, message)
        self._store.mark_silent()

    def _sync_triggers(self, stamp: StateStamp | None) -> None:
        """Keep Steward's triggers set, once a minute, unless on standby.

        Args:
            stamp: Stamp of slurmctld's state files, which hold the triggers, before this poll.
        """
        now = time.monotonic()
        if self._triggers is None or now < self._triggers_due:
            return
        is_checked = bool(self._triggers_due) and stamp is not None and stamp == self._trigger_stamp
        self._triggers_due = now + _TRIGGERS_S
        if not (is_checked or self._is_standing_by):
            self._trigger_stamp = stamp if self._triggers.sync() else None


class ReportedStates:
    """Detector of node states that triggers reported and no poll showed.

    slurmctld reports a state once, when it begins. A report and a poll that shows the state within
    a minute are the same fact, whichever came first; a report without such a poll is about a state
    that passed between two polls.
    """

    def __init__(self) -> None:
        self._shown_s: dict[tuple[str, str], float] = {}
        self._first_s: float | None = None

    def find_passed_states(
        self,
        reports: Mapping[FiredTrigger, datetime],
        before: Mapping[str, ObjectFacts],
        now: Mapping[str, ObjectFacts],
        now_s: float,
    ) -> list[tuple[datetime, dict[str, NodeFacts]]]:
        """Return all nodes as before, with states that a trigger reported and no poll showed.

        Args:
            reports: Triggers that fired since the last stored poll, with the time of the report.
            before: Nodes as last reported.
            now: Nodes as polled now.
            now_s: Monotonic time of this poll.

        Returns:
            Times of reports in order, each with all nodes by name; empty if no state has passed
            unseen.
        """
        if self._first_s is None:
            self._first_s = now_s
        for name, present in now.items():
            for event in _find_entered_events(before.get(name), present):
                self._shown_s[event, name] = now_s
        nodes = {name: facts for name, facts in before.items() if isinstance(facts, NodeFacts)}
        # If a node was both drained and down, down counts.
        unshown = sorted(self._iter_unshown(reports, now_s), reverse=True)
        states = {
            name: (reported_at, _STATE_BY_EVENT[event](nodes[name].state))
            for event, name, reported_at in unshown
            if name in nodes
            and name in now
            and event not in _events_of_state(nodes[name].state)
            and event not in _events_of_state(now[name].state)
        }
        # States shown before Steward started are unknown.
        if not states or now_s - self._first_s < _MAX_TRIGGER_DELAY_S:
            return []
        passed = []
        for moment in sorted({reported_at for reported_at, _ in states.values()}):
            for name, (reported_at, state) in states.items():
                if reported_at == moment:
                    nodes[name] = msgspec.structs.replace(nodes[name], state=state)
            passed.append((moment, dict(nodes)))
        return passed

    def _iter_unshown(
        self, reports: Mapping[FiredTrigger, datetime], now_s: float
    ) -> Iterator[tuple[str, str, datetime]]:
        """Yield event, node and time of reports that no poll has shown."""
        for key in [
            key for key, at_s in self._shown_s.items() if now_s - at_s > _MAX_TRIGGER_DELAY_S
        ]:
            del self._shown_s[key]
        for trigger, reported_at in reports.items():
            try:
                names = (
                    expand_nodelist(trigger.nodes)
                    if trigger.event in _STATE_BY_EVENT and trigger.nodes
                    else ()
                )
            except NodeListError as error:
                log.debug("cannot parse the nodes of an strigger report: %s", error)
                continue
            yield from (
                (trigger.event, name, reported_at)
                for name in names
                if self._is_unshown(trigger.event, name)
            )

    def _is_unshown(self, event: str, name: str) -> bool:
        """Return whether no poll has shown the state; a poll accounts for one report."""
        return self._shown_s.pop((event, name), None) is None


def _find_entered_events(before: ObjectFacts | None, now: ObjectFacts) -> Iterator[str]:
    """Return the trigger events of states that a node has entered."""
    old_events = frozenset() if before is None else frozenset(_events_of_state(before.state))
    return (event for event in _events_of_state(now.state) if event not in old_events)


@lru_cache(maxsize=1024)
def _events_of_state(state: str) -> tuple[str, ...]:
    """Return the trigger events that fire when a node enters a state."""
    base, flags = parse_node_state(state)
    is_used = base in ("ALLOCATED", "MIXED") or "COMPLETING" in flags
    events = ["down"] if base == "DOWN" else []
    if "DRAIN" in flags:
        events.append("draining" if is_used else "drained")
    return (*events, "fail") if "FAIL" in flags else tuple(events)


def _make_flagging(flag: str, *, used: bool | None = None) -> Callable[[str], str]:
    """Return a function that adds a flag to a node state."""

    def state_of(state: str) -> str:
        base, flags = parse_node_state(state)
        is_used = base in ("ALLOCATED", "MIXED")
        if used is not None and is_used != used:
            base = "ALLOCATED" if used else "IDLE"
        kept = flags if used is not False else [one for one in flags if one != "COMPLETING"]
        return format_node_state(base, sorted({*kept, flag}))

    return state_of


_STATE_BY_EVENT: Final[Mapping[str, Callable[[str], str]]] = {
    "down": lambda _state: "DOWN",
    "drained": _make_flagging("DRAIN", used=False),
    "draining": _make_flagging("DRAIN", used=True),
    "fail": _make_flagging("FAIL"),
}
"""Reported state, by trigger event, computed from the state before."""


def _is_node_event(event: str) -> bool:
    """Return whether a trigger is about nodes; ``reconfig`` is about both."""
    return not event.startswith(("primary_", "backup_"))


def extract_node_facts(record: NodeRecord) -> NodeFacts:
    """Extract the compared facts of a node."""
    facts = msgspec.convert(record, NodeFacts, from_attributes=True)
    return msgspec.structs.replace(facts, gpus=tres.parse_gres(record.gres).get(_GPU, 0))


# Worker

_MAX_TURN_WAIT_S = 10.0
"""Maximum wait between turns, in seconds, so that heartbeats continue."""


def run_sensor(
    settings: Settings, cluster: str, append: Append, stop: Stop, beat: Callable[[], None]
) -> None:
    """Run the sensor of a cluster until ``stop`` is set.

    Args:
        settings: The configuration.
        cluster: Name of the cluster.
        append: Appends events durably.
        stop: Ends the loop.
        beat: Called at every turn, as a heartbeat.

    Raises:
        SqliteUnavailable: The database of states cannot be read now.
    """
    cluster_settings, sensor = settings.cluster[cluster], settings.sensor
    slurm = Slurm(cluster, cluster_settings)
    store = SensorStore(settings.state_dir, cluster)
    wakeups = _start_wakeups(settings, cluster)
    cluster_sensor = ClusterSensor(
        cluster,
        ClusterQueries(cluster, cluster_settings),
        store,
        interval_s=sensor.interval_s,
        usage=sensor.usage,
        triggers=StewardTriggers(
            cluster,
            cluster_settings,
            trigger_command(settings, cluster) if wakeups is not None else "",
        ),
        check_standby=is_standby,
        read_stamp=StateFiles(cluster_settings, slurm.find_state_directory).read_stamp,
    )
    with closing(store):
        try:
            _run_loop(cluster_sensor, wakeups, append, stop, beat)
        finally:
            if wakeups is not None:
                wakeups.close()


def _start_wakeups(settings: Settings, cluster: str) -> WakeupListener | None:
    """Start the listener for triggers; None if disabled or impossible."""
    if not settings.sensor.helper:
        return None
    wakeups = WakeupListener(settings.wake_socket(cluster), settings.sensor.secret_file, cluster)
    try:
        wakeups.start()
    except OSError as error:
        log.error(
            "cluster %s: cannot listen on %s: %s; the sensor relies on periodic polls",
            cluster,
            settings.wake_socket(cluster),
            error.strerror or error,
        )
        wakeups.close()
        return None
    return wakeups


def _run_loop(
    sensor: ClusterSensor,
    wakeups: WakeupListener | None,
    append: Append,
    stop: Stop,
    beat: Callable[[], None],
) -> None:
    """Run the sensor's loop."""
    backoff = Backoff()
    fds = (wakeups.fd,) if wakeups is not None else ()
    last_error = ""
    while not stop.is_set():
        beat()
        if wakeups is not None:
            sensor.wake(wakeups.take_fired())
        try:
            wait_s = sensor.run_turn(append)
            backoff.reset()
            last_error = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if stop.is_set():
                return
            if str(error) != last_error:
                last_error = str(error)
                log.error("the sensor stops until a retry: %s", error)
        if shrink_databases():
            wait_s = min(wait_s, SLICE_S)
        stop.wait(min(wait_s, _MAX_TURN_WAIT_S), *fds)
