"""Hostile nodes: false reports harm only jobs on these nodes, and no database."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.events import NOON_US, at
from harness.jobacct import LogSite
from harness.jobs import Books, record
from harness.nodes import line
from harness.nodes import task as task_line
from harness.steps import done, ended, exited, launched, lines_of, running, task
from steward.capture.nodes.aggregation import aggregate_lines, find_flaw
from steward.core.events import STEP_USAGE
from steward.core.records import UsageLine
from steward.core.timestamps import from_micros
from steward.extensions.jobacct_plugins.log.reader import read_lines
from steward.jobs import Jobs

HUGE = 2**63 - 1


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def lines(books: Books) -> dict[str, UsageLine]:
    return {line.step: line for line in lines_of(books)}


@pytest.mark.parametrize(
    "more",
    [
        {"ut": HUGE},
        {"sy": 2**53 + 1},
        {"rss": 2**56 + 1},
        {"in": HUGE},
        {"majf": 2**60},
        {"lost": 2**40},
        {"t": 2**53},
    ],
)
def test_what_no_machine_can_do_is_a_gap(more: dict[str, int]) -> None:
    found = aggregate_lines(
        "c1", "n1", task_line(1, **more) + task_line(2), from_micros(NOON_US)
    ).events
    assert [event.kind for event in found] == ["task.exit", "node.gap"]
    assert (found[1].body.why, found[1].body.lines) == ("garbled", 1)


def test_what_another_receiver_let_through_is_refused() -> None:
    (event,) = aggregate_lines("c1", "n1", line("end", cut=1, csy=1), from_micros(NOON_US)).events
    assert find_flaw(event) == ""
    for forged in ({"cgroup_user_us": HUGE}, {"peak_bytes": HUGE}, {"lost": 2**40}):
        body = msgspec.structs.replace(event.body, **forged)
        assert "out of bounds" in find_flaw(msgspec.structs.replace(event, body=body))


def test_numbers_that_are_stored_already_do_not_take_a_job_its_line(books: Books) -> None:
    """An older version stored such numbers; the run had many nodes."""
    huge: dict[str, Any] = dict.fromkeys(
        ("user_us", "system_us", "read_bytes", "written_bytes", "minor_faults", "major_faults"),
        HUGE,
    )
    tasks = [task(number, max_rss_bytes=HUGE, **huge) for number in range(20)]
    for node in ("n1", "n2"):
        books.take(launched(7, 3, node=node), exited(7, 3, *tasks, node=node))
        books.take(ended(7, 3, 9, node=node, cgroup_user_us=HUGE, cgroup_system_us=HUGE))
    books.take(running())
    books.take(done())
    found = lines(books)
    assert found[""].state == "COMPLETED"
    assert (found[""].user_us, found["batch"].system_us) == (HUGE, HUGE)
    assert all(
        value <= HUGE
        for one in found.values()
        for value in json.loads(msgspec.json.encode(one)).values()
        if isinstance(value, int)
    )


CLAIM = [
    launched(7, 3, "9", "n2"),
    exited(7, 3, task(user_us=3600 * 10**6, system_us=3600 * 10**6), step="9", node="n2"),
    ended(7, 3, 9, "9", "n2"),
]
"""Report of node n2 about a pending job: two hours of CPU time."""


class Log:
    """Job log of these records, read again."""

    def __init__(self, directory: Path) -> None:
        self._site = LogSite(directory)
        self._site.now = at(60)
        self.path = str(self._site.location)
        self._consumer = self._site.open_log()
        self._told = 0

    def lines(self, books: Books) -> dict[str, UsageLine]:
        """Return the lines of all reports so far."""
        self._site.append(books.said[self._told :])
        self._told = len(books.said)
        self._site.feed_one(self._consumer)
        return {line.step: line for line in self._site.lines()}

    def records(self) -> list[dict[str, Any]]:
        """Return its records unchanged."""
        (day,) = Path(self.path).glob("*.jsonl")
        return [json.loads(record) for record in day.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "site")


def test_a_job_that_waits_is_told_of_by_no_node(books: Books, log: Log) -> None:
    books.take(record(7, 0), *CLAIM)
    assert lines(books)[""].user_us is None
    assert books.said == []
    books.take(running(nodelist="n1"))
    books.take(done(nodelist="n1"))
    for found in (lines(books), log.lines(books)):
        assert set(found) == {""}
        assert found[""].user_us is None
    assert len(Jobs(books.path).list_unattributed()) == 1


def test_a_job_that_was_cancelled_while_it_waited_used_nothing(books: Books, log: Log) -> None:
    books.take(record(7, 0), *CLAIM)
    books.take(record(7, 0, "FAILED", seen=21, end=20))
    for found in (lines(books), log.lines(books)):
        assert set(found) == {""}
        assert found[""].user_us is None


def test_what_was_said_of_the_wrong_run_is_taken_back(books: Books, log: Log) -> None:
    """The first run was found to have ended earlier: the node's step belongs to the second run."""
    books.take(running(nodelist="n2"), *CLAIM)
    (said,) = books.said[1:]
    again: dict[str, Any] = {"restarts": 1, "nodelist": "n2", "start": at(2.5)}
    books.take(record(7, 2, "RUNNING", seen=4, **again))
    end = record(7, 0, "REQUEUED", seen=30, end=0.5, start=at(0), nodelist="n2")
    books.take(end)
    books.take(record(7, 2, "COMPLETED", seen=31, end=20, **again))
    usages = [event for event in books.said if event.kind == STEP_USAGE]
    first, withdrawn, second = usages
    assert first.key == said.key
    assert (withdrawn.body.withdrawn, withdrawn.body.correction) == (True, True)
    assert (withdrawn.body.restarts, withdrawn.body.submit) == (0, at(0))
    assert (withdrawn.body.tasks, withdrawn.body.start, withdrawn.body.end) == ((), None, None)
    assert (second.body.restarts, second.body.withdrawn) == (1, False)
    assert len({event.key for event in usages}) == 3
    log.lines(books)
    found = {(line.restarts, line.step): line.user_us for line in read_lines(log.path)}
    assert found == {(0, ""): None, (1, ""): 3600 * 10**6, (1, "9"): 3600 * 10**6}
    assert [one.get("withdrawn") for one in log.records() if one["record"] == "JOB_STEP"] == [
        None,
        True,
        None,
    ]


def test_what_is_said_after_it_was_taken_back_holds(books: Books, log: Log) -> None:
    books.take(running(nodelist="n[1-2]"), *CLAIM)
    # A better source has other nodes, and an even better one these.
    books.take(done(nodelist="n1", whole=True))
    assert [event.body.withdrawn for event in books.said if event.kind == STEP_USAGE] == [
        False,
        True,
    ]
    assert set(log.lines(books)) == {""}
    books.take(done(nodelist="n[1-3]", source="jobcomp"))
    last = books.said[-1]
    assert (last.kind, last.body.withdrawn, last.body.correction) == (STEP_USAGE, False, True)
    assert log.lines(books)["9"].user_us == 3600 * 10**6
    assert len({event.key for event in books.said}) == len(books.said)


def test_another_user_s_step_is_none_of_the_job(books: Books) -> None:
    books.take(running(), launched(7, 3, uid=1001), exited(7, 3), ended(7, 3, 9), done())
    assert set(lines(books)) == {""}
    assert len(Jobs(books.path).list_unattributed()) == 1
