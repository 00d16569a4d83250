"""Sensor during outages of itself, slurmctld and the journal."""

import random
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from harness.events import NOON
from harness.sensor import SILENT, SensorRun, site
from steward.capture.sensor.changes import ObjectChange
from steward.capture.sensor.sensor import COMPLETE_POLL_S, is_standby
from steward.capture.sensor.store import SensorStore
from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    ControllerState,
    NodeStatesFile,
    PartitionState,
    UnreadableBody,
    node_states_path,
)
from steward.core.files import StatusWriteError, read_status
from steward.core.journal.reader import decode_row
from steward.core.journal.store import EncodedEvent, JournalUnavailable, encode_rows
from steward.core.sqlite import SqliteUnavailable
from steward.slurm.cluster import Ping

__all__ = ["site"]


def test_a_picture_of_a_steward_that_knew_less_is_read(site: SensorRun, tmp_path: Path) -> None:
    """The stored state lacks the pending resume: nothing changes, and no event is appended."""
    site.shown.states["n1"] = SILENT
    site.turn()
    with closing(sqlite3.connect(tmp_path / "states-c1.db")) as database:
        ((data,),) = database.execute("SELECT data FROM shown WHERE name = 'n1'")
    assert "is_resuming" not in data
    site.news()
    site.restart()
    site.turn()
    assert site.news() == []


