"""Assignment of launches to runs, and reports about incomplete launches."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.events import at, us
from harness.jobs import Books, record
from harness.steps import (
    STEP,
    Clocked,
    books,
    done,
    ended,
    exited,
    histories,
    launched,
    lines,
    running,
    task,
)
from steward.core.events import (
    NODE_GAP,
    RUN_END,
    RUN_START,
    STEP_LAUNCH,
    STEP_USAGE,
    Event,
)
from steward.core.sqlite import open_reader
from steward.core.usage import NodeGap, StepUsage
from steward.jobs import Jobs
from steward.slurm.job_states import LOST

__all__ = ["books"]


def test_a_node_tells_only_of_jobs_that_ran_there(books: Clocked) -> None:
    books.take(running(), launched(7, 3, node="n9"), exited(7, 3, node="n9"))
    assert [line.tasks for line in lines(books).values()] == [0]
    (kept,) = Jobs(books.path).list_unattributed()
    assert (kept.usage.node, kept.is_attributed, kept.usage.job_id) == ("n9", False, 7)
    # The list of nodes turns out to be another one.
    books.take(done(nodelist="n[1-9]"))
    assert Jobs(books.path).list_unattributed() == []
    assert lines(books)["0:batch"].doubts == "no-end"


def test_a_launch_before_and_after_a_run_is_none_of_it(books: Clocked) -> None:
    books.take(running(), done(), launched(7, 30), launched(7, -5), launched(8, 3))
    assert [kept.usage.launched_us for kept in Jobs(books.path).list_unattributed()] == [
        us(-5),
        us(3),
        us(30),
    ]
    assert len(Jobs(books.path).list_unattributed(since=at(0), until=at(20))) == 1


def test_of_a_run_that_slurmctld_forgot_nothing_is_counted_to_the_next(books: Clocked) -> None:
    # Killed, it gives the id once more, within the second in which the forgotten run was begun.
    forgotten = (launched(7, 1), exited(7, 1, task(user_us=9_000_000)), ended(7, 1, 2))
    own = (launched(7, 3), exited(7, 3), ended(7, 3, 19))
    books.take(running(), *forgotten)
    assert lines(books)["0:batch"].user_us == 9_000_000
    books.take(*own, done())
    assert lines(books)["0:batch"].user_us == 1_000_000
    assert [kept.usage.launched_us for kept in Jobs(books.path).list_unattributed()] == [us(1)]


def test_a_launch_in_the_second_of_a_requeue_is_of_the_run_before(books: Clocked) -> None:
    books.take(running(), done(state="REQUEUED", end=5))
    books.take(running(submit=5, restarts=1, start=at(5)), launched(7, 4.5), launched(7, 6))
    assert sorted(key for key in lines(books) if key.endswith("batch")) == ["0:batch", "1:batch"]


def test_a_launch_without_an_end_is_said_when_none_will_come(books: Clocked) -> None:
    books.take(running(), launched(7, 3), exited(7, 3))
    books.now = at(21)
    books.take(done())
    assert books.told(STEP_USAGE) == []
    assert 0 < books.tick(100) < 600
    (kept,) = Jobs(books.path).list_unended_launches()
    assert kept.usage.run_end == at(20)
    assert books.told(STEP_USAGE) == []
    books.tick(21 + 601)
    (usage,) = books.told(STEP_USAGE)
    assert (usage.body.end, usage.body.ended_us) == (None, None)
    assert lines(books)["0:batch"].doubts == "no-end"
    books.take(ended(7, 3, 19))
    first, second = books.told(STEP_USAGE)
    assert (second.body.correction, second.key == first.key) == (True, False)
    assert lines(books)["0:batch"].doubts == ""
    assert Jobs(books.path).list_unended_launches() == []
    assert books.tick(5000) == 3600.0


def test_gaps_are_kept(books: Clocked) -> None:
    def gap(seconds: float, node: str) -> Event:
        return Event(
            kind=NODE_GAP,
            cluster="c1",
            key=f"gap:{node}",
            at=at(seconds),
            seen_at=at(seconds),
            source="node",
            body=NodeGap(node=node, why="reboot", since=at(1)),
        )

    books.take(gap(5, "n1"), gap(9, "n2"), gap(5, "n1"))
    found = Jobs(books.path).list_node_losses()
    assert [(gap.node, gap.why, gap.since, gap.at) for gap in found] == [
        ("n1", "reboot", at(1), at(5)),
        ("n2", "reboot", at(1), at(9)),
    ]
    assert [gap.node for gap in Jobs(books.path).list_node_losses(since=at(6))] == ["n2"]


def test_a_run_without_steps_is_missed(books: Clocked) -> None:
    books.take(running(), *STEP, done(), running(8), done(8), record(9, 0, "FAILED", end=9))
    assert [line.job_id for line in Jobs(books.path).list_stepless_runs()] == [8]


def dump(books: Books) -> list[tuple[Any, ...]]:
    connection = open_reader(books.path)
    rows: list[tuple[Any, ...]] = connection.execute("SELECT * FROM line").fetchall()
    rows += connection.execute(
        "SELECT job_id, step, node, launched, submit, restarts, piece, ended, summed, facts "
        "FROM launch ORDER BY 1, 2, 3, 4"
    ).fetchall()
    connection.close()
    return rows


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.data())
def test_facts_in_any_order_give_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    cut = data.draw(st.integers(0, len(events)))
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        found = []
        for name, batches in (
            ("a", [[event] for event in events]),
            ("b", [shuffled[:cut], shuffled[cut:], shuffled[:3]]),
            ("c", [[event] for event in reversed(shuffled)]),
        ):
            books = Clocked(Path(base) / name)
            for batch in batches:
                books.take(*batch)
            books.tick(10_000)
            found.append(dump(books))
            _is_said_once(books)
            books.consumer.close()
        assert found[0] == found[1] == found[2]


def _is_said_once(books: Clocked) -> None:
    """Check one start and one end for a run, and one usage for a launch, before corrections."""
    first = [event for event in books.said if not event.body.correction]
    assert len({event.key for event in books.said}) == len(books.said)
    counts = Counter(
        (event.kind, event.body.restarts, event.key.split(":")[2])
        for event in first
        if event.kind not in (STEP_LAUNCH, STEP_USAGE)
    )
    assert all(count == 1 for count in counts.values())
    rows = open_reader(books.path)
    runs = rows.execute(
        "SELECT restarts, submit_us / 1000000, end_us, start_us, state FROM line WHERE step = ''"
    ).fetchall()
    attributed = rows.execute(
        "SELECT count(*) FROM launch JOIN line USING (cluster, job_id, restarts) "
        "WHERE launch.submit = line.submit_us AND line.step = '' AND line.end_us > 0"
    ).fetchone()[0]
    rows.close()
    for restarts, submit, end_us, start_us, state in runs:
        # If a launch vanished before its end was seen, the end is reported without a time.
        is_over = bool(end_us) or state == LOST
        assert counts[RUN_END, restarts, str(submit)] == (1 if is_over else 0)
        if start_us:
            assert counts[RUN_START, restarts, str(submit)] == 1
    launches = {event.key for event in first if event.kind == STEP_USAGE}
    assert len(launches) >= attributed
    _is_announced_in_order(books)


def _is_announced_in_order(books: Clocked) -> None:
    """Check that a start is reported once before the usage, or withdrawn before the next."""
    announced: dict[tuple[str, str, int], int] = {}
    over: set[tuple[str, str, int]] = set()
    for event in books.said:
        if event.kind not in (STEP_LAUNCH, STEP_USAGE):
            continue
        body: StepUsage = event.body
        launch = (body.step, body.node, body.launched_us)
        if event.kind == STEP_USAGE:
            if launch not in over:
                assert body.announced == (announced.get(launch) == body.restarts)
                assert not body.correction
            over.add(launch)
        elif body.withdrawn:
            assert announced.pop(launch) == body.restarts
        else:
            assert launch not in over
            assert launch not in announced
            announced[launch] = body.restarts


def test_a_step_on_many_nodes_is_one_line(books: Clocked) -> None:
    nodes = [f"m{number:03}" for number in range(40)]
    books.take(running(nodelist="m[000-039]"))
    for number, node in enumerate(nodes):
        tasks = [task(number * 16 + one, 5, max_rss_bytes=1000 + number) for one in range(16)]
        books.take(launched(7, 3, "0", node, tasks=16), exited(7, 3, *tasks, step="0", node=node))
        books.take(ended(7, 3, 6, "0", node, tasks=16, max_rss_bytes=None))
    step = lines(books)["0:0"]
    assert (step.tasks, step.user_us, step.nodes) == (640, 640_000_000, 40)
    assert (step.nodelist, step.max_rss_bytes, step.max_rss_node) == ("m[000-039]", 1039, "m039")
    assert (step.max_rss_task, step.ave_cpu_us, step.state) == (624, 1_500_000, "COMPLETED")
    assert step.doubts == ""
    # Without a cgroup the largest task is the least that its node held.
    assert (step.peak_bytes, step.peak_node) == (1039, "m039")
