"""The sensor: looks at a cluster's nodes, partitions, reservations and daemons, and tells changes.

A look is taken by the clock, and at once when slurmctld's triggers wake us. Either
way it is the look that counts: a trigger may be late (slurmctld works on them every
15 s) or lost, and what it would have told is seen all the same. A look is
never more than a twentieth of the time, whoever asked for it. What a trigger reports of a node is
told also where the state is gone by the next look.
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
    NodeShown,
    PartitionShown,
    Picture,
    ReservationShown,
    Shown,
    boundaries,
    compare,
)
from steward.capture.sensor.store import DaemonSeen, StateStore
from steward.capture.sensor.triggers import OurTriggers, Wake, Wakeups, program_of
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import (
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    ControllerState,
    Noticed,
    utc_now,
)
from steward.core.poll_status import COST_FACTOR
from steward.core.waits import Backoff, Stop
from steward.slurm import SlurmError, tres
from steward.slurm.cluster import Machine, Ping
from steward.slurm.cluster_records import NodeRecord, PartitionRecord, ReservationRecord
from steward.slurm.node_states import format_node_state, parse_node_state
from steward.slurm.nodelists import NodeListError, expand

SLURMCTLD: Final = "slurmctld"
SLURMDBD: Final = "slurmdbd"


class Daemons:
    """Compares how the daemons are with how they were.

    Args:
        store: Remembers them, and what is to be told.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def slurmctld(self, started_at: datetime, *, silent: bool = False) -> bool:
        """See when slurmctld started; whether it is another than before.

        Args:
            started_at: Its boot time.
            silent: Whether somebody else tells.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        before = self._store.daemons.get(SLURMCTLD)
        restarted = before is not None and before.started_at != started_at
        told = ControllerState(
            up=True,
            message=f"started at {started_at:%Y-%m-%dT%H:%M:%SZ}",
            daemon=SLURMCTLD,
            restarted=True,
        )
        # Two who watch the same slurmctld tell of one start.
        key = f"started:{int(started_at.timestamp())}"
        self._store.see(
            SLURMCTLD,
            DaemonSeen(up=True, started_at=started_at),
            told if restarted and not silent else None,
            key,
        )
        return restarted

    def tell_reconfigured(self) -> None:
        """Tell that slurmctld has read slurm.conf again.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        seen = self._store.daemons.get(SLURMCTLD)
        if seen is not None:
            message = "slurmctld has read its configuration again"
            told = ControllerState(up=True, message=message, reconfigured=True)
            self._store.see(SLURMCTLD, seen, told)

    def slurmdbd(self, pings: Iterable[Ping], *, silent: bool = False) -> None:
        """See whether slurmdbd answers; nothing is told where there is none.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        found = [ping.up for ping in pings if ping.daemon == SLURMDBD]
        if not found:
            return
        up = any(found)
        before = self._store.daemons.get(SLURMDBD)
        # That it is there at first is no news; that it is not, is.
        is_news = before.up != up if before is not None else not up
        message = "" if up else "slurmdbd does not answer: slurmctld keeps what it is to be told"
        told = ControllerState(up=up, message=message, daemon=SLURMDBD)
        self._store.see(SLURMDBD, DaemonSeen(up=up), told if is_news and not silent else None)


def in_charge(pings: Iterable[Ping]) -> str:
    """The host of the slurmctld in charge: the first that answers; "" where none does."""
    return next((ping.host for ping in pings if ping.daemon == SLURMCTLD and ping.up), "")


def stands_by(pings: Iterable[Ping], own_host: str = "") -> bool:
    """Whether this is the host of a slurmctld that stands by, while another is in charge.

    Args:
        pings: Which daemons answer.
        own_host: This host's name; asked of the kernel if empty.
    """
    pings = tuple(pings)
    own = _short(own_host or socket.gethostname())
    hosts = {_short(ping.host) for ping in pings if ping.daemon == SLURMCTLD}
    charge = _short(in_charge(pings))
    return own in hosts and bool(charge) and charge != own


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


log = logging.getLogger(__name__)

WHOLE_S: Final = 15.0
"""Seconds between two looks at everything; nodes alone are looked at more often."""
_AFTER_WAKE_S: Final = 0.5
"""Least seconds between two looks that were asked for: slurmctld asks for several at once."""
_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 30.0
_ANSWERS_S: Final = 5.0
"""Seconds until a node that was resumed is looked at again: no trigger of slurmctld's goes
off when its slurmd has answered."""
_EARLY: Final = timedelta(seconds=1)
"""Slurm's times have whole seconds; a look in the same second may still show the old state."""
_TRIGGERS_S: Final = 60.0
_LATE_S: Final = 60.0
"""Seconds that a trigger may come after what it reports was seen; slurmctld takes 15, and more
on a busy host."""
_GPU: Final = "gres/gpu"
RECONFIG: Final = "reconfig"
"""The trigger of a configuration that was read anew, or of a node that was changed by hand."""


