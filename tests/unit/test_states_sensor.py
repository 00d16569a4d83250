"""The sensor: what it tells of a cluster that changes, whatever is away or killed meanwhile."""

import random
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from states_site import BOOTED, Shown, Told

from steward.capture.states import source
from steward.capture.states.daemons import stands_by
from steward.capture.states.source import Sensor
from steward.capture.states.store import StateStore
from steward.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    ControllerState,
    utc_now,
)
from steward.journal.store import JournalUnavailable
from steward.slurm.machine import Ping
from steward.slurm.machine_rows import ReservationRecord
from steward.state_facts import NodeState

Patch = pytest.MonkeyPatch


class Site:
    """A sensor that can be killed, its cluster, its journal, and a clock that the test moves."""

    def __init__(self, tmp_path: Path, monkeypatch: Patch, *, usage: bool = True) -> None:
        self.usage = usage
        self.shown = Shown()
        self.told = Told()
        self.now_s = 1000.0
        self.kept = 0
        self.stands_by = False
        self._state_dir = str(tmp_path)
        monkeypatch.setattr("steward.capture.states.source.time.monotonic", lambda: self.now_s)
        self.restart()

    def restart(self) -> None:
        """As after a kill: nothing of the old process is left but its database."""
        self.sensor = Sensor(
            "c1",
            self.shown,
            StateStore(self._state_dir, "c1"),
            interval_s=1.0,
            usage=self.usage,
            triggers=self,
            stands_by=lambda _pings: self.stands_by,
        )

    def keep(self) -> None:
        self.kept += 1

    def turn(self, *wakes: str, after_s: float = 1.0) -> float:
        self.now_s += after_s
        self.sensor.wake(wakes)
        return self.sensor.turn(self.told.append)

    def news(self) -> list[NodeState]:
        found = self.told.bodies(NODE_STATE)
        self.told.events.clear()
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_the_first_look_tells_everything_once(site: Site) -> None:
    site.turn()
    assert site.told.replayed() == {
        NODE_STATE: {"n1": "IDLE", "n2": "IDLE"},
        PARTITION_STATE: {"main": "UP"},
        RESERVATION_STATE: {},
    }
    assert {body.source for body in site.told.bodies(NODE_STATE)} == {"start"}
    count = len(site.told.events)
    site.turn()
    site.restart()
    site.turn()
    assert len(site.told.events) == count


def test_a_change_says_what_it_was_before_and_why(site: Site) -> None:
    site.turn()
    site.news()
    at = utc_now().replace(microsecond=0)
    site.shown.states["n1"] = "DOWN+NOT_RESPONDING"
    site.shown.reasons["n1"] = ("Not responding", "slurm", at)
    site.turn()
    (event,) = site.told.events
    body = event.body
    assert (body.node, body.old_state, body.state) == ("n1", "IDLE", "DOWN+NOT_RESPONDING")
    assert (body.reason, body.reason_user, body.reason_at) == ("Not responding", "slurm", at)
    assert (body.failed, body.source, body.partitions) == (True, "reconcile", ("main",))
    assert (event.at, event.source) == (at, "sensor")


