"""Actions ``history``: node states, events, jobs on nodes, and visibility."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import history
from harness.events import NOON, at
from harness.site import ADA, BELA, COORDINATOR, ROOT, Site
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import (
    BANK_THRESHOLD,
    CONTROLLER_STATE,
    NODE_STATE,
    RULE_EXECUTION,
    BankThreshold,
    ControllerState,
    RuleExecution,
)
from steward.reports.history.consumer import HistoryConsumer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = history.make_site(tmp_path)
    yield made
    made.close()


def when(seconds: float) -> str:
    return at(seconds).isoformat()


def test_nodes_now_and_then(site: Site) -> None:
    site.feed(
        history.node(0, "n1", "IDLE", source="start"),
        history.node(0, "n2", "IDLE", source="start", partitions=("big", "main"), gpus=2),
        history.node(100, "n1", "DOWN", old_state="IDLE", reason="x", reason_user="root"),
        history.node(200, "n1", "DOWN", old_state="DOWN", reason="y", old_reason="x"),
        history.node(300, "n2", "REMOVED", old_state="IDLE"),
        history.node(0, "m1", "IDLE", source="start", cluster="c2"),
    )
    now = site.ask("history.nodes")
    assert [(one.cluster, one.node, one.state) for one in now.nodes] == [
        ("c1", "n1", "DOWN"),
        ("c2", "m1", "IDLE"),
    ]
    (n1,) = site.ask("history.nodes", nodes="n1").nodes
    assert (n1.since, n1.since_is_known, n1.reason, n1.cpus) == (at(100), True, "y", 4)
    then = site.ask("history.nodes", at=when(150), cluster="c1")
    assert [(one.node, one.state, one.reason) for one in then.nodes] == [
        ("n1", "DOWN", "x"),
        ("n2", "IDLE", ""),
    ]
    assert then.nodes[1].gpus == 2
    assert then.at == at(150)
    assert then.begins == NOON
    assert site.ask("history.nodes", at=when(-1)).nodes == ()
    of_big = site.ask("history.nodes", at=when(1), partitions=["big"])
    assert [one.node for one in of_big.nodes] == ["n2"]
    assert [one.node for one in site.ask("history.nodes", states=["down"]).nodes] == ["n1"]


def test_without_a_sensor_it_is_said(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, sensor=False)
    answer = site.ask("history.nodes")
    assert (answer.nodes, answer.sensor, answer.begins) == ((), False, None)
    events = site.ask("history.events")
    assert not events.sensor
    assert "set 'enabled = true' in [sensor]" in events.empty_reason
    site.close()


def test_an_event_is_kept_once_however_often_it_comes(site: Site) -> None:
    down = history.node(0, "n1", "DOWN", old_state="IDLE", failed=True)
    site.feed(down)
    site.feed(history.node(5, "n1", "IDLE", old_state="DOWN"))
    site.consumer(HistoryConsumer).apply(site.journal[:1], 1, site.append)
    assert [one.body.state for one in site.ask("history.events").events] == ["IDLE", "DOWN"]
    assert site.ask("history.nodes").nodes[0].state == "IDLE"
    assert site.consumer(HistoryConsumer).cursor() == 2


def test_events_are_paged_to_the_end_and_on(site: Site) -> None:
    # Ten in the same second: a position is more than a time.
    site.feed(*(history.node(number // 10, f"n{number}", "IDLE") for number in range(35)))
    seen: list[str] = []
    answer = site.ask("history.events", limit=10)
    newest = answer.newer
    while True:
        seen += [one.body.node for one in answer.events]
        if not answer.older:
            break
        answer = site.ask("history.events", limit=10, before=answer.older)
    assert seen == [f"n{number}" for number in reversed(range(35))]
    later = site.ask("history.events", after=newest)
    assert later.events == ()
    assert "No event of the state history matches" in later.empty_reason
    assert answer.position == 35
    site.feed(history.node(9, "x", "IDLE"))
    assert [one.body.node for one in site.ask("history.events", after=newest).events] == ["x"]
    with pytest.raises(UsageError):
        site.ask("history.events", before="nonsense")


def test_events_of_a_time_and_of_nodes(site: Site) -> None:
    site.feed(
        *(history.node(number, f"n{number % 3}", "IDLE") for number in range(9)),
        history.node(20, "n1", "DOWN", old_state="IDLE", failed=True),
        history.event(CONTROLLER_STATE, 21, ControllerState(up=False)),
    )
    chosen = site.ask("history.events", nodes="n[1-2]", since=when(3), until=when(6)).events
    assert [(one.at, one.body.node) for one in chosen] == [(at(5), "n2"), (at(4), "n1")]
    assert [one.body.node for one in site.ask("history.events", failed=True).events] == ["n1"]
    kinds = site.ask("history.events", kinds=[CONTROLLER_STATE]).events
    assert [one.kind for one in kinds] == [CONTROLLER_STATE]
    with pytest.raises(UsageError, match=r"unknown kind 'job\.end'"):
        site.ask("history.events", kinds=["job.end"])


def test_who_may_see_which_events(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, private=frozenset({"nodes"}))
    threshold: dict[str, Any] = {
        "allocation": 1,
        "kind": "used",
        "value": 80,
        "balance": 1,
        "total": 5,
    }
    ran = RuleExecution(execution=1, rule="r", event="e", action="a", status="succeeded")
    site.feed(
        history.node(0, "n1", "DOWN"),
        history.event(CONTROLLER_STATE, 1, ControllerState(up=True)),
        history.event(RULE_EXECUTION, 2, ran),
        history.event(BANK_THRESHOLD, 3, BankThreshold(account="physics", **threshold)),
        history.event(BANK_THRESHOLD, 4, BankThreshold(account="chemistry", **threshold)),
    )

    def kinds(asker: Any) -> list[str]:
        return [one.kind for one in site.ask("history.events", asker).events]

    assert len(kinds(ROOT)) == 5
    assert kinds(ADA) == [CONTROLLER_STATE]
    assert kinds(COORDINATOR) == [BANK_THRESHOLD, CONTROLLER_STATE]
    assert site.ask("history.nodes", ADA).nodes == ()
    with pytest.raises(PermissionRefused):
        site.ask("history.nodes", ADA, cluster="c1")
    assert NODE_STATE in kinds(ROOT)
    site.close()


def test_what_ran_on_a_node(site: Site) -> None:
    history.add_run(site, 1, 0, 100, nodelist="n[1-3]", nodes=3)
    history.add_run(site, 2, 50, None, nodelist="n2", uid=4002, user="bela")
    history.add_run(site, 3, 120, 130, nodelist="n10")
    history.add_run(site, 4, 200, 300, nodelist="n2", account="chemistry", uid=4002, user="bela")

    def ids(asker: Any = ROOT, /, **request: Any) -> list[int]:
        answer = site.ask("history.node_jobs", asker, **request)
        return [job.job_id for job in answer.jobs]

    assert ids(node="n2") == [2]
    assert ids(node="n2", at=when(60)) == [2, 1]
    assert ids(node="n1", at=when(60)) == [1]
    assert ids(node="n1", at=when(100)) == []
    assert ids(node="n1", at=when(0)) == [1]
    assert ids(node="n2", since=when(0), until=when(400)) == [4, 2, 1]
    assert ids(ADA, node="n2", at=when(60)) == [1]
    assert ids(BELA, node="n2", at=when(60)) == [2]
    assert ids(COORDINATOR, node="n2", since=when(0), until=when(400)) == [2, 1]
    some = site.ask("history.node_jobs", node="n2", since=when(0), until=when(400), limit=2)
    assert ([job.job_id for job in some.jobs], some.total) == ([4, 2], 3)
    answer = site.ask("history.node_jobs", ADA, node="n2")
    assert (answer.is_all, answer.jobs) == (False, ())
    (job,) = site.ask("history.node_jobs", node="n3", at=when(99)).jobs
    assert (job.start, job.end, job.nodes, job.user) == (at(0), at(100), 3, "ada")
    for wrong in ({"node": "n[1-2]"}, {"node": "n1", "until": when(1)}):
        with pytest.raises(UsageError):
            site.ask("history.node_jobs", **wrong)
    with pytest.raises(UsageError):
        site.ask("history.node_jobs", node="n1", cluster="nowhere")


def test_what_is_too_old_is_forgotten_but_not_how_nodes_are(site: Site) -> None:
    site.feed(
        history.node(0, "n1", "IDLE", source="start"),
        history.node(10, "n1", "DOWN", old_state="IDLE"),
        history.node(20, "gone", "IDLE"),
        history.node(30, "gone", "REMOVED", old_state="IDLE"),
        history.reservation(5, "r", "ACTIVE", start=at(5), end=at(6), nodes="n1"),
        history.reservation(6, "r", "REMOVED", old_state="ACTIVE", start=at(5), end=at(6)),
    )
    site.now = NOON + timedelta(days=site.settings.history_days, hours=1)
    assert site.consumer(HistoryConsumer).tick(lambda _new: None) > 0
    answer = site.ask("history.nodes")
    assert [(one.node, one.state, one.since) for one in answer.nodes] == [("n1", "DOWN", at(10))]
    assert answer.begins == at(3600)
    events = site.ask("history.events")
    assert (events.events, events.begins) == ((), None)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
@pytest.mark.parametrize("text", ["0001-01-01", "9999-12-31", "0001-01-01T00:00:00+14:00"])
def test_the_ends_of_the_calendar_are_times_or_wrong_ones(site: Site, text: str, zone: str) -> None:
    site.feed(history.node(0, "n1", "IDLE"))
    requests: list[tuple[str, dict[str, Any]]] = [
        ("history.nodes", {"at": text}),
        ("history.events", {"since": text}),
        ("history.events", {"until": text}),
        ("history.node_jobs", {"node": "n1", "at": text}),
        ("history.node", {"node": "n1", "since": text}),
        ("history.node", {"node": "n1", "until": text}),
    ]
    for name, request in requests:
        with contextlib.suppress(UsageError):
            site.ask(name, zone=zone, **request)