def test_slurmctld_away_is_no_change(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.down = True
    for _ in range(10):
        site.turn(after_s=31.0)
    assert site.told.events == []
    site.shown.down = False
    site.shown.states["n1"] = "DOWN"
    site.shown.booted = NOON + timedelta(hours=1)
    site.turn("down", after_s=31.0)
    kinds = [event.kind for event in site.told.events]
    assert kinds == [CONTROLLER_STATE, NODE_STATE]
    started = site.told.events[0].body
    assert (started.up, started.restarted, started.daemon) == (True, True, "slurmctld")
    assert site.told.events[1].body.source == "interval"


def test_a_trigger_whose_poll_fails_is_told_at_the_next_one(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.down = True
    site.turn("reconfig", "down", after_s=31.0)
    assert site.told.events == []
    site.shown.down = False
    site.shown.states["n1"] = "DOWN"
    site.turn(after_s=31.0)
    reconfigured, down = (event.body for event in site.told.events)
    assert (reconfigured.reconfigured, reconfigured.restarted) == (True, False)
    assert (down.node, down.state) == ("n1", "DOWN")
    site.turn(after_s=31.0)
    assert len(site.told.events) == 2


def test_a_trigger_whose_changes_cannot_be_stored_is_told_at_the_next_poll(
    site: SensorRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.turn()
    site.turn(after_s=61.0)
    site.news()

    def fail(*_: object, **__: object) -> None:
        raise SqliteUnavailable("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(SensorStore, "store_changes", fail)
        with pytest.raises(SqliteUnavailable):
            site.turn("down n1")
    site.turn()
    assert [(body.state, body.source) for body in site.news()] == [
        ("DOWN", "trigger"),
        ("IDLE", "trigger"),
    ]
    site.turn()
    assert site.news() == []


@pytest.mark.parametrize("fails_at", ["first", "second"])
def test_a_status_file_that_cannot_be_written_repeats_no_report(
    site: SensorRun, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    site.turn()
    site.turn(after_s=61.0)
    site.news()
    writes: list[str] = []

    def fail(path: str, _: object) -> None:
        writes.append(path)
        if len(writes) == (1 if fails_at == "first" else 2):
            raise StatusWriteError("the disk is full")

    monkeypatch.setattr("steward.capture.sensor.store.write_status", fail)
    with pytest.raises(StatusWriteError):
        site.turn("down n1")
    for _ in range(2):
        site.turn()
    assert [body.state for body in site.news()] == ["DOWN", "IDLE"]


def test_a_report_after_a_failed_poll_hastens_the_next_one(site: SensorRun) -> None:
    site.turn()
    site.shown.down = True
    for _ in range(4):
        site.turn("down n1", after_s=31.0)
    polls = site.sensor.poll_count
    assert site.turn(after_s=0.6) > 0
    assert site.sensor.poll_count == polls
    site.turn("down n1", after_s=0.1)
    assert site.sensor.poll_count == polls + 1


def test_a_state_that_passed_has_the_time_of_its_report(
    site: SensorRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = NOON
    monkeypatch.setattr("steward.capture.sensor.sensor.utc_now", lambda: now)
    site.turn()
    site.turn(after_s=61.0)
    site.news()
    site.shown.down = True
    for minutes, report in ((1, "down n1"), (2, "drained n2"), (3, "down n1")):
        now = NOON + timedelta(minutes=minutes)
        site.turn(report, after_s=31.0)
    site.shown.down = False
    now = NOON + timedelta(minutes=4)
    site.turn(after_s=31.0)
    assert [
        (event.body.node, event.body.state, (event.at - NOON) // timedelta(minutes=1))
        for event in site.told.events
        if event.kind == NODE_STATE
    ] == [("n1", "DOWN", 1), ("n2", "IDLE+DRAIN", 2), ("n1", "IDLE", 4), ("n2", "IDLE", 4)]


def test_the_last_poll_is_told_with_its_time_while_slurmctld_is_away(
    site: SensorRun, tmp_path: Path
) -> None:
    def now() -> NodeStatesFile:
        found = read_status(node_states_path(str(tmp_path), "c1"), NodeStatesFile)
        assert found is not None
        return found[0]

    site.turn()
    before = now()
    assert before.silent_since is None
    site.shown.down = True
    site.turn()
    away = now()
    assert away.states == before.states
    assert away.silent_since is not None
    site.turn(after_s=31.0)
    site.restart()
    site.turn()
    assert now() == away, "nobody has seen more since"
    site.shown.down = False
    site.turn(after_s=31.0)
    assert now() == before, "though no node is otherwise"


def test_a_restart_between_two_looks_is_noticed_by_its_own_trigger(site: SensorRun) -> None:
    site.turn()
    site.news()
    kept = site.kept
    site.shown.booted = NOON + timedelta(hours=1)
    site.shown.states["n1"] = "DOWN"
    site.turn("primary_slurmctld_resumed_operation", "down", after_s=0.6)
    assert [event.kind for event in site.told.events] == [CONTROLLER_STATE, NODE_STATE]
    assert site.told.events[1].body.source == "interval"
    assert site.kept == kept + 1, "triggers that it lost are set again"


def test_what_changed_while_steward_was_away_is_told_at_its_start(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    site.restart()
    site.turn()
    assert [(body.old_state, body.source) for body in site.news()] == [("IDLE", "start")]


def test_slurmdbd_goes_and_comes_back(site: SensorRun) -> None:
    def dbd(*, up: bool) -> None:
        site.shown.daemons = (
            *(ping for ping in site.shown.daemons if ping.daemon == "slurmctld"),
            Ping(daemon="slurmdbd", role="primary", host="db", up=up),
        )
        site.turn(after_s=COMPLETE_POLL_S + 1)

    dbd(up=True)
    assert site.told.bodies(CONTROLLER_STATE) == []
    dbd(up=False)
    dbd(up=False)
    dbd(up=True)
    told: list[ControllerState] = site.told.bodies(CONTROLLER_STATE)
    assert [(one.daemon, one.up) for one in told] == [("slurmdbd", False), ("slurmdbd", True)]


def test_who_stands_by_tells_nothing_and_knows_all(site: SensorRun) -> None:
    site.turn()
    site.told.events.clear()
    site.stands_by = True
    site.shown.states["n1"] = "DOWN"
    site.shown.booted = NOON + timedelta(hours=1)
    site.turn(after_s=COMPLETE_POLL_S)
    assert site.told.events == []
    site.stands_by = False
    site.shown.states["n2"] = "DOWN"
    site.turn(after_s=COMPLETE_POLL_S)
    assert [body.node for body in site.news()] == ["n2"]


def test_in_charge_is_the_first_that_answers() -> None:
    def pings(*ups: bool) -> list[Ping]:
        return [
            Ping(daemon="slurmctld", host=f"ctl{number}.example.org", up=up)
            for number, up in enumerate(ups, start=1)
        ]

    assert not is_standby(pings(True, True), "ctl1")
    assert is_standby(pings(True, True), "ctl2")
    assert not is_standby(pings(False, True), "ctl2.example.org")
    assert is_standby(pings(False, True), "ctl1")
    assert not is_standby(pings(True, True), "elsewhere")
    assert not is_standby(pings(False, False), "ctl2")


def test_what_the_journal_did_not_take_is_told_later_and_once(site: SensorRun) -> None:
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


def test_a_lost_store_tells_everything_anew_under_other_keys(
    site: SensorRun, tmp_path: Path
) -> None:
    site.turn()
    before = {event.key for event in site.told.events}
    for path in tmp_path.glob("states-c1.db*"):
        path.unlink()
    site.restart()
    site.turn()
    assert len(site.told.events) == 2 * len(before)


@pytest.mark.parametrize("seed", range(20))
def test_replayed_events_give_what_was_shown_whatever_was_killed(
    site: SensorRun, seed: int
) -> None:
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


def test_an_unsent_event_of_another_version_stops_no_other(tmp_path: Path) -> None:
    store = SensorStore(str(tmp_path), "c1")
    changes = [
        ObjectChange(
            kind=PARTITION_STATE,
            name=name,
            facts=None,
            at=NOON,
            body=PartitionState(partition=name, state="REMOVED", source="start"),
        )
        for name in ("main", "wide")
    ]
    store.store_changes(changes, NOON)
    store.close()
    with closing(sqlite3.connect(tmp_path / "states-c1.db")) as database:
        renamed = """replace(data, '"source":"start"', '"source":"renamed"')"""
        database.execute(f"UPDATE outbox SET data = {renamed} WHERE number = 1")
        database.commit()
    store = SensorStore(str(tmp_path), "c1")
    rows: list[EncodedEvent] = []
    store.send_outbox(lambda events: rows.extend(encode_rows(events)))
    store.send_outbox(lambda _events: pytest.fail("the outbox is empty"))
    store.close()
    main, wide = [decode_row((1, *row)) for row in rows]
    assert isinstance(main.body, UnreadableBody)
    assert "Invalid enum value 'renamed'" in main.body.error
    assert wide.body == changes[1].body