class Shows(Protocol):
    """What a cluster is asked; :class:`steward.slurm.cluster.Machine` answers."""

    def node_states(self) -> dict[str, NodeRecord]:
        """The nodes, by name."""
        ...

    def partitions(self) -> dict[str, PartitionRecord]:
        """The partitions, by name."""
        ...

    def reservations(self) -> dict[str, ReservationRecord]:
        """The reservations, by name."""
        ...

    def started_at(self) -> datetime:
        """When slurmctld started."""
        ...

    def pings(self) -> tuple[Ping, ...]:
        """Which daemons answer."""
        ...


class KeepsTriggers(Protocol):
    """Keeps our triggers set; :class:`steward.capture.sensor.triggers.OurTriggers` does."""

    def keep(self) -> None:
        """Set those that are not there, and clear those that are of no use."""
        ...


class Sensor:
    """Watches one cluster.

    Args:
        cluster: Its name.
        shows: Its Slurm.
        store: What was told.
        interval_s: Least seconds between two looks that nobody asked for.
        usage: Whether it is told that jobs come to nodes, and leave them.
        triggers: Keeps our triggers set; None where there are to be none.
        stands_by: Whether somebody else tells, by what the daemons answer.
    """

    def __init__(
        self,
        cluster: str,
        shows: Shows,
        store: StateStore,
        *,
        interval_s: float,
        usage: bool = True,
        triggers: KeepsTriggers | None = None,
        stands_by: Callable[[Iterable[Ping]], bool] = lambda _pings: False,
    ) -> None:
        self.cost_s = 0.0
        """What the last look took, in seconds."""
        self.looks = 0
        """How many looks were taken."""
        self._cluster = cluster
        self._shows = shows
        self._store = store
        self._daemons = Daemons(store)
        self._interval_s = interval_s
        self._usage = usage
        self._triggers = triggers
        self._triggers_due = 0.0
        self._stands_by = stands_by
        self._is_standing_by = False
        self._is_first = True
        self._is_away = False
        self._began = float("-inf")
        self._due = 0.0
        self._whole_due = 0.0
        self._wakes: set[Wake] = set()
        self._reported = Reported()
        self._said = ""
        self._backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)

    def wake(self, wakes: Iterable[Wake]) -> None:
        """Have a look taken soon: slurmctld says that something happened.

        Args:
            wakes: The triggers that went off.
        """
        new = set(wakes) - self._wakes
        if not new:
            return
        self._wakes |= new
        fresh = {wake.event for wake in new}
        gap_s = max(_AFTER_WAKE_S, COST_FACTOR * self.cost_s)
        self._due = min(self._due, self._began + gap_s)
        if not all(map(_is_of_nodes, fresh)) or RECONFIG in fresh:
            self._whole_due = 0.0
        if not all(map(_is_of_nodes, fresh)):
            self._triggers_due = 0.0

    def turn(self, append: Append) -> float:
        """Look if a look is due, and tell what has changed.

        Returns:
            Seconds until the next call at the latest.

        Raises:
            Unavailable: The journal, or our database, is away: call again later.
        """
        self._store.send(append)
        if time.monotonic() < self._due:
            return self._left_s()
        self._look()
        self._store.send(append)
        if not self._is_away:
            self._keep_triggers()
        return self._left_s()

    def _left_s(self) -> float:
        return max(0.0, self._due - time.monotonic())

    def _look(self) -> None:
        self._began = began = time.monotonic()
        self.looks += 1
        wakes, self._wakes = self._wakes, set()
        is_whole = began >= self._whole_due
        try:
            is_anew = is_whole and self._look_at_daemons()
            at = utc_now()
            picture = self._picture(is_whole=is_whole)
        except SlurmError as error:
            self._away(str(error))
            return
        self.cost_s = time.monotonic() - began
        events = {wake.event for wake in wakes}
        if RECONFIG in events and not self._is_standing_by:
            self._daemons.tell_reconfigured()
        self._is_away = False
        self._backoff.reset()
        if self._said:
            log.info("cluster %s: the sensor sees again", self._cluster)
            self._said = ""
        nodes = picture[NODE_STATE]
        passed = self._reported.passed(wakes, self._store.picture[NODE_STATE], nodes, began)
        if passed:
            self._tell({NODE_STATE: passed}, "trigger", at)
        self._tell(picture, self._source(events, is_anew=is_anew), at)
        self._is_first = False
        self._set_due(began, at, is_whole=is_whole)

    def _tell(self, picture: Picture, source: Noticed, at: datetime) -> None:
        changes = compare(
            self._store.picture,
            picture,
            source=source,
            at=at,
            since=self._since(),
            usage=self._usage,
        )
        self._store.keep(changes, at, silent=self._is_standing_by)

    def _since(self) -> datetime | None:
        looked_at = self._store.looked_at
        return None if looked_at is None else looked_at - _EARLY

    def _source(self, events: set[str], *, is_anew: bool) -> Noticed:
        """What made us look; a slurmctld that was away or is another tells nothing by itself."""
        if self._is_first:
            return "start"
        return "trigger" if any(map(_is_of_nodes, events)) and not is_anew else "reconcile"

    def _picture(self, *, is_whole: bool) -> Picture:
        picture: dict[str, dict[str, NodeShown | PartitionShown | ReservationShown]] = {
            NODE_STATE: {name: shown_of(one) for name, one in self._shows.node_states().items()}
        }
        if is_whole:
            picture[PARTITION_STATE] = {
                name: PartitionShown(state=one.state)
                for name, one in self._shows.partitions().items()
            }
            picture[RESERVATION_STATE] = {
                name: _reservation(one) for name, one in self._shows.reservations().items()
            }
        return picture

    def _look_at_daemons(self) -> bool:
        """See how the daemons are; whether slurmctld was away or is another than before."""
        was_away = self._is_away
        started_at = self._shows.started_at()
        pings = self._shows.pings()
        standing_by = self._stands_by(pings)
        if standing_by != self._is_standing_by:
            word = "stands by" if standing_by else "tells"
            log.info("cluster %s: the sensor %s: slurmctld's place", self._cluster, word)
            self._is_standing_by = standing_by
        restarted = self._daemons.slurmctld(started_at, silent=standing_by)
        self._daemons.slurmdbd(pings, silent=standing_by)
        if restarted:
            self._triggers_due = 0.0
        return was_away or restarted

    def _set_due(self, began: float, at: datetime, *, is_whole: bool) -> None:
        gap_s = max(self._interval_s, COST_FACTOR * self.cost_s)
        self._due = began + gap_s
        if self._awaits_an_answer():
            self._due = min(self._due, began + max(_ANSWERS_S, COST_FACTOR * self.cost_s))
        if not is_whole:
            return
        self._whole_due = began + max(WHOLE_S, COST_FACTOR * self.cost_s)
        # Reservations begin and end by the clock: nothing of Slurm's tells of it.
        coming = [moment for moment in boundaries(self._store.picture) if moment > at - _EARLY]
        if coming:
            until_s = (min(coming) + _EARLY - at).total_seconds()
            self._whole_due = min(self._whole_due, began + max(gap_s, until_s))
        self._due = min(self._due, max(began + gap_s, self._whole_due))

    def _awaits_an_answer(self) -> bool:
        nodes = self._store.picture.get(NODE_STATE, {}).values()
        return any(isinstance(node, NodeShown) and node.is_resuming for node in nodes)

    def _away(self, message: str) -> None:
        """Try again before long, and then look at everything."""
        self._is_away = True
        self._whole_due = 0.0
        self._due = time.monotonic() + self._backoff.next_s()
        if message != self._said:
            self._said = message
            log.warning("cluster %s: the sensor sees nothing: %s", self._cluster, message)
        self._store.keep_silence()

    def _keep_triggers(self) -> None:
        now = time.monotonic()
        if self._triggers is None or now < self._triggers_due:
            return
        self._triggers_due = now + _TRIGGERS_S
        if not self._is_standing_by:
            self._triggers.keep()