def test_a_date_that_is_long_past_is_not_when_it_happened(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.reasons["n1"] = ("an old story", "root", BOOTED)
    site.turn()
    assert utc_now() - site.told.events[0].at < timedelta(minutes=1)


@pytest.mark.parametrize(
    "state",
    [
        *("IDLE+DRAIN", "IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", "IDLE+POWERING_UP"),
        *("IDLE+PLANNED", "IDLE+MAINTENANCE", "ALLOCATED", "MIXED+DRAIN", "IDLE+REBOOT_ISSUED"),
    ],
)
def test_what_somebody_wants_is_no_failure(site: Site, state: str) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = state
    site.turn()
    (body,) = site.news()
    assert (body.state, body.failed) == (state, False)


def test_use_is_told_where_it_is_asked_for_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    site = Site(tmp_path, monkeypatch, usage=False)
    site.turn()
    site.news()
    for state in ("ALLOCATED", "MIXED+PLANNED", "ALLOCATED+COMPLETING", "IDLE", "ALLOCATED"):
        site.shown.states["n1"] = state
        site.turn()
    assert site.news() == []
    # What it was in truth, though nobody was told.
    for state in ("ALLOCATED+DRAIN", "MIXED+DRAIN", "IDLE+COMPLETING+DRAIN", "IDLE+DRAIN", "IDLE"):
        site.shown.states["n1"] = state
        site.turn()
    assert [(body.old_state, body.state) for body in site.news()] == [
        ("ALLOCATED", "ALLOCATED+DRAIN"),
        ("IDLE+COMPLETING+DRAIN", "IDLE+DRAIN"),
        ("IDLE+DRAIN", "IDLE"),
    ]
    for state in ("IDLE+DRAIN", "UNKNOWN+DRAIN", "IDLE+DRAIN", "IDLE", "UNKNOWN", "MIXED"):
        site.shown.states["n1"] = state
        site.turn()
    assert [body.state for body in site.news()] == ["IDLE+DRAIN", "IDLE"]
    site.restart()
    site.turn()
    assert site.news() == []
    site.shown.states["n1"] = "DOWN"
    site.turn()
    assert [(body.old_state, body.failed) for body in site.news()] == [("MIXED", True)]


@pytest.mark.parametrize("state", ["DOWN", "DOWN+NOT_RESPONDING", "ERROR", "IDLE+FAIL"])
def test_what_fails_has_failed_once(site: Site, state: str) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = state
    site.turn()
    assert [body.failed for body in site.news()] == [True]
    site.shown.reasons["n1"] = ("somebody looks at it", "root", None)
    site.turn()
    assert [body.failed for body in site.news()] == [False]


SILENT = "IDLE+NOT_RESPONDING"
GONE = "DOWN+NOT_RESPONDING"


@pytest.mark.parametrize("before", ["IDLE+DRAIN", "DOWN", GONE, "ALLOCATED+DRAIN", "IDLE+FAIL"])
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize(
    ("then", "failed"),
    [
        (["IDLE"], [False]),
        (["MIXED"], [False]),
        ([GONE], [True]),
        # It answers, and fails afterwards.
        (["IDLE", SILENT, GONE], [False, True, False]),
        (["ALLOCATED+NOT_RESPONDING", GONE], [False, True]),
        (["IDLE+DRAIN+NOT_RESPONDING", SILENT, "IDLE"], [False, False, False]),
        # Resumed in vain, again and again.
        ([GONE, SILENT, GONE], [True, False, True]),
    ],
)
def test_a_node_that_was_resumed_has_not_failed_while_its_slurmd_is_asked(
    site: Site, before: str, is_killed: bool, then: list[str], failed: list[bool]
) -> None:
    site.turn()
    for state in (before, SILENT):
        site.shown.states["n1"] = state
        site.turn()
        # Nothing new is shown: nothing is told.
        site.turn()
    assert [(body.state, body.failed) for body in site.news()[-1:]] == [(SILENT, False)]
    told = []
    for state in then:
        if is_killed:
            site.restart()
        site.shown.states["n1"] = state
        site.turn()
        site.turn()
        told += [body.failed for body in site.news() if body.node == "n1"]
    assert told == failed


def test_a_node_that_falls_silent_fails_once_whatever_its_jobs_do(site: Site) -> None:
    site.turn()
    site.news()
    for state in ("ALLOCATED+NOT_RESPONDING", SILENT, "MIXED+NOT_RESPONDING", GONE):
        site.shown.states["n1"] = state
        site.turn()
    assert [body.failed for body in site.news()] == [True, False, False, False]


def test_a_picture_of_a_steward_that_knew_less_is_read(site: Site, tmp_path: Path) -> None:
    """It was never told that a node is being resumed: nothing changes, and nothing is told."""
    site.shown.states["n1"] = SILENT
    site.turn()
    with sqlite3.connect(tmp_path / "states-c1.db") as database:
        ((data,),) = database.execute("SELECT data FROM shown WHERE name = 'n1'")
    assert "is_resuming" not in data
    site.news()
    site.restart()
    site.turn()
    assert site.news() == []


def test_nodes_come_and_go(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.states["dyn1"] = "DOWN"
    del site.shown.states["n2"]
    site.turn()
    new, gone = site.news()
    assert (new.node, new.old_state, new.state, new.failed) == ("dyn1", "", "DOWN", False)
    assert (gone.node, gone.old_state, gone.state) == ("n2", "IDLE", "REMOVED")
    site.shown.states["n2"] = "IDLE"
    site.turn()
    assert [(body.node, body.old_state) for body in site.news()] == [("n2", "")]


def test_a_flap_between_two_looks_ends_in_the_right_state(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    site.shown.states["n1"] = "IDLE"
    site.turn("down", "up")
    assert site.news() == []
    assert site.sensor.looks == 2


def test_a_trigger_has_a_look_taken_at_once_and_is_named(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    assert site.turn("down", after_s=0.6) > 0
    assert [body.source for body in site.news()] == ["trigger"]


def test_many_wake_ups_cost_one_look(site: Site) -> None:
    site.turn()
    for _ in range(1000):
        site.turn("down", "up", after_s=0.0001)
    assert site.sensor.looks == 1
    site.turn(after_s=0.5)
    assert site.sensor.looks == 2


def test_a_forger_cannot_have_more_looks_than_their_cost_allows(site: Site) -> None:
    def take() -> None:
        site.now_s += 2.0

    site.shown.takes = take
    began = site.now_s
    while site.now_s < began + 400.0:
        site.turn("down", "forged", after_s=0.1)
    assert 8 <= site.sensor.looks <= 11


def test_slurmctld_away_is_no_change(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.down = True
    for _ in range(10):
        site.turn(after_s=31.0)
    assert site.told.events == []
    site.shown.down = False
    site.shown.states["n1"] = "DOWN"
    site.shown.booted = BOOTED + timedelta(hours=1)
    site.turn("down", after_s=31.0)
    kinds = [event.kind for event in site.told.events]
    assert kinds == [CONTROLLER_STATE, NODE_STATE]
    started = site.told.events[0].body
    assert (started.up, started.restarted, started.daemon) == (True, True, "slurmctld")
    assert site.told.events[1].body.source == "reconcile"


def test_a_restart_between_two_looks_is_noticed_by_its_own_trigger(site: Site) -> None:
    site.turn()
    site.news()
    kept = site.kept
    site.shown.booted = BOOTED + timedelta(hours=1)
    site.shown.states["n1"] = "DOWN"
    site.turn("primary_slurmctld_resumed_operation", "down", after_s=0.6)
    assert [event.kind for event in site.told.events] == [CONTROLLER_STATE, NODE_STATE]
    assert site.told.events[1].body.source == "reconcile"
    assert site.kept == kept + 1, "triggers that it lost are set again"


def test_what_changed_while_steward_was_away_is_told_at_its_start(site: Site) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    site.restart()
    site.turn()
    assert [(body.old_state, body.source) for body in site.news()] == [("IDLE", "start")]


def test_slurmdbd_goes_and_comes_back(site: Site) -> None:
    def dbd(*, up: bool) -> None:
        site.shown.daemons = (
            *(ping for ping in site.shown.daemons if ping.daemon == "slurmctld"),
            Ping(daemon="slurmdbd", role="primary", host="db", up=up),
        )
        site.turn(after_s=source.WHOLE_S + 1)

    dbd(up=True)
    assert site.told.bodies(CONTROLLER_STATE) == []
    dbd(up=False)
    dbd(up=False)
    dbd(up=True)
    told: list[ControllerState] = site.told.bodies(CONTROLLER_STATE)
    assert [(one.daemon, one.up) for one in told] == [("slurmdbd", False), ("slurmdbd", True)]


def test_partitions_and_reservations(site: Site) -> None:
    site.turn()
    site.told.events.clear()
    site.shown.parts["main"] = "DRAIN"
    now = utc_now()
    site.shown.reserved["r1"] = ReservationRecord(
        name="r1", state="INACTIVE", nodes="n1", start=now, end=now + timedelta(hours=1)
    )
    site.turn(after_s=source.WHOLE_S)
    assert [body.state for body in site.told.bodies(PARTITION_STATE)] == ["DRAIN"]
    (made,) = site.told.bodies(RESERVATION_STATE)
    assert (made.reservation, made.state, made.nodes) == ("r1", "INACTIVE", "n1")
    # It begins by the clock: the look comes at that time, not only when all is looked at.
    site.shown.reserved["r1"] = ReservationRecord(
        name="r1", state="ACTIVE", nodes="n[1-2]", start=now, end=now + timedelta(hours=1)
    )
    site.turn(after_s=3.0)
    site.shown.reserved.clear()
    site.turn(after_s=source.WHOLE_S)
    told = site.told.bodies(RESERVATION_STATE)
    assert [(body.old_state, body.state) for body in told] == [
        ("", "INACTIVE"),
        ("INACTIVE", "ACTIVE"),
        ("ACTIVE", "REMOVED"),
    ]


def test_who_stands_by_tells_nothing_and_knows_all(site: Site) -> None:
    site.turn()
    site.told.events.clear()
    site.stands_by = True
    site.shown.states["n1"] = "DOWN"
    site.shown.booted = BOOTED + timedelta(hours=1)
    site.turn(after_s=source.WHOLE_S)
    assert site.told.events == []
    site.stands_by = False
    site.shown.states["n2"] = "DOWN"
    site.turn(after_s=source.WHOLE_S)
    assert [body.node for body in site.news()] == ["n2"]


def test_in_charge_is_the_first_that_answers() -> None:
    def pings(*ups: bool) -> list[Ping]:
        return [
            Ping(daemon="slurmctld", host=f"ctl{number}.example.org", up=up)
            for number, up in enumerate(ups, start=1)
        ]

    assert not stands_by(pings(True, True), "ctl1")
    assert stands_by(pings(True, True), "ctl2")
    assert not stands_by(pings(False, True), "ctl2.example.org")
    assert stands_by(pings(False, True), "ctl1")
    assert not stands_by(pings(True, True), "elsewhere")
    assert not stands_by(pings(False, False), "ctl2")


def test_what_the_journal_did_not_take_is_told_later_and_once(site: Site) -> None:
    site.turn()
    site.told.events.clear()
    site.told.away = True
    site.shown.states["n1"] = "DOWN"
    with pytest.raises(JournalUnavailable):
        site.turn()
    site.shown.states["n1"] = "IDLE"
    site.restart()
    site.told.away = False
    site.turn()
    assert [(body.old_state, body.state) for body in site.news()] == [
        ("IDLE", "DOWN"),
        ("DOWN", "IDLE"),
    ]


def test_a_lost_store_tells_everything_anew_under_other_keys(site: Site, tmp_path: Path) -> None:
    site.turn()
    before = {event.key for event in site.told.events}
    for path in tmp_path.glob("states-c1.db*"):
        path.unlink()
    site.restart()
    site.turn()
    assert len(site.told.events) == 2 * len(before)


def test_names_of_any_kind_make_keys_that_can_be_forwarded(site: Site) -> None:
    site.shown.parts["a b:c\u00e9" + "x" * 500] = "UP"
    site.turn()
    for event in site.told.events:
        assert event.key.startswith(f"{event.kind}:")
        assert len(event.key) < 300
        assert all("!" <= letter <= "~" for letter in event.key)


@pytest.mark.parametrize("seed", range(20))
def test_replayed_events_give_what_was_shown_whatever_was_killed(site: Site, seed: int) -> None:
    chance = random.Random(seed)
    states = ["IDLE", "DOWN", "IDLE+DRAIN", "ALLOCATED", "DOWN+DRAIN+NOT_RESPONDING", SILENT]
    for _ in range(60):
        for _ in range(chance.randrange(4)):
            name = f"n{chance.randrange(6)}"
            if chance.random() < 0.2:
                site.shown.states.pop(name, None)
            else:
                site.shown.states[name] = chance.choice(states)
        site.told.away = chance.random() < 0.2
        site.told.dies_after = chance.random() < 0.2
        site.shown.down = chance.random() < 0.1
        try:
            site.turn(*(["down"] if chance.random() < 0.3 else []), after_s=chance.random() * 3)
        except (JournalUnavailable, KeyboardInterrupt):
            site.restart()
        if chance.random() < 0.2:
            site.restart()
    site.told.away = site.told.dies_after = site.shown.down = False
    site.turn(after_s=60.0)
    assert site.told.replayed()[NODE_STATE] == site.shown.states


def test_a_look_that_writes_nothing_leaves_the_database_alone(site: Site, tmp_path: Path) -> None:
    site.turn()
    site.turn()
    wal = tmp_path / "states-c1.db-wal"
    size = wal.stat().st_size
    for _ in range(20):
        site.turn()
    assert wal.stat().st_size == size
    assert site.sensor.looks > 20
