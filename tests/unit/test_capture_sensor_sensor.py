"""Sensor: events of a cluster whose states change."""

from datetime import timedelta
from pathlib import Path

import msgspec

from harness.events import NOON
from harness.sensor import SILENT, Patch, SensorRun, site
from steward.capture.sensor.sensor import COMPLETE_POLL_S
from steward.core.events import (
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    utc_now,
)
from steward.slurm.cluster import Ping
from steward.slurm.cluster_records import ReservationRecord

__all__ = ["site"]


def test_the_first_look_tells_everything_once(site: SensorRun) -> None:
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


def test_a_change_says_what_it_was_before_and_why(site: SensorRun) -> None:
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
    assert (body.failed, body.source, body.partitions) == (True, "interval", ("main",))
    assert (event.at, event.source) == (at, "sensor")


def test_a_date_that_is_long_past_is_not_when_it_happened(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.reasons["n1"] = ("an old story", "root", NOON)
    site.turn()
    assert utc_now() - site.told.events[0].at < timedelta(minutes=1)


def test_use_is_told_where_it_is_asked_for_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.turn()
    site.news()
    for state in ("ALLOCATED", "MIXED+PLANNED", "ALLOCATED+COMPLETING", "IDLE", "ALLOCATED"):
        site.shown.states["n1"] = state
        site.turn()
    assert site.news() == []
    # The true state, which no event reported.
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


def test_nodes_come_and_go(site: SensorRun) -> None:
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


def test_a_flap_between_two_looks_ends_in_the_right_state(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    site.shown.states["n1"] = "IDLE"
    site.turn("down", "up")
    assert site.news() == []
    assert site.sensor.poll_count == 2


def test_a_trigger_has_a_look_taken_at_once_and_is_named(site: SensorRun) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    assert site.turn("down", after_s=0.6) > 0
    assert [body.source for body in site.news()] == ["trigger"]


def test_what_a_trigger_reports_is_told_though_it_has_passed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.shown.states["n2"] = "MIXED"
    site.turn()
    site.turn("drained n1")
    site.news()
    site.turn(after_s=60.0)

    def told(*wakes: str, after_s: float = 20.0) -> list[tuple[str, str, str, bool]]:
        site.turn(*wakes, after_s=after_s)
        return [(body.node, body.state, body.source, body.failed) for body in site.news()]

    assert told("drained n1") == [
        ("n1", "IDLE+DRAIN", "trigger", False),
        ("n1", "IDLE", "trigger", False),
    ]
    assert told("draining n2", "down n1") == [
        ("n1", "DOWN", "trigger", True),
        ("n2", "MIXED+DRAIN", "trigger", False),
        ("n1", "IDLE", "trigger", False),
        ("n2", "MIXED", "trigger", False),
    ]
    # A state that a poll showed is reported once, however late its trigger is.
    site.shown.states["n1"] = "IDLE+DRAIN"
    assert told() == [("n1", "IDLE+DRAIN", "interval", False)]
    assert told("drained n1") == []
    site.shown.states["n1"] = "IDLE"
    assert told("resume n1") == [("n1", "IDLE", "trigger", False)]
    site.shown.states["n1"] = "IDLE+DRAIN"
    told(after_s=1.0)
    site.shown.states["n1"] = "IDLE"
    told(after_s=1.0)
    assert told("drained n1") == []
    assert len(told("drained n1")) == 2
    # It is still so, or what is reported is no node's, or no list.
    site.shown.states["n1"] = "DOWN+DRAIN"
    assert len(told("down n1", "drained n1")) == 1
    assert told("drained n9", "drained n[1-", "down") == []
    assert told("drained n1", "fail") == []
    # Reports from before Steward's start are unknown.
    site.shown.states["n1"] = "IDLE"
    told()
    site.restart()
    assert told("drained n2") == []


def test_a_node_that_is_resumed_is_looked_at_until_it_answers(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """slurmctld reports the resume, and nothing after it."""
    site = SensorRun(tmp_path, monkeypatch, interval_s=3600.0)
    site.shown.states["n1"] = "DOWN"
    site.turn()
    site.shown.states["n1"] = SILENT
    site.turn("resume")
    site.shown.states["n1"] = "IDLE"
    assert site.turn(after_s=0.0) <= 10.0
    site.turn(after_s=10.0)
    assert site.news()[-1].state == "IDLE"
    # A node that answers, and one that stops answering, for which there is a trigger.
    assert site.turn(after_s=0.0) > 60.0
    site.shown.states["n1"] = SILENT
    site.turn("down")
    assert site.turn(after_s=0.0) > 60.0


def test_many_wake_ups_cost_one_look(site: SensorRun) -> None:
    site.turn()
    for _ in range(1000):
        site.turn("down", "up", after_s=0.0001)
    assert site.sensor.poll_count == 1
    site.turn(after_s=0.5)
    assert site.sensor.poll_count == 2


def test_a_forger_cannot_have_more_looks_than_their_cost_allows(site: SensorRun) -> None:
    def take() -> None:
        site.now_s += 2.0

    site.shown.takes = take
    began = site.now_s
    while site.now_s < began + 400.0:
        site.turn("down", "forged", after_s=0.1)
    assert 8 <= site.sensor.poll_count <= 11


def test_partitions_and_reservations(site: SensorRun) -> None:
    site.turn()
    site.told.events.clear()
    site.shown.parts["main"] = "DRAIN"
    now = utc_now()
    site.shown.reserved["r1"] = ReservationRecord(
        name="r1", state="INACTIVE", nodes="n1", start=now, end=now + timedelta(hours=1)
    )
    site.turn(after_s=COMPLETE_POLL_S)
    assert [body.state for body in site.told.bodies(PARTITION_STATE)] == ["DRAIN"]
    (made,) = site.told.bodies(RESERVATION_STATE)
    assert (made.reservation, made.state, made.nodes) == ("r1", "INACTIVE", "n1")
    # It begins periodically: the poll comes at that time, not only when all nodes are polled.
    site.shown.reserved["r1"] = ReservationRecord(
        name="r1", state="ACTIVE", nodes="n[1-2]", start=now, end=now + timedelta(hours=1)
    )
    site.turn(after_s=3.0)
    site.shown.reserved.clear()
    site.turn(after_s=COMPLETE_POLL_S)
    told = site.told.bodies(RESERVATION_STATE)
    assert [(body.old_state, body.state) for body in told] == [
        ("", "INACTIVE"),
        ("INACTIVE", "ACTIVE"),
        ("ACTIVE", "REMOVED"),
    ]


def test_names_of_any_kind_make_keys_that_can_be_forwarded(site: SensorRun) -> None:
    site.shown.parts["a b:c\u00e9" + "x" * 500] = "UP"
    site.turn()
    for event in site.told.events:
        assert event.key.startswith(f"{event.kind}:")
        assert len(event.key) < 300
        assert all("!" <= letter <= "~" for letter in event.key)


def test_a_look_that_writes_nothing_leaves_the_database_alone(
    site: SensorRun, tmp_path: Path
) -> None:
    site.turn()
    site.turn()
    wal = tmp_path / "states-c1.db-wal"
    size = wal.stat().st_size
    for _ in range(20):
        site.turn()
    assert wal.stat().st_size == size
    assert site.sensor.poll_count > 20


def test_unchanged_state_files_save_polls(tmp_path: Path, monkeypatch: Patch) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.stamp = (("node_state", 1, 1),)
    site.turn()
    counted = site.sensor.poll_count
    site.shown.parts["main"] = "DRAIN"
    site.told.events.clear()
    for _ in range(40):
        site.turn()
    assert site.sensor.poll_count == counted + 8
    assert site.told.events == []
    # Nothing saves that a node is silent, nor that it is down a moment later.
    site.shown.states["n1"] = SILENT
    for _ in range(5):
        site.turn()
    assert [body.state for body in site.news()] == [SILENT]
    for state in ("DOWN+NOT_RESPONDING", "DOWN"):
        site.shown.states["n1"] = state
        site.turn()
        if state != "DOWN":
            assert [body.state for body in site.news()] == [state]
    for _ in range(5):
        site.turn()
    assert [body.state for body in site.news()] == ["DOWN"]
    site.shown.parts["main"] = "UP"
    # A file that was written a moment ago may miss a change, so everything is polled as ever.
    site.stamp = None
    counted = site.sensor.poll_count
    for _ in range(5):
        site.turn()
    assert site.sensor.poll_count == counted + 5
    # A new stamp: one complete poll covers it.
    site.shown.parts["main"] = "DRAIN"
    site.stamp = (("node_state", 1, 2),)
    site.turn()
    assert [body.state for body in site.told.bodies(PARTITION_STATE)] == ["DRAIN"]
    # Once a minute even the rest is polled, should slurmctld have saved nothing.
    site.shown.parts["main"] = "UP"
    for _ in range(60):
        site.turn()
    assert [body.state for body in site.told.bodies(PARTITION_STATE)] == ["DRAIN", "UP"]


def test_slurmdbd_is_pinged_while_nothing_changes(tmp_path: Path, monkeypatch: Patch) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.stamp = (("node_state", 1, 1),)
    slurmdbd = Ping(daemon="slurmdbd", role="primary", host="db", up=True)
    controllers = site.shown.daemons
    site.shown.daemons = (*controllers, slurmdbd)
    site.turn()
    ping_count = site.shown.ping_count
    site.shown.daemons = (*controllers, msgspec.structs.replace(slurmdbd, up=False))
    for _ in range(int(COMPLETE_POLL_S) + 4):
        site.turn()
    (event,) = [event for event in site.told.events if event.kind == CONTROLLER_STATE]
    assert (event.body.daemon, event.body.up) == ("slurmdbd", False)
    assert site.shown.ping_count == ping_count, "slurmctld is not pinged for slurmdbd"


def test_a_cluster_without_slurmdbd_is_pinged_once_a_minute_while_nothing_changes(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.stamp = (("node_state", 1, 1),)
    site.turn()
    ping_count = site.shown.ping_count
    for _ in range(int(COMPLETE_POLL_S) * 3):
        site.turn()
    assert site.shown.ping_count == ping_count
    for _ in range(int(COMPLETE_POLL_S)):
        site.turn()
    assert site.shown.ping_count == ping_count + 1


def test_unchanged_state_files_save_checks_of_triggers(tmp_path: Path, monkeypatch: Patch) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.stamp = (("trigger_state", 1, 1),)
    site.turn()
    sync_count = site.kept
    for _ in range(200):
        site.turn()
    assert site.kept == sync_count
    site.stamp = (("trigger_state", 1, 2),)
    for _ in range(62):
        site.turn()
    assert site.kept == sync_count + 1
    site.stamp = None
    for _ in range(62):
        site.turn()
    assert site.kept == sync_count + 2


def test_reports_and_usage_need_polls_whatever_the_files_say(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    site = SensorRun(tmp_path, monkeypatch, usage=False)
    site.stamp = (("node_state", 1, 1),)
    site.turn()
    site.news()
    site.shown.states["n1"] = "DOWN"
    site.turn("down n1")
    assert [body.state for body in site.news()] == ["DOWN"]
    (tmp_path / "usage").mkdir()
    site = SensorRun(tmp_path / "usage", monkeypatch, usage=True)
    site.stamp = (("node_state", 1, 1),)
    for _ in range(5):
        site.turn()
    assert site.sensor.poll_count == 5