class Reported:
    """What triggers report of nodes, and which of it no look has shown.

    slurmctld reports a state once, when it begins. Where a look showed it too, the two are the
    same, whichever came first; a report that has no such look within a minute is of a state that
    passed between two looks.
    """

    def __init__(self) -> None:
        self._shown_s: dict[tuple[str, str], float] = {}
        self._first_s: float | None = None

    def passed(
        self,
        wakes: Iterable[Wake],
        before: Mapping[str, Shown],
        now: Mapping[str, Shown],
        now_s: float,
    ) -> dict[str, NodeShown]:
        """All nodes as they were before, those with the states that were reported and have passed.

        Args:
            wakes: The triggers that went off since the last look.
            before: The nodes as they were told last.
            now: The nodes as this look shows them.
            now_s: The monotonic time of this look.

        Returns:
            The nodes by name; {} where no state has passed unseen.
        """
        if self._first_s is None:
            self._first_s = now_s
        for name, present in now.items():
            for event in _begun(before.get(name), present):
                self._shown_s[event, name] = now_s
        nodes = {name: one for name, one in before.items() if isinstance(one, NodeShown)}
        # Where a node was drained and down, it is down that matters.
        unseen = sorted(self._unseen(wakes, now_s), reverse=True)
        states = {
            name: _REPORTED[event](nodes[name].state)
            for event, name in unseen
            if name in nodes
            and name in now
            and event not in _events_of(nodes[name].state)
            and event not in _events_of(now[name].state)
        }
        # What was shown before Steward started is not known.
        if not states or now_s - self._first_s < _LATE_S:
            return {}
        for name, state in states.items():
            nodes[name] = msgspec.structs.replace(nodes[name], state=state)
        return nodes

    def _unseen(self, wakes: Iterable[Wake], now_s: float) -> Iterator[tuple[str, str]]:
        for key in [key for key, at_s in self._shown_s.items() if now_s - at_s > _LATE_S]:
            del self._shown_s[key]
        for wake in wakes:
            try:
                names = expand(wake.nodes) if wake.event in _REPORTED and wake.nodes else ()
            except NodeListError as error:
                log.debug("a trigger's nodes are not understood: %s", error)
                continue
            yield from ((wake.event, name) for name in names if self._takes(wake.event, name))

    def _takes(self, event: str, name: str) -> bool:
        """Whether no look has shown what is reported; one that has is of one report alone."""
        return self._shown_s.pop((event, name), None) is None


