"""Actions ``history``: partitions, reservations, and the past of one node."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harness import history
from harness.events import NOON, at
from harness.site import ADA, ROOT, Site
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import (
    PARTITION_STATE,
    NodeStatesFile,
    PartitionState,
    encode_event,
    node_states_path,
)
from steward.core.files import write_status
from steward.core.sqlite import open_database, transaction
from steward.reports.history.consumer import get_history_path
from steward.reports.history.spans import MIGRATIONS


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = history.make_site(tmp_path)
    yield made
    made.close()


def test_what_is_there_is_what_was_last_told_of_it(site: Site) -> None:

    def partition(when: float, name: str, state: str) -> None:
        site.feed(history.event(PARTITION_STATE, when, PartitionState(partition=name, state=state)))

    partition(0, "main", "UP")
    partition(0, "big", "UP")
    partition(50, "main", "DOWN")
    partition(60, "big", "REMOVED")
    (main,) = site.ask("history.partitions", ADA).partitions
    assert (main.cluster, main.partition, main.state, main.since) == ("c1", "main", "DOWN", at(50))
    site.feed(
        history.reservation(0, "maint", "INACTIVE", nodes="n[1-2]", start=at(100), end=at(200)),
        history.reservation(0, "gone", "ACTIVE", nodes="n3"),
        history.reservation(9, "gone", "REMOVED"),
    )
    (maint,) = site.ask("history.reservations", ADA).reservations
    assert (maint.reservation, maint.state, maint.nodes) == ("maint", "INACTIVE", "n[1-2]")
    assert (maint.start, maint.end) == (at(100), at(200))
    assert site.ask("history.reservations", ADA, cluster="c2").reservations == ()
    with pytest.raises(UsageError, match="unknown"):
        site.ask("history.partitions", ADA, cluster="c3")


def test_nodes_in_use_are_shown_as_they_are_at_the_last_poll(site: Site) -> None:
    site.feed(
        *(history.node(0, name, "IDLE") for name in ("n1", "n2", "n3")),
        history.node(5, "n4", "DOWN", reason="fan"),
        history.node(0, "n1", "MIXED", cluster="c2"),
    )

    def poll(silent_since: datetime | None = None, **states: tuple[str, ...]) -> None:
        path = node_states_path(site.settings.state_dir, "c1")
        named = {key.replace("_", "+"): names for key, names in states.items()}
        write_status(path, NodeStatesFile(states=named, silent_since=silent_since))

    def states(**request: Any) -> dict[str, str]:
        answer = site.ask("history.nodes", ADA, cluster="c1", **request)
        return {one.node: one.state for one in answer.nodes}

    idle = {"n1": "IDLE", "n2": "IDLE", "n3": "IDLE", "n4": "DOWN"}
    assert states() == idle
    tag = site.ask("history.nodes", ADA, cluster="c1").tag
    poll(MIXED=("n1", "n9"), ALLOCATED_COMPLETING=("n2",), IDLE=("n3", "n4"))
    busy = {"n1": "MIXED", "n2": "ALLOCATED+COMPLETING", "n3": "IDLE", "n4": "DOWN"}
    assert states() == busy, "a state that an event has not told yet comes with the event"
    assert states(states=["MIXED"]) == {"n1": "MIXED"}
    assert states(at=at(10).isoformat()) == idle
    assert not site.ask("history.nodes", ADA, cluster="c1", known=tag).is_known
    counts = site.ask("history.node_counts", ADA).counts
    assert {(one.cluster, one.state): one.nodes for one in counts} == {
        **{("c1", state): 1 for state in busy.values()},
        ("c2", "MIXED"): 1,
    }
    assert site.ask("history.node", ADA, cluster="c1", node="n1").spans[0].state == "MIXED"
    poll(IDLE=("n1", "n2", "n3"), DOWN=("n4",))
    assert states() == idle
    polled = site.ask("history.nodes", ADA, cluster="c1")
    assert polled.silent_since == {}
    poll(silent_since=at(20), IDLE=("n1", "n2", "n3"), DOWN=("n4",))
    silent = site.ask("history.nodes", ADA, cluster="c1", known=polled.tag)
    assert (silent.is_known, silent.silent_since) == (False, {"c1": at(20)})
    assert site.ask("history.nodes", ADA, at=at(10).isoformat()).silent_since == {}
    assert site.ask("history.node_counts", ADA).silent_since == {"c1": at(20)}
    assert states() == idle


def test_private_data_hides_what_is_there(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, private=frozenset({"nodes", "partitions", "reservations"}))
    site.feed(
        history.node(0, "n1", "IDLE"),
        history.event(PARTITION_STATE, 0, PartitionState(partition="main", state="UP")),
        history.reservation(0, "maint", "ACTIVE"),
    )
    assert site.ask("history.partitions", ADA).partitions == ()
    assert site.ask("history.reservations", ADA).reservations == ()
    with pytest.raises(PermissionRefused):
        site.ask("history.node", ADA, node="n1")
    assert site.ask("history.partitions", ROOT).partitions
    assert site.ask("history.reservations", ROOT).reservations
    assert site.ask("history.node", ROOT, node="n1", cluster="c1").spans
    assert site.ask("history.node_counts", ADA).counts == ()
    with pytest.raises(PermissionRefused):
        site.ask("history.node_counts", ADA, cluster="c1")
    assert site.ask("history.node_counts", ROOT).counts
    site.close()


def test_nodes_are_counted_by_state(site: Site) -> None:
    site.feed(
        history.node(0, "n1", "IDLE"),
        history.node(0, "n2", "IDLE"),
        history.node(9, "n2", "DOWN", old_state="IDLE"),
        history.node(9, "n3", "REMOVED"),
        history.node(0, "n1", "IDLE", cluster="c2"),
    )
    found = site.ask("history.node_counts", ADA).counts
    assert {(one.cluster, one.state): one.nodes for one in found} == {
        ("c1", "IDLE"): 1,
        ("c1", "DOWN"): 1,
        ("c2", "IDLE"): 1,
    }
    assert len(site.ask("history.node_counts", ADA, cluster="c2").counts) == 1


def test_what_became_of_a_node(site: Site) -> None:
    site.feed(
        history.node(0, "n1", "IDLE"),
        history.node(100, "n1", "DOWN", old_state="IDLE", reason="no power", reason_user="root"),
        history.node(160, "n1", "IDLE", old_state="DOWN"),
        history.node(200, "n1", "REMOVED", old_state="IDLE"),
        history.node(0, "n2", "DOWN"),
    )
    times = {"since": at(40).isoformat(), "until": at(300).isoformat()}
    answer = site.ask("history.node", ADA, node="n1", cluster="c1", **times)
    assert [(span.state, span.since, span.until) for span in answer.spans] == [
        ("REMOVED", at(200), None),
        ("IDLE", at(160), at(200)),
        ("DOWN", at(100), at(160)),
        ("IDLE", at(0), at(100)),
    ]
    assert (answer.spans[2].reason, answer.spans[2].reason_user) == ("no power", "root")
    assert (answer.known_s, answer.down_s, answer.planned_down_s) == (160, 60, 0)
    assert answer.is_all
    few = site.ask("history.node", ADA, node="n1", limit=1, **times)
    assert ([span.state for span in few.spans], few.is_all) == (["REMOVED"], False)
    assert few.down_s == 60
    assert site.ask("history.node", ADA, node="n9").spans == ()
    for wrong in ("n[1-2]", "", "@all"):
        with pytest.raises(UsageError):
            site.ask("history.node", ADA, node=wrong)
    with pytest.raises(UsageError, match="the end is before the start"):
        site.ask("history.node", ADA, node="n1", since=at(9).isoformat(), until=NOON.isoformat())


def test_a_history_from_before_knows_what_is_there(tmp_path: Path) -> None:
    # Nothing tells again of what has not changed since.
    state = tmp_path / "state"
    state.mkdir()
    path = get_history_path(str(state))
    old = open_database(path, MIGRATIONS[:1])

    with transaction(old):
        for number, shown in enumerate(("UP", "DRAIN")):
            event = history.event(PARTITION_STATE, 0, PartitionState(partition="p", state=shown))
            old.execute(
                "INSERT INTO event (at_us, kind, cluster, subject, failed, key, data) "
                "VALUES (?, ?, ?, ?, 0, ?, ?)",
                (number, event.kind, "c1", "p", event.key, encode_event(event)),
            )
    old.close()
    site = history.make_site(tmp_path)
    (found,) = site.ask("history.partitions", ADA).partitions
    assert (found.partition, found.state) == ("p", "DRAIN")
    site.close()