def _begun(before: Shown | None, now: Shown) -> Iterator[str]:
    """The events of the states that a node is in now, and was not in before."""
    was = frozenset() if before is None else frozenset(_events_of(before.state))
    return (event for event in _events_of(now.state) if event not in was)


@lru_cache(maxsize=1024)
def _events_of(state: str) -> tuple[str, ...]:
    """The triggers that go off when a node comes into a state."""
    base, flags = parse_node_state(state)
    is_used = base in ("ALLOCATED", "MIXED") or "COMPLETING" in flags
    found = ["down"] if base == "DOWN" else []
    if "DRAIN" in flags:
        found.append("draining" if is_used else "drained")
    return (*found, "fail") if "FAIL" in flags else tuple(found)


def _flagged(flag: str, *, used: bool | None = None) -> Callable[[str], str]:
    def state_of(state: str) -> str:
        base, flags = parse_node_state(state)
        is_used = base in ("ALLOCATED", "MIXED")
        if used is not None and is_used != used:
            base = "ALLOCATED" if used else "IDLE"
        kept = flags if used is not False else [one for one in flags if one != "COMPLETING"]
        return format_node_state(base, sorted({*kept, flag}))

    return state_of


_REPORTED: Final[Mapping[str, Callable[[str], str]]] = {
    "down": lambda _state: "DOWN",
    "drained": _flagged("DRAIN", used=False),
    "draining": _flagged("DRAIN", used=True),
    "fail": _flagged("FAIL"),
}
"""The state that a trigger reports, by its event and the state before."""


def _is_of_nodes(wake: str) -> bool:
    """Whether a trigger is of nodes, not of a daemon; slurmctld fires ``reconfig`` for both."""
    return not wake.startswith(("primary_", "backup_"))


def shown_of(record: NodeRecord) -> NodeShown:
    """What is compared of a node."""
    return NodeShown(
        state=record.state,
        reason=record.reason,
        reason_uid=record.reason_uid,
        reason_user=record.reason_user,
        reason_at=record.reason_at,
        partitions=record.partitions,
        cpus=record.cpus,
        memory_bytes=record.memory_bytes,
        gpus=tres.gres(record.gres).get(_GPU, 0),
    )


def _reservation(record: ReservationRecord) -> ReservationShown:
    return ReservationShown(
        state=record.state,
        nodes=record.nodes,
        start=record.start,
        end=record.end,
        users=record.users,
        flags=record.flags,
    )


_LONGEST_NAP_S = 10.0


def run(
    settings: Settings, cluster: str, append: Append, stop: Stop, beat: Callable[[], None]
) -> None:
    """Watch a cluster until the Stop is raised.

    Args:
        settings: The configuration.
        cluster: Name of the cluster.
        append: Appends events durably.
        stop: Ends it.
        beat: Called at every turn, to show that the process lives.

    Raises:
        SqliteUnavailable: What was told cannot be looked up now.
    """
    of, sensor = settings.cluster[cluster], settings.sensor
    store = StateStore(settings.state_dir, cluster)
    wakeups = _wakeups(settings, cluster)
    watching = Sensor(
        cluster,
        Machine(cluster, of),
        store,
        interval_s=sensor.interval_s,
        usage=sensor.usage,
        triggers=OurTriggers(
            cluster, of, program_of(settings, cluster) if wakeups is not None else "", sensor.helper
        ),
        stands_by=stands_by,
    )
    with closing(store):
        try:
            _watch(watching, wakeups, append, stop, beat)
        finally:
            if wakeups is not None:
                wakeups.close()


def _wakeups(settings: Settings, cluster: str) -> Wakeups | None:
    if not settings.sensor.triggers:
        return None
    wakeups = Wakeups(settings.wake_socket(cluster), settings.sensor.secret_file, cluster)
    try:
        wakeups.start()
    except OSError as error:
        log.error(
            "cluster %s: cannot listen on %s: %s; nodes are looked at by the clock alone",
            cluster,
            settings.wake_socket(cluster),
            error.strerror or error,
        )
        wakeups.close()
        return None
    return wakeups


def _watch(
    watching: Sensor,
    wakeups: Wakeups | None,
    append: Append,
    stop: Stop,
    beat: Callable[[], None],
) -> None:
    backoff = Backoff()
    fds = (wakeups.fd,) if wakeups is not None else ()
    said = ""
    while not stop.is_set():
        beat()
        if wakeups is not None:
            watching.wake(wakeups.take())
        try:
            wait_s = watching.turn(append)
            backoff.reset()
            said = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if stop.is_set():
                return
            if str(error) != said:
                said = str(error)
                log.error("the sensor waits: %s", error)
        stop.wait(min(wait_s, _LONGEST_NAP_S), *fds)
